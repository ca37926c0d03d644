"""Rows out of input files: a scan that finds where to start, and readers that start there.

Files are read in blocks; a block is one or more spans, each of which becomes one samples file.
Blank lines of a jsonl file are no rows. Pure: no Ray.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rayhs.config import StorageConfig
from rayhs.errors import InputError
from rayhs.prompts.inputs import InputFile, open_file, reading

PYTHON_LABEL = "rows"
_BATCH_ROWS = 512
_BLOCKS_PER_ROW_GROUP = 8


@dataclass(frozen=True)
class BlockStart:
    """Where a block starts: its first row (0-based, in its file) and number of rows; for jsonl also
    the byte offset and 1-based line of its first row."""

    row: int
    rows: int
    offset: int = 0
    line: int = 1


@dataclass(frozen=True)
class Span:
    """Consecutive rows that become samples file ``number``; ``index`` is the first one's global index."""

    number: int
    index: int
    rows: int


@dataclass(frozen=True)
class Block:
    """One task's rows: of ``file``, or ``values`` themselves."""

    file: InputFile | None
    values: Sequence[Any] | None
    start: BlockStart
    spans: tuple[Span, ...]

    @property
    def label(self) -> str:
        return PYTHON_LABEL if self.file is None else self.file.label


@dataclass(frozen=True)
class InputRow:
    """``number`` is the 0-based row of its file; ``reason`` is set where the row can't be read."""

    number: int
    value: Any
    reason: str | None = None


FileScan = tuple[int, list[BlockStart]]
"""A file's number of rows, and its blocks."""


def python_blocks(rows: Sequence[Any], rows_per_span: int) -> list[Block]:
    """The blocks of a list of rows."""
    chunks = [rows[first : first + rows_per_span] for first in range(0, len(rows), rows_per_span)]
    starts = [(number, number * rows_per_span, len(chunk)) for number, chunk in enumerate(chunks)]
    return [
        Block(None, chunk, BlockStart(first, size), (Span(number, first, size),))
        for chunk, (number, first, size) in zip(chunks, starts, strict=True)
    ]


def file_blocks(files: Sequence[InputFile], scans: Sequence[FileScan], rows_per_span: int) -> list[Block]:
    """The blocks of scanned files; spans are numbered through all files and never cross one."""
    blocks: list[Block] = []
    number = index = 0
    for file, (rows, starts) in zip(files, scans, strict=True):
        for start in starts:
            firsts = range(0, start.rows, rows_per_span)
            spans = tuple(
                Span(number + i, index + start.row + first, min(rows_per_span, start.rows - first))
                for i, first in enumerate(firsts)
            )
            blocks.append(Block(file, None, start, spans))
            number += len(spans)
        index += rows
    return blocks


def scan_file(file: InputFile, storage: StorageConfig, rows_per_span: int, columns: Sequence[str]) -> FileScan:
    """Count a file's rows and find its blocks; each starts at a multiple of ``rows_per_span``.

    Raises:
        InputError: unreadable, not of its format, or a column of ``columns`` is not in its schema.
    """
    with reading(file.path):
        if file.format == "jsonl":
            with open_file(file, storage) as raw:
                return _scan_lines(file, raw, rows_per_span)
        if file.format == "parquet":
            with open_file(file, storage) as raw, pq.ParquetFile(raw) as parquet:
                _check_schema(file, parquet.schema_arrow, columns)
                groups = [parquet.metadata.row_group(i).num_rows for i in range(parquet.num_row_groups)]
            return sum(groups), _parquet_blocks(groups, rows_per_span)
        with _arrow_stream(file, storage) as stream:
            _check_schema(file, stream.schema, columns)
            rows = sum(batch.num_rows for batch in stream)
        return rows, _plain_blocks(rows, rows if file.sequential else rows_per_span)


def _scan_lines(file: InputFile, raw: BinaryIO, rows_per_span: int) -> FileScan:
    starts: list[tuple[int, int, int]] = []
    rows = offset = 0
    lines: Any = gzip.GzipFile(fileobj=raw) if file.gzip else raw
    for number, line in enumerate(lines, 1):
        if not line.isspace():
            if rows % rows_per_span == 0 and not (file.gzip and starts):
                starts.append((rows, offset, number))
            rows += 1
        offset += len(line)
    ends = [*(row for row, _, _ in starts[1:]), rows][: len(starts)]
    return rows, [BlockStart(row, end - row, at, line) for (row, at, line), end in zip(starts, ends, strict=True)]


def _plain_blocks(rows: int, step: int) -> list[BlockStart]:
    return [BlockStart(row, min(step, rows - row)) for row in range(0, rows, max(step, 1))]


