"""The end of a run: the index out of plan and commit records, then the summary, written last."""

from __future__ import annotations

import contextlib
import io
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.parquet as pq

from rayhs.errors import FormatError
from rayhs.layout import (
    INDEX_SCHEMA,
    PLANNED,
    CommitRecord,
    Plan,
    ShardId,
    commit_name,
    index_name,
    samples_name,
    shard_of_commit,
)
from rayhs.store import Store

_READERS = 16
_ROW_COLUMNS = ["index", "sample_id", "status", "reason"]


@dataclass
class Totals:
    """What the index holds; ``reasons`` counts failed and rejected samples by category."""

    ok: int = 0
    failed: int = 0
    rejected: int = 0
    tokens: int = 0
    bytes: int = 0
    reasons: Counter[str] = field(default_factory=Counter)


def committed_shards(store: Store) -> set[ShardId]:
    """Shards that have a commit record (by name; nothing is read)."""
    shards = (shard_of_commit(name) for name, _ in store.list("commits/"))
    return {shard for shard in shards if shard is not None}


def write_index(store: Store, plan: Plan) -> Totals:
    """Write ``index/<file>.parquet`` for every samples file; memory is that of one samples file.

    Raises:
        FormatError: a commit record and the plan disagree about the samples of a shard.
    """
    totals = Totals()
    with ThreadPoolExecutor(_READERS, thread_name_prefix="rayhs-index") as pool:
        for number, file in enumerate(plan.files):
            shards = [ShardId(number, group) for group in range(len(file.shard_tokens))]
            records = list(pool.map(lambda shard: _read_commit(store, shard), shards))
            table = pa.Table.from_pylist(list(_index_rows(store, number, records)), schema=INDEX_SCHEMA)
            sink = io.BytesIO()
            pq.write_table(table, sink)
            store.put(index_name(number), sink.getvalue())
            _count(totals, table, records)
    return totals


def _read_commit(store: Store, shard: ShardId) -> CommitRecord:
    name = commit_name(shard)
    record: CommitRecord = CommitRecord.from_bytes(store.get(name), name)
    return record


def _index_rows(store: Store, file: int, records: list[CommitRecord]) -> Iterator[dict[str, object]]:
    with contextlib.closing(store.open_input(samples_name(file))) as source:
        samples = pq.ParquetFile(source)
        for group, record in enumerate(records):
            rows = samples.read_row_group(group, columns=_ROW_COLUMNS).to_pylist()
            planned = [row["index"] for row in rows if row["status"] == PLANNED]
            if planned != record.index:
                raise FormatError(f"{commit_name(ShardId(file, group))}: its samples are not those of the plan")
            outcomes = iter(range(len(record.index)))
            for row in rows:
                yield _outcome(record, next(outcomes), row) if row["status"] == PLANNED else _rejected(row)


def _outcome(record: CommitRecord, position: int, row: dict[str, object]) -> dict[str, object]:
    good = record.status[position] == "ok"
    return {
        "index": row["index"],
        "sample_id": row["sample_id"],
        "shard": record.object if good else None,
        "token_start": record.token_start[position],
        "num_tokens": record.num_tokens[position],
        "status": record.status[position],
        "reason": record.reason[position],
    }


def _rejected(row: dict[str, object]) -> dict[str, object]:
    return {**row, "shard": None, "token_start": 0, "num_tokens": 0}


def _count(totals: Totals, table: pa.Table, records: list[CommitRecord]) -> None:
    statuses = Counter(table["status"].to_pylist())
    totals.ok += statuses["ok"]
    totals.failed += statuses["failed"]
    totals.rejected += statuses["rejected"]
    totals.tokens += sum(table["num_tokens"].to_pylist())
    totals.bytes += sum(record.object_bytes for record in records)
    reasons = (reason for reason in table["reason"].to_pylist() if reason is not None)
    totals.reasons.update(reason.partition(":")[0] for reason in reasons)
