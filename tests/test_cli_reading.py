"""The command line over finished, unfinished and damaged datasets: tables, JSON, exit codes, quick start-up."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rayhs import __version__, layout, report
from rayhs.cli import app
from rayhs.cli.output import nbytes
from rayhs.cli.progress import RunProgress
from rayhs.errors import EXIT_DAMAGE, EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, EXIT_USAGE
from rayhs.layout import ShardId
from rayhs.store import open_store
from tests.builders import Builder


@pytest.fixture(params=["safetensors", "parquet"])
def built(request: pytest.FixtureRequest, tmp_path: Path) -> Builder:
    return Builder(tmp_path / "data", shard_format=request.param).write()


@pytest.fixture
def unfinished(tmp_path: Path) -> Builder:
    return Builder(tmp_path / "part", finished=False, uncommitted=frozenset({ShardId(0, 1), ShardId(1, 2)})).write()


def run(*arguments: str, code: int = EXIT_OK) -> str:
    result = CliRunner().invoke(app, list(arguments), prog_name="rayhs")
    assert result.exit_code == code, result.output + repr(result.exception)
    return result.stdout


def run_json(*arguments: str, code: int = EXIT_OK) -> Any:
    return json.loads(run(*arguments, "--json", code=code))


def error_line(*arguments: str, code: int) -> str:
    result = CliRunner().invoke(app, list(arguments), prog_name="rayhs")
    assert result.exit_code == code and result.stdout == ""
    (line,) = result.stderr.splitlines()
    return line


def rayhs(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own."""
    env = {**os.environ, "PYTHONPATH": ".", **environment}
    command = [sys.executable, "-m", "rayhs", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=env)


def test_status_of_a_finished_dataset(built: Builder) -> None:
    text = run("status", str(built.folder))
    assert "complete since 2026-01-01" in text and "11 of 13" in text and "the prompt is empty" in text
    found = run_json("status", str(built.folder))
    assert found["complete"] and found["reasons"] == {"the prompt is empty": 1, "states are not finite": 1}
    counts = {key: found[key] for key in ("samples", "ok", "failed", "rejected", "remaining", "shards")}
    assert counts == {"samples": 13, "ok": 11, "failed": 1, "rejected": 1, "remaining": 0, "shards": 5}


def test_status_of_an_unfinished_dataset(unfinished: Builder) -> None:
    assert "unfinished; run rayhs extract (or import) to go on" in run("status", str(unfinished.folder))
    found = run_json("status", str(unfinished.folder))
    committed = [
        r for s in unfinished.shards() if s not in unfinished.uncommitted for r in unfinished.rows[s.file][s.group]
    ]
    assert not found["complete"] and found["finished"] is None
    assert (found["shards"], found["committed_shards"]) == (5, 3)
    assert found["ok"] == sum(r.status == "planned" for r in committed) == 7
    assert found["remaining"] == 13 - 7 - 1 - 1
    assert found["tokens"] == sum(len(r.token_ids) for r in committed if r.status == "planned")
    assert found["reasons"] == {"the prompt is empty": 1, "states are not finite": 1}


def test_failures(built: Builder) -> None:
    lines = run("failures", str(built.folder)).splitlines()
    assert lines == [
        "sample_id\tindex\tstatus\treason",
        "row-4\t4\trejected\tthe prompt is empty",
        "row-7\t7\tfailed\tstates are not finite",
    ]
    found = run_json("failures", str(built.folder))["failures"]
    assert found[1] == {"sample_id": "row-7", "index": 7, "status": "failed", "reason": "states are not finite"}


def test_failures_of_a_run_that_has_not_finished_are_those_so_far(unfinished: Builder) -> None:
    """What the plan rejected too: a run refused for too many rejected prompts commits nothing."""
    rows = list(report.failures(open_store(str(unfinished.folder))))
    assert [(r["sample_id"], r["status"]) for r in rows] == [("row-4", "rejected"), ("row-7", "failed")]


def test_no_failures(tmp_path: Path) -> None:
    Builder(tmp_path, groups=((2,),)).write()
    assert run("failures", str(tmp_path)) == "no failures\n"


