"""What is read of a model, its identity, and the limits derived from it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rayhs.config import parse_config
from rayhs.errors import ConfigError
from rayhs.model import describe_model, engine_dtype, max_prompt_tokens, state_dtype
from tests.tokenizers_for_tests import MARKED, save_tokenizer

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "num_hidden_layers": 5,
    "num_attention_heads": 2,
    "vocab_size": 500,
    "max_position_embeddings": 256,
    "torch_dtype": "bfloat16",
}


def save_model(folder: Path, config: dict[str, Any] = LLAMA, weights: bytes = b"\1" * 3_000_000) -> Path:
    save_tokenizer(folder)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(weights)
    return folder


def run(model: object, **sections: Any) -> Any:
    return parse_config({"model": str(model), "prompts": ["x"], "output": "out", **sections})


def test_local_model(tmp_path: Path) -> None:
    config = run(save_model(tmp_path))
    model = describe_model(config)
    assert (model.num_layers, model.hidden_size, model.vocab_size, model.max_positions) == (5, 32, 500, 256)
    assert (model.dtype, engine_dtype(config, model), state_dtype(config, model)) == ("bfloat16",) * 3
    assert max_prompt_tokens(config, model) == 255
    assert model.chat_template_hash is not None


def test_limits_and_dtypes_of_the_run() -> None:
    config = run(
        "fake/3x16",
        engine={"dtype": "float16", "max_model_len": 100, "include_generated": 4},
        shards={"dtype": "float32"},
    )
    model = describe_model(config)
    assert (model.num_layers, model.hidden_size, model.dtype) == (3, 16, "float32")
    assert (engine_dtype(config, model), state_dtype(config, model)) == ("float16", "float32")
    assert max_prompt_tokens(config, model) == 95
    assert max_prompt_tokens(run("fake/3x16", prompts={"rows": [], "max_tokens": 7}), model) == 7
    with pytest.raises(ConfigError, match="no room for a prompt"):
        max_prompt_tokens(run("fake/3x16", engine={"max_model_len": 5, "include_generated": 4}), model)


def test_hashes_follow_what_they_stand_for(tmp_path: Path) -> None:
    first = describe_model(run(save_model(tmp_path / "a")))
    same = describe_model(run(save_model(tmp_path / "b", {**LLAMA, "transformers_version": "1.2"})))
    assert (same.model_hash, same.tokenizer_hash, same.chat_template_hash) == (
        first.model_hash,
        first.tokenizer_hash,
        first.chat_template_hash,
    )
    tuned = bytearray(b"\1" * 3_000_000)
    tuned[1_500_000:1_700_000] = b"\2" * 200_000
    assert describe_model(run(save_model(tmp_path / "c", weights=bytes(tuned)))).model_hash != first.model_hash
    assert describe_model(run(save_model(tmp_path / "d", {**LLAMA, "rope_theta": 5e5}))).model_hash != first.model_hash
    save_tokenizer(tmp_path / "b", MARKED)
    marked = describe_model(run(tmp_path / "b"))
    assert marked.tokenizer_hash == first.tokenizer_hash and marked.chat_template_hash != first.chat_template_hash


def test_multimodal_configurations_have_a_text_part(tmp_path: Path) -> None:
    whole = {
        "model_type": "llava",
        "architectures": ["LlavaForConditionalGeneration"],
        "torch_dtype": "float16",
        "text_config": {key: value for key, value in LLAMA.items() if key != "torch_dtype"},
    }
    model = describe_model(run(save_model(tmp_path, whole)))
    assert (model.num_layers, model.hidden_size, model.dtype) == (5, 32, "float16")


def test_models_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    (tmp_path / "empty").mkdir()
    save_tokenizer(tmp_path / "broken")
    (tmp_path / "broken" / "config.json").write_text("{")
    no_dtype = save_model(tmp_path / "no-dtype", {key: value for key, value in LLAMA.items() if key != "torch_dtype"})
    cases = [
        (tmp_path / "empty", "no config.json"),
        (tmp_path / "broken", "config.json can't be used"),
        (tmp_path / "absent", "not a local folder"),
        ("nobody/nothing-of-the-kind", "not a local folder"),
        (no_dtype, "states no dtype"),
    ]
    for name, expected in cases:
        with pytest.raises(ConfigError, match=expected) as caught:
            describe_model(run(name))
        assert "\n" not in str(caught.value)
    assert describe_model(run(no_dtype, engine={"dtype": "float32"})).dtype == "float32"
    with pytest.raises(ConfigError, match=r"tokenizer .*empty: can't be loaded"):
        describe_model(run("fake/2x8", tokenizer=str(tmp_path / "empty")))
