"""Staged samples in parts: each tensor parallel rank stages a share of the layers in an area of its own."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from rayhs.errors import SampleError
from rayhs.staging import StagingArea


def shares(layers: Sequence[int], ranks: int) -> list[tuple[int, ...]]:
    """The layers of each rank that carries any: rank ``r`` has every ``ranks``-th, from the ``r``-th on."""
    return [tuple(layers[rank::ranks]) for rank in range(min(ranks, len(layers)))]


def fractions(parts: Sequence[Sequence[int]]) -> list[float]:
    """What each part of a sample is of the whole, at most: headers and token ids are in every part.

    Their sum is over 1 where the layers don't divide evenly.
    """
    layers = sum(map(len, parts))
    return [max(1 / len(parts), len(part) / layers) for part in parts]


class StagedParts:
    """The staging areas of one engine, one for each of its `shares`, and the reader's side of all of them.

    Made on both sides with the same arguments. A rank writes to its area alone. Of samples of
    ``max_bytes / sum(fractions(shares))`` bytes every part finds room in its area.
    """

    def __init__(
        self, directory: str | os.PathLike[str], max_bytes: int, layers: Sequence[int], ranks: int = 1
    ) -> None:
        self.directory = Path(directory)
        self.max_bytes = max_bytes
        self.shares = shares(layers, ranks)
        share = fractions(self.shares)
        limits = [int(max_bytes * part / sum(share)) for part in share]
        self.areas = [StagingArea(self.directory / f"part{rank}", limit) for rank, limit in enumerate(limits)]

    def arrivals(self) -> set[str]:
        """Keys of which every part was handed over (staged or failed), and none taken."""
        return set.intersection(*(area.arrivals() for area in self.areas))

    def take(self, key: str) -> list[memoryview]:
        """The parts of a sample that has arrived, for as long as it is not released.

        Raises:
            SampleError: a rank handed over a failure; the message is its reason, and nothing is held.
        """
        parts, failure = [], None
        for area in self.areas:
            try:
                parts.append(area.take(key))
            except SampleError as error:
                failure = error
        if failure is not None:
            self.release(key)
            raise failure
        return parts

    def release(self, key: str) -> None:
        """Give the memory of a taken sample back: it will be written over."""
        for area in self.areas:
            area.release(key)
