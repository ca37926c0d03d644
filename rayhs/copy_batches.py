"""What a CUDA copier copies next: pieces of finished samples, in batches of bounded size."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from rayhs.copying import StagedSample

Buffers = tuple[torch.Tensor, ...]
"""Pinned memory for a piece, a tensor for each part of `rayhs.copying.StagedLayout.encode`."""


@dataclass
class Transfer:
    """A sample on its way: ``blocks`` of the cache hold its ``tokens``; ``direct``: the device writes it itself."""

    req_id: str
    key: str
    sample: StagedSample
    blocks: npt.NDArray[np.int64]
    tokens: int
    direct: bool
    submitted: int = 0  # tokens
    writes: list[Future[None]] = field(default_factory=list)


@dataclass
class Piece:
    """``tokens`` of a sample from ``first`` on; through ``buffers`` where it is not direct."""

    transfer: Transfer
    first: int
    tokens: int
    buffers: Buffers | None

    @property
    def is_last(self) -> bool:
        return self.first + self.tokens == self.transfer.tokens


def next_pieces(
    waiting: deque[Transfer], batch_tokens: int, buffer_tokens: int, take: Callable[[bool], Buffers | None]
) -> list[Piece]:
    """A batch of what waits, which loses what is submitted whole.

    Args:
        batch_tokens: at most, a whole number of blocks. A sample is divided only where it is longer.
        buffer_tokens: what ``take`` gives room for, likewise.
        take: gives buffers, or None where all are in use; told whether it may wait for some.
    """
    pieces: list[Piece] = []
    room = batch_tokens
    while waiting:
        transfer = waiting[0]
        # Whole, a sample is one copy to the host; a piece of it one a layer.
        tokens = min(transfer.tokens - transfer.submitted, batch_tokens if transfer.direct else buffer_tokens)
        if tokens > room:
            break
        # A batch's own buffers come back only once it is submitted, so that there is nothing to wait for.
        buffers = None if transfer.direct else take(not pieces)
        if buffers is None and not transfer.direct:
            break
        pieces.append(Piece(transfer, transfer.submitted, tokens, buffers))
        transfer.submitted += tokens
        room -= tokens
        if pieces[-1].is_last:
            waiting.popleft()
    return pieces


def block_table(pieces: Sequence[Piece], block_size: int) -> npt.NDArray[np.int64]:
    """`[blocks, 4]`, as `rayhs.cuda_gather.Gather` takes it."""
    tables, before = [], 0
    for piece in pieces:
        begin = piece.first // block_size
        blocks = piece.transfer.blocks[begin : begin - (-piece.tokens // block_size)]
        table = np.empty((len(blocks), 4), np.int64)
        table[:, 0], table[:, 1], table[:, 2] = blocks, before, piece.tokens
        table[:, 3] = np.arange(0, piece.tokens, block_size)
        tables.append(table)
        before += piece.tokens
    return np.concatenate(tables)
