"""Ray, joined or started for a run; and how the replicas of a run are told to stop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

from rayhs.config import RunConfig
from rayhs.errors import ConfigError, RayhsError, one_line
from rayhs.log import logger
from rayhs.ray_threads import end_ray_data

_RAY_STARTS = 3
STOP_WITHIN_S = 20.0
FREE_WITHIN_S = 5.0
END_WITHIN_S = 15.0


class StopSignal:
    """An actor of a run: tells its replicas to hand their shards back, and waits until they have.

    Those of a measured run also wait here for each other before they begin.
    """

    def __init__(self) -> None:
        self._asked = asyncio.Event()
        self._replicas: set[str] = set()
        self._changed = asyncio.Condition()
        self._warm = 0

    async def begin(self, count: int) -> None:
        """Called by a replica that is ready; returns when ``count`` are."""
        async with self._changed:
            self._warm += 1
            self._changed.notify_all()
            await self._changed.wait_for(lambda: self._warm >= count)

    async def enter(self, replica: str) -> bool:
        """Called by a replica before it holds anything; False when the run is over."""
        if not self._asked.is_set():
            self._replicas.add(replica)
        return not self._asked.is_set()

    async def join(self, replica: str) -> None:
        """Called by a replica that has entered; returns when it must stop."""
        self._replicas.add(replica)  # this actor may have been started again since
        await self._asked.wait()

    async def leave(self, replica: str) -> None:
        """Called by a replica that has stopped."""
        async with self._changed:
            self._replicas.discard(replica)
            self._changed.notify_all()

    async def stop(self, within: float) -> bool:
        """Ask all to stop; whether they all have, within so many seconds."""
        self._asked.set()
        try:
            async with asyncio.timeout(within), self._changed:
                await self._changed.wait_for(lambda: not self._replicas)
        except TimeoutError:
            return False
        return True


@contextlib.contextmanager
def graceful_stop() -> Iterator[Any]:
    """A `StopSignal` for the replicas of a run, given at its end, and when the body is interrupted or fails."""
    import ray
    from ray.exceptions import RayError

    # Where its node is lost it starts again, and replicas join again: only the driver's end is an order to stop.
    actor = ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)(StopSignal)
    signals = actor.remote()
    within = STOP_WITHIN_S
    try:
        yield signals
        within = FREE_WITHIN_S  # Ray ends idle replicas by itself
    except RayError:
        within = FREE_WITHIN_S  # some are gone, and can't say so
        raise
    finally:
        with contextlib.suppress(RayError):
            stopped = ray.get(signals.stop.remote(within), timeout=within + 5)
            if not stopped and within == STOP_WITHIN_S:
                logger.warning("not all replicas stopped within %.0f s; their shards are redone", within)
        with contextlib.suppress(RayError):
            ray.kill(signals)  # references to it may live on in Ray Data


@contextlib.contextmanager
def cluster(config: RunConfig) -> Iterator[Callable[[], None]]:
    """A function that joins or starts Ray when it is called first; Ray is left or stopped at the end.

    A Ray that the caller has already joined is used as it is, and left to him.
    """
    joined_before = _is_joined()

    def join() -> None:
        if not _is_joined():
            with _own_sigterm():
                _join_or_start(config.cluster.address)
        _quiet()

    try:
        yield join
    finally:
        if not joined_before and _is_joined():
            _leave()


def _leave() -> None:
    if not end_ray_data(END_WITHIN_S):
        logger.warning("Ray Data did not end within %.0f s; this process stays joined to Ray", END_WITHIN_S)
        return
    with _own_sigterm():
        sys.modules["ray"].shutdown()


def _is_joined() -> bool:
    # A run that finds nothing to extract does not even import Ray.
    return "ray" in sys.modules and bool(sys.modules["ray"].is_initialized())


def _quiet() -> None:
    import ray.data

    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    logging.getLogger("ray.data").setLevel(logging.ERROR)


@contextlib.contextmanager
def _own_sigterm() -> Iterator[None]:
    """Keep the caller's handling of SIGTERM, which ray.init and ray.shutdown replace by an exit without a word."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    except SystemExit:
        # By Ray's handler, in the moments that it stands: the signal was the caller's. Below it absl's has
        # set an alarm that aborts the process three seconds later.
        signal.alarm(0)
        signal.signal(signal.SIGTERM, before)
        signal.raise_signal(signal.SIGTERM)
        raise
    finally:
        signal.signal(signal.SIGTERM, before)


def _join_or_start(address: str) -> None:
    # Ray's C++ side writes warnings about our actors' arguments to the terminal, over the progress.
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
    import ray

    for remaining in reversed(range(_RAY_STARTS)):
        try:
            # A Ray of our own has no dashboard: on a busy host its agent is late, and the node gives up.
            ray.init(
                address=None if address == "auto" else address,
                include_dashboard=False if address == "local" else None,
                log_to_driver=False,
                logging_level=logging.ERROR,
            )
            return
        except Exception as error:  # a node that does not come up is a bare Exception of Ray's
            ray.shutdown()
            if address not in ("auto", "local"):
                advice = "is a Ray running there, and is RAY_AUTH_TOKEN its token?"
                raise ConfigError(f"cluster.address {address}: {one_line(error)}; {advice}") from error
            if not remaining:
                raise RayhsError(
                    f"Ray did not start here: {one_line(error)}; see /tmp/ray/session_latest/logs"
                ) from error
