"""The commit protocol under a store that fails, attempts that race, and runs that are interrupted."""

from __future__ import annotations

import asyncio
import subprocess
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rayhs.errors import StoreError, StoreUnavailable
from rayhs.fake import FakeEngine
from rayhs.indexing import write_index
from rayhs.job import Receipt
from rayhs.layout import DATASET, CommitRecord, ShardId, commit_name
from rayhs.replica import HANDED_BACK, Replica
from rayhs.shards import write_shard
from rayhs.store import open_store
from rayhs.store.local import LocalFolderStore
from rayhs.verify import verify
from tests.test_replica import make_job, prompts_of, run_all, stored_states

UNAVAILABLE = StoreUnavailable("s3://b/x: the server answered 503 again and again; run the same command again")


@pytest.fixture
def extracted(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[int, ...]]:
    """How often each prompt went through the engine."""
    seen: Counter[tuple[int, ...]] = Counter()
    extract = FakeEngine.extract

    async def counted(self: FakeEngine, key: str, token_ids: Sequence[int]) -> None:
        seen[tuple(token_ids)] += 1
        await extract(self, key, token_ids)

    monkeypatch.setattr(FakeEngine, "extract", counted)
    return seen


class Failing:
    """Makes writes of some objects fail, a number of times each."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, what: str, error: Exception, times: int) -> None:
        self.seen: Counter[str] = Counter()
        self._put_stream, self._put_new = LocalFolderStore.put_stream, LocalFolderStore.put_new

        def put_stream(store: LocalFolderStore, name: str, chunks: Any, size: int) -> None:
            self._maybe(name, what, error, times)
            self._put_stream(store, name, chunks, size)

        def put_new(store: LocalFolderStore, name: str, data: bytes) -> bool:
            self._maybe(name, what, error, times)
            return self._put_new(store, name, data)

        monkeypatch.setattr(LocalFolderStore, "put_stream", put_stream)
        monkeypatch.setattr(LocalFolderStore, "put_new", put_new)

    def _maybe(self, name: str, what: str, error: Exception, times: int) -> None:
        key = name.rpartition("-")[0] if name.startswith("shards") else name
        if what in name:
            self.seen[key] += 1
            if self.seen[key] <= times:
                raise error


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rayhs.replica._RETRY_WAIT_S", (0.01, 0.02))


@pytest.mark.parametrize("what", ["shards/", "commits/"])
def test_an_upload_that_fails_in_passing_is_tried_again_without_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, extracted: Counter[tuple[int, ...]], what: str
) -> None:
    prompts = prompts_of(12)
    job = make_job(tmp_path, prompts)
    Failing(monkeypatch, what, UNAVAILABLE, times=2)
    receipts, _ = run_all(job)
    assert [r.error for r in receipts if r.error] == []
    assert sorted(stored_states(job)) == list(range(12))
    assert set(extracted.values()) == {1}


def test_a_store_that_refuses_one_shard_leaves_it_uncommitted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, extracted: Counter[tuple[int, ...]]
) -> None:
    job = make_job(tmp_path, prompts_of(30))
    shards = job.dataset.plan.shard_ids()
    failing = Failing(monkeypatch, f"shards/{shards[1]}", StoreError("s3://b/x: too large; lower it"), times=99)
    receipts, _ = run_all(job)
    assert [(r.error, r.fatal) for r in receipts if r.error] == [("s3://b/x: too large; lower it", False)]
    assert set(failing.seen.values()) == {1}, "a permanent refusal is not tried again"
    committed = {name for name, _ in open_store(job.config.output).list("commits/")}
    assert committed == {commit_name(s) for s in shards if s != shards[1]}


@pytest.mark.parametrize(
    ("error", "attempts"), [(StoreError("s3://b: no such bucket; create it"), 1), (UNAVAILABLE, 3)]
)
def test_a_store_that_is_gone_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: StoreError, attempts: int
) -> None:
    job = make_job(tmp_path, prompts_of(60))
    failing = Failing(monkeypatch, "shards/", error, times=99)
    receipts, _ = run_all(job)
    assert any(r.fatal and r.error.startswith(f"{error}; 3 shards in a row") for r in receipts)
    assert max(failing.seen.values()) == attempts == min(failing.seen.values())
    assert list(open_store(job.config.output).list("")) == list(open_store(job.config.output).list("samples"))


def test_our_own_commit_whose_reply_was_lost_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = make_job(tmp_path, prompts_of(12))
    put_new = LocalFolderStore.put_new

    def lost(self: LocalFolderStore, name: str, data: bytes) -> bool:
        put_new(self, name, data)
        return False

    monkeypatch.setattr(LocalFolderStore, "put_new", lost)
    receipts, _ = run_all(job)
    assert [r.error for r in receipts if r.error] == [] and sorted(stored_states(job)) == list(range(12))


def test_attempts_that_race_leave_one_whole_object_and_an_orphan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A zombie that has uploaded commits only when the retry is long done, index and summary too."""
    job = make_job(tmp_path, prompts_of(12))
    store = open_store(job.config.output)
    store.put(DATASET, job.dataset.to_bytes())
    waiting, go = threading.Event(), threading.Event()
    zombies: list[threading.Thread] = []

    def write_late(*arguments: Any) -> CommitRecord:
        held = LateStore(job.config.output, waiting, go)
        thread = threading.Thread(target=write_shard, args=(held, *arguments[1:]))
        thread.start()
        zombies.append(thread)
        waiting.wait()
        return write_shard(*arguments)

    monkeypatch.setattr("rayhs.replica.write_shard", write_late)
    receipts, _ = run_all(job, [ShardId(0, 0)])
    monkeypatch.undo()
    run_all(job)
    write_index(store, job.dataset.plan)
    before = store.get(commit_name(ShardId(0, 0)))
    go.set()
    for thread in zombies:
        thread.join()
    assert store.get(commit_name(ShardId(0, 0))) == before
    report = verify(store)
    assert [f for f in report.findings if f.object != "summary.json"] == []
    assert report.orphans == 1 and receipts[0].error == ""
    assert sorted(stored_states(job)) == list(range(12))


