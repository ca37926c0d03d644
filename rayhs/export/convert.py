"""What every exporter does with layers and tensors: conversions that have ruined others' runs, each in one place."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rayhs.codec import Array, TensorSpec, build_header
from rayhs.errors import ConfigError
from rayhs.reading.sample import Sample

if TYPE_CHECKING:
    from rayhs.dataset import Dataset


def auxiliary_layers(dataset: Dataset, wanted: Sequence[int] | None) -> tuple[int, ...]:
    """The layers below the last that are exported: ``wanted``, or all of the dataset, ascending.

    Raises:
        ConfigError: one that is not stored, the last one, or none.
    """
    last = dataset.info.num_layers
    stored = [layer for layer in dataset.info.layers if layer != last]
    chosen = tuple(sorted(set(stored if wanted is None else wanted)))
    if unknown := [layer for layer in chosen if layer not in stored]:
        raise ConfigError(f"layers: {unknown[0]} is not one of {stored}, the layers stored below the last ({last})")
    if not chosen:
        raise ConfigError(f"no layer below the last is stored; extract with layers: [eagle3, {last}]")
    return chosen


def last_layer(dataset: Dataset, consumer: str) -> int:
    """Layer id n, the residual stream before the final norm; raises ConfigError where it is not stored."""
    last = dataset.info.num_layers
    if last not in dataset.info.layers:
        raise ConfigError(
            f"{consumer} needs layer {last}, the last before the final norm; the dataset has {dataset.info.layers}: "
            "extract again with it (layers: [eagle3, last])"
        )
    return last


def zero_based(layers: Sequence[int]) -> list[int]:
    """The ids of the same states where k means the output of decoder layer k, counted from 0; -1 is the embeddings."""
    return [layer - 1 for layer in layers]


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
