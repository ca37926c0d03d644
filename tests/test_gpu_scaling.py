"""The benchmark of replicas on one host, with replicas of the fake engine."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from tests.benchmarks import gpu_scaling
from tests.benchmarks.gpu import CASES, gpus_of
from tests.benchmarks.gpu_scaling import measure, shared_out, summed_up, table
from tests.benchmarks.turns import PACE

_NO_WAIT = dict.fromkeys(("wait for staging", "engine idle", "wait for pinned memory"), 0.0)


def turn(kind: str, replicas: int, rate: float, **found: Any) -> dict[str, Any]:
    usual = {"cores_busy": 0.2, "copy_gb_s": 10.0}
    return {"kind": kind, "replicas": replicas, "rate": rate, **usual, **({} if kind == "plain" else found)}


@pytest.mark.slow
def test_replicas_take_turns_and_say_what_they_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_scaling, "_COUNTS", (2, 1))
    monkeypatch.setenv(PACE, "2000")
    case = replace(gpu_scaling.CASES["paced"], shape="fake/36x64", samples=6)
    found = measure(case, gpus=0, rounds=2, settings=["shards.target_bytes=2MiB", "staging.max_bytes=16MiB"])
    assert [(t["replicas"], len(t["each"])) for t in found["turns"]] == [(2, 2), (1, 1)] * 2
    assert all(0 < rate < 2100 for t in found["turns"] for rate in t["each"])  # the pace is a limit
    assert all(0 < t["staging"] <= 1 and set(t["waits"]) == set(_NO_WAIT) for t in found["turns"])
    assert list(found["efficiency"]["paced"]) == [1, 2]
    assert table(json.loads(json.dumps({"cases": {"paced": found}}))).count("| paced |") == 2


def test_every_turn_of_a_replica_has_as_many_shards_of_its_own() -> None:
    shares = shared_out([f"s{i}" for i in range(17)], [4, 2, 1, 1])  # type: ignore[misc]
    sizes = [[len(of_turn) for of_turn in share] for share in shares]
    assert sizes == [[2, 2, 2, 2], [2, 2, 0, 0], [2, 0, 0, 0], [2, 0, 0, 0]]
    given = [shard for share in shares for of_turn in share for shard in of_turn]
    assert len(given) == len(set(given)) == 16
    with pytest.raises(SystemExit, match="give more --samples"):
        shared_out(["s0"], [2, 1])  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ({"waits": _NO_WAIT | {"wait for staging": 0.2}}, "wait for staging for 20% of the engines' time"),
        ({"waits": _NO_WAIT, "copy_gb_s": 5.0}, "memory: a copying thread gets 50% of what it gets alone"),
        ({"waits": _NO_WAIT, "cores_busy": 0.97}, "the cores: 97% busy"),
        ({"waits": _NO_WAIT}, "nothing measured shows why"),
    ],
)
def test_the_first_limit_is_named(found: dict[str, Any], said: str) -> None:
    turns = [turn("plain", 1, 100), turn("plain", 2, 200), turn("plain", 4, 400)]
    turns += [
        turn("rayhs", 1, 98, waits=_NO_WAIT),
        turn("rayhs", 2, 195, waits=_NO_WAIT),
        turn("rayhs", 4, 300, **found),
    ]
    summary = summed_up(turns, alone=10.0)
    assert summary["efficiency"]["rayhs"] == pytest.approx({1: 1, 2: 0.995, 4: 0.765}, abs=1e-3)
    assert summary["over_plain"]["rayhs"] == pytest.approx({1: 0.98, 2: 0.975, 4: 0.75})
    assert summary["limit"] == f"4 replicas, 0.765 of one's speed each: {said}"


def test_a_limit_of_the_engine_itself_is_not_called_ours() -> None:
    turns = [turn("plain", 1, 100), turn("plain", 2, 150)]
    turns += [turn("rayhs", 1, 100, waits=_NO_WAIT), turn("rayhs", 2, 150, waits=_NO_WAIT)]
    assert summed_up(turns, alone=10.0)["limit"].endswith("plain vLLM: 0.750 itself")


def test_cases_say_how_many_gpus_they_need() -> None:
    assert {case: gpus_of(case) for case in ("8b", "8b-fp8", "8b-x2", "8b-tp2", "8b-x8") if case in CASES} == {
        "8b": 1, "8b-x2": 2, "8b-tp2": 2, "8b-x8": 8,
    }  # fmt: skip
    assert gpu_scaling.CASES["8b-tp2"].replicas(8) == [4, 2, 1]
    assert gpu_scaling.CASES["70b-tp8"].replicas(4) == []
