"""Everything that goes wrong on a spot cluster, at once, until the dataset is done; then nothing may be missing.

    python -m tests.chaos --seeds 20 --samples 2000          (make chaos)

Per seed: the fake engine, two Ray nodes, Ceph's RADOS Gateway behind a proxy that gives 5 % of all
requests a fault, and kills spread over the run: SIGKILL of a replica's actor, of the second node's
raylet, of the driver, and SIGTERM of the driver. `rayhs extract` is started again until it succeeds.
Then, past the proxy: every sample once and with the fake engine's own bytes, `rayhs verify` clean, and
clean again after `rayhs gc` has removed every left-over. Prints one JSON line a seed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import yaml

import rayhs
from rayhs.config import StorageConfig
from rayhs.dataset import Sample
from rayhs.errors import EXIT_INTERRUPTED, EXIT_OK
from rayhs.fake import fake_states
from rayhs.gc import collect
from rayhs.staging import sweep_dead
from rayhs.store import open_store
from rayhs.verify import verify
from tests.fault_proxy import FaultProxy
from tests.processes import engine_processes, extractor_actors
from tests.s3_servers import S3Server, running_ceph

HIDDEN = 128
LAYERS = (2, 4, 8)
SEED_TIMEOUT_S = 480.0
BYTES_PER_SECOND = 6e6  # so that the run lasts long enough to be killed in its middle


@dataclass
class Outcome:
    """What a seed went through; ``runs`` are starts of `rayhs extract`, ``exits`` their exit codes."""

    seed: int
    samples: int
    shards: int = 0
    seconds: float = 0.0
    runs: int = 0
    exits: list[int] = field(default_factory=list)
    kills: dict[str, int] = field(default_factory=dict)
    requests: int = 0
    faults: dict[str, int] = field(default_factory=dict)
    lost: int = 0
    doubled: int = 0
    wrong: int = 0
    findings: list[str] = field(default_factory=list)
    orphans: int = 0
    unfinished: int = 0
    staging_left: int = 0

    @property
    def ok(self) -> bool:
        return not (self.lost or self.doubled or self.wrong or self.findings or self.staging_left)


class TwoNodes:
    """A Ray cluster of two nodes on this machine, of which the second may be killed."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        self._cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
        self.address = str(self._cluster.address)
        self._second = self._new_node()

    def _new_node(self) -> Any:
        for remaining in (2, 1, 0):
            try:
                return self._cluster.add_node(num_cpus=2)
            except Exception:  # Ray's own, of a node that is late on a busy machine
                if not remaining:
                    raise
        raise AssertionError("unreachable")

    def replace_second(self) -> None:
        """SIGKILL its processes; another node comes, as on a spot market."""
        self._cluster.remove_node(self._second, allow_graceful=False)
        self._second = self._new_node()

    def close(self) -> None:
        self._cluster.shutdown()


def prompts_of(seed: int, samples: int, vocabulary: int) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, vocabulary, rng.integers(1, 80)).tolist() for _ in range(samples)]


class FakeModel:
    """The fake engine: the states must be its own, bit for bit."""

    kinds = ("actor", "raylet", "driver", "term")
    token_bytes = len(LAYERS) * HIDDEN * 4
    settings: ClassVar[dict[str, Any]] = {"model": f"fake/8x{HIDDEN}", "layers": list(LAYERS)}
    replicas = 2

    def agrees(self, sample: Sample) -> bool:
        ids = sample.token_ids.tolist()
        return all(np.array_equal(sample.hidden_states[k], fake_states(ids, k, HIDDEN)) for k in LAYERS)


class RealModel:
    """vLLM with a tiny seeded model: the states must be transformers', within 1e-5."""

    kinds = ("engine", "actor", "raylet", "driver", "term")
    token_bytes = 3 * 64 * 4
    replicas = 1

    def __init__(self, folder: Path) -> None:
        from tests.models import Oracle, save_tiny_model

        path = save_tiny_model("qwen3", folder)
        self._oracle = Oracle(path)
        engine = {"max_model_len": 256, "vllm": {"enforce_eager": True, "max_num_seqs": 8}}
        self.settings = {"model": str(path), "layers": [0, 3, 6], "engine": engine}

    def agrees(self, sample: Sample) -> bool:
        from tests.models import relative_error

        want = self._oracle.states(sample.token_ids.tolist())
        return all(relative_error(sample.hidden_states[k], want[k]) <= 1e-5 for k in (0, 3, 6))