def test_show(built: Builder) -> None:
    text = run("show", str(built.folder))
    assert "tests/random" in text and "row-0 (index 0)" in text and "topic 0" in text and "layer 4" in text
    found = run_json("show", str(built.folder), "row-5")
    assert found["identity"]["layers"] == [0, 2, 4] and found["sample"]["index"] == 5
    assert found["sample"]["layers"]["2"]["norm_mean"] > 0
    assert run_json("show", str(built.folder), "12")["sample"]["sample_id"] == "row-12"
    assert "neither an id nor one of 13 positions" in error_line("show", str(built.folder), "13", code=EXIT_USAGE)
    assert "was rejected: the prompt is empty" in error_line("show", str(built.folder), "row-4", code=EXIT_FAILED)


def test_show_of_a_dataset_without_a_good_sample(tmp_path: Path) -> None:
    built = Builder(tmp_path, groups=((1,),))
    built.rows[0][0][0].status, built.rows[0][0][0].reason = "failed", "broken"
    (tmp_path / "shards").mkdir()
    built.write()
    assert "no good sample" in run("show", str(tmp_path))


def test_names_that_look_like_markup_are_printed_as_they_are(tmp_path: Path) -> None:
    built = Builder(tmp_path, model="org/[bold]model[/nope]").write()
    assert "org/[bold]model[/nope]" in run("show", str(built.folder))


def test_verify(built: Builder) -> None:
    assert "sound" in run("verify", str(built.folder))
    found = run_json("verify", str(built.folder))
    assert found["ok"] and found["findings"] == [] and found["samples"] == 13
    name = layout.object_name(ShardId(0, 0), "0123456789abcdef", built.shard_format)  # type: ignore[arg-type]
    path = built.folder / name
    path.write_bytes(path.read_bytes()[:-1])
    text = run("verify", str(built.folder), code=EXIT_DAMAGE)
    assert text.startswith(f"{name}: ") and "(samples row-0, row-1, row-2)" in text and "1 problems" in text
    (finding,) = run_json("verify", str(built.folder), code=EXIT_DAMAGE)["findings"]
    assert finding["object"] == name and finding["sample_count"] == 3


@pytest.mark.parametrize("verb", ["status", "failures", "verify", "show"])
def test_errors_are_one_line(verb: str, tmp_path: Path) -> None:
    line = error_line(verb, str(tmp_path / "absent"), code=EXIT_FAILED)
    assert line.startswith("rayhs: ") and line.endswith("no dataset here (dataset.json is missing); check the address")
    assert error_line(verb, "gopher://x", code=EXIT_USAGE).startswith("rayhs: gopher://")
    (tmp_path / "dataset.json").write_text("{")
    if verb != "verify":
        assert error_line(verb, str(tmp_path), code=EXIT_FAILED).startswith("rayhs: dataset.json: ")
    else:
        assert "dataset.json: " in run(verb, str(tmp_path), code=EXIT_DAMAGE)


