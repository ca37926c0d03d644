"""How fast a dataset is read beside plain GETs of the same bytes: one sample, all of them, one layer of four.

    python tests/benchmarks/reading.py URI [--mib 512] [--rounds 3]   # a folder, or s3://, with AWS variables

Makes a dataset of random bfloat16 states (hidden size 1024, 64 to 1023 tokens a sample) at URI and removes it again.
Prints one JSON line a measurement, medians of the rounds; what is compared is measured in turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

import rayhs
from rayhs.config import StorageConfig
from rayhs.store import Store, open_store
from tests.builders import Builder

LAYERS = (2, 14, 25, 28)
HIDDEN = 1024
TOKEN_BYTES = len(LAYERS) * HIDDEN * 2 + 5
SAMPLES = 100
READERS = 4  # as many as a stream has


def make(store: Store, mib: int) -> None:
    """Shards of about 64 MiB."""
    groups = [15] * max(1, mib // 64)
    with tempfile.TemporaryDirectory() as folder:
        Builder(
            Path(folder), dtype="bfloat16", layers=LAYERS, hidden=HIDDEN, groups=(groups,), lengths=(64, 1024)
        ).write()
        for path in Path(folder).rglob("*"):
            if path.is_file():
                with path.open("rb") as file:
                    chunks = iter(lambda: file.read(8 * 2**20), b"")
                    store.put_stream(str(path.relative_to(folder)), map(memoryview, chunks), path.stat().st_size)


def seconds(action: Callable[[], Any]) -> float:
    begun = time.perf_counter()
    action()
    return time.perf_counter() - begun


def one_sample(store: Store, ds: rayhs.Dataset, rounds: int) -> None:
    """A sample of all layers beside one GET of as many bytes of the same object."""
    rng = np.random.default_rng(5)
    rows = ds.index.to_pylist()
    good = [row for row in rows if row["status"] == "ok"]
    ours, plain = [], []
    for row in (good[i] for i in rng.integers(0, len(good), SAMPLES * rounds)):
        nbytes = row["num_tokens"] * TOKEN_BYTES
        ds[row["index"]]  # the shard's header is read once
        plain.append(seconds(lambda row=row, n=nbytes: store.get_ranges(row["shard"], [(4096, n)])))
        ours.append(seconds(lambda row=row: ds[row["index"]]))
    show("one sample", "ms", statistics.median(plain) * 1e3, statistics.median(ours) * 1e3)


def sequential(store: Store, ds: rayhs.Dataset, rounds: int) -> None:
    """Every sample of a stream beside GETs of whole shards, as many at once."""
    shards = sorted({name for name in ds.index["shard"].to_pylist() if name})
    nbytes = sum(store.size(name) or 0 for name in shards)

    def plain() -> None:
        with ThreadPoolExecutor(READERS) as pool:
            for data in pool.map(store.get, shards):
                del data

    for name, shuffle in (("stream", 0), ("stream, shuffle_buffer=64", 64)):
        gets, streams = [], []
        for _ in range(rounds):
            gets.append(seconds(plain))
            streams.append(seconds(lambda shuffle=shuffle: [None for _ in ds.stream(shuffle_buffer=shuffle)]))
        rate = nbytes / 2**20
        show(name, "MiB/s", rate / statistics.median(gets), rate / statistics.median(streams))


def one_layer(store: Store, ds: rayhs.Dataset) -> None:
    """Bytes of a layer of L, as the store is asked for them, beside 1/L of all states."""
    asked = []
    get_ranges = store.get_ranges
    view = ds.with_layers([LAYERS[1]])
    view._shards._store = _Counting(get_ranges, asked, store)  # type: ignore[assignment]
    for _ in view.stream():
        pass
    tokens = sum(ds.index["num_tokens"].to_pylist())
    show("one layer of four, a stream", "bytes", tokens * HIDDEN * 2, sum(asked))


class _Counting:
    def __init__(self, get_ranges: Callable[..., Any], asked: list[int], store: Store) -> None:
        self._get_ranges, self._asked, self._store = get_ranges, asked, store

    def get_ranges(self, name: str, ranges: Any) -> Any:
        self._asked.extend(length for _, length in ranges)
        return self._get_ranges(name, ranges)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def show(what: str, unit: str, plain: float, ours: float) -> None:
    line = {
        "what": what,
        "unit": unit,
        "plain": round(plain, 2),
        "rayhs": round(ours, 2),
        "ratio": round(ours / plain, 3),
    }
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("uri")
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    chosen = parser.parse_args()
    store = open_store(chosen.uri, StorageConfig())
    make(store, chosen.mib)
    try:
        ds = rayhs.open(chosen.uri)
        one_sample(store, ds, chosen.rounds)
        sequential(store, ds, chosen.rounds)
        one_layer(store, ds)
    finally:
        store.delete([name for name, _ in store.list("")])


if __name__ == "__main__":
    main()
