"""Cuts, samples files, duplicates and fingerprints, without Ray."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayhs.errors import InputError
from rayhs.layout import SAMPLES_SCHEMA, samples_name
from rayhs.plan import CutRule, cut, input_fingerprint
from rayhs.prompts.ids import find_duplicates, merge_duplicates
from rayhs.store import open_store
from tests.planning import plan_here, read_rows, run_config


@given(st.lists(st.integers(0, 50), max_size=60), st.integers(1, 2000), st.integers(1, 40), st.integers(0, 3))
def test_cut(counts: list[int], target: int, per_token: int, generated: int) -> None:
    rule = CutRule(target, per_token, generated)
    shards = cut(counts, rule)
    assert [n for shard in shards for n in shard] == counts
    size = [sum(rule.stored(n) for n in shard) * per_token for shard in shards]
    for number, shard in enumerate(shards):
        assert size[number] <= target or sum(n > 0 for n in shard) == 1
        if number + 1 < len(shards):  # what comes next would not have fitted
            assert size[number] + rule.stored(shards[number + 1][0]) * per_token > target


def test_cut_counts_generated_tokens() -> None:
    assert cut([10, 10, 10], CutRule(200, 10)) == [[10, 10], [10]]
    assert cut([10, 10, 10], CutRule(200, 10, generated=1)) == [[10], [10], [10]]


ROW = st.fixed_dictionaries({"id": st.sampled_from("abcdefgh"), "text": st.text("xyz", max_size=12)})


@settings(max_examples=40)
@given(rows=st.lists(ROW, min_size=1, max_size=40), step=st.integers(1, 12), target=st.integers(64, 2000))
def test_plan_is_the_same_whatever_the_order_and_the_partitions(
    tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, str]], step: int, target: int
) -> None:
    folder = tmp_path_factory.mktemp("plan")
    config = run_config(
        folder, {"rows": rows, "text": "text", "id": "id"}, shards={"rows_per_file": step, "target_bytes": target}
    )
    plan, reasons = plan_here(config)
    assert (plan, reasons) == plan_here(config, reverse=True, partitions=1)
    planned = read_rows(open_store(str(folder)), plan)
    assert len({row["sample_id"] for row in planned}) == len(rows)
    assert reasons.total() == plan.rejected == sum(row["status"] == "rejected" for row in planned)
    seen: set[str] = set()
    for row, made in zip(rows, planned, strict=True):
        repeated = row["id"] in seen
        seen.add(row["id"])
        assert (made["sample_id"] == row["id"]) != repeated
        assert (made["reason"] or "").startswith("duplicate id") == repeated
        if made["status"] == "planned":
            assert bytes(made["token_ids"]).decode() == row["text"]


def test_samples_file_has_the_schema_and_shards_as_row_groups(tmp_path: Path) -> None:
    rows = [{"ids": [1] * n, "mask": [1] * n, "topic": n} for n in (4, 3, 9, 1)]
    config = run_config(
        tmp_path,
        {"rows": rows, "token_ids": "ids", "loss_mask": "mask"},
        shards={"target_bytes": 8 * 64, "rows_per_file": 100},
    )
    plan, _ = plan_here(config)
    assert plan.files[0].shard_tokens == [7, 9, 1]
    parquet = pq.ParquetFile(tmp_path / samples_name(0))
    assert parquet.schema_arrow.equals(SAMPLES_SCHEMA)
    assert parquet.read_row_group(1).to_pylist() == [
        {
            "index": 2,
            "sample_id": "rows:2",
            "status": "planned",
            "reason": None,
            "num_tokens": 9,
            "token_ids": [1] * 9,
            "loss_mask": [1] * 9,
            "columns": '{"topic": 9}',
        }
    ]


BASE = {"rows": [{"i": "a", "t": "xy"}, {"i": "b", "t": ""}, {"i": "c", "t": "zz"}], "text": "t", "id": "i"}


@pytest.mark.parametrize(
    "change",
    [
        {"rows": [{"i": "a", "t": "xz"}, *BASE["rows"][1:]]},
        {"rows": [{"i": "q", "t": "xy"}, *BASE["rows"][1:]]},
        {"rows": [*BASE["rows"][:2], {"i": "c", "t": "z"}]},
        {"rows": [*BASE["rows"], {"i": "d", "t": "d"}]},
        {"rows": BASE["rows"][::-1]},
        {"max_tokens": 1},
        {"max_tokens": 1, "too_long": "truncate"},
    ],
)
def test_any_change_of_the_plan_changes_both_fingerprints(tmp_path: Path, change: dict[str, Any]) -> None:
    before, after = run_config(tmp_path, BASE), run_config(tmp_path, {**BASE, **change})
    assert plan_here(before)[0].fingerprint == plan_here(before)[0].fingerprint
    assert plan_here(before)[0].fingerprint != plan_here(after)[0].fingerprint
    assert input_fingerprint(before) == input_fingerprint(before) != input_fingerprint(after)


def test_cuts_change_the_fingerprints(tmp_path: Path) -> None:
    before = run_config(tmp_path, BASE)
    for shards in ({"target_bytes": 100}, {"rows_per_file": 2}):
        after = run_config(tmp_path, BASE, shards=shards)
        assert plan_here(before)[0].fingerprint != plan_here(after)[0].fingerprint
        assert input_fingerprint(before) != input_fingerprint(after)


def test_input_fingerprint_of_odd_rows(tmp_path: Path) -> None:
    def fingerprint(last: float) -> str:
        rows = [{"ids": np.arange(5000.0) * last, "text": "x", ("a", 1): {1, 2}}, b"\xff", {"text": "\ud800"}]
        return input_fingerprint(run_config(tmp_path, {"rows": rows}))

    assert fingerprint(1.0) == fingerprint(1.0)
    array = np.zeros(5000)
    array[2500] = 1
    one = input_fingerprint(run_config(tmp_path, {"rows": [{"text": "x", "v": array}]}))
    assert one != input_fingerprint(run_config(tmp_path, {"rows": [{"text": "x", "v": np.zeros(5000)}]}))


def test_duplicates_over_files_formats_of_ids_and_broken_rows(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"id": 7, "text": "a"}\nnonsense\n{"id": "x", "text": ""}\n')
    (tmp_path / "b.jsonl").write_text('{"id": "7", "text": "b"}\n{"text": "c"}\n{"id": "x", "text": "d"}\n')
    output = tmp_path / "out"
    plan, reasons = plan_here(run_config(output, {"path": str(tmp_path / "*.jsonl"), "id": "id"}))
    rows = read_rows(open_store(str(output)), plan)
    assert [row["sample_id"] for row in rows] == ["7", "a.jsonl:1", "x", "b.jsonl:0", "b.jsonl:1", "b.jsonl:2"]
    assert [row["reason"] for row in rows[2:]] == [
        "empty: column 'text' is an empty text",
        "duplicate id: '7', first at row 0",
        "bad id: column 'id' is null or missing",
        "duplicate id: 'x', first at row 2",
    ]
    assert reasons == {"broken JSON": 1, "empty": 1, "duplicate id": 2, "bad id": 1}


def test_a_column_no_row_has_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "a", "n": 1}\nbroken\n{"prompt": "b"}\n')
    with pytest.raises(InputError, match=r"no column 'text'; it has prompt, n; name one"):
        plan_here(run_config(tmp_path / "out", str(path)))
    with pytest.raises(InputError, match="no column 'key'"):
        plan_here(run_config(tmp_path / "out", {"path": str(path), "text": "prompt", "id": "key"}))
    path.write_text('{"text": null}\nbroken\n')
    assert plan_here(run_config(tmp_path / "out", str(path)))[1] == {"no prompt": 1, "broken JSON": 1}


def test_duplicate_tables() -> None:
    from rayhs.prompts.ids import HASHED

    table = np.array([(1, 1, 9), (1, 1, 4), (1, 2, 5), (1, 1, 6), (0, 1, 7)], HASHED)
    found = merge_duplicates([find_duplicates([table[:2], table[2:]]), find_duplicates([table[:0]])])
    assert found.tolist() == [(6, 4), (9, 4)]


def test_gzip_and_plain_give_the_same_plan(tmp_path: Path) -> None:
    import gzip

    text = "".join(json.dumps({"text": "x" * (i % 7)}) + "\n" for i in range(50))
    for name, data in (("a/p.jsonl", text.encode()), ("b/p.jsonl.gz", gzip.compress(text.encode()))):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_bytes(data)
    shards = {"rows_per_file": 8, "target_bytes": 640}
    plans = [plan_here(run_config(tmp_path / f"out-{n}", str(tmp_path / n), shards=shards))[0] for n in "ab"]
    one, two = ([(f.rows, f.rejected, f.shard_tokens) for f in plan.files] for plan in plans)
    assert one == two  # ids differ by the file's name, and with them fingerprints and checksums
