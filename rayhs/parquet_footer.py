"""Row groups of a Parquet footer, parsed here (Thrift compact protocol, format's `parquet.thrift`).

Arrow decodes damaged pages and footers into errors, but its accessors for row groups and column
chunks abort the process on a damaged footer (pyarrow 26), so they are not used on stored objects.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

from rayhs.errors import FormatError

MAGIC = b"PAR1"
MAX_FOOTER_BYTES = 100_000_000
_MAX_DEPTH = 16
_MAX_COLUMNS = 100_000
_TRUE, _FALSE, _BYTE, _DOUBLE, _BINARY, _LIST, _SET, _MAP, _STRUCT = 1, 2, 3, 7, 8, 9, 10, 11, 12
_INTEGERS = (4, 5, 6)


@dataclass(frozen=True, slots=True)
class Chunk:
    """A column chunk: its column's name, place in the object, and least value (plain-encoded) if recorded."""

    column: str
    start: int
    length: int
    values: int
    compressed: bool
    minimum: bytes | None


@dataclass(frozen=True, slots=True)
class Group:
    rows: int
    chunks: tuple[Chunk, ...]


def footer_bytes(tail: bytes | memoryview, object_bytes: int) -> int:
    """How many bytes at the end of the object hold the footer, its length and the magic.

    Raises:
        FormatError: no magic, or a footer that can't fit the object (nothing large is allocated).
    """
    if len(tail) < 8 or bytes(tail[-4:]) != MAGIC:
        raise FormatError("not a Parquet file: it doesn't end with PAR1")
    (length,) = struct.unpack("<I", tail[-8:-4])
    if length > min(MAX_FOOTER_BYTES, object_bytes - 12):
        raise FormatError(f"not a Parquet file: a footer of {length} bytes in an object of {object_bytes}")
    return int(length) + 8


def parse_groups(tail: bytes | memoryview, object_bytes: int) -> list[Group]:
    """The row groups, from the last bytes of an object (at least `footer_bytes` of them).

    Raises:
        FormatError: not Thrift, a required field is missing, or a chunk lies outside the object.
    """
    length = footer_bytes(tail, object_bytes)
    footer = Compact(bytes(tail[len(tail) - length : -8])).struct(0)
    _check_schema(field_of(footer, 2, list))
    return [_group(g, object_bytes) for g in field_of(footer, 4, list)]


def _check_schema(elements: list[Any]) -> None:
    """Refuses a schema that is nested deep: Arrow follows it by recursion, to the end of its stack."""
    open_groups: list[int] = []  # children still to come, of each group around
    for element in elements:
        children = element.get(5, 0) if isinstance(element, dict) else -1
        if not isinstance(children, int) or not 0 <= children <= _MAX_COLUMNS:
            raise FormatError("Parquet footer: a malformed schema")
        if open_groups:
            open_groups[-1] -= 1
        if children:
            open_groups.append(children)
        while open_groups and not open_groups[-1]:
            open_groups.pop()
        if len(open_groups) > _MAX_DEPTH:
            raise FormatError("Parquet footer: a schema nested too deep")


def _group(group: object, object_bytes: int) -> Group:
    chunks = tuple(_chunk(c, object_bytes) for c in field_of(group, 1, list))
    rows: int = field_of(group, 3, int)
    if rows < 0:
        raise FormatError(f"Parquet footer: a row group of {rows} rows")
    return Group(rows, chunks)


def _chunk(chunk: object, object_bytes: int) -> Chunk:
    data = field_of(chunk, 3, dict)
    path = field_of(data, 3, list)
    start = data[11] if isinstance(data.get(11), int) and data[11] > 0 else field_of(data, 9, int)
    length: int = field_of(data, 7, int)
    if not path or not isinstance(path[0], bytes) or start < 4 or length < 0 or start + length > object_bytes:
        raise FormatError("Parquet footer: a column chunk outside the object")
    statistics = data.get(12)
    minimum = statistics.get(6) if isinstance(statistics, dict) else None
    return Chunk(
        path[0].decode(errors="replace"),
        start,
        length,
        field_of(data, 5, int),
        field_of(data, 4, int) != 0,
        minimum if isinstance(minimum, bytes) else None,
    )


def field_of(container: object, number: int, kind: type) -> Any:
    value = container.get(number) if isinstance(container, dict) else None
    if not isinstance(value, kind) or isinstance(value, bool):
        raise FormatError("Parquet footer: a required field is missing or of another type")
    return value


class Compact:
    """A reader of Thrift's compact protocol: structs become dicts by field number."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def position(self) -> int:
        """How many bytes have been read."""
        return self._at

    def struct(self, depth: int) -> dict[int, Any]:
        if depth > _MAX_DEPTH:
            raise FormatError("Parquet footer: nested too deep")
        fields: dict[int, Any] = {}
        number = 0
        while head := self._byte():
            delta, kind = head >> 4, head & 15
            number = number + delta if delta else self._zigzag()
            if kind in _INTEGERS:  # most fields are
                fields[number] = self._zigzag()
            else:
                fields[number] = kind == _TRUE if kind in (_TRUE, _FALSE) else self._value(kind, depth)
        return fields

    def _value(self, kind: int, depth: int) -> Any:
        if kind in _INTEGERS:
            return self._zigzag()
        if kind == _BINARY:
            return self._take(self._varint())
        if kind == _STRUCT:
            return self.struct(depth + 1)
        if kind in (_LIST, _SET):
            return self._list(depth)
        if kind == _DOUBLE:
            return self._take(8)
        if kind in (_BYTE, _TRUE, _FALSE):  # inside a list, a boolean is a byte
            return self._byte()
        if kind == _MAP:
            return self._map(depth)
        raise FormatError(f"Parquet footer: unknown Thrift type {kind}")

    def _list(self, depth: int) -> list[Any]:
        head = self._byte()
        count = head >> 4 if head >> 4 != 15 else self._varint()
        self._check_count(count)
        return [self._value(head & 15, depth + 1) for _ in range(count)]

    def _map(self, depth: int) -> dict[Any, Any]:
        count = self._varint()
        self._check_count(count)
        kinds = self._byte() if count else 0
        for _ in range(count):
            self._value(kinds >> 4, depth + 1)
            self._value(kinds & 15, depth + 1)
        return {}

    def _check_count(self, count: int) -> None:
        # Each element takes at least a byte, so nothing is allocated for counts that can't be true.
        if count > len(self._data) - self._at:
            raise FormatError("Parquet footer: more elements than bytes")

    def _byte(self) -> int:
        try:
            value = self._data[self._at]
        except IndexError:
            raise FormatError("Parquet footer: ends early") from None
        self._at += 1
        return value

    def _varint(self) -> int:
        byte = self._byte()
        if byte < 128:
            return byte
        value, shift = byte & 127, 7
        while byte >= 128:
            if shift > 63:
                raise FormatError("Parquet footer: a number of more than 64 bits")
            byte = self._byte()
            value |= (byte & 127) << shift
            shift += 7
        return value

    def _zigzag(self) -> int:
        value = self._varint()
        return (value >> 1) ^ -(value & 1)

    def _take(self, count: int) -> bytes:
        part = self._data[self._at : self._at + count]
        if len(part) != count:
            raise FormatError("Parquet footer: ends early")
        self._at += count
        return part
