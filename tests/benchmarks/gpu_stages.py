"""How fast one replica is up to each stage behind the engine, without Ray: one warm engine for all phases.

    python tests/benchmarks/gpu_stages.py RUN.yaml PHASE... [--samples 2500] [--lengths 512:3584] [--set KEY=VALUE]

``staged`` lets samples go once they are staged; ``checked`` checks them; ``hashed`` also packs and hashes shards, and
writes them nowhere; ``stored`` is the whole. A phase may be named several times, and with a switch interval of
Python's threads in seconds (``stored:0.0005``). Prints a JSON line a phase: tokens/s, the replica's metrics, how busy
its process and the machine's cores were. ``--steps FILE`` also prints what vLLM's processes were at.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import uvloop

import rayhs.engine
import rayhs.replica
from rayhs.bench import Workload, parse_lengths
from rayhs.config import RunConfig, fake_shape, load_config
from rayhs.fake import REFUSED_TOKEN
from rayhs.identity import dataset_record, identity_of
from rayhs.job import Job
from rayhs.layers import resolve_layers
from rayhs.layout import CommitRecord, ShardId, new_attempt
from rayhs.metrics import Totals
from rayhs.model import describe_model
from rayhs.replica import Replica
from rayhs.shards import GoodSample, PlannedSample, ShardSpec
from rayhs.store import Store
from tests.benchmarks.noted import FILE, read_spans, summary
from tests.planning import plan_here

PHASES = ("staged", "checked", "hashed", "stored")


def unchecked(parts: list[memoryview], planned: PlannedSample, spec: ShardSpec) -> GoodSample:
    return GoodSample(planned, planned.token_ids, planned.token_ids, {}, "")


def unwritten(store: Store, shard: ShardId, results: list[GoodSample], spec: ShardSpec) -> CommitRecord:
    tokens = [len(one.token_ids) for one in results]
    same: list[Any] = [None] * len(results)
    starts, statuses = [0] * len(results), ["ok"] * len(results)
    index = [one.planned.index for one in results]
    return CommitRecord.model_construct(
        shard=str(shard), attempt=new_attempt(), object=None, object_bytes=0, index=index, token_start=starts,
        num_tokens=tokens, status=statuses, reason=same, checksum=same,
    )  # fmt: skip


def written_nowhere(self: Any, name: str, chunks: Iterable[Any], size: int) -> None:
    for _ in chunks:
        pass


def patches(phase: str) -> list[Any]:
    found = []
    if phase == "staged":
        found.append(mock.patch.object(rayhs.replica, "read_staged", unchecked))
    if phase in ("staged", "checked"):
        found.append(mock.patch.object(rayhs.replica, "write_shard", unwritten))
    if phase == "hashed":
        found.append(mock.patch("rayhs.store.local.LocalFolderStore.put_stream", written_nowhere))
    return found


def busy() -> tuple[float, float, float, float]:
    """Now, the jiffies of all cores and of the idle ones, and the CPU seconds of this process."""
    fields = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    times = os.times()
    return time.perf_counter(), sum(fields), fields[3] + fields[4], times.user + times.system


def since(before: tuple[float, ...]) -> dict[str, float]:
    wall, total, idle, own = (b - a for a, b in zip(before, busy(), strict=True))
    return {"cores_busy": round(1 - idle / max(total, 1), 3), "own_cores": round(own / wall, 2)}


def pin(cores_each: int) -> None:
    """Give each of vLLM's processes, children of this one, cores of its own, and this one the rest."""
    first, last = 0, os.cpu_count() or 1
    for process in psutil.Process().children(recursive=True):
        if "VLLM::" in " ".join(process.cmdline()):
            _bind(process, set(range(first, first + cores_each)))
            first += cores_each
    _bind(psutil.Process(), set(range(first, last)))


def _bind(process: psutil.Process, cores: set[int]) -> None:
    for thread in process.threads():
        os.sched_setaffinity(thread.id, cores)


