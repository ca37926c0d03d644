"""Reading a dataset back: by position, by id, one layer, iterating, unfinished, damaged, blocked imports."""

from __future__ import annotations

import os
import pickle
import struct
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import rayhs
from rayhs import layout
from rayhs.dataset import Dataset, open_dataset
from rayhs.errors import (
    ConfigError,
    FormatError,
    IncompleteDataset,
    ObjectNotFound,
    RayhsError,
    SampleError,
)
from rayhs.fp8 import dequantize
from rayhs.layout import ShardId
from rayhs.store.local import LocalFolderStore
from tests.builders import FAILED, HIDDEN, LAYERS, REJECTED, Builder, Row

FORMATS = ("safetensors", "parquet")
DTYPES = ("float32", "float16", "bfloat16", "float8_e4m3fn")
both_formats = pytest.mark.parametrize("shard_format", FORMATS)


@pytest.fixture(params=FORMATS)
def built(request: pytest.FixtureRequest, tmp_path: Path) -> Builder:
    return Builder(tmp_path / "data", shard_format=request.param).write()


def same(a: np.ndarray, b: np.ndarray) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


@both_formats
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_sample_comes_back_bit_by_bit(tmp_path: Path, shard_format: str, dtype: str) -> None:
    built = Builder(tmp_path, shard_format=shard_format, dtype=dtype).write()
    ds = rayhs.open(str(tmp_path))
    assert len(ds) == len(built.all_rows())
    assert ds.layers == LAYERS and ds.hidden_size == HIDDEN and ds.dtype == dtype and ds.model == "tests/random"
    for row in built.good():
        for sample in (ds[row.index], ds[row.index - len(ds)], ds.by_id(row.sample_id)):
            assert sample.sample_id == row.sample_id and sample.index == row.index and sample.status == "ok"
            assert same(sample.token_ids, row.token_ids) and same(sample.loss_mask, row.loss_mask)
            assert list(sample.hidden_states) == list(LAYERS)
            assert all(same(sample.hidden_states[k], engine_states(row, k)) for k in LAYERS)
        assert ds[row.index].columns == {"topic": f"topic {row.index}"}


def engine_states(row: Row, layer: int) -> np.ndarray:
    """The states of a row as a reader gets them."""
    return dequantize(row.states[layer], row.scales[layer], "bfloat16") if row.scales else row.states[layer]


@both_formats
def test_float8_states_and_their_scales_as_they_are_stored(tmp_path: Path, shard_format: str) -> None:
    row = Builder(tmp_path, shard_format=shard_format, dtype="float8_e4m3fn").write().good()[0]
    sample = rayhs.open(str(tmp_path), layers=[2])[row.index]
    states, scales = sample.quantized(2)
    assert same(states, row.states[2]) and same(scales, row.scales[2])
    with pytest.raises(KeyError, match="layer 0 was not read"):
        sample.quantized(0)
    Builder(tmp_path / "plain", shard_format=shard_format).write()
    with pytest.raises(KeyError, match="not stored in float8"):
        rayhs.open(str(tmp_path / "plain"))[0].quantized(2)


@both_formats
@pytest.mark.parametrize("dtype", DTYPES)
def test_torch_tensors_have_the_same_bytes(tmp_path: Path, shard_format: str, dtype: str) -> None:
    import torch

    row = Builder(tmp_path, shard_format=shard_format, dtype=dtype).write().good()[0]
    sample = rayhs.open(str(tmp_path))[row.index]
    one, every = sample.torch(2), sample.torch()
    assert one.dtype == every.dtype == getattr(torch, dtype if dtype != "float8_e4m3fn" else "bfloat16")
    assert every.shape == (len(row.token_ids), len(LAYERS), HIDDEN)
    assert one.view(torch.uint8).numpy().tobytes() == engine_states(row, 2).tobytes()
    assert all(torch.equal(every[:, i], sample.torch(k)) for i, k in enumerate(LAYERS))
    one.zero_()
    assert same(sample.hidden_states[2], engine_states(row, 2))
    with pytest.raises(KeyError, match="layer 3 was not read"):
        sample.torch(3)


def test_positions_and_ids_that_are_not_there(built: Builder) -> None:
    ds = open_dataset(str(built.folder))
    for position in (len(ds), -len(ds) - 1):
        with pytest.raises(IndexError, match="of a dataset of 13 samples"):
            ds[position]
    with pytest.raises(KeyError, match="no sample 'nobody'"):
        ds.by_id("nobody")


