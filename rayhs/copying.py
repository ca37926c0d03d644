"""Copies of hidden states out of the blocks of the KV cache into staged samples; here from host memory.

A copier works piece by piece, so that neither a request's length nor their number decides how much
scratch memory is used, and hands a sample over only when it is whole.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from rayhs.codec import FP8, StagedHeader
from rayhs.fp8 import LARGEST, LEAST_SCALE
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

    def share(self, first: int, step: int, layers: tuple[int, ...]) -> StateCache:
        """The same of every ``step``-th layer from the ``first``-th on: ``layers``."""
        view = self.tensor[:, first::step] if self.block_axis == 2 else self.tensor[:, :, first::step]
        return replace(self, tensor=view, layers=layers)

    def block(self, block_id: int, tokens: int) -> torch.Tensor:
        """View `[layers, tokens, hidden]` of the first ``tokens`` positions of a block."""
        view = self.tensor[block_id]
        return view[:, :tokens] if self.block_axis == 2 else view[:tokens].transpose(0, 1)

    def gather(self, block_ids: torch.Tensor, tokens: int) -> torch.Tensor:
        """Copy the first ``tokens`` positions of these blocks: `[layers, tokens, hidden]`, contiguous."""
        blocks = self.tensor.index_select(0, block_ids)
        if self.block_axis == 1:
            return blocks.flatten(0, 1)[:tokens].transpose(0, 1).contiguous()
        return blocks.transpose(0, 1).flatten(1, 2)[:, :tokens].contiguous()


class BlockCopier(Protocol):
    """Copies finished requests out of the cache; called from vLLM's worker loop only."""

    def staged_bytes(self, tokens: int) -> int: ...

    def start(self, req_id: str, key: str, token_ids: array[int], block_ids: Sequence[int]) -> None:
        """``token_ids`` are 4 bytes each."""
        ...

    def forward_begins(self) -> None:
        """Told before each forward: what has finished is in the cache once the work submitted until now is done."""
        ...

    def poll(self) -> set[str]:
        """Requests whose blocks are read and may be freed."""
        ...

    def close(self) -> None: ...


def quantize(states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As `rayhs.fp8.quantize` of `[layers, tokens, hidden]`, on its device; scales and errors `[layers, tokens]`."""
    scaled = states.to(torch.float32, copy=True)
    largest = torch.full((), LARGEST, device=states.device)  # by a plain number torch would not divide on a GPU
    scales = (torch.linalg.vector_norm(scaled, float("inf"), -1) / largest).clamp_(min=float(LEAST_SCALE))
    scaled.div_(scales.unsqueeze(-1))
    norms = torch.linalg.vector_norm(scaled, 2, -1).clamp_(min=float(LEAST_SCALE))
    q = scaled.to(torch.float8_e4m3fn)
    off = torch.linalg.vector_norm(scaled.sub_(q.to(torch.float32)), 2, -1)
    return q, scales, off.div_(norms)


class StagedLayout:
    """How samples of a cache are staged: as they are, or in float8_e4m3fn."""

    def __init__(self, cache: StateCache, quantizes: bool) -> None:
        self.cache, self.quantizes = cache, quantizes
        self.dtype = FP8 if quantizes else cache.dtype
        metadata = {"layers": ",".join(map(str, cache.layers)), "dtype": self.dtype}
        self._torch_dtype: torch.dtype = getattr(torch, self.dtype)
        self.header = StagedHeader(cache.layers, cache.hidden, self.dtype, metadata)

    def encode(self, states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """What is staged of `[layers, tokens, hidden]`: the states, or float8 states, scales and errors."""
        return quantize(states) if self.quantizes else (states,)

    def pinned(self, tokens: int) -> tuple[torch.Tensor, ...]:
        """Pinned memory for what `encode` gives of so many tokens."""
        return tuple(torch.empty(shape, dtype=dtype, pin_memory=True) for dtype, shape in self._parts(tokens))

    def views(self, memory: memoryview, offset: int, tokens: int) -> tuple[torch.Tensor, ...]:
        """The same in staged memory from byte ``offset`` on."""
        views = []
        for dtype, shape in self._parts(tokens):
            views.append(torch.frombuffer(memory, dtype=dtype, count=math.prod(shape), offset=offset).view(shape))
            offset += views[-1].nbytes
        return tuple(views)

    def _parts(self, tokens: int) -> list[tuple[torch.dtype, tuple[int, ...]]]:
        layers, hidden = len(self.cache.layers), self.cache.hidden
        small = [(torch.float32, (layers, tokens))] * 2 if self.quantizes else []
        return [(self._torch_dtype, (layers, tokens, hidden)), *small]

    @property
    def encoded_token_bytes(self) -> int:
        """Bytes of what `encode` gives of one token."""
        return self.header.token_bytes - 4  # without its id


class StagedSample:
    """The staged file of one sample; ``parts`` are what `StagedLayout.encode` gives, in its memory."""

    def __init__(self, layout: StagedLayout, area: StagingArea, key: str, token_ids: array[int]) -> None:
        tokens, header = len(token_ids), layout.header.build(len(token_ids))
        nbytes = len(header) + tokens * layout.header.token_bytes
        self.file: StagedFile | StagedSlot = area.create(key, nbytes)
        memory = self.file.buffer
        memory[: len(header)] = header
        self.parts = layout.views(memory, len(header), tokens)
        memory[len(memory) - 4 * tokens :] = memoryview(token_ids).cast("B")

    def places(self, first: int, tokens: int) -> list[torch.Tensor]:
        """The parts of ``tokens`` tokens from ``first`` on."""
        return [part[:, first : first + tokens] for part in self.parts]


class HostCopier:
    """Copies at once, block by block, straight from the cache into the staged file: no scratch."""

    def __init__(self, layout: StagedLayout, area: StagingArea, metrics: Metrics) -> None:
        self._layout, self._area, self._metrics = layout, area, metrics
        self._done: set[str] = set()

    def staged_bytes(self, tokens: int) -> int:
        return self._layout.header.at_most(tokens)

    def start(self, req_id: str, key: str, token_ids: array[int], block_ids: Sequence[int]) -> None:
        cache = self._layout.cache
        with self._metrics.timed("cache to staging", len(token_ids) * cache.token_bytes):
            sample = StagedSample(self._layout, self._area, key, token_ids)
            for first, block_id in zip(range(0, len(token_ids), cache.block_size), block_ids, strict=False):
                tokens = min(cache.block_size, len(token_ids) - first)
                encoded = self._layout.encode(cache.block(block_id, tokens))
                for source, place in zip(encoded, sample.places(first, tokens), strict=True):
                    place.copy_(source)
            sample.file.publish()
        self._done.add(req_id)

    def forward_begins(self) -> None:
        return None

    def poll(self) -> set[str]:
        done, self._done = self._done, set()
        return done

    def close(self) -> None:
        return None
