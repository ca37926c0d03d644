"""What a run has done so far: receipts added up, and what is shown of them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from rayhs.job import Receipt
from rayhs.metrics import Totals

Phase = Literal["checking", "preparing", "planning", "starting", "extracting", "importing", "indexing", "measuring"]


@dataclass(frozen=True)
class Progress:
    """One step of a run.

    ``done`` of ``total`` count shards (checking, extracting, importing), rows (planning), replicas (starting), files
    (indexing) or rounds (measuring); when extracting or importing, ``total`` are the shards that had no commit record.
    ``samples``, ``tokens`` and ``bytes`` are committed by this run so far, at ``tokens_per_second`` since its first
    shard was begun.
    """

    phase: Phase
    done: int
    total: int | None
    samples: int = 0
    tokens: int = 0
    bytes: int = 0
    tokens_per_second: float = 0.0
    message: str = ""


class Tally:
    """Receipts of ``total`` shards added up; keeps nothing a shard but the errors.

    ``seconds`` run from the first shard begun (an engine is up) to the last one committed, by the
    clocks of the replicas; ``end_seconds`` are those of them in which the engines had nothing left to do and the
    last shards were still on their way. ``metrics`` are the largest of each replica, where the job is measured.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self.seconds = 0.0
        self._first, self._extracted, self._last = float("inf"), 0.0, 0.0
        self.shards = self.samples = self.tokens = self.bytes = 0
        self.errors: dict[str, str] = {}
        self.metrics: dict[str, Totals] = {}
        self.fatal = ""

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def end_seconds(self) -> float:
        return self._last - self._extracted if self._extracted else 0.0

    def progress(self, phase: Phase = "extracting") -> Progress:
        return Progress(phase, self.shards, self.total, self.samples, self.tokens, self.bytes, self.tokens_per_second)

    def add(self, receipt: Receipt) -> None:
        self.shards += not receipt.error
        self.samples += int(receipt.samples)
        self.tokens += int(receipt.tokens)
        self.bytes += int(receipt.bytes)
        if receipt.started:
            self._first = min(self._first, float(receipt.started))
            self._extracted = max(self._extracted, receipt.extracted)
            self._last = max(self._last, receipt.started + receipt.seconds)
            self.seconds = self._last - self._first
        if receipt.metrics:
            _update(self.metrics.setdefault(receipt.replica, {}), json.loads(receipt.metrics))
        if receipt.error:
            self.errors[receipt.shard] = receipt.error
        if receipt.fatal:
            self.fatal = receipt.error


def _update(known: Totals, told: Mapping[str, Sequence[float]]) -> None:
    # Totals only grow, and receipts overtake each other.
    for stage, (seconds, nbytes) in told.items():
        known[stage] = max(known.get(stage, (0.0, 0)), (seconds, int(nbytes)))
