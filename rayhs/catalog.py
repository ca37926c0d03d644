"""The records of a dataset in its store: identity, plan, commits, index, summary; read and checked."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from rayhs import layout
from rayhs.codec import STATE_DTYPES
from rayhs.errors import FormatError, ObjectNotFound
from rayhs.layout import CommitRecord, DatasetRecord, Plan, ShardId, Summary
from rayhs.lru import LruCache
from rayhs.store import Store

_READERS = 8


def read_dataset_record(store: Store) -> DatasetRecord:
    """``dataset.json``.

    Raises:
        ObjectNotFound: there is no dataset at this address.
        FormatError: it is damaged, or has a dtype or format version this rayhs doesn't know.
    """
    try:
        data = store.get(layout.DATASET)
    except ObjectNotFound:
        raise ObjectNotFound(f"{store.uri}: no dataset here ({layout.DATASET} is missing); check the address") from None
    record: DatasetRecord = DatasetRecord.from_bytes(data, layout.DATASET)
    if record.dtype not in STATE_DTYPES:
        raise FormatError(f"{layout.DATASET}: dtype {record.dtype!r} is not known to this rayhs; a later one reads it")
    return record


def read_summary(store: Store) -> Summary | None:
    """``summary.json``, or None while the run has not finished."""
    try:
        data = store.get(layout.SUMMARY)
    except ObjectNotFound:
        return None
    summary: Summary = Summary.from_bytes(data, layout.SUMMARY)
    return summary


def read_commit(store: Store, shard: ShardId) -> CommitRecord:
    """The commit record of ``shard``; raises ObjectNotFound or FormatError."""
    name = layout.commit_name(shard)
    commit: CommitRecord = CommitRecord.from_bytes(store.get(name), name)
    if commit.shard != str(shard):
        raise FormatError(f"{name}: it is the record of shard {commit.shard}")
    return commit


def committed_shards(store: Store) -> list[ShardId]:
    """The shards that have a commit record, in plan order."""
    found = (layout.shard_of_commit(name) for name, _ in store.list("commits/"))
    return sorted(shard for shard in found if shard is not None)


def read_commits(store: Store, shards: Sequence[ShardId]) -> Iterator[CommitRecord]:
    """The commit records of ``shards``, in that order, several reads in flight."""
    with ThreadPoolExecutor(_READERS) as pool:
        for start in range(0, len(shards), 16 * _READERS):
            yield from pool.map(lambda shard: read_commit(store, shard), shards[start : start + 16 * _READERS])


class PlanReader:
    """Rows of ``samples/*.parquet`` by shard or by sample index; picklable, safe for many threads."""

    def __init__(self, store: Store, plan: Plan) -> None:
        self._store = store
        self._plan = plan
        self._ends = list(accumulate(f.rows for f in plan.files))
        self._footers: LruCache[int, pq.FileMetaData] = LruCache(64)
        self._columns: LruCache[ShardId, list[str | None]] = LruCache(8)

    def footer(self, file: int) -> pq.FileMetaData:
        """The Parquet footer of a samples file, cached.

        Raises:
            FormatError: another number of rows or row groups than the plan, or another schema.
        """
        return self._footers.get(file, lambda: self._read_footer(file))

    def rows(self, shard: ShardId, columns: Sequence[str] | None = None) -> pa.Table:
        """The rows of one shard (one row group), rejected ones included, in input order.

        Raises:
            FormatError: they can't be decoded, or their index is not the one of their place.
        """
        name, footer = layout.samples_name(shard.file), self.footer(shard.file)
        with parquet_errors(name):
            file = pq.ParquetFile(
                self._store.open_input(name), metadata=footer, pre_buffer=True, page_checksum_verification=True
            )
            return file.read_row_group(shard.group, columns=None if columns is None else list(columns))

    def file_rows(self, file: int, columns: Sequence[str]) -> pa.Table:
        """All rows of one samples file, of ``columns`` only."""
        name, footer = layout.samples_name(file), self.footer(file)
        with parquet_errors(name):
            source = self._store.open_input(name)
            return pq.ParquetFile(source, metadata=footer, pre_buffer=True).read(columns=list(columns))

    def first_index(self, shard: ShardId) -> int:
        """``index`` of the first row of a shard."""
        footer = self.footer(shard.file)
        before: int = sum(footer.row_group(g).num_rows for g in range(shard.group))
        return self._file_start(shard.file) + before

    def locate(self, index: int) -> tuple[ShardId, int]:
        """The shard that holds the row of sample ``index``, and which of its rows it is."""
        file = bisect_right(self._ends, index)
        row = index - self._file_start(file)
        footer, group = self.footer(file), 0
        while row >= footer.row_group(group).num_rows:
            row -= footer.row_group(group).num_rows
            group += 1
        return ShardId(file, group), row

    def columns_of(self, index: int) -> dict[str, Any]:
        """The pass-through columns of the input row of sample ``index``."""
        shard, row = self.locate(index)
        values = self._columns.get(shard, lambda: self.rows(shard, ["columns"]).column(0).to_pylist())
        try:
            columns = json.loads(values[row] or "{}")
        except ValueError:
            columns = None
        if not isinstance(columns, dict):
            raise FormatError(f"{layout.samples_name(shard.file)}: the columns of sample {index} are not a JSON object")
        return columns

    def _file_start(self, file: int) -> int:
        return self._ends[file - 1] if file else 0

    def _read_footer(self, file: int) -> pq.FileMetaData:
        name, planned = layout.samples_name(file), self._plan.files[file]
        with parquet_errors(name):
            parsed = pq.ParquetFile(self._store.open_input(name))
            footer, schema = parsed.metadata, parsed.schema_arrow
        check_schema(schema, layout.SAMPLES_SCHEMA, name)
        if footer.num_rows != planned.rows or footer.num_row_groups != len(planned.shard_tokens):
            raise FormatError(
                f"{name}: {footer.num_rows} rows in {footer.num_row_groups} row groups, "
                f"the plan has {planned.rows} in {len(planned.shard_tokens)}"
            )
        return footer


class parquet_errors:  # noqa: N801 - reads as a statement: with parquet_errors(name)
    """Turn Arrow's errors about an object into one FormatError line that names it."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, (pa.ArrowException, OSError)):
            raise FormatError(f"{self._name}: not readable: {' '.join(str(error).split())[:200]}") from None


def check_schema(schema: pa.Schema, expected: pa.Schema, name: str) -> None:
    """Raises FormatError unless ``schema`` has the columns of ``expected``, in order and type."""
    have = dict(zip(schema.names, schema.types, strict=True))
    for column, kind in zip(expected.names, expected.types, strict=True):
        if column not in have or not _same_type(have[column], kind):
            found = f"is {have[column]}" if column in have else "is missing"
            raise FormatError(f"{name}: column {column!r} {found}; it should be {kind}")


def _same_type(have: pa.DataType, want: pa.DataType) -> bool:
    # The name and nullability of a list's element vary between writers and mean nothing here.
    if pa.types.is_list(have) and pa.types.is_list(want):
        return bool(have.value_type.equals(want.value_type))
    return bool(have.equals(want))


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


def read_index_file(store: Store, file: int) -> pa.Table:
    """``index/<file>.parquet`` with INDEX_SCHEMA's columns; raises ObjectNotFound or FormatError."""
    name = layout.index_name(file)
    data = store.get(name)
    with parquet_errors(name):
        source = pq.ParquetFile(pa.BufferReader(data), page_checksum_verification=True)
        check_schema(source.schema_arrow, layout.INDEX_SCHEMA, name)
        table = source.read(columns=layout.INDEX_SCHEMA.names)
    if any(table[f.name].null_count for f in layout.INDEX_SCHEMA if not f.nullable):
        raise FormatError(f"{name}: nulls where there must be none")
    return table.cast(layout.INDEX_SCHEMA)


def read_index(store: Store, plan: Plan) -> pa.Table:
    """The whole index, checked: one row a planned sample, in order, with names inside the dataset.

    Raises:
        ObjectNotFound, FormatError: a file is missing, damaged or says something impossible.
    """
    with ThreadPoolExecutor(_READERS) as pool:
        parts = list(pool.map(lambda file: read_index_file(store, file), range(len(plan.files))))
    table = pa.concat_tables(parts).combine_chunks() if parts else layout.INDEX_SCHEMA.empty_table()
    index = table["index"].to_numpy()
    if len(index) != plan.samples or not np.array_equal(index, np.arange(plan.samples)):
        raise FormatError(f"{store.uri}: the index is not one row a sample, in order; run rayhs verify {store.uri}")
    check_index(table)
    return table


def partial_index(store: Store, plan: PlanReader, shards: Sequence[ShardId]) -> pa.Table:
    """Index rows of the committed ``shards`` of an unfinished dataset, built from plan and commits."""
    columns = ["index", "sample_id", "status", "reason"]
    commits = read_commits(store, shards)
    parts = [index_rows(plan.rows(shard, columns), commit) for shard, commit in zip(shards, commits, strict=True)]
    return pa.concat_tables(parts).combine_chunks() if parts else layout.INDEX_SCHEMA.empty_table()


def check_index(table: pa.Table) -> None:
    """Raises FormatError for rows that contradict themselves or name an object outside the dataset."""
    for name in pc.unique(table["shard"]).to_pylist():
        if name is not None and layout.shard_of_object(name) is None:
            raise FormatError(f"index: {name!r} is not the name of a shard's object")
    good = np.asarray(pc.equal(table["status"], "ok"))
    known = np.asarray(pc.is_in(table["status"], pa.array(["ok", "failed", "rejected"])))
    placed = (table["token_start"].to_numpy() >= 0) & (table["num_tokens"].to_numpy() > 0)
    has_shard = np.asarray(table["shard"].is_valid())
    wrong = ~known | (good & ~(placed & has_shard))
    if wrong.any():
        row = int(np.flatnonzero(wrong)[0])
        raise FormatError(f"index: the row of sample {table['index'][row].as_py()} contradicts itself")
