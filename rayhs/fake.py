"""An engine without a model: states are a fixed function of token, position and layer.

It stages samples exactly as the connector does, so everything behind the engine runs for real. The
model name ``fake/<layers>x<hidden>`` selects it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from rayhs.arena import NoRoomNow
from rayhs.codec import FP8, STATE_DTYPES, Array, build_header, staged_specs
from rayhs.errors import EngineError, SampleError
from rayhs.fp8 import quantize
from rayhs.parts import StagedParts
from rayhs.staging import StagingArea

_BLOCKED_PAUSE_S = 0.05
_THREADS = 8
_TABLE_ROWS = 1021  # prime, so that (token, position, layer) rarely meet in one row
_TABLES: dict[tuple[int, str], Array] = {}

REFUSED_TOKEN = 666
"""A prompt with this token id is refused, as an engine refuses a request."""
KILLER_TOKEN = 667
"""A prompt with this token id kills the engine, with all that run beside it."""
NAN_TOKEN = 668
"""A prompt with this token id has a state that is not a number."""


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

    def __init__(
        self,
        area: StagedParts,
        layers: Sequence[int],
        hidden: int,
        dtype: str,
        generated: int = 0,
        quantizes: bool = False,
    ) -> None:
        self._area, self._layers, self._hidden, self._dtype = area, tuple(layers), hidden, dtype
        self._generated, self._quantizes = generated, quantizes
        self._dead = False
        self._threads = ThreadPoolExecutor(_THREADS)

    async def start(self) -> None:
        for area in self._area.areas:
            await asyncio.to_thread(area.preallocate)

    def is_dead(self) -> bool:
        return self._dead

    async def extract(self, key: str, token_ids: Sequence[int]) -> None:
        if REFUSED_TOKEN in token_ids:
            raise SampleError(f"refused by the engine: token {REFUSED_TOKEN}")
        self._dead = self._dead or KILLER_TOKEN in token_ids
        if self._dead:
            raise EngineError(f"the engine died: token {KILLER_TOKEN}")
        all_ids = [*token_ids, *range(self._generated)]
        loop = asyncio.get_running_loop()
        for part in zip(self._area.areas, self._area.shares, strict=True):
            while not await loop.run_in_executor(self._threads, self._stage, key, all_ids, *part):  # noqa: ASYNC110 - no event tells of room
                await asyncio.sleep(_BLOCKED_PAUSE_S)

    def _stage(self, key: str, token_ids: list[int], area: StagingArea, layers: tuple[int, ...]) -> bool:
        """False while the file system has no room."""
        dtype = FP8 if self._quantizes else self._dtype
        specs = staged_specs(layers, self._hidden, dtype, len(token_ids))
        header = build_header(specs, {"engine": "fake"})
        try:
            staged = area.create(key, len(header) + sum(spec.nbytes for spec in specs))
        except NoRoomNow:
            return False
        memory = staged.buffer
        memory[: len(header)] = header
        position = len(header)
        for array in [*self._staged(token_ids, layers), np.asarray(token_ids, np.int32)]:
            memory[position : position + array.nbytes] = array.view(np.uint8).reshape(-1).data
            position += array.nbytes
        staged.publish()
        return True

    def _staged(self, token_ids: list[int], layers: tuple[int, ...]) -> list[Array]:
        states = [fake_states(token_ids, k, self._hidden, self._dtype) for k in layers]
        if NAN_TOKEN in token_ids and self._layers[-1] in layers:
            states[-1] = states[-1].copy()
            states[-1][token_ids.index(NAN_TOKEN), 0] = np.nan
        if not self._quantizes:
            return states
        q, scales, errors = zip(*map(quantize, states), strict=True)
        return [*q, *scales, *errors]

    async def stop(self) -> None:
        self._dead = True
        # What is cancelled in the loop goes on in its thread, and must not write into a folder being removed.
        await asyncio.to_thread(self._threads.shutdown, cancel_futures=True)