def test_run_files_that_are_wrong(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    assert "give the path of a run file" in error_line("extract", str(path), code=EXIT_USAGE)
    path.write_text("model: fake/4x8\nprompts: p.jsonl\noutput: out\nengin: {}\n")
    assert "unknown key 'engin'; did you mean 'engine'?" in error_line("plan", str(path), code=EXIT_USAGE)
    path.write_text("model: fake/4x8\nprompts: p.jsonl\noutput: out\n")
    line = error_line("extract", str(path), "--set", "shards.format=csv", code=EXIT_USAGE)
    assert "shards.format" in line


def test_wrong_usage_exits_with_2() -> None:
    for arguments in (["verify"], ["nonsense"], ["status", "x", "--nonsense"], ["verify", "x", "--samples", "0"]):
        done = rayhs(*arguments)
        assert done.returncode == EXIT_USAGE and done.stdout == "" and "Traceback" not in done.stderr


def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    plain, debug = rayhs("status", str(tmp_path)), rayhs("status", str(tmp_path), RAYHS_LOG="DEBUG")
    assert plain.returncode == EXIT_FAILED and len(plain.stderr.splitlines()) == 1
    assert debug.returncode == EXIT_FAILED and "Traceback" in debug.stderr


@pytest.mark.parametrize(
    ("command", "told"), [("extract", "interrupted; run the same command again to go on"), ("bench", "interrupted")]
)
def test_interrupted(tmp_path: Path, command: str, told: str) -> None:
    pipe = tmp_path / "run.yaml"
    os.mkfifo(pipe)
    line = [sys.executable, "-m", "rayhs", command, str(pipe)]
    process = subprocess.Popen(line, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": "."})
    with pipe.open("w"):  # opens once the command has opened it to read
        time.sleep(1)  # Python misses a signal that comes just before a call that blocks
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=90)
    assert process.returncode == EXIT_INTERRUPTED
    assert errors == f"rayhs: {told}\n"


def test_version() -> None:
    assert run("--version") == f"rayhs {__version__}\n"


IMPORTS = """
import sys, atexit
heavy = ("ray", "vllm", "torch", "transformers", "pandas", "datasets", "obstore", "botocore", "s3fs")
atexit.register(lambda: print("heavy:", [name for name in heavy if name in sys.modules], file=sys.stderr))
from rayhs.cli import main
main()
"""


@pytest.mark.parametrize(
    "arguments", [["--help"], ["extract", "--help"], ["status"], ["failures"], ["verify"], ["inspect"]]
)
def test_help_and_reading_import_nothing_heavy(built: Builder, arguments: list[str]) -> None:
    uri = [] if "--help" in arguments else [str(built.folder)]
    env = {**os.environ, "PYTHONPATH": "."}
    command = [sys.executable, "-c", IMPORTS, *arguments, *uri]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=env)
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("heavy:")]
    # pyarrow imports pandas by itself where it converts values.
    assert line in (("heavy: []",) if not uri else ("heavy: []", "heavy: ['pandas']")), line


APART = """
import os, subprocess, sys
from rayhs.cli.output import print_json, results_apart
with results_apart() as out:
    print("chatter of a library")
    os.system("echo chatter of a child")
    print_json({"nan": float("nan"), "kept": [1.5]}, out)
print("after")
"""


def test_results_stay_apart_from_what_libraries_print() -> None:
    env = {**os.environ, "PYTHONPATH": "."}
    done = subprocess.run([sys.executable, "-c", APART], capture_output=True, text=True, check=True, env=env)
    document, after = done.stdout[: done.stdout.index("}") + 1], done.stdout[done.stdout.index("}") + 1 :]
    assert json.loads(document) == {"nan": None, "kept": [1.5]} and after == "\nafter\n"
    assert sorted(done.stderr.splitlines()) == ["chatter of a child", "chatter of a library"]


def test_without_a_terminal_progress_is_a_line_now_and_then(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from rayhs.cli import progress as cli_progress
    from rayhs.tally import Progress

    monkeypatch.setattr(cli_progress, "LINE_SECONDS", 0.05)
    monkeypatch.setattr(cli_progress, "BEAT_SECONDS", 0.2)
    with RunProgress() as progress:
        progress(Progress("planning", 0, None))
        for done in range(1000):
            progress(Progress("extracting", done, 1000, tokens=10 * done, bytes=2048 * done))
        time.sleep(0.5)
        progress(Progress("extracting", 1000, 1000, tokens=10000, bytes=2048000))
        progress(Progress("extracting", 1000, 1000, tokens=10000, bytes=2048000))
    captured = capsys.readouterr()
    lines = [line[line.index("]") + 2 :] for line in captured.err.splitlines()]
    assert captured.out == "" and 5 <= len(lines) < 50
    assert lines[0] == "preparing: model and prompts" and lines[1] == "planning: ..."
    assert lines[2].startswith("extracting: 0 of 1,000 shards")
    assert len(lines) - len(set(lines)) >= 1, "a beat repeats the last line"
    assert lines[-1].startswith("extracting: 1,000 of 1,000 shards, 10,000 tokens") and lines[-1].endswith("2.0 MiB")
    assert sum(line.startswith("extracting: 1,000 of") for line in lines) == 1


def test_bytes_for_people() -> None:
    assert [nbytes(n) for n in (0, 1023, 1024, 3 * 2**30, 5 * 2**50)] == [
        "0 B",
        "1023 B",
        "1.0 KiB",
        "3.0 GiB",
        "5120.0 TiB",
    ]
