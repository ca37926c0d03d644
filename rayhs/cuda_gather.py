"""Kernels that gather states out of the KV cache of a GPU: one launch a piece, each state read once.

The same without them, by `rayhs.copying.StateCache.gather` and `quantize`, takes a dozen passes over the
states, which is time the forward does not get. Triton comes with torch wherever there is CUDA.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from rayhs.copying import StagedLayout, StateCache
from rayhs.fp8 import LARGEST, LEAST_SCALE

Gather = Callable[[torch.Tensor, int], tuple[torch.Tensor, ...]]
"""Block ids int64 on the device, and how many positions: what `StagedLayout.encode` gives of those."""

_FP8_CAPABILITY = (8, 9)  # older GPUs have no instruction that rounds to float8_e4m3fn


def gatherer(layout: StagedLayout) -> Gather:
    """The fastest way this GPU has to gather pieces of a cache as they are staged."""
    cache = layout.cache
    if not layout.quantizes:
        return lambda blocks, tokens: (_gather(cache, blocks, tokens),)
    if torch.cuda.get_device_capability(cache.tensor.device) >= _FP8_CAPABILITY:
        return lambda blocks, tokens: _gather_quantized(cache, blocks, tokens)
    return lambda blocks, tokens: layout.encode(cache.gather(blocks, tokens))


def _gather(cache: StateCache, blocks: torch.Tensor, tokens: int) -> torch.Tensor:
    states = cache.tensor.new_empty(len(cache.layers), tokens, cache.hidden)
    _gather_kernel[(tokens, len(cache.layers))](cache.tensor, blocks, states, *_geometry(cache, tokens))
    return states


def _gather_quantized(cache: StateCache, blocks: torch.Tensor, tokens: int) -> tuple[torch.Tensor, ...]:
    layers, device = len(cache.layers), cache.tensor.device
    q = torch.empty(layers, tokens, cache.hidden, dtype=torch.float8_e4m3fn, device=device)
    scales, errors = torch.empty(2, layers, tokens, device=device)
    _quantize_kernel[(tokens, layers)](
        cache.tensor, blocks, q, scales, errors, *_geometry(cache, tokens), LARGEST, float(LEAST_SCALE)
    )
    return q, scales, errors


def _geometry(cache: StateCache, tokens: int) -> tuple[int, ...]:
    strides = cache.tensor.stride()
    per_position, per_layer = strides[cache.block_axis], strides[3 - cache.block_axis]
    width = triton.next_power_of_2(cache.hidden)
    return tokens, cache.hidden, strides[0], per_position, per_layer, cache.block_size, width


@triton.jit
def _state(cache, blocks, per_block, per_position, per_layer, block_size: tl.constexpr):
    """Where the state of this program's token and layer begins."""
    token, layer = tl.program_id(0), tl.program_id(1)
    block = tl.load(blocks + token // block_size)
    return cache + block * per_block + (token % block_size) * per_position + layer * per_layer


@triton.jit(do_not_specialize=["tokens"])
def _gather_kernel(
    cache,
    blocks,
    states,
    tokens,
    hidden,
    per_block,
    per_position,
    per_layer,
    block_size: tl.constexpr,
    width: tl.constexpr,
):
    state = _state(cache, blocks, per_block, per_position, per_layer, block_size)
    row = tl.program_id(1).to(tl.int64) * tokens + tl.program_id(0)
    column = tl.arange(0, width)
    inside = column < hidden
    tl.store(states + row * hidden + column, tl.load(state + column, inside), inside)


@triton.jit(do_not_specialize=["tokens"])  # else compiled anew for some lengths
def _quantize_kernel(
    cache,
    blocks,
    q,
    scales,
    errors,
    tokens,
    hidden,
    per_block,
    per_position,
    per_layer,
    block_size: tl.constexpr,
    width: tl.constexpr,
    largest: tl.constexpr,
    least: tl.constexpr,
):
    """As `rayhs.fp8.quantize`, with its roundings: of the division too, which Triton's own `/` leaves open."""
    state = _state(cache, blocks, per_block, per_position, per_layer, block_size)
    row = tl.program_id(1).to(tl.int64) * tokens + tl.program_id(0)
    column = tl.arange(0, width)
    inside = column < hidden
    x = tl.load(state + column, inside, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.math.div_rn(tl.max(tl.abs(x)), largest), least)
    scale += tl.sum(x * 0.0)  # nothing, or NaN where a value is not finite: max passes over a NaN
    scaled = tl.math.div_rn(x, scale)
    rounded = scaled.to(tl.float8e4nv)
    off = scaled - rounded.to(tl.float32)
    norm = tl.maximum(tl.sqrt(tl.sum(scaled * scaled)), least)
    tl.store(q + row * hidden + column, rounded, inside)
    tl.store(scales + row, scale)
    tl.store(errors + row, tl.sqrt(tl.sum(off * off)) / norm)
