"""What is in a dataset: norms, massive activations, lengths, duplicates, loss masks; as data and as an HTML page."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from rayhs.dataset import Dataset, Sample
from rayhs.errors import ConfigError
from rayhs.inspect.figures import Inspection
from rayhs.inspect.prompts import Prompts
from rayhs.inspect.states import StateTotals

__all__ = ["Inspection", "inspect_dataset"]

DEFAULT_SAMPLES = 1000
_DEFAULT_BYTES = 4 * 2**30
_LEAST_SAMPLES = 32

OnProgress = Callable[[str, int, int], None]  # "tokens" or "states", samples done, samples in all


def inspect_dataset(
    dataset: Dataset,
    *,
    samples: int | None = None,
    on_progress: OnProgress = lambda phase, done, total: None,
) -> Inspection:
    """Figures of a complete dataset; what each is says `rayhs.inspect.figures`.

    Lengths, reasons, duplicates and loss masks are of all samples, out of index and plan: 60 bytes of memory a
    sample. Figures of states are of all good samples or of some, chosen evenly over the index; besides, memory is
    that of a few samples and, where all of more than a few are read, of the index (`Dataset.stream`).

    Args:
        dataset: as `rayhs.open` gives it; only its layers are looked at.
        samples: read the states of so many samples, 0 for all. Default: 1000, fewer where these would be over 4 GiB.

    Raises:
        ConfigError: the dataset is not complete, or ``samples`` is negative.
        FormatError, StoreError: it is damaged or can't be read.
    """
    if not dataset.complete:
        raise ConfigError(f"{dataset.uri}: not finished; run rayhs extract (or import) again, then inspect")
    if samples is not None and samples < 0:
        raise ConfigError(f"{samples=}: give a number of samples, or 0 for all")
    rows = len(dataset)
    prompts = Prompts(dataset, lambda done: on_progress("tokens", done, rows))
    good = np.flatnonzero(prompts.good)
    count = _how_many(dataset, prompts, samples)
    states = StateTotals(dataset.layers)
    for done, sample in enumerate(_chosen(dataset, good, count), 1):
        states.add(sample)
        on_progress("states", done, count)
    assert dataset.summary is not None
    return Inspection(
        uri=dataset.uri,
        model=dataset.model,
        dtype=dataset.dtype,
        hidden_size=dataset.hidden_size,
        samples=rows,
        ok=len(good),
        failed=prompts.reasons["failed"].total(),
        rejected=prompts.reasons["rejected"].total(),
        reasons={status: dict(reasons.most_common()) for status, reasons in prompts.reasons.items()},
        lengths=prompts.lengths(),
        duplicates=prompts.duplicates(),
        loss=prompts.loss(),
        states=states.figures(count == len(good), dataset.summary.errors),
    )


def _how_many(dataset: Dataset, prompts: Prompts, samples: int | None) -> int:
    good = int(prompts.good.sum())
    if samples is not None:
        return min(good, samples or good)
    nbytes = int(prompts.stored[prompts.good].sum()) * dataset.token_bytes
    fitting = good if nbytes <= _DEFAULT_BYTES else max(_LEAST_SAMPLES, good * _DEFAULT_BYTES // nbytes)
    return min(good, fitting, DEFAULT_SAMPLES)


def _chosen(dataset: Dataset, good: np.ndarray, count: int) -> Iterator[Sample]:
    """``count`` good samples, evenly over those at the positions ``good``."""
    if count == len(good):
        return iter(dataset.stream())
    # The middle of each of `count` equal parts.
    return dataset.samples(good[(2 * np.arange(count) + 1) * len(good) // (2 * count)], prefetch=2)
