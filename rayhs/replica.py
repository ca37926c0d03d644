"""One replica: an engine, its staging area and the shards in flight between them and the store.

No Ray here: `rayhs.extractor` wraps it into an actor, tests run it as it is.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rayhs.arrivals import Arrivals
from rayhs.budget import ByteBudget
from rayhs.codec import STATE_DTYPES, staged_bytes_at_most
from rayhs.config import RunConfig
from rayhs.engine import Engine, make_engine
from rayhs.errors import EngineError, ObjectNotFound, SampleError, StoreError
from rayhs.layout import PLANNED, CommitRecord, DatasetRecord, ShardId, new_attempt
from rayhs.log import logger
from rayhs.model import ModelInfo
from rayhs.reading.catalog import read_commit
from rayhs.reading.plan_reader import PlanReader
from rayhs.shards import FailedSample, GoodSample, PlannedSample, ShardSpec, read_staged, write_shard
from rayhs.staging import OwnedDirectory, StagingArea
from rayhs.store import Store, open_store

_MAX_ENGINE_STARTS = 4
_STAGED_SHARDS = 4
_SHM_SHARE = 0.8
_PLAN_COLUMNS = ["index", "sample_id", "status", "token_ids", "loss_mask"]

# Of dataset.json, in every object's metadata: one that strays, or a damaged dataset.json, is noticed.
_REPEATED_IDENTITY = {
    "format_version",
    "model",
    "revision",
    "model_hash",
    "tokenizer_hash",
    "chat_template_hash",
    "num_layers",
    "hidden_size",
    "dtype",
    "engine_dtype",
    "shard_format",
    "include_generated",
}


@dataclass(frozen=True)
class Job:
    """All a replica needs to know of a run; travels to the actors."""

    config: RunConfig
    model: ModelInfo
    dataset: DatasetRecord

    @property
    def shard_spec(self) -> ShardSpec:
        record = self.dataset
        identity = record.model_dump(include=_REPEATED_IDENTITY, exclude_none=True)
        metadata = {key: str(value) for key, value in identity.items()}
        metadata |= {"layers": ",".join(map(str, record.layers)), "plan": record.plan.fingerprint}
        return ShardSpec(
            tuple(record.layers),
            record.hidden_size,
            record.engine_dtype,
            record.dtype,
            record.shard_format,
            metadata,
            record.include_generated,
        )

    @property
    def token_bytes(self) -> int:
        """Host bytes of one token's states in flight: staged, and converted where they are stored in another dtype."""
        record = self.dataset
        dtypes = {record.engine_dtype, record.dtype}
        return len(record.layers) * record.hidden_size * sum(STATE_DTYPES[d].itemsize for d in dtypes)

    @property
    def largest_shard_bytes(self) -> int:
        """An upper bound of what the largest shard of the plan takes in staging."""
        tokens = max((t for f in self.dataset.plan.files for t in f.shard_tokens), default=0)
        return int(tokens * (self.token_bytes + 8) * 1.02) + 2**20

    @property
    def wanted_staging_bytes(self) -> int:
        """``staging.max_bytes``, or room for four of the largest shards."""
        return int(self.config.staging.max_bytes or max(self.largest_shard_bytes * _STAGED_SHARDS, 64 * 2**20))

    @property
    def shards_in_flight(self) -> int:
        """Shards a replica works on at once; the staging limit decides which of them hold memory."""
        return int(np.clip(self.wanted_staging_bytes // self.largest_shard_bytes, 2, 32))


@dataclass(frozen=True)
class Receipt:
    """What became of one shard; the only thing a replica sends back.

    ``started`` is the Unix time at which its last attempt began, with the engine up; ``seconds`` what it took.
    """

    shard: str
    samples: int = 0
    failed: int = 0
    tokens: int = 0
    bytes: int = 0
    started: float = 0.0
    seconds: float = 0.0
    error: str = ""
    fatal: bool = False

    def as_row(self) -> dict[str, object]:
        return asdict(self)


def staging_bytes(job: Job, per_node: int = 1) -> int:
    """The staging limit in bytes of a replica on this host: what is wanted, within what the file system has.

    Raises:
        EngineError: not even the largest shard fits.
    """
    root = job.config.staging.path
    if not os.path.isdir(root):
        raise EngineError(f"staging.path {root} is not a folder; give one in memory, such as /dev/shm")
    status = os.statvfs(root)
    free = int(status.f_bavail * status.f_frsize * _SHM_SHARE) // per_node
    limit = min(job.wanted_staging_bytes, free)
    if limit < job.largest_shard_bytes:
        raise EngineError(
            f"staging needs {job.largest_shard_bytes} bytes for the largest shard, {limit} are to be had in {root}; "
            "raise staging.max_bytes, give more memory to it, or lower shards.target_bytes"
        )
    return limit


class Replica:
    """Extracts shards, several at once. All methods run on one event loop."""

    def __init__(self, job: Job, replicas_per_node: int = 1) -> None:
        self._job = job
        self._spec = job.shard_spec
        self._store: Store = open_store(job.config.output, job.config.storage)
        self._plan = PlanReader(self._store, job.dataset.plan)
        limit = staging_bytes(job, replicas_per_node)
        self._owned = OwnedDirectory(job.config.staging.path)
        self.budget = ByteBudget(limit)
        self._engine: Engine | None = None
        self._arrivals: Arrivals | None = None
        self._starts = 0
        self._starting = asyncio.Lock()

    async def run_shard(self, shard: ShardId) -> Receipt:
        """Extract and commit one shard; failures of the shard or the engine are told in the receipt."""
        error: Exception | None = None
        for _ in range(self._job.config.shards.attempts):
            try:
                engine = await self._ready_engine()
            except EngineError as fatal:
                return Receipt(str(shard), error=str(fatal), fatal=True)
            try:
                return await self._attempt(shard, engine)
            except EngineError as failure:
                error = failure
                await self._drop_engine(engine)
            except StoreError as failure:
                error = failure
            logger.warning("shard %s: attempt failed: %s", shard, error)
        return Receipt(str(shard), error=str(error))

    async def stop(self) -> None:
        async with self._starting:
            if self._engine is not None:
                await self._engine.stop()
                self._engine = None
        self._owned.remove()

    async def _ready_engine(self) -> Engine:
        async with self._starting:
            if self._engine is None:
                if self._starts == _MAX_ENGINE_STARTS:
                    raise EngineError(f"the engine died {self._starts} times; see the worker's log for why")
                self._starts += 1
                area = StagingArea(self._owned.path / f"engine{self._starts}", self.budget.limit)
                record = self._job.dataset
                engine = make_engine(self._job.config, self._job.model, record.layers, area)
                await engine.start()
                self._arrivals = Arrivals(area)
                self._engine = engine
            return self._engine

    async def _drop_engine(self, engine: Engine) -> None:
        async with self._starting:
            if self._engine is engine:
                self._engine = None
                await engine.stop()

    async def _attempt(self, shard: ShardId, engine: Engine) -> Receipt:
        started = time.time()
        committed = await asyncio.to_thread(self._committed, shard)
        if committed is not None:  # Ray runs a dead actor's tasks again, finished shards of theirs too
            return _receipt(committed, started)
        rows = await asyncio.to_thread(self._plan.rows, shard, _PLAN_COLUMNS)
        planned = planned_samples(rows)
        async with self.budget.reserve(self._staged_bytes(planned)):
            results = await self._extract_all(shard, planned, engine)
            record = await asyncio.to_thread(write_shard, self._store, shard, results, self._spec)
        return _receipt(record, started)

    def _committed(self, shard: ShardId) -> CommitRecord | None:
        try:
            return read_commit(self._store, shard)
        except ObjectNotFound:
            return None

    def _staged_bytes(self, planned: Sequence[PlannedSample]) -> int:
        record, extra = self._job.dataset, self._job.dataset.include_generated
        staged = sum(
            staged_bytes_at_most(record.layers, record.hidden_size, record.engine_dtype, len(p.token_ids) + extra)
            for p in planned
        )
        if record.dtype != record.engine_dtype:
            tokens = sum(len(p.token_ids) + extra for p in planned)
            staged += tokens * len(record.layers) * record.hidden_size * STATE_DTYPES[record.dtype].itemsize
        return min(staged, self.budget.limit)

    async def _extract_all(
        self, shard: ShardId, planned: Sequence[PlannedSample], engine: Engine
    ) -> list[GoodSample | FailedSample]:
        attempt = new_attempt()
        arrivals = self._arrivals
        assert arrivals is not None
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(self._extract(f"{shard}.{attempt}.{i}", sample, engine, arrivals))
                    for i, sample in enumerate(planned)
                ]
        except* EngineError as errors:
            raise errors.exceptions[0] from None
        return [task.result() for task in tasks]

    async def _extract(
        self, key: str, planned: PlannedSample, engine: Engine, arrivals: Arrivals
    ) -> GoodSample | FailedSample:
        try:
            token_ids: list[int] = planned.token_ids.tolist()
            await engine.extract(key, token_ids)
            memory = await arrivals.wait(key)
            return await asyncio.to_thread(read_staged, memory, planned, self._spec)
        except SampleError as error:
            return FailedSample(planned, str(error))


def _receipt(record: CommitRecord, started: float) -> Receipt:
    return Receipt(
        shard=record.shard,
        samples=len(record.index),
        failed=record.status.count("failed"),
        tokens=sum(record.good_tokens),
        bytes=record.object_bytes,
        started=started,
        seconds=time.time() - started,
    )


def planned_samples(rows: pa.Table) -> list[PlannedSample]:
    """The samples to extract, out of the rows of a shard (rejected rows are left out)."""
    kept = rows.filter(pc.equal(rows["status"], PLANNED)).combine_chunks()
    samples = []
    for index, sample_id, token_ids, loss_mask in zip(
        kept["index"].to_pylist(), kept["sample_id"].to_pylist(), kept["token_ids"], kept["loss_mask"], strict=True
    ):
        mask = loss_mask.values.to_numpy() if loss_mask.is_valid else None
        samples.append(PlannedSample(index, sample_id, token_ids.values.to_numpy(), mask))
    return samples
