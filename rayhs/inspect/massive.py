"""Massive activations: few, very large values at fixed places (Sun et al. 2024, arXiv:2402.17762)."""

from __future__ import annotations

from collections import Counter

import numpy as np

from rayhs.codec import Array
from rayhs.inspect.figures import Counted, LayerMassive, Massive, MassiveActivation
from rayhs.reading.sample import Sample

MAGNITUDE, TIMES_MEDIAN = 100.0, 1000.0
_LISTED = 10


class MassiveTotals:
    """Massive activations of many samples, by layer; see `LayerMassive` for the definition."""

    def __init__(self) -> None:
        self._layers: dict[int, _Layer] = {}
        self._largest: dict[tuple[int, int], MassiveActivation] = {}
        self._longest = 0

    def add(self, layer: int, sample: Sample, states: Array, top: Array) -> None:
        """Count one sample's ``states`` `[tokens, hidden]`; ``top`` `[tokens]` is the largest magnitude of each."""
        totals = self._layers.setdefault(layer, _Layer())
        totals.all_tokens += len(states)
        self._longest = max(self._longest, len(states))
        if not (top > MAGNITUDE).any():
            return
        median = median_magnitude(states)
        rows = np.flatnonzero((top > MAGNITUDE) & (top >= TIMES_MEDIAN * median))
        if not len(rows):
            return
        values = states[rows].astype(np.float32)
        massive = (np.abs(values) > MAGNITUDE) & (np.abs(values) >= TIMES_MEDIAN * median)
        totals.add(rows, sample.token_ids[rows], massive.sum(axis=0))
        magnitude = np.where(massive, np.abs(values), 0)
        for dimension in np.flatnonzero(massive.any(axis=0)).tolist():
            row = int(magnitude[:, dimension].argmax())
            found = MassiveActivation(
                layer=layer,
                dimension=dimension,
                value=float(values[row, dimension]),
                median=median,
                sample_id=sample.sample_id,
                position=int(rows[row]),
                token_id=int(sample.token_ids[rows[row]]),
            )
            before = self._largest.get((layer, dimension))
            if before is None or abs(found.value) > abs(before.value):
                self._largest[layer, dimension] = found

    def figures(self) -> Massive:
        bins = position_bins(self._longest)
        top = sorted(self._largest.values(), key=lambda found: (-abs(found.value), found.layer, found.dimension))
        layers = {str(layer): totals.figures(len(bins)) for layer, totals in sorted(self._layers.items())}
        return Massive(bins, layers, top[:_LISTED])


class _Layer:
    def __init__(self) -> None:
        self.all_tokens = self._tokens = self._samples = self._first = 0
        self._positions: Counter[int] = Counter()
        self._token_ids: Counter[int] = Counter()
        self._dimensions: Counter[int] = Counter()

    def add(self, positions: Array, token_ids: Array, by_dimension: Array) -> None:
        self._tokens += len(positions)
        self._samples += 1
        self._first += int((positions == 0).sum())
        self._positions.update(_bin_of(positions).tolist())
        self._token_ids.update(token_ids.tolist())
        self._dimensions.update({int(d): int(by_dimension[d]) for d in np.flatnonzero(by_dimension)})

    def figures(self, bins: int) -> LayerMassive:
        return LayerMassive(
            tokens=self._tokens,
            token_share=self._tokens / self.all_tokens,
            samples=self._samples,
            first_token_share=self._first / self._tokens if self._tokens else None,
            positions=[self._positions[number] for number in range(bins)],
            token_ids=_most(self._token_ids),
            dimensions=_most(self._dimensions),
        )


def _most(counts: Counter[int]) -> list[Counted]:
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return [Counted(number, tokens) for number, tokens in ordered[:_LISTED]]


def position_bins(longest: int) -> list[tuple[int, int]]:
    """First and last position of each bin: 0, 1, 2-3, 4-7, ... up to ``longest`` tokens."""
    starts = [0, *(2**power for power in range(max(0, longest - 1).bit_length()))] if longest else []
    return list(zip(starts, [*(start - 1 for start in starts[1:]), longest - 1], strict=True)) if starts else []


def _bin_of(positions: Array) -> Array:
    """int64 `[n]`: the bin of each position, 0 for 0 and ``1 + floor(log2 p)`` for others (exact under 2^53)."""
    return np.frexp(positions.astype(np.float64))[1].astype(np.int64)


def median_magnitude(states: Array) -> float:
    """The median of ``|x|`` over all values of ``states``, of a float dtype of 2 or 4 bytes; exact.

    Magnitudes of floats are ordered as their bits are, so that counting bits takes the place of sorting millions of
    values. Not a number counts as over infinity.
    """
    bits = np.ascontiguousarray(states).reshape(-1).view(np.uint16 if states.dtype.itemsize == 2 else np.uint32)
    middle = (len(bits) - 1) // 2, len(bits) // 2
    pair = np.array([_of_rank(bits, rank) for rank in middle], bits.dtype).view(states.dtype)
    return float(pair.astype(np.float64).mean())


def _of_rank(bits: Array, rank: int) -> int:
    """The bits of the magnitude of that rank."""
    wide = bits.dtype.itemsize == 4
    high = (bits >> np.uint32(16)) & np.uint32(0x7FFF) if wide else bits & np.uint16(0x7FFF)
    ends = np.cumsum(np.bincount(high, minlength=1))
    number = int(np.searchsorted(ends, rank, side="right"))
    if not wide:
        return number
    low = np.sort(bits[high == number] & np.uint32(0xFFFF))
    return (number << 16) | int(low[rank - (int(ends[number - 1]) if number else 0)])
