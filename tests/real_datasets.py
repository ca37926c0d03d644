"""Datasets of a tiny model's true states, computed by transformers and written by hand, and what transformers says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rayhs.codec import FP8, STATE_DTYPES
from rayhs.dataset import Dataset, open_dataset
from rayhs.fp8 import dequantize, quantize
from tests.builders import Builder, Row
from tests.models import Oracle, save_tiny_model

GENERATED = 2


def save_model(family: str, folder: Path, **config: Any) -> Path:
    """A tiny model whose final norm scales: one that does not is the same when applied twice."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    save_tiny_model(family, folder)
    whole = AutoConfig.from_pretrained(folder)
    for key, value in config.items():
        setattr(whole, key, value)
    state = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    if whole.tie_word_embeddings:
        del state["lm_head.weight"]
    model = AutoModelForCausalLM.from_config(whole, dtype=torch.float32)
    model.load_state_dict(state, strict=False)
    with torch.no_grad():
        model.model.norm.weight.copy_(torch.linspace(0.5, 1.5, model.config.hidden_size))
    model.save_pretrained(folder)
    return folder


@dataclass
class RealDataset:
    built: Builder
    model: Path
    oracle: Oracle

    def open(self) -> Dataset:
        return open_dataset(str(self.built.folder))

    @property
    def rows(self) -> list[Row]:
        return self.built.good()

    @property
    def vocabulary(self) -> int:
        return int(self.oracle.model.config.vocab_size)

    def states(self, row: Row, layer: int) -> np.ndarray:
        """As they must come out of any export, in the dtype of the dataset."""
        return dequantize(row.states[layer], row.scales[layer], "bfloat16") if row.scales else row.states[layer]

    def forward(self, row: Row) -> Any:
        """What transformers computes from the tokens; its last hidden state is after the final norm."""
        import torch

        with torch.no_grad():
            return self.oracle.model(torch.tensor([row.token_ids.tolist()]), output_hidden_states=True)

    def post_norm(self, row: Row) -> np.ndarray:
        """float32 `[tokens, hidden]`: transformers' own, or of a dataset of less precision its norm of the states."""
        import torch

        if self.built.dtype == "float32":
            last: np.ndarray = self.forward(row).hidden_states[-1][0].numpy()
            return last
        states = self.states(row, self.oracle.num_layers).astype(np.float32)
        with torch.no_grad():
            normed: np.ndarray = self.oracle.model.model.norm(torch.from_numpy(states)).numpy()
        return normed

    def logits(self, row: Row) -> np.ndarray:
        """float32 `[tokens, vocabulary]`, as `post_norm`."""
        import torch

        if self.built.dtype == "float32":
            own: np.ndarray = self.forward(row).logits[0].numpy()
            return own
        with torch.no_grad():
            logits: np.ndarray = self.oracle.model.lm_head(torch.from_numpy(self.post_norm(row))).numpy()
        return logits


def write_real_dataset(
    folder: Path,
    model: Path,
    dtype: str = "float32",
    layers: Sequence[int] = range(1, 7),
    generated: bool = False,
    **settings: Any,
) -> RealDataset:
    """``generated``: every sample has `GENERATED` tokens more than its prompt in the plan."""
    oracle, rng = Oracle(model), np.random.default_rng(3)
    built = Builder(
        folder,
        dtype=dtype,
        layers=tuple(layers),
        hidden=oracle.model.config.hidden_size,
        lengths=(3, 30),
        model=str(model),
        include_generated=GENERATED if generated else 0,
        **settings,
    )
    real = RealDataset(built, model, oracle)
    for row in built.good():
        row.token_ids = rng.integers(0, 60, len(row.token_ids)).astype(np.int32)
        row.loss_mask = (rng.random(len(row.token_ids)) < 0.6).astype(np.uint8)
        _compute(real, row)
    built.write()
    if generated:
        for row in built.good():
            more = rng.integers(0, 60, GENERATED).astype(np.int32)
            row.token_ids = np.append(row.token_ids, more)
            row.loss_mask = np.append(row.loss_mask, np.ones(GENERATED, np.uint8))
            _compute(real, row)
        for shard in built.shards():
            built.write_shard(shard)
        for file in range(len(built.rows)):
            built.write_index(file, built.index_rows(file))
        built.write_summary()
    return real


def _compute(real: RealDataset, row: Row) -> None:
    states = real.oracle.states(row.token_ids.tolist())
    if real.built.dtype == FP8:
        parts = {k: quantize(states[k]) for k in real.built.layers}
        row.states, row.scales = ({k: part[i] for k, part in parts.items()} for i in (0, 1))
    else:
        row.states = {k: states[k].astype(STATE_DTYPES[real.built.dtype]) for k in real.built.layers}
