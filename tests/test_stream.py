"""`ds.stream(...)`: every sample once, in an order that a state can take up again, in large reads."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rayhs
from rayhs.dataset import Dataset, open_dataset
from rayhs.errors import ConfigError
from rayhs.views import stream as stream_module
from rayhs.views.stream import Stream
from tests.builders import HIDDEN, LAYERS, Builder
from tests.test_dataset import RecordingStore

FORMATS = ("safetensors", "parquet")
MANY = ((3, 4, 1), (3, 2, 1, 5), (6,))


@pytest.fixture(scope="module", params=FORMATS)
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Builder:
    folder = tmp_path_factory.mktemp("data")
    return Builder(folder, shard_format=request.param, dtype="bfloat16", groups=MANY).write()


@pytest.fixture(scope="module")
def ds(built: Builder) -> Dataset:
    return open_dataset(str(built.folder))


@pytest.fixture(autouse=True)
def small_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_module, "READ_BYTES", 20 * len(LAYERS) * HIDDEN * 2)


def indices(stream: Stream) -> list[int]:
    return [sample.index for sample in stream]


def test_samples_come_as_they_are_read_one_by_one(built: Builder, ds: Dataset) -> None:
    samples = list(ds.stream())
    assert [sample.sample_id for sample in samples] == [row.sample_id for row in built.good()]
    for sample in samples:
        want = ds[sample.index]
        assert np.array_equal(sample.token_ids, want.token_ids) and np.array_equal(sample.loss_mask, want.loss_mask)
        assert sample.columns == want.columns
        for layer in LAYERS:
            assert sample.hidden_states[layer].tobytes() == want.hidden_states[layer].tobytes()
    assert list(next(iter(ds.stream(layers=[2]))).hidden_states) == [2]
    numbers = np.arange(5)
    state = ds.stream(shuffle_buffer=numbers[3], seed=numbers[1], shard=(numbers[0], numbers[2])).state_dict()
    ds.stream(shuffle_buffer=3, seed=1, shard=(0, 2)).load_state_dict(json.loads(json.dumps(state)))


@settings(max_examples=30)
@given(buffer=st.integers(0, 40), seed=st.integers(0, 9), world=st.integers(1, 6), stop=st.integers(0, 30))
def test_any_stream_goes_on_where_it_was(ds: Dataset, buffer: int, seed: int, world: int, stop: int) -> None:
    """Each sample once an epoch over all parts, and from any state the same rest."""
    everything: list[int] = []
    for rank in range(world):

        def made(rank: int = rank) -> Stream:
            return ds.stream(shuffle_buffer=buffer, seed=seed, shard=(rank, world))

        first, second = indices(stream := made()), indices(stream)
        assert len(first) == len(made()) and sorted(first) == sorted(second)
        going = made()
        begun = [sample.index for _, sample in zip(range(stop), going, strict=False)]
        state = json.loads(json.dumps(going.state_dict()))
        again = made()
        again.load_state_dict(state)
        rest = indices(again)
        assert (begun + rest == first) if stop <= len(first) else (begun, rest) == (first, second)
        everything += first
    assert Counter(everything) == Counter(np.flatnonzero(np.asarray(ds.index["status"]) == "ok").tolist())


def test_epochs_have_orders_of_their_own(ds: Dataset) -> None:
    stream = ds.stream(shuffle_buffer=5, seed=1)
    epochs = [indices(stream) for _ in range(3)]
    assert len({tuple(epoch) for epoch in epochs}) == 3
    stream.set_epoch(1)
    assert indices(stream) == epochs[1]
    assert indices(ds.stream(shuffle_buffer=5, seed=2)) != epochs[0]
    # Not merely the shards: neighbours are torn apart.
    assert any(abs(a - b) > 6 for a, b in zip(epochs[0], epochs[0][1:], strict=False))


def test_an_order_is_the_same_in_every_version(ds: Dataset) -> None:
    """What was written down as `state_dict` goes on in a later rayhs."""
    orders = {
        (5, 1, (0, 1), 1): [12, 3, 2, 5, 14, 1, 16, 15, 18, 6, 8, 0, 9, 20, 11, 10, 23, 21, 19, 24, 17, 13, 22],
        (3, 0, (1, 2), 0): [12, 3, 6, 5, 15, 11, 16, 17, 14, 18],
        (40, 7, (0, 1), 0): [22, 13, 12, 5, 23, 19, 20, 0, 15, 9, 21, 11, 10, 1, 17, 16, 18, 3, 24, 8, 2, 14, 6],
    }
    for (buffer, seed, shard, epoch), order in orders.items():
        stream = ds.stream(shuffle_buffer=buffer, seed=seed, shard=shard)
        stream.set_epoch(epoch)
        assert indices(stream) == order


def test_leaving_an_epoch_and_coming_back(ds: Dataset) -> None:
    stream = ds.stream(shuffle_buffer=3)
    whole = indices(ds.stream(shuffle_buffer=3))
    begun = []
    for sample in stream:
        begun.append(sample.index)
        if len(begun) == 7:
            break
    assert begun + indices(stream) == whole


def test_a_state_of_another_order_is_refused(ds: Dataset) -> None:
    state = ds.stream(shuffle_buffer=3).state_dict()
    for other in ({"shuffle_buffer": 4}, {"shuffle_buffer": 3, "seed": 1}, {"shuffle_buffer": 3, "shard": (0, 2)}):
        with pytest.raises(ConfigError, match="the state is of a stream with"):
            ds.stream(**other).load_state_dict(state)  # type: ignore[arg-type]
    for wrong in (
        {"shuffle_buffer": -1}, {"shuffle_buffer": 1.5}, {"shard": (2, 2)}, {"shard": (-1, 2)}, {"shard": (0, 2.0)},
        {"shard": 0}, {"shard": None}, {"shard": (0,)}, {"layers": 2.0},
        {"seed": -1}, {"layers": [3]},
    ):  # fmt: skip
        with pytest.raises(ConfigError):
            ds.stream(**wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="epoch -1"):
        ds.stream().set_epoch(-1)


def test_a_state_of_other_samples_or_of_none_is_refused(tmp_path: Path, ds: Dataset) -> None:
    groups = {"fewer": MANY[:2], "longer": (*MANY[:2], (7,)), "cut otherwise": ((7, 1), *MANY[1:])}
    state = ds.stream(shuffle_buffer=3).state_dict()
    for name, sizes in groups.items():
        other = open_dataset(str(Builder(tmp_path / name, groups=sizes).write().folder))
        with pytest.raises(ConfigError, match="the state is of a stream with"):
            other.stream(shuffle_buffer=3).load_state_dict(state)
    for wrong in (
        None, [], {}, {"epoch": 0}, {**state, "done": -1}, {**state, "done": 999}, {**state, "done": "3"},
        {**state, "epoch": -1}, {**state, "epoch": None}, {**state, "more": 1},
    ):  # fmt: skip
        stream = ds.stream(shuffle_buffer=3)
        with pytest.raises(ConfigError, match="state"):
            stream.load_state_dict(wrong)
        assert stream.state_dict() == state
    ds.with_layers([2]).stream(shuffle_buffer=3).load_state_dict(state)  # the same samples


def test_samples_side_by_side_are_read_in_one_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_module, "READ_BYTES", 2**20)
    built = Builder(tmp_path, groups=MANY).write()
    store, full = RecordingStore(str(tmp_path)), open_dataset(str(tmp_path))
    ds = Dataset(store, full.info, full.summary, [2])
    shards = {name for name in ds.index["shard"].to_pylist() if name}
    for name in shards:
        ds[ds.index["shard"].to_pylist().index(name)]  # reads the shard's header
    store.reads.clear()
    assert len(list(ds.stream())) == len(built.good())
    assert len(store.reads) == len(shards)
    read = sum(length for ranges in store.reads for _, length in ranges)
    tokens = sum(len(row.token_ids) for row in built.good())
    assert read == tokens * (HIDDEN * 4 + 4 + 1)


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
def test_samples_that_wait_hold_no_memory_of_others(tmp_path: Path, dtype: str) -> None:
    Builder(tmp_path, dtype=dtype, groups=MANY).write()
    for sample in open_dataset(str(tmp_path)).stream(shuffle_buffer=4):
        for array in (*sample.hidden_states.values(), sample.token_ids, sample.loss_mask):
            assert array.base is None or array.base.nbytes <= array.nbytes


def test_damage_is_an_error_in_its_turn_and_can_be_tried_again(tmp_path: Path) -> None:
    built = Builder(tmp_path, groups=MANY).write()
    ds = open_dataset(str(tmp_path))
    path = tmp_path / ds.index["shard"][3].as_py()
    data = path.read_bytes()
    path.write_bytes(data[:-1])
    stream, got = ds.stream(), []
    with pytest.raises(rayhs.RayhsError, match=path.name):
        got.extend(sample.index for sample in stream)
    stream, got = ds.stream(), []
    try:
        for sample in stream:
            got.append(sample.index)
    except rayhs.RayhsError:
        path.write_bytes(data)
    assert 0 < len(got) < len(built.good())
    assert got + indices(stream) == [row.index for row in built.good()]


def test_a_dataset_without_good_samples(tmp_path: Path) -> None:
    built = Builder(tmp_path, groups=((1,),))
    for row in built.all_rows():
        row.status, row.reason = "failed", "not finite: layer 2"
    (tmp_path / "shards").mkdir()
    ds = open_dataset(str(built.write().folder))
    for buffer in (0, 3):
        stream = ds.stream(shuffle_buffer=buffer)
        assert indices(stream) == [] and len(stream) == 0


def seen(loader: Any) -> list[int]:
    return [int(index) for batch in loader for index in batch["index"]]


@pytest.mark.parametrize("start", [None, "fork", "spawn"])
def test_loader_workers_share_the_stream(tmp_path: Path, start: str | None) -> None:
    torch = pytest.importorskip("torch")
    built = Builder(tmp_path, groups=MANY).write()
    view = open_dataset(str(tmp_path)).stream(shuffle_buffer=4).torch()
    options = {"num_workers": 2, "multiprocessing_context": start} if start else {}
    loader = torch.utils.data.DataLoader(view, batch_size=3, collate_fn=rayhs.pad_collate, **options)
    first = seen(loader)
    assert sorted(first) == sorted(row.index for row in built.good())
    if start == "fork":  # quicker than spawn, and no other to the view
        view.set_epoch(1)
        second = seen(loader)
        assert sorted(second) == sorted(first) and second != first


def loader_of(view: Any, **options: Any) -> Any:
    torch = pytest.importorskip("torch")
    workers = {"num_workers": 2, "multiprocessing_context": "fork"}
    return torch.utils.data.DataLoader(view, batch_size=None, **workers, **options)


def test_a_begun_stream_is_not_shared_by_workers(ds: Dataset) -> None:
    """They would begin it again, whatever of it was done."""
    view = ds.stream(shuffle_buffer=4).torch()
    begun = [item["index"] for _, item in zip(range(10), view, strict=False)]
    other = ds.stream(shuffle_buffer=4).torch()
    other.load_state_dict(view.state_dict())
    for one in (view, other):
        with pytest.raises(ConfigError, match="10 samples of its epoch"):
            list(loader_of(one))
    with pytest.raises(ConfigError, match="1 samples of its epoch"):
        next(iter(stream := ds.stream()))
        stream.split(0, 2)
    assert len(begun) == 10


def test_the_main_process_does_not_know_where_workers_are(ds: Dataset) -> None:
    view = ds.stream(shuffle_buffer=4).torch()
    items = iter(loader_of(view))
    next(items)
    with pytest.raises(ConfigError, match="StatefulDataLoader"):
        view.state_dict()
    del items
    next(iter(view))
    assert view.state_dict()["done"] == 1


def test_workers_that_stay_begin_every_epoch_whole(built: Builder, ds: Dataset) -> None:
    """Also where the loader left one early, whose prefetched rest nobody gets, and from the epoch that is set."""
    everything = sorted(row.index for row in built.good())
    view = ds.stream(shuffle_buffer=4).torch()
    loader = loader_of(view, persistent_workers=True)
    epochs = [[item["index"] for item in loader] for _ in range(2)]
    assert [item["index"] for _, item in zip(range(5), loader, strict=False)] not in (epochs[0][:5], epochs[1][:5])
    epochs.append([item["index"] for item in loader])
    assert [sorted(epoch) for epoch in epochs] == [everything] * 3
    assert len(set(map(tuple, epochs))) == 3
    view.set_epoch(1)
    assert [item["index"] for item in loader] == epochs[1]
    view.set_epoch(0)
    assert [item["index"] for item in loader] == epochs[0]
    assert [item["index"] for item in loader] == epochs[1]


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("buffer", [0, 4])
def test_the_loader_of_torchdata_goes_on(ds: Dataset, buffer: int, persistent: bool) -> None:
    """From every batch, also where one worker is at its end, which has not begun another epoch."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    def made() -> Any:
        options = {"num_workers": 2, "multiprocessing_context": "fork", "collate_fn": rayhs.pad_collate}
        view = ds.stream(layers=2, shuffle_buffer=buffer).torch(2)
        return StatefulDataLoader(view, batch_size=2, persistent_workers=persistent, **options)

    whole = [batch["index"] for batch in made()]
    assert len(whole) > 10
    for stop in range(len(whole) + 1):
        going, again = made(), made()
        begun = [batch["index"] for _, batch in zip(range(stop), going, strict=False)]
        again.load_state_dict(going.state_dict())
        assert begun + [batch["index"] for batch in again] == whole, stop
        if persistent:
            following = seen(again)
            assert sorted(following) == sorted(index for batch in whole for index in batch)
            assert buffer == 0 or following != [index for batch in whole for index in batch]


