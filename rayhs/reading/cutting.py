"""Rows cut into pieces of bounded size, known before any is read: files of an export, batches of a view."""

from __future__ import annotations

from rayhs.codec import Array


def cut(sizes: Array, limit: int) -> list[slice]:
    """Rows one after the other, of ``limit`` bytes at most or one that is larger.

    Args:
        sizes: bytes of each row, `[rows]`.
    """
    slices = []
    start, total = 0, 0
    for row, size in enumerate(sizes.tolist()):
        if row > start and total + size > limit:
            slices.append(slice(start, row))
            start, total = row, 0
        total += size
    if start < len(sizes):
        slices.append(slice(start, len(sizes)))
    return slices
