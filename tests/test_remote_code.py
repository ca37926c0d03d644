"""Code that comes with a model or a tokenizer runs only where `engine.trust_remote_code` says so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rayhs.config import parse_config
from rayhs.errors import ConfigError
from rayhs.model import describe_model, tokenizer_source
from rayhs.prompts.tokenizer import open_tokenizer
from rayhs.verify import verify
from tests.builders import Builder
from tests.test_model import LLAMA, save_model

CODE = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

Path({marker!r}).touch()


class Config(LlamaConfig):
    model_type = {kind!r}


class Tokenizer(PreTrainedTokenizerFast):
    pass


class Model(LlamaForCausalLM):
    config_class = Config
"""


@pytest.fixture(autouse=True)
def no_terminal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def asked(*_: object) -> str:
        raise AssertionError("transformers asked on the terminal")

    import transformers.dynamic_module_utils as dynamic

    monkeypatch.setattr("builtins.input", asked)
    monkeypatch.setattr(dynamic, "HF_MODULES_CACHE", str(tmp_path / "modules"))


def with_code(folder: Path, kind: str) -> tuple[Path, Path]:
    """A model folder whose configuration, model and tokenizer name code beside them; and the code's mark."""
    marker = folder / "it-ran"
    auto = {"AutoConfig": "hostile.Config", "AutoModelForCausalLM": "hostile.Model"}
    save_model(folder, {**LLAMA, "model_type": kind, "auto_map": auto})
    (folder / "hostile.py").write_text(CODE.format(marker=str(marker), kind=kind))
    path = folder / "tokenizer_config.json"
    tokenizer = {**json.loads(path.read_text()), "auto_map": {"AutoTokenizer": [None, "hostile.Tokenizer"]}}
    if kind != "llama":
        tokenizer["tokenizer_class"] = "Tokenizer"
    path.write_text(json.dumps(tokenizer))
    return folder, marker


def run(model: object, **engine: Any) -> Any:
    return parse_config({"model": str(model), "prompts": ["x"], "output": "out", "engine": engine})


@pytest.mark.parametrize("kind", ["llama", "unheard_of"])
def test_code_of_a_model_does_not_run_unasked(tmp_path: Path, kind: str) -> None:
    folder, marker = with_code(tmp_path / "model", kind)
    config = run(folder)
    for load in (lambda: describe_model(config), lambda: open_tokenizer(tokenizer_source(config))):
        try:
            load()
        except ConfigError as error:
            assert str(error).isprintable() and kind != "llama"
    assert not marker.exists()


@pytest.mark.parametrize("kind", ["llama", "unheard_of"])
def test_code_of_a_reference_model_does_not_run(tmp_path: Path, kind: str) -> None:
    folder, marker = with_code(tmp_path / "model", kind)
    built = Builder(tmp_path / "data").write()
    with pytest.raises(ConfigError, match="--reference") as error:
        verify(str(built.folder), reference=str(folder))
    assert str(error.value).isprintable() and not marker.exists()


def test_code_of_a_model_runs_when_it_is_trusted(tmp_path: Path) -> None:
    """What shows that the other tests would see it run."""
    folder, marker = with_code(tmp_path / "model", "unheard_of")
    assert describe_model(run(folder, trust_remote_code=True)).num_layers == 5
    assert marker.exists()
