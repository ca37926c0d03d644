"""A dataset being made in a store, whatever makes its plan and its shards: found, refused, planned, repaired, ended."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TypeVar

from rayhs import gc, repair
from rayhs.errors import (
    EXIT_OK,
    EXIT_SOME_FAILED,
    REPAIR_HINT,
    FormatError,
    IdentityMismatch,
    ObjectNotFound,
    RayhsError,
)
from rayhs.identity import Identity, dataset_record, refuse_other
from rayhs.indexing import write_index
from rayhs.layout import DATASET, SUMMARY, DatasetRecord, Plan, ShardId, Summary, index_name
from rayhs.log import logger
from rayhs.reading.catalog import committed_shards, read_dataset_record, read_summary
from rayhs.store import Store
from rayhs.tally import Progress, Tally

T = TypeVar("T")
OnProgress = Callable[[Progress], None]


def ignore_progress(_: Progress) -> None:
    return None


@dataclass(frozen=True)
class RunResult:
    """A finished run; ``exit_code`` is 0, or 3 when some samples failed or were rejected."""

    uri: str
    summary: Summary
    exit_code: int

    @classmethod
    def of(cls, uri: str, summary: Summary) -> RunResult:
        return cls(uri, summary, EXIT_SOME_FAILED if summary.failed or summary.rejected else EXIT_OK)


class DatasetRun(ABC):
    """One run into ``store``; another dataset in the place is refused when it is made.

    ``existing`` and ``summary`` are what is there already of this dataset, or None.
    """

    def __init__(
        self, store: Store, identity: Identity, source: str, on_progress: OnProgress, repairing: bool = False
    ) -> None:
        """``source`` is a cheap fingerprint of what is planned from, `rayhs.layout.Plan.input`.

        Raises:
            IdentityMismatch: shards of another dataset are committed there; names what differs.
            FormatError: its records are damaged, unless ``repairing``.
        """
        self.store, self.identity, self.source, self.on_progress = store, identity, source, on_progress
        self.existing: DatasetRecord | None = self._unless_damaged(self._existing, repairing)
        self.summary: Summary | None = self._unless_damaged(lambda: read_summary(self.store), repairing)
        self.summary_stands = self.summary is not None

    @abstractmethod
    def make_plan(self, store: Store | None) -> tuple[Plan, Counter[str]]:
        """The plan, and its rejected rows by category; its files are written where there is a store."""

    def refuse_other(self, existing: DatasetRecord) -> None:
        """Raises IdentityMismatch unless ``existing`` is the dataset of this run."""
        refuse_other(existing, self.identity, self.source, self.store.uri)

    def new_record(self, plan: Plan) -> DatasetRecord:
        return dataset_record(self.identity, plan)

    def _unless_damaged(self, read: Callable[[], T], repairing: bool) -> T | None:
        """A record, or None for a damaged one that is going to be made anew."""
        try:
            return read()
        except FormatError as error:
            if not repairing:
                raise FormatError(f"{self.store.uri}: {error}; {REPAIR_HINT}") from None
            logger.warning("%s", error)
            return None

    def _existing(self) -> DatasetRecord | None:
        """The dataset that is there already, if it is this run's; None where nothing is committed of another."""
        try:
            existing = read_dataset_record(self.store)
            self.refuse_other(existing)
        except ObjectNotFound:
            if committed_shards(self.store):
                raise FormatError(f"{DATASET} is missing, though shards are committed") from None
            return None
        except IdentityMismatch:
            if committed_shards(self.store):
                raise
            return None
        return existing

    def repair(self, before_planning: Callable[[], None] = lambda: None) -> None:
        """Make damaged records and plan anew, and shards that are damaged uncommitted."""
        committed = set(committed_shards(self.store))
        if self.existing is None:
            if not committed:
                return
            before_planning()
            plan, _ = self.make_plan(None)
            record = self.new_record(plan)
            repair.refuse_if_unlike(self.store, record)
            self.store.put(DATASET, record.to_bytes())
            self.existing = record
        dataset = self.existing
        damage = repair.find_damage(self.store, dataset, dataset.plan.shard_ids(), self._checked)
        if damage.unplanned:
            before_planning()
            self._make_same_plan(dataset)
            damage.shards |= repair.find_damage(self.store, dataset, sorted(damage.unplanned), self._checked).shards
        unplanned = committed.difference(dataset.plan.shard_ids())
        repair.take_out(self.store, (damage.shards & committed) | unplanned)
        self.summary_stands = False

    def _checked(self, done: int, total: int) -> None:
        self.on_progress(Progress("checking", done, total))

    def _make_same_plan(self, dataset: DatasetRecord) -> None:
        """Write the samples files anew, once it is sure that they become what they were."""
        plan, _ = self.make_plan(None)
        if plan.fingerprint != dataset.plan.fingerprint:
            raise FormatError(
                f"{self.store.uri}: samples files are damaged, and the input no longer gives the same plan; "
                "restore it and the versions in dataset.json, or start anew in another place"
            )
        # The same rows; the bytes of the files, and their checksums, may be another pyarrow's.
        plan, _ = self.make_plan(self.store)
        self.existing = dataset.model_copy(update={"plan": plan})
        self.store.put(DATASET, self.existing.to_bytes())

    def ensure_plan(self) -> tuple[DatasetRecord, Counter[str]]:
        """The dataset's identity: found, or planned and written now (with the rejected rows by category)."""
        if self.existing is not None:
            return self.existing, Counter()
        plan, reasons = self.make_plan(self.store)
        record = self.new_record(plan)
        self.store.put(DATASET, record.to_bytes())
        self.store.delete([entry.name for entry in gc.strays(self.store, record)])  # of a plan that this one replaces
        return record, reasons

    def missing_shards(self, dataset: DatasetRecord) -> list[ShardId]:
        committed = set(committed_shards(self.store))
        return [shard for shard in dataset.plan.shard_ids() if shard not in committed]

    def begin(self, dataset: DatasetRecord) -> tuple[list[ShardId], Tally]:
        """The shards to make and an empty tally of them; from here on no reader takes the dataset for complete."""
        missing = self.missing_shards(dataset)
        if missing:
            # Where a commit record was removed to redo a shard, readers must not take index and summary for valid.
            self.store.delete([SUMMARY])
        return missing, Tally(total=len(missing))

    def finish(self, dataset: DatasetRecord, done: Tally) -> Summary:
        """Write index and summary, unless they stand.

        Raises:
            RayhsError: a shard was not committed; FormatError: a commit record is damaged.
        """
        if done.errors:
            shard, error = next(iter(done.errors.items()))
            raise RayhsError(
                f"{len(done.errors)} of {len(dataset.plan.shard_ids())} shards were not committed (first: {shard}: "
                f"{error}); run the same command again to finish"
            )
        before = self.summary
        if before is not None and self.summary_stands and not done.shards and self._has_index(dataset):
            return before
        self.on_progress(Progress("indexing", 0, len(dataset.plan.files)))
        try:
            totals = write_index(self.store, dataset.plan)
        except FormatError as error:
            raise FormatError(f"{self.store.uri}: {error}; {REPAIR_HINT}") from None
        summary = Summary(
            samples=dataset.plan.samples,
            ok=totals.ok,
            failed=totals.failed,
            rejected=totals.rejected,
            tokens=totals.tokens,
            shards=len(dataset.plan.shard_ids()),
            bytes=totals.bytes,
            seconds=round(done.seconds, 3) or (before.seconds if before else 0.0),
            tokens_per_second=round(done.tokens_per_second, 1) or (before.tokens_per_second if before else 0.0),
            reasons=dict(totals.reasons),
            errors=totals.errors,
            index_checksums=totals.index_checksums,
            finished=datetime.now(UTC).isoformat(timespec="seconds"),
        )
        self.store.put(SUMMARY, summary.to_bytes())
        return summary

    def _has_index(self, dataset: DatasetRecord) -> bool:
        there = {name for name, _ in self.store.list("index/")}
        return there >= {index_name(file) for file in range(len(dataset.plan.files))}
