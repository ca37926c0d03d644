"""What reading in bulk has to know of every row of an index: nine bytes a row, where the row itself takes a hundred."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from xxhash import xxh3_64_hexdigest

from rayhs.codec import Array
from rayhs.layout import INDEX_SCHEMA

OUTLINE_COLUMNS = ("index", "shard", "token_start", "num_tokens", "status")


class Rows(Protocol):
    """Rows of an index by position: a table of all, or `rayhs.reading.index_files.IndexFiles`."""

    def slice(self, offset: int, length: int) -> pa.Table: ...


class ShardRows(NamedTuple):
    """Where the good rows of a shard are: between two positions, among them no good ones of another shard."""

    name: str
    first: int
    stop: int
    samples: int
    tokens: int


@dataclass(frozen=True, eq=False)
class Outline:
    """Of an index of any size, so much as tells which samples are read together, and how large they are.

    Attributes:
        good: whether a row has states, bool `[rows]`.
        num_tokens: int64 `[rows]`, 0 where a row has none.
        shards: those with good rows, in the order of the index.
    """

    good: Array
    num_tokens: Array
    shards: list[ShardRows]

    @cached_property
    def fingerprint(self) -> str:
        """Of what the order of a stream depends on: which rows have states, of how many tokens, in which shards."""
        bounds = np.array([(shard.first, shard.stop) for shard in self.shards], np.int64)
        return xxh3_64_hexdigest(self.num_tokens.tobytes() + bounds.tobytes())

    def positions(self, shard: ShardRows) -> Array:
        """Of the good samples of a shard, ascending: int64 `[samples]`."""
        return shard.first + np.flatnonzero(self.good[shard.first : shard.stop])


def outline_of(tables: Iterable[pa.Table], rows: int) -> Outline:
    """The outline of checked pieces of an index, in order, with (at least) its shard, num_tokens and status.

    Args:
        rows: of all ``tables`` together.
    """
    outline = Outline(np.zeros(rows, bool), np.zeros(rows, np.int64), [])
    start = 0
    for table in tables:
        own = slice(start, start + len(table))
        outline.good[own] = good_rows(table)
        outline.num_tokens[own] = table["num_tokens"].to_numpy()
        moved = (shard._replace(first=start + shard.first, stop=start + shard.stop) for shard in shards_of(table))
        outline.shards.extend(moved)
        start = own.stop
    return outline


def distinct(texts: pa.ChunkedArray) -> tuple[list[str], Array]:
    """The texts of a column, plain or a dictionary, each once, and int32 `[rows]`: which one a row has, -1 for null."""
    encoded = pc.dictionary_encode(texts.combine_chunks())
    return encoded.dictionary.to_pylist(), encoded.indices.fill_null(-1).to_numpy()


def good_rows(table: pa.Table) -> Array:
    """Which rows have states: bool `[rows]`."""
    texts, status = distinct(table["status"])
    good: Array = np.array([*(text == "ok" for text in texts), False])[status]
    return good


def shards_of(table: pa.Table) -> list[ShardRows]:
    """The shards whose good rows follow one another in ``table``, their positions counted from its first row."""
    positions = np.flatnonzero(good_rows(table))
    if not len(positions):
        return []
    names, codes = distinct(table["shard"])
    codes = codes[positions]
    starts = np.flatnonzero(np.diff(codes, prepend=-1))
    ends = np.append(starts[1:], len(positions))
    tokens = np.add.reduceat(table["num_tokens"].to_numpy()[positions], starts)
    columns = (codes[starts], positions[starts], positions[ends - 1] + 1, ends - starts, tokens)
    return [ShardRows(names[code], *rest) for code, *rest in zip(*(c.tolist() for c in columns), strict=True)]


def good_of_shards(tables: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """The good rows of pieces of an index, a table for each shard."""
    for table in tables:
        for shard in shards_of(table):
            yield good_between(table, shard.first, shard.stop)


def good_between(rows: Rows, first: int, stop: int) -> pa.Table:
    """The good rows between two positions as plain texts, in memory of their own; ``rows`` have all columns."""
    table = rows.slice(first, stop - first)
    return table.filter(pa.array(good_rows(table))).cast(INDEX_SCHEMA)
