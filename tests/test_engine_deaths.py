"""Engines that die, prompts that kill them, models that are broken: who is failed, who is kept, when it ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rayhs.errors import EngineError
from rayhs.fake import KILLER_TOKEN, NAN_TOKEN, FakeEngine
from rayhs.job import Job
from rayhs.keeper import EngineKeeper
from rayhs.layout import CommitRecord, ShardId, commit_name
from rayhs.parts import StagedParts
from rayhs.store import open_store
from tests.test_replica import HIDDEN, make_job, prompts_of, run_all, stored_states

KILLED = f"killed the engine: the engine died: token {KILLER_TOKEN}"


class CountedEngine(FakeEngine):
    """Counts starts; a prompt for which ``kills`` says so kills it, as does starting where ``start_fails`` says so."""

    starts = 0
    kills: Callable[[int, int], bool] = staticmethod(lambda start, prompt: False)
    start_fails: Callable[[int], bool] = staticmethod(lambda start: False)

    async def start(self) -> None:
        type(self).starts += 1
        self._start = type(self).starts
        self._prompts = 0
        if type(self).start_fails(self._start):
            raise EngineError("vLLM did not start: no memory")

    async def extract(self, key: str, token_ids: Sequence[int]) -> None:
        self._prompts += 1
        if type(self).kills(self._start, self._prompts):
            self._dead = True
        await super().extract(key, token_ids)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[CountedEngine]]:
    class Counted(CountedEngine):
        pass

    def make(config: Any, model: Any, layers: Sequence[int], area: Any, metrics: bool) -> FakeEngine:
        return Counted(area, layers, HIDDEN, "float32")

    monkeypatch.setattr("rayhs.replica.make_engine", make)
    monkeypatch.setattr("rayhs.keeper._RESTART_PAUSE_S", 0.0)
    yield Counted


def reasons(job: Job) -> dict[int, str]:
    """Reasons of the failed samples by index, over all committed shards; every sample once."""
    store = open_store(job.config.output)
    seen: list[int] = []
    failed: dict[int, str] = {}
    for name, _ in store.list("commits"):
        record: CommitRecord = CommitRecord.from_bytes(store.get(name), name)
        seen += record.index
        failed |= {i: r for i, r in zip(record.index, record.reason, strict=True) if r is not None}
    assert len(seen) == len(set(seen))
    return failed


def test_a_restart_that_fails_leaves_no_staging(tmp_path: Path, engine: type[CountedEngine]) -> None:
    engine.start_fails = staticmethod(lambda start: start in (2, 3))
    held: list[set[str]] = []

    class Watched(engine):  # type: ignore[misc,valid-type]
        async def start(self) -> None:
            held.append({path.name for path in self._area.directory.parent.iterdir() if path.is_dir()})
            await super().start()

    async def run() -> None:
        keeper = EngineKeeper(
            lambda area: Watched(area, [1], HIDDEN, "float32"), lambda name: StagedParts(tmp_path / name, 2**20, [1])
        )
        async with keeper.engine() as first:
            await keeper.died(first, EngineError("the engine died: test"))
        await keeper.ready()
        await keeper.stop()

    asyncio.run(run())
    assert [len(names) for names in held] == [1, 1, 1, 1], "the second and third start failed"


def test_an_engine_that_dies_is_started_again_and_nothing_is_lost(tmp_path: Path, engine: type[CountedEngine]) -> None:
    engine.kills = staticmethod(lambda start, prompt: start == 1 and prompt == 5)
    job = make_job(tmp_path, prompts_of(12))
    receipts, _ = run_all(job)
    assert engine.starts == 2
    assert [(r.error, r.failed) for r in receipts if r.error or r.failed] == []
    assert sorted(stored_states(job)) == list(range(12))


def test_an_engine_that_dies_by_chance_fails_no_sample(tmp_path: Path, engine: type[CountedEngine]) -> None:
    engine.kills = staticmethod(lambda start, prompt: start < 8 and prompt == 1 + start % 5)
    job = make_job(tmp_path, prompts_of(40))
    receipts, _ = run_all(job)
    assert [(r.error, r.failed) for r in receipts if r.error or r.failed] == []
    assert sorted(stored_states(job)) == list(range(40))


@pytest.mark.parametrize("where", [0, 17, 79])
def test_a_prompt_that_kills_the_engine_fails_alone(tmp_path: Path, engine: type[CountedEngine], where: int) -> None:
    prompts = prompts_of(80)
    prompts[where] = [1, KILLER_TOKEN, 2]
    job = make_job(tmp_path, prompts, shards={"target_bytes": 45 * 20 * 2 * HIDDEN * 4})
    receipts, _ = run_all(job)
    assert not any(r.error for r in receipts) and sum(r.failed for r in receipts) == 1
    assert sorted(stored_states(job)) == [i for i in range(80) if i != where]
    assert reasons(job) == {where: KILLED}
    assert engine.starts <= 8


def test_several_killers_in_one_shard_are_all_found(tmp_path: Path, engine: type[CountedEngine]) -> None:
    prompts = prompts_of(30)
    for i in (3, 4, 20):
        prompts[i] = [KILLER_TOKEN]
    job = make_job(tmp_path, prompts, shards={"target_bytes": 2**30})
    receipts, _ = run_all(job)
    assert len(receipts) == 1 and reasons(job) == dict.fromkeys((3, 4, 20), KILLED)
    assert sorted(stored_states(job)) == [i for i in range(30) if i not in (3, 4, 20)]
    assert engine.starts <= 13


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(killers=st.sets(st.integers(0, 29), max_size=3), budget=st.integers(1, 30))
def test_any_killers_anywhere(
    tmp_path_factory: pytest.TempPathFactory, engine: type[CountedEngine], killers: set[int], budget: int
) -> None:
    prompts = [[KILLER_TOKEN, i] if i in killers else [i, i + 1] for i in range(30)]
    job = make_job(tmp_path_factory.mktemp("k"), prompts, shards={"target_bytes": budget * 2 * 2 * HIDDEN * 4})
    receipts, _ = run_all(job)
    assert not any(r.error for r in receipts)
    assert reasons(job) == dict.fromkeys(killers, KILLED)
    assert sorted(stored_states(job)) == [i for i in range(30) if i not in killers]


def test_an_engine_that_always_dies_ends_the_run_and_fails_no_sample(
    tmp_path: Path, engine: type[CountedEngine]
) -> None:
    engine.kills = staticmethod(lambda start, prompt: True)
    job = make_job(tmp_path, prompts_of(40))
    receipts, _ = run_all(job)
    told = [r.error for r in receipts if r.fatal]
    assert told and all("died 15 times in a row without one sample done (last: the engine died" in t for t in told)
    assert engine.starts == 15
    assert reasons(job) == {} and list(open_store(job.config.output).list("commits")) == []


def test_an_engine_that_never_started_is_not_tried_again(tmp_path: Path, engine: type[CountedEngine]) -> None:
    engine.start_fails = staticmethod(lambda start: True)
    receipts, _ = run_all(make_job(tmp_path, prompts_of(4)), [ShardId(0, 0)])
    assert [r.error for r in receipts] == ["vLLM did not start: no memory"] and receipts[0].fatal
    assert engine.starts == 1


def test_an_engine_that_starts_again_only_later_is_waited_for(tmp_path: Path, engine: type[CountedEngine]) -> None:
    engine.kills = staticmethod(lambda start, prompt: start == 1 and prompt == 3)
    engine.start_fails = staticmethod(lambda start: 2 <= start <= 4)
    job = make_job(tmp_path, prompts_of(20))
    receipts, _ = run_all(job)
    assert [(r.error, r.failed) for r in receipts if r.error or r.failed] == [] and engine.starts == 5
    assert sorted(stored_states(job)) == list(range(20))


def test_states_that_are_handed_over_by_a_dying_engine_are_kept(
    tmp_path: Path, engine: type[CountedEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    extracted: list[int] = []

    async def extract(self: FakeEngine, key: str, token_ids: Sequence[int]) -> None:
        if token_ids[0] == 0:  # dies when all others are done
            await asyncio.sleep(0.3)
            if engine.starts == 1:
                self._dead = True
        await FakeEngine.extract(self, key, token_ids)
        extracted.append(token_ids[0])

    monkeypatch.setattr(engine, "extract", extract)
    job = make_job(tmp_path, [[i] for i in range(10)], shards={"target_bytes": 2**30})
    receipts, _ = run_all(job)
    assert [(r.error, r.failed) for r in receipts if r.error or r.failed] == []
    assert sorted(extracted) == list(range(10))


def test_an_engine_that_dies_between_answer_and_handover_loses_nothing(
    tmp_path: Path, engine: type[CountedEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def extract(self: FakeEngine, key: str, token_ids: Sequence[int]) -> None:
        if engine.starts == 1:
            self._dead = True  # answered, never staged
            return
        await FakeEngine.extract(self, key, token_ids)

    monkeypatch.setattr(engine, "extract", extract)
    job = make_job(tmp_path, prompts_of(4))
    receipts, _ = run_all(job)
    assert [(r.error, r.failed) for r in receipts if r.error or r.failed] == []


def test_bad_states_fail_their_sample_alone(tmp_path: Path, engine: type[CountedEngine]) -> None:
    prompts = prompts_of(20)
    prompts[6] = [3, NAN_TOKEN, 4]
    job = make_job(tmp_path, prompts)
    receipts, _ = run_all(job)
    assert not any(r.error for r in receipts)
    assert reasons(job) == {6: "not finite: layer 8 has NaN or infinite states"}
    assert engine.starts == 1


def test_a_broken_model_stops_the_run_and_skips_nothing(tmp_path: Path, engine: type[CountedEngine]) -> None:
    good = prompts_of(12)
    bad = [[NAN_TOKEN, i] for i in range(200)]
    job = make_job(tmp_path, [*good, *bad], engine={"max_consecutive_failures": 30})
    receipts, _ = run_all(job)
    fatal = [r for r in receipts if r.fatal]
    assert fatal and "31 samples failed one after the other" in fatal[0].error
    assert "last: not finite: layer 8" in fatal[0].error and "max_consecutive_failures 30" in fatal[0].error
    store = open_store(job.config.output)
    for name, _ in store.list("commits"):
        record: CommitRecord = CommitRecord.from_bytes(store.get(name), name)
        assert "ok" in record.status, "a shard that failed whole under a broken model stays open"


def test_failures_below_the_limit_are_committed(tmp_path: Path, engine: type[CountedEngine]) -> None:
    prompts = [[NAN_TOKEN, i] for i in range(30)]
    job = make_job(tmp_path, prompts, engine={"max_consecutive_failures": 30})
    receipts, _ = run_all(job)
    assert not any(r.error for r in receipts)
    assert len(reasons(job)) == 30
    assert all(open_store(job.config.output).size(commit_name(s)) for s in job.dataset.plan.shard_ids())
