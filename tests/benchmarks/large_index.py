"""A dataset of many rows: how long opening takes, finding a sample by its id, and how much memory.

    python tests/benchmarks/large_index.py FOLDER --rows 10000000

Writes dataset.json, summary.json and the index files that a run of the default settings would have written (8192
rows a file, ids of the default form), but no shards, then reads in fresh processes. One row of a hundred failed: their
ids are read by `by_id`, which then raises SampleError with the row's reason and needs no shard. What reads samples
is given a store that makes up the shards it is asked for. Peaks are of the process that reads. Prints JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

import rayhs
from rayhs import codec, layout
from rayhs.errors import SampleError
from rayhs.layout import DatasetRecord, Plan, SamplesFile, ShardId, Summary
from rayhs.store.local import LocalFolderStore

ROWS_PER_FILE, SHARD_ROWS, TOKENS, FAILED_EVERY = 8192, 64, 700, 100
LOOKUPS = 1000
LAYERS, HIDDEN = [2, 18, 33], 64  # small states: what is measured is the index


def sample_id(position: int) -> str:
    return f"prompts-{position // 100_000:05d}.jsonl:{position % 100_000}"


def index_file(file: int, first: int, rows: int) -> pa.Table:
    """As `rayhs.reading.index_table.index_rows` makes it."""
    row = np.arange(rows)
    good = (first + row) % FAILED_EVERY != 0
    names = [
        layout.object_name(
            ShardId(file, group), f"{xxhash.xxh3_64_intdigest(str(ShardId(file, group)).encode()):016x}", "safetensors"
        )
        for group in range(-(-rows // SHARD_ROWS))
    ]
    group = row // SHARD_ROWS
    before = np.cumsum(good) - good
    start = (before - before[group * SHARD_ROWS]) * TOKENS
    columns = [
        pa.array(first + row),
        pa.array([sample_id(at) for at in range(first, first + rows)]),
        pa.array(np.where(good, np.array(names, object)[group], None), pa.string()),
        pa.array(np.where(good, start, 0)),
        pa.array(np.where(good, TOKENS, 0)),
        pa.array(np.where(good, "ok", "failed")),
        pa.array(np.where(good, None, "states are not finite"), pa.string()),
    ]
    return pa.table(columns, schema=layout.INDEX_SCHEMA)


def build(folder: Path, rows: int) -> int:
    """Bytes of the index files."""
    (folder / "index").mkdir(parents=True)
    files, checksums, size = [], [], 0
    for file, first in enumerate(range(0, rows, ROWS_PER_FILE)):
        count = min(ROWS_PER_FILE, rows - first)
        path = folder / layout.index_name(file)
        pq.write_table(index_file(file, first, count), path, write_page_checksum=True)
        size += path.stat().st_size
        checksums.append(xxhash.xxh3_128(path.read_bytes()).hexdigest())
        shards = -(-count // SHARD_ROWS)
        files.append(SamplesFile(rows=count, rejected=0, shard_tokens=[SHARD_ROWS * TOKENS] * shards, checksum="0"))
    failed = -(-rows // FAILED_EVERY)
    record = DatasetRecord(
        format_version=1,
        model="synthetic",
        model_hash="0",
        tokenizer_hash="0",
        layers=LAYERS,
        num_layers=36,
        hidden_size=HIDDEN,
        dtype="bfloat16",
        shard_format="safetensors",
        engine_dtype="bfloat16",
        plan=Plan(fingerprint="0", input="0", files=files),
        versions={},
        created="2026-01-01T00:00:00Z",
    )
    summary = Summary(
        samples=rows,
        ok=rows - failed,
        failed=failed,
        rejected=0,
        tokens=(rows - failed) * TOKENS,
        shards=sum(len(file.shard_tokens) for file in files),
        bytes=0,
        seconds=1.0,
        tokens_per_second=1.0,
        reasons={"states are not finite": failed},
        index_checksums=checksums,
        finished="2026-01-01T00:00:00Z",
    )
    (folder / layout.DATASET).write_bytes(record.to_bytes())
    (folder / layout.SUMMARY).write_bytes(summary.to_bytes())
    return size


class MadeUpShards(LocalFolderStore):
    """The folder, and in it every shard that the index names, its states and tokens all zero."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (MadeUpShards, (self.uri,))

    def size(self, name: str) -> int | None:
        shard = layout.shard_of_object(name)
        return super().size(name) if shard is None else self._parts(shard)[1]

    def get_ranges(self, name: str, ranges: Any) -> list[memoryview]:
        shard = layout.shard_of_object(name)
        if shard is None:
            return super().get_ranges(name, ranges)
        parts, _ = self._parts(shard)
        return [self._range(parts, start, length) for start, length in ranges]

    def _parts(self, shard: ShardId) -> tuple[list[tuple[int, bytes]], int]:
        """What is not zero, with its place; and the size of the object."""
        first = shard.file * ROWS_PER_FILE + shard.group * SHARD_ROWS
        index = np.array([at for at in range(first, first + SHARD_ROWS) if at % FAILED_EVERY])
        specs = codec.shard_specs(LAYERS, HIDDEN, "bfloat16", [TOKENS] * len(index))
        header = codec.build_header(specs, {})
        parts, at = [(0, header)], len(header)
        values = {"offsets": TOKENS * np.arange(len(index) + 1), "sample_index": index}
        for spec in specs:
            if spec.name in values:
                parts.append((at, values[spec.name].tobytes()))
            at += spec.nbytes
        return parts, at

    def _range(self, parts: list[tuple[int, bytes]], start: int, length: int) -> memoryview:
        answer = np.zeros(length, np.uint8)
        for at, data in parts:
            low, high = max(start, at), min(start + length, at + len(data))
            if low < high:
                answer[low - start : high - start] = np.frombuffer(data[low - at : high - at], np.uint8)
        return answer.data


