"""What a CUDA copier copies next: every position once, in batches of bounded size, with tables that say where it is."""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch")

from rayhs.copy_batches import Buffers, Piece, Transfer, block_table, next_pieces

BLOCK, BATCH, BUFFER = 4, 32, 8
SAMPLES = st.lists(st.tuples(st.integers(1, 90), st.booleans()), max_size=12)


def waiting(samples: list[tuple[int, bool]]) -> deque[Transfer]:
    found = deque()
    for i, (tokens, direct) in enumerate(samples):
        blocks = np.arange(-(-tokens // BLOCK), dtype=np.int64)[::-1] + 100 * i
        found.append(Transfer(f"r{i}", f"k{i}", None, blocks, tokens, direct))  # type: ignore[arg-type]
    return found


class Pool:
    def __init__(self, size: int) -> None:
        self.left = size

    def take(self, may_block: bool) -> Buffers | None:
        if not self.left:
            return None
        self.left -= 1
        return ()


def batches(queue: deque[Transfer], buffers: int) -> list[list[Piece]]:
    """As a copier does: buffers are back at the next step."""
    found = []
    while queue:
        pool, before = Pool(buffers), len(found)
        while pieces := next_pieces(queue, BATCH, BUFFER, pool.take):
            found.append(pieces)
        assert len(found) > before, "nothing was submitted in a whole step"
    return found


@given(SAMPLES, st.integers(1, 5))
def test_every_token_is_in_one_piece_and_a_batch_is_bounded(samples: list[tuple[int, bool]], buffers: int) -> None:
    queue = waiting(samples)
    transfers, ends = list(queue), {f"r{i}": 0 for i in range(len(samples))}
    for pieces in batches(queue, buffers):
        assert sum(piece.tokens for piece in pieces) <= BATCH
        for piece in pieces:
            assert piece.first == ends[piece.transfer.req_id] and piece.first % BLOCK == 0 and piece.tokens > 0
            assert (piece.buffers is None) == piece.transfer.direct
            assert piece.transfer.direct or piece.tokens <= BUFFER
            ends[piece.transfer.req_id] += piece.tokens
            assert piece.is_last == (ends[piece.transfer.req_id] == piece.transfer.tokens)
    assert [ends[one.req_id] for one in transfers] == [tokens for tokens, _ in samples]


@given(SAMPLES)
def test_what_fits_a_batch_is_one_piece(samples: list[tuple[int, bool]]) -> None:
    pieces = [piece for batch in batches(waiting(samples), 5) for piece in batch]
    for i, (tokens, direct) in enumerate(samples):
        if direct and tokens <= BATCH:
            assert sum(piece.transfer.req_id == f"r{i}" for piece in pieces) == 1


def test_buffers_are_waited_for_only_with_an_empty_batch() -> None:
    asked = []

    def take(may_block: bool) -> Buffers | None:
        asked.append(may_block)
        return () if len(asked) < 3 else None

    pieces = next_pieces(waiting([(20, True), (16, False), (5, False)]), BATCH, BUFFER, take)
    assert [piece.tokens for piece in pieces] == [20, 8] and asked == [False]
    assert [piece.tokens for piece in next_pieces(waiting([(16, False), (9, False)]), BATCH, BUFFER, take)] == [8]
    assert asked == [False, True, False]


@given(SAMPLES)
def test_the_table_leads_to_every_state(samples: list[tuple[int, bool]]) -> None:
    """Read as the kernels read it, of two layers: states that name their sample, token and layer."""
    layers = 2
    for pieces in batches(waiting(samples), 5):
        rows: list[tuple[int, int, int] | None] = [None] * (layers * sum(piece.tokens for piece in pieces))
        for block, before, tokens, first in block_table(pieces, BLOCK).tolist():
            for layer in range(layers):
                for position in range(BLOCK):
                    if (token := first + position) < tokens:
                        rows[before * layers + layer * tokens + token] = (block, position, layer)
        begin = 0
        for piece in pieces:
            for layer in range(layers):
                for token in range(piece.first, piece.first + piece.tokens):
                    block = int(piece.transfer.blocks[token // BLOCK])
                    assert rows[begin + layer * piece.tokens + token - piece.first] == (block, token % BLOCK, layer)
            begin += layers * piece.tokens
        assert None not in rows
