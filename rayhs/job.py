"""What a replica is told of a run, and what it tells of a shard."""

from __future__ import annotations

import math
import os
import time
from dataclasses import asdict, dataclass

import numpy as np

from rayhs.codec import FP8, staged_bytes_at_most, token_bytes
from rayhs.config import RunConfig
from rayhs.errors import EngineError
from rayhs.layout import CommitRecord, DatasetRecord
from rayhs.log import logger
from rayhs.model import ModelInfo
from rayhs.parts import fractions, shares
from rayhs.shards import ShardSpec

_STAGED_SHARDS = 16  # a few in the engine, so that it never runs dry, and the rest on their way to the store
_FEW_STAGED_SHARDS = 4
_SHM_SHARE = 0.8

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
    """All a replica needs to know of a run; travels to the actors.

    ``measured``: engines are warmed up, replicas begin together, and receipts carry `rayhs.metrics`.
    """

    config: RunConfig
    model: ModelInfo
    dataset: DatasetRecord
    measured: bool = False

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
    def ranks(self) -> int:
        """The tensor parallel ranks that stage states: those on the replica's node, of several nodes rank 0."""
        engine = self.config.engine
        return 1 if engine.distributed_executor == "ray" else engine.tensor_parallel_size

    def sample_bytes(self, tokens: int) -> int:
        """Host bytes of a sample in flight, at most: staged, and converted where it is stored in another dtype."""
        record = self.dataset
        staged_dtype = record.dtype if record.dtype == FP8 else record.engine_dtype
        parts = shares(record.layers, self.ranks)
        staged = sum(staged_bytes_at_most(layers, record.hidden_size, staged_dtype, tokens) for layers in parts)
        staged = math.ceil(staged * sum(fractions(parts)))
        if record.dtype == staged_dtype:
            return staged
        return staged + tokens * token_bytes(record.layers, record.hidden_size, record.dtype)

    @property
    def largest_shard_bytes(self) -> int:
        """An upper bound of what the largest shard of the plan takes in staging."""
        record, generated = self.dataset, self.dataset.include_generated
        prompts = max((t for f in record.plan.files for t in f.shard_tokens), default=0)
        # A shard of more than one sample is under its target, generated tokens included.
        target = self.config.shards.target_bytes // token_bytes(record.layers, record.hidden_size, record.dtype)
        tokens = min(prompts * (1 + generated), max(target, prompts + generated))
        return int(1.02 * self.sample_bytes(tokens)) + 4 * tokens + 2**20

    @property
    def wanted_staging_bytes(self) -> int:
        """``staging.max_bytes``, or room for sixteen of the largest shards."""
        return int(self.config.staging.max_bytes or max(self.largest_shard_bytes * _STAGED_SHARDS, 64 * 2**20))

    @property
    def shards_in_flight(self) -> int:
        """Shards a replica works on at once; the staging limit decides which of them hold memory."""
        return int(np.clip(self.wanted_staging_bytes // self.largest_shard_bytes, 2, 32))


@dataclass(frozen=True)
class Receipt:
    """What became of one shard; the only thing a replica sends back.

    ``replica`` tells the replicas of a run apart; ``started`` is the Unix time at which the shard was
    begun, with the engine up, ``extracted`` that at which its last state had been checked (0 where nothing was
    extracted), and ``seconds`` what the whole took. ``metrics`` are the JSON of the replica's
    `rayhs.metrics.Totals` so far, where the job is measured.
    ``error`` tells why it was not committed; ``fatal`` that no other shard of the run will be either.
    """

    shard: str
    replica: str = ""
    samples: int = 0
    failed: int = 0
    tokens: int = 0
    bytes: int = 0
    started: float = 0.0
    extracted: float = 0.0
    seconds: float = 0.0
    error: str = ""
    fatal: bool = False
    metrics: str = ""

    @classmethod
    def of(cls, record: CommitRecord, started: float, extracted: float = 0.0, metrics: str = "") -> Receipt:
        """Of a shard that was committed just now."""
        return cls(
            shard=record.shard,
            samples=len(record.index),
            failed=record.status.count("failed"),
            tokens=sum(record.good_tokens),
            bytes=record.object_bytes,
            started=started,
            extracted=extracted,
            seconds=time.time() - started,
            metrics=metrics,
        )

    def as_row(self) -> dict[str, object]:
        return asdict(self)


def staging_bytes(job: Job, per_node: int = 1) -> int:
    """The staging limit in bytes of a replica on this host, one of ``per_node``.

    What ``staging.max_bytes`` asks for is there or refused; by default the limit follows what there is.

    Raises:
        EngineError: the file system has less than was asked for, or not even the largest shard fits.
    """
    root, asked = job.config.staging.path, job.config.staging.max_bytes
    if not os.path.isdir(root):
        raise EngineError(f"staging.path {root} is not a folder; give one in memory, such as /dev/shm")
    status = os.statvfs(root)
    free = int(status.f_bavail * status.f_frsize * _SHM_SHARE) // per_node
    if asked is not None and asked > free:
        raise EngineError(
            f"staging.max_bytes is {int(asked)}, but {root} has room for {free} bytes a replica; "
            "lower it, or give the file system more memory (docker: --shm-size, Kubernetes: a larger emptyDir)"
        )
    limit = min(job.wanted_staging_bytes, free)
    if limit < job.largest_shard_bytes:
        raise EngineError(
            f"staging needs {job.largest_shard_bytes} bytes for the largest shard, {limit} are to be had in {root}; "
            "raise staging.max_bytes, give more memory to it, or lower shards.target_bytes"
        )
    if limit < min(job.wanted_staging_bytes, _FEW_STAGED_SHARDS * job.largest_shard_bytes):
        logger.warning("%s has room for %d bytes of staging, %d are wanted", root, limit, job.wanted_staging_bytes)
    return limit
