"""The target model of an export: its norm, logits and embeddings as transformers has them, and what is refused."""

from __future__ import annotations

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from rayhs.errors import ConfigError
from rayhs.export.target_model import TargetModel
from rayhs.layout import DatasetRecord
from rayhs.model import model_hash
from tests.builders import Builder
from tests.models import VOCAB, Oracle
from tests.real_datasets import save_model

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

IDS = [5, 17, 400, 2, 2, 90]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model("llama", tmp_path_factory.mktemp("llama"))


def record(folder: Path, model: Path | str, hidden: int = 64, layers: int = 6, **more: Any) -> DatasetRecord:
    made = Builder(folder, layers=(layers,), hidden=hidden, model=str(model)).write().record
    assert made is not None
    return made.model_copy(update=more)


def known(folder: Path, model: Path) -> DatasetRecord:
    """One whose model is told by its hash."""
    config = transformers.AutoConfig.from_pretrained(model)
    versions = {"transformers": transformers.__version__}
    return record(folder, model, model_hash=model_hash(str(model), config), versions=versions)


def agrees(target: TargetModel, model: Path) -> None:
    oracle = Oracle(model)
    with torch.no_grad():
        out = oracle.model(torch.tensor([IDS]), output_hidden_states=True)
    normed = target.normed(oracle.states(IDS)[6])
    assert normed.dtype == np.float32 and np.allclose(normed, out.hidden_states[-1][0].numpy(), rtol=1e-5, atol=1e-6)
    logits = target.logits(normed)
    assert logits.dtype == np.float32 and np.allclose(logits, out.logits[0].numpy(), rtol=1e-4, atol=1e-5)
    assert torch.equal(target.embeddings, oracle.model.get_input_embeddings().weight.detach())
    assert target.vocab_size == VOCAB


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_moe"])
@pytest.mark.parametrize("shards", ["5GB", "100KB"])
def test_it_is_what_transformers_computes(tmp_path: Path, family: str, tied: bool, shards: str) -> None:
    model = save_model(family, tmp_path / "model", tie_word_embeddings=tied)
    if shards == "100KB":
        network = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        (model / "model.safetensors").unlink()
        network.save_pretrained(model, max_shard_size=shards)
        assert len(list(model.glob("*.safetensors"))) > 3
    if tied:
        names = [name for path in model.glob("*.safetensors") for name in load_file(path)]
        assert "lm_head.weight" not in names
    agrees(TargetModel(record(tmp_path / "data", model)), model)


def test_states_of_any_dtype_and_threads_at_once(tmp_path: Path, llama: Path) -> None:
    target = TargetModel(record(tmp_path, llama))
    states = np.random.default_rng(0).standard_normal((9, 64)).astype(np.float16)
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(target.normed, [states] * 16))
    assert all(np.array_equal(result, results[0]) for result in results)
    assert np.array_equal(results[0], target.normed(states.astype(np.float32)))


def test_no_file_is_opened_that_is_not_needed(tmp_path: Path, llama: Path) -> None:
    network = transformers.AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32)
    network.save_pretrained(tmp_path / "model", max_shard_size="50KB")
    places = json.loads((tmp_path / "model/model.safetensors.index.json").read_text())["weight_map"]
    for path in (tmp_path / "model").glob("*.safetensors"):
        if path.name != places["model.norm.weight"]:
            path.unlink()
    target = TargetModel(record(tmp_path / "data", tmp_path / "model"))
    normed = target.normed(np.ones((2, 64), np.float32))
    with pytest.raises(ConfigError, match=f"{places['lm_head.weight']} is missing; fetch the model again"):
        target.logits(normed)


@pytest.mark.parametrize("tied", [False, True])
def test_a_checkpoint_of_the_base_model(tmp_path: Path, tied: bool) -> None:
    model = save_model("llama", tmp_path / "model", tie_word_embeddings=tied)
    base = transformers.AutoModel.from_pretrained(model, dtype=torch.float32)
    base.save_pretrained(tmp_path / "base")
    target = TargetModel(record(tmp_path / "data", tmp_path / "base"))
    if tied:
        agrees(target, model)
        return
    normed = target.normed(np.ones((2, 64), np.float32))
    # Its embeddings in the place of the projection would be silently wrong.
    with pytest.raises(ConfigError, match=r"has no tensor lm_head\.weight"):
        target.logits(normed)


