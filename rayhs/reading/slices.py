"""Positions of a dataset as people write them: whole numbers of any kind, and slices."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from typing import Protocol, SupportsIndex, overload

from rayhs.reading.sample import Sample


class Source(Protocol):
    """What is sliced: a `rayhs.Dataset`."""

    def read(self, position: int) -> Sample: ...

    def samples(self, positions: Iterable[int]) -> Iterator[Sample]: ...

    def position_of(self, sample_id: str) -> int: ...


class Slice:
    """Some positions of a dataset, as ``dataset[2:10]`` gives them; nothing is read until a sample is asked for.

    It behaves as the dataset does: its length counts positions, those without states included; ``[i]`` reads
    the sample at its ``i``-th position and raises SampleError where that has no states; iterating, in either
    direction, yields the good samples, read ahead; ``in`` asks for an id. A slice of a slice is a slice.

    Attributes:
        positions: its positions in the dataset, a range.

    Example:
        >>> some = ds[2:10]
        >>> some.positions, len(some), some[1].index
        (range(2, 10), 8, 3)
        >>> [sample.index for sample in some[::2]]  # position 4 was rejected
        [2, 6, 8]
    """

    def __init__(self, source: Source, positions: range) -> None:
        self._source = source
        self.positions = positions

    def __len__(self) -> int:
        return len(self.positions)

    @overload
    def __getitem__(self, key: SupportsIndex) -> Sample: ...

    @overload
    def __getitem__(self, key: slice) -> Slice: ...

    def __getitem__(self, key: SupportsIndex | slice) -> Sample | Slice:
        if isinstance(key, slice):
            return Slice(self._source, self.positions[key])
        position = as_position(key)
        if not -len(self) <= position < len(self):
            raise IndexError(f"sample {position} of a slice of {len(self)} samples")
        return self._source.read(self.positions[position])

    def __iter__(self) -> Iterator[Sample]:
        return self._source.samples(self.positions)

    def __reversed__(self) -> Iterator[Sample]:
        return self._source.samples(self.positions[::-1])

    def __contains__(self, sample_id: str) -> bool:
        try:
            return self._source.position_of(sample_id) in self.positions
        except KeyError:
            return False

    def __repr__(self) -> str:
        return f"Slice({self._source!r}, {self.positions})"


def as_position(key: object) -> int:
    """``key`` as an int, whatever kind of whole number it is.

    Raises:
        TypeError: it is none; the message says what reads samples by such a key.
    """
    try:
        return operator.index(key)  # type: ignore[arg-type]  # refusing others is its task
    except TypeError:
        advice = (
            f"by_id({key!r}) reads a sample by its id" if isinstance(key, str) else "samples(positions) reads several"
        )
        raise TypeError(f"a position is a whole number or a slice, not {type(key).__name__}; {advice}") from None
