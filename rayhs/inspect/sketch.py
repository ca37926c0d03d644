"""Figures of a stream of numbers in bounded memory."""

from __future__ import annotations

import math

import numpy as np

from rayhs.codec import Array

RELATIVE_ERROR = 0.005


class QuantileSketch:
    """Quantiles of numbers >= 0 within a relative error, in bins whose width grows with the number (DDSketch).

    Bin ``i`` holds the numbers in ``(g^(i-1), g^i]`` with ``g = (1 + a) / (1 - a)``; its estimate
    ``2 g^i / (g + 1)`` is off by at most the share ``a`` of any of them (https://arxiv.org/abs/1908.10693). There is
    a bin for each that is in use: under 20,000 for all of float32.
    """

    def __init__(self, relative_error: float = RELATIVE_ERROR) -> None:
        self._log_growth = math.log1p(relative_error) - math.log1p(-relative_error)
        self._bins: dict[int, int] = {}
        self._zeros = 0

    def add(self, values: Array) -> None:
        """Count finite ``values`` `[n]`."""
        positive = values[values > 0].astype(np.float64)
        self._zeros += len(values) - len(positive)
        bins, counts = np.unique(np.ceil(np.log(positive) / self._log_growth).astype(np.int64), return_counts=True)
        for number, count in zip(bins.tolist(), counts.tolist(), strict=True):
            self._bins[number] = self._bins.get(number, 0) + count

    def quantile(self, q: float) -> float:
        """About the value of rank ``floor(q (n - 1))`` of the ``n`` counted; NaN of none."""
        count = self._zeros + sum(self._bins.values())
        if not count:
            return math.nan
        rank = math.floor(q * (count - 1))
        below = self._zeros
        if rank < below:
            return 0.0
        for number in sorted(self._bins):
            below += self._bins[number]
            if rank < below:
                break
        return 2 * math.exp(number * self._log_growth) / (math.exp(self._log_growth) + 1)


class Moments:
    """Number, mean, standard deviation, least and largest of numbers that come in parts (Chan et al. 1983)."""

    def __init__(self) -> None:
        self.count = 0
        self.mean = 0.0
        self._squares = 0.0
        self.min, self.max = math.inf, -math.inf

    def add(self, values: Array) -> None:
        """Count ``values`` `[n]`."""
        if not len(values):
            return
        own = values.astype(np.float64)
        mean, before = float(own.mean()), self.count
        self.count += len(own)
        off = mean - self.mean
        self._squares += float(np.square(own - mean).sum()) + off * off * before * len(own) / self.count
        self.mean += off * len(own) / self.count
        self.min, self.max = min(self.min, float(own.min())), max(self.max, float(own.max()))

    @property
    def std(self) -> float:
        """Of the whole population: divided by the number of values."""
        return math.sqrt(self._squares / self.count) if self.count else math.nan


def half_octaves(largest: int) -> list[tuple[int, int]]:
    """First and last of the ranges of whole numbers from 1 to ``largest`` that begin at powers of sqrt(2)."""
    starts = sorted({math.ceil(2 ** (power / 2)) for power in range(2 * max(1, largest).bit_length() + 1)})
    starts = [start for start in starts if start <= largest]
    return list(zip(starts, [start - 1 for start in starts[1:]] + [largest], strict=True)) if starts else []
