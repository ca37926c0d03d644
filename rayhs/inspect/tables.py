"""The figures as tables of text, which the command line and the page share: a header and rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rayhs.inspect.figures import Counted, LayerFigures, Massive, States
from rayhs.inspect.numbers import percent, shown

Table = tuple[list[str], list[list[str]]]


def read_states(states: States, good: int) -> str:
    """Which samples the figures of states are of."""
    if states.all_samples:
        return f"all {states.samples:,} samples, {states.tokens:,} tokens"
    return f"{states.samples:,} of {good:,} samples, evenly over the index, {states.tokens:,} tokens"


def layer_table(states: States) -> Table:
    """Header and a row a layer; columns that say nothing of any layer are left out."""
    columns: dict[str, Callable[[LayerFigures], str]] = {
        "norm: mean": lambda own: shown(own.norm_mean),
        "std": lambda own: shown(own.norm_std),
        "min": lambda own: shown(own.norm_min),
        "median": lambda own: shown(own.norm_median),
        "p99": lambda own: shown(own.norm_p99),
        "max": lambda own: shown(own.norm_max),
        "mean |x|": lambda own: shown(own.abs_mean),
        "max |x|": lambda own: shown(own.abs_max),
        "zeros": lambda own: percent(own.zero_share),
        "cosine to layer before": lambda own: shown(own.cosine_before),
        "not finite": lambda own: shown(own.non_finite or None),
        "float8 error": lambda own: percent(own.float8_error_mean),
        "at most": lambda own: percent(own.float8_error_max),
    }
    own = list(states.layers.values())
    cells = {name: [cell(one) for one in own] for name, cell in columns.items()}
    used = {name: column for name, column in cells.items() if set(column) != {shown(None)}}
    return ["layer", *used], [[layer, *row] for layer, *row in zip(states.layers, *used.values(), strict=True)]


def massive_table(massive: Massive) -> Table:
    """A row a layer that has massive tokens; of dimensions and token ids the most frequent, with their tokens."""
    header = ["layer", "massive tokens", "share", "samples", "first of a sample", "dimensions", "token ids"]
    rows = [
        [
            *(layer, shown(own.tokens), percent(own.token_share), shown(own.samples), percent(own.first_token_share)),
            *(_most(own.dimensions), _most(own.token_ids)),
        ]
        for layer, own in massive.layers.items()
        if own.tokens
    ]
    return header, rows


def _most(counted: Sequence[Counted]) -> str:
    return ", ".join(f"{one.number} ({one.tokens:,})" for one in counted[:5])


def largest_table(massive: Massive) -> Table:
    """A row for each of the largest massive activations."""
    header = ["value", "median |x|", "layer", "dimension", "position", "token id", "sample"]
    rows = [
        [
            *map(shown, (one.value, one.median)),
            *map(str, (one.layer, one.dimension, one.position, one.token_id, one.sample_id)),
        ]
        for one in massive.top
    ]
    return header, rows
