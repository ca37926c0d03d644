"""Why the store is built as it is: put and range-read rates of the candidates, side by side.

    python tests/benchmarks/store.py local /tmp /dev/shm      # own writes, obstore's LocalStore, a plain write
    python tests/benchmarks/store.py s3 s3://bucket/prefix    # rayhs, obstore, s3fs, pyarrow.fs; usual AWS variables

Prints one JSON line a measurement: MiB/s, the median of the rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np

from rayhs.config import StorageConfig
from rayhs.store import input_filesystem, open_store
from rayhs.store.settings import resolve_s3

MIB = 1 << 20
KIB = 1 << 10
Put = Callable[[str, Iterable[memoryview], int], object]


def cut(data: memoryview, chunk: int) -> Iterator[memoryview]:
    for start in range(0, len(data), chunk):
        yield data[start : start + chunk]


Seconds = dict[tuple[str, str], list[float]]


def timed(seconds: Seconds, key: tuple[str, str], action: Callable[[], object]) -> None:
    begin = time.perf_counter()
    action()
    seconds.setdefault(key, []).append(time.perf_counter() - begin)


def show(**fields: object) -> None:
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


def plain_write(path: str, chunks: Iterable[memoryview], size: int) -> None:
    with open(path, "wb", buffering=0) as file:
        for chunk in chunks:
            file.write(chunk)


def local(folder: str, size: int, rounds: int) -> None:
    import obstore
    from obstore.store import LocalStore

    root = os.path.join(folder, f"bench-{secrets.token_hex(4)}")
    os.makedirs(root)
    store, theirs = open_store(root), LocalStore(root)
    ways: dict[str, Put] = {
        "plain": lambda name, chunks, size: plain_write(os.path.join(root, name), chunks, size),
        "rayhs": store.put_stream,
        "obstore": lambda name, chunks, size: obstore.put(theirs, name, iter(chunks), chunk_size=8 * MIB),
    }
    data = np.random.default_rng(0).integers(0, 256, size, np.uint8).data
    try:
        for chunk in (64 * KIB, MIB, 8 * MIB):
            seconds = Seconds()
            for _ in range(rounds):  # turn by turn, so that a slow spell of the disk hits all alike
                for way, put in ways.items():
                    timed(seconds, (way, "put"), partial(put, way, cut(data, chunk), size))
                    os.unlink(os.path.join(root, way))
            rates = {way: round(size / MIB / statistics.median(seconds[way, "put"])) for way in ways}
            ratio = round(rates["rayhs"] / rates["plain"], 2)
            show(folder=folder, chunk_kib=chunk // KIB, **rates, rayhs_over_plain=ratio)
    finally:
        shutil.rmtree(root)


def s3_ways(uri: str) -> dict[str, tuple[Put, Callable[[str, list[tuple[int, int]]], object]]]:
    """By library: put a stream, read ranges of an object."""
    import obstore
    import pyarrow.fs
    from obstore.store import S3Store

    storage = StorageConfig()
    settings, store = resolve_s3(storage), open_store(uri)
    keys = settings.credentials()
    bucket, _, prefix = store.uri.removeprefix("s3://").partition("/")
    base = f"{bucket}/{prefix}".rstrip("/")
    raw = S3Store(
        bucket,
        prefix=prefix,
        config={"endpoint": settings.endpoint or "", "region": settings.region},
        client_options={"allow_http": True},
        credential_provider=settings.credentials,
    )
    files, _ = input_filesystem(uri, storage)
    scheme, _, host = (settings.endpoint or "https://s3.amazonaws.com").partition("://")
    arrow = pyarrow.fs.S3FileSystem(
        access_key=keys["access_key_id"],
        secret_key=keys["secret_access_key"],
        session_token=keys.get("token"),
        endpoint_override=host,
        scheme=scheme,
        region=settings.region,
    )

    def write(open_it: Callable[[str], Any]) -> Put:
        def put(name: str, chunks: Iterable[memoryview], size: int) -> None:
            with open_it(f"{base}/{name}") as file:
                for chunk in chunks:
                    file.write(chunk)

        return put

    def arrow_ranges(name: str, ranges: list[tuple[int, int]]) -> None:
        with arrow.open_input_file(f"{base}/{name}") as file, ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda r: file.read_at(r[1], r[0]), ranges))

    def s3fs_ranges(name: str, ranges: list[tuple[int, int]]) -> None:
        path = f"{base}/{name}"
        files.cat_ranges([path] * len(ranges), [s for s, _ in ranges], [s + n for s, n in ranges])

    def raw_ranges(name: str, ranges: list[tuple[int, int]]) -> None:
        obstore.get_ranges(raw, name, starts=[s for s, _ in ranges], lengths=[n for _, n in ranges])

    return {
        "rayhs": (store.put_stream, store.get_ranges),
        "obstore": (lambda n, chunks, size: obstore.put(raw, n, iter(chunks), chunk_size=8 * MIB), raw_ranges),
        "s3fs": (write(lambda path: files.open(path, "wb", block_size=8 * MIB)), s3fs_ranges),
        "pyarrow": (write(arrow.open_output_stream), arrow_ranges),
    }


def s3(uri: str, size: int, rounds: int) -> None:
    # pyarrow's trailing checksums are refused by Ceph before version 18.
    os.environ.setdefault("AWS_REQUEST_CHECKSUM_CALCULATION", "when_required")
    data = np.random.default_rng(0).integers(0, 256, size, np.uint8).data
    ranges = [(start, 4 * MIB) for start in range(0, size - 4 * MIB, size // 12)]
    run, seconds, store = f"bench-{secrets.token_hex(4)}", Seconds(), open_store(uri)
    ways = s3_ways(uri)
    for i in range(rounds + 1):  # turn by turn, so that a slow spell of the server hits all alike
        for way, (put, get_ranges) in ways.items():
            name = f"{run}/{way}"
            timed(seconds, (way, "put"), partial(put, name, cut(data, MIB), size))
            timed(seconds, (way, "whole"), partial(get_ranges, name, [(0, size)]))
            timed(seconds, (way, "ranges"), partial(get_ranges, name, ranges))
            if i == 0:
                seconds.clear()  # connections are being made
    sizes = {"put": size, "whole": size, "ranges": 4 * MIB * len(ranges)}
    for way in ways:
        rates = {what: round(n / MIB / statistics.median(seconds[way, what])) for what, n in sizes.items()}
        show(library=way, mib=size // MIB, **rates)
    store.delete(name for name, _ in store.list(run))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=["local", "s3"])
    parser.add_argument("places", nargs="+", help="folders, or s3:// URIs")
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    for place in options.places:
        (local if options.kind == "local" else s3)(place, options.mib * MIB, options.rounds)


if __name__ == "__main__":
    main()
