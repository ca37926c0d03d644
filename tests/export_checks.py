"""Exports read back by their consumers' readers and held against what transformers says of the same tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rayhs.export.target import MANIFEST
from tests.consumers import offline_readers as readers
from tests.real_datasets import RealDataset

LAYERS = [1, 3, 5]
ZERO_BASED = [0, 2, 4]
DRAFT = 16
LENGTH = 20
OPTIONS: dict[str, dict[str, Any]] = {
    "specforge": {"layers": LAYERS, "draft_vocab_size": DRAFT},
    "specforge-dflash": {"layers": LAYERS, "method": "dflash"},
    "specforge-dspark": {"layers": LAYERS, "method": "dspark"},
    "model-optimizer": {"layers": LAYERS},
    "model-optimizer-prenorm": {"layers": LAYERS, "norm": "prenorm"},
    "deepspec": {"layers": LAYERS, "shard_bytes": 20_000},
    "automodel": {"layers": LAYERS, "seq_length": LENGTH, "rows_per_shard": 3},
    "automodel-draft": {"layers": LAYERS, "seq_length": LENGTH, "rows_per_shard": 4, "draft_vocab_size": DRAFT},
    "automodel-top": {"layers": LAYERS, "seq_length": LENGTH, "rows_per_shard": 100, "top_k": 5},
}


def numbers(tensor: Any) -> np.ndarray:
    """float32 of any float tensor, exactly."""
    array: np.ndarray = tensor.float().numpy()
    return array


def aux(real: RealDataset, row: Any) -> np.ndarray:
    return np.concatenate([real.states(row, k) for k in LAYERS], axis=1).astype(np.float32)


def near(got: np.ndarray, want: np.ndarray, dtype: str) -> bool:
    """Equal within what ``dtype`` can tell apart."""
    rtol = {"float32": 1e-4, "float16": 2e-3}.get(dtype, 2**-7)
    return got.shape == want.shape and np.allclose(got, want, rtol=rtol, atol=1e-5 if dtype == "float32" else 1e-3)


def counted(real: RealDataset, length: int | None = None) -> list[int]:
    """The draft's vocabulary by brute force: what occurs most where the loss counts, then the lowest ids."""
    tokens = [t for row in real.rows for t in row.token_ids[:length][row.loss_mask[:length] == 1].tolist()]
    return sorted(sorted(range(real.vocabulary), key=lambda token: (-tokens.count(token), token))[:DRAFT])


def check_ids(real: RealDataset, folder: Path) -> None:
    names = [json.loads(line) for line in (folder / "sample_ids.jsonl").read_text().splitlines()]
    assert names == [row.sample_id for row in real.rows]


def check_specforge(real: RealDataset, folder: Path, name: str) -> None:
    method = OPTIONS[name].get("method", "eagle3")
    items = readers.specforge(folder, method)
    assert [row for row, _ in items] == sorted(range(len(real.rows)), key=str)
    check_ids(real, folder)
    for number, item in items:
        row = real.rows[number]
        assert item["input_ids"].tolist() == row.token_ids.tolist()
        assert item["loss_mask"].tolist() == row.loss_mask.tolist()
        states = item["aux_hidden_state" if method == "eagle3" else "hidden_states"]
        assert np.array_equal(numbers(states[0]), aux(real, row))
        if method != "dflash":
            last = item["hidden_state" if method == "eagle3" else "target_last_hidden_states"]
            assert last.dtype == states.dtype and near(numbers(last[0]), real.post_norm(row), real.built.dtype)
    notes = json.loads((folder / MANIFEST).read_text())
    assert notes["layer_ids"] == LAYERS and notes["target_layer_ids"] == ZERO_BASED
    if method == "eagle3":
        maps = torch.load(folder / notes["vocab_mapping"], weights_only=True)
        assert (torch.arange(DRAFT) + maps["d2t"]).tolist() == counted(real)
        assert maps["t2d"].shape == (real.vocabulary,) and maps["t2d"].nonzero()[:, 0].tolist() == counted(real)
    else:
        refused = [row for row in real.rows if "11" not in "".join(map(str, row.loss_mask))]
        assert notes["without_two_loss_tokens_in_a_row"] == len(refused)


