"""A Parquet table in the store (samples, index), read by row groups with every claim in it checked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.parquet as pq

from rayhs import parquet_codec
from rayhs.errors import FormatError
from rayhs.parquet_footer import Group
from rayhs.parquet_pages import (
    ARROW_ERRORS,
    Buffer,
    check_pages,
    check_texts,
    chunks_of,
    most_values,
    plain_texts,
    read_group,
)

Fetch = Callable[[list[tuple[int, int]]], Sequence[Buffer]]  # (start, length) ranges of the object to their bytes

# Ids and indexes are all different: a row takes a byte at the least, however well the rest packs.
_ROWS_PER_BYTE = 4


@dataclass(frozen=True, eq=False)
class StoredTable:
    """The footer of a table's object, whose columns are (at least) those of ``schema``."""

    footer: pq.FileMetaData
    groups: Sequence[Group]
    schema: pa.Schema
    size: int

    @property
    def counts(self) -> list[int]:
        """Rows of each row group."""
        return [group.rows for group in self.groups]

    def read(self, numbers: Sequence[int], columns: Sequence[str], fetch: Fetch, plain: bool = True) -> pa.Table:
        """The rows of some row groups, ``columns`` only.

        Args:
            plain: whether texts come as such, or as dictionaries, which take less memory and time.

        Raises:
            FormatError: they don't decode, or would take far more memory than the object has bytes.
        """
        fields = [self.schema.field(name) for name in columns]
        texts = [f.name for f in fields if pa.types.is_string(f.type)]
        chunks = [chunk for number in numbers for chunk in chunks_of(self.groups[number], columns)]
        parts = fetch([(c.start, c.length) for c in chunks])
        tables = []
        for place, number in enumerate(numbers):
            part = slice(place * len(fields), (place + 1) * len(fields))
            rows = self.groups[number].rows
            for field, chunk, data in zip(fields, chunks[part], parts[part], strict=True):
                check_pages(data, chunk, most_values(self.size) if pa.types.is_list(field.type) else rows)
            table = read_group(self.footer, number, chunks[part], parts[part], self.size, texts)
            if len(table) != rows:
                raise FormatError(f"{len(table)} rows were read where there should be {rows}")
            tables.append(table)
        joined = pa.concat_tables(tables) if tables else self.schema.empty_table().select(list(columns))
        check_texts(joined, self.size)
        return plain_texts(joined) if plain else joined


def open_table(tail: Buffer, size: int, schema: pa.Schema, name: str) -> StoredTable:
    """Parse the footer in the last bytes of an object of ``size`` bytes.

    Raises:
        FormatError: no Parquet, another schema, or more rows than the object can hold.
    """
    with parquet_errors(name):
        footer, groups = parquet_codec.parse_footer(tail, size)
        found = parquet_codec.arrow_schema(footer)
    check_schema(found, schema, name)
    rows = sum(group.rows for group in groups)
    if rows > _ROWS_PER_BYTE * size:
        raise FormatError(f"{name}: {rows} rows in {size} bytes are not true")
    if rows != footer.num_rows:
        raise FormatError(f"{name}: {footer.num_rows} rows, its row groups have {rows}")
    return StoredTable(footer, groups, schema, size)


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


def check_schema(schema: pa.Schema, expected: pa.Schema, name: str) -> None:
    """Raises FormatError unless ``schema`` has the columns of ``expected``, in type and once each."""
    have = dict(zip(schema.names, schema.types, strict=True))
    for column, kind in zip(expected.names, expected.types, strict=True):
        if column not in have or not _same_type(have[column], kind):
            found = f"is {have[column]}" if column in have else "is missing"
            raise FormatError(f"{name}: column {column!r} {found}; it should be {kind}")
        if schema.names.count(column) > 1:
            raise FormatError(f"{name}: column {column!r} is there twice")


def _same_type(have: pa.DataType, want: pa.DataType) -> bool:
    # The name and nullability of a list's element vary between writers and mean nothing here.
    if pa.types.is_list(have) and pa.types.is_list(want):
        return bool(have.value_type.equals(want.value_type))
    return bool(have.equals(want))