def _parquet_blocks(groups: Sequence[int], rows_per_span: int) -> list[BlockStart]:
    # A block's first rows are reached by decoding its row group from the start. So a row group is cut
    # into a few blocks only, and a block goes on through small row groups until a span is full.
    rows, starts, begin = sum(groups), [0], 0
    for group in groups:
        first, last = -(-begin // rows_per_span), -(-(begin + group) // rows_per_span)
        step = max(1, -(-(last - first) // _BLOCKS_PER_ROW_GROUP))
        starts += [span * rows_per_span for span in range(first, last, step)]
        begin += group
    unique = sorted({start for start in starts if start < rows})
    ends = [*unique[1:], rows][: len(unique)]
    return [BlockStart(row, end - row) for row, end in zip(unique, ends, strict=True)]


def _check_schema(file: InputFile, schema: pa.Schema, columns: Sequence[str]) -> None:
    for column in columns:
        if column not in schema.names:
            raise missing_column(file.path, column, schema.names)


def missing_column(where: str, column: str, known: Sequence[str]) -> InputError:
    return InputError(
        f"{where}: no column {column!r}; it has {', '.join(known) or 'none'}; name one of them under prompts"
    )


def read_block(block: Block, storage: StorageConfig, arrays: Sequence[str]) -> Iterator[InputRow]:
    """The rows of a block, in order. Lists of integers in a Parquet or Arrow column out of
    ``arrays`` come as numpy arrays.

    Raises:
        InputError: the file can't be read any more or has fewer rows than it had.
    """
    if block.file is None:
        rows: Iterator[InputRow] = (InputRow(block.start.row + i, v) for i, v in enumerate(block.values or ()))
    elif block.file.format == "jsonl":
        rows = _read_lines(block.file, storage, block.start)
    else:
        rows = _read_table(block.file, storage, block.start, arrays)
    count = 0
    while True:
        with reading(block.label if block.file is None else block.file.path):
            batch = list(islice(rows, min(_BATCH_ROWS, block.start.rows - count)))
        if not batch:
            break
        count += len(batch)
        yield from batch
    if count < block.start.rows and block.file is not None:
        raise InputError(f"{block.file.path}: has fewer rows than when the run began; leave the input alone meanwhile")


def _read_lines(file: InputFile, storage: StorageConfig, start: BlockStart) -> Iterator[InputRow]:
    with open_file(file, storage) as raw:
        lines: Any = raw
        number, row = start.line, start.row
        if file.gzip:
            lines, number = gzip.GzipFile(fileobj=raw), 1
        else:
            raw.seek(start.offset)
        for line in lines:
            if not line.isspace():
                yield _parse_line(line, row, number)
                row += 1
            number += 1


def _parse_line(line: bytes, row: int, number: int) -> InputRow:
    try:
        text = line.decode()
        value = json.loads(text.removeprefix("\ufeff") if number == 1 else text)
    except (ValueError, RecursionError) as error:
        detail = f"{error.msg}, column {error.colno}" if isinstance(error, json.JSONDecodeError) else _short(error)
        return InputRow(row, None, f"broken JSON: line {number}: {detail}")
    if not isinstance(value, dict):
        return InputRow(row, None, f"not an object: line {number} holds {type(value).__name__}")
    return InputRow(row, value)


def _short(error: Exception) -> str:
    return "not UTF-8" if isinstance(error, UnicodeDecodeError) else " ".join(str(error).split())[:200]


def _arrow_stream(file: InputFile, storage: StorageConfig) -> pa.RecordBatchStreamReader:
    # Mapped memory makes skipping batches free.
    source = pa.memory_map(file.path) if file.local else pa.PythonFile(open_file(file, storage), mode="r")
    return pa.ipc.open_stream(source)


def _read_table(
    file: InputFile, storage: StorageConfig, start: BlockStart, arrays: Sequence[str]
) -> Iterator[InputRow]:
    row = start.row
    for batch in _batches(file, storage, start):
        names = batch.schema.names
        columns = [_column_values(batch.column(i), name in arrays) for i, name in enumerate(names)]
        for values in zip(*columns, strict=True):
            yield InputRow(row, dict(zip(names, values, strict=True)))
            row += 1


def _batches(file: InputFile, storage: StorageConfig, start: BlockStart) -> Iterator[pa.RecordBatch]:
    skip = start.row
    if file.format == "arrow":
        with _arrow_stream(file, storage) as stream:
            yield from _after(stream, skip)
        return
    with open_file(file, storage) as raw, pq.ParquetFile(raw) as parquet:
        group = 0
        while group < parquet.num_row_groups and skip >= parquet.metadata.row_group(group).num_rows:
            skip -= parquet.metadata.row_group(group).num_rows
            group += 1
        groups = list(range(group, parquet.num_row_groups))
        yield from _after(parquet.iter_batches(batch_size=_BATCH_ROWS, row_groups=groups), skip)


def _after(batches: Iterator[pa.RecordBatch], skip: int) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        if skip >= batch.num_rows:
            skip -= batch.num_rows
            continue
        batch, skip = batch.slice(skip), 0
        for first in range(0, batch.num_rows, _BATCH_ROWS):
            yield batch.slice(first, _BATCH_ROWS)


def _column_values(column: pa.Array, as_array: bool) -> Sequence[Any]:
    kind = column.type
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    if as_array and is_list and pa.types.is_integer(kind.value_type) and column.flatten().null_count == 0:
        flat = column.flatten().to_numpy(zero_copy_only=False)
        lengths = column.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
        ends = np.cumsum(lengths)
        valid = column.is_valid().to_pylist()
        return [flat[end - n : end] if ok else None for end, n, ok in zip(ends, lengths, valid, strict=True)]
    try:
        return column.to_pylist()  # type: ignore[no-any-return]
    except UnicodeDecodeError:
        return [_python_value(item) for item in column]


def _python_value(item: pa.Scalar) -> Any:
    try:
        return item.as_py()
    except UnicodeDecodeError:
        return bytes(item.as_buffer()) if isinstance(item, pa.StringScalar) else None
