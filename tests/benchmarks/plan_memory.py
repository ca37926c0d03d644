"""Planning a large input of token ids: rows a second, and how far the driver's memory grows.

    python tests/benchmarks/plan_memory.py 100000
    python tests/benchmarks/plan_memory.py 1000000

The driver's memory is sampled while it plans, after Ray has started: resident set, and its private
part (without pages of Ray's shared object store).
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import ray

from rayhs.config import parse_config
from rayhs.model import describe_model
from rayhs.samples import make_plan
from rayhs.store import open_store

_MIB = 2**20


def write_input(folder: Path, rows: int, tokens: int, jsonl: bool) -> None:
    """``rows`` rows of up to ``2 * tokens`` ids in files of 100k rows; every 1000th id is a duplicate."""
    random = np.random.default_rng(0)
    for number, first in enumerate(range(0, rows, 100_000)):
        count = min(100_000, rows - first)
        lengths = random.integers(1, 2 * tokens, count)
        ends = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        ids = pa.ListArray.from_arrays(pa.array(ends), pa.array(random.integers(0, 1024, ends[-1]).astype(np.int32)))
        names = [f"id-{i if i % 1000 else 0}" for i in range(first, first + count)]
        table = pa.table({"id": names, "ids": ids})
        if jsonl:
            with (folder / f"{number:03d}.jsonl").open("w") as file:
                file.writelines(json.dumps(row) + "\n" for row in table.to_pylist())
        else:
            pq.write_table(table, folder / f"{number:03d}.parquet", row_group_size=20_000)


class Memory:
    """The process' own memory, sampled: ``rss`` and ``private`` in bytes, highest so far."""

    def __init__(self) -> None:
        self.rss = self.private = 0
        self._stop = threading.Event()

    def sample(self) -> None:
        pages = [int(part) * 4096 for part in Path("/proc/self/statm").read_text().split()[1:3]]
        self.rss, self.private = max(self.rss, pages[0]), max(self.private, pages[0] - pages[1])

    @contextmanager
    def watching(self) -> Iterator[None]:
        def watch() -> None:
            while not self._stop.wait(0.05):
                self.sample()

        thread = threading.Thread(target=watch)
        thread.start()
        try:
            yield
        finally:
            self._stop.set()
            thread.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", type=int)
    parser.add_argument("--tokens", type=int, default=32, help="mean tokens a row")
    parser.add_argument("--jsonl", action="store_true", help="jsonl instead of Parquet")
    parser.add_argument("--no-ids", action="store_true", help="no id column: no search for duplicates")
    arguments = parser.parse_args()
    ray.init(address="local", num_cpus=2, log_to_driver=False, include_dashboard=False)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "in").mkdir()
        write_input(folder / "in", arguments.rows, arguments.tokens, arguments.jsonl)
        config = parse_config(
            {
                "model": "fake/8x64",
                "prompts": {"path": str(folder / "in"), "token_ids": "ids", "id": None if arguments.no_ids else "id"},
                "output": str(folder / "out"),
            }
        )
        model, store = describe_model(config), open_store(config.output)
        warm_up = config.prompts.model_copy(update={"path": None, "rows": [{"ids": [1], "id": "x"}]})
        make_plan(config.model_copy(update={"prompts": warm_up}), model, (2, 4, 5), store, lambda rows: None)
        before, during = Memory(), Memory()
        before.sample()
        start = time.perf_counter()
        with during.watching():
            plan, reasons = make_plan(config, model, (2, 4, 5), store, lambda rows: None)
        seconds = time.perf_counter() - start
        ray.shutdown()
    report = {
        "rows": plan.samples,
        "tokens": plan.tokens,
        "shards": len(plan.shard_ids()),
        "rejected": dict(reasons),
        "seconds": round(seconds, 1),
        "rows_per_second": round(plan.samples / seconds),
        "driver_rss_before_mib": round(before.rss / _MIB),
        "driver_rss_growth_mib": round((during.rss - before.rss) / _MIB, 1),
        "driver_private_growth_mib": round((during.private - before.private) / _MIB, 1),
    }
    sys.stdout.write(json.dumps(report) + "\n")


if __name__ == "__main__":
    main()