class LateStore(LocalFolderStore):
    """Writes a commit record only when it may."""

    def __init__(self, uri: str, waiting: threading.Event, go: threading.Event) -> None:
        super().__init__(uri)
        self._waiting, self._go = waiting, go

    def put_new(self, name: str, data: bytes) -> bool:
        self._waiting.set()
        self._go.wait(30)
        return super().put_new(name, data)


def test_an_object_too_old_to_be_told_from_an_orphan_is_not_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make_job(tmp_path, prompts_of(4))
    monkeypatch.setattr("rayhs.shards.COMMIT_WITHIN_S", -1.0)
    receipts, _ = run_all(job)
    assert ["the upload took" in r.error for r in receipts] == [True] * len(receipts)
    assert list(open_store(job.config.output).list("commits")) == []


def test_shards_are_handed_back_or_finished_and_staging_is_freed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make_job(tmp_path, [[i] * 20 for i in range(60)])
    shards = job.dataset.plan.shard_ids()
    extract = FakeEngine.extract

    async def stuck_at_the_second_half(self: FakeEngine, key: str, token_ids: Sequence[int]) -> None:
        if token_ids[0] >= 30:
            await asyncio.Event().wait()
        await extract(self, key, token_ids)

    monkeypatch.setattr(FakeEngine, "extract", stuck_at_the_second_half)
    uploading, finish = threading.Event(), threading.Event()
    put_stream = LocalFolderStore.put_stream

    def slow(self: LocalFolderStore, name: str, chunks: Any, size: int) -> None:
        uploading.set()
        finish.wait(30)
        put_stream(self, name, chunks, size)

    monkeypatch.setattr(LocalFolderStore, "put_stream", slow)

    async def run() -> tuple[list[Receipt], Receipt]:
        replica = Replica(job)
        runs = [asyncio.create_task(replica.run_shard(shard)) for shard in shards]
        await asyncio.to_thread(uploading.wait)
        stopping = asyncio.create_task(replica.hand_back())
        await asyncio.sleep(0.05)
        finish.set()
        await stopping
        return list(await asyncio.gather(*runs)), await replica.run_shard(shards[0])

    receipts, late = asyncio.run(run())
    done = {r.shard for r in receipts if not r.error}
    assert done and {r.error for r in receipts} == {"", HANDED_BACK}
    assert late.error == HANDED_BACK
    assert {name for name, _ in open_store(job.config.output).list("commits")} == {f"commits/{s}.json" for s in done}
    assert list((tmp_path / "shm").iterdir()) == []
    monkeypatch.undo()
    run_all(job)
    assert sorted(stored_states(job)) == list(range(60))


def test_staging_that_others_fill_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "shm").mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(tmp_path / "shm")], check=False
    ).returncode:
        pytest.skip("mounting a small tmpfs needs root")
    try:
        job = make_job(tmp_path, prompts_of(12))
        monkeypatch.setattr("rayhs.replica.staging_bytes", lambda job, per_node: 64 * 2**20)
        ballast = tmp_path / "shm" / "ballast"

        async def run() -> list[Receipt]:
            replica = Replica(job)
            with pytest.raises(OSError, match="No space left"):
                ballast.write_bytes(bytes(8 * 2**20))
            runs = [asyncio.create_task(replica.run_shard(shard)) for shard in job.dataset.plan.shard_ids()]
            await asyncio.sleep(0.5)
            assert not any(run.done() for run in runs)
            ballast.unlink()
            receipts = list(await asyncio.gather(*runs))
            await replica.stop()
            return receipts

        assert [r for r in asyncio.run(run()) if r.error or r.failed] == []
        assert sorted(stored_states(job)) == list(range(12))
    finally:
        subprocess.run(["umount", str(tmp_path / "shm")], check=True)
