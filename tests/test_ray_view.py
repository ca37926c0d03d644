"""`ds.ray()`: what Ray Data reads, plans with, prunes and says of damage."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rayhs
from rayhs.dataset import Dataset, open_dataset
from rayhs.errors import ConfigError
from rayhs.store import open_store
from rayhs.store.local import LocalFolderStore
from tests.builders import HIDDEN, LAYERS, Builder
from tests.s3_servers import S3Server
from tests.test_dataset import DTYPES, FORMATS

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("local_ray")]
MANY = ((3, 4, 1), (3, 2, 1, 5), (6,))


class LoggingStore(LocalFolderStore):
    """The real folder store, which notes each range read in a file, in whatever process it is used."""

    def __init__(self, uri: str, log: str) -> None:
        super().__init__(uri)
        self._log = log

    def __reduce__(self) -> tuple[Any, ...]:
        return (LoggingStore, (self.uri, self._log))

    def get_ranges(self, name: str, ranges: Any) -> list[memoryview]:
        with open(self._log, "a") as log:
            log.write(json.dumps([name, sum(length for _, length in ranges)]) + "\n")
        return super().get_ranges(name, ranges)

    def taken(self) -> dict[str, int]:
        """Bytes read of each shard since the last call."""
        path, totals = Path(self._log), dict[str, int]()
        for name, size in map(json.loads, path.read_text().splitlines() if path.exists() else ()):
            if name.startswith("shards/"):
                totals[name] = totals.get(name, 0) + size
        path.unlink(missing_ok=True)
        return totals


def logged(built: Builder) -> tuple[LoggingStore, Dataset]:
    full = open_dataset(str(built.folder))
    store = LoggingStore(str(built.folder), f"{built.folder}.log")
    return store, Dataset(store, full.info, full.summary)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shard_format", FORMATS)
def test_rows_are_the_good_samples(tmp_path: Path, shard_format: str, dtype: str) -> None:
    built = Builder(tmp_path, shard_format=shard_format, dtype=dtype, groups=MANY).write()
    ds = open_dataset(str(built.folder))
    rows = sorted(ds.ray().take_all(), key=lambda row: row["index"])
    wanted = "float32" if dtype in ("bfloat16", "float8_e4m3fn") else dtype
    plain = ds.arrow(states=False).read_all().to_pylist()
    for row, same, sample in zip(rows, plain, ds, strict=True):
        for layer in LAYERS:
            states = row.pop(f"hidden_states.{layer}")
            assert states.dtype == wanted
            assert np.array_equal(states, sample.hidden_states[layer].astype(wanted))
        for name in ("token_ids", "loss_mask"):
            assert list(row.pop(name)) == same.pop(name)
        assert row == same


def test_numpy_batches_hold_arrays_of_tokens(tmp_path: Path) -> None:
    built = Builder(tmp_path, dtype="bfloat16", groups=MANY).write()
    ds = open_dataset(str(built.folder))

    def norms(batch: dict[str, np.ndarray]) -> dict[str, Any]:
        states = batch["hidden_states.2"]
        assert all(own.dtype == np.float32 and own.ndim == 2 for own in states)
        assert all(len(own) == len(ids) for own, ids in zip(states, batch["token_ids"], strict=True))
        return {"index": batch["index"], "norm": [float(np.linalg.norm(own)) for own in states]}

    rows = ds.ray([2]).map_batches(norms, batch_size=4).take_all()
    got = {row["index"]: row["norm"] for row in rows}
    want = {s.index: float(np.linalg.norm(s.hidden_states[2].astype(np.float32))) for s in ds}
    assert got == pytest.approx(want)


def test_other_dtypes(tmp_path: Path) -> None:
    built = Builder(tmp_path, dtype="bfloat16").write()
    ds = open_dataset(str(built.folder))
    half = ds.ray([2], columns=["index"], dtype="float16").take(1)[0]
    assert half["hidden_states.2"].dtype == np.float16
    stored = ds.ray([2], columns=["index"], dtype="stored").take_all()
    for row in stored:
        assert row["hidden_states.2"] == ds[row["index"]].hidden_states[2].tobytes()
    with pytest.raises(ConfigError, match="dtype='int8' is not one of"):
        ds.ray(dtype="int8")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="layer 3 is not stored"):
        ds.ray([3])


def test_ray_knows_rows_sizes_and_schema_without_reading(tmp_path: Path) -> None:
    built = Builder(tmp_path / "data", dtype="bfloat16", groups=MANY).write()
    store, ds = logged(built)
    rows = ds.ray()
    schema = rows.schema(fetch_if_missing=False)
    assert schema is not None and schema.names == ds.arrow().schema.names
    assert rows.count() == len(built.good())
    tokens = sum(len(row.token_ids) for row in built.good())
    size = rows.size_bytes()
    assert 0 <= size - tokens * (len(LAYERS) * HIDDEN * 4 + 5) < 200 * len(built.good())
    assert sorted(rows.input_files()) == sorted(ds.shard_uris())
    source: Any = rows._logical_plan.dag.datasource
    good = [sum(row.status == "planned" for row in group) for file in built.rows for group in file]
    assert 0 in good
    for parallelism in (1, 200):
        tasks = source.get_read_tasks(parallelism)
        assert [task.metadata.num_rows for task in tasks] == [count for count in good if count]
        assert sum(task.metadata.size_bytes for task in tasks) == source.estimate_inmemory_data_size() == size
    assert store.taken() == {}


def test_of_many_shards_a_task_reads_several(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rayhs.views import ray as ray_module

    built = Builder(tmp_path, groups=MANY).write()
    ds = open_dataset(str(tmp_path))
    want = [row.index for row in built.good()]
    for most, tasks_wanted in ((1, 1), (3, 3), (4, 4), (8, 7)):
        monkeypatch.setattr(ray_module, "_MOST_TASKS", most)
        source: Any = ds.ray([2])._logical_plan.dag.datasource
        tasks = source.get_read_tasks(200)
        assert len(tasks) == tasks_wanted and sum(len(task.metadata.input_files) for task in tasks) == 7
        assert [index for task in tasks for block in task() for index in block["index"].to_pylist()] == want
        assert sum(task.metadata.size_bytes for task in tasks) == source.estimate_inmemory_data_size()
        for limit in (1, 4, 100):
            for task in source.get_read_tasks(200, per_task_row_limit=limit):
                rows = sum(block.num_rows for block in task())
                assert 0 < rows == task.metadata.num_rows <= limit
    assert "index" not in ds.__dict__


@pytest.mark.parametrize("shard_format", FORMATS)
def test_only_the_bytes_of_what_is_asked_for_are_read(tmp_path: Path, shard_format: str) -> None:
    built = Builder(tmp_path / "data", shard_format=shard_format, dtype="bfloat16", groups=MANY, hidden=4096).write()
    store, ds = logged(built)
    layer = sum(len(row.token_ids) for row in built.good()) * 4096 * 2
    ds.ray(states=False).materialize()
    rest = sum(store.taken().values())
    for rows in (ds.ray([2]), ds.ray().select_columns(["hidden_states.2", "token_ids"])):
        assert rows.materialize().count() == len(built.good())
        assert 0 <= sum(store.taken().values()) - rest - layer < 0.02 * layer
    ds.ray().materialize()
    assert 0 <= sum(store.taken().values()) - rest - 3 * layer < 0.06 * layer
    chosen = ds.ray().select_columns(["sample_id", "num_tokens"]).take_all()
    assert {row["sample_id"] for row in chosen} == {row.sample_id for row in built.good()}
    assert list(chosen[0]) == ["sample_id", "num_tokens"] and store.taken() == {}
    assert len(ds.ray([2]).limit(2).take_all()) == 2
    assert len(store.taken()) <= 2


def test_blocks_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rayhs.views import arrow as arrow_module

    built = Builder(tmp_path, groups=((30,),)).write()
    rows = open_dataset(str(built.folder)).ray([2])
    (task,) = rows._logical_plan.dag.datasource.get_read_tasks(1)
    assert len(list(task())) == 1
    monkeypatch.setattr(arrow_module, "READ_BYTES", 10 * (HIDDEN * 4 + 5))
    blocks = list(task())
    assert len(blocks) > 5 and sum(block.num_rows for block in blocks) == task.metadata.num_rows
    assert max(sum(block["num_tokens"].to_pylist()) for block in blocks) <= 10


def test_a_dataset_without_good_samples(tmp_path: Path) -> None:
    built = Builder(tmp_path, groups=((1,),))
    for row in built.all_rows():
        row.status, row.reason = "failed", "not finite: layer 2"
    (tmp_path / "shards").mkdir()
    rows = open_dataset(str(built.write().folder)).ray()
    assert rows.take_all() == [] and rows.count() == 0


def test_a_lost_and_a_damaged_shard_are_named(tmp_path: Path) -> None:
    built = Builder(tmp_path, groups=MANY).write()
    ds = open_dataset(str(built.folder))
    path = Path(ds.shard_uris()[2])
    data = path.read_bytes()
    path.unlink()
    with pytest.raises(rayhs.RayhsError, match=rf"{path.name}: the shard is missing; run rayhs verify {tmp_path}"):
        ds.ray([2]).materialize()
    path.write_bytes(data[:-1])
    with pytest.raises(rayhs.RayhsError, match=f"shards/{path.name}: safetensors tensors end at byte"):
        ds.ray([2]).materialize()


@pytest.mark.s3
def test_reading_from_s3(tmp_path: Path, moto_uri: str, moto_server: S3Server) -> None:
    built = Builder(tmp_path, dtype="bfloat16", groups=MANY).write()
    store = open_store(moto_uri)
    for path in tmp_path.rglob("*.*"):
        store.put(str(path.relative_to(tmp_path)), path.read_bytes())
    ds = rayhs.open(moto_uri)
    # The fixture's Ray began before the variables were set: here they go with the tasks.
    rows = ds.ray([2], runtime_env={"env_vars": moto_server.environment()}).take_all()
    assert len(rows) == len(built.good())
    for row in rows:
        assert np.array_equal(row["hidden_states.2"], ds[row["index"]].hidden_states[2].astype(np.float32))
