"""`rayhs gc`: what is garbage goes, what is named by a record or the index stays."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from rayhs.cli import app
from rayhs.errors import ConfigError, FormatError, ObjectNotFound
from rayhs.gc import SAFE_AGE_S, collect, parse_age
from rayhs.layout import ShardId, commit_name, object_name
from rayhs.shards import COMMIT_WITHIN_S
from rayhs.store import open_store
from rayhs.store.base import PARTIAL
from rayhs.store.pieces import PART_BYTES
from rayhs.verify import verify
from tests.builders import Builder
from tests.s3_servers import S3Server

FIRST, SECOND = ShardId(0, 0), ShardId(0, 1)
ORPHAN = object_name(FIRST, "f" * 16, "safetensors")


@pytest.fixture
def built(tmp_path: Path) -> Builder:
    return Builder(tmp_path / "data").write()


def names(builder: Builder) -> set[str]:
    return {str(p.relative_to(builder.folder)) for p in builder.folder.rglob("*") if p.is_file()}


def put_aged(builder: Builder, name: str, hours: float = 24.0) -> str:
    builder.put(name, b"left over")
    when = time.time() - hours * 3600
    os.utime(builder.folder / name, (when, when))
    return name


def test_the_safe_age_leaves_every_attempt_the_time_it_has() -> None:
    assert SAFE_AGE_S >= 2 * COMMIT_WITHIN_S


def test_garbage_goes_and_the_dataset_stays(built: Builder) -> None:
    before = names(built)
    garbage = [
        put_aged(built, ORPHAN),
        put_aged(built, object_name(ShardId(77, 3), "a" * 16, "parquet")),
        put_aged(built, "samples/00009.parquet"),
        put_aged(built, "index/00009.parquet"),
        put_aged(built, f"shards/{PARTIAL}0123"),
    ]
    store = open_store(str(built.folder))
    looked = collect(store, dry_run=True)
    assert names(built) == before | set(garbage)
    done = collect(store)
    assert names(built) == before
    assert set(looked.names) == set(done.names) == set(garbage)
    assert (looked.objects, looked.unfinished, looked.bytes, looked.young) == (4, 1, 36, 0)
    assert verify(store).ok and verify(store).orphans == 0
    assert collect(store).objects == 0


def test_what_is_young_or_nobodys_stays(built: Builder) -> None:
    put_aged(built, ORPHAN, hours=5.9)
    put_aged(built, f"shards/{PARTIAL}0123", hours=5.9)
    put_aged(built, "shards/notes.txt")
    put_aged(built, "README.md")
    before = names(built)
    assert verify(str(built.folder)).orphans == 1  # the note is none of an attempt's
    store = open_store(str(built.folder))
    assert collect(store).young == 2
    assert names(built) == before
    assert set(collect(store, older_than=5 * 3600).names) == {ORPHAN, f"shards/{PARTIAL}0123"}


def test_objects_of_a_shard_with_a_damaged_record_stay(built: Builder) -> None:
    for path in (built.folder / "shards").iterdir():
        os.utime(path, (0, 0))
    path = built.folder / commit_name(FIRST)
    path.write_bytes(path.read_bytes()[:-9])
    before = names(built)
    report = collect(open_store(str(built.folder)))
    assert (report.objects, report.damaged) == (0, 1)
    assert names(built) == before


def test_an_object_only_the_index_names_stays(built: Builder) -> None:
    """Where a server ignores conditions, a late attempt may replace a record that is indexed."""
    for path in (built.folder / "shards").iterdir():
        os.utime(path, (0, 0))
    built.write_shard(FIRST, attempt="e" * 16)
    before = names(built)
    assert collect(open_store(str(built.folder)), older_than=0).objects == 0
    assert names(built) == before


def test_nothing_is_removed_where_the_dataset_is_unknown(built: Builder, tmp_path: Path) -> None:
    with pytest.raises(ObjectNotFound, match="no dataset here"):
        collect(open_store(str(tmp_path / "nothing")))
    put_aged(built, ORPHAN)
    (built.folder / "dataset.json").write_text("{}")
    with pytest.raises(FormatError):
        collect(open_store(str(built.folder)))
    assert ORPHAN in names(built)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    uncommitted=st.sets(st.sampled_from([ShardId(0, 0), ShardId(0, 1), ShardId(1, 0), ShardId(1, 2)])),
    orphans=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3), st.integers(0, 15), st.floats(0, 48)), max_size=8),
    age=st.floats(0, 48),
)
def test_no_committed_object_is_ever_removed(
    tmp_path_factory: pytest.TempPathFactory,
    uncommitted: set[ShardId],
    orphans: list[tuple[int, int, int, float]],
    age: float,
) -> None:
    built = Builder(tmp_path_factory.mktemp("gc") / "d", uncommitted=frozenset(uncommitted), finished=False).write()
    for path in built.folder.rglob("*"):
        os.utime(path, (0, 0))
    kept = names(built)
    for file, group, attempt, hours in orphans:
        put_aged(built, object_name(ShardId(file, group), f"{attempt:x}" * 16, "safetensors"), hours)
    old = {object_name(ShardId(f, g), f"{a:x}" * 16, "safetensors") for f, g, a, h in orphans if h > age + 0.01}
    report = collect(open_store(str(built.folder)), older_than=age * 3600)
    assert names(built) >= kept
    assert not names(built) & {n for n in old if _latest(orphans, n) > age + 0.01}
    assert report.objects + report.young == len(names(built) | set(report.names)) - len(kept)


def _latest(orphans: list[tuple[int, int, int, float]], name: str) -> float:
    return next(
        h for f, g, a, h in reversed(orphans) if object_name(ShardId(f, g), f"{a:x}" * 16, "safetensors") == name
    )


@pytest.mark.s3
def test_abandoned_uploads_on_s3_are_ended(ceph_uri: str, ceph_server: S3Server, tmp_path: Path) -> None:
    built, store = Builder(tmp_path / "data").write(), open_store(ceph_uri)
    for name in names(built):
        store.put(name, (built.folder / name).read_bytes())
    bucket, client = ceph_uri.split("/")[2], ceph_server.client()
    for key in (f"data/{ORPHAN}", "elsewhere/x"):
        upload = client.create_multipart_upload(Bucket=bucket, Key=key)
        part = {"Bucket": bucket, "Key": key, "UploadId": upload["UploadId"], "PartNumber": 1}
        client.upload_part(**part, Body=bytes(PART_BYTES))
    store.put(ORPHAN, b"left over")
    assert (collect(store).young, collect(store, dry_run=True, older_than=0).unfinished) == (2, 1)
    report = collect(store, older_than=0)
    assert (report.objects, report.unfinished) == (1, 1)
    left = [upload["Key"] for upload in client.list_multipart_uploads(Bucket=bucket)["Uploads"]]
    assert left == ["elsewhere/x"]
    assert verify(store).ok and verify(store).orphans == 0


@pytest.mark.parametrize(("text", "seconds"), [("0", 0), ("90s", 90), ("1.5h", 5400), ("2d", 172_800), ("30m", 1800)])
def test_ages(text: str, seconds: float) -> None:
    assert parse_age(text) == seconds


@pytest.mark.parametrize("text", ["", "h", "-1h", "6 weeks", "1e9", "nan"])
def test_ages_that_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="write an age such as"):
        parse_age(text)


def test_the_command(built: Builder) -> None:
    put_aged(built, ORPHAN)
    uri = str(built.folder)
    shown = CliRunner().invoke(app, ["gc", uri, "--dry-run", "--json"])
    assert shown.exit_code == 0 and json.loads(shown.stdout)["names"] == [ORPHAN]
    told = CliRunner().invoke(app, ["gc", uri, "--older-than", "1h"])
    assert told.exit_code == 0 and "1 objects, 9 B removed" in told.stdout and ORPHAN in told.stdout
    assert ORPHAN not in names(built)
    assert CliRunner().invoke(app, ["gc", uri, "--older-than", "soon"]).exit_code == 2
