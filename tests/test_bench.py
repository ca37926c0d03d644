"""`rayhs bench`: what it measures, and the sentence it draws from that."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from rayhs.bench import Workload, bottleneck, parse_lengths, run_bench
from rayhs.cli import app
from rayhs.cli.output import print_bench
from rayhs.config import load_config
from rayhs.errors import ConfigError
from rayhs.metrics import Metrics, MetricsFile, read_metrics
from tests.models import save_tiny_model


def run_file(folder: Path, model: str, **sections: object) -> Path:
    prompts = {"rows": [{"ids": [5]}], "token_ids": "ids"}
    path = folder / "run.yaml"
    settings = {"model": model, "prompts": prompts, "layers": [1, 2], "output": str(folder / "out"), **sections}
    path.write_text(yaml.safe_dump(settings))
    return path


@pytest.mark.ray
@pytest.mark.usefixtures("local_ray")
def test_replicas_are_measured_together_and_nothing_is_left(tmp_path: Path) -> None:
    sections = {"cluster": {"replicas": 2}, "shards": {"target_bytes": 2**16}}
    config = load_config(run_file(tmp_path, "fake/4x64", **sections))
    report = run_bench(config, Workload(60, 3, 90), lambda progress: None, rounds=2).to_dict()
    tokens = sum(map(len, Workload(60, 3, 90).prompts(600)))
    assert (report["samples"], report["tokens"], report["replicas"]) == (60, tokens, 2)
    assert len(report["rayhs"]) == 2 and min(report["rayhs"]) > 0
    assert report["plain"] == report["stock"] == () and report["ratio"] is None
    stages = {stage["stage"]: stage for stage in report["stages"]}
    # Two rounds, every byte checked and stored; the warm-up's are not among them.
    assert stages["to store"]["bytes"] == 2 * report["state_bytes"]
    assert stages["check"]["bytes"] >= 2 * tokens * 2 * 64 * 4
    assert 0 < stages["after the engine"]["seconds"] < report["seconds"]
    assert {path.name for path in tmp_path.iterdir()} == {"run.yaml"}


_SLOW_START = """
import asyncio
import rayhs.fake

begin = rayhs.fake.FakeEngine.start

async def slowly(self):
    await asyncio.sleep(15)
    await begin(self)

