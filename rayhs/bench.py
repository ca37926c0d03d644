"""`rayhs bench`: a run's speed beside plain prefill on the same engine, and what holds it up.

Counted for rayhs is the whole pipeline, from the first prompt handed to a warm engine to the last
commit record in the store; for plain prefill `LLM.generate` of the same prompts with one token each.
"""

from __future__ import annotations

import secrets
import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from rayhs.cluster import cluster
from rayhs.config import PromptsConfig, RunConfig, fake_shape, with_whole_paths
from rayhs.engine import device
from rayhs.errors import ConfigError, EngineError, one_line
from rayhs.extractor import ReplicaPlan
from rayhs.fake import REFUSED_TOKEN
from rayhs.layers import resolve_layers
from rayhs.layout import DatasetRecord
from rayhs.metrics import Totals
from rayhs.model import ModelInfo, describe_model, max_prompt_tokens
from rayhs.peers import Peer, PeerJob, PeerKind
from rayhs.pipeline import run_measured
from rayhs.reading.catalog import read_dataset_record
from rayhs.reading.plan_reader import PlanReader
from rayhs.store import Store, open_store
from rayhs.tally import Progress, Tally
from rayhs.versions import installed_versions

OnProgress = Callable[[Progress], None]
_SEED = 20
_LENGTHS = (512, 3584)
_END = "after the engine"


@dataclass(frozen=True)
class Workload:
    """Prompts of random token ids, their lengths uniform over ``shortest..longest``.

    Without lengths: 512 to 3584 tokens, or what the engine takes.
    """

    samples: int
    shortest: int = 0
    longest: int = 0

    def fitting(self, longest: int) -> Workload:
        """This one, with lengths; raises ConfigError for some over ``longest``."""
        if not self.longest:
            return Workload(self.samples, min(_LENGTHS[0], longest), min(_LENGTHS[1], longest))
        if self.longest > longest:
            raise ConfigError(f"--lengths: {self.longest} tokens are over the engine's {longest}")
        return self

    def prompts(self, vocabulary: int) -> list[list[int]]:
        """The same for the same workload and vocabulary."""
        rng = np.random.default_rng(_SEED)
        lengths = rng.integers(self.shortest, self.longest + 1, self.samples)
        return [rng.integers(0, vocabulary, int(length)).tolist() for length in lengths]


@dataclass(frozen=True)
class Stage:
    """Work between engine and store: bytes moved, and seconds summed over replicas and threads.

    ``after the engine`` is what a run takes once its last state is there, whatever its length.
    """

    stage: str
    seconds: float
    bytes: int