class Seed:
    """One dataset, from nothing to verified."""

    def __init__(
        self,
        seed: int,
        samples: int,
        kills: int,
        model: FakeModel | RealModel,
        cluster: TwoNodes,
        server: S3Server,
        folder: Path,
    ) -> None:
        self._random = random.Random(seed)
        self._model = model
        self._cluster, self._server, self._folder = cluster, server, folder
        self._prompts = prompts_of(seed, samples, 500)
        self.outcome = Outcome(seed, samples)
        self._kills = [model.kinds[i % len(model.kinds)] for i in range(kills)]
        self._random.shuffle(self._kills)
        self._most_runs = 2 * kills + 5
        self._node_was_lost = False
        self.uri = f"s3://{server.new_bucket()}/chaos"
        self._store = open_store(self.uri, StorageConfig(endpoint=server.endpoint))

    def run(self, rate: float) -> Outcome:
        started = time.monotonic()
        options = {"rate": rate, "seed": self.outcome.seed, "bytes_per_second": BYTES_PER_SECOND}
        with FaultProxy(self._server.endpoint, **options) as proxy:
            run_file = self._write_run_file(proxy.endpoint)
            while not self._run_once(run_file):
                if time.monotonic() - started > SEED_TIMEOUT_S or self.outcome.runs > self._most_runs:
                    self.outcome.findings.append("not finished in time")
                    break
            report = proxy.report()
        self.outcome.requests, self.outcome.faults = report["requests"], report["faults"]
        self.outcome.seconds = round(time.monotonic() - started, 1)
        self._check()
        return self.outcome

    def _write_run_file(self, endpoint: str) -> Path:
        (self._folder / "staging").mkdir(parents=True)
        rows = "".join(json.dumps({"ids": ids, "id": f"row-{i}"}) + "\n" for i, ids in enumerate(self._prompts))
        (self._folder / "prompts.jsonl").write_text(rows)
        shards = self._shards()
        self._expected = sum(map(len, self._prompts)) * self._model.token_bytes // shards["target_bytes"]
        settings = {
            **self._model.settings,
            "prompts": {"path": str(self._folder / "prompts.jsonl"), "token_ids": "ids", "id": "id"},
            "output": self.uri,
            "shards": shards,
            "cluster": {"address": self._cluster.address, "replicas": self._model.replicas},
            # Few shards in flight: a replica told to stop finishes those, and nothing would be left to kill.
            "staging": {"path": str(self._folder / "staging"), "max_bytes": max(3 * shards["target_bytes"], 4 * 2**20)},
            "storage": {"endpoint": endpoint},
        }
        path = self._folder / "run.yaml"
        path.write_text(yaml.safe_dump(settings))
        return path

    def _shards(self) -> dict[str, Any]:
        if isinstance(self._model, RealModel):
            return {"target_bytes": 200_000}
        # The larger ones are multipart uploads.
        return {"target_bytes": self._random.choice([1, 3, 9]) * 2**20, "rows_per_file": 512}

    def _run_once(self, run_file: Path) -> bool:
        self.outcome.runs += 1
        self._node_was_lost = False
        command = [sys.executable, "-m", "rayhs", "extract", str(run_file)]
        with (self._folder / f"run-{self.outcome.runs}.log").open("w") as log:
            driver = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
            try:
                self._meddle(driver)
                code = driver.wait(SEED_TIMEOUT_S)
            finally:
                driver.kill()
        self.outcome.exits.append(code)
        return code == EXIT_OK

    def _meddle(self, driver: subprocess.Popen[bytes]) -> None:
        """Kill what is next each time a few more shards are committed, or time passes without.

        The shards that are left are shared between the kills that are left, as a fast run would be over before them.
        """
        while self._kills and driver.poll() is None:
            committed = self._commits()
            share = (self._expected - committed) // (len(self._kills) + 1)
            wanted = committed + self._random.randint(1, min(4, max(1, share)))
            deadline = time.monotonic() + self._random.uniform(8, 20)
            while self._commits() < wanted and time.monotonic() < deadline and driver.poll() is None:
                time.sleep(0.2)
            if driver.poll() is None:
                self._kill(self._kills[0], driver)

    def _kill(self, kind: str, driver: subprocess.Popen[bytes]) -> None:
        if kind in ("actor", "engine"):
            found = extractor_actors() if kind == "actor" else engine_processes()
            if not found:
                return
            self._random.choice(found).kill()
        elif kind == "raylet":
            self._cluster.replace_second()
            self._node_was_lost = True
        else:
            driver.send_signal(signal.SIGKILL if kind == "driver" else signal.SIGTERM)
            code = driver.wait(60)
            # A driver whose own node was killed before is ended by Ray, with 1 and without a word; one that has
            # not printed a line yet is still importing, and has nothing to hand back.
            begun = (self._folder / f"run-{self.outcome.runs}.log").stat().st_size > 0
            expected = code in (EXIT_INTERRUPTED, EXIT_OK) or (code == -signal.SIGTERM and not begun)
            if kind == "term" and not expected and not self._node_was_lost:
                last = (self._folder / f"run-{self.outcome.runs}.log").read_text().strip().splitlines()[-2:]
                self.outcome.findings.append(f"exit code {code} after SIGTERM; its last words: {' / '.join(last)}")
        self._kills.pop(0)
        self.outcome.kills[kind] = self.outcome.kills.get(kind, 0) + 1

    def _commits(self) -> int:
        return sum(1 for _ in self._store.list("commits"))

    def _check(self) -> None:
        self._check_samples()
        report = verify(self._store)
        self.outcome.shards = report.shards
        self.outcome.findings += map(str, report.findings)
        swept = collect(self._store, older_than=0)
        self.outcome.orphans, self.outcome.unfinished = swept.objects, swept.unfinished
        again = verify(self._store)
        self.outcome.findings += map(str, again.findings)
        left = again.orphans + len(list(self._store.unfinished()))
        self.outcome.findings += [f"{left} left-overs after gc"] if left else []
        self.outcome.staging_left = self._staging_left()

    def _staging_left(self) -> int:
        """Staging folders that the next start of a replica would not free."""
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            sweep_dead(self._folder / "staging")
            left = len(list((self._folder / "staging").iterdir()))
            if not left:
                break
            time.sleep(0.5)  # the last actors are on their way out
        return left

    def _check_samples(self) -> None:
        dataset = rayhs.open(self.uri, storage=StorageConfig(endpoint=self._server.endpoint))
        seen = Counter(dataset.index["index"].to_pylist())
        self.outcome.lost = sum(1 for i in range(len(self._prompts)) if not seen[i])
        self.outcome.doubled = sum(1 for count in seen.values() if count > 1)
        for sample in dataset.samples():
            ids = self._prompts[sample.index]
            same = sample.token_ids.tolist() == ids and sample.sample_id == f"row-{sample.index}"
            self.outcome.wrong += not (same and self._model.agrees(sample))
            seen[sample.index] = 0
        self.outcome.lost += sum(1 for count in seen.values() if count)  # in the index, without states


