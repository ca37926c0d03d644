"""Planning on a real Ray: the same plan whatever the number of workers, and errors as one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rayhs.config import RunConfig
from rayhs.errors import ConfigError, InputError, StoreError
from rayhs.layout import Plan
from rayhs.model import describe_model
from rayhs.plan import input_fingerprint
from rayhs.samples import make_plan
from rayhs.store import open_store
from tests.planning import LAYERS, plan_here, read_rows, run_config
from tests.tokenizers_for_tests import save_tokenizer

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("local_ray")]


def planned(config: RunConfig, **changes: Any) -> tuple[Plan, dict[str, int], list[int]]:
    seen: list[int] = []
    store = changes.get("store", open_store(config.output))
    plan, reasons = make_plan(config, describe_model(config), LAYERS, store, seen.append)
    assert seen == sorted(seen) and seen[-1] == plan.samples
    return plan, dict(reasons), seen


def write_input(folder: Path) -> None:
    rows = [{"id": f"r{i % 180}", "text": "word " * (i % 9), "extra": i} for i in range(200)]
    folder.mkdir()
    with (folder / "a.jsonl").open("w") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows[:120])
        file.write("{broken\n")
    (folder / "b.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[120:]))


def test_one_and_two_workers_and_no_ray_give_the_same_plan(tmp_path: Path) -> None:
    write_input(tmp_path / "in")
    tokenizer = str(save_tokenizer(tmp_path / "tokenizer"))
    plans = []
    for workers in (1, 2):
        config = run_config(
            tmp_path / f"out-{workers}",
            {"path": str(tmp_path / "in"), "id": "id"},
            tokenizer=tokenizer,
            cluster={"plan_workers": workers},
            shards={"rows_per_file": 16, "target_bytes": 3000},
        )
        plan, reasons, _ = planned(config)
        plans.append((plan, reasons, read_rows(open_store(config.output), plan)))
    assert plans[0] == plans[1]
    plan, reasons, _ = plans[0]
    assert reasons == {"duplicate id": 20, "broken JSON": 1, "empty": 20}
    assert plan.input == input_fingerprint(config)
    alone, _ = plan_here(config.model_copy(update={"output": str(tmp_path / "alone")}))
    assert alone.fingerprint == plan.fingerprint and alone.files == plan.files


def test_python_rows_and_a_dry_plan(tmp_path: Path) -> None:
    config = run_config(tmp_path / "out", ["one", "two", {"text": "three", "when": {1, 2}}, 4])
    dry, reasons, _ = planned(config, store=None)
    assert not (tmp_path / "out").exists() and reasons == {"wrong type": 1}
    plan, _, _ = planned(config)
    assert plan == dry
    assert [row["columns"] for row in read_rows(open_store(config.output), plan)][2] == '{"when": [1, 2]}'


def test_messages_from_parquet(tmp_path: Path) -> None:
    talk = [{"role": "user", "content": "low"}, {"role": "assistant", "content": "lower", "name": "x"}]
    pq.write_table(pa.Table.from_pylist([{"talk": talk}, {"talk": None}, {"talk": talk[:1]}]), tmp_path / "a.parquet")
    config = run_config(
        tmp_path / "out",
        {"path": str(tmp_path / "a.parquet"), "messages": "talk"},
        tokenizer=str(save_tokenizer(tmp_path / "tokenizer")),
    )
    plan, reasons, _ = planned(config)
    rows = read_rows(open_store(config.output), plan)
    assert reasons == {"no prompt": 1}
    assert [sum(row["loss_mask"] or ()) > 0 for row in rows] == [True, False, False]
    assert rows[2]["loss_mask"] == [0] * rows[2]["num_tokens"]


def test_errors_come_out_of_ray_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n\n")
    (tmp_path / "a.jsonl").write_text('{"a": "b"}\n')
    (tmp_path / "bad.parquet").write_text("no")
    cases = [
        ({"path": str(tmp_path / "missing")}, "no such file"),
        ({"path": str(tmp_path / "empty.jsonl")}, "no row in the input"),
        ({"path": str(tmp_path / "a.jsonl")}, "no column 'text'; it has a"),
        ({"path": str(tmp_path / "bad.parquet")}, "can't be read"),
        ({"rows": []}, "no row in the input"),
    ]
    for prompts, expected in cases:
        with pytest.raises(InputError, match=expected) as caught:
            planned(run_config(tmp_path / "out", prompts))
        assert type(caught.value) is InputError and "\n" not in str(caught.value)
    without = str(save_tokenizer(tmp_path / "tokenizer", template=None))
    with pytest.raises(ConfigError, match="no chat template"):
        planned(run_config(tmp_path / "out", {"rows": [[]], "messages": "m"}, tokenizer=without))


def test_a_store_that_refuses(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("a file where the folder should be")
    with pytest.raises(StoreError):
        planned(run_config(tmp_path / "out", ["x"]))
