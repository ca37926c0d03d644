"""Compute chosen samples again with transformers in float32 and compare; torch is imported only here."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from rayhs.codec import FP8, STATE_DTYPES, Array
from rayhs.config import fake_shape
from rayhs.errors import ConfigError, one_line
from rayhs.final_norm import final_norm
from rayhs.fp8 import quantize
from rayhs.layout import DatasetRecord
from rayhs.reading.shard_reader import ShardReader
from rayhs.store import Store

if TYPE_CHECKING:
    import torch

# Averages over a sample's tokens. transformers' own bfloat16 is off by 1.9e-2 after SmolLM2's 30 layers, and vLLM's
# float32 by 2e-3 on a GPU, where attention is computed in TF32. Another layer or token is off by 1.
EXACT_LIMIT = 1e-4
TF32_LIMIT = 5e-3
HALF_LIMIT = 5e-2
TOKEN_LIMIT = 0.5  # of any one token; massive activations beside it cost 0.25 in transformers' own bfloat16
# Rounding alone is 2.6e-2 on average, and 1/17 where every value lies half way over a power of two.
FP8_LIMIT = 1 / 17 + HALF_LIMIT


@dataclass(frozen=True)
class ReferenceReport:
    """How far stored states are off, ``||stored - reference|| / ||reference||`` of a token, by layer.

    ``errors`` are averages over the tokens of a sample, of the worst of the samples compared; ``worst`` those of the
    worst token. ``rounding`` is what storing the reference's own states in the dataset's dtype would cost, on average
    over the tokens of those samples. One token at a time, as the norm of a whole sample is that of its few tokens
    with massive activations (https://arxiv.org/abs/2402.17762).
    """

    model: str
    samples: tuple[str, ...]
    errors: dict[int, float]
    worst: dict[int, float]
    rounding: dict[int, float]
    limit: float
    token_limit: float = TOKEN_LIMIT

    @property
    def over_limit(self) -> list[int]:
        # Written so that a NaN counts as over the limit.
        return [k for k, e in self.errors.items() if not (e <= self.limit and self.worst[k] <= self.token_limit)]

    def to_dict(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "samples": list(self.samples),
            "limit": self.limit,
            "token_limit": self.token_limit,
            "relative_error": {str(layer): error for layer, error in self.errors.items()},
            "worst_token_error": {str(layer): error for layer, error in self.worst.items()},
            "rounding_error": {str(layer): error for layer, error in self.rounding.items()},
        }


def compare_with_reference(
    store: Store, record: DatasetRecord, rows: Sequence[Mapping[str, Any]], model: str
) -> ReferenceReport:
    """Compare the stored states of the samples of index ``rows`` with ``model``, one sample at a time.

    Layer ids below ``n`` are compared with transformers' ``hidden_states``, id ``n`` with the input
    of the final norm. The limit is 1e-4 where engine and storage are float32 (5e-3 where the engine's torch was no
    CPU build), else 5e-2, and 1/17 more where storage is float8_e4m3fn; no token may be off by more than 0.5.

    Raises:
        ConfigError: no good sample, or a model that can't be loaded.
        FormatError, StoreError: a sample can't be read.
    """
    if not rows:
        raise ConfigError("--reference: the dataset has no good sample to compare")
    network, norm = _load(record, model)
    reader = ShardReader(store, record, record.layers)
    errors, worst = dict.fromkeys(record.layers, 0.0), dict.fromkeys(record.layers, 0.0)
    rounding: dict[int, list[Array]] = {layer: [] for layer in record.layers}
    for row in rows:
        stored = reader.read(row["shard"], row["index"], row["token_start"], row["num_tokens"])
        expected = _states(network, norm, stored.token_ids, record)
        for layer, states in stored.engine_states(record.engine_dtype).items():
            off = token_errors(states, expected[layer])
            # Where either is NaN, so is the result.
            errors[layer] = float(np.maximum(errors[layer], off.mean()))
            worst[layer] = float(np.maximum(worst[layer], off.max()))
            rounding[layer].append(rounding_errors(expected[layer], record.dtype))
    names = tuple(str(row["sample_id"]) for row in rows)
    rounded = {layer: float(np.concatenate(parts).mean()) for layer, parts in rounding.items()}
    return ReferenceReport(model, names, errors, worst, rounded, _limit(record))


def _limit(record: DatasetRecord) -> float:
    if record.dtype == FP8:
        return FP8_LIMIT
    if not record.dtype == record.engine_dtype == "float32":
        return HALF_LIMIT
    return EXACT_LIMIT if record.versions.get("torch", "+cpu").endswith("+cpu") else TF32_LIMIT


def token_errors(stored: Array, reference: Array) -> Array:
    """``||stored - reference|| / ||reference||`` of each token of `[tokens, hidden]`: float64 `[tokens]`."""
    a, b = stored.astype(np.float64), reference.astype(np.float64)
    errors: Array = np.linalg.norm(a - b, axis=-1) / np.maximum(np.linalg.norm(b, axis=-1), 1e-30)
    return errors


def rounding_errors(states: Array, dtype: str) -> Array:
    """What storing float32 ``states`` `[tokens, hidden]` in ``dtype`` costs, as `token_errors`: `[tokens]`."""
    if dtype == FP8:
        return quantize(states)[2]
    with np.errstate(over="ignore"):
        return token_errors(states.astype(STATE_DTYPES[dtype]), states)


def refuse_unlike(record: DatasetRecord, model: str) -> None:
    """Look at the model's config alone.

    Raises:
        ConfigError: it can't be read, or is that of a model of another size.
    """
    from transformers import AutoConfig

    if fake_shape(model):
        raise ConfigError(f"--reference {model}: the fake engine is no transformers model")
    if model.startswith(("/", ".", "~")) and not os.path.isdir(model):
        raise ConfigError(f"--reference {model}: no such folder")
    try:
        config = AutoConfig.from_pretrained(model, revision=_revision(record, model), trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--reference {model}: {one_line(error, 200)}") from None
    config = config.get_text_config()
    size = (config.num_hidden_layers, config.hidden_size)
    if size != (record.num_layers, record.hidden_size):
        raise ConfigError(
            f"--reference {model}: {size[0]} layers of {size[1]}, "
            f"the dataset is of {record.num_layers} layers of {record.hidden_size}"
        )


def _revision(record: DatasetRecord, model: str) -> str | None:
    return record.revision if model == record.model else None


def _load(record: DatasetRecord, model: str) -> tuple[Any, torch.nn.Module]:
    import torch
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    try:
        # Left out, trust_remote_code makes transformers ask on the terminal.
        network = AutoModelForCausalLM.from_pretrained(
            model, revision=_revision(record, model), dtype=torch.float32, trust_remote_code=False
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise ConfigError(f"--reference {model}: {one_line(error, 200)}") from None
    network = network.to("cuda" if torch.cuda.is_available() else "cpu").eval()
    return network, final_norm(network)[1]


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