@contextmanager
def _two_nodes() -> Iterator[TwoNodes]:
    cluster = TwoNodes()
    try:
        yield cluster
    finally:
        cluster.close()


def chaos(seeds: range, samples: int, kills: int, rate: float, real: bool, folder: Path) -> Iterator[Outcome]:
    """One outcome a seed, on a cluster and a server of their own."""
    model = RealModel(folder / "model") if real else FakeModel()
    for name in ("AWS_PROFILE", "AWS_ENDPOINT_URL_S3", "AWS_SESSION_TOKEN"):
        os.environ.pop(name, None)
    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    with running_ceph(folder / "ceph") as server:
        os.environ.update(server.environment())  # of the nodes too, which run the replicas
        with _two_nodes() as cluster:
            for seed in seeds:
                yield Seed(seed, samples, kills, model, cluster, server, folder / f"seed-{seed}").run(rate)


def main() -> int:
    parser = argparse.ArgumentParser(description="Kill and fault a run until it is done, then check every byte.")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--samples", type=int, default=2000)
    parser.add_argument("--kills", type=int, default=8, help="kills a seed")
    parser.add_argument("--rate", type=float, default=0.05, help="share of requests that get a fault")
    parser.add_argument("--vllm", action="store_true", help="real vLLM on the CPU in place of the fake engine")
    parser.add_argument("--folder", type=Path, help="where logs stay; a temporary one by default")
    chosen = parser.parse_args()
    folder = chosen.folder or Path(tempfile.mkdtemp(prefix="rayhs-chaos-"))
    folder.mkdir(parents=True, exist_ok=True)
    bad = 0
    seeds = range(chosen.first, chosen.first + chosen.seeds)
    for outcome in chaos(seeds, chosen.samples, chosen.kills, chosen.rate, chosen.vllm, folder):
        shown: dict[str, Any] = {**asdict(outcome), "ok": outcome.ok}
        sys.stdout.write(json.dumps(shown) + "\n")
        sys.stdout.flush()
        bad += not outcome.ok
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
