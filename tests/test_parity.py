"""States against transformers float32, on real vLLM: every layer id, every way vLLM batches and caches."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from rayhs import codec
from rayhs.arrivals import Arrivals
from rayhs.config import parse_config
from rayhs.cores import CoreClaim
from rayhs.demo import cache_folder, prepare_demo
from rayhs.engine import VllmEngine
from rayhs.errors import EngineError, SampleError
from rayhs.parts import StagedParts
from rayhs.staging import OwnedDirectory
from tests.models import FAMILIES, Oracle, random_prompts, relative_error, save_tiny_model
from tests.processes import worker_processes

pytestmark = pytest.mark.vllm

LAYERS = tuple(range(7))
MAX_MODEL_LEN = 512
TOLERANCE = 1e-5


@dataclass(frozen=True)
class Got:
    token_ids: list[int]
    states: dict[int, np.ndarray]


class RunningEngine:
    """A real engine with our connector, kept up for the tests of a module."""

    def __init__(self, model: Path, layers: Sequence[int] = LAYERS, **engine: Any) -> None:
        self.layers = layers
        self._owned = OwnedDirectory("/dev/shm")
        tensor_parallel = engine.get("tensor_parallel_size", 1)
        self.area = StagedParts(self._owned.path / "engine", 2**28, layers, tensor_parallel)
        self._cores = CoreClaim(2)
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = self._cores.thread_binding(tensor_parallel)
        vllm = {"enforce_eager": True, "max_num_seqs": 8, "disable_log_stats": False, **engine.pop("vllm", {})}
        settings = {"dtype": "float32", "max_model_len": MAX_MODEL_LEN, "vllm": vllm, **engine}
        config = parse_config({"model": str(model), "prompts": "-", "output": "-", "engine": settings})
        self._loop = asyncio.new_event_loop()
        self.engine = VllmEngine(config, settings["dtype"], layers, self.area)
        self._loop.run_until_complete(self.engine.start())

    def extract(self, prompts: Sequence[Sequence[int]], prefix: str = "s") -> list[Got]:
        arrivals = Arrivals(self.area, lambda: False)

        async def one(number: int, prompt: Sequence[int]) -> Got:
            key = f"{prefix}{number}"
            await self.engine.extract(key, prompt)
            got = _read(await arrivals.wait(key, timeout=60), self.layers)
            self.area.release(key)
            return got

        async def run() -> list[Got]:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(one(i, p)) for i, p in enumerate(prompts)]
            return [task.result() for task in tasks]

        return self._loop.run_until_complete(run())

    def stop(self) -> None:
        self._loop.run_until_complete(self.engine.stop())
        self._loop.close()
        self._owned.remove()
        self._cores.release()


def _read(parts: Sequence[memoryview], layers: Sequence[int]) -> Got:
    arrays: dict[str, np.ndarray] = {}
    for memory in parts:
        length = codec.header_length(bytes(memory[:8]), len(memory))
        tensors, _ = codec.parse_header(bytes(memory[8 : 8 + length]), len(memory))
        arrays |= {n: codec.decode(t, memory[t.start : t.start + t.nbytes]) for n, t in tensors.items()}
    # Copied: the memory is given back.
    return Got(arrays["token_ids"].tolist(), {k: arrays[codec.state_name(k)].copy() for k in layers})


def assert_parity(oracle: Oracle, prompts: Sequence[Sequence[int]], results: Sequence[Got]) -> None:
    for prompt, got in zip(prompts, results, strict=True):
        assert got.token_ids[: len(prompt)] == list(prompt)
        want = oracle.states(got.token_ids)
        for layer, states in got.states.items():
            error = relative_error(states, want[layer])
            assert error <= TOLERANCE, f"layer {layer}, {len(prompt)} tokens: relative error {error:.2e}"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {family: save_tiny_model(family, root / family) for family in FAMILIES}


# Tests with an engine of their own come first: those of the families stay up until the module ends.


def test_tensor_parallel_preempted_and_generating(models: dict[str, Path]) -> None:
    # 7 blocks of 128 tokens for prompts of up to 500 tokens that each generate more: vLLM must preempt.
    oracle = Oracle(models["qwen3"])
    engine = RunningEngine(
        models["qwen3"],
        tensor_parallel_size=2,
        include_generated=6,
        vllm={"num_gpu_blocks_override": 7, "max_num_batched_tokens": 96},
    )
    try:
        preempted = _preemptions()
        prompts = random_prompts((250, 5, 380, 125, 500, 252, 17, 381, 126, 60), seed=2)
        results = engine.extract(prompts)
        assert _preemptions() > preempted
        assert_parity(oracle, prompts, results)
        for prompt, got in zip(prompts, results, strict=True):
            assert got.token_ids == oracle.greedy(prompt, 6)
        _a_killed_rank_is_a_dead_engine(engine)
    finally:
        engine.stop()


def _a_killed_rank_is_a_dead_engine(engine: RunningEngine) -> None:
    """Never one that hangs, and never a failure of the samples in it."""
    worker_processes()[0].kill()
    with pytest.raises(ExceptionGroup) as caught:
        engine.extract(random_prompts([100] * 20), "killed")
    assert caught.group_contains(EngineError) and not caught.group_contains(SampleError)
    assert engine.engine.is_dead()


@pytest.mark.slow
def test_every_layer_of_smollm2_on_real_text() -> None:
    model, prompts = prepare_demo(cache_folder())
    tokenizer = AutoTokenizer.from_pretrained(model)
    texts = [json.loads(line)["text"] for line in prompts.read_text().splitlines()[:6]]
    ids = [tokenizer(text)["input_ids"][: 40 * (i + 1)] for i, text in enumerate(texts)]
    engine = RunningEngine(model, layers=range(31), vllm={"max_num_batched_tokens": 128})
    try:
        assert_parity(Oracle(model), ids, engine.extract(ids))
    finally:
        engine.stop()


def _preemptions() -> float:
    from prometheus_client import REGISTRY

    counters = [metric for metric in REGISTRY.collect() if metric.name == "vllm:num_preemptions"]
    return sum(sample.value for metric in counters for sample in metric.samples if sample.name.endswith("_total"))


MIXED = (1, 5, 17, 64, 127, 128, 129, 200, 300, 511)
SHARED = random_prompts([260], seed=5)[0]


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, models: dict[str, Path]) -> Iterator[tuple[RunningEngine, Oracle]]:
    engine = RunningEngine(models[request.param], vllm={"max_num_batched_tokens": 96})
    yield engine, Oracle(models[request.param])
    engine.stop()


def test_mixed_lengths_in_one_batch_with_chunked_prefill(family: tuple[RunningEngine, Oracle]) -> None:
    engine, oracle = family
    prompts = random_prompts(MIXED)
    assert_parity(oracle, prompts, engine.extract(prompts, "mixed"))


def test_prompts_that_hit_the_prefix_cache(family: tuple[RunningEngine, Oracle]) -> None:
    engine, oracle = family
    prompts = [
        SHARED[:n] + tail for n, tail in zip((256, 200, 260, 128), random_prompts([3, 60, 1, 90], 6), strict=True)
    ]
    assert_parity(oracle, prompts, engine.extract(prompts, "cold"))
    assert_parity(oracle, prompts, engine.extract(prompts, "warm"))


def test_a_prompt_too_long_fails_alone(family: tuple[RunningEngine, Oracle]) -> None:
    engine, oracle = family
    with pytest.raises(ExceptionGroup) as caught:
        engine.extract(random_prompts([MAX_MODEL_LEN]), "long")
    assert caught.group_contains(SampleError, match="refused by the engine")
    prompts = random_prompts([20], seed=9)
    assert_parity(oracle, prompts, engine.extract(prompts, "after"))
