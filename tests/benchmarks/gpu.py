"""`rayhs bench` on the shapes of Qwen3 with dummy weights: states into a folder in memory. Needs a GPU, no network.

`python tests/benchmarks/gpu.py OUT CASE... [--peer stock] [--rounds 3]`: cases are the keys of CASES. Writes
OUT/<case>.json and OUT/<case>.log, prints a line each. On a bare host byte-compile vLLM first
(`python -m compileall -q -j 16 FOLDER`): else every engine's first start does it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import ray
import yaml

QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 131072,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 151936,
}
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_attention_heads": 16,
        "num_hidden_layers": 28,
        "tie_word_embeddings": True,
    },
    "qwen3-8b": {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_attention_heads": 32,
        "num_hidden_layers": 36,
        "tie_word_embeddings": False,
    },
}
SHAPES["wide"] = {
    **SHAPES["qwen3-8b"],
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_attention_heads": 64,
    "num_hidden_layers": 12,
}
MIXED = ["--lengths", "512:3584"]
TP2 = "engine.tensor_parallel_size=2"
# Name: shape, changes of the run file, arguments of rayhs bench.
CASES: dict[str, tuple[str, list[str], list[str]]] = {
    "0.6b": ("qwen3-0.6b", [], ["--samples", "3000", *MIXED]),
    "8b": ("qwen3-8b", [], ["--samples", "800", *MIXED]),
    "0.6b-tp2": ("qwen3-0.6b", [TP2], ["--samples", "4000", *MIXED]),
    "8b-tp2": ("qwen3-8b", [TP2], ["--samples", "1200", *MIXED]),
    "0.6b-x2": ("qwen3-0.6b", ["cluster.replicas=2"], ["--samples", "6000", *MIXED]),
    "8b-x2": ("qwen3-8b", ["cluster.replicas=2"], ["--samples", "1600", *MIXED]),
    "long": ("qwen3-0.6b", ["engine.max_model_len=100352"], ["--samples", "20", "--lengths", "100000"]),
    "short": ("qwen3-0.6b", [], ["--samples", "20000", "--lengths", "32"]),
    # Layer 0 needs torch.compile on a GPU.
    "all-layers": ("qwen3-0.6b", [f"layers={list(range(1, 29))}"], ["--samples", "600", *MIXED]),
    "0.6b-fp8": ("qwen3-0.6b", ["shards.dtype=float8_e4m3fn"], ["--samples", "3000", *MIXED]),
    "8b-fp8": ("qwen3-8b", ["shards.dtype=float8_e4m3fn"], ["--samples", "800", *MIXED]),
    "wide-tp2": ("wide", [TP2], ["--samples", "400", *MIXED]),
}


def run_file(folder: Path, shape: str) -> Path:
    model = folder / shape
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(json.dumps({**QWEN3, **SHAPES[shape]}))
    settings = {
        "model": str(model),
        "prompts": {"rows": [{"ids": [1]}], "token_ids": "ids"},
        "layers": ["eagle3", "last"],
        "output": "/dev/shm/rayhs-bench",
        "engine": {"max_model_len": 4096, "vllm": {"load_format": "dummy", "enforce_eager": True}},
        "cluster": {"address": "auto"},
    }
    path = folder / f"{shape}.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


def measure(folder: Path, out: Path, case: str, extra: list[str]) -> None:
    shape, changes, arguments = CASES[case]
    options = [word for change in changes for word in ("--set", change)]
    command = [sys.executable, "-m", "rayhs", "bench", str(run_file(folder, shape)), *options, *arguments, *extra]
    started = time.monotonic()
    with (out / f"{case}.log").open("w") as log:
        done = subprocess.run([*command, "--json"], stdout=subprocess.PIPE, stderr=log, text=True, check=False)
    took = time.monotonic() - started
    if done.returncode != 0:
        print(f"{case}: exit code {done.returncode} after {took:.0f} s; {(out / f'{case}.log').read_text()[-2000:]}")
        return
    (out / f"{case}.json").write_text(done.stdout)
    report = json.loads(done.stdout)
    stages = {s["stage"]: (round(s["seconds"], 2), round(s["bytes"] / 1e9, 1)) for s in report["stages"]}
    keys = ("plain", "rayhs", "stock", "ratio", "stock_ratio", "seconds", "tokens", "bottleneck")
    print(json.dumps({"case": case, "command_s": round(took), **{k: report[k] for k in keys}, "stages": stages}))


def main() -> None:
    out, *words = sys.argv[1:]
    cases = [word for word in words if word in CASES]
    extra = [word for word in words if word not in CASES]
    Path(out).mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp())
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    ray.init(address="local", include_dashboard=False, log_to_driver=False)  # one for all cases
    os.environ["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address
    for case in cases:
        measure(folder, Path(out), case, extra)
    ray.shutdown()
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
