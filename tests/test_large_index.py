"""Views read the index a file at a time and hold an outline of it, however many rows it has."""

from __future__ import annotations

import pickle
import weakref
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rayhs import layout
from rayhs.dataset import Dataset, open_dataset
from rayhs.errors import FormatError
from rayhs.reading import index_files
from rayhs.reading.index_table import read_index, read_index_file
from rayhs.reading.outline import outline_of
from rayhs.store import Store
from tests.builders import Builder

FILES = 40


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Builder:
    return Builder(tmp_path_factory.mktemp("data"), groups=((3, 2),) * FILES).write()


class Held:
    """Index files read in this process, and how many of their tables were alive at once."""

    def __init__(self) -> None:
        self.read: list[int] = []
        self.most = 0
        self._alive: weakref.WeakValueDictionary[int, pa.Table] = weakref.WeakValueDictionary()

    def read_index_file(self, store: Store, file: int, columns: Sequence[str], plain: bool) -> pa.Table:
        table = read_index_file(store, file, columns, plain)
        self.read.append(file)
        self._alive[len(self.read)] = table
        self.most = max(self.most, len(self._alive))
        return table


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Held:
    held = Held()
    monkeypatch.setattr(index_files, "read_index_file", held.read_index_file)
    monkeypatch.setattr(index_files, "_KEPT_FILES", 2)
    monkeypatch.setattr("rayhs.reading.indexed.read_index", None)
    return held


def arrow_indices(ds: Dataset) -> Iterator[int]:
    return (index for batch in ds.arrow([2]) for index in batch["index"].to_pylist())


def stream_indices(**options: Any) -> Callable[[Dataset], Iterator[int]]:
    return lambda ds: (sample.index for sample in ds.stream([2], **options))


VIEWS = {
    "arrow": arrow_indices,
    "stream": stream_indices(),
    "rank": stream_indices(shard=(1, 3)),
    "shuffled": stream_indices(shuffle_buffer=9),
    "ray": lambda ds: (shard.samples for shard in ds.outline.shards),
}


@pytest.mark.parametrize("view", VIEWS)
def test_a_view_never_holds_the_index(built: Builder, held: Held, view: str) -> None:
    ds = open_dataset(str(built.folder))
    everything = list(VIEWS[view](ds))
    assert 2 <= held.most <= 12 and set(held.read) == set(range(FILES))
    want = open_dataset(str(built.folder))
    want.__dict__["index"] = read_index(want._store, want.info.plan)
    assert everything == list(VIEWS[view](want)) and len(everything) > FILES
    assert want.outline.good.sum() == len(built.good())


def test_of_a_stream_only_its_own_files_are_read_after_one_pass(built: Builder, held: Held) -> None:
    stream = open_dataset(str(built.folder)).stream()
    assert len(stream) == len(built.good()) and sorted(held.read) == list(range(FILES))
    held.read.clear()
    assert [sample.index for sample in islice(stream, 3)] == [0, 1, 2] and max(held.read) < 6
    stream.load_state_dict({**stream.state_dict(), "done": len(stream) - 2})
    held.read.clear()
    assert len(list(stream)) == 2 and held.read == [FILES - 1]


def test_arrow_begins_with_the_first_files(built: Builder, held: Held) -> None:
    batches = open_dataset(str(built.folder)).arrow(states=False)
    assert held.read == [] and batches.read_next_batch().num_rows == 3
    assert max(held.read) < 12


def test_a_view_that_is_pickled_takes_the_outline_along(built: Builder, held: Held) -> None:
    ds = open_dataset(str(built.folder))
    before = ds.outline
    again = pickle.loads(pickle.dumps(ds.with_layers([2])))
    held.read.clear()
    assert len(again.stream()) == before.good.sum() == again.good.sum() and held.read == []


@pytest.mark.parametrize(("view", "begun"), [("arrow", True), ("stream", False)])
def test_a_damaged_file_is_named(tmp_path: Path, view: str, begun: bool) -> None:
    built = Builder(tmp_path, groups=((3, 2),) * FILES).write()
    rows = built.index_rows(FILES - 1)
    changes: list[Any] = [[*rows[1:], rows[0]], [{**rows[0], "num_tokens": -1}, *rows[1:]], rows[1:]]
    for changed in changes:
        built.write_index(FILES - 1, changed)
        got: list[int] = []
        with pytest.raises(FormatError, match="index"):
            got.extend(VIEWS[view](open_dataset(str(tmp_path))))
        assert bool(got) == begun


@pytest.mark.parametrize("options", [{"row_group_size": 2}, {"use_dictionary": False}, {"row_group_size": 3}])
def test_files_in_several_row_groups_or_without_dictionaries(tmp_path: Path, options: dict[str, Any]) -> None:
    built = Builder(tmp_path).write()
    want = open_dataset(str(tmp_path))
    index, outline = want.index, want.outline
    for file in range(len(built.rows)):
        path = tmp_path / layout.index_name(file)
        pq.write_table(pq.read_table(path, schema=layout.INDEX_SCHEMA), path, **options)
    ds = open_dataset(str(tmp_path))
    assert [ds.index_row(at) for at in range(len(ds))] == index.to_pylist()
    assert [ds.position_of(row.sample_id) for row in built.all_rows()] == list(range(len(ds)))
    assert np.array_equal(ds.good, outline.good) and ds.outline.shards == outline.shards
    assert ds.arrow(states=False).read_all().num_rows == len(built.good()) and ds.index.equals(index)


def test_an_outline_of_any_pieces_is_that_of_the_whole(built: Builder) -> None:
    index = open_dataset(str(built.folder)).index
    whole = outline_of([index], len(index))
    pieces = outline_of([index.slice(at, 5) for at in range(0, len(index), 5)], len(index))
    assert whole.shards == pieces.shards and np.array_equal(whole.num_tokens, index["num_tokens"].to_numpy())
    names = index["shard"].to_pylist()
    for shard in whole.shards:
        positions = whole.positions(shard).tolist()
        assert positions == [at for at, name in enumerate(names) if name == shard.name]
        assert (len(positions), whole.num_tokens[positions].sum()) == (shard.samples, shard.tokens)
    assert [shard.first for shard in whole.shards] == sorted(shard.first for shard in whole.shards)
    nothing = outline_of([], 0)
    assert nothing.shards == [] and len(nothing.good) == 0
