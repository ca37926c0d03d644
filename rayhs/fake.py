"""An engine without a model: states are a fixed function of token, position and layer.

It stages samples exactly as the connector does, so everything behind the engine runs for real. The
model name ``fake/<layers>x<hidden>`` selects it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np

from rayhs.codec import STATE_DTYPES, Array, build_header, staged_specs
from rayhs.errors import SampleError
from rayhs.staging import StagingArea

_TABLE_ROWS = 1021  # prime, so that (token, position, layer) rarely meet in one row
_TABLES: dict[tuple[int, str], Array] = {}

REFUSED_TOKEN = 666
"""A prompt with this token id is refused, as an engine refuses a request."""


def fake_states(token_ids: Sequence[int], layer: int, hidden: int, dtype: str = "float32") -> Array:
    """The states `[tokens, hidden]` the fake engine gives a prompt at layer id ``layer``."""
    rows = (np.asarray(token_ids, np.int64) * 31 + np.arange(len(token_ids)) * 17 + layer * 7) % _TABLE_ROWS
    states: Array = _table(hidden, dtype)[rows]
    return states


def _table(hidden: int, dtype: str) -> Array:
    if (hidden, dtype) not in _TABLES:
        values = np.random.default_rng(hidden).standard_normal((_TABLE_ROWS, hidden), np.float32)
        _TABLES[hidden, dtype] = values.astype(STATE_DTYPES[dtype])
    return _TABLES[hidden, dtype]


class FakeEngine:
    """Same methods as `rayhs.engine.VllmEngine`."""

    def __init__(self, area: StagingArea, layers: Sequence[int], hidden: int, dtype: str, generated: int = 0) -> None:
        self._area, self._layers, self._hidden, self._dtype = area, tuple(layers), hidden, dtype
        self._generated = generated

    async def start(self) -> None:
        return None

    async def extract(self, key: str, token_ids: Sequence[int]) -> None:
        if REFUSED_TOKEN in token_ids:
            raise SampleError(f"refused by the engine: token {REFUSED_TOKEN}")
        await asyncio.to_thread(self._stage, key, [*token_ids, *range(self._generated)])

    def _stage(self, key: str, token_ids: list[int]) -> None:
        specs = staged_specs(self._layers, self._hidden, self._dtype, len(token_ids))
        header = build_header(specs, {"engine": "fake"})
        staged = self._area.create(key, len(header) + sum(spec.nbytes for spec in specs))
        memory = memoryview(staged.buffer)
        memory[: len(header)] = header
        rows: list[Array] = [fake_states(token_ids, k, self._hidden, self._dtype) for k in self._layers]
        position = len(header)
        for array in [*rows, np.asarray(token_ids, np.int32)]:
            memory[position : position + array.nbytes] = array.view(np.uint8).reshape(-1).data
            position += array.nbytes
        staged.publish()

    async def stop(self) -> None:
        return None
