"""Staged samples to committed shards on a local folder, against a plain write of the same bytes.

    python tests/benchmarks/packing.py /tmp 2048      # folder, MiB of states

The samples are staged beforehand; the engine only hands them over by a rename, so what is timed is
everything behind it: reading, checking, hashing, packing, writing, committing. Prints JSON.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import rayhs.replica
from rayhs.config import parse_config
from rayhs.fake import FakeEngine
from rayhs.identity import dataset_record, identity_of
from rayhs.job import Job
from rayhs.layout import Plan
from rayhs.model import describe_model
from rayhs.parts import StagedParts
from rayhs.replica import Replica
from rayhs.staging import StagingArea
from tests.planning import plan_here

HIDDEN, LAYERS, TOKENS = 4096, (2, 4, 5, 8), 512
SAMPLE_BYTES = TOKENS * len(LAYERS) * HIDDEN * 4
SHARD_BYTES = 128 * 2**20
ROUNDS = 3


class Prestaged(FakeEngine):
    """Hands over samples that were staged before the clock started."""

    source: Path

    async def extract(self, key: str, token_ids: Sequence[int]) -> None:
        os.rename(self.source / f"{token_ids[0]}.safetensors", self._area.areas[0].path(key))


def stage_all(source: Path, count: int) -> list[list[int]]:
    engine = FakeEngine(StagedParts(source.parent / "unused", 2**40, LAYERS), LAYERS, HIDDEN, "float32")
    area = StagingArea(source, 2**40)
    prompts = [[i, *range(TOKENS - 1)] for i in range(count)]
    for i, prompt in enumerate(prompts):
        engine._stage(str(i), prompt, area, LAYERS)
    return prompts


def plain_write(source: Path, target: Path) -> float:
    """Seconds to write the staged bytes once, in files of a shard's size, straight out of memory."""
    files = sorted(source.iterdir())
    per_shard = SHARD_BYTES // SAMPLE_BYTES
    target.mkdir()
    started = time.perf_counter()
    for first in range(0, len(files), per_shard):
        with (target / f"{first}").open("wb", buffering=0) as out:
            for path in files[first : first + per_shard]:
                out.write(np.memmap(path, np.uint8, "r").data)
    return time.perf_counter() - started


def committed(job: Job, source: Path) -> tuple[float, int]:
    Prestaged.source = source
    rayhs.replica.make_engine = lambda config, model, layers, area, metrics: Prestaged(area, LAYERS, HIDDEN, "float32")

    async def run() -> tuple[float, int]:
        replica = Replica(job)
        await replica.ready()
        gate = asyncio.Semaphore(job.shards_in_flight)

        async def one(shard: Any) -> None:
            async with gate:
                receipt = await replica.run_shard(shard)
                assert not receipt.error and not receipt.failed, receipt

        started = time.perf_counter()
        await asyncio.gather(*(one(shard) for shard in job.dataset.plan.shard_ids()))
        seconds = time.perf_counter() - started
        await replica.stop()
        return seconds, replica.budget.limit

    return asyncio.run(run())


def make_job(folder: Path, prompts: list[list[int]]) -> Job:
    config = parse_config(
        {
            "model": f"fake/8x{HIDDEN}",
            "prompts": {"rows": [{"ids": p} for p in prompts], "token_ids": "ids"},
            "output": str(folder),
            "shards": {"target_bytes": SHARD_BYTES},
        }
    )
    model = describe_model(config)
    plan: Plan = plan_here(config, LAYERS)[0]
    return Job(config, model, dataset_record(identity_of(config, model, LAYERS), plan))


def main(folder: Path, mib: int) -> None:
    count = mib * 2**20 // SAMPLE_BYTES
    gib = count * SAMPLE_BYTES / 2**30
    work = folder / "rayhs-packing"
    source = Path("/dev/shm/packing-bench")
    rounds = []
    for _ in range(ROUNDS):
        shutil.rmtree(work, ignore_errors=True)
        shutil.rmtree(source, ignore_errors=True)
        work.mkdir()
        prompts = stage_all(source, count)
        job = make_job(work / "out", prompts)
        plain = plain_write(source, work / "plain")
        shutil.rmtree(work / "plain")
        ours, limit = committed(job, source)
        rounds.append({"plain_gib_s": gib / plain, "ours_gib_s": gib / ours, "ratio": plain / ours})
    shutil.rmtree(work)
    shutil.rmtree(source)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(
        json.dumps(
            {
                "gib": round(gib, 2),
                "rounds": [{k: round(v, 3) for k, v in r.items()} for r in rounds],
                "median_ratio": round(sorted(r["ratio"] for r in rounds)[ROUNDS // 2], 3),
                "peak_rss_mib": peak >> 20,
                "allowed_mib": (limit + 2 * SHARD_BYTES + 2**30) >> 20,
            },
            indent=2,
        )
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
