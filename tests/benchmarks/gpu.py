"""Speed on the shapes of Qwen3 with dummy weights: states into a folder in memory. Needs a GPU, no network.

    python tests/benchmarks/gpu.py OUT [CASE...] [--tests] [--beside] [--set KEY=VALUE]
    python tests/benchmarks/gpu.py --table OUT/report.json

Cases are the keys of CASES; without any, those through Ray that fit the GPUs there are: with ``--tests`` about ten
minutes of one H200, most of them engine starts. Those of one GPU run side by side, each on a GPU and on its share of
the cores, before those of more. ``--tests`` runs tests/test_gpu.py first, in groups of which several share a GPU.
A case is `rayhs bench`, through Ray: ours once, or with ``--beside`` three times, then plain vLLM and its example
connector, three rounds each. Those named ``turns-`` are gpu_turns.py: the three in turns, three rounds; those named
``floor-`` have what lies between plain prefill and ours instead of the example connector.

OUT/report.json has the machine, the versions, the date, what the tests said and every case. It is written anew after
each case, and keeps what an earlier call found on such a machine. A case's own output is OUT/<case>.log. ``--table``
prints a report as Markdown. tests/gpu_host.sh makes a bare host ready.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar

import yaml

T = TypeVar("T")

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
# Llama 3.3's, with Qwen3's normalisation of queries and keys and its vocabulary.
SHAPES["70b"] = {**SHAPES["wide"], "num_hidden_layers": 80}
_RELATED = {
    "over_one_replica": {"0.6b-x2": "0.6b", "8b-x2": "8b", "8b-x4": "8b", "8b-x8": "8b"},
    "over_bfloat16": {"0.6b-fp8": "0.6b"},
}
_GROUPS, _TWO = ("float32 or eager", "graphs or layer_0", "bits and auto", "bits and fp8", "smollm2"), "ranks"
_REST = " and ".join(f"not ({name})" for name in (*_GROUPS, _TWO))
# What `pytest -k` is given, and how many GPUs they need.
TESTS = (*((name, 1) for name in (*_GROUPS, _REST)), (_TWO, 2))
_TESTS_A_GPU = 6  # they take little of it, and wait for engines to start most of the time
MIXED = ["--lengths", "512:3584"]
TP2 = "engine.tensor_parallel_size=2"
# What a step takes when there is enough to do: so all its kernels but attention's are one launch a layer.
GRAPHS = [
    "engine.vllm.enforce_eager=false",
    "engine.vllm.compilation_config={cudagraph_mode: PIECEWISE, cudagraph_capture_sizes: [16384]}",
]
FP8 = "shards.dtype=float8_e4m3fn"
# Name: shape, changes of the run file, arguments of rayhs bench or gpu_turns.py.
CASES: dict[str, tuple[str, list[str], list[str]]] = {
    "turns-0.6b": ("qwen3-0.6b", [], ["--samples", "4000"]),
    "turns-8b": ("qwen3-8b", [], ["--samples", "900"]),
    "turns-0.6b-tp2": ("qwen3-0.6b", [TP2, *GRAPHS], ["--samples", "6000"]),
    "turns-8b-tp2": ("qwen3-8b", [TP2], ["--samples", "1450"]),
    "floor-8b-tp2": ("qwen3-8b", [TP2], ["--samples", "700"]),
    "0.6b": ("qwen3-0.6b", [], ["--samples", "2500", *MIXED]),
    "8b": ("qwen3-8b", [], ["--samples", "600", *MIXED]),
    "0.6b-fp8": ("qwen3-0.6b", [FP8], ["--samples", "2500", *MIXED]),
    "short": ("qwen3-0.6b", [], ["--samples", "20000", "--lengths", "32"]),
    "long": ("qwen3-0.6b", ["engine.max_model_len=100352"], ["--samples", "10", "--lengths", "100000"]),
    # Layer 0 needs torch.compile on a GPU.
    "all-layers": ("qwen3-0.6b", [f"layers={list(range(1, 29))}"], ["--samples", "600", *MIXED]),
    "0.6b-x2": ("qwen3-0.6b", ["cluster.replicas=2"], ["--samples", "4000", *MIXED]),
    "8b-x2": ("qwen3-8b", ["cluster.replicas=2"], ["--samples", "1200", *MIXED]),
    "8b-x4": ("qwen3-8b", ["cluster.replicas=4"], ["--samples", "2400", *MIXED]),
    "8b-x8": ("qwen3-8b", ["cluster.replicas=8"], ["--samples", "4800", *MIXED]),
    "0.6b-tp2": ("qwen3-0.6b", [TP2, *GRAPHS], ["--samples", "4000", *MIXED]),
    "8b-tp2": ("qwen3-8b", [TP2], ["--samples", "1200", *MIXED]),
    "wide-tp2": ("wide", [TP2], ["--samples", "400", *MIXED]),
}
_IN_TURNS = {"turns-": ("rayhs", "plain", "stock"), "floor-": ("rayhs", "plain", "v1", "cached")}


def run_file(folder: Path, shape: str) -> Path:
    """Of a key of SHAPES, or of the fake engine's model."""
    model = shape
    if shape in SHAPES:
        (folder / shape).mkdir(exist_ok=True)
        (folder / shape / "config.json").write_text(json.dumps({**QWEN3, **SHAPES[shape]}))
        model = str(folder / shape)
    settings = {
        "model": model,
        "prompts": {"rows": [{"ids": [1]}], "token_ids": "ids"},
        "layers": ["eagle3", "last"],
        "output": "/dev/shm/rayhs-bench",
        "engine": {"max_model_len": 4096, "vllm": {"load_format": "dummy", "enforce_eager": True}},
        "cluster": {"address": "local"},
    }
    path = folder / f"{Path(shape).name}.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


