"""A fingerprint of a model's weights that reads a small part of them."""

from __future__ import annotations

import json
import os
import struct
import zipfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import xxhash

_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")
_SPREAD, _SPREAD_BYTES = 16, 65_536
_TENSOR_BYTES = 4096
_READERS = 16  # a mixture of experts has ten thousands of tensors, on a network's disk perhaps
_LONGEST_HEADER = 100 * 2**20  # as the safetensors package has it

Span = tuple[int, int]
"""Start and length in bytes."""


def weights_digest(folder: Path) -> bytes:
    """xxh3_128 of names and sizes of the weights' files, of 16 pieces of 64 KiB spread over each, and of tensors.

    Of every tensor in safetensors the middle 4 KiB are read, of files of ``torch.save`` the checksums that they have of
    theirs. So one tensor that was trained on, or merged into, makes another digest; a part of one may pass.
    """
    digest = xxhash.xxh3_128()
    for path in sorted(path for pattern in _WEIGHTS for path in folder.glob(pattern)):
        size = path.stat().st_size
        digest.update(f"\0{path.name}\0{size}\0".encode())
        with path.open("rb") as file:
            tensors = _tensors(file.fileno(), size) if path.suffix == ".safetensors" else []
            for piece in _pieces(file.fileno(), [*_spread(size), *map(_middle, tensors)]):
                digest.update(piece)
        digest.update(_checksums(path))
    return digest.digest()


def _spread(size: int) -> list[Span]:
    last = max(size - _SPREAD_BYTES, 0)
    return [(last * number // (_SPREAD - 1), _SPREAD_BYTES) for number in range(_SPREAD)]


def _middle(tensor: Span) -> Span:
    start, length = tensor
    return start + max(length - _TENSOR_BYTES, 0) // 2, min(length, _TENSOR_BYTES)


def _tensors(file: int, size: int) -> list[Span]:
    """Where the tensors of a safetensors file are; none where it is damaged, which loading it will tell."""
    head = os.pread(file, 8, 0)
    length = struct.unpack("<Q", head)[0] if len(head) == 8 else size
    if length > min(_LONGEST_HEADER, size - 8):
        return []
    try:
        entries = json.loads(os.pread(file, length, 8))
        places = [entry["data_offsets"] for name, entry in entries.items() if name != "__metadata__"]
        return sorted((8 + length + int(begin), int(end) - int(begin)) for begin, end in places)
    except (ValueError, TypeError, KeyError, AttributeError):
        return []


def _pieces(file: int, spans: Sequence[Span]) -> list[bytes]:
    with ThreadPoolExecutor(_READERS) as pool:
        return list(pool.map(lambda span: os.pread(file, span[1], span[0]), spans))


def _checksums(path: Path) -> bytes:
    if path.suffix == ".safetensors" or not zipfile.is_zipfile(path):
        return b""
    try:
        with zipfile.ZipFile(path) as archive:
            return "\0".join(f"{member.filename} {member.CRC}" for member in archive.infolist()).encode()
    except zipfile.BadZipFile:
        return b""
