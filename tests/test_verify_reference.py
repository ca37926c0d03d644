"""`verify --reference`: stored states beside what transformers computes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rayhs.codec import STATE_DTYPES
from rayhs.errors import ConfigError
from rayhs.fp8 import quantize
from rayhs.layout import DatasetRecord
from rayhs.store import Store
from rayhs.verify import verify
from rayhs.verify.reference import ReferenceReport, _limit, final_norm, token_errors
from tests.builders import Builder
from tests.test_verify import FIRST, FORMATS, check


def test_the_error_of_each_token() -> None:
    massive = np.ones((3, 4), np.float32)
    massive[0] *= 1e5
    assert token_errors(massive, massive).tolist() == [0, 0, 0]
    stored = massive * np.float32([[1.0], [2.0], [1.01]])
    assert token_errors(stored, massive) == pytest.approx([0, 1, 0.01])
    stored[2, 1] = np.nan
    assert np.isnan(token_errors(stored, massive)[2])


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
    assert max(report.reference.worst.values()) < 1e-5

    def found() -> list[str]:
        built.write_shard(FIRST)
        assert check(built).ok
        damaged = check(built, reference=str(model), samples=11)
        assert [f.object for f in damaged.findings] == ["hidden states"]
        return [f.problem for f in damaged.findings]

    victim = max(built.rows[0][0], key=lambda row: len(row.token_ids))
    right = victim.states[2]
    victim.states[2] = right * np.float32(1.001)
    assert "layer 2 differs" in found()[0]
    victim.states[2] = right.copy()
    victim.states[2][-1] = -right[-1]  # one token of them
    assert "the worst by 2.00e+00 (limit 0.5)" in found()[0]


def test_massive_activations_are_no_damage(tmp_path: Path) -> None:
    """A token that outweighs all others and is off by a tenth: so is the norm of the whole sample."""
    from transformers import AutoModelForCausalLM

    from tests.models import Oracle, relative_error, save_tiny_model

    model = save_tiny_model("llama", tmp_path / "model")
    built = Builder(tmp_path / "data", dtype="bfloat16", hidden=64, layers=(2, 6), model=str(model))
    victim = max(built.rows[0][0], key=lambda row: len(row.token_ids))
    network = AutoModelForCausalLM.from_pretrained(model)
    network.model.embed_tokens.weight.data[victim.token_ids[0]] *= 1e5
    network.save_pretrained(model)
    oracle, bfloat16 = Oracle(model), STATE_DTYPES["bfloat16"]
    for row in built.good():
        states = oracle.states(row.token_ids.tolist())
        row.states = {k: states[k].astype(bfloat16) for k in built.layers}
    right = victim.states[2].copy()
    victim.states[2][0] = (right[0].astype(np.float32) * 1.1).astype(bfloat16)
    assert relative_error(victim.states[2], right) == pytest.approx(0.1, rel=0.05)
    report = check(built.write(), reference=str(model), samples=11)
    assert report.ok and report.reference is not None
    assert report.reference.worst[2] == pytest.approx(0.1, rel=0.05) and report.reference.errors[2] < 5e-2


@pytest.mark.parametrize(
    ("torch", "dtype", "limit"),
    [
        ("2.13.0+cpu", "float32", 1e-4),
        ("2.11.0", "float32", 5e-3),
        ("2.11.0+cu130", "float32", 5e-3),
        ("2.13.0+cpu", "bfloat16", 5e-2),
    ],
)
def test_the_limit_is_that_of_the_engine_s_arithmetic(tmp_path: Path, torch: str, dtype: str, limit: float) -> None:
    record = Builder(tmp_path, dtype=dtype).write().record
    assert record is not None
    assert _limit(record.model_copy(update={"versions": {"torch": torch}})) == limit


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
    assert report.ok and report.reference is not None and report.reference.limit == pytest.approx(0.1088, abs=1e-4)
    assert 0.01 < min(report.reference.errors.values()) < max(report.reference.errors.values()) < 0.04
    # Nothing but the dtype is between them, and that is what is said of it.
    lengths = {row.sample_id: len(row.token_ids) for row in built.good()}
    assert set(report.reference.samples) == set(lengths)
    for layer in built.layers:
        parts = [quantize(oracle.states(row.token_ids.tolist())[layer])[2] for row in built.good()]
        assert report.reference.rounding[layer] == pytest.approx(np.concatenate(parts).mean(), rel=1e-3)
        assert report.recorded_errors[str(layer)].max < 0.1
    assert set(report.to_dict()["recorded_errors"]) == {"0", "2", "6"}
    built.rows[0][0][0].scales[2] = built.rows[0][0][0].scales[2] * np.float32(1.2)
    built.write_shard(FIRST)
    assert not check(built, reference=str(model), samples=11).ok


@pytest.mark.parametrize(
    ("dtype", "least", "most"), [("float32", 0, 0), ("bfloat16", 1e-3, 3e-3), ("float16", 1e-4, 4e-4)]
)
def test_quality_takes_the_datasets_own_model(tmp_path: Path, dtype: str, least: float, most: float) -> None:
    from tests.models import Oracle, save_tiny_model

    model = save_tiny_model("llama", tmp_path / "model")
    oracle = Oracle(model)
    built = Builder(tmp_path / "data", dtype=dtype, hidden=64, layers=(2, 6), model=str(model))
    for row in built.good():
        states = oracle.states(row.token_ids.tolist())
        row.states = {k: states[k].astype(STATE_DTYPES[dtype]) for k in built.layers}
    report = verify(str(built.write().folder), quality=True)
    assert report.ok and report.reference is not None and report.reference.model == str(model)
    assert all(least <= error <= most for error in report.reference.rounding.values())
    assert report.recorded_errors == {}


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
        assert final_norm(network) == (name, network.get_submodule(name))
    with pytest.raises(ConfigError, match="no final norm"):
        final_norm(torch.nn.Linear(2, 2))


@pytest.mark.parametrize("asked", range(1, 15))
def test_as_many_samples_as_asked_are_compared(tmp_path: Path, asked: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all there are at most, from the first on, spread evenly."""
    compared: list[list[str]] = []

    def compare(store: Store, record: DatasetRecord, rows: Sequence[Mapping[str, Any]], model: str) -> ReferenceReport:
        compared.append([row["sample_id"] for row in rows])
        return ReferenceReport(model, (), {}, {}, {}, 1.0)

    monkeypatch.setattr("rayhs.verify.compare_with_reference", compare)
    monkeypatch.setattr("rayhs.verify.refuse_unlike", lambda record, model: None)
    built = Builder(tmp_path).write()
    good = [row.sample_id for row in built.good()]
    check(built, reference="any", samples=asked)
    assert len(compared[0]) == len(set(compared[0])) == min(asked, len(good)) and compared[0][0] == good[0]
    places = [good.index(name) for name in compared[0]]
    gaps = np.diff([*places, len(good)])
    assert gaps.max() - gaps.min() <= 1


def test_a_reference_that_does_not_fit_is_refused_before_anything_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.models import save_tiny_model

    built = Builder(tmp_path / "data").write()
    monkeypatch.setattr("rayhs.verify.check_shard", None)
    with pytest.raises(ConfigError, match="--reference /no/such/model: no such folder"):
        verify(str(built.folder), reference="/no/such/model")
    with pytest.raises(ConfigError, match="--reference fake/4x8: the fake engine"):
        verify(str(built.folder), reference="fake/4x8")
    model = save_tiny_model("llama", tmp_path / "model")
    with pytest.raises(ConfigError, match="6 layers of 64, the dataset is of 4 layers of 8"):
        verify(str(built.folder), reference=str(model))


def test_quality_says_where_to_name_a_model_that_has_moved(tmp_path: Path) -> None:
    built = Builder(tmp_path / "data", model=str(tmp_path / "gone")).write()
    with pytest.raises(ConfigError, match="^--quality: .*gone: no such folder; say with --reference where"):
        verify(str(built.folder), quality=True)
    with pytest.raises(ConfigError, match="^--reference .*gone: no such folder$"):
        verify(str(built.folder), reference=str(tmp_path / "gone"))
