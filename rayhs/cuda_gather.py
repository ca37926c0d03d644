"""Kernels that gather states out of the KV cache of a GPU: one launch for many pieces, each state read once.

The same without them, by `rayhs.copying.StateCache.gather` and `quantize`, takes a dozen passes over the
states, which is time the forward does not get. Triton comes with torch wherever there is CUDA.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import triton
import triton.language as tl

from rayhs.copying import StagedLayout, StateCache
from rayhs.fp8 import LARGEST, LEAST_SCALE

Gather = Callable[[torch.Tensor, Sequence[int]], list[tuple[torch.Tensor, ...]]]
"""What `StagedLayout.encode` gives of each piece, for a table of all pieces' blocks and each one's tokens.

The table is int64 `[blocks, 4]` on the device: id of the block; tokens of the pieces before its own; tokens of its
own; and which of these is the block's first.
"""

_FP8_CAPABILITY = (8, 9)  # older GPUs have no instruction that rounds to float8_e4m3fn


def gatherer(layout: StagedLayout) -> Gather:
    """The fastest way this GPU has to gather pieces of a cache as they are staged."""
    cache = layout.cache
    if not layout.quantizes:
        return lambda table, tokens: [(states,) for states in _gather(cache, table, tokens)]
    if torch.cuda.get_device_capability(cache.tensor.device) >= _FP8_CAPABILITY:
        return lambda table, tokens: _gather_quantized(cache, table, tokens)
    return lambda table, tokens: [layout.encode(states) for states in _gather(cache, table, tokens)]


def _gather(cache: StateCache, table: torch.Tensor, tokens: Sequence[int]) -> list[torch.Tensor]:
    layers = len(cache.layers)
    states = cache.tensor.new_empty(sum(tokens) * layers, cache.hidden)
    _gather_kernel[_grid(cache, table)](cache.tensor, table, states, *_geometry(cache))
    return [part.view(layers, -1, cache.hidden) for part in _split(states, layers, tokens)]


def _gather_quantized(cache: StateCache, table: torch.Tensor, tokens: Sequence[int]) -> list[tuple[torch.Tensor, ...]]:
    layers, device, rows = len(cache.layers), cache.tensor.device, sum(tokens) * len(cache.layers)
    q = torch.empty(rows, cache.hidden, dtype=torch.float8_e4m3fn, device=device)
    scales, errors = torch.empty(2, rows, device=device)
    _quantize_kernel[_grid(cache, table)](
        cache.tensor, table, q, scales, errors, *_geometry(cache), LARGEST, float(LEAST_SCALE)
    )
    shapes = ((layers, -1, cache.hidden), (layers, -1), (layers, -1))
    pieces = zip(*(_split(whole, layers, tokens) for whole in (q, scales, errors)), strict=True)
    return [tuple(part.view(shape) for part, shape in zip(piece, shapes, strict=True)) for piece in pieces]


def _split(whole: torch.Tensor, layers: int, tokens: Sequence[int]) -> tuple[torch.Tensor, ...]:
    parts: tuple[torch.Tensor, ...] = whole.split([layers * count for count in tokens])
    return parts


def _grid(cache: StateCache, table: torch.Tensor) -> tuple[int, int]:
    return len(table) * cache.block_size, len(cache.layers)


def _geometry(cache: StateCache) -> tuple[int, ...]:
    strides = cache.tensor.stride()
    per_position, per_layer = strides[cache.block_axis], strides[3 - cache.block_axis]
    return cache.hidden, strides[0], per_position, per_layer, cache.block_size, triton.next_power_of_2(cache.hidden)


@triton.jit
def _rows(table, block_size: tl.constexpr):
    """This program's block and position in it, its row of the output, and whether it has one."""
    entry = table + (tl.program_id(0) // block_size) * 4
    position = tl.program_id(0) % block_size
    tokens, token = tl.load(entry + 2), tl.load(entry + 3) + position
    row = tl.load(entry + 1) * tl.num_programs(1) + tl.program_id(1) * tokens + token
    return tl.load(entry), position, row, token < tokens


@triton.jit
def _gather_kernel(
    cache,
    table,
    states,
    hidden,
    per_block,
    per_position,
    per_layer,
    block_size: tl.constexpr,
    width: tl.constexpr,
):
    block, position, row, exists = _rows(table, block_size)
    state = cache + block * per_block + position * per_position + tl.program_id(1) * per_layer
    column = tl.arange(0, width)
    inside = (column < hidden) & exists
    tl.store(states + row * hidden + column, tl.load(state + column, inside), inside)


@triton.jit
def _quantize_kernel(
    cache,
    table,
    q,
    scales,
    errors,
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
    block, position, row, exists = _rows(table, block_size)
    state = cache + block * per_block + position * per_position + tl.program_id(1) * per_layer
    column = tl.arange(0, width)
    inside = (column < hidden) & exists
    x = tl.load(state + column, inside, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.math.div_rn(tl.max(tl.abs(x)), largest), least)
    scale += tl.sum(x * 0.0)  # nothing, or NaN where a value is not finite: max passes over a NaN
    scaled = tl.math.div_rn(x, scale)
    rounded = scaled.to(tl.float8e4nv)
    off = scaled - rounded.to(tl.float32)
    norm = tl.maximum(tl.sqrt(tl.sum(scaled * scaled)), least)
    tl.store(q + row * hidden + column, rounded, inside)
    tl.store(scales + row, scale, exists)
    tl.store(errors + row, tl.sqrt(tl.sum(off * off)) / norm, exists)
