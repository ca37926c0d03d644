"""The end of a run: the index out of plan and commit records; memory is that of one samples file."""

from __future__ import annotations

import io
from collections import Counter
from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from rayhs.layout import ErrorTotals, LayerError, Plan, ShardId, index_name
from rayhs.reading.catalog import read_commits
from rayhs.reading.index_table import index_rows
from rayhs.reading.plan_reader import PlanReader
from rayhs.store import Store

_COLUMNS = ["index", "sample_id", "status", "reason"]


@dataclass
class Totals:
    """What the index holds; ``reasons`` counts failed and rejected samples by category.

    ``index_checksums`` and ``errors`` as in `rayhs.layout.Summary`.
    """

    ok: int = 0
    failed: int = 0
    rejected: int = 0
    tokens: int = 0
    bytes: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    index_checksums: list[str] = field(default_factory=list)
    errors: dict[str, LayerError] = field(default_factory=dict)


def write_index(store: Store, plan: Plan) -> Totals:
    """Write ``index/<file>.parquet`` for every samples file of a plan whose shards are all committed.

    Raises:
        FormatError: a commit record and the plan disagree about the samples of a shard.
        ObjectNotFound: a commit record is gone.
    """
    errors = ErrorTotals()
    totals = Totals(errors=errors.errors)
    samples = PlanReader(store, plan)
    for number, file in enumerate(plan.files):
        shards = [ShardId(number, group) for group in range(len(file.shard_tokens))]
        parts = []
        for shard, commit in zip(shards, read_commits(store, shards), strict=True):
            parts.append(index_rows(samples.rows(shard, _COLUMNS), commit))
            totals.bytes += commit.object_bytes
            errors.add(commit.errors, sum(commit.good_tokens))
        table = pa.concat_tables(parts)
        sink = io.BytesIO()
        pq.write_table(table, sink, write_page_checksum=True)
        store.put(index_name(number), sink.getvalue())
        totals.index_checksums.append(xxhash.xxh3_128(sink.getvalue()).hexdigest())
        _count(totals, table)
    return totals


def _count(totals: Totals, table: pa.Table) -> None:
    statuses = Counter(table["status"].to_pylist())
    totals.ok += statuses["ok"]
    totals.failed += statuses["failed"]
    totals.rejected += statuses["rejected"]
    totals.tokens += sum(table["num_tokens"].to_pylist())
    reasons = (reason for reason in table["reason"].to_pylist() if reason is not None)
    totals.reasons.update(reason.partition(":")[0] for reason in reasons)