def test_an_unfinished_stream_is_silent_at_the_interpreters_end(built: Builder) -> None:
    script = f"import rayhs; items = iter(rayhs.open({str(built.folder)!r}).stream()); print(next(items).index)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert (done.stdout, done.stderr) == ("0\n", "")


def test_items_of_a_stream(ds: Dataset) -> None:
    pytest.importorskip("torch")
    for stream_item, item in zip(ds.stream().torch(2), ds.torch(layers=2), strict=True):
        assert stream_item["hidden_states"].equal(item["hidden_states"])
        assert stream_item["sample_id"] == item["sample_id"]
    for select in ("loss", "last"):
        for stream_item, item in zip(ds.stream().torch(select=select), ds.torch(select=select), strict=True):
            for name in ("hidden_states", "token_ids", "position_ids"):
                assert stream_item[name].equal(item[name])
    view = ds.stream(shuffle_buffer=3).torch()
    whole = [item["index"] for item in view]
    view.set_epoch(0)
    rest = iter(view)
    begun = [next(rest)["index"] for _ in range(5)]
    state, other = view.state_dict(), ds.stream(shuffle_buffer=3).torch()
    other.load_state_dict(state)
    assert begun + [item["index"] for item in other] == whole
    with pytest.raises(ConfigError):
        ds.stream().torch(select="first")  # type: ignore[arg-type]