async def run(
    job: Job, shards: list[list[ShardId]], phases: list[str], cores_each: int
) -> list[tuple[str, float, float]]:
    """Each phase, and when it began and ended, in seconds since the epoch."""

    async def warm() -> None:
        pass

    replica = Replica(job, begin=warm)
    await replica.ready()
    if cores_each:
        pin(cores_each)
    before: Totals = {}
    windows = []
    for phase, mine in zip(phases, shards, strict=True):
        kind, _, interval = phase.partition(":")
        sys.setswitchinterval(float(interval or 0.005))
        for patch in (active := patches(kind)):
            patch.start()
        before_it, begun = busy(), time.perf_counter()
        tokens = await extracted(replica, job.shards_in_flight, mine)
        seconds = time.perf_counter() - begun
        windows.append((phase, time.time() - seconds, time.time()))
        for patch in active:
            patch.stop()
        after = {key: tuple(value) for key, value in replica._all_metrics().items()}
        stages = {key: round(value[0] - before.get(key, (0.0, 0))[0], 2) for key, value in after.items()}
        before = after
        forget_states(replica)
        line = {
            "phase": phase,
            "begun": round(windows[-1][1], 2),
            "tokens_per_second": round(tokens / seconds),
            "seconds": round(seconds, 2),
        }
        print(json.dumps({**line, **since(before_it), "stages": stages}), flush=True)
    await replica.stop()
    return windows


def forget_states(replica: Replica) -> None:
    """Give back the memory of the shards stored so far."""
    replica._store.delete([name for name, _ in replica._store.list("") if name.endswith(".safetensors")])


async def extracted(replica: Replica, in_flight: int, shards: list[ShardId]) -> int:
    """The tokens of these shards, once all are committed; so many are in the replica at once."""
    at_once = asyncio.Semaphore(in_flight)

    async def one(shard: ShardId) -> int:
        async with at_once:
            receipt = await replica.run_shard(shard)
        assert not receipt.error, receipt.error
        return receipt.tokens

    return sum(await asyncio.gather(*map(one, shards)))


def prepared(config: RunConfig, workload: Workload, output: str) -> Job:
    model = describe_model(config)
    vocabulary = REFUSED_TOKEN if fake_shape(config.model) else model.vocab_size
    rows = [{"ids": prompt} for prompt in workload.prompts(vocabulary)]
    prompts = {"rows": rows, "token_ids": "ids"}
    changed = {**config.model_dump(exclude={"prompts"}), "prompts": prompts, "output": output}
    config = RunConfig.model_validate(changed)
    layers = resolve_layers(config.layers, model.num_layers)
    plan, _ = plan_here(config, layers)
    return Job(config, model, dataset_record(identity_of(config, model, layers), plan), measured=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("phases", nargs="+", metavar="PHASE")
    parser.add_argument("--samples", type=int, default=2500)
    parser.add_argument("--lengths", default="512:3584")
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--pin", type=int, default=0, metavar="CORES", help="each vLLM process on as many of its own")
    parser.add_argument("--steps", help="also time vLLM's steps (times_steps.py), in files STEPS.*")
    chosen = parser.parse_args()
    if unknown := {phase.partition(":")[0] for phase in chosen.phases} - set(PHASES):
        parser.error(f"no such phase: {', '.join(sorted(unknown))}; there are {', '.join(PHASES)}")
    count = len(chosen.phases)
    workload = Workload(count * chosen.samples, *parse_lengths(chosen.lengths))
    if chosen.steps:
        os.environ[FILE] = chosen.steps
        timed = {"kv_connector": "TimesSteps", "kv_connector_module_path": "tests.benchmarks.times_steps"}
        ours = rayhs.engine.kv_transfer_config
        mock.patch("rayhs.engine.kv_transfer_config", lambda *a, **k: {**ours(*a, **k), **timed}).start()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as output:
        job = prepared(load_config(chosen.run, chosen.set), workload, output)
        ids = job.dataset.plan.shard_ids()
        share = len(ids) // count
        windows = uvloop.run(
            run(job, [ids[i * share : (i + 1) * share] for i in range(count)], chosen.phases, chosen.pin)
        )
    if chosen.steps:
        steps = Path(chosen.steps)
        for file in sorted(steps.parent.glob(f"{steps.name}.*")):
            spans = read_spans(file)
            for phase, begin, end in windows:
                print(f"{phase}, {file.name}", *summary(spans, begin, end), sep="\n  ")


if __name__ == "__main__":
    main()
