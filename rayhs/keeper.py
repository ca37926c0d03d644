"""One engine, kept running: started when it is needed, and again when it died, within limits."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from rayhs.arrivals import Arrivals
from rayhs.engine import Engine
from rayhs.errors import EngineError
from rayhs.log import logger
from rayhs.parts import StagedParts

_MOST_IN_A_ROW = 15  # finding one prompt that kills takes six
_MOST_DEATHS = 100
_RESTART_PAUSE_S = 2.0


@dataclass(eq=False)
class Running:
    """A started engine and where its samples arrive."""

    engine: Engine
    arrivals: Arrivals
    area: StagedParts
    users: int = 0
    dead: bool = False


class EngineKeeper:
    """One event loop only.

    ``make`` builds an engine, not started, that stages into the area given to it; ``make_area`` a new area
    of that name.
    """

    def __init__(self, make: Callable[[StagedParts], Engine], make_area: Callable[[str], StagedParts]) -> None:
        self._make, self._make_area = make, make_area
        self._running: Running | None = None
        self._lock = asyncio.Lock()
        self._started = 0
        self._deaths = 0
        self._in_a_row = 0

    async def ready(self) -> None:
        """Start the engine if there is none.

        Raises:
            EngineError: the first start failed; or 15 engines in a row died without one sample done, or
                100 in all.
        """
        async with self._lock:
            while self._running is None:
                self._running = await self._start()

    @asynccontextmanager
    async def engine(self) -> AsyncIterator[Running]:
        """The engine, started if there is none; raises EngineError as `ready` does.

        What a dead engine has staged is freed when its last user leaves.
        """
        running = self._running
        while running is None:
            await self.ready()
            running = self._running
        running.users += 1
        try:
            yield running
        finally:
            running.users -= 1
            if running.dead and not running.users:
                shutil.rmtree(running.area.directory, ignore_errors=True)

    async def died(self, running: Running, error: EngineError) -> None:
        """``running`` is dead; the next user gets another."""
        async with self._lock:
            if self._running is running:
                logger.warning("%s", error)
                self._running = None
                running.dead = True
                self._count(error)
                await running.engine.stop()

    @property
    def staging(self) -> Path | None:
        """Where the engine that runs stages its samples."""
        return self._running.area.directory if self._running else None

    def sample_done(self) -> None:
        self._in_a_row = 0

    async def stop(self) -> None:
        async with self._lock:
            if self._running is not None:
                await self._running.engine.stop()
                self._running = None

    async def _start(self) -> Running | None:
        """None when a start failed that may work later."""
        self._refuse_more()
        area = self._make_area(f"engine{self._started + self._deaths}")
        engine = self._make(area)
        try:
            await engine.start()
        except EngineError as error:
            if not self._started:
                raise  # nothing suggests that it would ever start
            shutil.rmtree(area.directory, ignore_errors=True)
            self._count(error)
            await asyncio.sleep(_RESTART_PAUSE_S * self._in_a_row)
            return None
        self._started += 1
        return Running(engine, Arrivals(area, engine.is_dead), area)

    def _count(self, error: EngineError) -> None:
        self._deaths += 1
        self._in_a_row += 1
        self._last = error

    def _refuse_more(self) -> None:
        if self._in_a_row >= _MOST_IN_A_ROW:
            raise EngineError(
                f"the engine died {self._in_a_row} times in a row without one sample done (last: {self._last}); "
                "see the worker's log for why"
            )
        if self._deaths >= _MOST_DEATHS:
            raise EngineError(f"the engine died {self._deaths} times (last: {self._last}); see the worker's log")
