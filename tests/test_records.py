"""The JSON records of a dataset: each says of itself whether a byte of it changed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import xxhash

from rayhs import layout
from rayhs.errors import FormatError
from rayhs.layout import CommitRecord, DatasetRecord, Summary
from rayhs.record import Record, seal
from tests.builders import Builder

KINDS: dict[str, type[Record]] = {
    "dataset.json": DatasetRecord,
    "commits/00000-0000.json": CommitRecord,
    "summary.json": Summary,
}
each_kind = pytest.mark.parametrize("name", KINDS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Builder(tmp_path_factory.mktemp("data")).write().folder


@each_kind
def test_the_seal_is_what_its_description_says(folder: Path, name: str) -> None:
    data = (folder / name).read_bytes()
    body, tail = data[:-38], data[-38:]
    assert tail == f',"record_checksum":"{xxhash.xxh3_64_hexdigest(body + b"}")}"}}'.encode()
    assert list(json.loads(data))[-1] == "record_checksum"
    assert json.loads(body + b"}") == {k: v for k, v in json.loads(data).items() if k != "record_checksum"}
    record = KINDS[name].from_bytes(data, name)
    assert record.to_bytes() == data


@each_kind
def test_every_flipped_bit_is_an_error(folder: Path, name: str) -> None:
    sound = (folder / name).read_bytes()
    for position in range(len(sound)):
        for bit in range(8):
            damaged = bytearray(sound)
            damaged[position] ^= 1 << bit
            with pytest.raises(FormatError) as error:
                KINDS[name].from_bytes(bytes(damaged), name)
            assert "\n" not in str(error.value)


@each_kind
def test_cut_extended_or_unsealed_records(folder: Path, name: str) -> None:
    sound = (folder / name).read_bytes()
    for end in range(len(sound)):
        with pytest.raises(FormatError):
            KINDS[name].from_bytes(sound[:end], name)
    for other in (sound[:-38] + b"}", sound + b"\n", b" " + sound, sound.replace(b":", b": ", 1)):
        with pytest.raises(FormatError, match=f"{name}: .*record_checksum.*: damaged or edited; "):
            KINDS[name].from_bytes(other, name)


def test_a_wrong_value_is_named_rather_than_the_checksum(folder: Path) -> None:
    data = (folder / layout.DATASET).read_bytes().replace(b'"format_version":1', b'"format_version":7')
    with pytest.raises(FormatError, match="format version 7; this rayhs reads version 1"):
        DatasetRecord.from_bytes(data, layout.DATASET)


def test_keys_of_a_later_version_are_ignored_but_covered(folder: Path) -> None:
    body = (folder / layout.SUMMARY).read_bytes()[:-38] + b',"later":"x"}'
    sealed = seal(body)
    assert Summary.from_bytes(sealed, "summary.json").ok == 11
    with pytest.raises(FormatError, match="differs from its record_checksum"):
        Summary.from_bytes(sealed.replace(b'"later":"x"', b'"later":"y"'), "summary.json")
