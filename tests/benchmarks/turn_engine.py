"""An engine of turns.py in a process of its own, told what to do on standard input.

    python -m tests.benchmarks.turn_engine KIND

First the file of a job (`save_job`), then for each round its number and, once that is answered, a line to begin;
answers each line with a JSON object.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rayhs.config import fake_shape
from rayhs.engine import prepare_vllm
from rayhs.job import Job
from rayhs.layout import ShardId
from rayhs.reading.plan_reader import PlanReader
from rayhs.store import open_store
from tests.benchmarks.turns import engine_of

Rounds = list[list[ShardId]]


class Engine:
    """One kind; ``prefix`` is put before its command, ``environment`` is added to this one's."""

    def __init__(self, kind: str, environment: Mapping[str, str] | None = None, prefix: Sequence[str] = ()) -> None:
        self.kind = kind
        self._process = subprocess.Popen(
            [*prefix, sys.executable, "-m", "tests.benchmarks.turn_engine", kind],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | dict(environment or {}),
        )  # fmt: skip

    def say(self, line: str | int) -> None:
        assert self._process.stdin is not None
        print(line, file=self._process.stdin, flush=True)

    def answer(self) -> dict[str, Any]:
        """To all: ``kind``. Once a round is done, also its ``rate`` (tokens/s), ``tokens``, ``at`` (begin and end,
        Unix time) and what `Turns.run` tells."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith('{"kind"'):
                return dict(json.loads(line))
            sys.stderr.write(f"{self.kind}: {line}")
        raise RuntimeError(f"{self.kind} ended")

    def prepare(self, number: int) -> None:
        """Returns when `say` of anything begins this round."""
        self.say(number)
        self.answer()

    def stop(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def save_job(path: Path, job: Job, rounds: Rounds) -> None:
    path.write_bytes(pickle.dumps((job, rounds)))


def tokens_of(job: Job, shards: list[ShardId]) -> list[list[int]]:
    reader = PlanReader(open_store(job.config.output), job.dataset.plan)
    return [ids for shard in shards for ids in reader.rows(shard, ["token_ids"]).column(0).to_pylist()]


def serve(kind: str) -> None:
    job_file = Path(sys.stdin.readline().strip())
    job, rounds = pickle.loads(job_file.read_bytes())
    if fake_shape(job.config.model) is None:
        prepare_vllm()
    engine = engine_of(kind, job)
    engine.start(tokens_of(job, rounds[0]))
    print(json.dumps({"kind": kind}), flush=True)
    for line in sys.stdin:
        shards = rounds[int(line)]
        prompts = tokens_of(job, shards)
        print(json.dumps({"kind": kind}), flush=True)
        sys.stdin.readline()
        begun = time.time()
        told = engine.run(shards, prompts)
        ended = time.time()
        engine.clear()
        tokens = sum(map(len, prompts))
        rate = tokens / (ended - begun)
        print(json.dumps({"kind": kind, "rate": rate, "tokens": tokens, "at": [begun, ended], **told}), flush=True)
    engine.stop()


if __name__ == "__main__":
    serve(sys.argv[1])
