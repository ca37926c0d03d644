"""Arbitrary and mutated bytes for every parser: FormatError in one line, or a value that holds."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayhs import codec, layout
from rayhs.codec import STATE_DTYPES, TensorSpec, build_header, header_length, parse_header
from rayhs.errors import FormatError
from rayhs.parquet_footer import parse_groups
from rayhs.reading.stored_table import open_table
from rayhs.record import Record, seal
from tests.builders import Builder
from tests.test_records import KINDS

fuzzed = settings(max_examples=80)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)
DTYPES = [*STATE_DTYPES.values(), np.dtype(np.uint8), np.dtype(np.int32), np.dtype(np.int64)]
SPECS = st.lists(
    st.builds(
        TensorSpec,
        st.text(max_size=8).filter(lambda name: name != "__metadata__"),
        st.sampled_from(DTYPES),
        st.lists(st.integers(0, 9), max_size=4).map(tuple),
    ),
    max_size=6,
    unique_by=lambda spec: spec.name,
)
METADATA = st.dictionaries(st.text(max_size=6), st.text(max_size=6), max_size=3)


@cache
def sound() -> dict[str, bytes]:
    """Every kind of object of a dataset, as it should be."""
    with TemporaryDirectory() as folder:
        built = Builder(Path(folder)).write()
        names = [*KINDS, layout.index_name(0), layout.samples_name(0)]
        return {name: (built.folder / name).read_bytes() for name in names}


def mutated(data: st.DataObject, whole: bytes) -> bytes:
    """A few bytes changed, a piece cut out, doubled or put elsewhere."""
    damaged = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(damaged)))
        end = at + data.draw(st.integers(0, 12))
        damaged[at:end] = data.draw(st.binary(max_size=12) | st.just(bytes(damaged[at:end]) * 2))
    return bytes(damaged)


def checked_header(header: bytes, size: int) -> None:
    try:
        tensors, metadata = parse_header(header, size)
    except FormatError as error:
        assert str(error).isprintable()
        return
    assert sum(t.nbytes for t in tensors.values()) == size - 8 - len(header)
    assert all(isinstance(value, str) for value in metadata.values())


@fuzzed
@given(st.binary(max_size=200), st.integers(0, 2**65))
def test_header_of_arbitrary_bytes(header: bytes, size: int) -> None:
    checked_header(header, size)
    try:
        assert header_length(header, size) + 8 <= size
    except FormatError as error:
        assert str(error).isprintable()


@fuzzed
@given(JSON, st.integers(0, 10_000))
def test_header_of_arbitrary_json(value: Any, size: int) -> None:
    checked_header(json.dumps(value).encode(), size)
    checked_header(json.dumps({"t": {"dtype": "F32", "shape": value, "data_offsets": value}}).encode(), size)
    checked_header(json.dumps({"t": {"dtype": value, "shape": [], "data_offsets": [0, 4]}}).encode(), size)


@fuzzed
@given(SPECS, METADATA, st.data())
def test_headers_come_back_and_mutated_ones_hold(
    specs: list[TensorSpec], metadata: dict[str, str], data: st.DataObject
) -> None:
    whole = build_header(specs, metadata)
    payload = sum(spec.nbytes for spec in specs)
    tensors, found = parse_header(whole[8:], len(whole) + payload)
    assert found == metadata and len(whole) % 8 == 0
    assert [(t.name, t.dtype, t.shape) for t in tensors.values()] == [(s.name, s.dtype, s.shape) for s in specs]
    damaged = mutated(data, whole[8:])
    checked_header(damaged, 8 + len(damaged) + payload)


def checked_record(kind: type[Record], data: bytes) -> None:
    try:
        record = kind.from_bytes(data, "some/record.json")
    except FormatError as error:
        assert str(error).isprintable() and str(error).startswith("some/record.json: ")
    else:
        assert kind.from_bytes(record.to_bytes(), "again") == record


@pytest.mark.parametrize("name", KINDS)
@fuzzed
@given(st.data())
def test_records(name: str, data: st.DataObject) -> None:
    kind, whole = KINDS[name], sound()[name]
    checked_record(kind, data.draw(st.binary(max_size=100)))
    checked_record(kind, mutated(data, whole))
    checked_record(kind, seal(mutated(data, whole[:-38]) + b"}"))
    document = json.loads(whole)
    document[data.draw(st.sampled_from(sorted(document)))] = data.draw(JSON)
    checked_record(kind, seal(json.dumps(document).encode()))


@pytest.mark.parametrize("name", [layout.index_name(0), layout.samples_name(0)])
@fuzzed
@given(st.data())
def test_parquet_footers(name: str, data: st.DataObject) -> None:
    whole = sound()[name]
    length = int.from_bytes(whole[-8:-4], "little")
    footer = mutated(data, whole[-8 - length : -8])
    damaged = whole[: -8 - length] + footer + len(footer).to_bytes(4, "little") + b"PAR1"
    schema = layout.INDEX_SCHEMA if name.startswith("index") else layout.SAMPLES_SCHEMA
    try:
        groups = parse_groups(damaged, len(damaged))
        assert all(c.start + c.length <= len(damaged) for group in groups for c in group.chunks)
        table = open_table(damaged, len(damaged), schema, name)
        views = memoryview(damaged)
        table.read(range(len(groups)), schema.names, lambda ranges: [views[at : at + size] for at, size in ranges])
    except FormatError as error:
        assert str(error).isprintable()


def test_a_header_fills_at_most_its_share() -> None:
    assert codec.MAX_HEADER_BYTES > 120 * layout.MAX_LAYERS