def check_model_optimizer(real: RealDataset, folder: Path, name: str) -> None:
    items = readers.model_optimizer(folder)
    assert set(items) == {row.sample_id for row in real.rows}
    prenorm = "prenorm" in name
    for row in real.rows:
        item = items[row.sample_id]
        assert item["input_ids"].tolist() == row.token_ids.tolist()
        assert item["loss_mask"].tolist() == row.loss_mask.tolist()
        assert np.array_equal(numbers(item["aux_hidden_states"]), aux(real, row))
        assert item["base_hidden_prenorm"] is prenorm
        if prenorm:
            expected = real.states(row, real.oracle.num_layers).astype(np.float32)
            assert np.array_equal(numbers(item["base_model_hidden_states"]), expected)
        else:
            assert near(numbers(item["base_model_hidden_states"]), real.post_norm(row), real.built.dtype)
    notes = json.loads((folder / MANIFEST).read_text())
    assert notes["layer_ids"] == LAYERS and notes["aux_layers"] == ZERO_BASED


def check_deepspec(real: RealDataset, folder: Path, name: str) -> None:
    cache = readers.DeepSpecCache(folder)
    assert len(cache) == len(real.rows) and cache.manifest["target_layer_ids"] == ZERO_BASED
    assert cache.manifest["target_model_name_or_path"] == str(real.model)
    check_ids(real, folder)
    sizes = [(folder / shard["file_name"]).stat().st_size for shard in cache.manifest["shards"]]
    assert len(sizes) > 2 and max(sizes) <= 20_000
    for number, row in enumerate(real.rows):
        item = cache[number]
        assert item["input_ids"].tolist() == row.token_ids.tolist()
        assert item["loss_mask"].tolist() == row.loss_mask.tolist()
        expected = torch.from_numpy(aux(real, row)).bfloat16()
        assert torch.equal(item["target_hidden_states"], expected)
        assert near(numbers(item["target_last_hidden_states"]), real.post_norm(row), "bfloat16")


def check_automodel(real: RealDataset, folder: Path, name: str) -> None:
    cache = readers.AutomodelCache(folder)
    selected = counted(real, LENGTH) if "draft" in name else list(range(real.vocabulary))
    assert len(cache) == len(real.rows) and cache.manifest["selected_token_ids"] == selected
    assert cache.manifest["aux_layer_ids"] == ZERO_BASED and cache.manifest["target_vocab_size"] == real.vocabulary
    assert torch.equal(cache.embeddings, real.oracle.model.model.embed_tokens.weight.detach())
    check_ids(real, folder)
    for number, row in enumerate(real.rows):
        item, tokens = cache[number], min(len(row.token_ids), LENGTH)
        padded = np.zeros((2, LENGTH + 1), np.int64)
        padded[0, :tokens], padded[1, :tokens] = row.token_ids[:tokens], row.loss_mask[:tokens]
        assert item["input_ids"].tolist() == padded[0, 1:].tolist()
        assert item["loss_mask"].tolist() == padded[1, 1:].tolist()
        assert item["attention_mask"].tolist() == [1] * tokens + [0] * (LENGTH - tokens)
        assert np.array_equal(numbers(item["aux_hidden_states"])[:tokens], aux(real, row)[:tokens])
        assert not item["aux_hidden_states"][tokens:].any()
        logits = torch.from_numpy(real.logits(row))[1:tokens]
        expected = torch.softmax(logits[:, selected], dim=-1)
        if "top" in name:
            values, indices = torch.topk(expected, 5)
            expected = torch.zeros_like(expected).scatter_(1, indices, values / values.sum(1, keepdim=True))
        got = numbers(item["target_probs"])
        assert near(got[: tokens - 1], expected.numpy(), real.built.dtype) and not got[tokens - 1 :].any()
        likely = np.isin(logits.argmax(1).numpy(), selected) & (padded[1, 1:tokens] == 1)
        assert item["position_mask"].dtype == torch.bool and item["position_mask"].shape == (LENGTH, 1)
        assert item["position_mask"][:, 0].tolist() == likely.tolist() + [False] * (LENGTH - tokens + 1)
    notes, cut = json.loads((folder / MANIFEST).read_text()), [len(row.token_ids) - LENGTH for row in real.rows]
    assert notes["tokens_cut"] == sum(n for n in cut if n > 0) and notes["samples_cut"] == sum(n > 0 for n in cut)


CHECKS = {
    "specforge": check_specforge,
    "model": check_model_optimizer,
    "deepspec": check_deepspec,
    "automodel": check_automodel,
}


def check(real: RealDataset, folder: Path, name: str) -> None:
    CHECKS[name.partition("-")[0]](real, folder, name)
