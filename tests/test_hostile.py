"""Datasets made to hurt: each is a one-line error or a finding, without a crash, a large allocation or a
name that leads outside.

Every case is written to a folder of its own; another process (`tests.hostile_reader`) reads them all.
"""

from __future__ import annotations

import ast
import json
import struct
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import xxhash

from rayhs import layout
from rayhs.layout import ShardId
from rayhs.record import seal
from tests.builders import Builder
from tests.hostile_parquet import INDEX_CASES, SAMPLES_CASES, SHARD_CASES

ROOT = Path(__file__).parents[1]
MOST_BYTES = 256 * 2**20
SHARD = layout.object_name(ShardId(0, 0), "0123456789abcdef", "safetensors")
COMMIT = layout.commit_name(ShardId(0, 0))

Damage = Callable[[Builder], object]


def row(**values: Any) -> Damage:
    """The first row of the index says something else."""

    def damage(built: Builder) -> None:
        rows = built.index_rows(0)
        rows[0].update(values)
        built.write_index(0, rows)

    return damage


def record(name: str, **values: Any) -> Damage:
    return lambda built: built.edit_record(name, lambda document: document.update(values))


def raw(name: str, document: bytes) -> Damage:
    return lambda built: built.put(name, seal(document))


def replaced(name: str, old: bytes, new: bytes) -> Damage:
    """Text of a record replaced by what json.dumps wouldn't write, sealed again."""

    def damage(built: Builder) -> None:
        body = (built.folder / name).read_bytes()[:-38] + b"}"
        assert old in body
        built.put(name, seal(body.replace(old, new, 1)))

    return damage


def plan_file(**values: Any) -> Damage:
    return lambda built: built.edit_record(layout.DATASET, lambda d: d["plan"]["files"][0].update(values))


def committed(built: Builder, name: str, data: bytes) -> None:
    """Put an object that its commit record agrees with, so that verify looks inside."""
    built.put(name, data)
    built.edit_record(
        COMMIT, lambda c: c.update(object_bytes=len(data), object_checksum=xxhash.xxh3_128_hexdigest(data))
    )


def header(change: Callable[[dict[str, Any]], object]) -> Damage:
    """The shard's safetensors header with something changed."""

    def damage(built: Builder) -> None:
        head, data = parts_of(built)
        entries = json.loads(head)
        body = change(entries)
        committed(built, SHARD, joined(body if isinstance(body, bytes) else json.dumps(entries).encode(), data))

    return damage


def parts_of(built: Builder) -> tuple[bytes, bytes]:
    whole = (built.folder / SHARD).read_bytes()
    (length,) = struct.unpack("<Q", whole[:8])
    return whole[8 : 8 + length], whole[8 + length :]


def joined(head: bytes, data: bytes) -> bytes:
    return struct.pack("<Q", len(head)) + head + data


def tensor(name: str, **values: Any) -> Damage:
    return header(lambda entries: entries[name].update(values))


def claimed_length(length: int) -> Damage:
    return lambda built: committed(built, SHARD, struct.pack("<Q", length) + b"".join(parts_of(built)))


def sparse_length(length: int) -> Damage:
    """An object that really has so many bytes, none of them stored."""

    def damage(built: Builder) -> None:
        with open(built.folder / SHARD, "r+b") as file:
            file.write(struct.pack("<Q", length))
            file.truncate(length + 8)
        built.edit_record(COMMIT, lambda c: c.update(object_bytes=length + 8))

    return damage


def many_tensors(entries: dict[str, Any]) -> bytes:
    one = '"t%d":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}'
    return ("{" + ",".join(one % i for i in range(1_000_000)) + "}").encode()


