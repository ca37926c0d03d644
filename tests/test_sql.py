"""DuckDB over a dataset: its index, its Parquet shards as they lie there, and `ds.arrow()`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rayhs import layout
from rayhs.codec import STATE_DTYPES
from rayhs.dataset import open_dataset
from tests.builders import HIDDEN, Builder
from tests.test_dataset import DTYPES, FORMATS

duckdb = pytest.importorskip("duckdb")


def numbers(value: Any, dtype: str) -> np.ndarray:
    """States `[tokens, hidden]` of what DuckDB gives for one sample."""
    if isinstance(value, bytes):
        return np.frombuffer(value, STATE_DTYPES[dtype]).reshape(-1, HIDDEN)
    return np.array(value, STATE_DTYPES[dtype])


def test_questions_to_the_index(tmp_path: Path) -> None:
    Builder(tmp_path).write()
    index = open_dataset(str(tmp_path)).index
    answer = duckdb.sql("select status, count(*) from index group by status order by status").fetchall()
    assert answer == [("failed", 1), ("ok", 11), ("rejected", 1)]
    assert len(index) == 13


@pytest.mark.parametrize("dtype", DTYPES)
def test_committed_parquet_shards_and_nothing_else(tmp_path: Path, dtype: str) -> None:
    built = Builder(tmp_path, shard_format="parquet", dtype=dtype).write()
    (tmp_path / layout.object_name(layout.ShardId(0, 1), "f" * 16, "parquet")).write_bytes(b"half written")
    ds = open_dataset(str(tmp_path))
    shards = duckdb.read_parquet(ds.shard_uris())
    rows = duckdb.sql('select "index", len(token_ids), "hidden_states.2" from shards order by 1').fetchall()
    assert [row[:2] for row in rows] == [(row.index, len(row.token_ids)) for row in built.good()]
    for (_, _, value), row in zip(rows, built.good(), strict=True):
        assert numbers(value, dtype).tobytes() == row.states[2].tobytes()
    assert len(shards) == len(built.good())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shard_format", FORMATS)
def test_states_of_either_format(tmp_path: Path, shard_format: str, dtype: str) -> None:
    built = Builder(tmp_path, shard_format=shard_format, dtype=dtype).write()
    rows = open_dataset(str(tmp_path)).arrow(layers=[2], dtype="float32" if dtype == "float16" else "stored")
    assert rows.schema.names[0] == "index"
    answer = duckdb.sql(
        """select sample_id, columns->>'$.topic' as topic, "hidden_states.2"
        from rows where num_tokens > 3 order by "index" """
    ).fetchall()
    wanted = [row for row in built.good() if len(row.token_ids) > 3]
    assert [row[:2] for row in answer] == [(row.sample_id, f"topic {row.index}") for row in wanted]
    for (_, _, value), row in zip(answer, wanted, strict=True):
        assert numbers(value, dtype).tobytes() == row.states[2].tobytes()


def test_the_last_token_of_bfloat16_states_as_numbers(tmp_path: Path) -> None:
    built = Builder(tmp_path, dtype="bfloat16", groups=((30, 20),)).write()
    ds = open_dataset(str(tmp_path))
    rows = ds.arrow(layers=[2], dtype="float32")
    assert rows.schema.field("hidden_states.2").metadata[b"dtype"] == b"float32"
    answer = duckdb.sql("""select sample_id, "hidden_states.2"[num_tokens] as last from rows""").fetchall()
    want = [(row.sample_id, tuple(row.states[2][-1].astype(np.float32).tolist())) for row in built.good()]
    assert [(name, tuple(last)) for name, last in answer] == want
    rows = ds.arrow()
    assert rows.schema and duckdb.sql("select sample_id from rows limit 1").fetchall() == [("row-0",)]


def test_a_damaged_shard_is_named(tmp_path: Path) -> None:
    Builder(tmp_path).write()
    ds = open_dataset(str(tmp_path))
    path = Path(ds.shard_uris()[2])
    path.write_bytes(path.read_bytes()[:-1])
    rows = ds.arrow()
    with pytest.raises(Exception, match=path.name):
        duckdb.sql("select sum(len(token_ids)) from rows").fetchall()
    assert rows.schema.names[0] == "index"
