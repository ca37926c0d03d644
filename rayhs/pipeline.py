"""The main job: plan, extract, index. What `rayhs extract` and `rayhs plan` run."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from rayhs.codec import STATE_DTYPES
from rayhs.config import RunConfig, fake_shape, load_config, parse_config
from rayhs.engine import device
from rayhs.errors import (
    EXIT_OK,
    EXIT_SOME_FAILED,
    ConfigError,
    EngineError,
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
from rayhs.layout import DATASET, SUMMARY, DatasetRecord, ShardId, Summary, index_name
from rayhs.model import ModelInfo, describe_model
from rayhs.plan import input_fingerprint
from rayhs.reading.catalog import committed_shards, read_dataset_record, read_summary
from rayhs.samples import make_plan
from rayhs.store import Store, open_store
from rayhs.versions import check_versions

_RAY_STARTS = 3

Phase = Literal["planning", "starting", "extracting", "indexing"]


@dataclass(frozen=True)
class Progress:
    """One step of a run.

    ``done`` of ``total`` count rows (planning), replicas (starting), samples (extracting) or files
    (indexing); ``tokens`` and ``bytes`` are committed by this run so far, at ``tokens_per_second`` since
    its first shard was begun.
    """

    phase: Phase
    done: int
    total: int | None
    tokens: int = 0
    bytes: int = 0
    tokens_per_second: float = 0.0
    message: str = ""


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


def run_extract(config: RunConfig, on_progress: OnProgress = _ignore) -> RunResult:
    """Plan if needed, extract what has no commit record, then write index and summary."""
    run = _Run(config, on_progress)
    dataset, done = run.existing, _Done(total=0)
    if dataset is None or run.missing_shards(dataset):
        with _cluster(config):
            dataset, _ = run.ensure_plan()
            run.refuse_rejected(dataset)
            done = run.extract_missing(dataset)
    summary = run.finish(dataset, done)
    code = EXIT_SOME_FAILED if summary.failed or summary.rejected else EXIT_OK
    return RunResult(run.store.uri, summary, code)


def run_plan(config: RunConfig, on_progress: OnProgress = _ignore) -> PlanResult:
    """Tokenise and cut into shards, or read the plan that is there."""
    run = _Run(config, on_progress)
    dataset, reasons = run.existing, Counter[str]()
    if dataset is None:
        with _cluster(config):
            dataset, reasons = run.ensure_plan()
    plan = dataset.plan
    stored_tokens = plan.tokens + dataset.include_generated * (plan.samples - plan.rejected)
    token_bytes = len(dataset.layers) * dataset.hidden_size * STATE_DTYPES[dataset.dtype].itemsize
    return PlanResult(
        uri=run.store.uri,
        model=dataset.model,
        layers=tuple(dataset.layers),
        samples=plan.samples,
        rejected=plan.rejected,
        reasons=dict(reasons),
        tokens=plan.tokens,
        state_bytes=stored_tokens * token_bytes,
        shards=len(plan.shard_ids()),
        dtype=dataset.dtype,
        hidden_size=dataset.hidden_size,
    )


class _Run:
    """One run. All that can be refused without Ray is refused when it is made: versions, model, layers,
    an input or a store that can't be read, another dataset in the place."""

    def __init__(self, config: RunConfig, on_progress: OnProgress) -> None:
        check_versions(vllm=fake_shape(config.model) is None)
        self.config = config
        self.on_progress = on_progress
        self.store: Store = open_store(config.output, config.storage)
        self.input = input_fingerprint(config)
        self.model: ModelInfo = describe_model(config)
        self.layers = resolve_layers(config.layers, self.model.num_layers)
        self.identity = identity_of(config, self.model, self.layers)
        self.existing = self._existing()

    def _existing(self) -> DatasetRecord | None:
        """The dataset that is there already, if it is this run's; None where nothing is committed of another."""
        try:
            existing = read_dataset_record(self.store)
            refuse_other(existing, self.identity, self.input, self.store.uri)
        except ObjectNotFound:
            return None
        except IdentityMismatch:
            if committed_shards(self.store):
                raise
            return None
        return existing

    def ensure_plan(self) -> tuple[DatasetRecord, Counter[str]]:
        """The dataset's identity: found, or planned and written now (with the rejected rows by category)."""
        if self.existing is not None:
            return self.existing, Counter()
        self.on_progress(Progress("planning", 0, None))
        plan, reasons = make_plan(
            self.config,
            self.model,
            self.layers,
            self.store,
            lambda rows: self.on_progress(Progress("planning", rows, None)),
        )
        record = dataset_record(self.identity, plan)
        self.store.put(DATASET, record.to_bytes())
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

    def extract_missing(self, dataset: DatasetRecord) -> _Done:
        missing = self.missing_shards(dataset)
        done = _Done(total=dataset.plan.samples - dataset.plan.rejected)
        if missing:
            # Where a commit record was removed to redo a shard, readers must not take index and summary for valid.
            self.store.delete([SUMMARY])
            self._extract(dataset, missing, done)
        return done

    def _extract(self, dataset: DatasetRecord, missing: list[ShardId], done: _Done) -> None:
        import ray
        from ray.exceptions import RayError

        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        replicas = ReplicaPlan(self.config, nodes, device())
        engine = self.config.engine.model_copy(update={"distributed_executor": replicas.executor})
        job = Job(self.config.model_copy(update={"engine": engine}), self.model, dataset)
        self.on_progress(Progress("starting", 0, replicas.replicas[1], message=f"{len(missing)} shards to extract"))
        try:
            for row in extract_shards(job, missing, replicas).iter_rows():
                done.add(Receipt(**row))
                if done.fatal:
                    raise EngineError(done.fatal)
                self.on_progress(done.progress())
        except RayError as error:
            raise EngineError(
                f"the replicas were lost: {one_line(error, 300)}; what is committed stays, run the same command again"
            ) from error

    def finish(self, dataset: DatasetRecord, done: _Done) -> Summary:
        if done.errors:
            shard, error = next(iter(done.errors.items()))
            raise RayhsError(
                f"{len(done.errors)} of {len(dataset.plan.shard_ids())} shards were not committed (first: {shard}: "
                f"{error}); run the same command again to finish"
            )
        finished = read_summary(self.store)
        if finished is not None and not done.shards and self._has_index(dataset):
            return finished
        self.on_progress(Progress("indexing", 0, len(dataset.plan.files)))
        totals = write_index(self.store, dataset.plan)
        summary = Summary(
            samples=dataset.plan.samples,
            ok=totals.ok,
            failed=totals.failed,
            rejected=totals.rejected,
            tokens=totals.tokens,
            shards=len(dataset.plan.shard_ids()),
            bytes=totals.bytes,
            seconds=round(done.seconds, 3) or (finished.seconds if finished else 0.0),
            tokens_per_second=round(done.tokens_per_second, 1) or (finished.tokens_per_second if finished else 0.0),
            reasons=dict(totals.reasons),
            finished=datetime.now(UTC).isoformat(timespec="seconds"),
        )
        self.store.put(SUMMARY, summary.to_bytes())
        return summary

    def _has_index(self, dataset: DatasetRecord) -> bool:
        there = {name for name, _ in self.store.list("index/")}
        return there >= {index_name(file) for file in range(len(dataset.plan.files))}


