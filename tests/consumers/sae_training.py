"""Runs in the consumers' environment (`run.py`): SAELens' own store, trainer and autoencoder on an export."""

from __future__ import annotations

from typing import Any

import torch
from reading import sae_store
from sae_lens import StandardTrainingSAE, StandardTrainingSAEConfig
from sae_lens.config import LoggingConfig, SAETrainerConfig
from sae_lens.training.sae_trainer import SAETrainer

BATCH = 128


def run(folder: str, steps: int, **settings: Any) -> dict[str, Any]:
    """How much of the states' variance is not explained, before and after."""
    torch.manual_seed(0)
    store = sae_store(folder, **settings)
    states, _ = store.get_raw_llm_batch()
    states = states[states.norm(dim=1) < 10 * states.norm(dim=1).median()]  # without massive activations
    width = settings["hidden"]
    sae = StandardTrainingSAE(StandardTrainingSAEConfig(
        d_in=width, d_sae=2 * width, l1_coefficient=1e-3, normalize_activations="none", dtype="float32", device="cpu"
    ))  # fmt: skip

    def unexplained() -> float:
        with torch.no_grad():
            return float(((sae(states) - states) ** 2).sum() / ((states - states.mean(0)) ** 2).sum())

    before = unexplained()
    config = SAETrainerConfig(
        total_training_samples=steps * BATCH, train_batch_size_samples=BATCH, lr=2e-3, lr_end=2e-3, device="cpu",
        logger=LoggingConfig(log_to_wandb=False),
    )  # fmt: skip
    store.train_batch_size_tokens = BATCH
    SAETrainer(config, sae, store).fit()
    return {"before": before, "after": unexplained()}