@dataclass(frozen=True)
class BenchReport:
    """Rates in tokens/s, one a round; ``stages`` and ``seconds`` of all rounds of rayhs together.

    ``ratio`` is rayhs over plain and ``stock_ratio`` the example connector over plain, of the medians;
    None where that was not measured. ``seconds`` are those of all replicas added up.
    """

    model: str
    device: str
    layers: tuple[int, ...]
    engine_dtype: str
    dtype: str
    tensor_parallel_size: int
    replicas: int
    samples: int
    tokens: int
    state_bytes: int
    plain: tuple[float, ...]
    rayhs: tuple[float, ...]
    stock: tuple[float, ...]
    ratio: float | None
    stock_ratio: float | None
    seconds: float
    stages: tuple[Stage, ...]
    bottleneck: str
    versions: dict[str, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def parse_lengths(text: str) -> tuple[int, int]:
    """``512:3584`` or ``32``, in tokens; raises ConfigError."""
    parts = text.split(":")
    if len(parts) in (1, 2) and all(part.isdecimal() for part in parts):
        shortest, longest = int(parts[0]), int(parts[-1])
        if 1 <= shortest <= longest:
            return shortest, longest
    raise ConfigError(f"--lengths {text}: write two lengths in tokens such as 512:3584, or one")


def run_bench(
    config: RunConfig,
    workload: Workload | None,
    on_progress: OnProgress,
    *,
    rounds: int = 1,
    plain: bool = True,
    stock: bool = False,
) -> BenchReport:
    """Measure on the cluster of ``config``; what is stored goes beside its output and is removed again.

    Of a range of replicas its lower end is measured.

    Args:
        workload: random prompts instead of those of the run file (None).
        rounds: how often each is measured, rayhs on an engine of its own each time.
        plain: measure vLLM without extraction, which the ratios need.
        stock: measure vLLM's example connector too, into the staging file system.

    Raises:
        ConfigError: prompts too long for the engine; ``stock`` without a GPU.
        RayhsError: as `rayhs.pipeline.run_extract`; also where an engine without rayhs does not start.
    """
    if stock and (device() == "cpu" or fake_shape(config.model)):
        raise ConfigError("--peer stock: vLLM's example connector needs a GPU")
    # A fixed number: the peers are as many, and all begin together.
    fixed = config.cluster.model_copy(update={"replicas": config.cluster.replica_range[0]})
    config = config.model_copy(update={"cluster": fixed})
    model = describe_model(config)
    if workload is not None:
        config = _with_prompts(config, model, workload)
    with cluster(config) as join:
        on_progress(Progress("preparing", 0, None, message="Ray"))
        join()
        bench = _Bench(config, model, on_progress)
        for _ in range(rounds):
            bench.measure_ours()
        rates: dict[PeerKind, list[float]] = {"plain": [], "stock": []}
        if fake_shape(config.model) is None:
            peers: tuple[tuple[PeerKind, bool], ...] = (("plain", plain), ("stock", stock))
            for kind, wanted in peers:
                if wanted:
                    rates[kind] = bench.measure_peer(kind, rounds)
        return bench.report(rates)


def _with_prompts(config: RunConfig, model: ModelInfo, workload: Workload) -> RunConfig:
    workload = workload.fitting(max_prompt_tokens(config, model))
    vocabulary = REFUSED_TOKEN if fake_shape(config.model) else model.vocab_size
    rows = [{"token_ids": prompt} for prompt in workload.prompts(vocabulary)]
    prompts = {"rows": rows, "token_ids": "token_ids"}
    return RunConfig.model_validate({**config.model_dump(exclude={"prompts"}), "prompts": prompts})


class _Bench:
    def __init__(self, config: RunConfig, model: ModelInfo, on_progress: OnProgress) -> None:
        import ray

        self._config, self._model, self._on_progress = config, model, on_progress
        self._plan = ReplicaPlan(config, [n["Resources"] for n in ray.nodes() if n["Alive"]], device())
        self._prompts: list[list[int]] = []
        self._record: DatasetRecord | None = None
        self._tallies: list[Tally] = []
        self._device = ""
        self._is_fake = fake_shape(config.model) is not None

    def measure_ours(self) -> None:
        output = f"{self._config.output.rstrip('/')}-bench-{secrets.token_hex(4)}"
        config = self._config.model_copy(update={"output": output})
        store = open_store(output, config.storage)
        try:
            tally = run_measured(config, self._on_progress)
            if self._record is None:
                self._record = read_dataset_record(store)
                self._prompts = _prompts_of(store, self._record)
            self._tallies.append(tally)
        finally:
            store.delete([name for name, _ in store.list("")])
            shutil.rmtree(output, ignore_errors=True)  # the empty folders, where it is one

    def measure_peer(self, kind: PeerKind, rounds: int) -> list[float]:
        """Tokens/s of each round."""
        import ray

        shares = [self._prompts[i :: self._plan.replicas[0]] for i in range(self._plan.replicas[0])]
        rates = []
        with self._peers(kind, shares) as peers:
            for number in range(rounds):
                self._on_progress(Progress("measuring", number, rounds, message=f"{kind} vLLM"))
                started = time.perf_counter()
                ray.get([peer.run.remote(share) for peer, share in zip(peers, shares, strict=True)])
                rates.append(sum(map(len, self._prompts)) / (time.perf_counter() - started))
                ray.get([peer.clear.remote() for peer in peers])
        return rates

    @contextmanager
    def _peers(self, kind: PeerKind, shares: Sequence[list[list[int]]]) -> Iterator[list[Any]]:
        import ray
        from ray.exceptions import RayError, RayTaskError

        layers = resolve_layers(self._config.layers, self._model.num_layers)
        executor = self._config.engine.model_copy(update={"distributed_executor": self._plan.executor})
        config = self._config.model_copy(update={"engine": executor, "prompts": PromptsConfig(path="")})
        job = PeerJob(kind, with_whole_paths(config), self._model, layers)
        self._on_progress(Progress("starting", 0, len(shares), message=f"{kind} vLLM"))
        peers = []
        try:
            for _ in shares:
                placed = {k: v for k, v in self._plan.actor_arguments().items() if k == "scheduling_strategy"}
                peers.append(ray.remote(**self._plan.resources(), **placed)(Peer).remote(job, self._plan))
            ray.get([peer.start.remote(share) for peer, share in zip(peers, shares, strict=True)])
            self._device = ray.get(peers[0].device.remote())
            yield peers
            ray.get([peer.stop.remote() for peer in peers])
        except RayTaskError as error:
            raise EngineError(f"{kind} vLLM: {one_line(error.cause, 300)}") from error
        except RayError as error:
            raise EngineError(f"{kind} vLLM: {one_line(error, 300)}") from error
        finally:
            for peer in peers:
                ray.kill(peer)

    def report(self, rates: dict[PeerKind, list[float]]) -> BenchReport:
        assert self._record is not None
        record, tallies = self._record, self._tallies
        ours = tuple(tally.tokens_per_second for tally in tallies)
        seconds = sum(tally.seconds for tally in tallies) * self._plan.replicas[0]
        totals = _added([totals for tally in tallies for totals in tally.metrics.values()])
        totals[_END] = (sum(tally.end_seconds for tally in tallies) * self._plan.replicas[0], 0)
        ratio = _ratio(ours, rates["plain"])
        return BenchReport(
            model=record.model,
            device=self._device or device(),
            layers=tuple(record.layers),
            engine_dtype=record.engine_dtype,
            dtype=record.dtype,
            tensor_parallel_size=self._config.engine.tensor_parallel_size,
            replicas=self._plan.replicas[0],
            samples=tallies[0].samples,
            tokens=tallies[0].tokens,
            state_bytes=tallies[0].bytes,
            plain=tuple(rates["plain"]),
            rayhs=ours,
            stock=tuple(rates["stock"]),
            ratio=ratio,
            stock_ratio=_ratio(rates["stock"], rates["plain"]),
            seconds=seconds,
            stages=tuple(Stage(name, *total) for name, total in sorted(totals.items())),
            bottleneck=bottleneck(ratio, seconds, totals, "the fake engine" if self._is_fake else "vLLM"),
            versions=installed_versions(),
        )


def _prompts_of(store: Store, record: DatasetRecord) -> list[list[int]]:
    """The token ids of every planned sample."""
    plan = PlanReader(store, record.plan)
    tables = [plan.rows(shard, ["status", "token_ids"]) for shard in record.plan.shard_ids()]
    rows = [row for table in tables for row in table.to_pylist()]
    return [row["token_ids"] for row in rows if row["status"] == "planned"]


def _added(parts: Sequence[Totals]) -> Totals:
    stages = {stage for part in parts for stage in part}
    found = {stage: [part[stage] for part in parts if stage in part] for stage in stages}
    return {stage: (sum(s for s, _ in totals), sum(b for _, b in totals)) for stage, totals in found.items()}


def _ratio(rates: Sequence[float], plain: Sequence[float]) -> float | None:
    return statistics.median(rates) / statistics.median(plain) if rates and plain else None


def bottleneck(ratio: float | None, seconds: float, totals: Totals, engine: str = "vLLM") -> str:
    """One sentence: what the run's speed hangs on.

    Args:
        ratio: rayhs over plain prefill, where known.
        seconds: the run's, times its replicas.
    """

    def share(stage: str) -> float:
        return totals.get(stage, (0.0, 0))[0] / seconds if seconds else 0.0

    behind = share("wait for staging") + share("engine idle")
    slowest = max(("to store", "check"), key=share)
    if ratio is not None and ratio >= 0.97:
        return f"vLLM's own prefill: the states are stored at {ratio:.1%} of its speed"
    if behind > 0.03:
        what = "the store" if slowest == "to store" else "checking the states"
        return (
            f"{what}: for {behind:.0%} of the time the engine had no room to hand states over, or no prompts, as "
            "earlier shards were still on their way; a faster store or more staging.max_bytes helps"
        )
    if share("wait for pinned memory") > 0.03:
        return (
            f"the copy out of the GPU: for {share('wait for pinned memory'):.0%} of the time all pinned memory was "
            "in use; fewer layers or a narrower dtype help"
        )
    if share(_END) > max(0.01, (1 - ratio) / 2 if ratio is not None else 0.1):
        return (
            f"the end of the run, {share(_END):.0%} of it: the engine was done and the last shards were still on "
            "their way; more --samples weigh it less"
        )
    if share("step") > 0.1:
        return f"the connector: it took {share('step'):.0%} of the time of vLLM's worker loop"
    end = f"; {share(_END):.0%} of the run were its end, after the engine" if share(_END) > 0.03 else ""
    return f"{engine}: no stage behind it was waited for{end}"
