"""Copies of hidden states out of the blocks of the KV cache into staged files: from host memory and from CUDA.

Both copiers work piece by piece, so that neither a request's length nor their number decides how
much scratch and pinned memory is used, and hand a sample over only when it is whole.
"""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol

import torch

from rayhs.codec import build_header, staged_bytes_at_most, staged_specs
from rayhs.metrics import Metrics
from rayhs.staging import StagedFile, StagingArea

_PIECE_BYTES = 16 * 2**20
_WRITERS = 4


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


class _StagedSample:
    """The staged file of one sample as tensors: `states` `[layers, tokens, hidden]` in its memory."""

    def __init__(self, cache: StateCache, area: StagingArea, key: str, token_ids: Sequence[int]) -> None:
        specs = staged_specs(cache.layers, cache.hidden, cache.dtype, len(token_ids))
        header = build_header(specs, {"layers": ",".join(map(str, cache.layers)), "dtype": cache.dtype})
        self.file: StagedFile = area.create(key, len(header) + sum(spec.nbytes for spec in specs))
        memory = memoryview(self.file.buffer)
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
            sample = _StagedSample(self._cache, self._area, key, token_ids)
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


@dataclass
class _Transfer:
    req_id: str
    key: str
    sample: _StagedSample
    blocks: list[int]
    tokens: int
    next_block: int = 0
    events: list[torch.cuda.Event] = field(default_factory=list)
    writes: list[Future[None]] = field(default_factory=list)


class CudaCopier:
    """Gathers pieces on a stream of its own into pooled pinned buffers; threads move those into the file.

    The forward's stream is never waited for: an event orders a copy after the forwards submitted so
    far. GPU scratch and pinned memory are bounded by the pool. Blocks are free once the last piece
    has left the device; the hand-over follows once its bytes are in the file.
    """

    def __init__(self, cache: StateCache, area: StagingArea, pinned_bytes: int, metrics: Metrics) -> None:
        self._cache, self._area, self._metrics = cache, area, metrics
        block_bytes = cache.token_bytes * cache.block_size
        self._piece_blocks = max(1, _PIECE_BYTES // block_bytes)
        piece = (len(cache.layers), self._piece_blocks * cache.block_size, cache.hidden)
        count = max(2, pinned_bytes // (self._piece_blocks * block_bytes))
        self._pool: queue.SimpleQueue[torch.Tensor] = queue.SimpleQueue()
        for _ in range(count):
            self._pool.put(torch.empty(piece, dtype=cache.tensor.dtype, pin_memory=True))
        self._stream = torch.cuda.Stream(device=cache.tensor.device)
        self._writers = ThreadPoolExecutor(_WRITERS, thread_name_prefix="rayhs-stage")
        self._waiting: deque[_Transfer] = deque()
        self._copying: list[_Transfer] = []

    def staged_bytes(self, tokens: int) -> int:
        return staged_bytes_at_most(self._cache.layers, self._cache.hidden, self._cache.dtype, tokens)

    def start(self, req_id: str, key: str, token_ids: Sequence[int], block_ids: Sequence[int]) -> None:
        sample = _StagedSample(self._cache, self._area, key, token_ids)
        blocks = list(block_ids)[: -(-len(token_ids) // self._cache.block_size)]
        self._waiting.append(_Transfer(req_id, key, sample, blocks, len(token_ids)))

    def poll(self) -> set[str]:
        self._submit()
        done = {t.req_id for t in self._copying if all(event.query() for event in t.events)}
        self._copying = [t for t in self._copying if t.req_id not in done]
        return done

    def close(self) -> None:
        while self._waiting:
            self._submit(block=True)
        self._writers.shutdown(wait=True)

    def _submit(self, block: bool = False) -> None:
        if not self._waiting:
            return
        ready = torch.cuda.Event()
        ready.record()
        self._stream.wait_event(ready)
        while self._waiting:
            transfer = self._waiting[0]
            while transfer.next_block < len(transfer.blocks):
                try:
                    pinned = self._pool.get(block=block)
                except queue.Empty:
                    self._metrics.waiting("wait for pinned memory", True)
                    return  # every pinned buffer is in flight; go on at the next step
                self._metrics.waiting("wait for pinned memory", False)
                self._copy_piece(transfer, pinned)
            self._waiting.popleft()
            self._copying.append(transfer)
            self._writers.submit(self._hand_over, transfer)

    def _copy_piece(self, transfer: _Transfer, pinned: torch.Tensor) -> None:
        size = self._cache.block_size
        blocks = transfer.blocks[transfer.next_block : transfer.next_block + self._piece_blocks]
        first = transfer.next_block * size
        tokens = min(len(blocks) * size, transfer.tokens - first)
        begun, event = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        with torch.cuda.stream(self._stream):
            begun.record(self._stream)
            ids = torch.tensor(blocks, pin_memory=True).to(self._cache.tensor.device, non_blocking=True)
            gathered = self._cache.gather(ids)[:, :tokens]
            pinned[:, :tokens].copy_(gathered, non_blocking=True)
            event.record(self._stream)
        transfer.next_block += len(blocks)
        transfer.events.append(event)
        target = transfer.sample.states[:, first : first + tokens]
        transfer.writes.append(self._writers.submit(self._write, (begun, event), pinned, target))

    def _write(
        self, copy: tuple[torch.cuda.Event, torch.cuda.Event], pinned: torch.Tensor, target: torch.Tensor
    ) -> None:
        begun, ended = copy
        try:
            ended.synchronize()
            self._metrics.add("GPU to pinned", begun.elapsed_time(ended) / 1000, target.nbytes)
            # vLLM's worker made both tensors in inference mode; threads start outside.
            with self._metrics.timed("pinned to staging", target.nbytes), torch.inference_mode():
                target.copy_(pinned[:, : target.shape[1]])
        finally:
            self._pool.put(pinned)

    def _hand_over(self, transfer: _Transfer) -> None:
        # Queued behind its own pieces in one pool, so waiting here can't starve them.
        try:
            for write in transfer.writes:
                write.result()
        except RuntimeError as error:  # a CUDA error of the copy: the sample fails, loudly
            transfer.sample.file.discard()
            self._area.fail(transfer.key, f"copy failed: from the GPU: {error}")
        else:
            transfer.sample.file.publish()
