"""Waiting for staged samples: one poll of the staging directory serves every coroutine that waits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from rayhs.errors import EngineError
from rayhs.parts import StagedParts

_POLL_S = 0.003
HANDOVER_TIMEOUT_S = 300.0


class Arrivals:
    """Hands staged samples of one engine to whoever waits for their key. One event loop only."""

    def __init__(self, area: StagedParts, is_dead: Callable[[], bool]) -> None:
        self._area = area
        self._is_dead = is_dead
        self._waiting: dict[str, asyncio.Future[None]] = {}
        self._poller: asyncio.Task[None] | None = None

    async def wait(self, key: str, timeout: float = HANDOVER_TIMEOUT_S) -> list[memoryview]:
        """The staged parts of ``key``, once all have arrived.

        Raises:
            SampleError: its failure was handed over.
            EngineError: the engine died first, or nothing came within ``timeout`` seconds. That is
                never the sample's fault: its request had been answered.
        """
        arrived: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[key] = arrived
        if self._poller is None or self._poller.done():
            self._poller = asyncio.create_task(self._poll())
        try:
            async with asyncio.timeout(timeout):
                await arrived
        except TimeoutError:
            raise EngineError(
                f"the engine answered, but handed no states over within {timeout:.0f} s; "
                f"is {self._area.directory.parent} full?"
            ) from None
        finally:
            self._waiting.pop(key, None)
        return self._area.take(key)

    async def _poll(self) -> None:
        while self._waiting:
            dead = self._is_dead()  # asked before looking: what it handed over until then counts
            try:
                for key in self._area.arrivals() & self._waiting.keys():
                    _settle(self._waiting[key], None)
            except OSError as error:
                self._fail_all(EngineError(f"the staging area is gone: {error}"))
            if dead:
                self._fail_all(EngineError("the engine died before it handed over its states"))
            await asyncio.sleep(_POLL_S)

    def _fail_all(self, error: EngineError) -> None:
        for waiting in self._waiting.values():
            _settle(waiting, error)


def _settle(waiting: asyncio.Future[None], error: EngineError | None) -> None:
    if waiting.done():
        return
    if error is None:
        waiting.set_result(None)
    else:
        waiting.set_exception(error)
