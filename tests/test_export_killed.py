"""`rayhs export` killed while it writes a file: the same command does the rest, as if nothing had been."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rayhs.cli import app
from rayhs.export.target import MANIFEST
from rayhs.store.base import PARTIAL
from tests.builders import Builder
from tests.exports import OPTIONS
from tests.test_export import contents, files

KINDS = ("vllm", "huggingface", "webdataset")
# A child each, as most of a command's time goes into imports. Told: how many files are to be there, and the command.
KILLED = """
import json, os, signal, sys
import rayhs.cli.exporting, rayhs.dataset, rayhs.export
from rayhs.store import local

replace, write_all, published = os.replace, local._write_all, []

def publish(partial, path):
    replace(partial, path)
    published.append(path)

def write(file, view, path):
    if len(published) >= deadly:
        write_all(file, view[: view.nbytes // 2], path)
        os.kill(os.getpid(), signal.SIGKILL)
    write_all(file, view, path)

os.replace, local._write_all = publish, write
statuses = []
if rayhs.export.about(sys.argv[1]).needs == "torch":
    import torch
for deadly, arguments in json.loads(sys.argv[2]):
    child = os.fork()
    if not child:
        sys.argv[1:] = arguments
        rayhs.cli.main()
    statuses.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
print(json.dumps(statuses))
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Builder:
    return Builder(tmp_path_factory.mktemp("data")).write()


def command(built: Builder, to: str, out: Path) -> list[str]:
    settings = [word for key, value in OPTIONS[to].items() for word in ("--set", f"{key}={value}")]
    return ["export", str(built.folder), str(out), "--to", to, *settings]


def exported(built: Builder, to: str, out: Path) -> dict[str, Any]:
    """The manifest of a command that ends well."""
    done = CliRunner().invoke(app, command(built, to, out))
    assert done.exit_code == 0, done.stderr
    manifest: dict[str, Any] = json.loads((out / MANIFEST).read_text())
    del manifest["exported"]
    return manifest


@pytest.mark.parametrize("to", KINDS)
def test_a_killed_export_goes_on(built: Builder, tmp_path: Path, to: str) -> None:
    """Killed in the midst of a file: behind the first, behind half of them, and of the manifest, behind all."""
    want = exported(built, to, tmp_path / "whole")
    whole, total = contents(tmp_path / "whole"), want["files"]
    places = {1: tmp_path / "first", total // 2: tmp_path / "half", total: tmp_path / "all"}
    commands = [(there, command(built, to, out)) for there, out in places.items()]
    told = subprocess.run(
        [sys.executable, "-c", KILLED, to, json.dumps(commands)], capture_output=True, text=True, check=False
    )
    assert told.returncode == 0 and json.loads(told.stdout) == [-signal.SIGKILL] * 3, told
    for there, out in places.items():
        assert not json.loads((out / MANIFEST).read_text())["complete"]
        begun = {name: path for name, path in files(out).items() if not path.name.startswith(PARTIAL)}
        assert there <= len(begun) < len(files(out)) and (len(begun) < total or there == total)
        before = {path: path.stat().st_mtime_ns for path in begun.values()}
        assert exported(built, to, out) == want and contents(out) == whole
        assert {path: path.stat().st_mtime_ns for path in before} == before
