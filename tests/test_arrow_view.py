"""`ds.arrow()`: record batches of the columns that Parquet shards have, in bounded pieces."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rayhs import layout
from rayhs.codec import STATE_DTYPES
from rayhs.dataset import Dataset, open_dataset
from rayhs.errors import ConfigError, FormatError, ObjectNotFound, RayhsError, SampleError
from rayhs.views import arrow as arrow_module
from tests.builders import HIDDEN, LAYERS, Builder
from tests.test_dataset import DTYPES, FORMATS, RecordingStore

MANY = ((3, 4, 1), (3, 2, 1, 5), (6,))


class NamedReads(RecordingStore):
    """Notes the bytes read of each object, too."""

    def __init__(self, uri: str) -> None:
        super().__init__(uri)
        self.bytes_of: dict[str, int] = {}

    def get_ranges(self, name: str, ranges: Any) -> list[memoryview]:
        self.bytes_of[name] = self.bytes_of.get(name, 0) + sum(length for _, length in ranges)
        return super().get_ranges(name, ranges)

    @property
    def of_shards(self) -> int:
        return sum(size for name, size in self.bytes_of.items() if name.startswith("shards/"))


def recorded(folder: Path) -> tuple[NamedReads, Dataset]:
    store, full = NamedReads(str(folder)), open_dataset(str(folder))
    return store, Dataset(store, full.info, full.summary)


@pytest.fixture(params=FORMATS)
def built(request: pytest.FixtureRequest, tmp_path: Path) -> Builder:
    return Builder(tmp_path / "data", shard_format=request.param, groups=MANY, dtype="bfloat16").write()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_table_of_either_format_is_what_the_parquet_shards_hold(tmp_path: Path, dtype: str) -> None:
    tables, datasets = {}, {}
    for shard_format in FORMATS:
        built = Builder(tmp_path / shard_format, shard_format=shard_format, dtype=dtype, groups=MANY).write()
        datasets[shard_format] = open_dataset(str(built.folder))
        tables[shard_format] = datasets[shard_format].arrow().read_all()
    stored = pa.concat_tables(pq.read_table(uri) for uri in datasets["parquet"].shard_uris())
    for table in tables.values():
        same = table.select(stored.column_names)
        assert same.schema.equals(stored.schema.remove_metadata(), check_metadata=True)
        assert same.equals(stored)
    first, second = (table.drop_columns("shard") for table in tables.values())
    assert first.equals(second)


def test_rows_are_the_good_ones_of_the_index_with_their_columns(built: Builder) -> None:
    ds = open_dataset(str(built.folder))
    table = ds.arrow().read_all()
    table.validate(full=True)
    good = ds.index.take(np.flatnonzero(ds.good))
    assert table.select(layout.INDEX_SCHEMA.names).equals(good)
    assert [json.loads(text) for text in table["columns"].to_pylist()] == [s.columns for s in ds]
    assert table["token_ids"].to_pylist() == [s.token_ids.tolist() for s in ds]
    assert table["loss_mask"].to_pylist() == [s.loss_mask.tolist() for s in ds]
    for name in ("hidden_states.0", "hidden_states.4"):
        assert table.schema.field(name).metadata == {b"dtype": b"bfloat16", b"shape": f"tokens,{HIDDEN}".encode()}
    states = np.frombuffer(table["hidden_states.2"][3].as_py(), STATE_DTYPES["bfloat16"]).reshape(-1, HIDDEN)
    assert states.tobytes() == next(s for i, s in enumerate(ds) if i == 3).hidden_states[2].tobytes()


def test_what_is_asked_for(built: Builder) -> None:
    ds = open_dataset(str(built.folder), layers=[0, 2])
    states = ["hidden_states.0", "hidden_states.2"]
    assert ds.arrow().schema.names[-2:] == states
    assert ds.arrow({4, 0}, columns=["sample_id"]).schema.names == ["sample_id", "hidden_states.0", "hidden_states.4"]
    assert ds.arrow(columns=["loss_mask", "index"]).schema.names == ["index", "loss_mask", *states]
    plain = ds.arrow(states=False)
    assert plain.schema.names == [*layout.INDEX_SCHEMA.names, "columns", "token_ids", "loss_mask"]
    assert plain.read_all().num_rows == len(built.good())
    with pytest.raises(ConfigError, match="layer 3 is not stored"):
        ds.arrow([3])
    with pytest.raises(ConfigError, match="column 'topic' is not one of .*'columns'"):
        ds.arrow(columns=["topic"])
    with pytest.raises(ConfigError, match="no column"):
        ds.arrow(columns=[], states=False)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("wanted", ["float32", "float16"])
def test_states_of_another_dtype(tmp_path: Path, dtype: str, wanted: Any) -> None:
    ds = open_dataset(str(Builder(tmp_path, dtype=dtype).write().folder))
    table = ds.arrow([2], dtype=wanted).read_all()
    field = table.schema.field("hidden_states.2")
    assert field.metadata[b"dtype"] == wanted.encode() and table.column_names[-1] == field.name
    for value, sample in zip(table[field.name].to_pylist(), ds, strict=True):
        assert np.array_equal(np.array(value, wanted), sample.hidden_states[2].astype(wanted))
    with pytest.raises(ConfigError, match="dtype='bfloat16' is not one of stored, float32, float16"):
        ds.arrow(dtype="bfloat16")  # type: ignore[arg-type]


@pytest.mark.parametrize("shard_format", FORMATS)
def test_only_what_is_asked_for_is_read(tmp_path: Path, shard_format: str) -> None:
    built = Builder(tmp_path, shard_format=shard_format, groups=MANY, hidden=2048, dtype="float32").write()
    tokens = sum(len(row.token_ids) for row in built.good())
    layer = tokens * 2048 * 4
    read = {}
    for name, options in {"none": {"states": False}, "one": {"layers": [2]}, "all": {}}.items():
        store, ds = recorded(tmp_path)
        ds.arrow(**options).read_all()  # type: ignore[arg-type]
        read[name] = store.of_shards
    assert 0 <= read["one"] - read["none"] - layer < 0.02 * layer
    assert 0 <= read["all"] - read["none"] - 3 * layer < 0.06 * layer
    store, ds = recorded(tmp_path)
    assert ds.arrow(columns=["sample_id", "columns"], states=False).read_all().num_rows == len(built.good())
    assert store.of_shards == 0


def test_batches_are_bounded_and_read_when_they_are_asked_for(built: Builder, monkeypatch: pytest.MonkeyPatch) -> None:
    most = 10 * (len(LAYERS) * HIDDEN * 2 + 5)
    monkeypatch.setattr(arrow_module, "READ_BYTES", most)
    store, ds = recorded(built.folder)
    reader = ds.arrow()
    assert store.of_shards == 0
    batch = reader.read_next_batch()
    read = {name for name in store.bytes_of if name.startswith("shards/")}
    assert batch.num_rows >= 1 and 0 < len(read) < 6 < len(ds.shard_uris())
    sizes = [sum(map(len, some["token_ids"].to_pylist())) for some in reader]
    assert all(size <= 10 for size in sizes) and max(sizes) > 5
    assert all(len(set(some["shard"].to_pylist())) == 1 for some in ds.arrow())
    assert ds.arrow().read_all().num_rows == len(built.good())


def test_a_sample_larger_than_a_batch_is_one_by_itself(built: Builder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrow_module, "READ_BYTES", 1)
    ds = open_dataset(str(built.folder))
    assert [batch["index"].to_pylist() for batch in ds.arrow()] == [[row.index] for row in built.good()]


def test_bytes_that_no_arrow_value_can_hold_are_refused(built: Builder, monkeypatch: pytest.MonkeyPatch) -> None:
    from rayhs import parquet_codec

    monkeypatch.setattr(parquet_codec, "_MAX_VALUE_BYTES", HIDDEN * 2)
    with pytest.raises(SampleError, match=r"sample row-0: .* 2 GiB a value"):
        open_dataset(str(built.folder)).arrow().read_all()


def test_damage_is_an_error_in_its_turn(built: Builder) -> None:
    ds = open_dataset(str(built.folder))
    path = Path(ds.shard_uris()[1])
    data = path.read_bytes()
    path.write_bytes(data[:-1])
    reader = ds.arrow()
    assert reader.read_next_batch()["index"].to_pylist() == [0, 1, 2]
    with pytest.raises(FormatError, match=path.name) as error:
        reader.read_next_batch()
    assert "\n" not in str(error.value)
    path.unlink()
    with pytest.raises(ObjectNotFound, match=rf"{path.name}: the shard is missing; run rayhs verify"):
        open_dataset(str(built.folder)).arrow().read_all()


def test_an_index_that_names_a_shard_of_no_plan_is_an_error_line(tmp_path: Path) -> None:
    built = Builder(tmp_path).write()
    rows = built.index_rows(0)
    for at in (0, 1, 2):
        rows[at]["shard"] = "shards/00009-0000-0123456789abcdef.safetensors"
    built.write_index(0, rows)
    with pytest.raises(RayhsError, match="00009-0000"):
        open_dataset(str(tmp_path)).arrow(columns=["columns"], states=False).read_all()
    for at in (0, 1, 2):
        rows[at]["shard"] = "shards/00001-0001-0123456789abcdef.safetensors"
    built.write_index(0, rows)
    with pytest.raises(RayhsError, match="00001-0001"):
        open_dataset(str(tmp_path)).arrow(columns=["columns"], states=False).read_all()


def test_a_dataset_without_good_samples(tmp_path: Path) -> None:
    built = Builder(tmp_path, groups=((1,),))
    for row in built.all_rows():
        row.status, row.reason = "failed", "not finite: layer 2"
    (tmp_path / "shards").mkdir()
    ds = open_dataset(str(built.write().folder))
    table = ds.arrow().read_all()
    assert table.num_rows == 0 and "hidden_states.2" in table.column_names and ds.shard_uris() == []


def test_committed_shards_of_an_unfinished_dataset(tmp_path: Path) -> None:
    missing = layout.ShardId(0, 1)
    built = Builder(tmp_path, finished=False, uncommitted=frozenset({missing})).write()
    built.put(layout.object_name(missing, "f" * 16, "safetensors"), b"half written")
    ds = open_dataset(str(tmp_path), partial=True)
    assert [Path(uri).name[:10] for uri in ds.shard_uris()] == ["00000-0000", "00001-0000", "00001-0001", "00001-0002"]
    assert ds.arrow(states=False).read_all()["index"].to_pylist() == ds.index["index"].to_numpy()[ds.good].tolist()


def test_one_layer_as_a_number(tmp_path: Path) -> None:
    dataset = open_dataset(str(Builder(tmp_path).write().folder))
    assert dataset.arrow(layers=2).read_all().equals(dataset.arrow(layers=[2]).read_all())
