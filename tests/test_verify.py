"""Verify finds every kind of damage, names object and samples, and never raises on it."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from rayhs import layout
from rayhs.cli.output import print_verify
from rayhs.dataset import open_dataset
from rayhs.errors import EXIT_DAMAGE, EXIT_OK, ObjectNotFound
from rayhs.layout import ShardId
from rayhs.store import open_store
from rayhs.verify import VerifyReport, verify
from rayhs.verify.findings import NAMED_SAMPLES, Finding, Findings
from rayhs.verify.states import ObjectStream
from tests.builders import Builder

FORMATS = ("safetensors", "parquet")
DTYPES = ("float32", "float16", "bfloat16", "float8_e4m3fn")
FIRST = ShardId(0, 0)


@pytest.fixture(params=FORMATS)
def built(request: pytest.FixtureRequest, tmp_path: Path) -> Builder:
    return Builder(tmp_path / "data", shard_format=request.param).write()


def object_of(built: Builder, shard: ShardId = FIRST) -> str:
    return layout.object_name(shard, "0123456789abcdef", built.shard_format)  # type: ignore[arg-type]


def check(built: Builder, **options: Any) -> VerifyReport:
    report = verify(str(built.folder), **options)
    json.dumps(report.to_dict())
    assert report.exit_code == (EXIT_DAMAGE if report.findings else EXIT_OK)
    assert all("\n" not in str(finding) for finding in report.findings)
    return report


def problems(report: VerifyReport, name: str) -> dict[str, tuple[str, ...]]:
    return {f.problem: f.samples for f in report.findings if f.object == name}


@pytest.mark.parametrize("shard_format", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sound_dataset_has_no_findings(tmp_path: Path, shard_format: str, dtype: str) -> None:
    built = Builder(tmp_path, shard_format=shard_format, dtype=dtype).write()
    seen: list[tuple[int, int, int]] = []
    report = check(built, on_progress=lambda *step: seen.append(step))
    assert report.ok and report.findings == ()
    assert (report.shards, report.samples, report.ok_samples, report.orphans) == (5, 13, 11, 0)
    assert report.tokens == sum(len(r.token_ids) for r in built.good())
    assert seen[-1] == (5, 5, report.bytes) and len(seen) == 5


def content(built: Builder, kind: str) -> object:
    """What a reader gets out of the Parquet files of one kind."""
    if kind == "index":
        return open_dataset(str(built.folder)).index.to_pydict()
    return pq.read_table(built.folder / "samples" / "00000.parquet").to_pydict()


@pytest.mark.parametrize(
    ("kind", "shard_format"),
    [("index", "safetensors"), ("samples", "safetensors"), ("shards", "safetensors"), ("shards", "parquet")],
)
def test_a_flipped_bit_that_changes_anything_is_found(tmp_path: Path, kind: str, shard_format: str) -> None:
    built = Builder(tmp_path, shard_format=shard_format).write()
    path = min(tmp_path.glob(f"{kind}/*"))
    sound = path.read_bytes()
    original = None if kind == "shards" else content(built, kind)
    for position in range(0, len(sound), max(3, len(sound) // 150)):
        damaged = bytearray(sound)
        damaged[position] ^= 0x10
        path.write_bytes(damaged)
        if check(built).ok:
            assert kind != "shards" and content(built, kind) == original, (
                position,
                sound[position - 40 : position + 9],
            )


@pytest.mark.parametrize("name", ["dataset.json", "summary.json", "commits/00000-0000.json"])
def test_a_flipped_bit_of_a_record_is_a_finding(tmp_path: Path, name: str) -> None:
    built = Builder(tmp_path).write()
    sound = (tmp_path / name).read_bytes()
    for position in range(0, len(sound), len(sound) // 10):
        built.put(name, sound[:position] + bytes([sound[position] ^ 1]) + sound[position + 1 :])
        assert problems(check(built), name), position


@pytest.mark.parametrize("layer", [0, 4])
def test_a_flipped_bit_of_a_state_names_its_sample(built: Builder, layer: int) -> None:
    row = built.rows[0][0][1]
    path = built.folder / object_of(built)
    data = path.read_bytes()
    wanted = row.states[layer].tobytes()
    at = data.index(wanted[:16]) + 5 if built.shard_format == "safetensors" else data.index(wanted[:32]) + 5
    path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    found = problems(check(built), object_of(built))
    assert any("xxh3_128 checksum differs" in problem for problem in found)
    assert {s for samples in found.values() for s in samples} == {"row-1"}


@pytest.mark.parametrize("shard_format", FORMATS)
def test_a_flipped_bit_of_a_scale_names_its_sample(tmp_path: Path, shard_format: str) -> None:
    built = Builder(tmp_path, shard_format=shard_format, dtype="float8_e4m3fn").write()
    path = built.folder / object_of(built)
    data = path.read_bytes()
    at = data.index(built.rows[0][0][1].scales[2].tobytes())
    path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    found = problems(check(built), object_of(built))
    assert any("xxh3_128 checksum differs" in problem for problem in found)
    assert {s for samples in found.values() for s in samples} == {"row-1"}


@pytest.mark.parametrize("shard_format", FORMATS)
@pytest.mark.parametrize("value", [np.nan, np.inf, 3e38, 0.0, -1.0])
def test_bad_scales_that_were_stored(tmp_path: Path, shard_format: str, value: float) -> None:
    built = Builder(tmp_path, shard_format=shard_format, dtype="float8_e4m3fn")
    built.rows[0][0][2].scales[2][-1] = value
    assert problems(check(built.write()), object_of(built)) == {"layer 2 is not finite": ("row-2",)}


def test_an_object_that_is_gone_or_cut(built: Builder) -> None:
    path = built.folder / object_of(built)
    data = path.read_bytes()
    path.write_bytes(data[:-1])
    found = problems(check(built), object_of(built))
    assert found == {
        f"{len(data) - 1} bytes, its commit record says {len(data)}": ("row-0", "row-1", "row-2"),
    }
    path.unlink()
    assert problems(check(built), object_of(built)) == {"missing": ("row-0", "row-1", "row-2")}


def test_states_of_two_samples_swapped(built: Builder) -> None:
    """A batch neighbour's states: the object is whole, finite and as its record says, only not theirs."""
    first, second = built.rows[0][0][:2]
    tokens = min(len(first.token_ids), len(second.token_ids))
    before = {r.index: built.checksum(r) for r in (first, second)}
    for k in built.layers:
        a, b = first.states[k][:tokens].copy(), second.states[k][:tokens].copy()
        first.states[k][:tokens], second.states[k][:tokens] = b, a
    built.write_shard(FIRST)
    assert check(built).ok
    built.edit_record(
        layout.commit_name(FIRST),
        lambda c: c.update(checksum=[before.get(i, s) for i, s in zip(c["index"], c["checksum"], strict=True)]),
    )
    assert problems(check(built), object_of(built)) == {
        "states differ from the checksum in the commit record": ("row-0", "row-1")
    }


