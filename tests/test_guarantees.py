"""A state machine over attempts, kills, zombies, damage, repair and gc, against a model of the guarantees."""

from __future__ import annotations

import os
import random
import secrets
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rayhs.errors import FormatError
from rayhs.fake import fake_states
from rayhs.gc import collect
from rayhs.indexing import write_index
from rayhs.layout import DATASET, CommitRecord, ShardId, Summary, commit_name
from rayhs.planned import planned_samples
from rayhs.reading.plan_reader import PlanReader
from rayhs.repair import find_damage, take_out
from rayhs.shards import COMMIT_WITHIN_S, FailedSample, GoodSample, PlannedSample, sample_checksum, write_shard
from rayhs.store import open_store
from rayhs.store.base import PARTIAL
from rayhs.store.local import LocalFolderStore
from rayhs.verify import verify
from tests.test_replica import HIDDEN, make_job, prompts_of

SHARDS = 4
FATES = ("commits", "dies in the upload", "dies before the commit", "sleeps before the commit")


class Died(Exception):
    """The process of an attempt was killed."""


class FatefulStore(LocalFolderStore):
    """The store as an attempt sees it whose process meets with a fate."""

    def __init__(self, uri: str, fate: str) -> None:
        super().__init__(uri)
        self.fate = fate
        self.late: tuple[str, bytes] | None = None

    def put_stream(self, name: str, chunks: Any, size: int) -> None:
        if self.fate == "dies in the upload":
            folder = Path(self.uri) / "shards"
            folder.mkdir(exist_ok=True)
            (folder / f"{PARTIAL}{secrets.token_hex(4)}").write_bytes(bytes(100))
            raise Died
        super().put_stream(name, chunks, size)

    def put_new(self, name: str, data: bytes) -> bool:
        if self.fate == "dies before the commit":
            raise Died
        if self.fate == "sleeps before the commit":
            self.late = (name, data)
            raise Died
        return super().put_new(name, data)


@dataclass
class Sleeper:
    """An attempt that has uploaded and will commit when it wakes up."""

    shard: ShardId
    record: CommitRecord
    data: bytes
    age: float = 0.0


