"""Positions by id, against a dictionary; and rows of the index by file."""

from __future__ import annotations

import pickle
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayhs.dataset import open_dataset
from rayhs.errors import FormatError
from rayhs.reading import id_lookup
from rayhs.reading.id_lookup import IdLookup
from rayhs.reading.index_files import IndexFiles
from rayhs.store.local import LocalFolderStore
from tests.builders import Builder

IDS = st.one_of(st.sampled_from(["", "a", "b", "é", "e\u0301", "row-1", "\U0001d518", "\x00"]), st.text(max_size=6))
ROWS = st.lists(st.tuples(IDS, st.sampled_from(["ok", "failed", "rejected"])), max_size=40)
HASHES = {"xxh3": id_lookup._hash, "of the length": len, "all equal": lambda text: 2**64 - 1}


def table(rows: list[tuple[str, str]]) -> pa.Table:
    # A slice, as its chunks don't begin at the beginning of their buffers.
    names, status = zip(("before", "ok"), *rows, strict=True)
    return pa.table({"sample_id": pa.array(names, pa.string()), "status": pa.array(status, pa.string())}).slice(1)


def by_dict(rows: list[tuple[str, str]]) -> dict[str, int]:
    """Of rows that share an id the first good one, else the first."""
    positions: dict[str, int] = {}
    for want_good in (True, False):
        for position, (name, status) in enumerate(rows):
            if not want_good or status == "ok":
                positions.setdefault(name, position)
    return positions


@pytest.mark.parametrize("kind", HASHES)
@settings(deadline=None)
@given(rows=ROWS, cuts=st.lists(st.integers(0, 40), max_size=3), absent=st.lists(IDS, max_size=5))
def test_it_finds_what_a_dictionary_finds(
    kind: str, rows: list[tuple[str, str]], cuts: list[int], absent: list[str]
) -> None:
    ends = [0, *sorted(min(cut, len(rows)) for cut in cuts), len(rows)]
    pieces = [table(rows[start:end]) for start, end in pairwise(ends)]
    with patch.object(id_lookup, "_hash", HASHES[kind]):
        lookup = IdLookup(pieces)
        wanted = by_dict(rows)
        for name in [*wanted, *absent]:
            assert lookup.find(name, lambda at: rows[at][0]) == wanted.get(name)
    assert lookup.good.tolist() == [status == "ok" for _, status in rows]


def test_ids_that_no_text_of_arrow_can_be_are_not_there() -> None:
    assert IdLookup([table([("a", "ok")])]).find("\ud800", lambda at: "a") is None


def test_of_a_million_repeats_one_row_is_read() -> None:
    asked: list[int] = []
    rows = [("same", "rejected")] * 5000 + [("same", "ok")] + [("same", "rejected")] * 5000

    def id_at(position: int) -> str:
        asked.append(position)
        return rows[position][0]

    assert IdLookup([table(rows)]).find("same", id_at) == 5000 and asked == [5000]


class CountingStore(LocalFolderStore):
    """The real folder store, noting the objects read whole."""

    def __init__(self, uri: str) -> None:
        super().__init__(uri)
        self.gets: list[str] = []

    def get(self, name: str) -> bytes:
        self.gets.append(name)
        return super().get(name)


def row_of(files: IndexFiles, position: int) -> dict[str, Any]:
    rows: list[dict[str, Any]] = files.slice(position, 1).to_pylist()
    return rows[0]


def test_a_row_costs_its_own_file_once(tmp_path: Path) -> None:
    built = Builder(tmp_path).write()
    store = CountingStore(str(tmp_path))
    assert built.record is not None
    files = IndexFiles(store, built.record.plan)
    whole = open_dataset(str(tmp_path)).index.to_pylist()
    assert len(files) == len(whole) and [row_of(files, at) for at in (12, 7)] == [whole[12], whole[7]]
    assert store.gets == ["index/00001.parquet"]
    assert [row_of(files, at) for at in range(len(files))] == whole
    assert sorted(store.gets) == ["index/00000.parquet", "index/00001.parquet"]
    assert row_of(pickle.loads(pickle.dumps(files)), 3) == whole[3]


def test_reading_by_position_and_by_id_makes_no_table_of_the_whole_index(tmp_path: Path) -> None:
    Builder(tmp_path).write()
    ds = open_dataset(str(tmp_path))
    by_id = ds.by_id("row-5")
    assert by_id.index == 5 and ds[2].index == 2 and [s.index for s in ds[10:]] == [10, 11, 12]
    assert ds.good.sum() == 11 and "index" not in ds.__dict__
    view = pickle.loads(pickle.dumps(ds)).with_layers([2])
    assert view.by_id("row-12").index == 12 and list(view[12].hidden_states) == [2]
    before, ds.__dict__["index"] = ds.good, ds.index
    assert ds.by_id("row-5").index == 5 and np.array_equal(ds.good, before)


def test_a_damaged_file_of_the_index_is_named_where_it_is_read(tmp_path: Path) -> None:
    built = Builder(tmp_path).write()
    rows = built.index_rows(1)
    changes: list[Any] = [rows[1:], [rows[1], rows[0], *rows[2:]], [rows[0], {**rows[1], "num_tokens": 0}, *rows[2:]]]
    for changed, message in zip(changes, ("00001.parquet: the index is not one", "not one row", "contra"), strict=True):
        built.write_index(1, changed)
        ds = open_dataset(str(tmp_path))
        assert ds[0].index == 0
        with pytest.raises(FormatError, match=message):
            ds[8]
        with pytest.raises(FormatError):
            _ = ds.index
    built.write_index(1, rows[1:])
    with pytest.raises(FormatError, match="not one row a sample"):
        open_dataset(str(tmp_path)).by_id("row-0")


@pytest.mark.parametrize("key", [5, None, b"row-1"])
def test_an_id_that_is_no_text(tmp_path: Path, key: Any) -> None:
    dataset = open_dataset(str(Builder(tmp_path).write().folder))
    with pytest.raises(TypeError, match=f"a sample id is a str, not {type(key).__name__}"):
        dataset.by_id(key)
