"""Where the time between plain prefill and extraction goes, without Ray: vLLM's `LLM` with one thing more each time.

    python tests/benchmarks/gpu_floor.py RUN.yaml VARIANT... [--samples 2000] [--lengths 512:3584]

``plain`` is vLLM as it is; ``v1`` the same with the model runner that extraction needs (vLLM has no other for it);
``cached`` also writes the states into the drafter's cache, and nobody reads them; ``stock`` is vLLM's example
connector, into ``staging.path``; ``connector`` is ours, whose samples are let go as soon as they arrive. Each in a
process of its own, one after the other; prints a JSON line each. What is between ``connector`` and `rayhs bench`
is the replica's: Ray, AsyncLLM, checks and uploads.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from rayhs.bench import Workload, parse_lengths
from rayhs.config import RunConfig, load_config
from rayhs.engine import kv_transfer_config, plain_arguments, prepare_vllm, speculative_config
from rayhs.layers import resolve_layers
from rayhs.model import describe_model, engine_dtype
from rayhs.parts import StagedParts
from rayhs.staging import OwnedDirectory
from tests.benchmarks.noted import FILE

VARIANTS = ("plain", "v1", "cached", "stock", "connector")
_STAGING = 8 * 2**30
_WARM_UP = 8


def arguments(config: RunConfig, variant: str, area: StagedParts) -> dict[str, Any]:
    model = describe_model(config)
    base = plain_arguments(config, engine_dtype(config, model))
    if variant in ("plain", "v1"):
        return base
    transfer = kv_transfer_config(area)
    if variant == "connector" and FILE in os.environ:
        transfer |= {"kv_connector": "TimesSteps", "kv_connector_module_path": "tests.benchmarks.times_steps"}
    if variant == "cached":
        transfer |= {"kv_connector": "CarriesNothing", "kv_connector_module_path": "tests.benchmarks.carries_nothing"}
    if variant == "stock":
        folder = {"shared_storage_path": str(area.directory)}
        transfer = {"kv_connector": "ExampleHiddenStatesConnector", "kv_role": "kv_producer"}
        transfer["kv_connector_extra_config"] = folder
    layers = resolve_layers(config.layers, model.num_layers)
    return {**base, "speculative_config": speculative_config(layers), "kv_transfer_config": transfer}


def release_all(area: StagedParts, stop: threading.Event) -> None:
    while not stop.wait(0.003):
        for key in area.arrivals():
            area.take(key)
            area.release(key)


def measure(config: RunConfig, variant: str, workload: Workload, turn: int) -> dict[str, Any]:
    if variant == "v1":
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    prepare_vllm()
    from vllm import LLM, SamplingParams

    fcntl.flock(turn, fcntl.LOCK_EX)  # only now: imports may overlap
    model = describe_model(config)
    owned = OwnedDirectory(config.staging.path)
    layers = resolve_layers(config.layers, model.num_layers)
    area = StagedParts(owned.path / "engine", _STAGING, layers, config.engine.tensor_parallel_size)
    prompts = workload.prompts(model.vocab_size)
    started = time.perf_counter()
    llm = LLM(**arguments(config, variant, area))

    def run(token_ids: list[list[int]], name: str) -> float:
        sampling = [
            SamplingParams(
                temperature=0.0,
                max_tokens=1,
                detokenize=False,
                extra_args={"kv_transfer_params": {"rayhs_key": f"{name}{i}"}} if variant == "connector" else None,
            )
            for i in range(len(token_ids))
        ]
        begun = time.perf_counter()
        llm.generate([{"prompt_token_ids": ids} for ids in token_ids], sampling, use_tqdm=False)
        return sum(map(len, token_ids)) / (time.perf_counter() - begun)

    stop = threading.Event()
    reader = threading.Thread(target=release_all, args=(area, stop))
    if variant == "connector":
        reader.start()
    run([ids[::-1] for ids in prompts[:_WARM_UP]], "warm")
    start_s = time.perf_counter() - started
    begun, rate = time.time(), run(prompts, "sample")
    ended = time.time()
    stop.set()
    llm.llm_engine.engine_core.shutdown()
    owned.remove()
    return {"variant": variant, "tokens_per_second": round(rate), "start_s": round(start_s, 1), "at": [begun, ended]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("variants", nargs="+", choices=VARIANTS)
    parser.add_argument("--samples", type=int, default=2000)
    parser.add_argument("--lengths", default="512:3584")
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--turn", type=Path)
    chosen = parser.parse_args()
    if chosen.turn:
        config = load_config(chosen.run, chosen.set)
        with chosen.turn.open() as turn:
            workload = Workload(chosen.samples, *parse_lengths(chosen.lengths))
            print(json.dumps(measure(config, chosen.variants[0], workload, turn.fileno())), flush=True)
        return
    with tempfile.NamedTemporaryFile() as turn:
        rest = ["--samples", str(chosen.samples), "--lengths", chosen.lengths, "--turn", turn.name]
        rest += [word for change in chosen.set for word in ("--set", change)]
        command = [sys.executable, __file__, str(chosen.run)]
        running = [subprocess.Popen([*command, variant, *rest]) for variant in chosen.variants]
        sys.exit(max(process.wait() for process in running))


if __name__ == "__main__":
    main()
