"""What verify reports: one finding an object and problem, naming the samples it touches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from rayhs.errors import printable

NAMED_SAMPLES = 20


@dataclass(frozen=True)
class Finding:
    """A problem of one object; ``samples`` names the first `NAMED_SAMPLES` of ``count`` samples touched."""

    object: str
    problem: str
    samples: tuple[str, ...] = ()
    count: int = 0

    def __str__(self) -> str:
        more = f" and {self.count - len(self.samples)} more" if self.count > len(self.samples) else ""
        samples = f" (samples {', '.join(self.samples)}{more})" if self.count else ""
        return printable(f"{self.object}: {self.problem}{samples}")

    def to_dict(self) -> dict[str, Any]:
        return {
            "object": self.object,
            "problem": self.problem,
            "samples": list(self.samples),
            "sample_count": self.count,
        }


class Findings:
    """Collects problems; memory is bounded by `limit` kinds of problem and the samples named of each."""

    def __init__(self, limit: int = 1000) -> None:
        self._limit = limit
        self._kept: dict[tuple[str, str], tuple[list[str], int]] = {}
        self.dropped = 0

    def add(self, name: str, problem: str, samples: Iterable[str] = ()) -> None:
        """Note ``problem`` of object ``name``; samples of the same problem gather in one finding."""
        ids = list(samples)
        key = (name, problem)
        if key not in self._kept and len(self._kept) >= self._limit:
            self.dropped += 1
            return
        named, count = self._kept.get(key, ([], 0))
        named.extend(ids[: max(0, NAMED_SAMPLES - len(named))])
        self._kept[key] = (named, count + len(ids))

    def extend(self, others: Iterable[Finding]) -> None:
        for finding in others:
            key = (finding.object, finding.problem)
            if key not in self._kept and len(self._kept) >= self._limit:
                self.dropped += 1
            else:
                self._kept.setdefault(key, (list(finding.samples), finding.count))

    def __iter__(self) -> Iterator[Finding]:
        for (name, problem), (samples, count) in self._kept.items():
            yield Finding(name, problem, tuple(samples), count)
