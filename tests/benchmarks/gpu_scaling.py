"""How speed grows with replicas on one host: plain vLLM, rayhs and vLLM's example connector, in turns.

    python tests/benchmarks/gpu_scaling.py OUT CASE... [--rounds 1] [--samples N] [--set KEY=VALUE]
    python tests/benchmarks/gpu_scaling.py --table OUT/scaling.json

Cases are the keys of CASES. As many replicas as fit the GPUs are warmed up, three engines a GPU, each replica on as
large a part of the cores as of the GPUs. Then 1, 2, 4, 8 of them work at once, one kind of engine after the other;
another is the first in every round. rayhs is a replica without Ray, its states go into a folder in memory. What was
found is kept case by case, so that a call with a limit may take one case. How long one takes on GPUs is not known yet.

``paced`` needs no GPU: replicas of the fake engine, which prefill at the rate that Qwen3-8B had on an H200 and write
states of its size with the CPU: what a host's memory and cores are up to behind that many GPUs. RAYHS_PACE in the
environment is another rate. It takes 16 GiB of memory, and what is stored.

OUT/scaling.json has the machine and every case: tokens/s of each turn, how busy the cores were, how full staging was
at most, what the engines waited for, and what a thread that now and then copies 64 MiB got, beside what it gets alone.
It keeps the cases that an earlier call found on such a machine.
``efficiency`` is the rate of n replicas over n times that of one, ``limit`` a sentence.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from rayhs.bench import Workload
from rayhs.config import load_config
from rayhs.layout import ShardId
from tests.benchmarks.gpu import Lane, begun, run_file
from tests.benchmarks.gpu_stages import busy, prepared, since
from tests.benchmarks.turn_engine import Engine, Rounds, save_job
from tests.benchmarks.turns import PACE

_COUNTS = (8, 4, 2, 1)
_LENGTHS = (512, 3584)
_WAITS = ("wait for staging", "engine idle", "wait for pinned memory")
_GOAL = 0.95
_PACE = "40000"
_PROBED = 64 * 2**20
_PROBE_EVERY_S = 0.5
# What uses NVLink multicast can put a shared host's GPUs out of service.
_NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}


@dataclass(frozen=True)
class Case:
    """``samples`` of a replica's turn; ``cache_gib`` for the KV cache of each of the engines of a GPU."""

    shape: str
    ranks: int
    samples: int
    cache_gib: int = 20
    kinds: tuple[str, ...] = ("rayhs", "plain", "stock")

    def replicas(self, gpus: int) -> list[int]:
        """How many there are at once, most first."""
        return [count for count in _COUNTS if self.paced or count <= gpus // self.ranks]

    @property
    def paced(self) -> bool:
        return self.kinds == ("paced",)

    def settings(self) -> list[str]:
        if self.paced:
            return ["engine.vllm={}", "engine.dtype=bfloat16", "staging.max_bytes=2GiB"]
        return [
            f"engine.tensor_parallel_size={self.ranks}",
            f"engine.vllm.gpu_memory_utilization={0.9 / len(self.kinds):.2f}",
            f"engine.vllm.kv_cache_memory_bytes={self.cache_gib * 2**30}",
            "staging.max_bytes=8GiB",
        ]

    def start(self, kind: str, replica: int, of: int) -> Engine:
        lane = Lane(range(replica * self.ranks, (replica + 1) * self.ranks), of * self.ranks)
        environment = {PACE: os.environ.get(PACE, _PACE)} if self.paced else _NO_MULTICAST | lane.environment()
        return Engine(kind, environment, lane.prefix())


CASES = {
    "8b": Case("qwen3-8b", 1, 300),
    "8b-tp2": Case("qwen3-8b", 2, 500),
    "8b-tp4": Case("qwen3-8b", 4, 700),
    "8b-tp8": Case("qwen3-8b", 8, 900),
    "70b-tp4": Case("70b", 4, 100, cache_gib=5),
    "70b-tp8": Case("70b", 8, 180, cache_gib=10),
    "paced": Case("fake/36x4096", 1, 100, kinds=("paced",)),
}


class MemoryProbe:
    """Copies 64 MiB now and then, by one thread: GB/s that are left of what it gets alone."""

    def __init__(self) -> None:
        self._source, self._target = (np.ones(_PROBED, np.uint8) for _ in range(2))

    def once(self) -> float:
        started = time.perf_counter()
        np.copyto(self._target, self._source)
        return _PROBED / (time.perf_counter() - started) / 1e9

    @contextlib.contextmanager
    def beside(self) -> Iterator[list[float]]:
        """The rates that it gets until the end of the block."""
        rates: list[float] = []
        ended = threading.Event()

        def repeat() -> None:
            while not ended.wait(_PROBE_EVERY_S):
                rates.append(self.once())

        thread = threading.Thread(target=repeat)
        thread.start()
        try:
            yield rates
        finally:
            ended.set()
            thread.join()


def take_turn(number: int, engines: Sequence[Engine], probe: MemoryProbe) -> dict[str, Any]:
    """A turn of some engines of a kind, all at once."""
    for engine in engines:
        engine.prepare(number)
    before = busy()
    with probe.beside() as copies:
        for engine in engines:
            engine.say("begin")
        said = [engine.answer() for engine in engines]
    turn = {
        "kind": engines[0].kind,
        "replicas": len(engines),
        # By each one's own time: shares are of a size, but not to the token, and a run gives what is left to the first.
        "rate": sum(one["rate"] for one in said),
        "each": [round(one["rate"]) for one in said],
        "cores_busy": since(before)["cores_busy"],
        "copy_gb_s": round(statistics.median(copies), 2) if copies else None,
    }
    return turn | (behind_the_engine(said) if "stages" in said[0] else {})


def behind_the_engine(said: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """How full staging was at most, GB/s into the store, and the shares of their time that the engines waited."""

    def per_second(stage: str, what: int) -> list[float]:
        return [one["stages"].get(stage, (0.0, 0))[what] / (one["at"][1] - one["at"][0]) for one in said]

    return {
        "staging": max(one["staging"] for one in said),
        "stored_gb_s": round(sum(per_second("to store", 1)) / 1e9, 2),
        "waits": {stage: round(statistics.mean(per_second(stage, 0)), 4) for stage in _WAITS},
    }


def summed_up(turns: Sequence[dict[str, Any]], alone: float) -> dict[str, Any]:
    """By number of replicas: medians of the rounds' ``efficiency`` by kind, and ``over_plain`` by kind; ``limit``."""
    rates: dict[tuple[str, int], list[float]] = {}
    for turn in turns:
        rates.setdefault((turn["kind"], turn["replicas"]), []).append(turn["rate"])
    efficiency: dict[str, dict[int, float]] = {}
    over_plain: dict[str, dict[int, float]] = {}
    for (kind, count), found in sorted(rates.items()):
        efficiency.setdefault(kind, {})[count] = _ratio(found, rates[kind, 1]) / count
        if kind != "plain" and ("plain", count) in rates:
            over_plain.setdefault(kind, {})[count] = _ratio(found, rates["plain", count])
    return {"efficiency": efficiency, "over_plain": over_plain, "limit": limit(turns, efficiency, alone)}


def _ratio(rates: Sequence[float], over: Sequence[float]) -> float:
    return statistics.median(rate / other for rate, other in zip(rates, over, strict=True))


def limit(turns: Sequence[dict[str, Any]], efficiency: dict[str, dict[int, float]], alone: float) -> str:
    """Where the first limit shows, and which it is as far as was measured."""
    ours = efficiency["rayhs" if "rayhs" in efficiency else "paced"]
    short = [count for count, found in sorted(ours.items()) if found < _GOAL]
    if not short:
        return f"none up to {max(ours)} replicas: {min(ours.values()):.3f} of {min(ours)} replica's speed each, or more"
    count = short[0]
    at = [turn for turn in turns if turn["replicas"] == count and "waits" in turn]
    waits = {stage: statistics.median(turn["waits"][stage] for turn in at) for stage in _WAITS}
    copies = [turn["copy_gb_s"] for turn in at if turn["copy_gb_s"]]
    found = [f"{stage} for {share:.0%} of the engines' time" for stage, share in waits.items() if share > 0.03]
    if copies and statistics.median(copies) < 0.7 * alone:
        found.append(f"memory: a copying thread gets {statistics.median(copies) / alone:.0%} of what it gets alone")
    if (cores := statistics.median(turn["cores_busy"] for turn in at)) > 0.9:
        found.append(f"the cores: {cores:.0%} busy")
    if efficiency.get("plain", {}).get(count, 1.0) < _GOAL:
        found.append(f"plain vLLM: {efficiency['plain'][count]:.3f} itself")
    return (
        f"{count} replicas, {ours[count]:.3f} of one's speed each: {', '.join(found) or 'nothing measured shows why'}"
    )


def measure(case: Case, gpus: int, rounds: int, settings: Sequence[str]) -> dict[str, Any]:
    """What is reported of a case."""
    counts = case.replicas(gpus)
    if not counts:
        return {"error": f"needs {case.ranks} GPUs, there are {gpus}"}
    turns = counts * rounds
    with tempfile.TemporaryDirectory(dir="/dev/shm") as output:
        config = load_config(run_file(Path(output), case.shape), [*case.settings(), *settings])
        job = prepared(config, Workload(sum(turns) * case.samples, *_LENGTHS), output)
        shares = shared_out(job.dataset.plan.shard_ids(), turns)
        engines = {kind: [case.start(kind, i, counts[0]) for i in range(counts[0])] for kind in case.kinds}
        for i, share in enumerate(shares):
            save_job(Path(output, f"job{i}"), job, share)
            for of_kind in engines.values():
                of_kind[i].say(f"{output}/job{i}")
        all_engines = [engine for of_kind in engines.values() for engine in of_kind]
        for engine in all_engines:
            engine.answer()
        found = take_turns(engines, turns)
        for engine in all_engines:
            engine.stop()
    return {"date": time.strftime("%Y-%m-%d"), **found}


def shared_out(ids: Sequence[ShardId], turns: Sequence[int]) -> list[Rounds]:
    """By replica, the shards of each turn, as many for each that takes part; the first turn is of them all."""
    each = len(ids) // sum(turns)
    if not each:
        raise SystemExit(f"{len(ids)} shards for {sum(turns)} turns of a replica: give more --samples")
    shares: list[Rounds] = [[] for _ in range(turns[0])]
    free = iter(ids)
    for count in turns:
        for i, share in enumerate(shares):
            share.append(list(islice(free, each)) if i < count else [])
    return shares


def take_turns(engines: dict[str, list[Engine]], turns: Sequence[int]) -> dict[str, Any]:
    probe, kinds, found = MemoryProbe(), list(engines), []
    alone = statistics.median(probe.once() for _ in range(9))
    for number, count in enumerate(turns):
        first = number % len(kinds)
        for kind in kinds[first:] + kinds[:first]:
            found.append(take_turn(number, engines[kind][:count], probe))
            print(json.dumps(found[-1]), file=sys.stderr, flush=True)
    return {"copy_gb_s_alone": round(alone, 2), "turns": found, **summed_up(found, alone)}


def table(report: dict[str, Any]) -> str:
    """A report as Markdown; rates are medians of the rounds."""
    lines = ["| case | replicas | plain vLLM | rayhs | of plain | of one replica each | example connector |"]
    lines.append("|---|---|---|---|---|---|---|")
    for case, got in report["cases"].items():
        lines += rows(case, got) if "error" not in got else [f"| {case} | | {got['error']} | | | | |"]
    return "\n".join(lines)


def rows(case: str, got: dict[str, Any]) -> list[str]:
    found = []
    for count in sorted({turn["replicas"] for turn in got["turns"]}):
        of_count = [turn for turn in got["turns"] if turn["replicas"] == count]
        rates = {
            kind: f"{statistics.median(turn['rate'] for turn in of_count if turn['kind'] == kind):,.0f}"
            for kind in got["efficiency"]
        }
        ours = "rayhs" if "rayhs" in rates else "paced"
        over = {kind: f"{by[str(count)]:.3f}" for kind, by in got["over_plain"].items()}
        each = f"{got['efficiency'][ours][str(count)]:.3f}"
        stock = f"{rates['stock']}, {over['stock']}" if "stock" in rates else ""
        found.append(
            f"| {case} | {count} | {rates.get('plain', '')} | {rates[ours]} | {over.get(ours, '')} | {each} | {stock} |"
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("cases", nargs="*", metavar="CASE")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--samples", type=int, help="of a replica's turn, instead of the case's")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change every case's run file")
    parser.add_argument("--table", action="store_true")
    chosen = parser.parse_args()
    if chosen.table:
        print(table(json.loads(chosen.out.read_text())))
        return
    if not chosen.cases or set(chosen.cases) - set(CASES):
        parser.error(f"give one case or more of {', '.join(CASES)}")
    chosen.out.mkdir(parents=True, exist_ok=True)
    path: Path = chosen.out / "scaling.json"
    report = begun(path)
    for name in chosen.cases:
        case = replace(CASES[name], samples=chosen.samples or CASES[name].samples)
        report["cases"][name] = measure(case, len(report["machine"]["gpus"]), chosen.rounds, chosen.set)
        path.write_text(json.dumps(report, indent=1) + "\n")
    print(table(json.loads(path.read_text())))


if __name__ == "__main__":
    main()
