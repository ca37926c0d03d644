"""Copies of hidden states out of the KV cache of a GPU: the device writes into the arena itself.

Samples with files of their own (no arena, or no gap in it) go through pooled pinned buffers.
"""

from __future__ import annotations

import contextlib
import queue
from array import array
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch

from rayhs.copy_batches import Buffers, Piece, Transfer, block_table, next_pieces
from rayhs.copying import StagedLayout, StagedSample
from rayhs.log import logger
from rayhs.metrics import Metrics
from rayhs.staging import StagedSlot, StagingArea

_BATCH_BYTES = 64 * 2**20
_PINNED_PIECE_BYTES = 32 * 2**20
_WRITERS = 4


@dataclass
class _Batch:
    pieces: list[Piece]
    begun: torch.cuda.Event
    ended: torch.cuda.Event


class CudaCopier:
    """Gathers batches of pieces on a stream of its own, a kernel each, and copies them to the host from there.

    The forward's stream is never waited for: an event orders a copy after the forwards that wrote what it
    reads, and it runs beside the one submitted since. GPU scratch is a batch, as the stream works on one after
    the other (and some ten where a GPU without float8 quantizes). Blocks are free once the last piece has left the
    device.
    """

    def __init__(self, layout: StagedLayout, area: StagingArea, pinned_bytes: int, metrics: Metrics) -> None:
        from rayhs.cuda_gather import gatherer  # beside a CPU build of torch there is no Triton

        cache = layout.cache
        self._layout, self._cache, self._area, self._metrics = layout, cache, area, metrics
        self._gather = gatherer(layout)
        self._batch_tokens = _whole_blocks(_BATCH_BYTES, layout)
        self._written = torch.cuda.Event()
        # Ahead of the forward's kernels, which would else hold the few small ones up.
        self._stream = torch.cuda.Stream(device=cache.tensor.device, priority=-1)
        self._gather(torch.zeros(1, 4, dtype=torch.long, device=cache.tensor.device), [1])  # so that it is compiled
        self._arena = _register(area)
        self._pinned = _PinnedWriters(layout, area, _whole_blocks(_PINNED_PIECE_BYTES, layout), pinned_bytes, metrics)
        self._waiting: deque[Transfer] = deque()
        self._copying: deque[_Batch] = deque()

    def staged_bytes(self, tokens: int) -> int:
        return self._layout.header.at_most(tokens)

    def start(self, req_id: str, key: str, token_ids: array[int], block_ids: Sequence[int]) -> None:
        sample = StagedSample(self._layout, self._area, key, token_ids)
        blocks = np.array(block_ids, np.int64)[: -(-len(token_ids) // self._cache.block_size)]
        direct = self._arena is not None and isinstance(sample.file, StagedSlot)
        self._waiting.append(Transfer(req_id, key, sample, blocks, len(token_ids), direct))

    def forward_begins(self) -> None:
        self._written.record()

    def poll(self) -> set[str]:
        self._submit()
        done: set[str] = set()
        # In the order of the stream: when one has not ended, none behind it has.
        while self._copying and self._copying[0].ended.query():
            batch = self._copying.popleft()
            nbytes = sum(piece.tokens for piece in batch.pieces) * self._layout.encoded_token_bytes
            self._metrics.add("GPU to host", batch.begun.elapsed_time(batch.ended) / 1000, nbytes)
            for transfer in (piece.transfer for piece in batch.pieces if piece.is_last):
                if transfer.direct:
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

    def _submit(self, block: bool = False) -> None:
        if not self._waiting:
            return
        self._stream.wait_event(self._written)
        with torch.cuda.stream(self._stream):
            while pieces := self._next_pieces(block):
                self._copying.append(self._copy(pieces))

    def _next_pieces(self, block: bool) -> list[Piece]:
        def take(may_block: bool) -> Buffers | None:
            return self._pinned.take(block and may_block)

        return next_pieces(self._waiting, self._batch_tokens, self._pinned.piece_tokens, take)

    def _copy(self, pieces: list[Piece]) -> _Batch:
        batch = _Batch(pieces, torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
        batch.begun.record(self._stream)
        table = torch.from_numpy(block_table(pieces, self._cache.block_size)).pin_memory()
        encoded = self._gather(table.to(self._cache.tensor.device, non_blocking=True), [p.tokens for p in pieces])
        for piece, parts in zip(pieces, encoded, strict=True):
            if piece.buffers is None:
                _to_host(parts, piece.transfer.sample.places(piece.first, piece.tokens))
            else:
                self._pinned.copy(self._stream, parts, piece.buffers, piece.transfer, piece.first)
                if piece.is_last:
                    self._pinned.hand_over(piece.transfer)
        batch.ended.record(self._stream)
        return batch


def _whole_blocks(nbytes: int, layout: StagedLayout) -> int:
    """How many tokens of the cache are about so many bytes: those of whole blocks."""
    size = layout.cache.block_size
    return max(1, nbytes // (layout.cache.token_bytes * size)) * size


def _to_host(parts: Sequence[torch.Tensor], host: Sequence[torch.Tensor]) -> None:
    for part, place in zip(parts, host, strict=True):
        # Where it has gaps a layer at a time: all at once would go through a temporary, and block.
        pairs = [(part, place)] if place.is_contiguous() else zip(part, place, strict=True)
        for source, target in pairs:
            target.copy_(source, non_blocking=True)


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
        self.piece_tokens = piece_tokens
        self._left = max(2, pinned_bytes // (piece_tokens * layout.encoded_token_bytes))
        self._pool: queue.SimpleQueue[Buffers] = queue.SimpleQueue()
        # A thread's own device is 0 until it says so, and using that takes memory there.
        self._writers = ThreadPoolExecutor(
            _WRITERS,
            thread_name_prefix="rayhs-stage",
            initializer=torch.cuda.set_device,
            initargs=(layout.cache.tensor.device,),
        )

    def take(self, block: bool) -> Buffers | None:
        """A buffer; None where every one is in use and ``block`` is not set."""
        pinned = self._buffer(block)
        self._metrics.waiting("wait for pinned memory", pinned is None)
        return pinned

    def copy(
        self,
        stream: torch.cuda.Stream,
        encoded: Sequence[torch.Tensor],
        pinned: Buffers,
        transfer: Transfer,
        first: int,
    ) -> None:
        """Copy a piece into a buffer taken, and from there into its sample."""
        tokens = encoded[0].shape[1]
        _to_host(encoded, [part[:, :tokens] for part in pinned])
        copied = torch.cuda.Event()
        copied.record(stream)
        places = transfer.sample.places(first, tokens)
        transfer.writes.append(self._writers.submit(self._write, copied, pinned, places))

    def hand_over(self, transfer: Transfer) -> None:
        # Queued behind its own pieces in one pool, so waiting there can't starve them.
        self._writers.submit(self._publish, transfer)

    def close(self) -> None:
        self._writers.shutdown(wait=True)

    def _buffer(self, block: bool) -> Buffers | None:
        try:
            return self._pool.get(block=block and not self._left)
        except queue.Empty:
            if not self._left:
                return None
        self._left -= 1
        return self._layout.pinned(self.piece_tokens)

    def _write(self, copied: torch.cuda.Event, pinned: Buffers, places: Sequence[torch.Tensor]) -> None:
        try:
            copied.synchronize()
            # vLLM's worker made both tensors in inference mode; threads start outside.
            nbytes = sum(place.nbytes for place in places)
            with self._metrics.timed("pinned to staging", nbytes), torch.inference_mode():
                for part, place in zip(pinned, places, strict=True):
                    place.copy_(part[:, : place.shape[1]])
        finally:
            self._pool.put(pinned)

    def _publish(self, transfer: Transfer) -> None:
        try:
            for write in transfer.writes:
                write.result()
        except RuntimeError as error:  # a CUDA error of the copy: the sample fails, loudly
            transfer.sample.file.discard()
            self._area.fail(transfer.key, f"copy failed: from the GPU: {error}")
        else:
            transfer.sample.file.publish()
