"""Samples that fail in a row: a dead model must not "skip" a corpus."""

from __future__ import annotations

from rayhs.errors import TooManyFailed
from rayhs.layout import CommitRecord, ShardId


class Streak:
    """Counts failed samples since the last good one, whichever shards they are of.

    ``shards`` are those committed meanwhile without one good sample: their failures are the model's,
    not theirs, once the streak is over the limit.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._count = 0
        self._broken = ""
        self.shards: list[ShardId] = []

    def good(self) -> None:
        if not self._broken:
            self._count = 0
            self.shards.clear()

    def failed(self, reason: str) -> None:
        self._count += 1
        if self._count > self._most:
            self.give_up(
                f"{self._count} samples failed one after the other, over engine.max_consecutive_failures "
                f"{self._most} (last: {reason}); model, dtype or machine must be at fault, so the run stops, and "
                "these samples are not marked as failed. Mend it and run the same command again, or raise the limit"
            )

    def give_up(self, reason: str) -> None:
        """No engine can be had any more: what failed last, failed with it."""
        self._broken = self._broken or reason

    def committed(self, record: CommitRecord) -> None:
        if self._count and record.object is None:
            self.shards.append(ShardId.parse(record.shard))

    def refuse(self, any_failed: bool) -> None:
        """Raises TooManyFailed for a shard with failed samples once model or engine are known to be broken."""
        if self._broken and any_failed:
            raise TooManyFailed(self._broken)
