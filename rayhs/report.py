"""What `rayhs status`, `failures` and `show` say about a dataset, as plain data."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pyarrow.compute as pc

from rayhs.codec import Array
from rayhs.dataset import Dataset, Sample
from rayhs.errors import ConfigError
from rayhs.layout import DatasetRecord, ShardId
from rayhs.reading.catalog import committed_shards, read_commits, read_dataset_record, read_summary
from rayhs.reading.index_table import read_index_file
from rayhs.reading.plan_reader import PlanReader
from rayhs.store import Store

_FIRST_TOKENS = 16


@dataclass(frozen=True)
class StatusReport:
    """How far a dataset is. Counts are samples, tokens are stored ones, ``bytes`` is of shard objects.

    ``reasons`` counts failed and rejected samples by reason, numbers in them replaced by N. ``errors``
    are by layer id, of a complete dataset stored in float8_e4m3fn (`rayhs.layout.LayerError`).
    """

    uri: str
    model: str
    layers: list[int]
    hidden_size: int
    dtype: str
    shard_format: str
    complete: bool
    samples: int
    ok: int
    failed: int
    rejected: int
    remaining: int
    planned_tokens: int
    tokens: int
    shards: int
    committed_shards: int
    bytes: int
    reasons: dict[str, int]
    errors: dict[str, dict[str, float]]
    created: str
    finished: str | None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def status(store: Store) -> StatusReport:
    """The state of a finished or unfinished dataset; raises ObjectNotFound, FormatError or StoreError."""
    record, summary = read_dataset_record(store), read_summary(store)
    plan = record.plan
    if summary is not None:
        shards = len(plan.shard_ids())
        done: dict[str, Any] = {
            "ok": summary.ok,
            "failed": summary.failed,
            "rejected": summary.rejected,
            "tokens": summary.tokens,
        }
        done |= {"bytes": summary.bytes, "committed_shards": shards, "finished": summary.finished}
        done |= {"errors": {layer: error.model_dump() for layer, error in summary.errors.items()}}
        return _status(store, record, done, summary.reasons)
    found: dict[str, Any] = dict.fromkeys(("ok", "failed", "tokens", "bytes", "committed_shards"), 0)
    for commit in read_commits(store, _committed(store, record)):
        found["committed_shards"] += 1
        found["ok"] += commit.status.count("ok")
        found["failed"] += commit.status.count("failed")
        found["tokens"] += sum(commit.good_tokens)
        found["bytes"] += commit.object_bytes
    # As in the summary, numbers in reasons are made equal: the kinds of reason stay few.
    reasons = Counter(re.sub(r"\d+", "N", row["reason"] or "") for row in failures(store))
    found |= {"rejected": plan.rejected, "errors": {}, "finished": None}
    return _status(store, record, found, dict(reasons))


def _status(store: Store, record: DatasetRecord, done: dict[str, Any], reasons: dict[str, int]) -> StatusReport:
    plan = record.plan
    return StatusReport(
        uri=store.uri,
        model=record.model,
        layers=record.layers,
        hidden_size=record.hidden_size,
        dtype=record.dtype,
        shard_format=record.shard_format,
        complete=done["finished"] is not None,
        samples=plan.samples,
        remaining=plan.samples - done["ok"] - done["failed"] - done["rejected"],
        planned_tokens=plan.tokens,
        shards=len(plan.shard_ids()),
        reasons=reasons,
        created=record.created,
        **done,
    )


def _committed(store: Store, record: DatasetRecord) -> list[ShardId]:
    planned = set(record.plan.shard_ids())
    return [shard for shard in committed_shards(store) if shard in planned]


def failures(store: Store) -> Iterator[dict[str, Any]]:
    """Rows without states (sample_id, index, status, reason) in input order.

    Of an unfinished dataset: what the plan rejected, and what failed in the committed shards. The
    rows of one file are in memory at a time.
    """
    record = read_dataset_record(store)
    if read_summary(store) is None:
        yield from _failures_so_far(store, record)
        return
    for file in range(len(record.plan.files)):
        table = read_index_file(store, file)
        bad = table.filter(pc.not_equal(table["status"], "ok"))
        yield from bad.select(["sample_id", "index", "status", "reason"]).to_pylist()


def _failures_so_far(store: Store, record: DatasetRecord) -> Iterator[dict[str, Any]]:
    plan, committed = PlanReader(store, record.plan), _committed(store, record)
    for file, planned in enumerate(record.plan.files):
        failed = {
            index: reason
            for commit in read_commits(store, [s for s in committed if s.file == file])
            for index, state, reason in zip(commit.index, commit.status, commit.reason, strict=True)
            if state == "failed"
        }
        if not failed and not planned.rejected:
            continue
        for row in plan.file_rows(file, ["sample_id", "index", "status", "reason"]).to_pylist():
            if row["status"] == "rejected":
                yield row
            elif row["index"] in failed:
                yield {**row, "status": "failed", "reason": failed[row["index"]]}


def identity(record: DatasetRecord) -> dict[str, Any]:
    """The identity of a dataset, without its plan."""
    return record.model_dump(mode="json", exclude={"plan"}, exclude_none=True)


def show(store: Store, sample: str | None = None) -> dict[str, Any]:
    """The identity of a dataset and one sample of it: ``{"identity": ..., "sample": ...}``.

    Args:
        sample: a sample id or, where no id matches, a position; default the first good sample
            (None in the result when there is none).

    Raises:
        ConfigError: no such sample.
        SampleError: the sample failed or was rejected.
    """
    record = read_dataset_record(store)
    dataset = Dataset(store, record, read_summary(store))
    chosen = next(dataset.samples(prefetch=1), None) if sample is None else _find(dataset, sample)
    return {"identity": identity(record), "sample": None if chosen is None else describe(chosen)}


def _find(dataset: Dataset, sample: str) -> Sample:
    try:
        position = dataset.position_of(sample)
    except KeyError:
        if not sample.removeprefix("-").isdecimal() or not -len(dataset) <= int(sample) < len(dataset):
            raise ConfigError(f"no sample {sample!r}: neither an id nor one of {len(dataset)} positions") from None
        position = int(sample)
    return dataset[position]


def describe(sample: Sample) -> dict[str, Any]:
    """One sample in short: first token ids, and per layer the mean and largest norm of its tokens."""
    return {
        "sample_id": sample.sample_id,
        "index": sample.index,
        "tokens": len(sample.token_ids),
        "first_token_ids": sample.token_ids[:_FIRST_TOKENS].tolist(),
        "loss_tokens": int(sample.loss_mask.sum()),
        "columns": sample.columns,
        "layers": {str(layer): _norms(states) for layer, states in sample.hidden_states.items()},
    }


def _norms(states: Array) -> dict[str, Any]:
    norms = np.linalg.norm(states.astype(np.float32), axis=1)
    return {"shape": list(states.shape), "norm_mean": float(norms.mean()), "norm_max": float(norms.max())}
