"""Engines that take turns, all of them warm: what a host whose speed changes by the minute can't blur.

    python tests/benchmarks/gpu_turns.py RUN.yaml KIND... [--rounds 3] [--samples 1500] [--set KEY=VALUE] [--steps FILE]

``rayhs`` is a replica without Ray, from its first prompt to the last commit record, into a folder in memory; ``plain``
and ``stock`` are the peers of `rayhs bench`. Between plain prefill and ours lie ``v1``, the model runner that
extraction needs (vLLM has no other for it); ``cached``, which also writes the states into the drafter's cache, and
nobody reads them; and ``connector``, ours, whose samples are let go as soon as they arrive.

Each engine takes its share of the GPU's memory, all start at once, and in every round another kind is the first. Says
every turn on standard error, and prints a JSON object: the rates of all rounds, the medians of each round's ratios to
plain, and ``tail``: seconds of each round of ours between its last state and its last commit record. ``--steps`` also
says there what the processes of ``rayhs`` and ``connector`` were at (times_steps.py).
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rayhs.bench import Workload, parse_lengths
from rayhs.codec import token_bytes
from rayhs.config import load_config
from rayhs.engine import device, prepare_vllm
from rayhs.job import Job
from rayhs.layout import ShardId
from rayhs.reading.plan_reader import PlanReader
from rayhs.store import open_store
from tests.benchmarks.gpu_stages import prepared
from tests.benchmarks.noted import FILE, read_spans, summary
from tests.benchmarks.turns import KINDS, engine_of

_MEMORY = 0.9  # of the GPU's, shared by the engines
_CACHE_BYTES = 20 * 2**30  # said to vLLM, as what it measures would count the others that start at the same time

Rounds = list[list[ShardId]]


class Engine:
    """One kind in a process of its own."""

    def __init__(self, kind: str, steps: str | None) -> None:
        self.kind = kind
        environment = os.environ | ({FILE: f"{steps}.{kind}"} if steps else {})
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--serve", kind],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
        )  # fmt: skip

    def say(self, line: str | int) -> None:
        assert self._process.stdin is not None
        print(line, file=self._process.stdin, flush=True)

    def answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith('{"kind"'):
                return dict(json.loads(line))
            sys.stderr.write(f"{self.kind}: {line}")
        raise RuntimeError(f"{self.kind} ended")

    def stop(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def serve(kind: str) -> None:
    """Told on standard input: where the job is, then the number of each round."""
    prepare_vllm()
    import vllm  # noqa: F401  # while the job is being prepared

    job, rounds = pickle.loads(Path(sys.stdin.readline().strip()).read_bytes())
    engine = engine_of(kind, job)
    engine.start(tokens_of(job, rounds[0]))
    print(json.dumps({"kind": kind}), flush=True)
    for line in sys.stdin:
        shards = rounds[int(line)]
        prompts = tokens_of(job, shards)
        begun = time.time()
        tail = engine.run(shards, prompts)
        ended = time.time()
        engine.clear()
        rate = sum(map(len, prompts)) / (ended - begun)
        print(json.dumps({"kind": kind, "rate": rate, "tail": tail, "at": [begun, ended]}), flush=True)
    engine.stop()


def tokens_of(job: Job, shards: list[ShardId]) -> list[list[int]]:
    reader = PlanReader(open_store(job.config.output), job.dataset.plan)
    return [ids for shard in shards for ids in reader.rows(shard, ["token_ids"]).column(0).to_pylist()]


def take_turns(engines: list[Engine], rounds: int) -> dict[str, list[dict[str, Any]]]:
    """What each engine said of each round."""
    found: dict[str, list[dict[str, Any]]] = {engine.kind: [] for engine in engines}
    for number in range(rounds):
        first = number % len(engines)
        for engine in engines[first:] + engines[:first]:
            engine.say(number)
            found[engine.kind].append(said := engine.answer())
            print(json.dumps({"round": number, **said}), file=sys.stderr, flush=True)
    return found


def report(job: Job, tokens: int, found: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Keyed as the report of `rayhs bench`; tokens and bytes are a round's."""
    rates = {kind: [one["rate"] for one in said] for kind, said in found.items()}
    result: dict[str, Any] = {**rates}
    for kind in rates if "plain" in rates else ():
        over = [one / plain for one, plain in zip(rates[kind], rates["plain"], strict=True)]
        key = "ratio" if kind == "rayhs" else f"{kind}_ratio"
        result |= {} if kind == "plain" else {key: statistics.median(over)}
    if "rayhs" in found:
        result["tail"] = [round(one["tail"], 3) for one in found["rayhs"]]
    each = token_bytes(job.dataset.layers, job.dataset.hidden_size, job.dataset.dtype)
    return {**result, "tokens": tokens, "state_bytes": tokens * each}


def say_steps(steps: str, found: dict[str, list[dict[str, Any]]]) -> None:
    for kind in found:
        for file in sorted(Path(steps).parent.glob(f"{Path(steps).name}.{kind}.*")):
            spans = read_spans(file)
            for number, said in enumerate(found[kind]):
                print(f"round {number}, {file.name}", *summary(spans, *said["at"]), sep="\n  ", file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, nargs="?")
    parser.add_argument("kinds", nargs="*", metavar="KIND")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--samples", type=int, default=1500, help="of a round")
    parser.add_argument("--lengths", default="512:3584")
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--steps", metavar="FILE")
    parser.add_argument("--serve", choices=KINDS, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.serve:
        serve(chosen.serve)
        return
    if not chosen.kinds or set(chosen.kinds) - set(KINDS):
        parser.error(f"give one kind or more: {', '.join(KINDS)}")
    workload = Workload(chosen.rounds * chosen.samples, *parse_lengths(chosen.lengths))
    share = [f"engine.vllm.gpu_memory_utilization={_MEMORY / len(chosen.kinds):.2f}"]
    share += [f"engine.vllm.kv_cache_memory_bytes={_CACHE_BYTES}"]
    config = load_config(chosen.run, chosen.set if device() == "cpu" else [*share, *chosen.set])
    engines = [Engine(kind, chosen.steps) for kind in chosen.kinds]
    with tempfile.TemporaryDirectory(dir="/dev/shm") as output:
        job = prepared(config, workload, output)
        ids = job.dataset.plan.shard_ids()
        size = len(ids) // chosen.rounds
        rounds = [ids[i * size : (i + 1) * size] for i in range(chosen.rounds)]
        Path(output, "job").write_bytes(pickle.dumps((job, rounds)))
        for engine in engines:
            engine.say(f"{output}/job")
        for engine in engines:
            engine.answer()
        found = take_turns(engines, chosen.rounds)
        for engine in engines:
            engine.stop()
        tokens = sum(map(len, tokens_of(job, rounds[0])))
    print(json.dumps(report(job, tokens, found)), flush=True)
    if chosen.steps:
        say_steps(chosen.steps, found)


if __name__ == "__main__":
    main()
