"""Would compressed shards pay? zstd on a dataset's states as they are and byte-shuffled: bytes and speed, one thread.

    python tests/benchmarks/compression.py URI [MiB]

Of each layer the states of the first samples in float32, bfloat16 and float8_e4m3fn, in pieces of 4 MiB. Byte-shuffled:
all first bytes of the values of a piece, then all second ones (as Blosc and HDF5 do).
"""

from __future__ import annotations

import sys
import time

import numpy as np
import pyarrow as pa

import rayhs
from rayhs.codec import STATE_DTYPES
from rayhs.fp8 import quantize

PIECE = 4 * 2**20


def shuffled(data: np.ndarray, width: int) -> np.ndarray:
    return np.ascontiguousarray(data.reshape(-1, width).T).reshape(-1)


def measure(states: np.ndarray, level: int, shuffle: bool) -> tuple[float, float, float]:
    """Compressed share of the bytes, and MiB/s in and out."""
    codec, width = pa.Codec("zstd", compression_level=level), states.dtype.itemsize
    data = states.view(np.uint8).reshape(-1)
    small = packed = unpacked = 0.0
    for first in range(0, len(data) - PIECE, PIECE):
        piece = data[first : first + PIECE]
        begun = time.perf_counter()
        out = codec.compress(shuffled(piece, width) if shuffle else piece)
        middle = time.perf_counter()
        back = np.frombuffer(codec.decompress(out, PIECE), np.uint8)
        if shuffle:
            back = shuffled(back, PIECE // width)
        ended = time.perf_counter()
        assert np.array_equal(back, piece)
        small, packed, unpacked = small + out.size, packed + middle - begun, unpacked + ended - middle
    mib = len(range(0, len(data) - PIECE, PIECE)) * PIECE / 2**20
    return small / (mib * 2**20), mib / packed, mib / unpacked


def main() -> None:
    dataset, limit = rayhs.open(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 64
    samples, size = [], 0
    for sample in dataset.stream():
        samples.append(sample)
        size += sum(states.nbytes for states in sample.hidden_states.values())
        if size >= limit * 2**20:
            break
    layers = [np.concatenate([s.hidden_states[k].astype(np.float32) for s in samples]) for k in dataset.layers]
    whole = np.concatenate(layers)
    forms = {"float32": whole, "bfloat16": whole.astype(STATE_DTYPES["bfloat16"]), "float8_e4m3fn": quantize(whole)[0]}
    print(f"{dataset.model}, layers {dataset.layers}, {len(whole)} states of {dataset.hidden_size}")
    for name, states in forms.items():
        for level in (1, 3):
            for shuffle in (False, True) if states.dtype.itemsize > 1 else (False,):
                share, packing, unpacking = measure(states, level, shuffle)
                how = "byte-shuffled" if shuffle else "plain"
                speeds = f"{packing:6.0f} MiB/s in, {unpacking:6.0f} MiB/s out"
                print(f"{name:14} zstd {level} {how:14} {share:.3f} of the bytes, {speeds}")


if __name__ == "__main__":
    main()