class _Done:
    """Receipts added up; keeps nothing a shard but the errors.

    ``seconds`` run from the first shard begun (an engine is up) to the last receipt.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self.seconds = 0.0
        self._first = float("inf")
        self.shards = self.samples = self.tokens = self.bytes = 0
        self.errors: dict[str, str] = {}
        self.fatal = ""

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    def progress(self) -> Progress:
        return Progress("extracting", self.samples, self.total, self.tokens, self.bytes, self.tokens_per_second)

    def add(self, receipt: Receipt) -> None:
        self.shards += not receipt.error
        self.samples += int(receipt.samples)
        self.tokens += int(receipt.tokens)
        self.bytes += int(receipt.bytes)
        if receipt.started:
            self._first = min(self._first, float(receipt.started))
            self.seconds = time.time() - self._first
        if receipt.error:
            self.errors[receipt.shard] = receipt.error
        if receipt.fatal:
            self.fatal = receipt.error


@contextlib.contextmanager
def _cluster(config: RunConfig) -> Iterator[None]:
    """Ray, joined or started; left or stopped at the end. A Ray the caller has already joined is used as it is."""
    # Ray's C++ side writes warnings about our actors' arguments to the terminal, over the progress.
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
    import ray
    import ray.data

    joined_before = ray.is_initialized()
    if not joined_before:
        _join_or_start(config.cluster.address)
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    try:
        yield
    finally:
        if not joined_before:
            ray.shutdown()


def _join_or_start(address: str) -> None:
    import ray

    for remaining in reversed(range(_RAY_STARTS)):
        try:
            # A Ray of our own has no dashboard: on a busy host its agent is late, and the node gives up.
            ray.init(
                address=None if address == "auto" else address,
                include_dashboard=False if address == "local" else None,
                log_to_driver=False,
                logging_level=logging.ERROR,
            )
            return
        except Exception as error:  # a node that does not come up is a bare Exception of Ray's
            ray.shutdown()
            if address not in ("auto", "local"):
                raise ConfigError(f"cluster.address {address}: {one_line(error)}; is a Ray running there?") from error
            if not remaining:
                raise RayhsError(
                    f"Ray did not start here: {one_line(error)}; see /tmp/ray/session_latest/logs"
                ) from error
