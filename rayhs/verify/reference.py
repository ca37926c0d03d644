"""Compute chosen samples again with transformers in float32 and compare; torch is imported only here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from rayhs.codec import FP8, Array
from rayhs.errors import ConfigError
from rayhs.layout import DatasetRecord
from rayhs.reading.shard_reader import ShardReader
from rayhs.store import Store

if TYPE_CHECKING:
    import torch

EXACT_LIMIT = 1e-4
HALF_LIMIT = 2e-2
# Rounding alone is 2.6e-2 on average, and 1/17 where every value lies half way over a power of two.
FP8_LIMIT = 1 / 17 + HALF_LIMIT


@dataclass(frozen=True)
class ReferenceReport:
    """Largest ``||stored - reference|| / ||reference||`` a layer over the samples compared."""

    model: str
    samples: tuple[str, ...]
    errors: dict[int, float]
    limit: float

    @property
    def over_limit(self) -> list[int]:
        # Written so that a NaN counts as over the limit.
        return [layer for layer, error in self.errors.items() if not error <= self.limit]

    def to_dict(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "samples": list(self.samples),
            "limit": self.limit,
            "relative_error": {str(layer): error for layer, error in self.errors.items()},
        }


def compare_with_reference(
    store: Store, record: DatasetRecord, rows: Sequence[Mapping[str, Any]], model: str
) -> ReferenceReport:
    """Compare the stored states of the samples of index ``rows`` with ``model``, one sample at a time.

    Layer ids below ``n`` are compared with transformers' ``hidden_states``, id ``n`` with the input
    of the final norm. The limit is 1e-4 where engine and storage are float32, else 2e-2, and 1/17 more
    where storage is float8_e4m3fn.

    Raises:
        ConfigError: no good sample, a model that can't be loaded, or one of another size.
        FormatError, StoreError: a sample can't be read.
    """
    if not rows:
        raise ConfigError("--reference: the dataset has no good sample to compare")
    network, norm = _load(record, model)
    reader = ShardReader(store, record, record.layers)
    errors = dict.fromkeys(record.layers, 0.0)
    for row in rows:
        stored = reader.read(row["shard"], row["index"], row["token_start"], row["num_tokens"])
        expected = _states(network, norm, stored.token_ids, record)
        for layer, states in stored.engine_states(record.engine_dtype).items():
            errors[layer] = float(np.fmax(errors[layer], relative_error(states, expected[layer])))
            if not np.isfinite(states.astype(np.float32)).all():
                errors[layer] = float("inf")
    names = tuple(str(row["sample_id"]) for row in rows)
    return ReferenceReport(model, names, errors, _limit(record))


def _limit(record: DatasetRecord) -> float:
    if record.dtype == FP8:
        return FP8_LIMIT
    return EXACT_LIMIT if record.dtype == record.engine_dtype == "float32" else HALF_LIMIT


def token_errors(stored: Array, reference: Array) -> Array:
    """``||stored - reference|| / ||reference||`` of each token of `[tokens, hidden]`: float64 `[tokens]`."""
    a, b = stored.astype(np.float64), reference.astype(np.float64)
    errors: Array = np.linalg.norm(a - b, axis=-1) / np.maximum(np.linalg.norm(b, axis=-1), 1e-30)
    return errors


def relative_error(stored: Array, reference: Array) -> float:
    """``||stored - reference|| / ||reference||`` over all tokens, in float64."""
    a, b = stored.astype(np.float64), reference.astype(np.float64)
    return float(np.linalg.norm(a - b) / max(float(np.linalg.norm(b)), 1e-30))


def final_norm(network: torch.nn.Module) -> torch.nn.Module:
    """The norm after the last decoder layer: the last norm of the base model outside any layer list.

    Raises:
        ConfigError: there is none.
    """
    import torch

    base = getattr(network, "base_model", network)
    inside = tuple(name for name, module in base.named_modules() if isinstance(module, torch.nn.ModuleList))
    norms = [
        module
        for name, module in base.named_modules()
        if "norm" in type(module).__name__.lower() and not any(name.startswith(f"{i}.") for i in inside)
    ]
    if not norms:
        raise ConfigError(f"--reference: no final norm found in {type(network).__name__}")
    return norms[-1]


def _load(record: DatasetRecord, model: str) -> tuple[Any, torch.nn.Module]:
    import torch
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    revision = record.revision if model == record.model else None
    try:
        # Left out, trust_remote_code makes transformers ask on the terminal.
        network = AutoModelForCausalLM.from_pretrained(
            model, revision=revision, dtype=torch.float32, trust_remote_code=False
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise ConfigError(f"--reference {model}: {' '.join(str(error).split())[:200]}") from None
    config = network.config.get_text_config()
    size = (config.num_hidden_layers, config.hidden_size)
    if size != (record.num_layers, record.hidden_size):
        raise ConfigError(
            f"--reference {model}: {size[0]} layers of {size[1]}, "
            f"the dataset is of {record.num_layers} layers of {record.hidden_size}"
        )
    network = network.to("cuda" if torch.cuda.is_available() else "cpu").eval()
    return network, final_norm(network)


def _states(network: Any, norm: torch.nn.Module, token_ids: Array, record: DatasetRecord) -> dict[int, Array]:
    import torch

    ids = torch.from_numpy(token_ids.astype(np.int64)).unsqueeze(0).to(network.device)
    with torch.inference_mode(), _input_of(norm) as seen:
        states = network(input_ids=ids, output_hidden_states=True, use_cache=False).hidden_states
    wanted = {k: states[k] if k < record.num_layers else seen[-1] for k in record.layers}
    return {k: state[0].float().cpu().numpy() for k, state in wanted.items()}


@contextmanager
def _input_of(module: torch.nn.Module) -> Iterator[list[Any]]:
    seen: list[Any] = []
    hook = module.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].clone()))
    try:
        yield seen
    finally:
        hook.remove()
