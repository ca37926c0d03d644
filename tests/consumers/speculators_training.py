"""Runs in the consumers' environment (`run.py`): speculators' own collation and EAGLE-3 model on an export."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from speculators.models.eagle3.core import Eagle3DraftModel
from speculators.train.data import ArrowDataset, CollateFn
from speculators.train.vocab_mapping import build_vocab_mappings_from_distribution
from transformers import AutoConfig

LENGTH = 128


def maps(folder: Path, size: int, vocabulary: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Those of the export, which must be those that speculators itself makes of the export's frequencies."""
    counts = torch.load(folder / "token_freq.pt", weights_only=True)
    expected = build_vocab_mappings_from_distribution(counts, size, vocabulary)
    found = tuple(torch.from_numpy(np.load(folder / f"{name}-{size}.npy")) for name in ("d2t", "t2d"))
    assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))
    return found[1], found[0]


def draft(model: str, layers: list[int], size: int, t2d: torch.Tensor, d2t: torch.Tensor) -> Eagle3DraftModel:
    config = AutoConfig.from_pretrained(model)
    config.num_hidden_layers = 1
    return Eagle3DraftModel.from_training_args(
        config, t2d=t2d, d2t=d2t, draft_vocab_size=size, norm_before_residual=False, ttt_steps=2,
        verifier_name_or_path=model, target_layer_ids=layers, draft_attn_impl="eager",
    )  # fmt: skip


def train(network: Eagle3DraftModel, batches: list[dict[str, Any]], steps: int) -> list[float]:
    kwargs, _ = network.get_trainer_kwargs(
        ttt_steps=2, ttt_step_loss_decay=1.0, loss_fn="ce", loss_implementation="eager"
    )
    optimizer = torch.optim.AdamW([p for p in network.parameters() if p.requires_grad], lr=1e-3)
    losses = []
    for step in range(steps):
        batch = {k: v for k, v in batches[step % len(batches)].items() if isinstance(v, torch.Tensor)}
        _, loss, _ = network(**batch, **kwargs)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    return losses


def run(folder: str, model: str, steps: int) -> dict[str, Any]:
    """The loss of each step."""
    manifest = json.loads(Path(folder, "rayhs-export.json").read_text())
    layers, size = manifest["layer_ids"][:-1], manifest["options"]["draft_vocab_size"]
    torch.manual_seed(0)
    dataset = ArrowDataset(LENGTH, folder, on_missing="raise", hidden_states_dtype=torch.float32)
    config = AutoConfig.from_pretrained(model)
    t2d, d2t = maps(Path(folder), size, config.vocab_size)
    network = draft(model, layers, size, t2d, d2t).float()
    collate = CollateFn(LENGTH, config.hidden_size, len(layers), torch.float32)
    batches = [collate([dataset[i]]) for i in range(min(len(dataset), 8))]
    return {"losses": train(network, batches, steps)}
