"""The kinds of engines that take turns in gpu_turns.py and gpu_scaling.py."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, Protocol
from unittest import mock

import uvloop

import rayhs.engine
import rayhs.replica
from rayhs.config import RunConfig
from rayhs.engine import kv_transfer_config, plain_arguments, speculative_config
from rayhs.fake import FakeEngine
from rayhs.job import Job
from rayhs.layout import ShardId
from rayhs.model import ModelInfo, engine_dtype
from rayhs.parts import StagedParts
from rayhs.peers import Peer, PeerJob
from rayhs.replica import Replica
from rayhs.staging import OwnedDirectory
from tests.benchmarks.gpu_stages import extracted, forget_states
from tests.benchmarks.noted import FILE

KINDS = ("rayhs", "plain", "v1", "cached", "stock", "connector")
PACE = "RAYHS_PACE"  # environment variable: tokens/s of the kind ``paced``
_STAGING = 8 * 2**30
_TIMED = {"kv_connector": "TimesSteps", "kv_connector_module_path": "tests.benchmarks.times_steps"}
_CACHED = {"kv_connector": "CarriesNothing", "kv_connector_module_path": "tests.benchmarks.carries_nothing"}

Prompts = Sequence[Sequence[int]]


class Turns(Protocol):
    def start(self, prompts: Prompts) -> None:
        """Returns once it is warm."""

    def run(self, shards: list[ShardId], prompts: Prompts) -> dict[str, Any]:
        """A round, and what is to be told of it beside its time."""

    def clear(self) -> None:
        """Forget the round."""

    def stop(self) -> None: ...


def engine_of(kind: str, job: Job) -> Turns:
    if kind == "paced":
        rayhs.replica.make_engine = Paced.of  # type: ignore[assignment]
    if kind in ("rayhs", "paced"):
        return Ours(job)
    return Others(peer_of(kind, job))


class Ours:
    def __init__(self, job: Job) -> None:
        self._job = job
        self._loop = asyncio.Runner(loop_factory=uvloop.new_event_loop)
        self._last = 0.0

    def start(self, prompts: Prompts) -> None:
        if FILE in os.environ:
            ours = rayhs.engine.kv_transfer_config
            mock.patch("rayhs.engine.kv_transfer_config", lambda *a, **k: {**ours(*a, **k), **_TIMED}).start()

        async def warm() -> None:
            pass

        self._replica = Replica(self._job, begin=warm)
        self._loop.run(self._replica.ready())
        read = self._replica._read

        def noted(*arguments: Any) -> Any:
            self._last = time.time()
            return read(*arguments)

        mock.patch.object(self._replica, "_read", noted).start()

    def run(self, shards: list[ShardId], prompts: Prompts) -> dict[str, Any]:
        """Tells ``tail``, the seconds between its last state and its end, the largest share of staging in use, and
        seconds and bytes of each stage (`rayhs.metrics`)."""
        self._replica.budget.peak = 0
        self._replica._metrics.waiting("engine idle", False)  # since the last round
        before = self._replica._all_metrics()
        self._loop.run(extracted(self._replica, self._job.shards_in_flight, shards))
        tail = time.time() - self._last
        stages = {
            stage: [now - then for now, then in zip(total, before.get(stage, (0.0, 0)), strict=True)]
            for stage, total in self._replica._all_metrics().items()
        }
        staging = self._replica.budget.peak / self._replica.budget.limit
        return {"tail": round(tail, 3), "staging": round(staging, 3), "stages": stages}

    def clear(self) -> None:
        forget_states(self._replica)

    def stop(self) -> None:
        self._loop.run(self._replica.stop())


class Paced(FakeEngine):
    """Prefills one prompt after the other, at as many tokens/s as PACE says, and writes its states with the CPU."""

    @classmethod
    def of(cls, config: RunConfig, model: ModelInfo, layers: Sequence[int], area: StagedParts, _: bool) -> Paced:
        return cls(area, layers, model.hidden_size, engine_dtype(config, model))

    async def start(self) -> None:
        await super().start()
        self._rate, self._free = float(os.environ[PACE]), 0.0

    async def extract(self, key: str, token_ids: Sequence[int]) -> None:
        now = asyncio.get_running_loop().time()
        self._free = max(self._free, now) + len(token_ids) / self._rate
        await asyncio.sleep(self._free - now)
        await super().extract(key, token_ids)


class Others:
    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self.start, self.clear, self.stop = peer.start, peer.clear, peer.stop

    def run(self, shards: list[ShardId], prompts: Prompts) -> dict[str, Any]:
        self._peer.run(prompts)
        return {}


def peer_of(kind: str, job: Job) -> Peer:
    whole_host: Any = SimpleNamespace(engine_cores=0)  # no cores of its own
    if kind in ("plain", "stock"):
        return Peer(PeerJob(kind, job.config, job.model, tuple(job.dataset.layers)), whole_host)  # type: ignore[arg-type]
    return Part(kind, PeerJob("plain", job.config, job.model, tuple(job.dataset.layers)), whole_host)


class Part(Peer):
    """vLLM with some of what extraction needs, ``v1``, ``cached`` or ``connector``."""

    def __init__(self, kind: str, job: PeerJob, plan: Any) -> None:
        super().__init__(job, plan)
        self._kind, self._stopping = kind, threading.Event()
        self._staging = OwnedDirectory(job.config.staging.path)
        ranks = job.config.engine.tensor_parallel_size
        self._area = StagedParts(self._staging.path / "engine", _STAGING, job.layers, ranks)
        self._releasing = threading.Thread(target=self._release_all, daemon=True)
        self._generated = 0

    def start(self, prompts: Prompts) -> None:
        if self._kind == "v1":
            os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
        if self._kind == "connector":
            self._releasing.start()
        super().start(prompts)

    def stop(self) -> None:
        super().stop()
        self._stopping.set()
        if self._releasing.is_alive():
            self._releasing.join()
        self._staging.remove()

    def _arguments(self) -> dict[str, Any]:
        job = self._job
        base = plain_arguments(job.config, engine_dtype(job.config, job.model))
        if self._kind == "v1":
            return base
        transfer = kv_transfer_config(self._area)
        if self._kind == "cached":
            transfer |= {
                "kv_connector": "CarriesNothing",
                "kv_connector_module_path": "tests.benchmarks.carries_nothing",
            }
        elif FILE in os.environ:
            transfer |= _TIMED
        return {**base, "speculative_config": speculative_config(job.layers), "kv_transfer_config": transfer}

    def _generate(self, prompts: Prompts) -> None:
        from vllm import SamplingParams

        self._generated += 1
        keys = [f"{self._generated}.{i}" for i in range(len(prompts))]
        sampling = [
            SamplingParams(
                temperature=0.0, max_tokens=1, detokenize=False,
                extra_args={"kv_transfer_params": {"rayhs_key": key}} if self._kind == "connector" else None,
            )
            for key in keys
        ]  # fmt: skip
        self._llm.generate([{"prompt_token_ids": list(p)} for p in prompts], sampling, use_tqdm=False)

    def _release_all(self) -> None:
        while not self._stopping.wait(0.003):
            for key in self._area.arrivals():
                self._area.take(key)
                self._area.release(key)