def test_samples_without_states_say_why(built: Builder) -> None:
    ds = open_dataset(str(built.folder))
    with pytest.raises(SampleError, match=r"row-4 \(position 4\) was rejected: the prompt is empty"):
        ds[REJECTED]
    with pytest.raises(SampleError, match=r"row-7 .* failed: states are not finite"):
        ds.by_id(f"row-{FAILED}")


def test_iterating_yields_the_good_samples_in_order(built: Builder) -> None:
    ds = open_dataset(str(built.folder))
    wanted = [row.index for row in built.good()]
    assert [s.index for s in ds] == wanted
    assert [s.index for s in ds.samples(prefetch=1)] == wanted
    assert [s.index for s in ds.samples([12, FAILED, 0, -1])] == [12, 0, 12]
    first = iter(ds)
    assert next(first).index == 0
    first.close()  # type: ignore[attr-defined]
    with pytest.raises(IndexError):
        list(ds.samples([99]))


def test_the_index_is_a_table_of_every_planned_sample(built: Builder) -> None:
    ds = open_dataset(str(built.folder))
    assert ds.index.schema.equals(layout.INDEX_SCHEMA)
    assert ds.index["index"].to_pylist() == list(range(13))
    assert ds.index["status"].to_pylist().count("ok") == 11
    assert ds.summary is not None and ds.summary.ok == 11 and ds.complete
    assert ds.info.plan.samples == 13


def test_an_id_that_repeats_is_that_of_the_good_row(tmp_path: Path) -> None:
    built = Builder(tmp_path).write()
    rows = built.index_rows(0)
    rows[REJECTED]["sample_id"] = "row-5"
    rows[0]["sample_id"] = "row-1"
    built.write_index(0, rows)
    ds = open_dataset(str(tmp_path))
    assert ds.by_id("row-5").index == 5
    assert ds.by_id("row-1").index == 0


class RecordingStore(LocalFolderStore):
    """The real folder store, noting each range read."""

    def __init__(self, uri: str) -> None:
        super().__init__(uri)
        self.reads: list[list[tuple[int, int]]] = []

    def get_ranges(self, name: str, ranges: Any) -> list[memoryview]:
        self.reads.append(list(ranges))
        return super().get_ranges(name, ranges)


def test_one_layer_reads_its_own_byte_ranges_only(tmp_path: Path) -> None:
    built = Builder(tmp_path).write()
    store = RecordingStore(str(tmp_path))
    full = open_dataset(str(tmp_path))
    ds = Dataset(store, full.info, full.summary, [2])
    row = built.good()[0]
    ds[row.index]
    headers = len(store.reads)
    sample = ds[1]
    (ranges,) = store.reads[headers:]
    tokens = len(sample.token_ids)
    assert [length for _, length in ranges] == [tokens * HIDDEN * 4, tokens * 4, tokens]
    assert list(sample.hidden_states) == [2] and same(sample.hidden_states[2], built.good()[1].states[2])


def test_one_layer_of_a_parquet_shard_is_one_read_of_its_column_chunks(tmp_path: Path) -> None:
    Builder(tmp_path, shard_format="parquet", hidden=512).write()
    store = RecordingStore(str(tmp_path))
    full = open_dataset(str(tmp_path))
    ds = Dataset(store, full.info, full.summary, [4])
    ds[0]
    headers = len(store.reads)
    sample = ds[1]
    (ranges,) = store.reads[headers:]
    states = sample.hidden_states[4].nbytes
    assert states < sum(length for _, length in ranges) < 1.2 * states + 1024


def test_other_layers(built: Builder) -> None:
    ds = open_dataset(str(built.folder), layers={4, 0})
    assert ds.layers == (0, 4) and list(ds[0].hidden_states) == [0, 4]
    one = ds.with_layers([2])
    assert list(one[0].hidden_states) == [2]
    with pytest.raises(KeyError, match=r"layer 4 was not read; this sample has layers \[2\]"):
        one[0].hidden_states[4]
    with pytest.raises(ConfigError, match=r"layer 3 is not stored; the dataset has layers \[0, 2, 4\]"):
        ds.with_layers([3])
    with pytest.raises(ConfigError, match="no layer chosen"):
        open_dataset(str(built.folder), layers=[])


