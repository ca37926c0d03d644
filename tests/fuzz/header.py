"""Fuzz the safetensors header parser with atheris: `make fuzz`, or with libFuzzer's own options.

The parser either gives tensors that fill the object byte for byte, or raises FormatError in one line.
"""

from __future__ import annotations

import sys

import atheris

with atheris.instrument_imports(include=["rayhs", "json"]):
    from rayhs.codec import header_length, parse_header
    from rayhs.errors import FormatError


def test_one(data: bytes) -> None:
    source = atheris.FuzzedDataProvider(data)
    claimed = source.ConsumeIntInRange(0, 2**16)
    rest = source.ConsumeBytes(sys.maxsize)
    for header, size in ((rest, 8 + len(rest) + claimed), (rest[8:], len(rest))):
        try:
            if header is not rest:
                header = rest[8 : 8 + header_length(rest, size)]
            tensors, metadata = parse_header(header, size)
        except FormatError as error:
            assert str(error).isprintable()
            continue
        assert sum(t.nbytes for t in tensors.values()) == size - 8 - len(header)
        assert all(t.start >= 8 + len(header) and t.start + t.nbytes <= size for t in tensors.values())
        assert all(isinstance(value, str) for value in metadata.values())


if __name__ == "__main__":
    atheris.Setup(sys.argv, test_one)
    atheris.Fuzz()
