"""One sample read back: numpy arrays, torch tensors on request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import numpy as np

from rayhs.codec import Array
from rayhs.reading.plan_reader import PlanReader

if TYPE_CHECKING:
    import torch


V = TypeVar("V")


class LayerStates(dict[int, V]):
    """States by layer id; asking for a layer that was not read says which were."""

    def __missing__(self, layer: object) -> NoReturn:
        raise KeyError(f"layer {layer} was not read; this sample has layers {list(self)}")


@dataclass(frozen=True, eq=False)
class Sample:
    """A good sample of a dataset.

    Attributes:
        sample_id: the id column's value, or ``file:row``.
        index: position in the input, counted over all rows, rejected ones included.
        token_ids: int32 `[tokens]`.
        loss_mask: uint8 `[tokens]`; 1 where the loss counts.
        hidden_states: layer id to states `[tokens, hidden]` in the stored dtype
            (``ml_dtypes.bfloat16`` for bfloat16), layers ascending. Those stored in float8_e4m3fn are
            multiplied by their scales, in the engine's dtype; see `quantized`.
        status: always ``"ok"``: other samples have no states and raise SampleError when read.

    Example:
        >>> s = ds[17]
        >>> s.sample_id, s.index, s.status, s.token_ids.tolist(), s.loss_mask.tolist()
        ('row-17', 17, 'ok', [170, 171], [0, 1])
        >>> {layer: states.shape for layer, states in s.hidden_states.items()}
        {2: (2, 8), 15: (2, 8), 27: (2, 8)}
    """

    sample_id: str
    index: int
    token_ids: Array
    loss_mask: Array
    hidden_states: Mapping[int, Array] = field(repr=False)
    status: str
    _plan: PlanReader = field(repr=False)
    _quantized: Mapping[int, tuple[Array, Array]] = field(repr=False)

    @cached_property
    def columns(self) -> dict[str, Any]:
        """The input row's pass-through columns, read from the plan when first asked for.

        Example:
            >>> ds[17].columns
            {'topic': 'topic 17'}
        """
        return self._plan.columns_of(self.index)

    def quantized(self, layer: int) -> tuple[Array, Array]:
        """The states of a layer as they are stored: float8_e4m3fn `[tokens, hidden]`, scales float32 `[tokens]`.

        A token's state is its float8 values times its scale.

        Raises:
            KeyError: a layer that was not read, or of a dataset that is not stored in float8_e4m3fn.

        Example:
            >>> values, scales = rayhs.open("states-fp8")[17].quantized(15)
            >>> values.dtype.name, values.shape, scales.shape
            ('float8_e4m3fn', (2, 8), (2,))
        """
        if not self._quantized:
            raise KeyError(f"layer {layer} is not stored in float8_e4m3fn")
        return self._quantized[layer]

    def torch(self, layer: int | None = None) -> torch.Tensor:
        """`hidden_states` as a torch tensor: one layer `[tokens, hidden]`, or `[tokens, layers, hidden]`.

        The tensor owns its memory.

        Raises:
            KeyError: a layer that was not read, or none was.

        Example:
            >>> ds[17].torch(15).shape, ds[17].torch().shape
            (torch.Size([2, 8]), torch.Size([2, 3, 8]))
        """
        if layer is not None:
            states = self.hidden_states[layer].copy()
        elif not self.hidden_states:
            raise KeyError("no layer was read")
        else:
            states = np.stack(list(self.hidden_states.values()), axis=1)
        return as_tensor(states)


def as_tensor(array: Array) -> torch.Tensor:
    """A torch tensor of the same memory."""
    import torch

    if array.dtype.name == "bfloat16":
        # torch knows no ml_dtypes: carry the bits as 16-bit integers.
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)
