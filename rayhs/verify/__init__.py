"""Check a whole dataset: every object there, whole and as its records say, every sample exactly once."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from rayhs import layout
from rayhs.config import StorageConfig
from rayhs.errors import EXIT_DAMAGE, EXIT_OK, ConfigError, FormatError, ObjectNotFound
from rayhs.layout import DatasetRecord, ErrorTotals, LayerError, ShardId, Summary
from rayhs.reading.catalog import committed_shards, read_dataset_record, read_summary
from rayhs.reading.index_table import read_index_file
from rayhs.reading.plan_reader import PlanReader
from rayhs.store import Store, open_store
from rayhs.verify.findings import Finding, Findings
from rayhs.verify.index import index_problems
from rayhs.verify.reference import ReferenceReport, compare_with_reference, refuse_unlike
from rayhs.verify.shard import ShardCheck, check_shard
from rayhs.verify.states import differs_from_checksum

_WORKERS = min(4, os.cpu_count() or 1)
OnProgress = Callable[[int, int, int], None]  # shards done, shards in all, bytes read


@dataclass(frozen=True)
class VerifyReport:
    """What was checked and what is wrong; ``findings`` is empty for a sound, finished dataset.

    ``finished``: there is a summary, damaged or not.

    ``tokens`` and ``bytes`` count stored states and shard objects; ``orphans`` are objects of
    attempts that lost or broke off: not part of the dataset, and no damage. ``recorded_errors`` are those of
    float8_e4m3fn by layer, as the engines measured them when they stored the states.
    """

    uri: str
    findings: tuple[Finding, ...]
    more_findings: int
    shards: int
    samples: int
    ok_samples: int
    tokens: int
    bytes: int
    orphans: int
    orphan_bytes: int
    seconds: float
    reference: ReferenceReport | None = None
    finished: bool = True
    recorded_errors: Mapping[str, LayerError] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return not self.findings

    @property
    def exit_code(self) -> int:
        return EXIT_OK if self.ok else EXIT_DAMAGE

    def to_dict(self) -> dict[str, Any]:
        plain = {k: v for k, v in self.__dict__.items() if k not in ("findings", "reference", "recorded_errors")}
        return {
            **plain,
            "recorded_errors": {layer: error.model_dump() for layer, error in self.recorded_errors.items()},
            "ok": self.ok,
            "findings": [f.to_dict() for f in self.findings],
            "reference": None if self.reference is None else self.reference.to_dict(),
        }


def verify(
    target: Store | str,
    *,
    storage: StorageConfig | None = None,
    reference: str | None = None,
    quality: bool = False,
    samples: int = 8,
    on_progress: OnProgress = lambda done, total, nbytes: None,
) -> VerifyReport:
    """Read every object of the dataset once and check it; memory stays bounded by a few shards' tables.

    Checked: ``dataset.json`` and ``summary.json``; each commit record; each shard's size, xxh3_128,
    header, tokens against the plan, and per sample xxh3_64, shape, finite, not zero, not constant;
    the index against plan and commits, so that every planned sample is in it exactly once.

    Args:
        target: the dataset's address, or its open store.
        reference: a transformers model (name or folder); ``samples`` good samples, spread evenly,
            are computed again in float32 and compared.
        quality: compare with the dataset's own model, where ``reference`` names no other.

    Raises:
        ObjectNotFound: there is nothing at this address.
        StoreError: the store can't be read (damage is a finding, not an error).
        ConfigError: the reference model can't be loaded, or doesn't fit the dataset.
    """
    store = open_store(target, storage or StorageConfig()) if isinstance(target, str) else target
    return _Verification(store, on_progress).run(reference, quality, samples)


class _Verification:
    def __init__(self, store: Store, on_progress: OnProgress) -> None:
        self._store = store
        self._on_progress = on_progress
        self._found = Findings()
        self._referenced: set[str] = set()
        self._errors = ErrorTotals()
        self._totals = {"shards": 0, "samples": 0, "ok": 0, "failed": 0, "rejected": 0, "tokens": 0, "bytes": 0}
        self._started = time.monotonic()

    def run(self, reference: str | None, quality: bool, samples: int) -> VerifyReport:
        record = self._dataset_record()
        if record is None:
            return self._report((0, 0), None)
        own = quality and reference is None
        if own:
            reference = record.model
        if reference is not None:
            self._refuse_unlike(record, reference, own)  # before hours of reading
        finished, summary = self._summary()
        committed = set(committed_shards(self._store))
        planned = record.plan.shard_ids()
        for shard in sorted(committed.difference(planned)):
            self._found.add(layout.commit_name(shard), "the plan has no such shard")
        if not finished:
            self._found.add(
                layout.SUMMARY,
                f"missing: the run has not finished, {len(committed)} of {len(planned)} shards are committed; "
                "run rayhs extract (or import) again",
            )
        self._check_files(record, planned if finished else [s for s in planned if s in committed], finished)
        if summary is not None:
            self._check_index_bytes(summary, record)
        self._check_names(record)
        if summary is not None and not any(True for _ in self._found):
            self._check_summary(summary)
        compared = None
        if reference is not None:
            compared = compare_with_reference(self._store, record, self._reference_rows(record, samples), reference)
            for layer in compared.over_limit:
                self._found.add(
                    "hidden states",
                    f"layer {layer} differs from {reference}: a token is off by {compared.errors[layer]:.2e} of itself "
                    f"(limit {compared.limit:.0e}), the worst by {compared.worst[layer]:.2e} "
                    f"(limit {compared.token_limit})",
                )
        return self._report(self._orphans(), compared, finished)

    def _refuse_unlike(self, record: DatasetRecord, reference: str, own: bool) -> None:
        try:
            refuse_unlike(record, reference)
        except ConfigError as error:
            if not own:
                raise
            raise ConfigError(f"--quality: {error}; say with --reference where the dataset's model is now") from None

    def _dataset_record(self) -> DatasetRecord | None:
        try:
            return read_dataset_record(self._store)
        except ObjectNotFound:
            if next(self._store.list(""), None) is None:
                raise
            self._found.add(layout.DATASET, "missing: nothing else can be checked without it")
        except FormatError as error:
            self._found.add(layout.DATASET, str(error).removeprefix(f"{layout.DATASET}: "))
        return None

    def _summary(self) -> tuple[bool, Summary | None]:
        try:
            summary = read_summary(self._store)
        except FormatError as error:
            self._found.add(layout.SUMMARY, str(error).removeprefix(f"{layout.SUMMARY}: "))
            return True, None
        return summary is not None, summary

    def _check_files(self, record: DatasetRecord, shards: Sequence[ShardId], finished: bool) -> None:
        """Shards of one samples file after the other, a few at once; then that file's index."""
        plan = PlanReader(self._store, record.plan)
        with ThreadPoolExecutor(_WORKERS) as pool:
            for file, first in _file_starts(record):
                own = [s for s in shards if s.file == file]
                expected = []
                # Checked ahead only as far as keeps the workers busy: each outcome has rows of the index.
                for start in range(0, 0 if self._unreadable(plan, file, own) else len(own), 16 * _WORKERS):
                    part = own[start : start + 16 * _WORKERS]
                    checks = pool.map(lambda shard: check_shard(self._store, record, plan, shard), part)
                    expected += [c.index for c in self._counted(checks, len(shards)) if c.index is not None]
                planned = record.plan.files[file]
                self._check_bytes(layout.samples_name(file), planned.checksum, layout.DATASET)
                if finished:
                    self._check_index(file, range(first, first + planned.rows), expected)

    def _check_bytes(self, name: str, checksum: str, where: str) -> None:
        """What the content's own checks can't see, such as a flipped bit in a file's metadata."""
        if differs_from_checksum(self._store, name, checksum):
            self._found.add(name, f"its xxh3_128 checksum differs from the one in {where}, {checksum}")

    def _check_index_bytes(self, summary: Summary, record: DatasetRecord) -> None:
        if len(summary.index_checksums) != len(record.plan.files):
            self._found.add(layout.SUMMARY, f"it knows {len(summary.index_checksums)} index files, the plan has others")
            return
        for file, checksum in enumerate(summary.index_checksums):
            self._check_bytes(layout.index_name(file), checksum, layout.SUMMARY)

    def _unreadable(self, plan: PlanReader, file: int, shards: Sequence[ShardId]) -> bool:
        """Whether a samples file as a whole is damaged: one finding, not one for each of its shards."""
        name = layout.samples_name(file)
        try:
            plan.check_file(file)
        except (FormatError, ObjectNotFound) as error:
            problem = str(error).removeprefix(f"{name}: ")
            self._found.add(name, f"{problem}; its {len(shards)} shards can't be checked")
            return True
        return False

    def _counted(self, checks: Iterator[ShardCheck], total: int) -> Iterator[ShardCheck]:
        for check in checks:
            self._found.extend(check.findings)
            if check.object is not None:
                self._referenced.add(check.object)
            self._errors.add(check.errors, check.tokens)
            counts = {"shards": 1, "ok": check.ok, "failed": check.failed, "rejected": check.rejected}
            counts |= {"samples": check.ok + check.failed + check.rejected}
            counts |= {"tokens": check.tokens, "bytes": check.bytes}
            for key, value in counts.items():
                self._totals[key] += value
            self._on_progress(self._totals["shards"], total, self._totals["bytes"])
            yield check

    def _check_index(self, file: int, rows: range, expected: Sequence[pa.Table]) -> None:
        name = layout.index_name(file)
        try:
            table = read_index_file(self._store, file)
        except ObjectNotFound:
            self._found.add(name, f"missing: samples {rows.start}..{rows.stop - 1} are not in the index")
            return
        except FormatError as error:
            self._found.add(name, str(error).removeprefix(f"{name}: "))
            return
        known = pa.concat_tables(expected) if expected else layout.INDEX_SCHEMA.empty_table()
        for problem, samples in index_problems(table, known, rows):
            self._found.add(name, problem, samples)

    def _check_names(self, record: DatasetRecord) -> None:
        """Objects of samples and index that the plan doesn't know would count samples twice."""
        files = range(len(record.plan.files))
        for folder, name_of in (("samples/", layout.samples_name), ("index/", layout.index_name)):
            known = {name_of(file) for file in files}
            for name, _ in self._store.list(folder):
                if name not in known:
                    self._found.add(name, "the plan has no such file")

    def _check_summary(self, summary: Summary) -> None:
        said = summary.model_dump()
        for key in ("samples", "ok", "failed", "rejected", "tokens", "shards", "bytes"):
            if said[key] != self._totals[key]:
                self._found.add(layout.SUMMARY, f"{key} is {said[key]}, the dataset has {self._totals[key]}")
        if summary.errors != self._errors.errors:
            self._found.add(layout.SUMMARY, "errors are not those of the commit records")

    def _reference_rows(self, record: DatasetRecord, count: int) -> list[dict[str, Any]]:
        """Index rows of ``count`` good samples, spread evenly over the dataset."""
        rows: list[dict[str, Any]] = []
        total, seen = self._totals["ok"], 0
        count = min(count, total)
        wanted = iter([i * total // count for i in range(count)])
        target = next(wanted, None)
        for file in range(len(record.plan.files)):
            if target is None:
                break
            try:
                table = read_index_file(self._store, file)
            except (ObjectNotFound, FormatError):
                continue
            good = table.filter(pc.equal(table["status"], "ok"))
            while target is not None and target < seen + len(good):
                rows.extend(good.slice(target - seen, 1).to_pylist())
                target = next(wanted, None)
            seen += len(good)
        return rows

    def _orphans(self) -> tuple[int, int]:
        objects = [(name, size) for name, size in self._store.list("shards/") if name not in self._referenced]
        sizes = [size for name, size in objects if layout.shard_of_object(name) is not None]
        return len(sizes), sum(sizes)

    def _report(
        self, orphans: tuple[int, int], reference: ReferenceReport | None, finished: bool = True
    ) -> VerifyReport:
        return VerifyReport(
            uri=self._store.uri,
            findings=tuple(self._found),
            more_findings=self._found.dropped,
            shards=self._totals["shards"],
            samples=self._totals["samples"],
            ok_samples=self._totals["ok"],
            tokens=self._totals["tokens"],
            bytes=self._totals["bytes"],
            orphans=orphans[0],
            orphan_bytes=orphans[1],
            seconds=time.monotonic() - self._started,
            reference=reference,
            finished=finished,
            recorded_errors=self._errors.errors,
        )


def _file_starts(record: DatasetRecord) -> Iterator[tuple[int, int]]:
    first = 0
    for file, planned in enumerate(record.plan.files):
        yield file, first
        first += planned.rows