class Guarantees(RuleBasedStateMachine):
    @initialize()
    def plan(self) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="guarantees-")
        root = Path(self.folder.name)
        self.prompts = prompts_of(14)
        self.prompts[5] = []  # rejected
        self.job = make_job(root, self.prompts)
        self.store = open_store(self.job.config.output)
        self.store.put(DATASET, self.job.dataset.to_bytes())
        self.shards = self.job.dataset.plan.shard_ids()
        self.samples = {s: planned_samples(PlanReader(self.store, self.job.dataset.plan).rows(s)) for s in self.shards}
        self.committed: dict[ShardId, str] = {}
        self.damaged: set[ShardId] = set()
        self.sleepers: list[Sleeper] = []

    def teardown(self) -> None:
        if hasattr(self, "folder"):
            self.folder.cleanup()

    @rule(which=st.integers(0, 99), fate=st.sampled_from(FATES), failing=st.sets(st.integers(0, 3)))
    def attempt(self, which: int, fate: str, failing: set[int]) -> None:
        shard = self.shards[which % len(self.shards)]
        store = FatefulStore(self.job.config.output, fate)
        results = [result(p, i in failing) for i, p in enumerate(self.samples[shard])]
        try:
            record = write_shard(store, shard, results, self.job.shard_spec)
        except Died:
            if store.late is not None:
                name, data = store.late
                self.sleepers.append(Sleeper(shard, CommitRecord.from_bytes(data, name), data))
            return
        except FormatError:
            assert shard in self.damaged, "only a damaged record that stands stops an attempt"
            return
        if shard in self.committed:
            assert record.attempt == self.committed[shard], "an attempt that comes second is told who won"
        self.committed.setdefault(shard, record.attempt)

    @precondition(lambda self: self.sleepers)
    @rule(which=st.integers(0, 99))
    def wake(self, which: int) -> None:
        sleeper = self.sleepers.pop(which % len(self.sleepers))
        if sleeper.age < COMMIT_WITHIN_S and self.store.put_new(commit_name(sleeper.shard), sleeper.data):
            assert sleeper.shard not in self.committed
            self.committed[sleeper.shard] = sleeper.record.attempt

    @rule(hours=st.floats(0.1, 9))
    def time_passes(self, hours: float) -> None:
        for path in Path(self.job.config.output).rglob("*"):
            if path.is_file():
                when = path.stat().st_mtime - hours * 3600
                os.utime(path, (when, when))
        for sleeper in self.sleepers:
            sleeper.age += hours * 3600
        # Who slept too long finds, when it wakes, that it may not commit any more.
        self.sleepers = [s for s in self.sleepers if s.age < COMMIT_WITHIN_S]

    @rule()
    def gc(self) -> None:
        collect(self.store)

    @precondition(lambda self: not self.sleepers)
    @rule()
    def gc_of_everything(self) -> None:
        collect(self.store, older_than=0)
        if not self.damaged:
            kept = {commit_object(self.store, shard) for shard in self.committed} - {None}
            assert {name for name, _ in self.store.list("shards")} == kept
            assert list(self.store.unfinished()) == []

    @precondition(lambda self: self.committed)
    @rule(which=st.integers(0, 99), seed=st.integers(0, 9999), how=st.sampled_from(["object", "record"]))
    def a_bit_rots(self, which: int, seed: int, how: str) -> None:
        shard = sorted(self.committed)[which % len(self.committed)]
        if shard in self.damaged:
            return
        name = commit_name(shard) if how == "record" else commit_object(self.store, shard)
        if name is None:
            return
        path = Path(self.job.config.output) / name
        data = bytearray(path.read_bytes())
        where = random.Random(seed).randrange(len(data) * 8)
        data[where // 8] ^= 1 << where % 8
        modified = path.stat().st_mtime
        path.write_bytes(bytes(data))
        os.utime(path, (modified, modified))
        self.damaged.add(shard)

    @precondition(lambda self: self.damaged)
    @rule()
    def repair(self) -> None:
        found = find_damage(self.store, self.job.dataset, sorted(self.committed), lambda done, total: None)
        assert found.shards == self.damaged
        take_out(self.store, found.shards)
        for shard in self.damaged:
            del self.committed[shard]
        self.damaged = set()

    @precondition(lambda self: len(self.committed) == len(self.shards) and not self.damaged)
    @rule()
    def finish(self) -> None:
        totals = write_index(self.store, self.job.dataset.plan)
        assert totals.ok + totals.failed + totals.rejected == len(self.prompts) and totals.rejected == 1
        numbers = {k: getattr(totals, k) for k in ("ok", "failed", "rejected", "tokens", "bytes", "reasons")}
        summary = Summary(
            samples=len(self.prompts),
            shards=len(self.shards),
            seconds=0.0,
            tokens_per_second=0.0,
            index_checksums=totals.index_checksums,
            finished="",
            **{**numbers, "reasons": dict(totals.reasons)},
        )
        self.store.put("summary.json", summary.to_bytes())
        assert verify(self.store).findings == ()
        self.store.delete(["summary.json"])

    @invariant()
    def what_is_committed_is_whole(self) -> None:
        for shard in getattr(self, "committed", {}):
            if shard in self.damaged:
                continue
            record: CommitRecord = CommitRecord.from_bytes(self.store.get(commit_name(shard)), str(shard))
            assert record.attempt == self.committed[shard]
            assert record.index == [p.index for p in self.samples[shard]]
        if getattr(self, "committed", {}):
            sound = sorted(set(self.committed) - self.damaged)
            found = find_damage(self.store, self.job.dataset, sound, lambda done, total: None)
            assert found.shards == set()

    @invariant()
    def who_may_still_commit_has_its_object(self) -> None:
        for sleeper in getattr(self, "sleepers", []):
            if sleeper.record.object is not None:
                assert self.store.size(sleeper.record.object) == sleeper.record.object_bytes


def result(planned: PlannedSample, failing: bool) -> GoodSample | FailedSample:
    if failing:
        return FailedSample(planned, "not finite: layer 2 has NaN or infinite states")
    ids = planned.token_ids
    states = {k: fake_states(ids.tolist(), k, HIDDEN) for k in (2, 8)}
    return GoodSample(planned, ids, np.ones(len(ids), np.uint8), states, sample_checksum(states, {}))


def commit_object(store: Any, shard: ShardId) -> str | None:
    record: CommitRecord = CommitRecord.from_bytes(store.get(commit_name(shard)), str(shard))
    return record.object


TestGuarantees: Callable[[], Any] = Guarantees.TestCase
TestGuarantees.settings = settings(  # type: ignore[attr-defined]
    max_examples=25, stateful_step_count=30, suppress_health_check=list(HealthCheck)
)
