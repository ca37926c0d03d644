"""One replica: an engine, its staging area and the shards in flight between them and the store.

No Ray here: `rayhs.extractor` wraps it into an actor, tests run it as it is.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, contextmanager
from typing import Any, TypeVar

import stamina

from rayhs.budget import ByteBudget
from rayhs.engine import Engine, make_engine
from rayhs.errors import (
    REPAIR_HINT,
    ConfigError,
    EngineError,
    FormatError,
    ObjectNotFound,
    SampleError,
    StoreError,
    StoreUnavailable,
    TooManyFailed,
)
from rayhs.job import Job, Receipt, staging_bytes
from rayhs.keeper import EngineKeeper, Running
from rayhs.layout import CommitRecord, ShardId, commit_name, new_attempt
from rayhs.log import logger
from rayhs.metrics import Metrics, Totals, read_metrics
from rayhs.parts import StagedParts
from rayhs.planned import PLAN_COLUMNS, planned_samples
from rayhs.quarantine import Results, run_all
from rayhs.reading.catalog import read_commit
from rayhs.reading.plan_reader import PlanReader
from rayhs.shards import FailedSample, GoodSample, PlannedSample, read_staged, write_shard
from rayhs.staging import OwnedDirectory
from rayhs.store import Store, open_store
from rayhs.streak import Streak
from rayhs.turns import Turns
from rayhs.warm_start import Begin, WarmStart

_CHECKERS = 4  # memory bandwidth, not threads, is the limit; more of them fight for the GIL
_CHECKED_HERE = 2**20  # bytes; of less, handing it to a checker would cost more than the check
_MOST_STORE_FAILURES = 3  # shards in a row; each has had its attempts and the store's own retries
_RETRY_WAIT_S = (1.0, 30.0)  # first and longest wait, doubled each time, between uploads of a shard
HANDED_BACK = "handed back: the run was interrupted"

T = TypeVar("T")


class _HandedBack(Exception):
    """The replica stops before this shard was extracted."""


class Replica:
    """Extracts shards, several at once. All methods run on one event loop."""

    def __init__(self, job: Job, replicas_per_node: int = 1, begin: Begin | None = None) -> None:
        """``begin`` is awaited once the engine is warm; without it no engine is warmed up."""
        self._job = job
        self._spec = job.shard_spec
        self._store: Store = open_store(job.config.output, job.config.storage)
        self._plan = PlanReader(self._store, job.dataset.plan)
        limit = staging_bytes(job, replicas_per_node)
        self._owned: OwnedDirectory | None = None
        self.budget = ByteBudget(limit)
        self._keeper = EngineKeeper(self._make_engine, self._make_area)
        self._warm_start = WarmStart(self._keeper, begin) if begin is not None else None
        self._metrics = Metrics()
        self._running_samples = 0
        self._turns = Turns()
        self._checkers = ThreadPoolExecutor(_CHECKERS, thread_name_prefix="rayhs-check")
        self._streak = Streak(job.config.engine.max_consecutive_failures)
        self._store_failures = 0
        self._stopping = asyncio.Event()
        self._active: set[asyncio.Task[Any]] = set()

    def _make_engine(self, area: StagedParts) -> Engine:
        job = self._job
        return make_engine(job.config, job.model, job.dataset.layers, area, job.measured)

    def _make_area(self, name: str) -> StagedParts:
        # Not before there is work: Ray ends an actor that was still starting without a word to it.
        if self._owned is None:
            self._owned = OwnedDirectory(self._job.config.staging.path)
        return StagedParts(self._owned.path / name, self.budget.limit, self._job.dataset.layers, self._job.ranks)

    async def run_shard(self, shard: ShardId) -> Receipt:
        """Extract and commit one shard; what goes wrong with it, the engine or the store is in the receipt."""
        task = asyncio.current_task()
        assert task is not None
        self._active.add(task)
        try:
            return await self._run(shard)
        except (ConfigError, EngineError, TooManyFailed) as error:
            self._streak.give_up(str(error))
            await self._withdraw()
            return Receipt(str(shard), error=str(error), fatal=True)
        except FormatError as error:
            return Receipt(str(shard), error=f"{error}; {REPAIR_HINT}")
        except StoreError as error:
            self._store_failures += 1
            logger.warning("shard %s: %s", shard, error)
            if self._store_failures < _MOST_STORE_FAILURES:
                return Receipt(str(shard), error=str(error))
            advice = f"{_MOST_STORE_FAILURES} shards in a row could not be stored; run the same command again to go on"
            return Receipt(str(shard), error=f"{error}; {advice}", fatal=True)
        except _HandedBack:
            return Receipt(str(shard), error=HANDED_BACK)
        finally:
            self._active.discard(task)

    async def hand_back(self) -> None:
        """Stop early: shards being extracted are given up, those being uploaded are finished; then `stop`."""
        self._stopping.set()
        if self._active:
            await asyncio.wait(self._active)
        await self.stop()

    async def stop(self) -> None:
        await self._keeper.stop()
        self._checkers.shutdown(wait=False, cancel_futures=True)
        if self._owned is not None:
            self._owned.remove()

    async def _run(self, shard: ShardId) -> Receipt:
        started = time.time()
        committed = await self._unless_stopped(asyncio.to_thread(self._committed, shard))
        if committed is not None:  # Ray runs a dead actor's tasks again, finished shards of theirs too
            return self._receipt(committed, started)
        await self._unless_stopped(self.ready())
        started = time.time()
        async with AsyncExitStack() as held:
            results = await self._unless_stopped(self._extract(shard, held))
            extracted = time.time()
            self._streak.refuse(any(isinstance(result, FailedSample) for result in results))
            with self._metrics.timed("to store"):
                record = await self._commit(shard, results)
            self._metrics.add("to store", 0.0, record.object_bytes)
        self._store_failures = 0
        self._streak.committed(record)
        self._streak.refuse("failed" in record.status)
        return self._receipt(record, started, extracted)

    async def ready(self) -> None:
        """Start the engine; of a measured job, warm it up and wait for the other replicas.

        Raises:
            EngineError: as `EngineKeeper.ready`.
        """
        await self._keeper.ready()
        if self._warm_start is not None:
            rows = await asyncio.to_thread(self._plan.rows, self._job.dataset.plan.shard_ids()[0], PLAN_COLUMNS)
            await self._warm_start.wait(planned_samples(rows))

    def _committed(self, shard: ShardId) -> CommitRecord | None:
        try:
            return read_commit(self._store, shard)
        except ObjectNotFound:
            return None

    async def _unless_stopped(self, work: Coroutine[Any, Any, T]) -> T:
        if self._stopping.is_set():
            work.close()
            raise _HandedBack
        task, stop = asyncio.ensure_future(work), asyncio.ensure_future(self._stopping.wait())
        try:
            await asyncio.wait((task, stop), return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            raise _HandedBack
        finally:
            for one in (task, stop):
                one.cancel()
            await asyncio.wait((task, stop))
            if not task.cancelled():
                task.exception()  # looked at, or asyncio complains

    async def _extract(self, shard: ShardId, held: AsyncExitStack) -> list[GoodSample | FailedSample]:
        """The results of a shard, in plan order; their memory is reserved as long as ``held`` is open."""
        rows = await asyncio.to_thread(self._plan.rows, shard, PLAN_COLUMNS)
        planned = planned_samples(rows)
        await held.enter_async_context(self.budget.reserve(self._staged_bytes(planned)))
        results: Results = {}

        async def run(samples: Sequence[PlannedSample]) -> EngineError | None:
            return await self._run_group(f"{shard}.{new_attempt()}", samples, results, held)

        def give_up(sample: PlannedSample, error: EngineError) -> None:
            self._fail(results, sample, f"killed the engine: {error}")

        await run_all(planned, results, run, give_up, self._turns)
        return [results[sample.index] for sample in planned]

    async def _run_group(
        self, key: str, samples: Sequence[PlannedSample], results: Results, held: AsyncExitStack
    ) -> EngineError | None:
        died: EngineError | None = None
        async with self._keeper.engine() as running:
            try:
                async with asyncio.TaskGroup() as group:
                    for i, sample in enumerate(samples):
                        group.create_task(self._run_sample(f"{key}.{i}", sample, running, results, held))
            except* EngineError as errors:
                died = EngineError(str(errors.exceptions[0]))
            if died is not None:
                await self._keeper.died(running, died)
                await asyncio.to_thread(_detach, results, samples)
        return died

    async def _run_sample(
        self, key: str, planned: PlannedSample, running: Running, results: Results, held: AsyncExitStack
    ) -> None:
        try:
            token_ids: list[int] = planned.token_ids.tolist()
            with self._engine_used():
                await running.engine.extract(key, token_ids)
            parts = await running.arrivals.wait(key)
            held.callback(running.area.release, key)
            results[planned.index] = await self._checked(parts, planned)
            self._streak.good()
        except SampleError as error:
            self._fail(results, planned, str(error))
        self._keeper.sample_done()

    async def _checked(self, parts: list[memoryview], planned: PlannedSample) -> GoodSample:
        if sum(map(len, parts)) <= _CHECKED_HERE:
            return self._read(parts, planned)
        return await asyncio.get_running_loop().run_in_executor(self._checkers, self._read, parts, planned)

    @contextmanager
    def _engine_used(self) -> Iterator[None]:
        self._running_samples += 1
        self._metrics.waiting("engine idle", False)
        try:
            yield
        finally:
            self._running_samples -= 1
            self._metrics.waiting("engine idle", self._running_samples == 0)

    def _read(self, parts: list[memoryview], planned: PlannedSample) -> GoodSample:
        with self._metrics.timed("check", sum(map(len, parts))):
            return read_staged(parts, planned, self._spec)

    def _fail(self, results: Results, planned: PlannedSample, reason: str) -> None:
        results[planned.index] = FailedSample(planned, reason)
        self._streak.failed(reason)

    async def _commit(self, shard: ShardId, results: Sequence[GoodSample | FailedSample]) -> CommitRecord:
        """Upload, with the states kept for the next attempt where the store fails in ways that pass."""
        attempts = self._job.config.shards.attempts
        first, longest = _RETRY_WAIT_S
        retries = stamina.retry_context(
            on=StoreUnavailable,
            attempts=attempts,
            timeout=None,
            wait_initial=first,
            wait_max=longest,
            wait_jitter=first,
        )
        async for attempt in retries:
            with attempt:
                record = await asyncio.to_thread(write_shard, self._store, shard, results, self._spec)
        return record

    async def _withdraw(self) -> None:
        """Take back the commit records of shards in which a dead model failed every sample."""
        names = [commit_name(shard) for shard in self._streak.shards]
        try:
            await asyncio.to_thread(self._store.delete, names)
        except StoreError as error:
            logger.warning("to extract them again, delete %s by hand: %s", ", ".join(names), error)

    def _staged_bytes(self, planned: Sequence[PlannedSample]) -> int:
        extra = self._job.dataset.include_generated
        return min(sum(self._job.sample_bytes(len(p.token_ids) + extra) for p in planned), self.budget.limit)

    def _receipt(self, record: CommitRecord, started: float, extracted: float = 0.0) -> Receipt:
        return Receipt.of(record, started, extracted, json.dumps(self._all_metrics()) if self._job.measured else "")

    def _all_metrics(self) -> Totals:
        staging = self._keeper.staging
        return {**self._metrics.totals(), **(read_metrics(staging) if staging else {})}


def _detach(results: Results, samples: Sequence[PlannedSample]) -> None:
    """Move what a dead engine has handed over out of its staging memory, which the next one needs."""
    for sample in samples:
        result = results.get(sample.index)
        if isinstance(result, GoodSample):
            results[sample.index] = result.detached()
