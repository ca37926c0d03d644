"""Copies of hidden states out of the blocks of the KV cache into staged samples; here from host memory.

A copier works piece by piece, so that neither a request's length nor their number decides how much
scratch memory is used, and hands a sample over only when it is whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from rayhs.codec import build_header, staged_bytes_at_most, staged_specs
from rayhs.metrics import Metrics
from rayhs.staging import StagedFile, StagedSlot, StagingArea


@dataclass(frozen=True)
class StateCache:
    """The drafter's cache ``[blocks, ., ., hidden]``: ``block_axis`` holds the positions, the other the layers."""

    tensor: torch.Tensor
    block_axis: int
    layers: tuple[int, ...]

    @property
    def block_size(self) -> int:
        return int(self.tensor.shape[self.block_axis])

    @property
    def hidden(self) -> int:
        return int(self.tensor.shape[3])

    @property
    def dtype(self) -> str:
        return str(self.tensor.dtype).removeprefix("torch.")

    @property
    def token_bytes(self) -> int:
        """Bytes of all layers of one token."""
        return len(self.layers) * self.hidden * int(self.tensor.element_size())

    def block(self, block_id: int, tokens: int) -> torch.Tensor:
        """View `[layers, tokens, hidden]` of the first ``tokens`` positions of a block."""
        view = self.tensor[block_id]
        return view[:, :tokens] if self.block_axis == 2 else view[:tokens].transpose(0, 1)

    def gather(self, block_ids: torch.Tensor) -> torch.Tensor:
        """Copy whole blocks: `[layers, blocks * block_size, hidden]`."""
        blocks = self.tensor.index_select(0, block_ids)
        layers_first = blocks.permute(2, 0, 1, 3) if self.block_axis == 1 else blocks.permute(1, 0, 2, 3)
        return layers_first.reshape(len(self.layers), -1, self.hidden)


class BlockCopier(Protocol):
    """Copies finished requests out of the cache; called from vLLM's worker loop only."""

    def staged_bytes(self, tokens: int) -> int: ...

    def start(self, req_id: str, key: str, token_ids: Sequence[int], block_ids: Sequence[int]) -> None: ...

    def poll(self) -> set[str]:
        """Requests whose blocks are read and may be freed."""
        ...

    def close(self) -> None: ...


class StagedSample:
    """The staged file of one sample as tensors: `states` `[layers, tokens, hidden]` in its memory."""

    def __init__(self, cache: StateCache, area: StagingArea, key: str, token_ids: Sequence[int]) -> None:
        specs = staged_specs(cache.layers, cache.hidden, cache.dtype, len(token_ids))
        header = build_header(specs, {"layers": ",".join(map(str, cache.layers)), "dtype": cache.dtype})
        self.file: StagedFile | StagedSlot = area.create(key, len(header) + sum(spec.nbytes for spec in specs))
        memory = self.file.buffer
        memory[: len(header)] = header
        tokens = len(token_ids)
        count = len(cache.layers) * tokens * cache.hidden
        flat = torch.frombuffer(memory, dtype=cache.tensor.dtype, count=count, offset=len(header))
        self.states = flat.view(len(cache.layers), tokens, cache.hidden)
        ids = torch.frombuffer(memory, dtype=torch.int32, count=tokens, offset=len(header) + flat.nbytes)
        ids.copy_(torch.tensor(token_ids, dtype=torch.int32))


class HostCopier:
    """Copies at once, block by block, straight from the cache into the staged file: no scratch."""

    def __init__(self, cache: StateCache, area: StagingArea, metrics: Metrics) -> None:
        self._cache, self._area, self._metrics = cache, area, metrics
        self._done: set[str] = set()

    def staged_bytes(self, tokens: int) -> int:
        return staged_bytes_at_most(self._cache.layers, self._cache.hidden, self._cache.dtype, tokens)

    def start(self, req_id: str, key: str, token_ids: Sequence[int], block_ids: Sequence[int]) -> None:
        with self._metrics.timed("cache to staging", len(token_ids) * self._cache.token_bytes):
            sample = StagedSample(self._cache, self._area, key, token_ids)
            size = self._cache.block_size
            for first, block_id in zip(range(0, len(token_ids), size), block_ids, strict=False):
                tokens = min(size, len(token_ids) - first)
                sample.states[:, first : first + tokens].copy_(self._cache.block(block_id, tokens))
            sample.file.publish()
        self._done.add(req_id)

    def poll(self) -> set[str]:
        done, self._done = self._done, set()
        return done

    def close(self) -> None:
        return None