def test_a_projection_of_its_own_beside_a_configuration_that_ties(tmp_path: Path, llama: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(llama, model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    agrees(TargetModel(record(tmp_path / "data", model)), model)


@pytest.mark.parametrize(
    ("hidden", "layers", "message"),
    [(32, 6, "6 layers of 64, the states are of 6 layers of 32"), (64, 8, "6 layers of 64, the states are of 8")],
)
def test_a_model_of_other_sizes_is_refused(tmp_path: Path, llama: Path, hidden: int, layers: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TargetModel(record(tmp_path, llama, hidden, layers)).normed(np.ones((1, hidden), np.float32))


def test_other_weights_are_refused(tmp_path: Path, llama: Path) -> None:
    made = known(tmp_path / "data", llama)
    agrees(TargetModel(made), llama)
    other = tmp_path / "other"
    shutil.copytree(llama, other)
    agrees(TargetModel(made, str(other)), llama)
    network = transformers.AutoModelForCausalLM.from_pretrained(other, dtype=torch.float32)
    network.lm_head.weight.data *= 1.01
    network.save_pretrained(other)
    with pytest.raises(ConfigError, match=r"not those the states were extracted from; give that model"):
        TargetModel(made, str(other)).normed(np.ones((1, 64), np.float32))
    another_reader = made.model_copy(update={"versions": {"transformers": "5.0.0"}})
    TargetModel(another_reader, str(other)).normed(np.ones((1, 64), np.float32))


def test_a_model_of_the_hub_that_is_in_a_folder_now(tmp_path: Path, llama: Path) -> None:
    config = transformers.AutoConfig.from_pretrained(llama)
    versions = {"transformers": transformers.__version__}
    name = "somebody/some-model"
    made = record(tmp_path / "data", name, model_hash=model_hash(name, config), versions=versions, revision="abc")
    agrees(TargetModel(made, str(llama)), llama)
    qwen3 = save_model("qwen3", tmp_path / "qwen3")
    with pytest.raises(ConfigError, match="not those the states were extracted from"):
        TargetModel(made, str(qwen3)).normed(np.ones((1, 64), np.float32))


def test_a_model_that_has_moved(tmp_path: Path, llama: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    shutil.copytree(llama, old)
    made = known(tmp_path / "data", old)
    old.rename(new)
    with pytest.raises(ConfigError, match=r"no such folder; say where it is now \(--set model=...\)"):
        TargetModel(made).normed(np.ones((1, 64), np.float32))
    agrees(TargetModel(made, str(new)), new)


def test_weights_in_another_format(tmp_path: Path, llama: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(llama, model)
    network = transformers.AutoModelForCausalLM.from_pretrained(model)
    torch.save(network.state_dict(), model / "pytorch_model.bin")
    (model / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"no safetensors weights; save it with transformers"):
        TargetModel(record(tmp_path / "data", model)).normed(np.ones((1, 64), np.float32))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("model.safetensors", b"\xff" * 40, "model.safetensors: .*fetch the model again"),
        ("model.safetensors.index.json", b"{", "not an index of weights"),
        ("model.safetensors.index.json", b"{}", "not an index of weights"),
        ("model.safetensors.index.json", b"[]", "not an index of weights"),
        ("model.safetensors.index.json", b'{"weight_map": {}}', r"no tensor model\.norm\.weight"),
        ("config.json", b"{", "config.json"),
    ],
)
def test_a_damaged_checkpoint(tmp_path: Path, llama: Path, name: str, content: bytes, message: str) -> None:
    model = tmp_path / "model"
    shutil.copytree(llama, model)
    (model / name).write_bytes(content)
    with pytest.raises(ConfigError, match=message) as caught:
        TargetModel(record(tmp_path / "data", model)).normed(np.ones((1, 64), np.float32))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("family", "scale"), [("Gemma2", {"final_logit_softcapping": 30.0}), ("Granite", {"logits_scaling": 8.0})]
)
def test_logits_that_are_more_than_a_projection(tmp_path: Path, family: str, scale: dict[str, float]) -> None:
    config = getattr(transformers, f"{family}Config")(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, pad_token_id=0, **scale,
    )  # fmt: skip
    torch.manual_seed(0)
    network = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    network.model.norm.weight.data = torch.linspace(0.1, 0.9, 32)
    network.save_pretrained(tmp_path / "model")
    target = TargetModel(record(tmp_path / "data", tmp_path / "model", 32, 4))
    states = np.random.default_rng(1).standard_normal((3, 32)).astype(np.float32)
    with torch.no_grad():
        expected = network.model.norm(torch.from_numpy(states)).numpy()
    assert np.allclose(target.normed(states), expected, rtol=1e-5)  # Gemma's norm scales by 1 + weight
    with pytest.raises(ConfigError, match=f"it has {next(iter(scale))}, which this export can't apply"):
        target.logits(expected)


def test_special_tokens(tmp_path: Path) -> None:
    model = save_model("llama", tmp_path / "m", bos_token_id=1, eos_token_id=[2, 3, 1, VOCAB])
    target = TargetModel(record(tmp_path / "data", model))
    assert target.special_tokens == [1, 2, 3]


def test_the_fake_engine_has_no_weights(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the fake engine has no weights"):
        TargetModel(record(tmp_path, "fake/6x64"))
