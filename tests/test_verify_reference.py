"""`verify --reference`: stored states beside what transformers computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rayhs.errors import ConfigError
from rayhs.fp8 import quantize
from rayhs.verify import verify
from rayhs.verify.reference import final_norm, relative_error
from tests.builders import Builder
from tests.test_verify import FIRST, FORMATS, check


def test_relative_error() -> None:
    a = np.ones((2, 3), np.float32)
    assert relative_error(a, a) == 0.0
    assert relative_error(2 * a, a) == pytest.approx(1.0)


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
@pytest.mark.parametrize("shard_format", FORMATS)
def test_comparing_with_transformers(tmp_path: Path, family: str, shard_format: str) -> None:
    from tests.models import Oracle, save_tiny_model

    model = save_tiny_model(family, tmp_path / "model")
    oracle = Oracle(model)
    built = Builder(tmp_path / "data", shard_format=shard_format, hidden=64, layers=(0, 2, 6), model=str(model))
    for row in built.good():
        states = oracle.states(row.token_ids.tolist())
        row.states = {k: states[k] for k in built.layers}
    built.write()
    report = check(built, reference=str(model), samples=3)
    assert report.ok and report.reference is not None
    assert report.reference.samples == ("row-0", "row-3", "row-9") and report.reference.limit == 1e-4
    assert max(report.reference.errors.values()) < 1e-5

    victim = built.rows[0][0][0]
    victim.states[2] = victim.states[2] * np.float32(1.001)
    built.write_shard(FIRST)
    assert check(built).ok
    damaged = check(built, reference=str(model), samples=11)
    assert [f.object for f in damaged.findings] == ["hidden states"] and "layer 2 differs" in damaged.findings[
        0
    ].problem


def test_comparing_float8_with_transformers(tmp_path: Path) -> None:
    from tests.models import Oracle, save_tiny_model

    model = save_tiny_model("llama", tmp_path / "model")
    oracle = Oracle(model)
    built = Builder(tmp_path / "data", dtype="float8_e4m3fn", hidden=64, layers=(0, 2, 6), model=str(model))
    for row in built.good():
        states = oracle.states(row.token_ids.tolist())
        parts = {k: quantize(states[k]) for k in built.layers}
        row.states, row.scales = ({k: part[i] for k, part in parts.items()} for i in (0, 1))
    report = check(built.write(), reference=str(model), samples=11)
    assert report.ok and report.reference is not None and report.reference.limit == pytest.approx(0.0788, abs=1e-4)
    assert 0.01 < min(report.reference.errors.values()) < max(report.reference.errors.values()) < 0.04
    built.rows[0][0][0].scales[2] = built.rows[0][0][0].scales[2] * np.float32(1.1)
    built.write_shard(FIRST)
    assert not check(built, reference=str(model), samples=11).ok


def test_the_final_norm_is_found_in_other_families(tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, GPT2Config, GPTNeoXConfig, OPTConfig

    small: dict[str, Any] = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "vocab_size": 16}
    for config, name in (
        (GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=16), "transformer.ln_f"),
        (OPTConfig(**small, word_embed_proj_dim=8, ffn_dim=8), "model.decoder.final_layer_norm"),
        (GPTNeoXConfig(**small, intermediate_size=8), "gpt_neox.final_layer_norm"),
    ):
        network = AutoModelForCausalLM.from_config(config)
        assert final_norm(network) is network.get_submodule(name)
    with pytest.raises(ConfigError, match="no final norm"):
        final_norm(torch.nn.Linear(2, 2))


def test_a_reference_that_does_not_fit(tmp_path: Path) -> None:
    from tests.models import save_tiny_model

    built = Builder(tmp_path / "data").write()
    with pytest.raises(ConfigError, match="--reference /no/such/model"):
        verify(str(built.folder), reference="/no/such/model")
    model = save_tiny_model("llama", tmp_path / "model")
    with pytest.raises(ConfigError, match="6 layers of 64, the dataset is of 4 layers of 8"):
        verify(str(built.folder), reference=str(model))
