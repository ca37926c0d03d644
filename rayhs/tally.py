"""What a run has done so far: receipts added up, and what is shown of them."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Literal

from rayhs.job import Receipt

Phase = Literal["checking", "planning", "starting", "extracting", "indexing"]


@dataclass(frozen=True)
class Progress:
    """One step of a run.

    ``done`` of ``total`` count shards (checking), rows (planning), replicas (starting), samples (extracting) or files
    (indexing); ``tokens`` and ``bytes`` are committed by this run so far, at ``tokens_per_second`` since
    its first shard was begun.
    """

    phase: Phase
    done: int
    total: int | None
    tokens: int = 0
    bytes: int = 0
    tokens_per_second: float = 0.0
    message: str = ""


class Tally:
    """Receipts added up; keeps nothing a shard but the errors.

    ``seconds`` run from the first shard begun (an engine is up) to the last receipt.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self.seconds = 0.0
        self._first = float("inf")
        self.shards = self.samples = self.tokens = self.bytes = 0
        self.errors: dict[str, str] = {}
        self.fatal = ""

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    def progress(self) -> Progress:
        return Progress("extracting", self.samples, self.total, self.tokens, self.bytes, self.tokens_per_second)

    def add(self, receipt: Receipt) -> None:
        self.shards += not receipt.error
        self.samples += int(receipt.samples)
        self.tokens += int(receipt.tokens)
        self.bytes += int(receipt.bytes)
        if receipt.started:
            self._first = min(self._first, float(receipt.started))
            self.seconds = time.time() - self._first
        if receipt.error:
            self.errors[receipt.shard] = receipt.error
        if receipt.fatal:
            self.fatal = receipt.error
