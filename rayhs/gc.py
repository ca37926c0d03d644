"""What `rayhs gc` removes: objects of attempts that lost or broke off, and unfinished writes.

Never an object that a commit record or the index names, never a record, and nothing younger than the
age given: an attempt commits within `rayhs.shards.COMMIT_WITHIN_S` of its upload's beginning, so what
is older and has no record will never get one.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import pyarrow.compute as pc

from rayhs.errors import ConfigError, FormatError, ObjectNotFound
from rayhs.layout import DatasetRecord, ShardId, index_name, samples_name, shard_of_object
from rayhs.reading.catalog import read_commit_or_error, read_dataset_record
from rayhs.reading.index_table import read_index_file
from rayhs.store import Entry, Store, Unfinished

SAFE_AGE_S = 6 * 3600.0
"""The default age: twice the time an attempt has to commit, with room for clocks that differ."""
_NUMBERED = re.compile(r"(?:samples|index)/\d{5,}\.parquet")
_NAMED = 1000


@dataclass(frozen=True)
class GcReport:
    """What was removed (or would be, with ``dry_run``); bytes where the store tells them.

    ``objects`` are shards' objects and files of an abandoned plan, ``unfinished`` are writes that never
    ended; ``names`` the first 1000 of each. ``young`` were left because of their age, ``damaged``
    because the commit record of their shard can't be read.
    """

    uri: str
    dry_run: bool
    older_than: float
    objects: int
    bytes: int
    unfinished: int
    unfinished_bytes: int
    young: int
    damaged: int
    names: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def parse_age(text: str) -> float:
    """Seconds of an age such as ``90s``, ``30m``, ``6h``, ``2d``, ``0``; raises ConfigError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", text.strip())
    if match is None:
        raise ConfigError(f"--older-than {text}: write an age such as 90s, 30m, 6h or 2d")
    return float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}[match[2]]


def collect(store: Store, *, older_than: float = SAFE_AGE_S, dry_run: bool = False) -> GcReport:
    """Remove what is no part of the dataset and older than ``older_than`` seconds.

    With an age under `SAFE_AGE_S` no run into the place may be going on.

    Raises:
        ObjectNotFound: there is no dataset at this address.
        FormatError: ``dataset.json`` is damaged, so that nothing can be told from garbage.
        StoreError: the store can't be read or refuses to delete.
    """
    record = read_dataset_record(store)
    now = time.time()
    # Objects first, records after: one that is committed in between is seen as committed.
    candidates = [*store.entries("shards"), *strays(store, record)]
    unfinished = list(store.unfinished())
    orphans, damaged = _orphans(store, record, candidates)
    old = [entry for entry in orphans if now - entry.modified >= older_than]
    ended = [one for one in unfinished if now - one.begun >= older_than]
    if not dry_run:
        store.delete(entry.name for entry in old)
        store.discard(ended)
    return _report(store, old, ended, dry_run, older_than, len(orphans) + len(unfinished), damaged)


def _report(
    store: Store,
    old: list[Entry],
    ended: list[Unfinished],
    dry_run: bool,
    older_than: float,
    found: int,
    damaged: int,
) -> GcReport:
    return GcReport(
        uri=store.uri,
        dry_run=dry_run,
        older_than=older_than,
        objects=len(old),
        bytes=sum(entry.size for entry in old),
        unfinished=len(ended),
        unfinished_bytes=sum(one.size for one in ended),
        young=found - len(old) - len(ended),
        damaged=damaged,
        names=(*(entry.name for entry in old[:_NAMED]), *(one.name for one in ended[:_NAMED])),
    )


def strays(store: Store, record: DatasetRecord) -> Iterator[Entry]:
    """Files of an earlier plan that the one in ``dataset.json`` doesn't have."""
    known = {name(file) for file in range(len(record.plan.files)) for name in (samples_name, index_name)}
    for folder in ("samples", "index"):
        for entry in store.entries(folder):
            if _NUMBERED.fullmatch(entry.name) and entry.name not in known:
                yield entry


def _orphans(store: Store, record: DatasetRecord, candidates: Iterable[Entry]) -> tuple[list[Entry], int]:
    """Those that nothing names, and how many were left as their shard's commit record is damaged.

    Objects whose names are none of rayhs' are nobody's business here.
    """
    by_shard: dict[ShardId | None, list[Entry]] = {}
    for entry in candidates:
        shard = shard_of_object(entry.name)
        if shard is not None or _NUMBERED.fullmatch(entry.name):
            by_shard.setdefault(shard, []).append(entry)
    orphans = by_shard.pop(None, [])
    damaged = 0
    shards = [shard for shard in by_shard if shard is not None]
    for shard, commit in zip(shards, read_commit_or_error(store, shards), strict=True):
        if isinstance(commit, FormatError):
            damaged += len(by_shard[shard])
            continue
        named = None if commit is None else commit.object
        orphans += [entry for entry in by_shard[shard] if entry.name != named]
    return _without_indexed(store, record, orphans), damaged


def _without_indexed(store: Store, record: DatasetRecord, orphans: list[Entry]) -> list[Entry]:
    """Readers go by the index: on a server that ignores conditions it may name another attempt than the record."""
    files = {shard.file for entry in orphans if (shard := shard_of_object(entry.name)) is not None}
    indexed: set[str] = set()
    for file in sorted(files.intersection(range(len(record.plan.files)))):
        try:
            indexed.update(pc.unique(read_index_file(store, file)["shard"]).to_pylist())
        except (ObjectNotFound, FormatError):
            continue  # nothing is read through it
    return [entry for entry in orphans if entry.name not in indexed]
