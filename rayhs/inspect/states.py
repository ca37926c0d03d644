"""The pass over the states: norms, magnitudes and cosines by layer, a few million values at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rayhs.codec import Array
from rayhs.inspect.figures import LayerFigures, States
from rayhs.inspect.massive import MassiveTotals
from rayhs.inspect.sketch import Moments, QuantileSketch
from rayhs.layout import LayerError
from rayhs.reading.sample import Sample

_VALUES = 2**20  # at once, of a layer
# Between these, squares and sums of squares of float32 neither overflow nor vanish.
_LEAST, _LARGEST = 1e-15, 1e15


class StateTotals:
    """Figures of the states of many samples, of ``layers``."""

    def __init__(self, layers: Sequence[int]) -> None:
        self.samples = self.tokens = 0
        self._layers = {layer: _Layer() for layer in layers}
        self._massive = MassiveTotals()

    def add(self, sample: Sample) -> None:
        """Count one sample."""
        tokens = len(sample.token_ids)
        self.samples += 1
        self.tokens += tokens
        tops: dict[int, list[Array]] = {layer: [] for layer in self._layers}
        hidden = next(iter(sample.hidden_states.values())).shape[1]
        step = max(1, _VALUES // hidden)
        for start in range(0, tokens, step):
            before: _Part | None = None
            for layer, totals in self._layers.items():
                part = _Part(sample.hidden_states[layer][start : start + step])
                totals.add(part, before)
                tops[layer].append(np.where(part.finite, part.top, 0))
                before = part
        for layer, parts in tops.items():
            self._massive.add(layer, sample, sample.hidden_states[layer], np.concatenate(parts))

    def figures(self, all_samples: bool, errors: Mapping[str, LayerError]) -> States:
        layers = {str(k): totals.figures(errors.get(str(k))) for k, totals in self._layers.items() if self.tokens}
        return States(self.samples, self.tokens, all_samples, layers, self._massive.figures())


class _Part:
    """Some tokens of one layer: ``x`` `[tokens, hidden]` in float32, or in float64 where squares need it.

    ``top`` and ``norms`` `[tokens]`: the largest magnitude and the Euclidean norm of each; ``finite`` a bool.
    """

    def __init__(self, states: Array) -> None:
        x = states.astype(np.float32)
        self.magnitudes = np.abs(x)
        self.top: Array = self.magnitudes.max(axis=1)
        self.finite: Array = np.isfinite(self.top)
        usual = ((self.top > _LEAST) & (self.top < _LARGEST)) | (self.top == 0) | ~self.finite
        self.x: Array = x if usual.all() else x.astype(np.float64)
        with np.errstate(invalid="ignore", over="ignore"):
            self.norms: Array = np.sqrt(np.vecdot(self.x, self.x)).astype(np.float64)

    def cosines(self, other: _Part) -> Array:
        """float64 `[n]`, of the tokens where there is one: both states finite and not zero."""
        defined = self.finite & other.finite & (self.norms > 0) & (other.norms > 0)
        with np.errstate(invalid="ignore", over="ignore"):
            dots = np.vecdot(self.x, other.x).astype(np.float64)
        cosines: Array = dots[defined] / (self.norms[defined] * other.norms[defined])
        return cosines


class _Layer:
    def __init__(self) -> None:
        self._norms, self._cosines, self._quantiles = Moments(), Moments(), QuantileSketch()
        self._magnitude = self._largest = 0.0
        self._zeros = self._values = self._non_finite = 0

    def add(self, part: _Part, before: _Part | None) -> None:
        good = part.finite
        if before is not None:
            self._cosines.add(part.cosines(before))
        everything = bool(good.all())
        norms, magnitudes = (part.norms, part.magnitudes) if everything else (part.norms[good], part.magnitudes[good])
        self._non_finite += len(good) - len(norms)
        self._norms.add(norms)
        self._quantiles.add(norms)
        self._magnitude += float(magnitudes.sum(axis=1, dtype=part.x.dtype).sum(dtype=np.float64))
        self._zeros += magnitudes.size - int(np.count_nonzero(magnitudes))
        self._values += magnitudes.size
        self._largest = max(self._largest, float(magnitudes.max(initial=0.0)))

    def figures(self, error: LayerError | None) -> LayerFigures:
        norms, quantile = self._norms, self._quantiles.quantile
        quantiles: dict[str, Any] = {
            name: min(max(quantile(q), norms.min), norms.max)
            for name, q in (("norm_p1", 0.01), ("norm_median", 0.5), ("norm_p99", 0.99))
        }
        return LayerFigures(
            tokens=norms.count,
            norm_mean=norms.mean,
            norm_std=norms.std,
            norm_min=norms.min,
            norm_max=norms.max,
            **quantiles,
            abs_mean=self._magnitude / max(1, self._values),
            abs_max=self._largest,
            zero_share=self._zeros / max(1, self._values),
            cosine_before=self._cosines.mean if self._cosines.count else None,
            non_finite=self._non_finite,
            float8_error_mean=None if error is None else error.mean,
            float8_error_max=None if error is None else error.max,
        )
