"""Ours beside plain vLLM (and the example connector) in turns, with all engines warm: what a noisy host can't blur.

    python tests/benchmarks/gpu_paired.py RUN.yaml [plain] [stock] [--rounds 5] [--samples 1500] [--set KEY=VALUE]

On a host whose cores are shared, the same engine is up to a third slower at one minute than at the next, so runs one
after the other say little about a ratio. Here each engine takes its share of the GPU's memory, all start at once, and
then a round of each follows the other. Ours is a replica without Ray: from its first prompt to the last commit record,
in a folder in memory. Says every round on standard error, and prints a JSON object: the rates of all rounds, and the
medians of each round's ratio to plain.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import uvloop

from rayhs.bench import Workload, parse_lengths
from rayhs.codec import token_bytes
from rayhs.config import load_config
from rayhs.engine import device
from rayhs.job import Job
from rayhs.layout import ShardId
from rayhs.peers import Peer, PeerJob, PeerKind
from rayhs.reading.plan_reader import PlanReader
from rayhs.replica import Replica
from rayhs.store import open_store
from tests.benchmarks.gpu_stages import extracted, forget_states, prepared

_MEMORY = 0.9  # of the GPU's, shared by the engines
_CACHE_BYTES = 20 * 2**30  # said to vLLM, as what it measures would count the others that start at the same time


class Other:
    """Another engine, in a process of its own; told each round."""

    def __init__(self, kind: PeerKind, arguments: list[str]) -> None:
        self.kind = kind
        command = [sys.executable, __file__, *arguments, "--serve", kind]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._number = -1

    def next(self) -> float:
        """Tokens/s of a round; the first only says that the engine is warm."""
        assert self._process.stdin is not None and self._process.stdout is not None
        print(self._number, file=self._process.stdin, flush=True)
        self._number += 1
        for line in self._process.stdout:
            if line.startswith("rate "):
                return float(line.split()[1])
        raise RuntimeError(f"{self.kind} vLLM ended")

    def stop(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def serve(kind: PeerKind, job: Job, rounds: list[list[ShardId]]) -> None:
    """A peer of `rayhs bench`, told its rounds on standard input."""
    reader = PlanReader(open_store(job.config.output), job.dataset.plan)
    prompts = [
        [ids for shard in mine for ids in reader.rows(shard, ["token_ids"]).column(0).to_pylist()] for mine in rounds
    ]
    whole_host: Any = SimpleNamespace(engine_cores=0)  # no cores of its own
    peer = Peer(PeerJob(kind, job.config, job.model, tuple(job.dataset.layers)), whole_host)
    peer.start(prompts[0])
    for line in sys.stdin:
        number, begun = int(line), time.perf_counter()
        if number >= 0:
            peer.run(prompts[number])
        print("rate", sum(map(len, prompts[number])) / (time.perf_counter() - begun), flush=True)
        peer.clear()
    peer.stop()


async def take_turns(job: Job, rounds: list[list[ShardId]], others: list[Other]) -> list[dict[str, float]]:
    """Tokens/s of each engine in each round."""

    async def warm() -> None:
        await asyncio.gather(*(asyncio.to_thread(other.next) for other in others))

    replica, found = Replica(job, begin=warm), []
    try:
        await replica.ready()
        for mine in rounds:
            begun = time.perf_counter()
            tokens = await extracted(replica, job.shards_in_flight, mine)
            rates = {"rayhs": tokens / (time.perf_counter() - begun)}
            forget_states(replica)
            for other in others:
                rates[other.kind] = await asyncio.to_thread(other.next)
            found.append(rates)
            print(json.dumps({kind: round(rate) for kind, rate in rates.items()}), file=sys.stderr, flush=True)
    finally:
        await replica.stop()
    return found


def report(job: Job, rounds: list[list[ShardId]], found: list[dict[str, float]]) -> dict[str, Any]:
    """Keyed as the report of `rayhs bench`; tokens and bytes are a round's."""
    plan = PlanReader(open_store(job.config.output), job.dataset.plan)
    tokens = sum(len(ids) for shard in rounds[0] for ids in plan.rows(shard, ["token_ids"]).column(0).to_pylist())
    rates = {kind: [one[kind] for one in found] for kind in found[0]}
    ratios = {
        key: statistics.median(one[kind] / one["plain"] for one in found)
        for kind, key in (("rayhs", "ratio"), ("stock", "stock_ratio"))
        if kind in rates and "plain" in rates
    }
    each = token_bytes(job.dataset.layers, job.dataset.hidden_size, job.dataset.dtype)
    return {**rates, **ratios, "tokens": tokens, "state_bytes": tokens * each}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("others", nargs="*", choices=["plain", "stock"], default=["plain"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--samples", type=int, default=1500, help="of a round")
    parser.add_argument("--lengths", default="512:3584")
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--serve", choices=["plain", "stock"], help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    workload = Workload(chosen.rounds * chosen.samples, *parse_lengths(chosen.lengths))
    share = [f"engine.vllm.gpu_memory_utilization={_MEMORY / (1 + len(chosen.others)):.2f}"]
    share += [f"engine.vllm.kv_cache_memory_bytes={_CACHE_BYTES}"]
    config = load_config(chosen.run, chosen.set if device() == "cpu" else [*share, *chosen.set])
    with tempfile.TemporaryDirectory(dir="/dev/shm") as output:
        job = prepared(config, workload, output)
        ids = job.dataset.plan.shard_ids()
        size = len(ids) // chosen.rounds
        rounds = [ids[i * size : (i + 1) * size] for i in range(chosen.rounds)]
        if chosen.serve:
            serve(chosen.serve, job, rounds)
            return
        others = [Other(kind, sys.argv[1:]) for kind in chosen.others]
        print(json.dumps(report(job, rounds, uvloop.run(take_turns(job, rounds, others)))), flush=True)
        for other in others:
            other.stop()


if __name__ == "__main__":
    main()