def opened(folder: str) -> rayhs.Dataset:
    ds = rayhs.open(folder)
    return rayhs.Dataset(MadeUpShards(folder), ds.info, ds.summary)


def seconds(call: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def milliseconds(calls: list[Callable[[], Any]]) -> dict[str, float]:
    cpu = time.process_time()
    times = sorted(1000 * seconds(call) for call in calls)
    cpu = 1000 * (time.process_time() - cpu) / len(calls)
    return {"median": statistics.median(times), "p99": times[int(0.99 * len(times))], "max": times[-1], "cpu": cpu}


def peak_mib() -> float:
    # Not getrusage: its ru_maxrss begins with that of the process that started this one.
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) / 1024


def failed_by_id(ds: rayhs.Dataset, position: int) -> None:
    try:
        ds.by_id(sample_id(position))
    except SampleError as error:
        assert f"(position {position})" in str(error), error
    else:
        raise AssertionError(position)


def by_id(folder: str) -> dict[str, Any]:
    """Open, one position, ids at random: no table of the whole index is made."""
    found: dict[str, Any] = {"imported_mib": peak_mib()}
    begin = time.perf_counter()
    ds = rayhs.open(folder)
    rows = len(ds)
    found |= {"rows": rows, "open_and_len_s": time.perf_counter() - begin, "opened_mib": peak_mib()}
    rng = random.Random(7)
    failed = [FAILED_EVERY * rng.randrange(rows // FAILED_EVERY) for _ in range(LOOKUPS)]
    places = [rng.randrange(rows) for _ in range(LOOKUPS)]
    cpu = time.process_time()
    found["first_by_id_s"] = seconds(lambda: failed_by_id(ds, failed[0]))
    found["first_by_id_cpu_s"] = time.process_time() - cpu
    found["by_id_ms"] = milliseconds([lambda at=at: failed_by_id(ds, at) for at in failed[1:]])
    assert all(ds.position_of(sample_id(at)) == at for at in places[:20])
    found["position_of_ms"] = milliseconds([lambda at=at: ds.position_of(sample_id(at)) for at in places])
    again = failed[1:9] * 50
    found["by_id_of_a_few_ms"] = milliseconds([lambda at=at: failed_by_id(ds, at) for at in again])
    assert int(ds.good.sum()) == ds.summary.ok  # type: ignore[union-attr]
    return {**found, "peak_mib": peak_mib()}


def whole_index(folder: str) -> dict[str, Any]:
    """`Dataset.index`: every row as a plain Arrow table."""
    ds = rayhs.open(folder)
    took, cpu = seconds(lambda: ds.index), time.process_time()
    return {"index_s": took, "cpu_s": cpu, "index_mib": ds.index.nbytes / 2**20, "peak_mib": peak_mib()}


def first_samples(make: Callable[[rayhs.Dataset], Iterator[Any]], folder: str) -> dict[str, Any]:
    """From opening to the tenth answer."""
    begin, cpu = time.perf_counter(), time.process_time()
    answers = make(opened(folder))
    for _ in range(10):
        next(answers)
    return {"s": time.perf_counter() - begin, "cpu_s": time.process_time() - cpu, "peak_mib": peak_mib()}


def resumed(ds: rayhs.Dataset) -> Iterator[Any]:
    """A shuffled stream behind half of its samples."""
    stream = ds.stream(shuffle_buffer=128)
    stream.load_state_dict({**stream.state_dict(), "done": len(ds) // 2})
    return iter(stream)


def ray_rows(ds: rayhs.Dataset) -> Iterator[Any]:
    import ray

    ray.init(address="local", num_cpus=1, log_to_driver=False, include_dashboard=False)
    return iter(ds.ray(layers=LAYERS[:1], columns=COLUMNS).take(10))


COLUMNS = ["index", "sample_id", "token_ids"]  # none of the plan's, of which there is nothing here
FIRST = {
    "stream": lambda ds: iter(ds.stream()),
    "stream_of_a_rank": lambda ds: iter(ds.stream(shard=(3, 8))),
    "stream_shuffled": lambda ds: iter(ds.stream(shuffle_buffer=128)),
    "stream_resumed": resumed,
    "arrow": lambda ds: iter(ds.arrow(columns=COLUMNS)),
    "ray": ray_rows,
}
STEPS = {"by_id": by_id, "whole_index": whole_index} | {name: partial(first_samples, FIRST[name]) for name in FIRST}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--step", choices=STEPS, help="measure this in this process")
    parser.add_argument("--steps", nargs="+", choices=STEPS, default=list(STEPS), help="which; default all")
    arguments = parser.parse_args()
    if arguments.step:
        print(json.dumps(STEPS[arguments.step](str(arguments.folder))))
        return
    if not (arguments.folder / layout.SUMMARY).exists():
        print(json.dumps({"index_bytes": build(arguments.folder, arguments.rows)}))
    for step in arguments.steps:
        command = [sys.executable, __file__, str(arguments.folder), "--step", step]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        print(json.dumps({step: json.loads(done.stdout)}, indent=1))


if __name__ == "__main__":
    main()