def test_samples_swapped_with_their_tokens(built: Builder) -> None:
    first, second = built.rows[0][0][:2]
    first.token_ids, second.token_ids = second.token_ids, first.token_ids
    first.loss_mask, second.loss_mask = second.loss_mask, first.loss_mask
    first.states, second.states = second.states, first.states
    built.write_shard(FIRST)
    found = problems(check(built), object_of(built))
    assert {s for problem, samples in found.items() if "token" in problem for s in samples} == {"row-0", "row-1"}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shard_format", FORMATS)
@pytest.mark.parametrize(
    ("value", "problem"),
    [(np.nan, "layer 2 is not finite"), (-np.inf, "layer 2 is not finite"), (0.0, "layer 2 is all zero")],
)
def test_bad_values_that_were_stored(tmp_path: Path, dtype: str, shard_format: str, value: float, problem: str) -> None:
    built = Builder(tmp_path, shard_format=shard_format, dtype=dtype)
    states = built.rows[0][0][2].states[2]
    states[slice(None) if value == 0.0 else -1] = value
    report = check(built.write())
    assert problems(report, object_of(built)) == {problem: ("row-2",)}


def test_large_finite_values_are_fine(built: Builder) -> None:
    built.rows[0][0][0].states[2][0, 0] = np.finfo(np.float32).max
    built.write_shard(FIRST)
    assert check(built).ok


def test_states_that_are_the_same_for_every_token(built: Builder) -> None:
    row = built.rows[0][0][0]
    row.states[4][:] = row.states[4][0]
    built.write_shard(FIRST)
    assert problems(check(built), object_of(built)) == {"layer 4 is the same for every token": ("row-0",)}


