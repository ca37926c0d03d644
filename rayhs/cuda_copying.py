"""Copies of hidden states out of the KV cache of a GPU: the device writes into the arena itself.

Samples with files of their own (no arena, or no gap in it) go through pooled pinned buffers.
"""

from __future__ import annotations

import contextlib
import queue
from array import array
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import torch

from rayhs.copying import StagedLayout, StagedSample
from rayhs.log import logger
from rayhs.metrics import Metrics
from rayhs.staging import StagedSlot, StagingArea

_PIECE_BYTES = 32 * 2**20
_WRITERS = 4


@dataclass
class _Transfer:
    req_id: str
    key: str
    sample: StagedSample
    blocks: list[int]
    tokens: int
    next_block: int = 0
    begun: torch.cuda.Event | None = None
    ended: torch.cuda.Event | None = None
    writes: list[Future[None]] = field(default_factory=list)


class CudaCopier:
    """Gathers pieces on a stream of its own, and copies them to the host from there.

    The forward's stream is never waited for: an event orders a copy after the forwards that wrote what it
    reads, and it runs beside the one submitted since. GPU scratch is a piece, as the stream works on one after
    the other (and some ten where a GPU without float8 quantizes). Blocks are free once the last piece has left the
    device.
    """

    def __init__(self, layout: StagedLayout, area: StagingArea, pinned_bytes: int, metrics: Metrics) -> None:
        from rayhs.cuda_gather import gatherer  # beside a CPU build of torch there is no Triton

        cache = layout.cache
        self._layout, self._cache, self._area, self._metrics = layout, cache, area, metrics
        self._gather = gatherer(layout)
        self._piece_blocks = max(1, _PIECE_BYTES // (cache.token_bytes * cache.block_size))
        self._written = torch.cuda.Event()
        # Ahead of the forward's kernels, which would else hold the few small ones up.
        self._stream = torch.cuda.Stream(device=cache.tensor.device, priority=-1)
        self._gather(torch.zeros(1, dtype=torch.long, device=cache.tensor.device), 1)  # so that it is compiled
        self._arena = _register(area)
        self._pinned = _PinnedWriters(layout, area, self._piece_blocks * cache.block_size, pinned_bytes, metrics)
        self._waiting: deque[_Transfer] = deque()
        self._copying: deque[_Transfer] = deque()

    def staged_bytes(self, tokens: int) -> int:
        return self._layout.at_most(tokens)

    def start(self, req_id: str, key: str, token_ids: array[int], block_ids: Sequence[int]) -> None:
        sample = StagedSample(self._layout, self._area, key, token_ids)
        blocks = list(block_ids)[: -(-len(token_ids) // self._cache.block_size)]
        self._waiting.append(_Transfer(req_id, key, sample, blocks, len(token_ids)))

    def forward_begins(self) -> None:
        self._written.record()

    def poll(self) -> set[str]:
        self._submit()
        done: set[str] = set()
        # In the order of the stream: when one has not ended, none behind it has.
        while self._copying and _has_ended(self._copying[0]):
            transfer = self._copying.popleft()
            self._count(transfer)
            if self._is_direct(transfer):
                transfer.sample.file.publish()
            done.add(transfer.req_id)
        return done

    def close(self) -> None:
        while self._waiting:
            self._submit(block=True)
        self._stream.synchronize()
        self.poll()
        self._pinned.close()
        if self._arena is not None:
            torch.cuda.cudart().cudaHostUnregister(self._arena.data_ptr())

    def _is_direct(self, transfer: _Transfer) -> bool:
        return self._arena is not None and isinstance(transfer.sample.file, StagedSlot)

    def _submit(self, block: bool = False) -> None:
        if not self._waiting:
            return
        self._stream.wait_event(self._written)
        while self._waiting:
            transfer = self._waiting[0]
            with torch.cuda.stream(self._stream):
                if not self._copy(transfer, block):
                    return  # every pinned buffer is in flight; go on at the next step
                transfer.ended = torch.cuda.Event(enable_timing=True)
                transfer.ended.record(self._stream)
            self._copying.append(self._waiting.popleft())

    def _copy(self, transfer: _Transfer, block: bool) -> bool:
        """Submit what is left of a transfer; whether that is all."""
        if transfer.begun is None:
            transfer.begun = torch.cuda.Event(enable_timing=True)
            transfer.begun.record(self._stream)
        direct = self._is_direct(transfer)
        ids = torch.tensor(transfer.blocks, pin_memory=True).to(self._cache.tensor.device, non_blocking=True)
        while transfer.next_block < len(transfer.blocks):
            # Before the work: without one the piece is made anew at the next step.
            pinned = None if direct else self._pinned.take(block)
            if pinned is None and not direct:
                return False
            first, encoded = self._piece(transfer, ids)
            if pinned is None:
                _to_host(encoded, transfer.sample.places(first, encoded[0].shape[1]))
            else:
                self._pinned.copy(self._stream, encoded, pinned, transfer, first)
            transfer.next_block += self._piece_blocks
        if not direct:
            self._pinned.hand_over(transfer)
        return True

    def _piece(self, transfer: _Transfer, ids: torch.Tensor) -> tuple[int, tuple[torch.Tensor, ...]]:
        """The first token and the encoded states of the next piece."""
        size, begin = self._cache.block_size, transfer.next_block
        tokens = min(self._piece_blocks * size, transfer.tokens - begin * size)
        return begin * size, self._gather(ids[begin : begin + self._piece_blocks], tokens)

    def _count(self, transfer: _Transfer) -> None:
        assert transfer.begun is not None and transfer.ended is not None
        seconds = transfer.begun.elapsed_time(transfer.ended) / 1000
        self._metrics.add("GPU to host", seconds, transfer.sample.nbytes)


def _to_host(parts: Sequence[torch.Tensor], host: Sequence[torch.Tensor]) -> None:
    for part, place in zip(parts, host, strict=True):
        # Where it has gaps a layer at a time: all at once would go through a temporary, and block.
        pairs = [(part, place)] if place.is_contiguous() else zip(part, place, strict=True)
        for source, target in pairs:
            target.copy_(source, non_blocking=True)


def _has_ended(transfer: _Transfer) -> bool:
    return transfer.ended is not None and transfer.ended.query()


def _register(area: StagingArea) -> torch.Tensor | None:
    """The arena, page-locked for the device; None where there is none or CUDA refuses."""
    if area.arena is None:
        return None
    memory = torch.frombuffer(area.arena.memory, dtype=torch.uint8)
    result = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0)
    if int(result) != 0:
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device="cuda")  # takes up the error, which the next kernel would else report as its own
        logger.warning("CUDA can't register the staging memory (%s): states are copied once more on the host", result)
        return None
    return memory


class _PinnedWriters:
    """Pinned buffers, allocated when first used, and threads that move them into staged samples."""

    def __init__(
        self, layout: StagedLayout, area: StagingArea, piece_tokens: int, pinned_bytes: int, metrics: Metrics
    ) -> None:
        self._layout, self._area, self._metrics = layout, area, metrics
        self._piece_tokens = piece_tokens
        self._left = max(2, pinned_bytes // layout.at_most(piece_tokens))
        self._pool: queue.SimpleQueue[tuple[torch.Tensor, ...]] = queue.SimpleQueue()
        # A thread's own device is 0 until it says so, and using that takes memory there.
        self._writers = ThreadPoolExecutor(
            _WRITERS,
            thread_name_prefix="rayhs-stage",
            initializer=torch.cuda.set_device,
            initargs=(layout.cache.tensor.device,),
        )

    def take(self, block: bool) -> tuple[torch.Tensor, ...] | None:
        """A buffer; None where every one is in use and ``block`` is not set."""
        pinned = self._buffer(block)
        self._metrics.waiting("wait for pinned memory", pinned is None)
        return pinned

    def copy(
        self,
        stream: torch.cuda.Stream,
        encoded: Sequence[torch.Tensor],
        pinned: tuple[torch.Tensor, ...],
        transfer: _Transfer,
        first: int,
    ) -> None:
        """Copy a piece into a buffer taken, and from there into its sample."""
        tokens = encoded[0].shape[1]
        _to_host(encoded, [part[:, :tokens] for part in pinned])
        copied = torch.cuda.Event()
        copied.record(stream)
        places = transfer.sample.places(first, tokens)
        transfer.writes.append(self._writers.submit(self._write, copied, pinned, places))

    def hand_over(self, transfer: _Transfer) -> None:
        # Queued behind its own pieces in one pool, so waiting there can't starve them.
        self._writers.submit(self._publish, transfer)

    def close(self) -> None:
        self._writers.shutdown(wait=True)

    def _buffer(self, block: bool) -> tuple[torch.Tensor, ...] | None:
        try:
            return self._pool.get(block=block and not self._left)
        except queue.Empty:
            if not self._left:
                return None
        self._left -= 1
        return self._layout.pinned(self._piece_tokens)

    def _write(
        self, copied: torch.cuda.Event, pinned: tuple[torch.Tensor, ...], places: Sequence[torch.Tensor]
    ) -> None:
        try:
            copied.synchronize()
            # vLLM's worker made both tensors in inference mode; threads start outside.
            nbytes = sum(place.nbytes for place in places)
            with self._metrics.timed("pinned to staging", nbytes), torch.inference_mode():
                for part, place in zip(pinned, places, strict=True):
                    place.copy_(part[:, : place.shape[1]])
        finally:
            self._pool.put(pinned)

    def _publish(self, transfer: _Transfer) -> None:
        try:
            for write in transfer.writes:
                write.result()
        except RuntimeError as error:  # a CUDA error of the copy: the sample fails, loudly
            transfer.sample.file.discard()
            self._area.fail(transfer.key, f"copy failed: from the GPU: {error}")
        else:
            transfer.sample.file.publish()
