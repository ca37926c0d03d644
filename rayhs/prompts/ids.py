"""Duplicate ids across all rows, found by exchanging 128-bit hashes: no process sees every id.

Each part of the input gives one table of hashes a partition; each partition is sorted on its own;
the duplicates of all partitions become one list, sorted by row. Pure: no Ray.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import numpy as np
import numpy.typing as npt
import xxhash

from rayhs.config import StorageConfig
from rayhs.errors import PromptRejected
from rayhs.prompts.readers import Block, read_block
from rayhs.prompts.rows import RowRules, usable_id

HASHED = np.dtype([("high", np.uint64), ("low", np.uint64), ("index", np.int64)])
DUPLICATE = np.dtype([("index", np.int64), ("first", np.int64)])
Table = npt.NDArray[np.void]

_ROWS_PER_PARTITION = 500_000
_MAX_PARTITIONS = 64


def partitions_for(rows: int) -> int:
    return min(_MAX_PARTITIONS, max(1, -(-rows // _ROWS_PER_PARTITION)))


def hash_ids(
    blocks: Iterable[Block], storage: StorageConfig, rules: RowRules, labels: Collection[str], partitions: int
) -> list[Table]:
    """The usable ids of ``blocks`` as `HASHED` tables, one a partition."""
    digests, indices = bytearray(), []
    for block in blocks:
        index = block.spans[0].index
        for offset, row in enumerate(read_block(block, storage, ())):
            try:
                text = usable_id(row, rules, block.label, labels)
            except PromptRejected:
                continue  # the row is rejected with this reason when its sample is made
            digests += xxhash.xxh3_128_digest(text.encode())
            indices.append(index + offset)
    table = np.empty(len(indices), HASHED)
    halves = np.frombuffer(bytes(digests), "<u8").reshape(-1, 2)
    table["high"], table["low"], table["index"] = halves[:, 0], halves[:, 1], indices
    owner = table["high"] % np.uint64(partitions)
    return [table[owner == partition] for partition in range(partitions)]


def find_duplicates(tables: Sequence[Table]) -> Table:
    """Rows of one partition whose id an earlier row has, as `DUPLICATE`."""
    table = np.concatenate(tables)
    table = table[np.lexsort((table["index"], table["low"], table["high"]))]
    repeats = np.zeros(table.size, bool)
    repeats[1:] = (table["high"][1:] == table["high"][:-1]) & (table["low"][1:] == table["low"][:-1])
    starts = np.maximum.accumulate(np.where(repeats, 0, np.arange(table.size)))
    found = np.empty(int(repeats.sum()), DUPLICATE)
    found["index"], found["first"] = table["index"][repeats], table["index"][starts[repeats]]
    return found


def merge_duplicates(tables: Sequence[Table]) -> Table:
    """The duplicates of all partitions, sorted by row."""
    merged = np.concatenate(tables)
    return merged[np.argsort(merged["index"])]


def duplicates_within(table: Table | None, index: int, rows: int) -> dict[int, int]:
    """Of the ``rows`` rows from global ``index`` on: position of each duplicate to its first row's index."""
    if table is None:
        return {}
    start, end = np.searchsorted(table["index"], [index, index + rows])
    return {int(row["index"]) - index: int(row["first"]) for row in table[start:end]}
