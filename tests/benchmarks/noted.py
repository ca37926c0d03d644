"""What processes were at, noted in files, and a summary of it."""

from __future__ import annotations

import functools
import itertools
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

FILE = "RAYHS_STEPS"  # environment variable: the files begin with it

Spans = dict[str, list[tuple[float, float]]]
"""By what was noted, begin and end in seconds since the epoch."""


class Lines:
    """Lines ``[what, begin, end]`` of JSON at FILE.<name>."""

    def __init__(self, name: str) -> None:
        self._file = open(f"{os.environ[FILE]}.{name}", "a", buffering=2**16)  # noqa: SIM115

    def add(self, what: str, begin: float, end: float) -> None:
        self._file.write(f'["{what}", {begin:.6f}, {end:.6f}]\n')

    def flush(self) -> None:
        self._file.flush()

    def watch(self, owner: type, *methods: str) -> None:
        """Note every call of these methods of a class."""
        for method in methods:
            setattr(owner, method, self._noted(getattr(owner, method)))

    def _noted(self, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def noted(*args: Any, **kwargs: Any) -> Any:
            begin = time.time()
            try:
                return call(*args, **kwargs)
            finally:
                self.add(call.__name__, begin, time.time())

        return noted


def read_spans(path: Path) -> Spans:
    spans: Spans = {}
    for line in path.read_text().splitlines():
        if line.endswith("]"):  # the last may be half written
            what, begin, end = json.loads(line)
            spans.setdefault(what, []).append((begin, end))
    return spans


def summary(spans: Spans, begin: float, end: float) -> list[str]:
    """Of what lies between two times: how often, milliseconds (p10, p50, p90), those between two, its share."""
    lines = []
    for what, every in spans.items():
        times = sorted(one for one in every if begin <= one[0] and one[1] <= end)
        if len(times) < 2:
            continue
        took = sorted(1000 * (last - first) for first, last in times)
        between = 1000 * statistics.median(b[0] - a[1] for a, b in itertools.pairwise(times))
        p10, p50, p90 = (took[len(took) * tenth // 10] for tenth in (1, 5, 9))
        share = sum(took) / 1000 / (times[-1][1] - times[0][0])
        lines.append(
            f"{what:26s} {len(times):6d} x {p10:7.2f} {p50:7.2f} {p90:7.2f}, {between:7.2f} between, {share:6.1%}"
        )
    return lines
