"""The whole run with real vLLM on real Ray: two replicas, transformers, and one replica whose engine is killed."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rayhs
from rayhs.config import parse_config
from rayhs.dataset_run import RunResult
from rayhs.pipeline import run_extract
from rayhs.verify import verify
from tests.models import Oracle, random_prompts, relative_error, save_tiny_model
from tests.processes import engine_processes

pytestmark = [pytest.mark.vllm, pytest.mark.ray, pytest.mark.slow, pytest.mark.usefixtures("local_ray")]

TOO_LONG = 256


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_tiny_model("qwen3", tmp_path_factory.mktemp("model"))
    _save_tokenizer(folder)
    return folder


def _save_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(512)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0").save_pretrained(folder)


def extract(model: Path, output: Path, prompts: Path, slow: bool = False, **cluster: Any) -> RunResult:
    """``slow``: a token budget and staging so small that shards are committed one after the other."""
    vllm = {"max_num_seqs": 1, "max_num_batched_tokens": 32} if slow else {"max_num_seqs": 8}
    settings = {
        "model": str(model),
        "prompts": {"path": str(prompts), "text": "text", "id": "id"},
        "layers": [0, 3, "last"],
        "output": str(output),
        "engine": {"max_model_len": TOO_LONG, "vllm": {"enforce_eager": True, **vllm}},
        "staging": {"max_bytes": "4MiB" if slow else None},
        "shards": {"target_bytes": 300_000},
        "cluster": cluster,
    }
    return run_extract(parse_config(settings))


@contextmanager
def killed_engine(commits: Path) -> Iterator[list[int]]:
    """SIGKILL vLLM's engine process once the first shard is committed."""
    killed: list[int] = []
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(0.02):
            if commits.exists() and any(commits.iterdir()):
                killed.extend(process.pid for process in engine_processes())
                for pid in killed:
                    os.kill(pid, signal.SIGKILL)
                return

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield killed
    finally:
        ended.set()
        watcher.join()


def test_two_replicas_of_real_vllm_give_what_one_gives_and_what_transformers_gives(model: Path, tmp_path: Path) -> None:
    ids = random_prompts(np.random.default_rng(1).integers(2, 200, 40).tolist(), seed=3)
    rows = [{"id": f"row-{i}", "text": " ".join(f"w{t}" for t in p)} for i, p in enumerate(ids)]
    rows[7]["text"] = " ".join(["w1"] * TOO_LONG)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))

    two = extract(model, tmp_path / "two", prompts, replicas=2, cpus_per_replica=1)
    assert (two.exit_code, two.summary.ok, two.summary.failed, two.summary.rejected) == (3, 39, 0, 1)
    report = verify(str(tmp_path / "two"), reference=str(model), samples=4)
    assert not report.findings, report.findings

    with killed_engine(tmp_path / "one" / "commits") as killed:
        one = extract(model, tmp_path / "one", prompts, slow=True)
    assert killed and one.summary.failed == 0
    first, second = rayhs.open(one.uri), rayhs.open(two.uri)
    columns = [name for name in first.index.column_names if name != "shard"]
    assert first.index.select(columns).equals(second.index.select(columns))
    oracle = Oracle(model)
    for i, prompt in enumerate(ids):
        if i == 7:
            continue
        a, b, want = first[i], second[i], oracle.states(prompt)
        assert a.sample_id == b.sample_id == f"row-{i}" and a.token_ids.tolist() == prompt
        for layer in (0, 3, 6):
            assert relative_error(a.hidden_states[layer], want[layer]) <= 1e-5
            assert relative_error(b.hidden_states[layer], a.hidden_states[layer]) <= 1e-5
