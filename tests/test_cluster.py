"""Signals while Ray is joined or started, and replicas at the end of a run."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rayhs import cluster
from rayhs.config import parse_config
from rayhs.extractor import Extractor, ReplicaPlan
from tests.test_replica import make_job


@pytest.fixture
def interrupted_by_sigterm() -> Iterator[None]:
    """As the command line has it."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.usefixtures("interrupted_by_sigterm")
@pytest.mark.parametrize("code", [1, signal.SIGTERM])
def test_a_sigterm_while_ray_starts_is_the_caller_s(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    """Ray installs handlers of its own on the way: one exits with 15, one with 1."""

    def start(address: str) -> None:
        def end(number: int, frame: object) -> None:
            signal.alarm(60)  # as absl does, to abort the process
            sys.exit(code)

        signal.signal(signal.SIGTERM, end)
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(cluster, "_join_or_start", start)
    monkeypatch.setattr(cluster, "_is_joined", lambda: False)
    config = parse_config({"model": "fake/4x8", "prompts": "-", "output": "-"})
    with pytest.raises(KeyboardInterrupt), cluster.cluster(config) as join:
        join()
    assert signal.alarm(0) == 0
    assert signal.getsignal(signal.SIGTERM) is signal.default_int_handler


@pytest.mark.usefixtures("interrupted_by_sigterm")
def test_the_caller_s_handler_stands_after_ray_has_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(address: str) -> None:
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(1))

    monkeypatch.setattr(cluster, "_join_or_start", start)
    monkeypatch.setattr(cluster, "_is_joined", lambda: False)
    with cluster.cluster(parse_config({"model": "fake/4x8", "prompts": "-", "output": "-"})) as join:
        join()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)


class LateSignal(cluster.StopSignal):
    """One that hears of replicas late, as on a busy node."""

    async def enter(self, replica: str) -> bool:
        await asyncio.sleep(1)
        return await super().enter(replica)

    async def join(self, replica: str) -> None:
        await asyncio.sleep(1)
        await super().join(replica)


@pytest.fixture
def late_signal(local_ray: None) -> Iterator[Any]:
    import ray

    actor = ray.remote(num_cpus=0)(LateSignal).remote()
    yield actor
    ray.kill(actor)


@pytest.mark.ray
def test_a_run_ends_when_all_that_replicas_held_is_gone(late_signal: Any, tmp_path: Path) -> None:
    import ray

    job = make_job(tmp_path, [[1, 2, 3]])
    replica = Extractor(job, ReplicaPlan(job.config, [], "cpu"), late_signal)
    # Ray ends a replica that has had no work when a run is over, without a word to it.
    assert list((tmp_path / "shm").iterdir()) == []
    (receipt,) = replica({"shard": [str(job.dataset.plan.shard_ids()[0])]})
    assert receipt["samples"][0] == 1 and len(list((tmp_path / "shm").iterdir())) == 1
    assert ray.get(late_signal.stop.remote(20))
    assert list((tmp_path / "shm").iterdir()) == []


@pytest.mark.ray
def test_a_replica_that_comes_after_the_end_holds_nothing(late_signal: Any, tmp_path: Path) -> None:
    import ray

    assert ray.get(late_signal.stop.remote(1))
    job = make_job(tmp_path, [[1, 2, 3]])
    replica = Extractor(job, ReplicaPlan(job.config, [], "cpu"), late_signal)
    assert list((tmp_path / "shm").iterdir()) == []
    shard = str(job.dataset.plan.shard_ids()[0])
    (receipt,) = replica({"shard": [shard]})
    assert "handed back" in receipt["error"][0] and not list((tmp_path / "out").rglob("commits/*"))