def test_equal_tokens_may_have_equal_states(tmp_path: Path) -> None:
    built = Builder(tmp_path)
    row = built.rows[0][0][0]
    row.token_ids[:] = 5
    row.states[4][:] = row.states[4][0]
    assert check(built.write()).ok


def test_tokens_or_mask_other_than_planned(built: Builder) -> None:
    row, other = built.rows[0][0][:2]
    row.token_ids = row.token_ids + 1
    other.loss_mask = 1 - other.loss_mask
    built.write_shard(FIRST)
    assert problems(check(built), object_of(built)) == {
        "token_ids differ from the plan's": ("row-0",),
        "loss_mask differs from the plan's": ("row-1",),
    }


@pytest.mark.parametrize("include_generated", [0, 2])
def test_generated_tokens_may_follow_the_prompt(tmp_path: Path, include_generated: int) -> None:
    built = Builder(tmp_path, include_generated=include_generated).write()
    for row in built.rows[0][0]:
        row.token_ids = np.append(row.token_ids, [1, 2]).astype(np.int32)
        row.loss_mask = np.append(row.loss_mask, [1, 1]).astype(np.uint8)
        row.states = {k: np.concatenate([a, a[:2] + 1]) for k, a in row.states.items()}
    built.write_shard(FIRST)
    built.write_index(0, built.index_rows(0))
    built.write_summary()
    report = check(built)
    if include_generated:
        assert report.ok
    else:
        assert any("tokens where the plan has another number" in p for p in problems(report, object_of(built)))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("summary.json", "missing: the run has not finished, 5 of 5 shards are committed"),
        ("commits/00001-0000.json", "missing: the shard was not committed"),
        ("index/00001.parquet", "missing: samples 7..12 are not in the index"),
        ("samples/00000.parquet", "its 2 shards can't be checked"),
        ("dataset.json", "missing: nothing else can be checked"),
    ],
)
def test_missing_records(built: Builder, name: str, expected: str) -> None:
    (built.folder / name).unlink()
    assert any(expected in problem for problem in problems(check(built), name))


def test_an_unfinished_dataset_is_one_finding_if_the_rest_is_sound(tmp_path: Path) -> None:
    built = Builder(tmp_path, finished=False, uncommitted=frozenset({ShardId(0, 1)})).write()
    report = check(built)
    assert [f.object for f in report.findings] == ["summary.json"]
    assert "4 of 5 shards are committed; run rayhs extract (or import) again" in report.findings[0].problem
    assert report.shards == 4 and not report.finished
    assert "finishes it" in printed(report) and "--repair" not in printed(report)
    (tmp_path / object_of(built)).unlink()
    assert "--repair" in printed(check(built))


def printed(report: VerifyReport) -> str:
    out = io.StringIO()
    print_verify(report, out)
    return out.getvalue()


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(ObjectNotFound, match="no dataset here"):
        verify(str(tmp_path))


def test_index_rows_missing_doubled_moved_and_changed(built: Builder) -> None:
    rows, name = built.index_rows(0), layout.index_name(0)
    built.write_index(0, rows[:2] + rows[3:])
    built.write_summary()
    assert problems(check(built), name) == {"samples missing from the index": ("row-2",)}
    built.write_index(0, [*rows[:3], *rows[2:]])
    built.write_summary()
    assert problems(check(built), name) == {"samples more than once in the index": ("row-2",)}
    built.write_index(0, rows[::-1])
    built.write_summary()
    assert problems(check(built), name) == {"rows are out of order": ()}
    built.write_index(0, [*rows, *built.index_rows(1)[:1]])
    built.write_summary()
    assert problems(check(built), name) == {"rows that belong elsewhere, such as index 7": ()}
    for key, value in (("token_start", 1), ("sample_id", "x"), ("shard", None), ("status", "failed"), ("reason", "x")):
        built.write_index(0, [{**rows[0], key: value}, *rows[1:]])
        built.write_summary()
        assert problems(check(built), name) == {f"{key} differs from plan and commit record": ("row-0",)}


