"""What the consumers' own packages read from an export, as arrays in an npz file: ``<row>/<name>``, or ``<name>``.

Runs in the consumers' environment (`run.py`). Numbers of any float dtype are kept as float32, which holds them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch


def save(out: str, arrays: Mapping[str, Any]) -> dict[str, str]:
    def plain(value: Any) -> np.ndarray:
        if isinstance(value, torch.Tensor):
            value = (value.float() if value.is_floating_point() else value).numpy()
        return np.asarray(value)

    np.savez(out, **{name.replace("/", "|"): plain(value) for name, value in arrays.items()})
    return {"out": out}


def speculators(folder: str, out: str) -> Any:
    from speculators.train.data import ArrowDataset

    dataset = ArrowDataset(8192, folder, on_missing="raise", hidden_states_dtype=torch.float32)
    arrays = {}
    for i in range(len(dataset)):
        item = dataset[i]
        assert isinstance(item, dict), f"row {i}: {item}"
        arrays[f"{i}/ids"], arrays[f"{i}/mask"] = item["input_ids"], item["loss_mask"]
        arrays[f"{i}/below"], arrays[f"{i}/last"] = item["hidden_states"], item["verifier_last_hidden_states"]
    return save(out, arrays)


def vllm(folder: str, out: str) -> Any:
    from safetensors import safe_open

    arrays: dict[str, Any] = {
        "sample_ids": [json.loads(line) for line in Path(folder, "sample_ids.jsonl").read_text().splitlines()]
    }
    for i in range(len(arrays["sample_ids"])):
        with safe_open(f"{folder}/{i}.safetensors", "pt") as file:
            arrays[f"{i}/ids"], arrays[f"{i}/states"] = file.get_tensor("token_ids"), file.get_tensor("hidden_states")
    return save(out, arrays)


def sae_store(folder: str, hook: str, context: int, hidden: int, batch: int = 1) -> Any:
    from sae_lens.config import CacheActivationsRunnerConfig
    from sae_lens.training.activations_store import ActivationsStore

    config = CacheActivationsRunnerConfig(
        dataset_path="", model_name="", model_batch_size=batch, hook_name=hook, d_in=hidden, training_tokens=10**6,
        context_size=context, new_cached_activations_path=folder, device="cpu",
    )  # fmt: skip
    return ActivationsStore.from_config(None, config)  # type: ignore[arg-type]  # cached: no model runs


def sae_lens(folder: str, out: str, **settings: Any) -> Any:
    store = sae_store(folder, **settings)
    batches = []
    while True:
        try:
            batches.append(store.get_raw_llm_batch(raise_on_epoch_end=True))
        except StopIteration:
            break
    states, ids = (torch.cat(part) for part in zip(*batches, strict=True))
    return save(out, {"states": states, "ids": ids.long()})


def huggingface(folder: str, out: str) -> Any:
    from datasets import load_from_disk

    return save(out, {f"{i}/{name}": v for i, row in enumerate(load_from_disk(folder)) for name, v in row.items()})


def webdataset(folder: str, out: str, urls: str) -> Any:
    import webdataset as wds

    arrays: dict[str, Any] = {}
    for i, sample in enumerate(wds.WebDataset(f"{folder}/{urls}", shardshuffle=False).decode()):
        about = sample.pop("json")
        arrays |= {f"{i}/{name}": value for name, value in about.items()}
        arrays |= {f"{i}/{name.removesuffix('.pth')}": value for name, value in sample.items() if name[:2] != "__"}
        assert sample["__key__"] == f"{about['index']:09d}" and isinstance(sample["token_ids.pth"], torch.Tensor)
    return save(out, arrays)
