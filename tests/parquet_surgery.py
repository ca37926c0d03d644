"""Takes a Parquet file apart, lets a test lie in its page headers or footer, and puts it together again."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

# A struct is {field: (type, value)}; a list is (type of its elements, values). Thrift's compact protocol.
Struct = dict[int, tuple[int, Any]]
PageChange = Callable[[str, Struct, bytes], bytes]  # column, header (changed in place), body -> body
I32, I64, BINARY, LIST, STRUCT = 5, 6, 8, 9, 12


def parse(data: bytes, at: int = 0) -> tuple[Struct, int]:
    fields: Struct = {}
    number = 0
    while head := data[at]:
        at, kind = at + 1, head & 15
        assert head >> 4, "Arrow's writer has no field that far from the last"
        number += head >> 4
        if kind in (1, 2):
            fields[number] = (kind, None)
        else:
            value, at = _parse_value(kind, data, at)
            fields[number] = (kind, value)
    return fields, at + 1


def _parse_value(kind: int, data: bytes, at: int) -> tuple[Any, int]:
    if kind in (4, I32, I64):
        value, at = _varint(data, at)
        return (value >> 1) ^ -(value & 1), at
    if kind == BINARY:
        length, at = _varint(data, at)
        return data[at : at + length], at + length
    if kind == LIST:
        head, at = data[at], at + 1
        count = head >> 4
        if count == 15:
            count, at = _varint(data, at)
        values = []
        for _ in range(count):
            value, at = _parse_value(head & 15, data, at)
            values.append(value)
        return (head & 15, values), at
    if kind == STRUCT:
        return parse(data, at)
    assert kind in (1, 2, 3), kind
    return data[at], at + 1


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        value |= (data[at] & 127) << shift
        at, shift = at + 1, shift + 7
        if data[at - 1] < 128:
            return value, at


def write(fields: Struct) -> bytes:
    out, last = bytearray(), 0
    for number, (kind, value) in sorted(fields.items()):
        out.append((number - last) << 4 | kind)
        last = number
        if kind not in (1, 2):
            out += _write_value(kind, value)
    return bytes(out) + b"\0"


def _write_value(kind: int, value: Any) -> bytes:
    if kind in (4, I32, I64):
        return varint(value << 1 if value >= 0 else (-value << 1) - 1)
    if kind == BINARY:
        return varint(len(value)) + bytes(value)
    if kind == LIST:
        inner, values = value
        head = bytes([len(values) << 4 | inner]) if len(values) < 15 else bytes([0xF0 | inner]) + varint(len(values))
        return head + b"".join(_write_value(inner, v) for v in values)
    return write(value) if kind == STRUCT else bytes([value])


def varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes(out) + bytes([value])


def footer_of(data: bytes) -> Struct:
    (length,) = struct.unpack("<I", data[-8:-4])
    return parse(data[-8 - length : -8])[0]


def chunks_of(footer: Struct) -> list[Struct]:
    """The metadata of every column chunk, row group by row group."""
    return [chunk[3][1] for group in footer[4][1][1] for chunk in group[1][1][1]]


def operate(
    data: bytes,
    page: PageChange = lambda column, header, body: body,
    footer: Callable[[Struct], object] = lambda footer: None,
) -> bytes:
    """The file with each page and the footer changed; offsets and sizes of the chunks follow."""
    meta, out = footer_of(data), bytearray(b"PAR1")
    for chunk in chunks_of(meta):
        column = chunk[3][1][1][0].decode()
        at = min(chunk[n][1] for n in (9, 11) if n in chunk)
        end, began = at + chunk[7][1], len(out)
        while at < end:
            header, at = parse(data, at)
            body, at = data[at : at + header[3][1]], at + header[3][1]
            chunk[11 if header[1][1] == 2 else 9] = (I64, len(out))
            changed = page(column, header, body)
            if changed != body:
                header.pop(4, None)
                header[3] = (I32, len(changed))
            out += write(header) + changed
        chunk[7] = (I64, len(out) - began)
    footer(meta)
    tail = write(meta)
    return bytes(out) + tail + struct.pack("<I", len(tail)) + b"PAR1"
