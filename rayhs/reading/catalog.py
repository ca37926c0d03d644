"""The records of a dataset in its store: identity, commits, summary; read and checked."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from rayhs import layout
from rayhs.codec import FP8, STATE_DTYPES
from rayhs.errors import FormatError, ObjectNotFound
from rayhs.layout import CommitRecord, DatasetRecord, ShardId, Summary
from rayhs.store import Store

_READERS = 8

T = TypeVar("T")


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
    for dtype, known in ((record.dtype, set(STATE_DTYPES)), (record.engine_dtype, set(STATE_DTYPES) - {FP8})):
        if dtype not in known:
            raise FormatError(f"{layout.DATASET}: dtype {dtype!r} is not known to this rayhs; a later one reads it")
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
    return _in_order(lambda shard: read_commit(store, shard), shards)


def read_commit_or_error(store: Store, shards: Sequence[ShardId]) -> Iterator[CommitRecord | FormatError | None]:
    """As `read_commits`, with None for a shard that is not committed and the error for a damaged record."""

    def read(shard: ShardId) -> CommitRecord | FormatError | None:
        try:
            return read_commit(store, shard)
        except ObjectNotFound:
            return None
        except FormatError as error:
            return error

    return _in_order(read, shards)


def _in_order(read: Callable[[ShardId], T], shards: Sequence[ShardId]) -> Iterator[T]:
    with ThreadPoolExecutor(_READERS) as pool:
        for start in range(0, len(shards), 16 * _READERS):
            yield from pool.map(read, shards[start : start + 16 * _READERS])