DEEP = b"[" * 100_000 + b"]" * 100_000
BIG = 2**62
ALL = ("read", "verify", "look", "unfinished")
CASES: dict[str, tuple[Damage, tuple[str, ...]]] = {
    # What the index says.
    "index: parent folders": (row(shard="../../etc/passwd"), ("read", "verify")),
    "index: absolute name": (row(shard="/etc/passwd"), ("read", "verify")),
    "index: address": (row(shard="s3://other/shards/00000-0000-0123456789abcdef.safetensors"), ("read", "verify")),
    "index: another dataset": (row(shard=f"../other/{SHARD}"), ("read", "verify")),
    "index: a record": (row(shard="dataset.json"), ("read", "verify")),
    "index: no name": (row(shard=""), ("read", "verify")),
    "index: line breaks": (row(shard="a\nb\x1b[2J\r"), ("read", "verify")),
    "index: name of a megabyte": (row(shard="x" * 2**20), ("read", "verify")),
    "index: digits without end": (row(shard=f"shards/{'1' * 5000}-0000-0123456789abcdef.parquet"), ("read", "verify")),
    "index: other digits": (
        row(shard=SHARD.replace("00000-0000", "\u0660" * 5 + "-" + "\u0660" * 4)),
        ("read", "verify"),
    ),
    "index: reason of several lines": (row(status="failed", shard=None, reason="a\nb\x1b[2J"), ("verify",)),
    "index: token_start < 0": (row(token_start=-1), ("read", "verify")),
    "index: token_start 2^62": (row(token_start=BIG), ("read", "verify")),
    "index: num_tokens 2^62": (row(num_tokens=BIG), ("read", "verify")),
    "index: both 2^62": (row(num_tokens=BIG, token_start=BIG), ("read", "verify")),
    "index: num_tokens < 0": (row(num_tokens=-BIG), ("read", "verify")),
    "index: index 2^62": (row(index=BIG), ("read", "verify")),
    # Records.
    "commit: object outside": (record(COMMIT, object="../../etc/passwd"), ("verify", "unfinished")),
    "commit: negative start": (record(COMMIT, token_start=[-1, 2, 3]), ("verify", "unfinished")),
    "commit: 2^62 tokens": (record(COMMIT, num_tokens=[BIG] * 3), ("verify", "unfinished")),
    "commit: 10^400 bytes": (replaced(COMMIT, b'"object_bytes":', b'"object_bytes":1' + b"0" * 400), ("verify",)),
    "commit: errors over all bounds": (
        record(COMMIT, errors={"2": {"mean": 1e308, "max": 1e308}}),
        ("verify", "unfinished"),
    ),
    "commit: errors of no layer": (
        record(COMMIT, errors={"a\nb": {"mean": 0.1, "max": 0.1}}),
        ("verify", "unfinished"),
    ),
    "commit: NaN": (replaced(COMMIT, b'"seconds":{', b'"seconds":{"x":NaN'), ("verify", "unfinished")),
    "commit: a million samples": (record(COMMIT, index=list(range(500_000))), ("verify", "unfinished")),
    "commit: a million wrong values": (record(COMMIT, index=["x"] * 1_000_000), ("verify", "unfinished")),
    "commit: nested": (raw(COMMIT, b'{"shard":' + DEEP + b"}"), ("verify", "unfinished")),
    "commit: not text": (raw(COMMIT, b'{"\xff\xfe":1}'), ("verify", "unfinished")),
    "commit: other numbers": (
        lambda built: built.put("commits/0000000-0000.json", (built.folder / COMMIT).read_bytes()),
        (),
    ),
    "dataset: nested": (raw(layout.DATASET, DEEP), ALL),
    "dataset: nested plan": (replaced(layout.DATASET, b'"files":[', b'"files":[' + DEEP + b","), ALL),
    "dataset: empty": (lambda built: built.put(layout.DATASET, b""), ALL),
    "dataset: hidden 2^62": (record(layout.DATASET, hidden_size=BIG), ALL),
    "dataset: hidden 2^24": (record(layout.DATASET, hidden_size=2**24), ("read", "verify")),
    "dataset: a million layers": (record(layout.DATASET, layers=list(range(10**6)), num_layers=10**6), ALL),
    "dataset: layer < 0": (record(layout.DATASET, layers=[-1]), ALL),
    "dataset: no layers": (record(layout.DATASET, layers=[]), ALL),
    "dataset: line breaks": (record(layout.DATASET, versions={"a\nb\x1b[2J": 1}), ALL),
    "dataset: dtype": (record(layout.DATASET, dtype="object"), ALL),
    "dataset: dtype of no scales": (record(layout.DATASET, dtype="float8_e4m3fn"), ("read", "verify")),
    "dataset: engine dtype": (record(layout.DATASET, engine_dtype="object"), ALL),
    "dataset: engine dtype of one byte": (record(layout.DATASET, engine_dtype="float8_e4m3fn"), ALL),
    "plan: 2^62 rows": (plan_file(rows=BIG), ALL),
    "plan: 2^47 rows": (plan_file(rows=2**47), ("read", "verify")),
    "plan: -1 rows": (plan_file(rows=-1), ALL),
    "plan: 10^30 tokens": (plan_file(shard_tokens=[10**30, 1]), ALL),
    "plan: 20000 shards": (plan_file(shard_tokens=[1] * 20_000), ("verify",)),
    "summary: negative": (record(layout.SUMMARY, ok=-5), ALL[:3]),
    "summary: NaN": (replaced(layout.SUMMARY, b'"seconds":2.0', b'"seconds":NaN'), ALL[:3]),
    "summary: infinite": (replaced(layout.SUMMARY, b'"seconds":2.0', b'"seconds":1e999'), ALL[:3]),
    # Safetensors headers.
    "header: 1 GiB claimed": (claimed_length(2**30), ("read", "verify")),
    "header: 2^64 claimed": (claimed_length(2**64 - 1), ("read", "verify")),
    "header: 64 MiB there": (sparse_length(2**26), ("read",)),
    "header: a million tensors": (header(many_tensors), ("read", "verify")),
    "header: nested": (header(lambda _: DEEP), ("read", "verify")),
    "header: a megabyte of lists": (header(lambda _: b"[" + b"[]," * 340_000 + b"[]]"), ("read", "verify")),
    "header: overlap": (tensor("hidden_states.2", data_offsets=[0, 448]), ("read", "verify")),
    "header: offsets reversed": (tensor("hidden_states.2", data_offsets=[448, 0]), ("read", "verify")),
    "header: beyond the end": (tensor("hidden_states.2", data_offsets=[BIG, BIG + 448]), ("read", "verify")),
    "header: negative": (tensor("hidden_states.2", shape=[-14, -8]), ("read", "verify")),
    "header: product over int64": (tensor("hidden_states.2", shape=[2**32, 2**32, 2**32]), ("read", "verify")),
    "header: product wraps to 0": (tensor("hidden_states.2", shape=[2**32, 2**32]), ("read", "verify")),
    "header: nothing, 2^62 times": (
        tensor("sample_index", shape=[BIG, 0], data_offsets=[0, 0]),
        ("read", "verify"),
    ),
    "header: 100000 dimensions": (tensor("hidden_states.2", shape=[1] * 100_000), ("read", "verify")),
    "header: dtype": (tensor("hidden_states.2", dtype="F8_E4M3"), ("read", "verify")),
    "header: dtype of no kind": (tensor("hidden_states.2", dtype={"a": 1}), ("read", "verify")),
    "header: dtype object": (tensor("hidden_states.2", dtype="O"), ("read", "verify")),
    "header: floats": (tensor("hidden_states.2", shape=[14.0, 8.0]), ("read", "verify")),
    "header: name of a megabyte": (
        header(lambda e: e.update({"\n" + "x" * 900_000: e.pop("hidden_states.2")})),
        ("read", "verify"),
    ),
    "header: key twice": (
        header(lambda e: json.dumps(e).encode().replace(b'"offsets"', b'"token_ids": {}, "offsets"', 1)),
        ("read", "verify"),
    ),
    "header: metadata twice": (
        header(lambda e: b'{"__metadata__":{},' + json.dumps(e).encode()[1:]),
        ("read", "verify"),
    ),
    "header: key twice in a tensor": (
        header(lambda e: json.dumps(e).encode().replace(b'"dtype"', b'"dtype": "I8", "dtype"', 1)),
        ("read", "verify"),
    ),
}
PARQUET = {
    **{f"index: {name}": (damage, ("read", "verify")) for name, damage in INDEX_CASES.items()},
    # Unread until a sample's columns, a failure's id or verify needs them; the token ids, by verify alone.
    **{
        f"samples: {name}": (damage, ("verify",) if "token ids" in name else ("verify", "unfinished"))
        for name, damage in SAMPLES_CASES.items()
    },
}
SHARDS = {f"shard: {name}": (damage, ("read", "verify")) for name, damage in SHARD_CASES.items()}
EVERY = {**CASES, **{f"parquet {k}": v for k, v in {**PARQUET, **SHARDS}.items()}}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    top = tmp_path_factory.mktemp("hostile")
    folders = []
    for number, (name, (damage, _)) in enumerate(EVERY.items()):
        built = Builder(
            top / str(number), groups=((3,), (1,)), shard_format="parquet" if "parquet shard" in name else "safetensors"
        ).write()
        damage(built)
        folders.append(str(built.folder))
    return dict(zip(EVERY, read_all(folders), strict=True))


