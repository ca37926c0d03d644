"""The main job: plan, extract, index. What `rayhs extract` and `rayhs plan` run."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from rayhs import gc, repair
from rayhs.cluster import cluster, graceful_stop
from rayhs.codec import token_bytes
from rayhs.config import PromptsConfig, RunConfig, fake_shape, load_config, parse_config
from rayhs.engine import device
from rayhs.errors import (
    EXIT_OK,
    EXIT_SOME_FAILED,
    REPAIR_HINT,
    ConfigError,
    EngineError,
    FormatError,
    IdentityMismatch,
    ObjectNotFound,
    RayhsError,
    TooManyRejected,
    one_line,
)
from rayhs.extractor import ReplicaPlan, extract_shards
from rayhs.identity import dataset_record, identity_of, refuse_other
from rayhs.indexing import write_index
from rayhs.job import Job, Receipt
from rayhs.layers import resolve_layers
from rayhs.layout import DATASET, SUMMARY, DatasetRecord, Plan, ShardId, Summary, index_name
from rayhs.log import logger
from rayhs.model import ModelInfo, describe_model
from rayhs.plan import input_fingerprint
from rayhs.reading.catalog import committed_shards, read_dataset_record, read_summary
from rayhs.samples import make_plan
from rayhs.store import Store, open_store
from rayhs.tally import Progress, Tally
from rayhs.versions import check_versions


@dataclass(frozen=True)
class RunResult:
    """A finished run; ``exit_code`` is 0, or 3 when some samples failed or were rejected."""

    uri: str
    summary: Summary
    exit_code: int


@dataclass(frozen=True)
class PlanResult:
    """The exact numbers of a plan.

    ``tokens`` are those of the prompts; ``state_bytes`` are the bytes of all states as they are stored,
    at most, where generated tokens are stored too (a sequence may end early).
    """

    uri: str
    model: str
    layers: tuple[int, ...]
    samples: int
    rejected: int
    reasons: dict[str, int]
    tokens: int
    state_bytes: int
    shards: int
    dtype: str
    hidden_size: int


T = TypeVar("T")
OnProgress = Callable[[Progress], None]


def _ignore(_: Progress) -> None:
    return None


def extract(path: str | Path | None = None, /, **settings: Any) -> RunResult:
    """Run a whole extraction: from a run file, or from its keys as keyword arguments.

    Raises:
        ConfigError, InputError, IdentityMismatch, TooManyRejected, StoreError, EngineError: see
            `rayhs.errors`. Failed samples are no exception: ``exit_code`` and ``summary`` tell.
    """
    if (path is None) == (not settings):
        raise ConfigError("extract: give the path of a run file, or model, prompts, output, ... as keywords")
    return run_extract(load_config(path) if path is not None else parse_config(settings, "extract"))


def run_extract(config: RunConfig, on_progress: OnProgress = _ignore, repair_first: bool = False) -> RunResult:
    """Plan if needed, extract what has no commit record, then write index and summary.

    Args:
        repair_first: read and check every object that is there, and make what is damaged anew.
    """
    run = _Run(config, on_progress, repair_first)
    with run.cluster() as join:
        if repair_first:
            run.repair(join)
        dataset, done = run.existing, Tally(total=0)
        if dataset is None or run.missing_shards(dataset):
            join()
            dataset, _ = run.ensure_plan()
            run.refuse_rejected(dataset)
            done = run.extract_missing(dataset)
    summary = run.finish(dataset, done)
    code = EXIT_SOME_FAILED if summary.failed or summary.rejected else EXIT_OK
    return RunResult(run.store.uri, summary, code)


def run_measured(config: RunConfig, on_progress: OnProgress = _ignore) -> Tally:
    """As `run_extract`, with warm engines that begin together and `Tally.metrics`; for `rayhs bench`."""
    run = _Run(config, on_progress)
    with run.cluster() as join:
        join()
        dataset, _ = run.ensure_plan()
        done = run.extract_missing(dataset, measured=True)
    run.finish(dataset, done)
    return done


def run_plan(config: RunConfig, on_progress: OnProgress = _ignore) -> PlanResult:
    """Tokenise and cut into shards, or read the plan that is there."""
    run = _Run(config, on_progress)
    dataset, reasons = run.existing, Counter[str]()
    if dataset is None:
        with run.cluster() as join:
            join()
            dataset, reasons = run.ensure_plan()
    plan = dataset.plan
    stored_tokens = plan.tokens + dataset.include_generated * (plan.samples - plan.rejected)
    return PlanResult(
        uri=run.store.uri,
        model=dataset.model,
        layers=tuple(dataset.layers),
        samples=plan.samples,
        rejected=plan.rejected,
        reasons=dict(reasons),
        tokens=plan.tokens,
        state_bytes=stored_tokens * token_bytes(dataset.layers, dataset.hidden_size, dataset.dtype),
        shards=len(plan.shard_ids()),
        dtype=dataset.dtype,
        hidden_size=dataset.hidden_size,
    )


class _Run:
    """One run. All that can be refused without Ray is refused when it is made: versions, model, layers,
    an input or a store that can't be read, another dataset in the place."""

    def __init__(self, config: RunConfig, on_progress: OnProgress, repairing: bool = False) -> None:
        check_versions(vllm=fake_shape(config.model) is None)
        self.config = config
        self.on_progress = on_progress
        self.store: Store = open_store(config.output, config.storage)
        self.store.prepare()
        self._refuse_staging()
        self.input = input_fingerprint(config)
        self.model: ModelInfo = describe_model(config)
        self.layers = resolve_layers(config.layers, self.model.num_layers)
        self.identity = identity_of(config, self.model, self.layers)
        self.existing: DatasetRecord | None = self._unless_damaged(self._existing, repairing)
        self.summary: Summary | None = self._unless_damaged(lambda: read_summary(self.store), repairing)
        self.summary_stands = self.summary is not None

    @contextmanager
    def cluster(self) -> Iterator[Callable[[], None]]:
        """As `rayhs.cluster.cluster`, joined with a word of it."""
        with cluster(self.config) as join:

            def told() -> None:
                self.on_progress(Progress("preparing", 0, None, message="Ray"))
                join()

            yield told

    def _refuse_staging(self) -> None:
        # Elsewhere the replicas look for themselves, each on its node.
        path = self.config.staging.path
        if self.config.cluster.address == "local" and not os.path.isdir(path):
            raise ConfigError(f"staging.path {path} is not a folder; give one in memory, such as /dev/shm")

    def _unless_damaged(self, read: Callable[[], T], repairing: bool) -> T | None:
        """A record, or None for a damaged one that is going to be made anew."""
        try:
            return read()
        except FormatError as error:
            if not repairing:
                raise FormatError(f"{self.store.uri}: {error}; {REPAIR_HINT}") from None
            logger.warning("%s", error)
            return None

    def _existing(self) -> DatasetRecord | None:
        """The dataset that is there already, if it is this run's; None where nothing is committed of another."""
        try:
            existing = read_dataset_record(self.store)
            refuse_other(existing, self.identity, self.input, self.store.uri)
        except ObjectNotFound:
            if committed_shards(self.store):
                raise FormatError(f"{DATASET} is missing, though shards are committed") from None
            return None
        except IdentityMismatch:
            if committed_shards(self.store):
                raise
            return None
        return existing

    def repair(self, join: Callable[[], None]) -> None:
        """Make damaged records and plan anew, and shards that are damaged uncommitted."""
        committed = set(committed_shards(self.store))
        if self.existing is None:
            if not committed:
                return
            join()
            plan, _ = self._make_plan(None)
            record = dataset_record(self.identity, plan)
            repair.refuse_if_unlike(self.store, record)
            self.store.put(DATASET, record.to_bytes())
            self.existing = record
        dataset = self.existing
        damage = repair.find_damage(self.store, dataset, dataset.plan.shard_ids(), self._checked)
        if damage.unplanned:
            join()
            self._make_same_plan(dataset)
            damage.shards |= repair.find_damage(self.store, dataset, sorted(damage.unplanned), self._checked).shards
        unplanned = committed.difference(dataset.plan.shard_ids())
        repair.take_out(self.store, (damage.shards & committed) | unplanned)
        self.summary_stands = False

    def _checked(self, done: int, total: int) -> None:
        self.on_progress(Progress("checking", done, total))

    def _make_same_plan(self, dataset: DatasetRecord) -> None:
        """Write the samples files anew, once it is sure that they become what they were."""
        plan, _ = self._make_plan(None)
        if plan.fingerprint != dataset.plan.fingerprint:
            raise FormatError(
                f"{self.store.uri}: samples files are damaged, and the prompts no longer give the same plan; "
                "restore the prompts and the versions in dataset.json, or start anew with --into URI"
            )
        # The same rows; the bytes of the files, and their checksums, may be another pyarrow's.
        plan, _ = self._make_plan(self.store)
        self.existing = dataset.model_copy(update={"plan": plan})
        self.store.put(DATASET, self.existing.to_bytes())

    def _make_plan(self, store: Store | None) -> tuple[Plan, Counter[str]]:
        self.on_progress(Progress("planning", 0, None))
        return make_plan(
            self.config,
            self.model,
            self.layers,
            store,
            lambda rows: self.on_progress(Progress("planning", rows, None)),
        )

    def ensure_plan(self) -> tuple[DatasetRecord, Counter[str]]:
        """The dataset's identity: found, or planned and written now (with the rejected rows by category)."""
        if self.existing is not None:
            return self.existing, Counter()
        plan, reasons = self._make_plan(self.store)
        record = dataset_record(self.identity, plan)
        self.store.put(DATASET, record.to_bytes())
        self.store.delete([entry.name for entry in gc.strays(self.store, record)])  # of a plan that this one replaces
        return record, reasons

    def refuse_rejected(self, dataset: DatasetRecord) -> None:
        plan, limit = dataset.plan, self.config.prompts.max_rejected
        if plan.rejected > limit * plan.samples:
            raise TooManyRejected(
                f"{plan.rejected} of {plan.samples} prompts were rejected, over prompts.max_rejected {limit:g}; "
                f"nothing was extracted. `rayhs failures {self.store.uri}` tells why"
            )

    def missing_shards(self, dataset: DatasetRecord) -> list[ShardId]:
        committed = set(committed_shards(self.store))
        return [shard for shard in dataset.plan.shard_ids() if shard not in committed]

    def extract_missing(self, dataset: DatasetRecord, measured: bool = False) -> Tally:
        missing = self.missing_shards(dataset)
        done = Tally(total=len(missing))
        if missing:
            # Where a commit record was removed to redo a shard, readers must not take index and summary for valid.
            self.store.delete([SUMMARY])
            self._extract(dataset, missing, done, measured)
        return done

    def _extract(self, dataset: DatasetRecord, missing: list[ShardId], done: Tally, measured: bool) -> None:
        import ray
        from ray.exceptions import RayError

        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        replicas = ReplicaPlan(self.config, nodes, device())
        engine = self.config.engine.model_copy(update={"distributed_executor": replicas.executor})
        # Replicas read the plan; prompts given as rows would travel to each.
        config = self.config.model_copy(update={"engine": engine, "prompts": PromptsConfig(path="")})
        job = Job(config, self.model, dataset, measured)
        self.on_progress(Progress("starting", 0, replicas.replicas[1], message=f"{len(missing)} shards to extract"))
        try:
            with graceful_stop() as stop:
                for row in extract_shards(job, missing, replicas, stop).iter_rows():
                    done.add(Receipt(**row))
                    if done.fatal:
                        raise RayhsError(done.fatal)
                    self.on_progress(done.progress())
        except RayError as error:
            raise EngineError(
                f"the replicas were lost: {one_line(error, 300)}; what is committed stays, run the same command again"
            ) from error

    def finish(self, dataset: DatasetRecord, done: Tally) -> Summary:
        if done.errors:
            shard, error = next(iter(done.errors.items()))
            raise RayhsError(
                f"{len(done.errors)} of {len(dataset.plan.shard_ids())} shards were not committed (first: {shard}: "
                f"{error}); run the same command again to finish"
            )
        before = self.summary
        if before is not None and self.summary_stands and not done.shards and self._has_index(dataset):
            return before
        self.on_progress(Progress("indexing", 0, len(dataset.plan.files)))
        try:
            totals = write_index(self.store, dataset.plan)
        except FormatError as error:
            raise FormatError(f"{self.store.uri}: {error}; {REPAIR_HINT}") from None
        summary = Summary(
            samples=dataset.plan.samples,
            ok=totals.ok,
            failed=totals.failed,
            rejected=totals.rejected,
            tokens=totals.tokens,
            shards=len(dataset.plan.shard_ids()),
            bytes=totals.bytes,
            seconds=round(done.seconds, 3) or (before.seconds if before else 0.0),
            tokens_per_second=round(done.tokens_per_second, 1) or (before.tokens_per_second if before else 0.0),
            reasons=dict(totals.reasons),
            errors=totals.errors,
            index_checksums=totals.index_checksums,
            finished=datetime.now(UTC).isoformat(timespec="seconds"),
        )
        self.store.put(SUMMARY, summary.to_bytes())
        return summary

    def _has_index(self, dataset: DatasetRecord) -> bool:
        there = {name for name, _ in self.store.list("index/")}
        return there >= {index_name(file) for file in range(len(dataset.plan.files))}
