"""Rows of the plan, `samples/*.parquet`, by shard or by sample; Arrow's errors become one line."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rayhs import layout
from rayhs.errors import FormatError
from rayhs.layout import Plan, ShardId
from rayhs.parquet_codec import ARROW_ERRORS
from rayhs.parquet_footer import footer_bytes, parse_groups
from rayhs.reading.lru import LruCache
from rayhs.store import Store

_TAIL = 64 * 1024


class PlanReader:
    """Rows of ``samples/*.parquet`` by shard or by sample index; picklable, safe for many threads."""

    def __init__(self, store: Store, plan: Plan) -> None:
        self._store = store
        self._plan = plan
        self._ends = list(accumulate(f.rows for f in plan.files))
        self._footers: LruCache[int, tuple[pq.FileMetaData, list[int]]] = LruCache(64)
        self._columns: LruCache[ShardId, list[str | None]] = LruCache(8)

    def rows(self, shard: ShardId, columns: Sequence[str] | None = None) -> pa.Table:
        """The rows of one shard (one row group), rejected ones included, in input order.

        Raises:
            FormatError: they can't be decoded, or their index is not the one of their place.
        """
        name, (footer, counts) = layout.samples_name(shard.file), self._footer(shard.file)
        with parquet_errors(name):
            file = pq.ParquetFile(
                self._store.open_input(name), metadata=footer, pre_buffer=True, page_checksum_verification=True
            )
            table = file.read_row_group(shard.group, columns=None if columns is None else list(columns))
            return checked(table, counts[shard.group])

    def file_rows(self, file: int, columns: Sequence[str]) -> pa.Table:
        """All rows of one samples file, of ``columns`` only."""
        name, (footer, counts) = layout.samples_name(file), self._footer(file)
        with parquet_errors(name):
            source = self._store.open_input(name)
            table = pq.ParquetFile(source, metadata=footer, pre_buffer=True).read(columns=list(columns))
            return checked(table, sum(counts))

    def first_index(self, shard: ShardId) -> int:
        """``index`` of the first row of a shard."""
        _, counts = self._footer(shard.file)
        return self._file_start(shard.file) + sum(counts[: shard.group])

    def locate(self, index: int) -> tuple[ShardId, int]:
        """The shard that holds the row of sample ``index``, and which of its rows it is."""
        file = bisect_right(self._ends, index)
        row = index - self._file_start(file)
        _, counts = self._footer(file)
        ends = list(accumulate(counts))
        group = bisect_right(ends, row)
        return ShardId(file, group), row - (ends[group] - counts[group])

    def columns_of(self, index: int) -> dict[str, Any]:
        """The pass-through columns of the input row of sample ``index``."""
        shard, row = self.locate(index)
        values = self._columns.get(shard, lambda: self.rows(shard, ["columns"]).column(0).to_pylist())
        try:
            columns = json.loads(values[row] or "{}")
        except ValueError:
            columns = None
        if not isinstance(columns, dict):
            raise FormatError(f"{layout.samples_name(shard.file)}: the columns of sample {index} are not a JSON object")
        return columns

    def _file_start(self, file: int) -> int:
        return self._ends[file - 1] if file else 0

    def _footer(self, file: int) -> tuple[pq.FileMetaData, list[int]]:
        """The footer of a samples file and the rows of each of its row groups, cached.

        Raises:
            FormatError: another number of rows or row groups than the plan, or another schema.
        """
        return self._footers.get(file, lambda: self._read_footer(file))

    def _read_footer(self, file: int) -> tuple[pq.FileMetaData, list[int]]:
        name, planned = layout.samples_name(file), self._plan.files[file]
        with parquet_errors(name):
            source = self._store.open_input(name)
            counts = [group.rows for group in parse_groups(*_tail(source))]
            parsed = pq.ParquetFile(source)
            footer, schema = parsed.metadata, parsed.schema_arrow
        check_schema(schema, layout.SAMPLES_SCHEMA, name)
        if (sum(counts), len(counts), footer.num_rows) != (planned.rows, len(planned.shard_tokens), planned.rows):
            raise FormatError(
                f"{name}: {sum(counts)} rows in {len(counts)} row groups, "
                f"the plan has {planned.rows} in {len(planned.shard_tokens)}"
            )
        return footer, counts


def _tail(source: Any) -> tuple[bytes, int]:
    """The end of a file, with all of its Parquet footer, and the file's size."""
    size = source.size()
    tail = source.read_at(min(size, _TAIL), size - min(size, _TAIL))
    length = footer_bytes(tail, size)
    if length > len(tail):
        tail = source.read_at(length, size - length)
    return tail, size


class parquet_errors:  # noqa: N801 - reads as a statement: with parquet_errors(name)
    """Turn Arrow's errors about an object into one FormatError line that names it."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, FormatError):
            raise FormatError(f"{self._name}: {error}") from None
        if isinstance(error, ARROW_ERRORS):
            raise FormatError(f"{self._name}: not readable: {' '.join(str(error).split())[:200]}") from None


def checked(table: pa.Table, rows: int) -> pa.Table:
    """Refuses what reading lets through: other row counts, offsets out of bounds, text that is not UTF-8."""
    table.validate(full=True)
    if len(table) != rows:
        raise FormatError(f"{len(table)} rows were read where there should be {rows}")
    return table


def check_schema(schema: pa.Schema, expected: pa.Schema, name: str) -> None:
    """Raises FormatError unless ``schema`` has the columns of ``expected``, in order and type."""
    have = dict(zip(schema.names, schema.types, strict=True))
    for column, kind in zip(expected.names, expected.types, strict=True):
        if column not in have or not _same_type(have[column], kind):
            found = f"is {have[column]}" if column in have else "is missing"
            raise FormatError(f"{name}: column {column!r} {found}; it should be {kind}")


def _same_type(have: pa.DataType, want: pa.DataType) -> bool:
    # The name and nullability of a list's element vary between writers and mean nothing here.
    if pa.types.is_list(have) and pa.types.is_list(want):
        return bool(have.value_type.equals(want.value_type))
    return bool(have.equals(want))
