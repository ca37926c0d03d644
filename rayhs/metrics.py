"""What each stage between the engine and the store has carried, and how long it was at it."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

Totals = dict[str, tuple[float, int]]
"""By stage: seconds, summed over its threads, and bytes (0 for stages that only wait)."""

METRICS_FILE = "metrics.json"
_WRITE_EVERY_S = 0.1


class Metrics:
    """Counts up; for any number of threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._totals: Totals = {}
        self._since: dict[str, float] = {}

    def add(self, stage: str, seconds: float, nbytes: int = 0) -> None:
        with self._lock:
            before = self._totals.get(stage, (0.0, 0))
            self._totals[stage] = (before[0] + seconds, before[1] + nbytes)

    @contextmanager
    def timed(self, stage: str, nbytes: int = 0) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self.add(stage, time.perf_counter() - started, nbytes)

    def waiting(self, stage: str, waits: bool) -> None:
        """Say whether ``stage`` waits from now on; the time between adds up."""
        since = self._since.pop(stage, None)
        now = time.perf_counter()
        if since is not None:
            self.add(stage, now - since)
        if waits:
            self._since[stage] = now

    def totals(self) -> Totals:
        with self._lock:
            return dict(self._totals)


class MetricsFile:
    """Totals of a process, for another to read: a small JSON file in a folder, replaced whole."""

    def __init__(self, directory: Path, metrics: Metrics) -> None:
        self._path = directory / METRICS_FILE
        self._metrics = metrics
        self._due = 0.0

    def write(self) -> None:
        """At most ten times a second."""
        if time.monotonic() >= self._due:
            self._due = time.monotonic() + _WRITE_EVERY_S
            partial = self._path.with_suffix(".partial")
            partial.write_text(json.dumps(self._metrics.totals()))
            os.replace(partial, self._path)


def read_metrics(directory: Path) -> Totals:
    """What `MetricsFile.write` said last in ``directory`` and the folders in it; empty where there was none.

    Ranks work at the same time: of their seconds the most counts, of their bytes the sum.
    """
    totals: Totals = {}
    for path in (directory / METRICS_FILE, *directory.glob(f"*/{METRICS_FILE}")):
        if not path.exists():
            continue
        for stage, (seconds, nbytes) in json.loads(path.read_text()).items():
            before = totals.get(stage, (0.0, 0))
            totals[stage] = (max(before[0], float(seconds)), before[1] + int(nbytes))
    return totals