@dataclass(frozen=True)
class Lane:
    """A share of the machine: some of its GPUs, and as large a part of its cores."""

    gpus: range
    of: int

    def prefix(self) -> list[str]:
        """What comes before a command; nothing where there are fewer cores than lanes."""
        each = (os.cpu_count() or 1) // self.of
        return ["taskset", "-c", f"{self.gpus.start * each}-{self.gpus.stop * each - 1}"] if each else []

    def environment(self) -> dict[str, str]:
        return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, self.gpus))}

    def run(self, command: Sequence[str], log: Path) -> tuple[int, str]:
        """Exit code and output; what else the command says is in ``log``."""
        with log.open("w") as file:
            done = subprocess.run(
                [*self.prefix(), *command],
                env=os.environ | self.environment(), stdout=subprocess.PIPE, stderr=file, text=True,
            )  # fmt: skip
        return done.returncode, done.stdout


def spread(tasks: Sequence[tuple[int, Callable[[Lane], T]]], count: int, sharing: int = 1) -> list[T]:
    """The results of tasks, each with the GPUs it needs: those of one side by side, then the others in turn.

    ``sharing`` of those of one GPU are on it at a time, and on the same cores.
    """
    free: SimpleQueue[Lane] = SimpleQueue()
    for i in range(count * sharing):
        free.put(Lane(range(i % count, i % count + 1), count))

    def on_one(task: Callable[[Lane], T]) -> T:
        lane = free.get()
        try:
            return task(lane)
        finally:
            free.put(lane)

    with ThreadPoolExecutor(count * sharing) as pool:
        found = list(pool.map(on_one, [task for gpus, task in tasks if gpus == 1]))
    return found + [task(Lane(range(gpus), count)) for gpus, task in tasks if gpus > 1]


@dataclass(frozen=True)
class How:
    """What all cases are run with."""

    extra: list[str]
    beside: bool


def command_of(case: str, run: str, how: How) -> list[str]:
    _, changes, arguments = CASES[case]
    options = [*arguments, *(word for change in [*changes, *how.extra] for word in ("--set", change))]
    for name, kinds in _IN_TURNS.items():
        if case.startswith(name):
            return ["tests/benchmarks/gpu_turns.py", run, *kinds, *options]
    beside = ["--rounds", "3", "--peer", "stock"] if how.beside else ["--no-plain"]
    return ["-m", "rayhs", "bench", run, *options, *beside, "--json"]


def measure(lane: Lane, folder: Path, out: Path, case: str, how: How) -> dict[str, Any]:
    """What the case's command reports, or ``error``; and ``command_s``, the seconds it took with all engine starts."""
    command = command_of(case, str(run_file(folder, CASES[case][0])), how)
    started, log = time.monotonic(), out / f"{case}.log"
    code, printed = lane.run([sys.executable, *command], log)
    with log.open("a") as file:
        file.write(printed)
    took = {"date": time.strftime("%Y-%m-%d"), "command_s": round(time.monotonic() - started, 1)}
    if code != 0:
        return {**took, "error": f"exit code {code}: {log.read_text()[-2000:]}"}
    return {**took, **json.loads(printed.strip().splitlines()[-1] if case.startswith(tuple(_IN_TURNS)) else printed)}


def run_tests(out: Path, count: int) -> dict[str, str]:
    """By what `pytest -k` was given, the last line it said."""

    def group(number: int, name: str, lane: Lane) -> tuple[str, str]:
        # Without pyproject.toml's settings: they need plugins that a bare host lacks.
        bare = ["-c", os.devnull, "--rootdir=.", "-W", "ignore", "-p", "no:cacheprovider"]
        command = [sys.executable, "-m", "pytest", "-q", "-rP", *bare, "-k", name]
        log = out / f"tests-{number}.log"
        _, printed = lane.run([*command, "tests/test_gpu.py"], log)
        log.write_text(log.read_text() + printed)
        return name, (printed.strip().splitlines() or ["no output"])[-1]

    fitting = [(gpus, partial(group, number, name)) for number, (name, gpus) in enumerate(TESTS) if gpus <= count]
    return dict(spread(fitting, count, _TESTS_A_GPU))


