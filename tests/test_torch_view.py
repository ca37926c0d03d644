"""`ds.torch(...)`: what a DataLoader gets, in every process."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rayhs
from rayhs.dataset import Dataset, open_dataset
from rayhs.errors import ConfigError
from tests.builders import HIDDEN, LAYERS, Builder
from tests.test_dataset import RecordingStore

torch = pytest.importorskip("torch")

FORMATS = ("safetensors", "parquet")


@pytest.fixture(params=FORMATS)
def built(request: pytest.FixtureRequest, tmp_path: Path) -> Builder:
    return Builder(tmp_path / "data", shard_format=request.param, dtype="bfloat16").write()


@pytest.fixture
def ds(built: Builder) -> Dataset:
    return open_dataset(str(built.folder))


def joined(items: list[dict[str, Any]], name: str) -> Any:
    return torch.cat([item[name] for item in items])


def test_items_are_the_good_samples_in_order(built: Builder, ds: Dataset) -> None:
    view = ds.torch()
    assert len(view) == len(built.good())
    for row, item in zip(built.good(), [view[i] for i in range(len(view))], strict=True):
        sample = ds[row.index]
        assert (item["sample_id"], item["index"]) == (row.sample_id, row.index)
        assert item["token_ids"].tolist() == row.token_ids.tolist() and item["token_ids"].dtype == torch.int64
        assert item["loss_mask"].tolist() == row.loss_mask.astype(bool).tolist()
        assert item["position_ids"].tolist() == list(range(len(row.token_ids)))
        assert item["hidden_states"].shape == (len(row.token_ids), len(LAYERS), HIDDEN)
        assert torch.equal(item["hidden_states"], sample.torch())
    assert torch.equal(view[-1]["hidden_states"], item["hidden_states"])
    for wrong in (len(view), -len(view) - 1):
        with pytest.raises(IndexError):
            view[wrong]


def test_one_layer_and_a_list_of_layers(ds: Dataset) -> None:
    whole = ds.torch()[1]["hidden_states"]
    assert torch.equal(ds.torch(layers=2)[1]["hidden_states"], whole[:, 1])
    assert torch.equal(ds.torch(layers=[0, 4])[1]["hidden_states"], whole[:, [0, 2]])
    assert torch.equal(ds.torch(layers={4, 0})[1]["hidden_states"], whole[:, [0, 2]])
    assert torch.equal(ds.torch(layers=np.int64(2))[1]["hidden_states"], whole[:, 1])
    assert torch.equal(ds.torch(layers=np.array([0, 4]))[1]["hidden_states"], whole[:, [0, 2]])
    assert torch.equal(ds.torch(layers=[2])[1]["hidden_states"], whole[:, [1]])
    with pytest.raises(ConfigError, match="layer 3 is not stored"):
        ds.torch(layers=3)
    with pytest.raises(ConfigError, match="layer '2' is not stored"):
        ds.torch(layers="2")  # type: ignore[arg-type]


def test_layers_out_of_order_are_refused(ds: Dataset) -> None:
    """They come ascending, and nobody who stacks them would see that they were swapped."""
    for wrong in ([4, 0], (0, 4, 0), np.array([2, 0])):
        for ask in (ds.with_layers, ds.torch, ds.stream, ds.arrow):
            with pytest.raises(ConfigError, match=r"samples have them ascending, each once; give \[0"):
                ask(wrong)
        with pytest.raises(ConfigError, match="ascending"):
            open_dataset(ds.uri, layers=wrong)


def test_what_is_no_item_is_refused(ds: Dataset) -> None:
    view = ds.torch()
    assert view[np.int64(1)]["index"] == view[torch.tensor(1)]["index"] == 1
    for wrong in (slice(1, 3), 1.0, "1"):
        with pytest.raises(TypeError, match="an item is a whole number"):
            view[wrong]  # type: ignore[index]
    for window in (2.5, 0, -1, "3"):
        with pytest.raises(ConfigError, match="window"):
            ds.torch(window=window)  # type: ignore[arg-type]


def test_views_without_layers(ds: Dataset) -> None:
    bare = ds.tokens_only()
    assert [sample.index for sample in bare.tokens_only().stream()] == [sample.index for sample in ds]
    for ask in (bare.torch, bare.stream().torch):
        with pytest.raises(ConfigError, match="no layer is read"):
            ask()
    with pytest.raises(KeyError, match="no layer was read"):
        bare[0].torch()


@pytest.mark.parametrize("window", [1, 3, 4, 1000])
def test_windows_cut_every_sample_whole(built: Builder, ds: Dataset, window: int) -> None:
    view = ds.torch(window=window)
    items = [view[i] for i in range(len(view))]
    assert max(len(item["token_ids"]) for item in items) <= window
    for row in built.good():
        own = [item for item in items if item["index"] == row.index]
        assert len(own) == -(-len(row.token_ids) // window)
        assert joined(own, "token_ids").tolist() == row.token_ids.tolist()
        assert joined(own, "position_ids").tolist() == list(range(len(row.token_ids)))
        assert torch.equal(joined(own, "hidden_states"), ds[row.index].torch())


def test_selections(built: Builder, ds: Dataset) -> None:
    whole, last, loss = ds.torch(), ds.torch(select="last"), ds.torch(select="loss")
    assert len(whole) == len(last) == len(loss)
    for i, row in enumerate(built.good()):
        states, mask = whole[i]["hidden_states"], whole[i]["loss_mask"]
        assert torch.equal(last[i]["hidden_states"], states[-1:])
        assert last[i]["position_ids"].tolist() == [len(row.token_ids) - 1]
        assert torch.equal(loss[i]["hidden_states"], states[mask])
        assert loss[i]["token_ids"].tolist() == row.token_ids[row.loss_mask == 1].tolist()
    windows = ds.torch(window=2, select="loss")
    kept = joined([windows[i] for i in range(len(windows))], "token_ids").tolist()
    assert kept == [t for row in built.good() for t in row.token_ids[row.loss_mask == 1].tolist()]
    for wrong in ({"select": "first"}, {"window": 0}, {"window": 4, "select": "last"}):
        with pytest.raises(ConfigError):
            ds.torch(**wrong)  # type: ignore[arg-type]


def test_only_the_bytes_of_a_window_are_read(tmp_path: Path) -> None:
    built = Builder(tmp_path, dtype="float32").write()
    store, full = RecordingStore(str(tmp_path)), open_dataset(str(tmp_path))
    view = Dataset(store, full.info, full.summary).torch(layers=2, select="last")
    view[0]
    headers = len(store.reads)
    assert len(built.good()[1].token_ids) > 1
    view[1]
    (ranges,) = store.reads[headers:]
    assert [length for _, length in ranges] == [HIDDEN * 4, 4, 1]


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (2, 2), (3, 2), (0, 10**6)])
def test_tokens_that_are_not_there(ds: Dataset, start: int, stop: int) -> None:
    with pytest.raises(IndexError, match="sample row-0"):
        ds.read(0, start, stop)


def test_a_batch_is_padded_behind(ds: Dataset) -> None:
    view = ds.torch()
    items = [view[i] for i in (2, 0, 1)]
    batch = rayhs.pad_collate(items)
    lengths = [len(item["token_ids"]) for item in items]
    longest = max(lengths)
    assert batch["hidden_states"].shape == (3, longest, len(LAYERS), HIDDEN)
    assert batch["attention_mask"].sum(1).tolist() == lengths
    for i, item in enumerate(items):
        for name in ("hidden_states", "token_ids", "loss_mask", "position_ids"):
            assert torch.equal(batch[name][i, : lengths[i]], item[name])
            assert not batch[name][i, lengths[i] :].any()
    assert batch["sample_id"] == [item["sample_id"] for item in items]


def seen(loader: Any) -> list[str]:
    return [name for batch in loader for name in batch["sample_id"]]


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_loader_workers_hand_out_every_sample_once(tmp_path: Path, start: str) -> None:
    built = Builder(tmp_path, dtype="bfloat16").write()
    ds = open_dataset(str(tmp_path))
    loader = torch.utils.data.DataLoader(
        ds.torch(),
        batch_size=3,
        shuffle=True,
        num_workers=2,
        collate_fn=rayhs.pad_collate,
        multiprocessing_context=start,
    )
    batches = list(loader)
    assert sorted(seen(batches)) == sorted(row.sample_id for row in built.good())
    for batch in batches:
        for i, name in enumerate(batch["sample_id"]):
            got = batch["hidden_states"][i][batch["attention_mask"][i]]
            assert torch.equal(got, ds.by_id(name).torch())


def test_ranks_share_the_samples(built: Builder, ds: Dataset) -> None:
    view, names = ds.torch(), []
    for rank in range(2):
        sampler = torch.utils.data.DistributedSampler(view, num_replicas=2, rank=rank, shuffle=True, drop_last=False)
        names.append(seen(torch.utils.data.DataLoader(view, 2, sampler=sampler, collate_fn=rayhs.pad_collate)))
    assert len(names[0]) == len(names[1]) and set(names[0] + names[1]) == {row.sample_id for row in built.good()}


def test_a_dataset_without_good_samples(tmp_path: Path) -> None:
    built = Builder(tmp_path, groups=((1,),))
    for row in built.all_rows():
        row.status, row.reason = "failed", "not finite: layer 2"
    (tmp_path / "shards").mkdir()
    view = open_dataset(str(built.write().folder)).torch()
    assert len(view) == 0
    with pytest.raises(IndexError):
        view[0]


@pytest.mark.parametrize("change", [lambda view: view, lambda view: pickle.loads(pickle.dumps(view))])
def test_damage_is_an_error_in_its_turn(built: Builder, ds: Dataset, change: Callable[[Any], Any]) -> None:
    view = change(ds.torch())
    shard = built.folder / ds.index["shard"][0].as_py()
    shard.write_bytes(shard.read_bytes()[:-7])
    with pytest.raises(rayhs.RayhsError, match="shards/00000-0000"):
        view[0]
    assert torch.isfinite(view[len(view) - 1]["hidden_states"]).all()