def test_an_unfinished_dataset_opens_only_on_request(tmp_path: Path) -> None:
    built = Builder(tmp_path, finished=False, uncommitted=frozenset({ShardId(0, 1), ShardId(1, 2)})).write()
    with pytest.raises(IncompleteDataset, match=r"not finished, 3 of 5 shards .* run rayhs extract .or import. again"):
        open_dataset(str(tmp_path))
    ds = open_dataset(str(tmp_path), partial=True)
    wanted = [r for s in (ShardId(0, 0), ShardId(1, 0), ShardId(1, 1)) for r in built.rows[s.file][s.group]]
    assert not ds.complete and ds.summary is None
    assert ds.index["index"].to_pylist() == [r.index for r in wanted] and len(ds) == len(wanted)
    assert [s.index for s in ds] == [r.index for r in wanted if r.status == "planned"]
    assert same(ds[4].hidden_states[2], wanted[4].states[2])
    with pytest.raises(SampleError, match="not finite"):
        ds.by_id(f"row-{FAILED}")


def test_a_partial_index_equals_the_final_one(built: Builder) -> None:
    final = open_dataset(str(built.folder)).index
    (built.folder / layout.SUMMARY).unlink()
    assert open_dataset(str(built.folder), partial=True).index.equals(final)


def test_no_dataset_there(tmp_path: Path) -> None:
    with pytest.raises(ObjectNotFound, match=r"no dataset here \(dataset.json is missing\)"):
        open_dataset(str(tmp_path / "absent"))
    with pytest.raises(ConfigError, match="no such kind of store"):
        open_dataset("gopher://x/y")


def test_pickled_and_read_by_many_threads(built: Builder) -> None:
    ds = open_dataset(str(built.folder))
    copy: Dataset = pickle.loads(pickle.dumps(ds))
    good = built.good()
    with ThreadPoolExecutor(8) as pool:
        samples = list(pool.map(lambda row: copy[row.index], good * 20))
    for row, sample in zip(good * 20, samples, strict=True):
        assert same(sample.hidden_states[2], row.states[2])
    again = pickle.loads(pickle.dumps(samples[0]))
    assert same(again.hidden_states[0], good[0].states[0]) and again.columns == {"topic": "topic 0"}


def shard_path(built: Builder) -> Path:
    return built.folder / layout.object_name(ShardId(0, 0), "0123456789abcdef", built.shard_format)  # type: ignore[arg-type]


@pytest.mark.parametrize("length", [2**63, 50_000_000, 0, 7])
def test_a_hostile_header_length_allocates_nothing(tmp_path: Path, length: int) -> None:
    built = Builder(tmp_path).write()
    path = shard_path(built)
    data = path.read_bytes()
    path.write_bytes(struct.pack("<Q", length) + data[8:])
    with pytest.raises(FormatError, match=r"shards/00000-0000-.*: ") as error:
        open_dataset(str(tmp_path))[0]
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"hidden_states.2"', b'"hidden_states.3"'),
        (b'"F32"', b'"I32"'),
        (b'"token_ids"', b'"token_idz"'),
        (b'"sample_index"', b'"sample_indey"'),
        (b'"data_offsets":[0,', b'"data_offsets":[9,'),
        (b'{"__metadata__"', b'["__metadata__"'),
    ],
)
def test_a_header_of_another_dataset_is_refused(tmp_path: Path, old: bytes, new: bytes) -> None:
    built = Builder(tmp_path).write()
    data = shard_path(built).read_bytes()
    assert old in data
    shard_path(built).write_bytes(data.replace(old, new, 1))
    with pytest.raises(FormatError, match="shards/00000-0000-"):
        open_dataset(str(tmp_path))[0]


@pytest.mark.parametrize("change", [{"hidden": 16}, {"dtype": "float16"}, {"layers": (0, 2, 3)}])
@both_formats
def test_a_shard_of_another_run_is_refused(tmp_path: Path, shard_format: str, change: dict[str, Any]) -> None:
    built = Builder(tmp_path / "a", shard_format=shard_format).write()
    other = Builder(tmp_path / "b", shard_format=shard_format, **change).write()
    shard_path(built).write_bytes(shard_path(other).read_bytes())
    with pytest.raises(FormatError, match="shards/00000-0000-"):
        open_dataset(str(built.folder))[0]


