"""Tiny seeded models and their states by transformers float32: the numeric oracle."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

VOCAB = 512


def _configs(hidden_size: int, positions: int) -> dict[str, Any]:
    from transformers import LlamaConfig, Qwen3Config, Qwen3MoeConfig

    common: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": hidden_size,
        "intermediate_size": 2 * hidden_size,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": positions,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    return {
        "llama": LlamaConfig(**common),
        "qwen3": Qwen3Config(**common),
        "qwen3_moe": Qwen3MoeConfig(
            **common, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64, norm_topk_prob=True
        ),
    }


FAMILIES = ("llama", "qwen3", "qwen3_moe")


def save_tiny_model(family: str, folder: Path, hidden_size: int = 64, positions: int = 1024) -> Path:
    """Seeded random float32 weights large enough that states differ clearly between layers."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(_configs(hidden_size, positions)[family], dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4.0)
    model.save_pretrained(folder)
    return folder


class Oracle:
    """transformers, by default in float32 on the CPU: the residual stream at each layer id, id n before the final norm.

    States come back in float32.
    """

    def __init__(self, folder: str | Path, dtype: str = "float32", device: str = "cpu") -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self._torch = torch
        self.model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=getattr(torch, dtype), attn_implementation="eager"
        ).eval()
        self.model.to(device)
        self.num_layers = self.model.config.num_hidden_layers

    def states(self, token_ids: Sequence[int]) -> dict[int, np.ndarray]:
        captured: list[Any] = []
        hook = self.model.model.norm.register_forward_pre_hook(lambda _, inputs: captured.append(inputs[0]))
        with self._torch.no_grad():
            ids = self._torch.tensor([list(token_ids)], device=self.model.device)
            out = self.model(ids, output_hidden_states=True)
        hook.remove()
        layers = [*out.hidden_states[: self.num_layers], captured[0]]
        return {k: state[0].float().cpu().numpy() for k, state in enumerate(layers)}

    def greedy(self, token_ids: Sequence[int], count: int) -> list[int]:
        ids = list(token_ids)
        for _ in range(count):
            with self._torch.no_grad():
                logits = self.model(self._torch.tensor([ids])).logits
            ids.append(int(logits[0, -1].argmax()))
        return ids


def relative_error(got: np.ndarray, want: np.ndarray) -> float:
    got32, want32 = got.astype(np.float32), want.astype(np.float32)
    return float(np.linalg.norm(got32 - want32) / np.linalg.norm(want32))


def random_prompts(lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCAB, n).tolist() for n in lengths]
