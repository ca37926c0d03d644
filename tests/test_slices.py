"""`ds[...]`: whole numbers of any kind, slices, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayhs.dataset import Dataset, open_dataset
from rayhs.errors import SampleError
from rayhs.reading.slices import Slice
from tests.builders import FAILED, REJECTED, Builder
from tests.test_dataset import RecordingStore

SIZE = 13


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Builder:
    return Builder(tmp_path_factory.mktemp("data")).write()


@pytest.fixture(scope="module")
def ds(built: Builder) -> Dataset:
    return open_dataset(str(built.folder))


def test_a_slice_has_the_positions_of_a_list(built: Builder, ds: Dataset) -> None:
    good = [row.index for row in built.good()]
    assert [sample.index for sample in ds[2:10]] == [i for i in range(2, 10) if i in good]
    assert [sample.index for sample in ds[::-1]] == good[::-1]
    assert [sample.index for sample in reversed(ds[:])] == good[::-1]
    assert [sample.index for sample in reversed(ds)] == good[::-1]
    assert len(ds[2:10]) == 8 and len(ds[99:]) == 0 and list(ds[99:]) == []
    assert ds[2:10][1].index == 3 and ds[-3:][-1].index == SIZE - 1
    assert "2:10" in repr(ds[2:10]) or "range(2, 10)" in repr(ds[2:10])


limits = st.none() | st.integers(-2 * SIZE, 2 * SIZE)
slices = st.builds(slice, limits, limits, st.none() | st.integers(-5, 5).filter(bool))


@given(first=slices, second=slices, at=st.integers(-SIZE, SIZE))
def test_any_slice_of_a_slice_is_that_of_a_range(ds: Dataset, first: slice, second: slice, at: int) -> None:
    want = range(SIZE)[first][second]
    got = ds[first][second]
    assert isinstance(got, Slice) and got.positions == want and len(got) == len(want)
    if not -len(want) <= at < len(want):
        with pytest.raises(IndexError, match=f"{at} of a slice of {len(want)}"):
            got[at]
    elif want[at] not in (REJECTED, FAILED):
        assert got[at].index == want[at]


def test_in_asks_for_an_id(ds: Dataset) -> None:
    store = RecordingStore(ds.uri)
    watched = Dataset(store, ds.info, ds.summary)
    assert "row-3" in watched and "row-4" in watched and "row-99" not in watched and "" not in watched
    assert "row-3" in watched[2:5] and "row-5" not in watched[2:5] and "row-99" not in watched[2:5]
    assert store.reads == []  # of no shard
    for some in (watched, watched[2:5]):
        with pytest.raises(TypeError, match="a sample id is a str, not int"):
            3 in some  # type: ignore[operator]  # noqa: B015


def test_a_position_without_states_keeps_its_place(ds: Dataset) -> None:
    some = ds[REJECTED : REJECTED + 2]
    assert len(some) == 2 and [sample.index for sample in some] == [REJECTED + 1]
    with pytest.raises(SampleError, match="row-4 .* was rejected"):
        some[0]


def test_making_a_slice_reads_nothing(built: Builder) -> None:
    store, full = RecordingStore(str(built.folder)), open_dataset(str(built.folder))
    some = Dataset(store, full.info, full.summary)[::2]
    assert len(some) == 7 and store.reads == []
    assert some[0].index == 0 and store.reads


@pytest.mark.parametrize("position", [np.int64(3), np.uint8(3), np.int32(-10), np.array(3)])
def test_any_whole_number_is_a_position(ds: Dataset, position: Any) -> None:
    assert ds[position].index == 3
    assert ds[:][position].index == 3


def test_samples_at_positions_of_numpy(ds: Dataset) -> None:
    assert [sample.index for sample in ds.samples(np.array([5, 0, -1]))] == [5, 0, 12]


@pytest.mark.parametrize(
    ("key", "advice"),
    [
        ("row-1", r"not str; by_id\('row-1'\) reads"),
        (1.0, "not float; "),
        ([1, 2], r"not list; samples\(positions\) reads"),
        (np.array([1, 2]), r"not ndarray; samples\(positions\) reads"),
        (None, "not NoneType; "),
    ],
)
def test_what_is_no_position_is_refused_with_what_to_do(ds: Dataset, key: Any, advice: str) -> None:
    for source in (ds, ds[:]):
        with pytest.raises(TypeError, match=advice):
            source[key]
