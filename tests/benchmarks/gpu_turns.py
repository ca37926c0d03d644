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
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from rayhs.bench import Workload, parse_lengths
from rayhs.codec import token_bytes
from rayhs.config import load_config
from rayhs.engine import device
from rayhs.job import Job
from tests.benchmarks.gpu_stages import prepared
from tests.benchmarks.noted import FILE, read_spans, summary
from tests.benchmarks.turn_engine import Engine, save_job, tokens_of
from tests.benchmarks.turns import KINDS

_MEMORY = 0.9  # of the GPU's, shared by the engines
_CACHE_BYTES = 20 * 2**30  # said to vLLM, as what it measures would count the others that start at the same time


def take_turns(engines: list[Engine], rounds: int) -> dict[str, list[dict[str, Any]]]:
    """What each engine said of each round."""
    found: dict[str, list[dict[str, Any]]] = {engine.kind: [] for engine in engines}
    for number in range(rounds):
        first = number % len(engines)
        for engine in engines[first:] + engines[:first]:
            engine.prepare(number)
            engine.say("begin")
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
    chosen = parser.parse_args()
    if not chosen.kinds or set(chosen.kinds) - set(KINDS):
        parser.error(f"give one kind or more: {', '.join(KINDS)}")
    workload = Workload(chosen.rounds * chosen.samples, *parse_lengths(chosen.lengths))
    share = [f"engine.vllm.gpu_memory_utilization={_MEMORY / len(chosen.kinds):.2f}"]
    share += [f"engine.vllm.kv_cache_memory_bytes={_CACHE_BYTES}"]
    config = load_config(chosen.run, chosen.set if device() == "cpu" else [*share, *chosen.set])
    engines = [Engine(kind, {FILE: f"{chosen.steps}.{kind}"} if chosen.steps else {}) for kind in chosen.kinds]
    with tempfile.TemporaryDirectory(dir="/dev/shm") as output:
        job = prepared(config, workload, output)
        ids = job.dataset.plan.shard_ids()
        size = len(ids) // chosen.rounds
        rounds = [ids[i * size : (i + 1) * size] for i in range(chosen.rounds)]
        save_job(Path(output, "job"), job, rounds)
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
