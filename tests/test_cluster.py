"""Signals while Ray is joined or started."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator

import pytest

from rayhs import cluster
from rayhs.config import parse_config


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
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(code))
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(cluster, "_join_or_start", start)
    monkeypatch.setattr(cluster, "_is_joined", lambda: False)
    config = parse_config({"model": "fake/4x8", "prompts": "-", "output": "-"})
    with pytest.raises(KeyboardInterrupt), cluster.cluster(config) as join:
        join()
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