def test_an_index_that_points_at_another_sample_is_refused(built: Builder) -> None:
    rows = built.index_rows(0)
    for key in ("shard", "token_start", "num_tokens"):
        rows[0][key], rows[5][key] = rows[5][key], rows[0][key]
    built.write_index(0, rows)
    with pytest.raises(FormatError, match="sample 0 is not"):
        open_dataset(str(built.folder))[0]


@pytest.mark.parametrize(
    ("row", "key", "value"),
    [
        (0, "shard", "../../etc/passwd"),
        (0, "shard", "shards/00000-0000-0123456789abcdef.exe"),
        (0, "shard", None),
        (0, "num_tokens", 0),
        (0, "token_start", -1),
        (0, "status", "fine"),
        (0, "index", 1),
    ],
)
def test_an_index_that_says_something_impossible_is_refused(tmp_path: Path, row: int, key: str, value: object) -> None:
    built = Builder(tmp_path).write()
    rows = built.index_rows(0)
    rows[row][key] = value
    built.write_index(0, rows)
    with pytest.raises(FormatError, match="index"):
        open_dataset(str(tmp_path))[0]


def test_a_missing_shard_is_named(built: Builder) -> None:
    shard_path(built).unlink()
    ds = open_dataset(str(built.folder))
    with pytest.raises(ObjectNotFound, match=r"shards/00000-0000-.*: the shard is missing; run rayhs verify"):
        ds[0]
    assert ds[5].index == 5


@pytest.mark.parametrize("name", ["dataset.json", "summary.json", "index/00000.parquet"])
def test_a_truncated_record_is_one_line(built: Builder, name: str) -> None:
    path = built.folder / name
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(FormatError, match=name) as error:
        len(open_dataset(str(built.folder)).index)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("shard_format", FORMATS)
@given(data=st.data())
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_damage_of_a_shard_is_more_than_an_error_line(
    tmp_path: Path, shard_format: str, data: st.DataObject
) -> None:
    folder = tmp_path / "data"
    built = Builder(folder, shard_format=shard_format)
    if not folder.exists():
        built.write()
        (tmp_path / "sound").write_bytes(shard_path(built).read_bytes())
    sound = (tmp_path / "sound").read_bytes()
    damaged = bytearray(sound)
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(sound) - 1))] = data.draw(st.integers(0, 255))
    shard_path(built).write_bytes(
        damaged[: data.draw(st.integers(0, len(sound)))] if data.draw(st.booleans()) else damaged
    )
    try:
        sample = open_dataset(str(folder))[0]
    except RayhsError as error:
        assert "\n" not in str(error)
    else:
        assert {len(states) for states in sample.hidden_states.values()} == {len(sample.token_ids)}


READ = """
import sys
for name in ("ray", "vllm", "torch", "transformers"):
    sys.modules[name] = None
import rayhs
ds = rayhs.open(sys.argv[1])
assert sum(len(s.token_ids) for s in ds) > 0 and ds[0].columns and len(ds.index) == 13
from rayhs.verify import verify
assert verify(sys.argv[1]).ok
assert ds.arrow().read_all().num_rows == 11 and len(list(ds[-3:])) == 3
try:
    ds[0].torch()
except ImportError:
    print("read")
"""


def test_reading_needs_neither_ray_nor_vllm_nor_torch(built: Builder) -> None:
    command = [sys.executable, "-c", READ, str(built.folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": "."})
    assert done.stdout == "read\n", done.stderr


@pytest.mark.s3
@both_formats
def test_reading_from_s3(tmp_path: Path, s3_uri: str, shard_format: str) -> None:
    from rayhs.store import open_store

    built = Builder(tmp_path, shard_format=shard_format, dtype="bfloat16").write()
    uri = f"{s3_uri}/data"
    store = open_store(uri)
    for path in tmp_path.rglob("*.*"):
        store.put(str(path.relative_to(tmp_path)), path.read_bytes())
    ds = rayhs.open(uri, layers=[2])
    assert [s.index for s in ds] == [r.index for r in built.good()]
    assert all(same(ds[r.index].hidden_states[2], r.states[2]) for r in built.good())
    assert ds[0].columns == {"topic": "topic 0"}
    from rayhs.verify import verify

    assert verify(uri).ok
