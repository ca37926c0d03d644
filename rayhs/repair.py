"""What `rayhs extract --repair` does first: find damage, and take what is damaged out of the dataset.

What is taken out is then missing, and made again as anything that is missing: a shard without its
commit record is extracted, an index without its summary is written. Nothing sound is touched.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from rayhs.errors import FormatError, ObjectNotFound
from rayhs.layout import SUMMARY, DatasetRecord, ShardId, commit_name, samples_name, shard_of_commit
from rayhs.log import logger
from rayhs.reading.catalog import read_commit
from rayhs.reading.plan_reader import PlanReader
from rayhs.reading.shard_reader import open_shard
from rayhs.store import Store
from rayhs.verify.shard import check_metadata, check_shard
from rayhs.verify.states import differs_from_checksum

OnChecked = Callable[[int, int], None]  # shards done, shards in all


@dataclass
class Damage:
    """Shards to extract again, and those whose rows of the plan can't be read, so that they can't be checked."""

    shards: set[ShardId] = field(default_factory=set)
    unplanned: set[ShardId] = field(default_factory=set)


def find_damage(store: Store, record: DatasetRecord, shards: Sequence[ShardId], on_checked: OnChecked) -> Damage:
    """Check ``shards`` as `rayhs verify` does, reading every byte; those without a commit record count as damaged."""
    damage = Damage()
    plan = PlanReader(store, record.plan)
    unreadable = {file for file in {s.file for s in shards} if _is_damaged(store, record, plan, file)}
    damage.unplanned.update(shard for shard in shards if shard.file in unreadable)
    shards = [shard for shard in shards if shard.file not in unreadable]
    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        checks = pool.map(lambda shard: check_shard(store, record, plan, shard), shards)
        for done, (shard, check) in enumerate(zip(shards, checks, strict=True), 1):
            for finding in check.findings:
                logger.warning("%s", finding)
                kind = damage.unplanned if finding.object == samples_name(shard.file) else damage.shards
                kind.add(shard)
            on_checked(done, len(shards))
    return damage


def _is_damaged(store: Store, record: DatasetRecord, plan: PlanReader, file: int) -> bool:
    """Whether a samples file is, as a whole or in any byte."""
    name = samples_name(file)
    try:
        plan.check_file(file)
    except (FormatError, ObjectNotFound) as error:
        logger.warning("%s", error)
        return True
    if differs_from_checksum(store, name, record.plan.files[file].checksum):
        logger.warning("%s: its checksum differs from the one in dataset.json", name)
        return True
    return False


def take_out(store: Store, shards: Iterable[ShardId]) -> None:
    """Delete the commit records of these shards. The summary goes first: no reader takes the rest for complete.

    The objects are left to `rayhs gc`.
    """
    store.delete([SUMMARY])
    store.delete(commit_name(shard) for shard in sorted(shards))


def refuse_if_unlike(store: Store, record: DatasetRecord) -> None:
    """Refuse a ``dataset.json`` made anew unless a shard that is there repeats the same identity.

    Raises:
        FormatError: none does.
    """
    names = [name for name, _ in store.list("commits")]
    for shard in filter(None, map(shard_of_commit, names)):
        try:
            commit = read_commit(store, shard)
            if commit.object is None:
                continue
            check_metadata(open_shard(store, record, commit.object).metadata, record)
        except (ObjectNotFound, FormatError) as error:
            logger.warning("%s: %s", commit_name(shard), error)
            continue
        return
    if names:
        raise FormatError("dataset.json can't be made anew: no shard here has the identity of this run")
