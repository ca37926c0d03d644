"""What an export must not do in silence: trust changed files, lose which row is which, take layers nobody asked for."""

from __future__ import annotations

import json
import os
import signal
import threading
from pathlib import Path

import pytest
from typer.testing import CliRunner

import rayhs
from rayhs.cli import app
from rayhs.errors import EXIT_INTERRUPTED, ConfigError, FormatError, IdentityMismatch, RayhsError
from rayhs.export import ExportReport, export_dataset
from rayhs.export.options import parse_options
from rayhs.export.target import MANIFEST
from rayhs.importing import import_files
from rayhs.store.local import LocalFolderStore
from tests.builders import Builder
from tests.exports import OPTIONS
from tests.test_export import each, export, files

ROW_NAMED = ("vllm", "speculators")


@pytest.fixture
def built(tmp_path: Path) -> Builder:
    return Builder(tmp_path / "data").write()


@each
@pytest.mark.parametrize("change", ["truncated", "deleted", "added"])
def test_files_that_changed_after_the_export_are_not_called_complete(
    built: Builder, tmp_path: Path, to: str, change: str
) -> None:
    export(built, to, tmp_path / "out")
    victim = max(files(tmp_path / "out").values(), key=lambda path: path.stat().st_size)
    if change == "truncated":
        victim.write_bytes(victim.read_bytes()[:-1])
    elif change == "deleted":
        victim.unlink()
    else:
        victim.with_name("another").write_bytes(b"x")
    with pytest.raises(FormatError, match="delete the folder and export again"):
        export(built, to, tmp_path / "out")


@each
def test_what_killed_exports_left_is_removed_at_the_end(built: Builder, tmp_path: Path, to: str) -> None:
    left = tmp_path / "out" / ".partial-0123456789abcdef"
    left.parent.mkdir()
    left.write_bytes(b"half a file")
    export(built, to, tmp_path / "out")
    assert not left.exists()


@pytest.mark.parametrize("to", ROW_NAMED)
def test_ids_with_line_breaks_name_their_own_rows(tmp_path: Path, to: str, monkeypatch: pytest.MonkeyPatch) -> None:
    odd = {0: "a\nb", 1: "", 2: "c\r\n", 3: '"quoted" \\n', 5: "\u2028"}
    monkeypatch.setattr("tests.builders.Row.sample_id", property(lambda row: odd.get(row.index) or f"row-{row.index}"))
    built = Builder(tmp_path / "data").write()
    export(built, to, tmp_path / "out")
    lines = (tmp_path / "out" / "sample_ids.jsonl").read_bytes().split(b"\n")[:-1]
    assert [json.loads(line) for line in lines] == [row.sample_id for row in built.good()]


def test_an_export_imported_again_has_its_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.builders.Row.sample_id", property(lambda row: f"line\n{row.index}"))
    built = Builder(tmp_path / "data", model="fake/4x8").write()
    export(built, "vllm", tmp_path / "out")
    result, _ = import_files(tmp_path / "out", str(tmp_path / "again"), "vllm")
    again = rayhs.open(result.uri)
    assert [sample.sample_id for sample in again] == [row.sample_id for row in built.good()]


def test_two_exports_that_begin_at_once_are_not_mixed(built: Builder, tmp_path: Path) -> None:
    """Each sees an empty folder; the first to write its manifest has it."""
    barrier, right = threading.Barrier(2), LocalFolderStore.put_new
    outcomes: list[ExportReport | RayhsError] = []

    def put_new(self: LocalFolderStore, name: str, data: bytes) -> bool:
        barrier.wait(10)
        return right(self, name, data)

    def run(file_bytes: int) -> None:
        try:
            outcomes.append(export(built, "huggingface", tmp_path / "out", file_bytes=file_bytes))
        except RayhsError as error:
            outcomes.append(error)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(LocalFolderStore, "put_new", put_new)
        threads = [threading.Thread(target=run, args=(size,)) for size in (2000, 4000)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(type(one).__name__ for one in outcomes) == ["ExportReport", "IdentityMismatch"]
    assert any(isinstance(one, IdentityMismatch) for one in outcomes)


@each
def test_only_the_layers_the_dataset_was_opened_with(built: Builder, tmp_path: Path, to: str) -> None:
    last = built.layers[-1]
    some = rayhs.open(str(built.folder)).with_layers([built.layers[0], last])
    options = {**OPTIONS[to], **({"layer": last} if to == "sae-lens" else {})}
    export_dataset(some, to, str(tmp_path / "out"), options=options)
    manifest = json.loads((tmp_path / "out" / MANIFEST).read_text())
    assert manifest["layers"] == [built.layers[0], last]
    assert set(manifest.get("layer_ids", [])) <= {built.layers[0], last}


def test_without_the_last_layer_what_needs_it_is_refused(built: Builder, tmp_path: Path) -> None:
    dataset = rayhs.open(str(built.folder))
    with pytest.raises(ConfigError, match="needs layer 4"):
        export_dataset(dataset.with_layers([0, 2]), "speculators", str(tmp_path / "out"))
    with pytest.raises(ConfigError, match="without states"):
        export_dataset(dataset.tokens_only(), "vllm", str(tmp_path / "out"))


@pytest.mark.parametrize(("value", "layers"), [("2,15", (2, 15)), (2, (2,)), ("2", (2,)), ([2, 15], (2, 15))])
def test_layers_as_people_write_them(value: object, layers: tuple[int, ...]) -> None:
    from rayhs.export.speculators import Options

    assert parse_options(Options, {"layers": value}, "speculators").layers == layers


def test_sigterm_is_told_as_an_interruption(built: Builder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def put(self: LocalFolderStore, name: str, data: bytes) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(LocalFolderStore, "put", put)
    done = CliRunner().invoke(app, ["export", str(built.folder), str(tmp_path / "out"), "--to", "vllm"])
    assert done.exit_code == EXIT_INTERRUPTED and "run the same command again to go on" in done.stderr
