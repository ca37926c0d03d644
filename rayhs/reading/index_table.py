"""The index of a dataset: read whole and checked, or built from plan and commit records."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rayhs import layout
from rayhs.errors import FormatError, ObjectNotFound
from rayhs.layout import CommitRecord, Plan, ShardId
from rayhs.reading.catalog import read_commits
from rayhs.reading.outline import distinct, good_rows
from rayhs.reading.plan_reader import PlanReader
from rayhs.reading.stored_table import open_table, parquet_errors
from rayhs.store import Store

_READERS = 8


def index_rows(rows: pa.Table, commit: CommitRecord | None) -> pa.Table:
    """The index rows of one shard: its samples rows (INDEX_SCHEMA's columns used) and its commit.

    Args:
        rows: columns index, sample_id, status, reason of the shard's rows, rejected ones included.
        commit: None for a shard without a planned row.

    Raises:
        FormatError: the commit's samples are not exactly the planned ones, in order.
    """
    planned = np.asarray(pc.equal(rows["status"], layout.PLANNED))
    count = len(rows)
    index = rows["index"].to_numpy()
    own = [] if commit is None else commit.index
    if index[planned].tolist() != own:
        where = "a shard without a commit record" if commit is None else layout.commit_name(ShardId.parse(commit.shard))
        raise FormatError(f"{where}: its {len(own)} samples are not the {int(planned.sum())} planned ones, in order")
    start, tokens = np.zeros(count, np.int64), np.zeros(count, np.int64)
    status = np.full(count, "rejected", dtype=object)
    reason = np.asarray(rows["reason"].to_pylist(), dtype=object)
    shard = np.full(count, None, dtype=object)
    if commit is not None:
        good = np.asarray([s == "ok" for s in commit.status], dtype=bool)
        status[planned], reason[planned] = commit.status, commit.reason
        start[planned] = np.where(good, commit.token_start, 0)
        tokens[planned] = np.where(good, commit.num_tokens, 0)
        shard[planned] = [commit.object if s == "ok" else None for s in commit.status]
    columns = [rows["index"], rows["sample_id"], pa.array(shard, pa.string()), start, tokens, status, reason]
    return pa.table(columns, schema=layout.INDEX_SCHEMA)


def read_index_file(
    store: Store, file: int, columns: Sequence[str] = tuple(layout.INDEX_SCHEMA.names), plain: bool = True
) -> pa.Table:
    """``index/<file>.parquet`` with ``columns`` of INDEX_SCHEMA, whose texts may be dictionaries if not ``plain``.

    Raises:
        ObjectNotFound, FormatError: it is missing, or no such table.
    """
    name = layout.index_name(file)
    data = store.get(name)
    stored = open_table(data, len(data), layout.INDEX_SCHEMA, name)
    view = memoryview(data)
    with parquet_errors(name):
        groups = range(len(stored.groups))
        table = stored.read(groups, columns, lambda rs: [view[at : at + size] for at, size in rs], plain)
    schema = pa.schema([layout.INDEX_SCHEMA.field(column) for column in columns])
    if any(table[field.name].null_count for field in schema if not field.nullable):
        raise FormatError(f"{name}: nulls where there must be none")
    return table.cast(schema) if plain else table


def read_index(store: Store, plan: Plan) -> pa.Table:
    """The whole index, checked: one row a planned sample, in order, with names inside the dataset.

    Raises:
        ObjectNotFound, FormatError: a file is missing, damaged or says something impossible.
    """
    with verify_advised(store), ThreadPoolExecutor(_READERS) as pool:
        parts = list(pool.map(lambda file: read_index_file(store, file), range(len(plan.files))))
    table = _joined(parts)
    index = table["index"].to_numpy()
    if len(index) != plan.samples or not np.array_equal(index, np.arange(plan.samples)):
        raise FormatError(f"{store.uri}: the index is not one row a sample, in order; run rayhs verify {store.uri}")
    with verify_advised(store):
        check_index(table)
    return table


@contextmanager
def verify_advised(store: Store) -> Iterator[None]:
    """An error about the index also says what tells more."""
    try:
        yield
    except (FormatError, ObjectNotFound) as error:
        raise type(error)(f"{error}; run rayhs verify {store.uri}") from None


def _joined(parts: list[pa.Table]) -> pa.Table:
    """One table with one chunk a column; ``parts`` are emptied."""
    table = pa.concat_tables(parts) if parts else layout.INDEX_SCHEMA.empty_table()
    parts.clear()
    columns = []
    for name in layout.INDEX_SCHEMA.names:
        # One after the other: else there would be all of the index twice for a moment.
        columns.append(table[name].combine_chunks())
        table = table.drop_columns([name])
    return pa.table(columns, schema=layout.INDEX_SCHEMA)


def partial_index(store: Store, plan: PlanReader, shards: Sequence[ShardId]) -> pa.Table:
    """Index rows of the committed ``shards`` of an unfinished dataset, built from plan and commits."""
    columns = ["index", "sample_id", "status", "reason"]
    commits = read_commits(store, shards)
    parts = [index_rows(plan.rows(shard, columns), commit) for shard, commit in zip(shards, commits, strict=True)]
    return pa.concat_tables(parts).combine_chunks() if parts else layout.INDEX_SCHEMA.empty_table()


def check_index(table: pa.Table) -> None:
    """Raises FormatError for rows that contradict themselves or name an object outside the dataset."""
    names, shard = distinct(table["shard"])
    for name in names:
        if not layout.is_object_name(name):
            raise FormatError(f"index: {name!r} is not the name of a shard's object")
    statuses, status = distinct(table["status"])
    known = np.array([text in ("ok", "failed", "rejected") for text in statuses], bool)[status]
    placed = (table["token_start"].to_numpy() >= 0) & (table["num_tokens"].to_numpy() > 0)
    wrong = ~known | (good_rows(table) & ~(placed & (shard >= 0)))
    if wrong.any():
        row = int(np.flatnonzero(wrong)[0])
        raise FormatError(f"index: the row of sample {table['index'][row].as_py()} contradicts itself")
