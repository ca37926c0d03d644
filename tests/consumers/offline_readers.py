"""Readers of offline features, written from what their consumers do; numpy and torch, nothing of rayhs.

SpecForge `specforge/runtime/data_plane/offline_reader.py`, `algorithms/eagle3/data.py`, `algorithms/common/
hidden_states_data.py`; Model-Optimizer `modelopt/torch/speculative/eagle/utils.py`; DeepSpec `deepspec/data/
target_cache_dataset.py`; NeMo Automodel `components/datasets/llm/eagle3_cache.py`, `offline_cache.py`.
"""

from __future__ import annotations

import json
import os
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open

Item = dict[str, Any]


def specforge(folder: Path, method: str) -> list[tuple[int, Item]]:
    """Row number and features, in the order SpecForge takes the files."""
    files = [os.path.join(root, name) for root, _, names in os.walk(folder) for name in names]
    files = sorted(file for file in files if file.endswith((".ckpt", ".ckpt.gz")))
    wanted = {
        "eagle3": ("hidden_state", "aux_hidden_state"),
        "dflash": ("hidden_states",),
        "dspark": ("hidden_states", "target_last_hidden_states"),
    }[method]
    items = []
    for file in files:
        group, row = re.fullmatch(r".*/rows_(\d+)-\d+/data_(\d+)\.ckpt", file).groups()  # type: ignore[union-attr]
        assert int(group) == int(row) // 2000 * 2000
        raw = torch.load(file, weights_only=False, mmap=True)
        tokens = raw["input_ids"].shape[0]
        assert raw["input_ids"].shape == raw["loss_mask"].shape == (tokens,)
        for name in wanted:
            assert raw[name].dim() == 3 and raw[name].shape[:2] == (1, tokens)
        items.append((int(row), {key: raw[key] for key in ("input_ids", "loss_mask", *wanted)}))
    return items


def model_optimizer(folder: Path) -> dict[str, Item]:
    items = {}
    for file in folder.rglob("*.pt"):
        raw = torch.load(file, weights_only=True)
        labels = torch.full_like(raw["input_ids"], -100)
        labels[..., :-1] = raw["input_ids"][..., 1:]
        items[raw["conversation_id"]] = {
            "input_ids": raw["input_ids"],
            "base_model_hidden_states": raw["hidden_states"],
            "aux_hidden_states": raw["aux_hidden_states"],
            "loss_mask": raw["loss_mask"].to(raw["input_ids"].dtype),
            "labels": labels,
            "base_hidden_prenorm": bool(raw.get("hidden_states_prenorm", False)),
            "file": file.name,
        }
    return items


class DeepSpecCache:
    RECORD = struct.Struct("<QIIQQQQQ")

    def __init__(self, folder: Path) -> None:
        self.folder, self.manifest = folder, json.loads((folder / "manifest.json").read_text())
        manifest = self.manifest
        assert manifest["version"] == 2 and manifest["index_record_size"] == self.RECORD.size == 56
        dtypes = [manifest[f"{name}_dtype"] for name in ("hidden", "token", "mask")]
        assert dtypes == ["bfloat16", "int32", "uint8"]
        assert manifest["target_layer_ids"] == sorted(manifest["target_layer_ids"]) != []
        assert manifest["num_shards"] == len(manifest["shards"])
        assert [shard["shard_id"] for shard in manifest["shards"]] == list(range(manifest["num_shards"]))
        self.index = (folder / "samples.idx").read_bytes()
        assert len(self.index) == 56 * manifest["num_samples"]

    def __len__(self) -> int:
        return int(self.manifest["num_samples"])

    def __getitem__(self, index: int) -> Item:
        number, shard, length, ids, attention, loss, states, last = self.RECORD.unpack_from(self.index, index * 56)
        assert number == index and length > 0
        data = (self.folder / self.manifest["shards"][shard]["file_name"]).read_bytes()
        hidden, layers = self.manifest["hidden_size"], len(self.manifest["target_layer_ids"])

        def read(dtype: str, offset: int, *shape: int) -> np.ndarray:
            assert offset + np.dtype(dtype).itemsize * int(np.prod(shape)) <= len(data)
            return np.frombuffer(data, dtype, int(np.prod(shape)), offset).reshape(shape).copy()

        assert read("u1", attention, length).all()
        return {
            "shard": shard,
            "input_ids": read("<i4", ids, length),
            "loss_mask": read("u1", loss, length),
            "target_hidden_states": torch.from_numpy(read("<i2", states, length, layers * hidden)).view(torch.bfloat16),
            "target_last_hidden_states": torch.from_numpy(read("<i2", last, length, hidden)).view(torch.bfloat16),
        }


class AutomodelCache:
    COMMON = ("input_ids", "attention_mask", "loss_mask", "aux_hidden_states", "position_mask")

    def __init__(self, folder: Path) -> None:
        self.folder, self.manifest = folder, json.loads((folder / "manifest.json").read_text())
        assert self.manifest["format_version"] == 2
        found = [re.fullmatch(r"shard-(\d{6})\.safetensors", name) for name in os.listdir(folder)]
        shards = sorted(int(match[1]) for match in found if match)
        assert shards == list(range(-(-self.manifest["num_samples"] // self.manifest["shard_size"])))
        self.width = self.manifest["draft_vocab_size"]
        self.compressed = 0 < self.manifest["target_probs_topk"] < self.width
        with safe_open(folder / "target_embeddings.safetensors", "pt") as file:
            self.embeddings = file.get_tensor("weight")

    def __len__(self) -> int:
        return int(self.manifest["num_samples"])

    def __getitem__(self, index: int) -> Item:
        shard, row = divmod(index, self.manifest["shard_size"])
        probabilities = ("target_probs_values", "target_probs_indices") if self.compressed else ("target_probs",)
        with safe_open(self.folder / f"shard-{shard:06d}.safetensors", "pt") as file:
            assert set(file.keys()) == {*self.COMMON, *probabilities}
            item = {key: file.get_slice(key)[row] for key in (*self.COMMON, *probabilities)}
        if self.compressed:
            values, indices = (item.pop(name) for name in probabilities)
            assert indices.dtype == torch.int32
            full = torch.zeros((*values.shape[:-1], self.width), dtype=values.dtype)
            item["target_probs"] = full.scatter_(-1, indices.long(), values)
        return item