def read_all(folders: Sequence[str]) -> list[dict[str, Any]]:
    """What the reader said of each; where it crashed, another goes on with the next."""
    outcomes: list[dict[str, Any]] = []
    while len(outcomes) < len(folders):
        command = [sys.executable, "-m", "tests.hostile_reader", *folders[len(outcomes) :]]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
        outcomes += map(json.loads, done.stdout.splitlines())
        if done.returncode:
            outcomes.append({"crashed": done.returncode, "stderr": done.stderr[-2000:]})
    return outcomes


@pytest.mark.parametrize("name", EVERY)
def test_what_a_hostile_dataset_does(outcomes: dict[str, dict[str, Any]], name: str) -> None:
    outcome = outcomes[name]
    assert "crashed" not in outcome, outcome
    for step in ALL:
        said = outcome[step]
        assert not said.startswith("ESCAPED") and said.isprintable() and len(said) < 4000, (step, said)
        if step in EVERY[name][1]:
            assert said != "fine", (step, outcome)
    assert outcome["grown"] < MOST_BYTES, outcome


def test_sound_datasets_pass_the_same_reader(tmp_path: Path) -> None:
    for kind in ("safetensors", "parquet"):
        Builder(tmp_path / kind, groups=((3,), (1,)), shard_format=kind).write()
    for outcome in read_all([str(folder) for folder in tmp_path.iterdir()]):
        assert [outcome[step] for step in ALL] == ["fine"] * 4


READERS = ("reading", "dataset", "verify", "codec", "parquet_*", "indexing", "report", "store", "layout", "record")
FORBIDDEN = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}


def test_no_reader_unpickles() -> None:
    paths = [p for name in READERS for p in (*ROOT.glob(f"rayhs/{name}.py"), *ROOT.glob(f"rayhs/{name}/**/*.py"))]
    assert len(paths) > 20
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)]
            elif isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                assert called not in ("np.load", "numpy.load", "torch.load", "eval", "exec"), f"{path}:{node.lineno}"
                assert not called.endswith((".read_pickle", ".loads")) or called == "json.loads", (
                    f"{path}:{node.lineno}"
                )
                assert "allow_pickle" not in {k.arg for k in node.keywords}, f"{path}:{node.lineno}"
            assert not {n.partition(".")[0] for n in names} & FORBIDDEN, f"{path}:{node.lineno}"
