"""What every exporter does with layers and tensors: conversions that have ruined others' runs, each in one place."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rayhs.codec import FP8, STATE_DTYPES, Array, TensorSpec, build_header
from rayhs.errors import ConfigError
from rayhs.layers import refuse_disorder
from rayhs.reading.sample import Sample, as_tensor

if TYPE_CHECKING:
    import torch

    from rayhs.dataset import Dataset
    from rayhs.export.target_model import TargetModel


def auxiliary_layers(dataset: Dataset, wanted: Sequence[int] | None) -> tuple[int, ...]:
    """The layers below the last that are exported: ``wanted``, or all of the dataset, ascending.

    Raises:
        ConfigError: one that is not stored, the last one, none, or ``wanted`` in another order.
    """
    last = dataset.info.num_layers
    stored = [layer for layer in dataset.layers if layer != last]
    chosen = tuple(stored if wanted is None else wanted)
    if unknown := [layer for layer in chosen if layer not in stored]:
        raise ConfigError(f"layers: {unknown[0]} is not one of {stored}, the layers stored below the last ({last})")
    if not chosen:
        raise ConfigError(f"no layer below the last is stored; extract with layers: [eagle3, {last}]")
    refuse_disorder(chosen, "exports")
    return chosen


def eagle3_layers(dataset: Dataset, wanted: Sequence[int] | None, consumer: str) -> tuple[int, ...]:
    """`auxiliary_layers`, which must be three: the drafts of ``consumer`` take no other number."""
    layers = auxiliary_layers(dataset, wanted)
    if len(layers) != 3:
        raise ConfigError(
            f"{consumer}: an EAGLE-3 draft takes 3 layers below the last, these are {list(layers)}; "
            "choose among them (--set layers=[2,15,27]), or extract with layers: [eagle3, last]"
        )
    return layers


def last_layer(dataset: Dataset, consumer: str) -> int:
    """Layer id n, the residual stream before the final norm; raises ConfigError where it is not stored."""
    last = dataset.info.num_layers
    if last not in dataset.layers:
        raise ConfigError(
            f"{consumer} needs layer {last}, the last before the final norm; the dataset has {list(dataset.layers)}: "
            "extract again with it (layers: [eagle3, last])"
        )
    return last


def zero_based(layers: Sequence[int]) -> list[int]:
    """The ids of the same states where k means the output of decoder layer k, counted from 0; -1 is the embeddings."""
    return [layer - 1 for layer in layers]


def state_dtype(dataset: Dataset) -> np.dtype[Any]:
    """Of the states as samples have them: the stored one; of those stored in float8_e4m3fn the engine's."""
    info = dataset.info
    return STATE_DTYPES[info.engine_dtype if info.dtype == FP8 else info.dtype]


def post_norm(model: TargetModel, states: Array, dtype: np.dtype[Any] | None = None) -> Array:
    """Last states `[tokens, hidden]` after the final norm, computed in float32; by default in the dtype they have."""
    return model.normed(states).astype(dtype or states.dtype)


def next_tokens(values: Array) -> Array:
    """``values`` `[tokens, ...]` moved one to the left, a zero last: at each token what belongs to the next one."""
    moved = np.zeros_like(values)
    moved[:-1] = values[1:]
    return moved


def stacked(sample: Sample, layers: Sequence[int]) -> Array:
    """States `[tokens, layers, hidden]` in the order of ``layers``."""
    return np.stack([sample.hidden_states[layer] for layer in layers], axis=1)


def concatenated(sample: Sample, layers: Sequence[int]) -> Array:
    """States `[tokens, layers * hidden]` in the order of ``layers``."""
    return np.concatenate([sample.hidden_states[layer] for layer in layers], axis=1)


def safetensors_bytes(tensors: Mapping[str, Array], metadata: Mapping[str, str] | None = None) -> bytes:
    """A safetensors file; unlike `safetensors.numpy` with bfloat16."""
    arrays = {name: np.ascontiguousarray(array) for name, array in tensors.items()}
    specs = [TensorSpec(name, array.dtype, array.shape) for name, array in arrays.items()]
    header = build_header(specs, metadata or {})
    return b"".join([header, *(array.view(np.uint8).reshape(-1).data for array in arrays.values())])


def as_torch(array: Array) -> torch.Tensor:
    """A tensor of the same numbers, in memory that nothing else writes to."""
    return as_tensor(np.array(array, order="C"))


def torch_bytes(value: Any) -> bytes:
    """What `torch.save` writes."""
    import torch

    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def npy_bytes(array: Array) -> bytes:
    """What `numpy.save` writes."""
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()
