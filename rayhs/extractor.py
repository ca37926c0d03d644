"""The Ray Data actor: shard ids in, receipts out. States never pass through Ray's object store."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import threading
import warnings
from collections.abc import Iterator
from concurrent.futures import as_completed
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from rayhs.config import RunConfig, fake_shape
from rayhs.cores import CoreClaim
from rayhs.errors import ConfigError, EngineError
from rayhs.job import Job, Receipt
from rayhs.layout import ShardId
from rayhs.log import configure
from rayhs.replica import HANDED_BACK, Replica
from rayhs.warm_start import Begin

if TYPE_CHECKING:
    import ray.data

_ACTOR_RESTARTS = 3
_MAX_TASKS = 20_000


class Extractor:
    """Ray Data's callable class: one replica, called from several threads at once.

    ``stop`` is the run's `rayhs.cluster.StopSignal`.
    """

    def __init__(self, job: Job, plan: ReplicaPlan, stop: Any) -> None:
        configure()
        self._job, self._plan = job, plan
        self._loop = asyncio.new_event_loop()
        self._cores: CoreClaim | None = None
        self._refusal = HANDED_BACK
        self._stop, self._name = stop, secrets.token_hex(8)
        self._replica = self._make_replica()
        self._entering, self._entered = threading.Lock(), False
        threading.Thread(target=self._loop.run_forever, daemon=True, name="rayhs-loop").start()
        if self._replica is not None and job.measured:
            # Before its first shard: all begin together, and there may be none for some.
            self._enter()
            asyncio.run_coroutine_threadsafe(self._replica.ready(), self._loop)

    def _make_replica(self) -> Replica | None:
        try:
            if self._plan.engine_cores:
                self._cores = CoreClaim(self._plan.engine_cores)
                self._cores.bind(self._job.config.engine.tensor_parallel_size)
            begin = _beginning(self._stop, self._plan.replicas[0]) if self._job.measured else None
            return Replica(self._job, self._plan.most_on(_own_node()), begin)
        except EngineError as error:
            self._refusal = str(error)  # told in the receipts: Ray would bury an actor's constructor error
            return None

    def _enter(self) -> None:
        """Tell the run of this replica before it holds anything: the driver waits for those it knows of."""
        import ray

        with self._entering:
            if self._entered or self._replica is None:
                return
            if not ray.get(self._stop.enter.remote(self._name)):
                self._replica = None
                return
            self._entered = True
            end = _stop_when_told(self._replica, self._cores, self._stop, self._name)
            asyncio.run_coroutine_threadsafe(end, self._loop)

    def __call__(self, batch: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """``batch["shard"]``: shard ids. Yields a receipt a shard as each is committed."""
        self._enter()
        shards = [ShardId.parse(str(shard)) for shard in batch["shard"]]
        if self._replica is None:
            yield _as_batch(Receipt(str(shards[0]), error=self._refusal, fatal=True))
            return
        runs = [asyncio.run_coroutine_threadsafe(self._replica.run_shard(shard), self._loop) for shard in shards]
        for run in as_completed(runs):
            yield _as_batch(replace(run.result(), replica=self._name))

    def __del__(self) -> None:
        if self._replica is not None and self._loop.is_running():
            asyncio.run_coroutine_threadsafe(self._replica.stop(), self._loop).result(timeout=30)
            self._stop.leave.remote(self._name)


def _beginning(stop: Any, replicas: int) -> Begin:
    async def begin() -> None:
        await stop.begin.remote(replicas)

    return begin


async def _stop_when_told(replica: Replica, cores: CoreClaim | None, stop: Any, name: str) -> None:
    # No method: it would keep the Extractor alive, whose end Ray Data tells us by deleting it.
    from ray.exceptions import RayError

    with contextlib.suppress(RayError):  # the driver is gone, and with it the signal
        await stop.join.remote(name)
    await replica.hand_back()
    if cores is not None:
        cores.release()  # another engine may want them before Ray has ended this process
    with contextlib.suppress(RayError):
        await stop.leave.remote(name)


def _own_node() -> dict[str, float]:
    import ray

    me = ray.get_runtime_context().get_node_id()
    return next((dict(node["Resources"]) for node in ray.nodes() if node["NodeID"] == me), {})


def _as_batch(receipt: Receipt) -> dict[str, Any]:
    return {key: np.asarray([value]) for key, value in receipt.as_row().items()}


class ReplicaPlan:
    """Ray resources of one replica, derived from the run file and the cluster.

    On GPUs a replica of tensor parallel size ``t`` takes ``t`` GPUs of one node (vLLM's ``mp``
    executor), or one GPU in each of ``t`` bundles of a placement group where no node has as many
    (vLLM's ``ray`` executor). On CPUs it takes cores of its own.
    """

    def __init__(self, config: RunConfig, nodes: list[dict[str, float]], device: str) -> None:
        engine, cluster = config.engine, config.cluster
        self.replicas = cluster.replica_range
        tensor_parallel = engine.tensor_parallel_size
        self.engine_cores = 0
        self.gpus = 0
        self.bundles: list[dict[str, float]] = []
        self.cpus = float(cluster.cpus_per_replica or 1)
        most = int(max((node.get("CPU", 0) for node in nodes), default=0))
        if nodes and self.cpus > most and device == "cpu":
            raise ConfigError(f"cluster.cpus_per_replica: {self.cpus:g} wanted, the largest node has {most} CPUs")
        if fake_shape(config.model):
            return
        if device == "cpu":
            self._take_cores(nodes, tensor_parallel, cluster.cpus_per_replica)
        else:
            self._take_gpus(nodes, tensor_parallel, engine.distributed_executor)

    def most_on(self, node: dict[str, float]) -> int:
        """How many replicas a node of these Ray resources may hold at once: they share its staging file system."""
        if self.gpus or self.bundles:
            fit = node.get("GPU", 0) // max(1, self.gpus)
        elif self.engine_cores:
            fit = node.get("CPU", 0) // self.cpus
        else:
            fit = self.replicas[1]
        return max(1, min(self.replicas[1], int(fit)))

    def _take_cores(self, nodes: list[dict[str, float]], tensor_parallel: int, cores: int | None) -> None:
        most = int(max((node.get("CPU", 0) for node in nodes), default=0))
        per_node = -(-self.replicas[1] // max(1, len(nodes)))
        self.engine_cores = cores or max(1, most // per_node)
        if self.replicas[0] * self.engine_cores > sum(node.get("CPU", 0) for node in nodes):
            raise ConfigError(
                f"cluster.replicas: {self.replicas[0]} replicas of {self.engine_cores} CPUs don't fit the cluster"
            )
        self.cpus = float(self.engine_cores)

    def _take_gpus(self, nodes: list[dict[str, float]], tensor_parallel: int, executor: str) -> None:
        per_node = [int(node.get("GPU", 0)) for node in nodes]
        most = max(per_node, default=0)
        fits = most >= tensor_parallel
        if executor == "mp" and not fits and most:
            raise ConfigError(
                f"engine.distributed_executor: mp needs {tensor_parallel} GPUs on one node, the largest has {most}; "
                "use auto or ray"
            )
        if executor == "ray" or (executor == "auto" and not fits and sum(per_node) >= tensor_parallel > 1):
            self.bundles = [{"GPU": 1.0, "CPU": 1.0} for _ in range(tensor_parallel)]
            return
        self.gpus = tensor_parallel

    @property
    def executor(self) -> str:
        """vLLM's distributed executor."""
        return "ray" if self.bundles else "mp"

    def resources(self) -> dict[str, Any]:
        """Ray's ``num_cpus`` and ``num_gpus`` of an actor; what is in bundles is not counted again."""
        return {"num_cpus": 0 if self.bundles else self.cpus, "num_gpus": self.gpus or None}

    def actor_arguments(self) -> dict[str, Any]:
        """Remote arguments of one more actor; retries are bounded, Ray's defaults are not."""
        arguments: dict[str, Any] = {"max_restarts": _ACTOR_RESTARTS, "max_task_retries": _ACTOR_RESTARTS}
        if self.bundles:
            arguments["scheduling_strategy"] = _placement(self.bundles)
        return arguments


def extract_shards(job: Job, shards: list[ShardId], plan: ReplicaPlan, stop: Any) -> ray.data.Dataset:
    """A lazy Ray dataset with one receipt a shard."""
    import ray.data

    low, high = plan.replicas
    # Twice as many tasks as run at once: the next shards wait in the actor, not for the driver. Replicas that are to
    # begin together take no more than leaves some for each: Ray ends an actor without work while its engine starts.
    waiting = job.shards_in_flight * 2
    if job.measured:
        waiting = min(waiting, max(1, len(shards) // low))
    pool = ray.data.ActorPoolStrategy(
        min_size=low,
        max_size=high,
        max_tasks_in_flight_per_actor=waiting,
        max_concurrent_calls_per_actor=min(waiting, job.shards_in_flight),
        enable_true_multi_threading=True,
    )
    rows: list[dict[str, Any]] = [{"shard": str(shard)} for shard in shards]
    source = ray.data.from_items(rows, override_num_blocks=min(len(rows), _MAX_TASKS))
    with warnings.catch_warnings():
        # Restarts have no named argument yet; the general ones are deprecated ahead of it, for 2.64.
        warnings.filterwarnings("ignore", message=".*ray_remote_args_fn.*")
        return source.map_batches(
            Extractor,
            fn_constructor_args=(job, plan, stop),
            batch_size=1,  # Ray gathers blocks into one task until they have as many rows
            batch_format="numpy",
            compute=pool,
            **plan.resources(),
            ray_remote_args_fn=plan.actor_arguments,
        )


def _placement(bundles: list[dict[str, float]]) -> Any:
    import ray.util
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    group = ray.util.placement_group(bundles, strategy="PACK")
    return PlacementGroupSchedulingStrategy(group, placement_group_capture_child_tasks=True)
