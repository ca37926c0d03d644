"""The main job: plan, extract, index. What `rayhs extract` and `rayhs plan` run."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rayhs.cluster import cluster, graceful_stop
from rayhs.codec import token_bytes
from rayhs.config import PromptsConfig, RunConfig, fake_shape, load_config, parse_config, with_whole_paths
from rayhs.dataset_run import DatasetRun, OnProgress, RunResult, ignore_progress
from rayhs.engine import device
from rayhs.errors import ConfigError, EngineError, RayhsError, TooManyRejected, one_line
from rayhs.extractor import ReplicaPlan, extract_shards
from rayhs.identity import identity_of
from rayhs.job import Job, Receipt
from rayhs.layers import resolve_layers
from rayhs.layout import DatasetRecord, Plan, ShardId
from rayhs.model import ModelInfo, describe_model
from rayhs.plan import input_fingerprint
from rayhs.ray_threads import iterated_apart
from rayhs.samples import make_plan
from rayhs.store import Store, open_store
from rayhs.tally import Progress, Tally
from rayhs.versions import check_versions


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


def extract(path: str | Path | None = None, /, **settings: Any) -> RunResult:
    """Run a whole extraction: from a run file, or from its keys as keyword arguments.

    Raises:
        ConfigError, InputError, IdentityMismatch, TooManyRejected, StoreError, EngineError: see
            `rayhs.errors`. Failed samples are no exception: ``exit_code`` and ``summary`` tell.

    Example:
        >>> prompts = {"rows": [{"ids": [1, 2, 3]}, {"ids": []}], "token_ids": "ids"}
        >>> run = rayhs.extract(model="fake/4x8", prompts=prompts, output="extracted", layers=[2, 4])
        >>> run.exit_code, run.summary.ok, run.summary.reasons
        (3, 1, {'no tokens': 1})
    """
    if (path is None) == (not settings):
        raise ConfigError("extract: give the path of a run file, or model, prompts, output, ... as keywords")
    return run_extract(load_config(path) if path is not None else parse_config(settings, "extract"))


def run_extract(config: RunConfig, on_progress: OnProgress = ignore_progress, repair_first: bool = False) -> RunResult:
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
    return RunResult.of(run.store.uri, summary)


def run_measured(config: RunConfig, on_progress: OnProgress = ignore_progress) -> Tally:
    """As `run_extract`, with warm engines that begin together and `Tally.metrics`; for `rayhs bench`.

    Raises:
        ConfigError: also where some of the replicas would have no shard.
    """
    run = _Run(config, on_progress)
    with run.cluster() as join:
        join()
        dataset, _ = run.ensure_plan()
        shards, replicas = len(dataset.plan.shard_ids()), config.cluster.replica_range[0]
        if shards < replicas:
            raise ConfigError(
                f"{replicas} replicas, and the prompts fill {shards} shard{'s' * (shards != 1)}: "
                "give more --samples, or less shards.target_bytes"
            )
        done = run.extract_missing(dataset, measured=True)
    run.finish(dataset, done)
    return done


def run_plan(config: RunConfig, on_progress: OnProgress = ignore_progress) -> PlanResult:
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


class _Run(DatasetRun):
    """One run. All that can be refused without Ray is refused when it is made: versions, model, layers,
    an input or a store that can't be read, another dataset in the place."""

    def __init__(self, config: RunConfig, on_progress: OnProgress, repairing: bool = False) -> None:
        check_versions(vllm=fake_shape(config.model) is None)
        self.config = config
        store = open_store(config.output, config.storage)
        store.prepare()
        self._refuse_staging()
        source = input_fingerprint(config)
        self.model: ModelInfo = describe_model(config)
        self.layers = resolve_layers(config.layers, self.model.num_layers)
        identity = identity_of(config, self.model, self.layers)
        self.config = with_whole_paths(config)
        super().__init__(store, identity, source, on_progress, repairing)

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

    def make_plan(self, store: Store | None) -> tuple[Plan, Counter[str]]:
        self.on_progress(Progress("planning", 0, None))
        return make_plan(
            self.config,
            self.model,
            self.layers,
            store,
            lambda rows: self.on_progress(Progress("planning", rows, None)),
        )

    def refuse_rejected(self, dataset: DatasetRecord) -> None:
        plan, limit = dataset.plan, self.config.prompts.max_rejected
        if plan.rejected > limit * plan.samples:
            raise TooManyRejected(
                f"{plan.rejected} of {plan.samples} prompts were rejected, over prompts.max_rejected {limit:g}; "
                f"nothing was extracted. `rayhs failures {self.store.uri}` tells why"
            )

    def extract_missing(self, dataset: DatasetRecord, measured: bool = False) -> Tally:
        missing, done = self.begin(dataset)
        if missing:
            self._extract(dataset, missing, done, measured)
        return done

    def _extract(self, dataset: DatasetRecord, missing: list[ShardId], done: Tally, measured: bool) -> None:
        import ray
        from ray.exceptions import RayError

        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        replicas = ReplicaPlan(self.config, nodes, device())
        engine = self.config.engine.model_copy(update={"distributed_executor": replicas.executor})
        # Replicas read the plan; prompts given as rows would travel to each.
        own = {"engine": engine, "prompts": PromptsConfig(path=""), "output": self.store.uri}
        config = self.config.model_copy(update=own)
        job = Job(config, self.model, dataset, measured)
        self.on_progress(Progress("starting", 0, replicas.replicas[1], message=f"{len(missing)} shards to extract"))
        try:
            with graceful_stop() as stop:
                receipts = extract_shards(job, missing, replicas, stop).iter_rows()
                for row in iterated_apart(receipts, to_the_end=True):  # which graceful_stop brings about
                    done.add(Receipt(**row))
                    if done.fatal:
                        raise RayhsError(done.fatal)
                    self.on_progress(done.progress())
        except RayError as error:
            raise EngineError(
                f"the replicas were lost: {one_line(error, 300)}; what is committed stays, run the same command again"
            ) from error
