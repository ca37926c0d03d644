"""The figures of `rayhs inspect` as plain data; ``Inspection.to_dict`` is what ``--json`` prints."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Distribution:
    """Of whole numbers, exact: quantiles are values that occur, of rank ``floor(q (count - 1))``."""

    count: int
    total: int
    mean: float
    min: int
    median: int
    p99: int
    max: int


@dataclass(frozen=True)
class LengthBin:
    """Samples with ``first`` to ``last`` tokens, both included."""

    first: int
    last: int
    ok: int
    failed: int


@dataclass(frozen=True)
class Lengths:
    """Tokens a sample, over all samples; None where there is no such sample.

    Of good samples as they are stored (generated tokens included), of failed ones as planned. Rejected ones have no
    tokens. A bin begins at every power of the square root of two.
    """

    ok: Distribution | None
    failed: Distribution | None
    histogram: list[LengthBin]


@dataclass(frozen=True)
class DuplicateGroup:
    """``samples`` good samples of the same ``tokens`` token ids; ``first_id`` is the first of them."""

    samples: int
    tokens: int
    first_id: str


@dataclass(frozen=True)
class Duplicates:
    """Good samples whose prompts have the same token ids (xxh3_128), over all samples.

    ``groups`` of two or more; ``extra`` samples that would go if each group kept one; the five ``largest`` groups.
    """

    groups: int
    extra: int
    largest: list[DuplicateGroup]


@dataclass(frozen=True)
class Loss:
    """Which tokens the loss counts, over all good samples; ``samples_without`` have none that it counts."""

    tokens: int
    counted: int
    share: float | None
    samples_without: int


@dataclass(frozen=True)
class LayerFigures:
    """One layer's states over the tokens read, computed in float32 or, of extreme ones, float64.

    ``norm_*`` are of the Euclidean norm of a token's state `[hidden]`: ``norm_std`` divides by the number of tokens;
    quantiles (p1, median, p99) are within 0.5 % of the norm of rank ``floor(q (tokens - 1))``, the others exact.
    ``abs_mean`` and ``abs_max`` are over single values, ``zero_share`` is the share of them that are 0.
    ``cosine_before`` is the mean over tokens of the cosine between this layer's state and that of the stored layer
    before; None of the first. ``non_finite`` tokens have an infinity or NaN and are in no other figure.
    ``float8_error_mean`` and ``_max`` are ``||x - q s|| / ||x||`` as the run measured it, over all samples; None of
    other dtypes.
    """

    tokens: int
    norm_mean: float
    norm_std: float
    norm_min: float
    norm_p1: float
    norm_median: float
    norm_p99: float
    norm_max: float
    abs_mean: float
    abs_max: float
    zero_share: float
    cosine_before: float | None
    non_finite: int
    float8_error_mean: float | None
    float8_error_max: float | None


@dataclass(frozen=True)
class Counted:
    """A token id or a dimension, in how many massive tokens of a layer it is."""

    number: int
    tokens: int


@dataclass(frozen=True)
class LayerMassive:
    """The massive tokens of a layer: those that hold a massive activation.

    An activation is massive if its magnitude is over 100 and at least 1000 times the median magnitude of its hidden
    state, which is all of the layer's values in one sample (Sun et al. 2024, arXiv:2402.17762, section 2).

    ``first_token_share``: of the massive tokens, how many are the first of their sample. ``positions``: their number
    by position bin, see `Massive.position_bins`. ``token_ids`` and ``dimensions``: the ten most frequent.
    """

    tokens: int
    token_share: float
    samples: int
    first_token_share: float | None
    positions: list[int]
    token_ids: list[Counted]
    dimensions: list[Counted]


@dataclass(frozen=True)
class MassiveActivation:
    """One value; ``median`` is the median magnitude of its hidden state."""

    layer: int
    dimension: int
    value: float
    median: float
    sample_id: str
    position: int
    token_id: int


@dataclass(frozen=True)
class Massive:
    """Massive activations by layer id; ``top`` has the ten largest, at most one a layer and dimension.

    ``position_bins`` are first and last position, both included; the last bin is as long as the longest sample.
    """

    position_bins: list[tuple[int, int]]
    layers: dict[str, LayerMassive]
    top: list[MassiveActivation]


@dataclass(frozen=True)
class States:
    """Figures of the states of ``samples`` good samples, ``tokens`` tokens; ``all_samples``: they are all there are."""

    samples: int
    tokens: int
    all_samples: bool
    layers: dict[str, LayerFigures]
    massive: Massive


@dataclass(frozen=True)
class Inspection:
    """What `inspect_dataset` found. Counts are samples, ``reasons`` of those without states, by status.

    In a reason, numbers are replaced by N.
    """

    uri: str
    model: str
    dtype: str
    hidden_size: int
    samples: int
    ok: int
    failed: int
    rejected: int
    reasons: dict[str, dict[str, int]]
    lengths: Lengths
    duplicates: Duplicates
    loss: Loss
    states: States

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)