def machine() -> dict[str, Any]:
    import torch

    count = torch.cuda.device_count()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "gpus": [torch.cuda.get_device_name(i) for i in range(count)],
        "cores": os.cpu_count(),
        "memory_gib": round(memory / 2**30),
        "shm_gib": round(shutil.disk_usage("/dev/shm").total / 2**30),
    }


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in ("vllm", "torch", "ray", "rayhs"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


def gpus_of(case: str) -> int:
    changes = dict(change.split("=", 1) for change in CASES[case][1])
    return int(changes.get("engine.tensor_parallel_size", 1)) * int(changes.get("cluster.replicas", 1))


def table(report: dict[str, Any]) -> str:
    """A report's cases as Markdown; rates are medians of the rounds."""
    lines = ["| case | plain vLLM | rayhs | ratio | example connector | states |", "|---|---|---|---|---|---|"]
    for case, got in report["cases"].items():
        if "error" in got:
            lines.append(f"| {case} | failed: {got['error'].split(':')[0]} | | | | |")
            continue
        plain, ours, stock = (_median(got.get(key)) for key in ("plain", "rayhs", "stock"))
        ratios = [f"{got[key]:.3f} {words}" for key, words in _RATIOS.items() if got.get(key)]
        beside = f"{stock}, {got['stock_ratio']:.3f}" if got.get("stock_ratio") else ""
        moved = f"{got['state_bytes'] / got['tokens'] * statistics.median(got['rayhs']) / 1e9:.2f} GB/s"
        lines.append(f"| {case} | {plain} | {ours} | {', '.join(ratios)} | {beside} | {moved} |")
    return "\n".join(lines)


_RATIOS = {"ratio": "of plain", "over_one_replica": "times one replica", "over_bfloat16": "of bfloat16"}


def _median(rates: Sequence[float] | None) -> str:
    return f"{statistics.median(rates):,.0f}" if rates else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("cases", nargs="*", metavar="CASE")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change every case's run file")
    parser.add_argument("--beside", action="store_true")
    parser.add_argument("--tests", action="store_true")
    parser.add_argument("--table", action="store_true")
    chosen = parser.parse_args()
    if chosen.table:
        print(table(json.loads(chosen.out.read_text())))
        return
    if unknown := set(chosen.cases) - set(CASES):
        parser.error(f"no such case: {', '.join(sorted(unknown))}; there are {', '.join(CASES)}")
    out: Path = chosen.out
    out.mkdir(parents=True, exist_ok=True)
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    report = begun(out / "report.json")
    count = len(report["machine"]["gpus"])
    if chosen.tests:
        report["tests"] = run_tests(out, count)
    usual = [case for case in CASES if gpus_of(case) <= count and not case.startswith(tuple(_IN_TURNS))]
    run_cases(report, chosen.cases or usual, How(chosen.set, chosen.beside), out)
    print(table(report))


def begun(path: Path) -> dict[str, Any]:
    """A report without cases, or that of an earlier call on such a machine."""
    report = {"machine": machine(), "versions": versions(), "tests": None, "cases": {}}
    if path.exists():
        before = json.loads(path.read_text())
        if (before["machine"]["gpus"], before["versions"]) != (report["machine"]["gpus"], report["versions"]):
            sys.exit(f"{path} is of other GPUs or versions; give another folder")
        report |= {"tests": before["tests"], "cases": before["cases"]}
    return report


def run_cases(report: dict[str, Any], cases: Sequence[str], how: How, out: Path) -> None:
    folder, lock = Path(tempfile.mkdtemp()), threading.Lock()

    def one(case: str, lane: Lane) -> None:
        got = measure(lane, folder, out, case, how)
        with lock:
            report["cases"][case] = got
            relate(report["cases"])
            (out / "report.json").write_text(json.dumps(report, indent=1) + "\n")
            print(case, json.dumps(got), flush=True)

    spread([(gpus_of(case), partial(one, case)) for case in cases], len(report["machine"]["gpus"]))
    shutil.rmtree(folder)


def relate(cases: dict[str, dict[str, Any]]) -> None:
    """Ratios of the rates of two cases, by key."""
    for key, pairs in _RELATED.items():
        for case, other in pairs.items():
            if (got := cases.get(case, {}).get("rayhs")) and (rates := cases.get(other, {}).get("rayhs")):
                cases[case][key] = statistics.median(got) / statistics.median(rates)


if __name__ == "__main__":
    main()
