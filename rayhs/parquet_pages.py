"""Row groups of stored Parquet, decoded from fetched column chunks once their pages are plausible.

Arrow believes what a page's header says of itself: a chunk of a hundred bytes can claim billions of
values and have memory taken for each. Here the headers are walked first, and a claim that the bytes
and the row group can't bear out is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from rayhs.errors import FormatError, one_line
from rayhs.parquet_footer import Chunk, Compact, Group, field_of
from rayhs.seekable import SeekableFile

Buffer = bytes | memoryview

# What pyarrow raises for bytes that are not what they should be.
ARROW_ERRORS = (pa.ArrowException, OSError, UnicodeDecodeError)

_DATA, _DICTIONARY, _DATA_V2 = 0, 2, 3
_ENCODINGS = (0, 2, 8)  # plain and the two names of dictionary; what Arrow's writer uses for these columns
_MAX_PAGE_HEADER = 64 * 2**10
# How far data may be larger than what is stored: real token ids, names and reasons stay under it.
_ROOM, _RATIO = 16 * 2**20, 64


def most_values(stored: int) -> int:
    """How many values ``stored`` bytes may stand for: equal ones take next to nothing."""
    return _ROOM + _RATIO * stored


def check_pages(data: Buffer, chunk: Chunk, most: int, plain: bool = False) -> None:
    """Raises FormatError where the pages of a column chunk claim more than they can hold.

    Args:
        data: the bytes of the chunk.
        most: the most values that the chunk may have.
        plain: whether it must be as shards are written: each value stored by itself.
    """
    at = values = unpacked = 0
    while at < len(data):
        reader = Compact(bytes(data[at : at + _MAX_PAGE_HEADER]))
        header = reader.struct(0)
        at += reader.position
        size, stored = field_of(header, 2, int), field_of(header, 3, int)
        count = _values(header, plain, size)
        unpacked += size
        if not 0 <= stored <= len(data) - at or size < 0 or (size != stored and not chunk.compressed):
            raise FormatError(f"column {chunk.column!r}: a page of {stored} bytes that says it has {size}")
        if unpacked > most_values(len(data)):
            raise FormatError(f"column {chunk.column!r}: {len(data)} bytes that unpack to over {unpacked}")
        values += count
        at += stored
    if values != chunk.values or values > most:
        raise FormatError(f"column {chunk.column!r}: pages of {values} values, {chunk.values} stated, {most} possible")


def _values(header: dict[int, Any], plain: bool, size: int) -> int:
    """The values of a page by its header; 0 of a dictionary."""
    kind = field_of(header, 1, int)
    if kind == _DICTIONARY and not plain:
        entries = field_of(field_of(header, 7, dict), 1, int)
        if not 0 <= entries <= size:
            raise FormatError(f"a dictionary of {entries} entries in {size} bytes")
        return 0
    if kind not in (_DATA, _DATA_V2):
        raise FormatError(f"a page of kind {kind}")
    page = field_of(header, 5 if kind == _DATA else 8, dict)
    count: int = field_of(page, 1, int)
    encoding = field_of(page, 2 if kind == _DATA else 4, int)
    if count < 0 or encoding not in _ENCODINGS or (plain and (encoding != 0 or count > size)):
        raise FormatError(f"a page of {count} values in encoding {encoding} and {size} bytes")
    return count


def chunks_of(group: Group, columns: Sequence[str]) -> list[Chunk]:
    """The column chunks of ``columns``, one each, in their order; raises FormatError."""
    wanted = set(columns)
    chunks = [c for c in group.chunks if c.column in wanted]
    if len(chunks) != len(columns) or {c.column for c in chunks} != wanted:
        raise FormatError(f"the columns of a row group are not {', '.join(columns)}, once each")
    return sorted(chunks, key=lambda c: columns.index(c.column))


def read_group(
    footer: pq.FileMetaData,
    number: int,
    chunks: Sequence[Chunk],
    parts: Sequence[Buffer],
    object_bytes: int,
    texts: Sequence[str] = (),
) -> pa.Table:
    """Decode checked chunks of row group ``number``; ``parts`` are their bytes.

    Args:
        texts: the text columns, which come back as dictionaries: a text that is stored once and named
            by a million rows would else be copied a million times. `plain_texts` undoes it.

    Raises:
        FormatError: pages that don't decode, or that reach outside what was fetched.
    """
    source = _FetchedParts({c.start: part for c, part in zip(chunks, parts, strict=True)}, object_bytes)
    columns = [c.column for c in chunks]
    try:
        file = pq.ParquetFile(
            pa.PythonFile(source, mode="r"),
            metadata=footer,
            pre_buffer=False,
            page_checksum_verification=True,
            read_dictionary=list(texts) or None,
        )
        table = file.read_row_group(number, columns=columns, use_threads=False)
        table.validate(full=True)
    except ARROW_ERRORS as error:
        raise FormatError(f"row group {number}: {one_line(error, 200)}") from None
    if sorted(table.column_names) != sorted(columns):
        raise FormatError(f"row group {number}: columns {table.column_names} where {columns} were asked for")
    return table.select(columns)


def check_texts(table: pa.Table, object_bytes: int) -> None:
    """Raises FormatError where the dictionaries of ``table``, as plain text, would be too much."""
    chunks = [chunk for column in table.columns for chunk in column.chunks if pa.types.is_dictionary(chunk.type)]
    lengths = [np.asarray(pc.binary_length(chunk.dictionary).fill_null(0), np.int64) for chunk in chunks]
    most = most_values(object_bytes)
    if sum(len(chunk) * int(own.max(initial=0)) for chunk, own in zip(chunks, lengths, strict=True)) <= most:
        return
    rows = (np.asarray(chunk.indices.drop_null(), np.int64) for chunk in chunks)
    total = sum(int(own[some].sum()) for own, some in zip(lengths, rows, strict=True))
    if total > most:
        raise FormatError(f"{object_bytes} bytes that unpack to {total} bytes of text")


def plain_texts(table: pa.Table) -> pa.Table:
    """``table`` with its dictionaries of text as plain text; to be checked before by `check_texts`."""
    kinds = [pa.string() if pa.types.is_dictionary(f.type) else f.type for f in table.schema]
    fields = [f.with_type(kind) for f, kind in zip(table.schema, kinds, strict=True)]
    return table.cast(pa.schema(fields))


class _FetchedParts(SeekableFile):
    """The parts of an object that were fetched, at their places; reading elsewhere is an OSError."""

    def __init__(self, parts: Mapping[int, Buffer], object_bytes: int) -> None:
        super().__init__(object_bytes)
        self._parts = {start: memoryview(data) for start, data in parts.items()}

    def read(self, size: int = -1) -> Any:
        for start, data in self._parts.items():
            offset = self._position - start
            if offset >= 0 and size >= 0 and offset + size <= len(data):
                self._position += size
                return data[offset : offset + size]
        raise OSError(f"a page reaches outside its column chunk, at byte {self._position}")
