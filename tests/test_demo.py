from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rayhs.demo import cache_folder, demo_config, prepare_demo
from rayhs.errors import ConfigError

PREPARE = "import sys, pathlib, rayhs.demo; print(*rayhs.demo.prepare_demo(pathlib.Path(sys.argv[1]), 40), sep='\\n')"


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """A cache whose model is already there (an empty folder stands for it)."""
    (tmp_path / "smollm2-135m").mkdir()
    return tmp_path


def test_prompts_are_real_text_in_a_fixed_order(cache: Path) -> None:
    _, prompts = prepare_demo(cache)
    first = prompts.read_bytes()
    rows = [json.loads(line) for line in first.splitlines()]
    assert len(rows) == 48
    assert [row["id"] for row in rows] == sorted({row["id"] for row in rows})
    assert all(row["characters"] == len(row["text"]) > 100 for row in rows)
    prompts.write_text("something else")
    assert prepare_demo(cache)[1].read_bytes() == first


def test_a_number_of_documents_of_its_own(cache: Path) -> None:
    _, prompts = prepare_demo(cache, 3)
    assert len(prompts.read_text().splitlines()) == 3
    assert prompts != prepare_demo(cache, 4)[1]


@pytest.mark.parametrize("documents", [0, -1, 10_000])
def test_documents_out_of_range(cache: Path, documents: int) -> None:
    with pytest.raises(ConfigError, match=rf"^documents: {documents} is outside 1\.\.\d+"):
        prepare_demo(cache, documents)


def test_cache_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="set XDG_CACHE_HOME"):
        prepare_demo(tmp_path / "file" / "rayhs")


def test_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_folder() == Path("/home/someone/.cache/rayhs")
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert cache_folder() == Path("/elsewhere/rayhs")


def test_run_file(tmp_path: Path) -> None:
    config = demo_config(tmp_path / "model", tmp_path / "prompts.jsonl", "out")
    assert config.layers == ["eagle3", "last"]
    assert (config.engine.dtype, config.prompts.max_tokens, config.prompts.too_long) == ("float32", 256, "truncate")
    assert config.cluster.replica_range == (1, 1)


@pytest.mark.slow
def test_two_processes_build_one_model(tmp_path: Path) -> None:
    """From what a killed build leaves; the model then speaks."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    (tmp_path / "smollm2-135m.partial").mkdir()
    (tmp_path / "smollm2-135m.partial" / "model.safetensors").write_bytes(b"cut off")
    command = [sys.executable, "-c", PREPARE, str(tmp_path)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    answers = [process.communicate()[0].split() for process in running]
    assert [process.returncode for process in running] == [0, 0]
    assert answers[0] == answers[1] == [str(tmp_path / "smollm2-135m"), str(tmp_path / "python-topics-40.jsonl")]
    assert not list(tmp_path.glob("*.partial"))

    model = transformers.AutoModelForCausalLM.from_pretrained(answers[0][0])
    tokenizer = transformers.AutoTokenizer.from_pretrained(answers[0][0])
    assert model.dtype == torch.float32
    assert model.config.num_hidden_layers == 30
    question = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**inputs, max_new_tokens=12, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(answer)