rayhs.fake.FakeEngine.start = slowly
"""


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.parametrize("shards", [1, 2])
def test_replicas_whose_engines_start_slowly_all_get_some_of_few_shards(tmp_path: Path, shards: int) -> None:
    """Ray ends an actor without work, and the others would wait for it for ever."""
    (tmp_path / "sitecustomize.py").write_text(_SLOW_START)
    path = run_file(tmp_path, "fake/4x64", cluster={"address": "local", "replicas": 2}, shards={"target_bytes": 2**14})
    command = [sys.executable, "-m", "rayhs", "bench", str(path), "--samples", str(shards), "--lengths", "30"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [*command, "--json"], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    if shards == 1:
        assert done.returncode == 2 and "2 replicas, and the prompts fill 1 shard" in done.stderr.splitlines()[-1]
    else:
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["samples"] == shards


@pytest.mark.ray
@pytest.mark.usefixtures("local_ray")
def test_the_prompts_of_the_run_file(tmp_path: Path) -> None:
    config = load_config(run_file(tmp_path, "fake/4x64"))
    report = run_bench(config, None, lambda progress: None)
    assert (report.samples, report.tokens) == (1, 1)
    out = io.StringIO()
    print_bench(report, out)
    assert "1, 1 tokens" in out.getvalue() and report.bottleneck in out.getvalue()
    assert "stored as" not in out.getvalue()


@pytest.mark.ray
@pytest.mark.vllm
@pytest.mark.usefixtures("local_ray")
def test_beside_plain_vllm(tmp_path: Path) -> None:
    model = save_tiny_model("llama", tmp_path / "model")
    engine = {"dtype": "float32", "max_model_len": 256, "vllm": {"enforce_eager": True}}
    # In float8, so that a real engine has quantised once; which states those are is test_connector's.
    config = load_config(run_file(tmp_path, str(model), engine=engine, shards={"dtype": "float8_e4m3fn"}))
    report = run_bench(config, Workload(40, 20, 200), lambda progress: None)
    assert (report.samples, report.tokens) == (40, sum(map(len, Workload(40, 20, 200).prompts(500))))
    assert report.plain[0] > 0 and report.rayhs[0] > 0
    assert report.ratio == pytest.approx(report.rayhs[0] / report.plain[0])
    assert {"cache to staging", "check", "to store", "step"} <= {stage.stage for stage in report.stages}


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--lengths", "9:3"], "--lengths 9:3: write two lengths"),
        (["--lengths", "x"], "--lengths x: write two lengths"),
        (["--lengths", "1:200000"], "200000 tokens are over the engine's"),
        (["--peer", "mine"], "the only other connector"),
        (["--own-prompts", "--samples", "3"], "--own-prompts takes all prompts"),
        (["--own-prompts", "--lengths", "3"], "--own-prompts takes all prompts"),
        (["--peer", "stock"], "needs a GPU"),
    ],
)
def test_what_can_not_be_measured_is_refused_before_ray(tmp_path: Path, arguments: list[str], told: str) -> None:
    result = CliRunner().invoke(app, ["bench", str(run_file(tmp_path, "fake/4x64")), *arguments])
    assert result.exit_code == 2
    assert told in result.stderr.splitlines()[-1] and "Traceback" not in result.stderr


@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize("stock", [True, False])
def test_the_peers_asked_for_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plain: bool, stock: bool
) -> None:
    measured: list[str] = []

    class Recorder:
        def __init__(self, *_: object) -> None: ...

        def measure_ours(self) -> None:
            measured.append("rayhs")

        def measure_peer(self, kind: str, rounds: int) -> list[float]:
            measured.append(kind)
            return [1.0] * rounds

        def report(self, rates: dict[str, list[float]]) -> dict[str, list[float]]:
            return rates

    monkeypatch.setattr("rayhs.bench._Bench", Recorder)
    monkeypatch.setattr("rayhs.bench.cluster", lambda config: contextlib.nullcontext(lambda: None))
    monkeypatch.setattr("rayhs.bench.fake_shape", lambda model: None)
    monkeypatch.setattr("rayhs.bench.device", lambda: "cuda")
    config = load_config(run_file(tmp_path, "fake/4x64"))
    rates: object = run_bench(config, None, lambda progress: None, plain=plain, stock=stock)
    assert measured == ["rayhs", *(["plain"] if plain else []), *(["stock"] if stock else [])]
    assert rates == {"plain": [1.0] if plain else [], "stock": [1.0] if stock else []}


def test_lengths_that_are_not_given_fit_the_engine() -> None:
    assert Workload(9).fitting(100_000) == Workload(9, 512, 3584)
    assert Workload(9).fitting(511) == Workload(9, 511, 511)
    assert Workload(9).fitting(2000) == Workload(9, 512, 2000)
    with pytest.raises(ConfigError, match="600 tokens are over the engine's 511"):
        Workload(9, 5, 600).fitting(511)


def test_lengths() -> None:
    assert parse_lengths("32") == (32, 32) and parse_lengths("512:3584") == (512, 3584)
    with pytest.raises(ConfigError):
        parse_lengths("0:3")


@pytest.mark.parametrize(
    ("ratio", "totals", "said"),
    [
        (0.99, {"engine idle": (50.0, 0)}, "vLLM's own prefill"),
        (0.9, {"engine idle": (10.0, 0), "to store": (80.0, 1), "check": (5.0, 1)}, "the store: for 10%"),
        (
            0.9,
            {"wait for staging": (20.0, 0), "to store": (8.0, 1), "check": (50.0, 1)},
            "checking the states: for 20%",
        ),
        (None, {"wait for pinned memory": (30.0, 0)}, "the copy out of the GPU: for 30%"),
        (0.9, {"step": (30.0, 0)}, "the connector: it took 30%"),
        (0.9, {"step": (30.0, 0), "after the engine": (7.0, 0)}, "the end of the run, 7% of it"),
        (0.9, {"step": (30.0, 0), "after the engine": (4.0, 0)}, "the connector: it took 30%"),
        (None, {"after the engine": (14.0, 0)}, "the end of the run, 14% of it"),
        (None, {"after the engine": (4.0, 0)}, "vLLM: no stage behind it was waited for; 4% of the run were its end"),
        (0.5, {"after the engine": (20.0, 0)}, "vLLM: no stage behind it was waited for; 20% of the run were its end"),
        (0.96, {"after the engine": (0.9, 0)}, "vLLM: no stage"),
        (0.9, {"step": (3.0, 0)}, "vLLM: no stage behind it was waited for"),
        (None, {}, "vLLM: no stage behind it was waited for"),
    ],
)
def test_the_bottleneck(ratio: float | None, totals: dict[str, tuple[float, int]], said: str) -> None:
    assert bottleneck(ratio, 100.0, totals).startswith(said)
    assert bottleneck(ratio, 100.0, totals, "the fake engine").startswith(said.replace("vLLM:", "the fake engine:"))


def test_metrics_add_up_and_are_read_by_another_process(tmp_path: Path) -> None:
    metrics = Metrics()
    metrics.add("copy", 1.0, 100)
    metrics.add("copy", 0.5, 10)
    metrics.waiting("room", True)
    metrics.waiting("room", False)
    metrics.waiting("room", False)
    assert metrics.totals()["copy"] == (1.5, 110)
    assert 0 <= metrics.totals()["room"][0] < 1
    assert read_metrics(tmp_path) == {}
    file = MetricsFile(tmp_path, metrics)
    file.write()
    assert read_metrics(tmp_path) == metrics.totals()
    metrics.add("copy", 1.0, 1)
    file.write()
    assert read_metrics(tmp_path)["copy"] == (1.5, 110), "at most ten times a second"
