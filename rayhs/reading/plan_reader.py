"""Rows of the plan, `samples/*.parquet`, by shard or by sample."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import pyarrow as pa

from rayhs import layout
from rayhs.errors import FormatError
from rayhs.layout import Plan, ShardId
from rayhs.parquet_footer import footer_bytes
from rayhs.reading.lru import LruCache
from rayhs.reading.stored_table import StoredTable, open_table, parquet_errors
from rayhs.store import Store

_TAIL = 64 * 1024


class PlanReader:
    """Rows of ``samples/*.parquet`` by shard or by sample index; picklable, safe for many threads."""

    def __init__(self, store: Store, plan: Plan) -> None:
        self._store = store
        self._plan = plan
        self._ends = list(accumulate(f.rows for f in plan.files))
        self._footers: LruCache[int, StoredTable] = LruCache(64)
        self._columns: LruCache[ShardId, list[str | None]] = LruCache(8)

    def rows(self, shard: ShardId, columns: Sequence[str] | None = None) -> pa.Table:
        """The rows of one shard (one row group), rejected ones included, in input order.

        Raises:
            FormatError: they can't be decoded, or their index is not the one of their place.
        """
        return self._read(shard.file, [shard.group], columns)

    def file_rows(self, file: int, columns: Sequence[str]) -> pa.Table:
        """All rows of one samples file, of ``columns`` only."""
        return self._read(file, range(len(self._footer(file).groups)), columns)

    def check_file(self, file: int) -> None:
        """Raises ObjectNotFound or FormatError unless the file is there and its footer is as planned."""
        self._footer(file)

    def first_index(self, shard: ShardId) -> int:
        """``index`` of the first row of a shard."""
        counts = self._footer(shard.file).counts
        return self._file_start(shard.file) + sum(counts[: shard.group])

    def locate(self, index: int) -> tuple[ShardId, int]:
        """The shard that holds the row of sample ``index``, and which of its rows it is."""
        file = bisect_right(self._ends, index)
        row = index - self._file_start(file)
        counts = self._footer(file).counts
        ends = list(accumulate(counts))
        group = bisect_right(ends, row)
        return ShardId(file, group), row - (ends[group] - counts[group])

    def columns_of(self, index: int) -> dict[str, Any]:
        """The pass-through columns of the input row of sample ``index``."""
        shard, row = self.locate(index)
        try:
            columns = json.loads(self._columns_of(shard)[row] or "{}")
        except (ValueError, RecursionError):
            columns = None
        if not isinstance(columns, dict):
            raise FormatError(f"{layout.samples_name(shard.file)}: the columns of sample {index} are not a JSON object")
        return columns

    def columns_json(self, shard: ShardId, indices: Sequence[int]) -> list[str | None]:
        """The pass-through columns of samples of one shard, each a JSON object as it is stored.

        Raises:
            FormatError: no such shard in the plan, or a sample that is none of its own.
        """
        files = self._plan.files
        known = shard.file < len(files) and shard.group < len(files[shard.file].shard_tokens)
        values = self._columns_of(shard) if known else []
        rows = [index - self.first_index(shard) for index in indices] if known else [-1]
        if min(rows) < 0 or max(rows) >= len(values):
            raise FormatError(f"index: samples of another shard are said to be in {shard}")
        return [values[row] for row in rows]

    def _columns_of(self, shard: ShardId) -> list[str | None]:
        return self._columns.get(shard, lambda: self.rows(shard, ["columns"]).column(0).to_pylist())

    def _file_start(self, file: int) -> int:
        return self._ends[file - 1] if file else 0

    def _read(self, file: int, groups: Sequence[int], columns: Sequence[str] | None) -> pa.Table:
        name, table = layout.samples_name(file), self._footer(file)
        with parquet_errors(name):
            wanted = layout.SAMPLES_SCHEMA.names if columns is None else list(columns)
            return table.read(groups, wanted, lambda ranges: self._store.get_ranges(name, ranges))

    def _footer(self, file: int) -> StoredTable:
        """The footer of a samples file, cached.

        Raises:
            FormatError: another number of rows or row groups than the plan, or another schema.
        """
        return self._footers.get(file, lambda: self._read_footer(file))

    def _read_footer(self, file: int) -> StoredTable:
        name, planned = layout.samples_name(file), self._plan.files[file]
        with parquet_errors(name):
            tail, size = _tail(self._store.open_input(name))
        table = open_table(tail, size, layout.SAMPLES_SCHEMA, name)
        counts = table.counts
        if (sum(counts), len(counts)) != (planned.rows, len(planned.shard_tokens)):
            raise FormatError(
                f"{name}: {sum(counts)} rows in {len(counts)} row groups, "
                f"the plan has {planned.rows} in {len(planned.shard_tokens)}"
            )
        return table


def _tail(source: Any) -> tuple[bytes, int]:
    """The end of a file, with all of its Parquet footer, and the file's size."""
    size = source.size()
    tail = source.read_at(min(size, _TAIL), size - min(size, _TAIL))
    length = footer_bytes(tail, size)
    if length > len(tail):
        tail = source.read_at(length, size - length)
    return tail, size
