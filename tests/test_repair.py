"""`rayhs extract --repair`: what is damaged is made anew, and nothing else is touched."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from rayhs.cli import app
from rayhs.config import parse_config
from rayhs.errors import FormatError
from rayhs.indexing import write_index
from rayhs.layout import DATASET, CommitRecord, ShardId, commit_name, index_name, object_name, samples_name
from rayhs.pipeline import run_extract
from rayhs.repair import find_damage, take_out
from rayhs.store import open_store
from rayhs.verify import verify
from tests.test_pipeline import assert_complete, prompts_of, settings
from tests.test_replica import make_job, run_all, stored_states
from tests.test_replica import prompts_of as short_prompts

VICTIM = ShardId(0, 2)


def flip_a_bit(path: Path, seed: int = 0) -> None:
    data = bytearray(path.read_bytes())
    where = random.Random(seed).randrange(len(data) * 8)
    data[where // 8] ^= 1 << where % 8
    path.write_bytes(bytes(data))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def shard_object(root: Path, shard: ShardId) -> Path:
    (path,) = (root / "shards").glob(f"{shard}-*")
    return path


@pytest.mark.parametrize("damage", [flip_a_bit, cut, Path.unlink, lambda path: path.write_bytes(b"")])
@pytest.mark.parametrize("what", ["object", "commit"])
def test_exactly_the_damaged_shard_is_found_and_redone(
    tmp_path: Path, damage: Callable[[Path], object], what: str
) -> None:
    prompts = short_prompts(40)
    job = make_job(tmp_path, prompts)
    run_all(job)
    root = tmp_path / "out"
    path = shard_object(root, VICTIM) if what == "object" else root / commit_name(VICTIM)
    before = {p: p.read_bytes() for p in root.rglob("*.*")}
    damage(path)
    store, shards = open_store(str(root)), job.dataset.plan.shard_ids()
    found = find_damage(store, job.dataset, shards, lambda done, total: None)
    assert (found.shards, found.unplanned) == ({VICTIM}, set())
    take_out(store, found.shards)
    run_all(job)
    assert {p for p, data in before.items() if not p.exists() or p.read_bytes() != data} <= {
        path,
        root / commit_name(VICTIM),
    }
    assert find_damage(store, job.dataset, shards, lambda done, total: None).shards == set()
    write_index(store, job.dataset.plan)
    assert sorted(stored_states(job)) == list(range(40))


@pytest.mark.ray
@pytest.mark.usefixtures("local_ray")
class TestWholeRun:
    @pytest.fixture
    def finished(self, tmp_path: Path) -> tuple[Path, list[list[int]], Path]:
        prompts = prompts_of(100)
        file = tmp_path / "run.yaml"
        file.write_text(yaml.safe_dump(settings(tmp_path / "out", prompts)))
        run_extract(parse_config(settings(tmp_path / "out", prompts)))
        return tmp_path / "out", prompts, file

    def test_one_flipped_bit_in_each_kind_of_object(self, finished: tuple[Path, list[list[int]], Path]) -> None:
        """As a user does: verify names it and exits with 4, the same command with --repair makes it good."""
        root, prompts, file = finished
        commits = sorted((root / "commits").iterdir())
        shards = [ShardId.parse(path.stem) for path in commits]
        damaged = {
            shard_object(root, shards[0]),
            root / commit_name(shards[3]),
            root / index_name(1),
            root / samples_name(2),
            root / "summary.json",
        }
        kept = {p: p.stat().st_mtime_ns for p in commits if p not in (commits[0], commits[3])}
        (root / "commits" / "99999-0000.json").write_bytes(commits[1].read_bytes())
        for seed, path in enumerate(sorted(damaged)):
            flip_a_bit(path, seed)
        told = CliRunner().invoke(app, ["verify", str(root)])
        assert told.exit_code == 4
        for path in damaged:
            assert str(path.relative_to(root)) in told.stdout, (path, told.stdout)
        result = run_extract(parse_config(yaml.safe_load(file.read_text())), repair_first=True)
        assert result.exit_code == 0 and result.summary.ok == 100
        assert {p: p.stat().st_mtime_ns for p in kept} == kept
        assert verify(str(root)).ok
        assert_complete(root, prompts)

    def test_a_record_replaced_after_it_was_indexed(self, finished: tuple[Path, list[list[int]], Path]) -> None:
        """By a zombie, on a server that ignores conditions: nothing is extracted again, the index follows."""
        root, prompts, file = finished
        record = root / commit_name(VICTIM)
        commit = CommitRecord.from_bytes(record.read_bytes(), str(record))
        other = object_name(VICTIM, "e" * 16, "safetensors")
        (root / other).write_bytes(shard_object(root, VICTIM).read_bytes())
        record.write_bytes(commit.model_copy(update={"attempt": "e" * 16, "object": other}).to_bytes())
        objects = {p: p.stat().st_mtime_ns for folder in ("shards", "commits") for p in (root / folder).iterdir()}
        told = CliRunner().invoke(app, ["verify", str(root)])
        assert told.exit_code == 4 and index_name(VICTIM.file) in told.stdout
        assert_complete(root, prompts)
        assert run_extract(parse_config(yaml.safe_load(file.read_text())), repair_first=True).exit_code == 0
        assert {p: p.stat().st_mtime_ns for p in objects} == objects
        assert verify(str(root)).ok
        assert_complete(root, prompts)

    def test_the_identity_is_made_anew_only_for_the_same_dataset(
        self, finished: tuple[Path, list[list[int]], Path]
    ) -> None:
        root, prompts, file = finished
        config = parse_config(yaml.safe_load(file.read_text()))
        for damage in (flip_a_bit, Path.unlink):
            damage(root / DATASET)
            with pytest.raises(FormatError, match=r"dataset\.json.*--repair makes it anew"):
                run_extract(config)
            other = parse_config({**yaml.safe_load(file.read_text()), "layers": [1]})
            with pytest.raises(FormatError, match="no shard here has the identity of this run"):
                run_extract(other, repair_first=True)
            before = {p: p.stat().st_mtime_ns for p in (root / "commits").iterdir()}
            assert run_extract(config, repair_first=True).exit_code == 0
            assert {p: p.stat().st_mtime_ns for p in before} == before
            assert verify(str(root)).ok
        assert_complete(root, prompts)

    def test_repair_of_what_is_sound_changes_no_shard(self, finished: tuple[Path, list[list[int]], Path]) -> None:
        root, _prompts, file = finished
        config = parse_config(yaml.safe_load(file.read_text()))
        before = {p: p.stat().st_mtime_ns for f in ("commits", "shards", "samples") for p in (root / f).iterdir()}
        summary = run_extract(config).summary
        again = run_extract(config, repair_first=True).summary
        assert {p: p.stat().st_mtime_ns for p in before} == before
        assert again.model_copy(update={"finished": ""}) == summary.model_copy(update={"finished": ""})


def test_repair_of_nothing_is_an_ordinary_run_s_refusal(tmp_path: Path) -> None:
    told = CliRunner().invoke(app, ["extract", str(tmp_path / "none.yaml"), "--repair"])
    assert told.exit_code == 2
