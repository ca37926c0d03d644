"""What the target model would have said next: probabilities over a draft's vocabulary, a bounded number at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from rayhs.codec import Array, TensorSpec
from rayhs.export.target_model import TargetModel

_LOGITS_BYTES = 64 * 2**20


class Supervision:
    """The probabilities of tokens, and whether the likeliest token of all is in the draft's vocabulary.

    As NeMo Automodel has it: `_compute_target_distribution` and `compress_target_probs`.
    """

    def __init__(self, model: TargetModel, selected: Array, top_k: int) -> None:
        """``selected``: ids of the draft's vocabulary; ``top_k``: keep so many, renormalised; 0 is all."""
        self._model, self._selected = model, selected
        self._in_draft = np.zeros(model.vocab_size, bool)
        self._in_draft[selected] = True
        self._top_k = top_k if top_k < len(selected) else 0
        self._step = max(1, _LOGITS_BYTES // (4 * model.vocab_size))

    def specs(self, rows: int, length: int, dtype: np.dtype[Any]) -> list[TensorSpec]:
        """Of the tensors of `pieces`, stacked; int32 first, so that all are aligned."""
        if not self._top_k:
            return [TensorSpec("target_probs", dtype, (rows, length, len(self._selected)))]
        shape = (rows, length, self._top_k)
        return [
            TensorSpec("target_probs_indices", np.dtype(np.int32), shape),
            TensorSpec("target_probs_values", dtype, shape),
        ]

    def pieces(self, states: Array) -> Iterator[tuple[int, dict[str, Array], Array]]:
        """Of last states `[tokens, hidden]`: first token, tensors `[tokens, ...]`, which tokens the draft can say."""
        for first in range(0, len(states), self._step):
            logits = self._model.logits(self._model.normed(states[first : first + self._step]))
            yield first, self._tensors(logits), self._in_draft[logits.argmax(axis=1)]

    def _tensors(self, logits: Array) -> dict[str, Array]:
        import torch

        wanted = logits if len(self._selected) == logits.shape[1] else logits[:, self._selected]
        probabilities = torch.softmax(torch.from_numpy(wanted), dim=-1)
        if not self._top_k:
            return {"target_probs": probabilities.numpy()}
        values, indices = torch.topk(probabilities, self._top_k, dim=-1)
        values /= values.sum(dim=-1, keepdim=True)
        return {"target_probs_indices": indices.numpy(), "target_probs_values": values.numpy()}