def test_files_the_plan_does_not_know(built: Builder) -> None:
    built.write_index(2, built.index_rows(0))
    (built.folder / "commits/00009-0000.json").write_bytes((built.folder / "commits/00000-0000.json").read_bytes())
    report = check(built)
    assert problems(report, "index/00002.parquet") == {"the plan has no such file": ()}
    assert problems(report, "commits/00009-0000.json") == {"the plan has no such shard": ()}


def test_the_object_of_a_lost_attempt_is_an_orphan_and_no_damage(built: Builder) -> None:
    orphan = layout.object_name(FIRST, "f" * 16, built.shard_format)  # type: ignore[arg-type]
    built.put(orphan, b"half")
    report = check(built)
    assert report.ok and (report.orphans, report.orphan_bytes) == (1, 4)


def test_records_that_contradict(built: Builder) -> None:
    built.edit_record(layout.SUMMARY, lambda s: s.update(ok=12))
    assert problems(check(built), "summary.json") == {"ok is 12, the dataset has 11": ()}
    commit = layout.commit_name(FIRST)
    built.edit_record(commit, lambda c: c.update(shard="00000-0001"))
    (message,) = problems(check(built), commit)
    assert "is not one of shard 00000-0001" in message
    built.write_shard(FIRST)
    for change in ({"index": [0, 1, 3]}, {"object_checksum": "0" * 32}, {"checksum": ["0" * 16] * 3}, {"index": [0]}):
        built.edit_record(commit, lambda c, change=change: c.update(change))  # type: ignore[misc]
        assert not check(built).ok, change
        built.write_shard(FIRST)


@pytest.mark.parametrize(
    "change", [{"model": "other"}, {"layers": [0, 2, 3]}, {"hidden_size": 4}, {"dtype": "float16"}]
)
def test_another_identity_than_the_shards_is_found(built: Builder, change: dict[str, Any]) -> None:
    built.edit_record(layout.DATASET, lambda d: d.update(change))
    assert not check(built).ok


def test_a_hostile_header_is_a_finding(tmp_path: Path) -> None:
    built = Builder(tmp_path).write()
    path = tmp_path / object_of(built)
    path.write_bytes((2**40).to_bytes(8, "little") + path.read_bytes()[8:])
    found = problems(check(built), object_of(built))
    assert any("a header of 1099511627776 bytes" in problem for problem in found)


def test_findings_are_bounded() -> None:
    found = Findings(limit=2)
    for i in range(100):
        found.add("shard", "broken", [f"row-{i}"])
    found.extend([Finding("b", "x"), Finding("c", "y"), Finding("d", "z")])
    kept = list(found)
    assert len(kept) == 2 and found.dropped == 2
    assert kept[0].count == 100 and len(kept[0].samples) == NAMED_SAMPLES
    assert str(kept[0]).endswith("and 80 more)")


def test_an_object_stream_hands_out_every_byte_once(tmp_path: Path) -> None:
    import xxhash

    data = np.random.default_rng(0).bytes(20 * 2**20 + 13)
    (tmp_path / "x").write_bytes(data)
    stream = ObjectStream(open_store(str(tmp_path)), "x", len(data))
    parts = [bytes(stream.read(size)) for size in (5, 0, 9 * 2**20, 1000, 2**20)]
    parts.append(bytes(stream.read(stream.left)))
    assert b"".join(parts) == data and stream.left == 0
    assert stream.finish() == xxhash.xxh3_128(data).hexdigest()


MEMORY = """
import resource, sys
from rayhs.verify import verify
verify(sys.argv[1])
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_the_shards(tmp_path: Path) -> None:
    def peak(name: str, rows: int) -> int:
        built = Builder(tmp_path / name, hidden=4096, groups=((rows,),))
        for row in built.good():
            tokens = 256
            row.token_ids = np.arange(tokens, dtype=np.int32)
            row.loss_mask = np.ones(tokens, np.uint8)
            row.states = {k: np.full((tokens, 4096), k + 1, np.float32) + row.token_ids[:, None] for k in built.layers}
        built.write()
        command = [sys.executable, "-c", MEMORY, str(built.folder)]
        done = subprocess.run(
            command, capture_output=True, text=True, check=True, env={**os.environ, "PYTHONPATH": "."}
        )
        return int(done.stdout)

    # 6 and 30 samples of 12 MiB: the larger shard must not need the 290 MiB more that it is larger.
    assert peak("large", 32) - peak("small", 8) < 60
