"""How often tokens occur, and the maps between a draft model's vocabulary and its target's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from rayhs.codec import Array

if TYPE_CHECKING:
    from rayhs.dataset import Dataset


class TokenCounts:
    """Counts of token ids where the loss counts."""

    def __init__(self) -> None:
        self._counts = np.zeros(0, np.int64)

    def add(self, token_ids: Array, loss_mask: Array) -> None:
        """``token_ids`` and ``loss_mask`` `[tokens]`, of one sample."""
        found = np.bincount(token_ids[loss_mask.astype(bool)], minlength=len(self._counts))
        found[: len(self._counts)] += self._counts
        self._counts = found

    def to_dict(self) -> dict[int, int]:
        """Count by token id, of those that occur."""
        return {int(token): int(self._counts[token]) for token in np.flatnonzero(self._counts)}


def count_tokens(dataset: Dataset, length: int | None = None) -> dict[int, int]:
    """How often each token occurs where the loss counts, in the first ``length`` tokens of samples (default all)."""
    counts = TokenCounts()
    for sample in dataset.tokens_only().stream():
        counts.add(sample.token_ids[:length], sample.loss_mask[:length])
    return counts.to_dict()


def draft_maps(
    counts: dict[int, int], draft_size: int, target_size: int, always: Sequence[int] = ()
) -> tuple[Array, Array]:
    """The ``draft_size`` most frequent tokens, of equals the lower ids; filled up with the lowest ids that are left.

    Without ``always``, the tokens that are taken first, the same as speculators 0.9, `train/vocab_mapping.py`,
    `build_vocab_mappings_from_distribution`.

    Returns:
        ``d2t`` int64 `[draft_size]`: target id minus draft id; ``t2d`` bool `[target_size]`: whether the draft has it.
    """
    frequent = sorted(counts, key=lambda token: (-counts[token], token))
    chosen = list(dict.fromkeys([*always, *frequent]))[:draft_size]
    held = set(chosen)
    rest = (token for token in range(target_size) if token not in held)
    chosen += [next(rest) for _ in range(draft_size - len(chosen))]
    ids = np.asarray(sorted(chosen), np.int64)
    in_draft = np.zeros(target_size, bool)
    in_draft[ids] = True
    return ids - np.arange(draft_size), in_draft
