"""A store slower than the engine: staging and memory stay within their limits, and the run is as fast as the store.

    python tests/benchmarks/slow_store.py S3_URI [--mib-per-second 20] [--mib 400] [--staging-mib 32]

The store is the S3 server of AWS_ENDPOINT_URL behind a proxy with a limit. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from rayhs.config import parse_config
from rayhs.identity import dataset_record, identity_of
from rayhs.job import Job
from rayhs.model import describe_model
from rayhs.replica import Replica
from tests.fault_proxy import FaultProxy
from tests.planning import plan_here

MIB = 2**20
HIDDEN, LAYERS, TOKENS = 1024, (2, 4, 8), 128


@dataclass
class Measured:
    """``rate_share`` is the bytes stored a second over the limit of the store.

    ``memory_growth_mib``: the peak over what the process had before; ``late_growth_mib``: the peak of the
    second half over that of the first.
    """

    mib: float
    staging_limit_mib: float
    staging_peak_mib: float
    reserved_peak_mib: float
    memory_growth_mib: float
    late_growth_mib: float
    seconds: float
    rate_share: float
    failed: int


class Watch:
    """Looks at staging and memory while something runs."""

    def __init__(self, staging: Path) -> None:
        self._staging, self._end = staging, threading.Event()
        self.staging = 0
        self._resident: list[int] = []
        self._thread = threading.Thread(target=self._look)

    def __enter__(self) -> Watch:
        self._before = _resident()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._end.wait(0.01):
            self.staging = max(self.staging, _bytes_below(self._staging))
            self._resident.append(_resident())

    @property
    def growth(self) -> int:
        return max(self._resident) - self._before

    @property
    def late_growth(self) -> int:
        half = len(self._resident) // 2
        return max(self._resident[half:]) - max(self._resident[:half])


def _bytes_below(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except FileNotFoundError:
            continue  # taken meanwhile
    return total


def _resident() -> int:
    # Without the pages of mapped staging files: those are staging's own.
    fields = Path("/proc/self/statm").read_text().split()
    return (int(fields[1]) - int(fields[2])) * os.sysconf("SC_PAGE_SIZE")


def measure(uri: str, endpoint: str, mib_per_second: float, mib: int, staging_mib: int) -> Measured:
    """Extract ``mib`` MiB of the fake engine's states into ``uri`` through a store of ``mib_per_second``."""
    samples = mib * MIB // (TOKENS * len(LAYERS) * HIDDEN * 4)
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm") as staging,
        FaultProxy(endpoint, bytes_per_second=mib_per_second * MIB) as proxy,
    ):
        settings = {
            "model": f"fake/8x{HIDDEN}",
            "prompts": {"rows": [{"ids": [i % 600] * TOKENS} for i in range(samples)], "token_ids": "ids"},
            "layers": list(LAYERS),
            "output": uri,
            "shards": {"target_bytes": 12 * MIB},
            "staging": {"path": staging, "max_bytes": staging_mib * MIB},
        }
        config = parse_config(settings)  # planned past the proxy
        model = describe_model(config)
        plan, _ = plan_here(config, LAYERS)
        slow = parse_config({**settings, "storage": {"endpoint": proxy.endpoint}})
        job = Job(slow, model, dataset_record(identity_of(config, model, LAYERS), plan))
        with Watch(Path(staging)) as watch:
            seconds, nbytes, failed, reserved = asyncio.run(_extract(job))
    return Measured(
        mib=nbytes / MIB,
        staging_limit_mib=staging_mib,
        staging_peak_mib=watch.staging / MIB,
        reserved_peak_mib=reserved / MIB,
        memory_growth_mib=watch.growth / MIB,
        late_growth_mib=watch.late_growth / MIB,
        seconds=seconds,
        rate_share=nbytes / MIB / seconds / mib_per_second,
        failed=failed,
    )


async def _extract(job: Job) -> tuple[float, int, int, int]:
    replica = Replica(job)
    started = time.monotonic()
    limit = asyncio.Semaphore(job.shards_in_flight)

    async def one(shard: object) -> object:
        async with limit:
            return await replica.run_shard(shard)

    receipts = await asyncio.gather(*(one(shard) for shard in job.dataset.plan.shard_ids()))
    seconds = time.monotonic() - started
    await replica.stop()
    failed = sum(r.failed + bool(r.error) for r in receipts)
    return seconds, sum(r.bytes for r in receipts), failed, replica.budget.peak


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("uri")
    parser.add_argument("--mib-per-second", type=float, default=20)
    parser.add_argument("--mib", type=int, default=400)
    parser.add_argument("--staging-mib", type=int, default=32)
    chosen = parser.parse_args()
    found = measure(chosen.uri, os.environ["AWS_ENDPOINT_URL"], chosen.mib_per_second, chosen.mib, chosen.staging_mib)
    sys.stdout.write(json.dumps({k: round(v, 3) for k, v in asdict(found).items()}) + "\n")


if __name__ == "__main__":
    main()
