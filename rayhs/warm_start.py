"""A measured run begins with warm engines, in all replicas at once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from rayhs.keeper import EngineKeeper
from rayhs.shards import PlannedSample

Begin = Callable[[], Awaitable[None]]
_PROMPTS = 8


class WarmStart:
    """Runs a few prompts through an engine, then awaits ``begin``; for the first caller only, others wait for it."""

    def __init__(self, keeper: EngineKeeper, begin: Begin) -> None:
        self._keeper, self._begin = keeper, begin
        self._lock = asyncio.Lock()
        self._done = False

    async def wait(self, planned: Sequence[PlannedSample]) -> None:
        """Raises EngineError, and SampleError where the engine refuses one of the prompts."""
        async with self._lock:
            if not self._done:
                await self._warm_up(planned[:_PROMPTS])
                await self._begin()
                self._done = True

    async def _warm_up(self, planned: Sequence[PlannedSample]) -> None:
        async with self._keeper.engine() as running:
            for number, sample in enumerate(planned):
                key = f"warm-up.{number}"
                # Reversed: nothing of it is in the prefix cache later.
                await running.engine.extract(key, sample.token_ids[::-1].tolist())
                await running.arrivals.wait(key)
                running.area.release(key)
