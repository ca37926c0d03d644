"""`rayhs import` of dumps in which something is wrong: with single files, with the whole, with how it is called."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import rayhs
from rayhs.cli import app
from rayhs.codec import STATE_DTYPES
from rayhs.errors import SampleError, StoreError
from rayhs.export import export_dataset
from rayhs.importing.state_file import read_states
from rayhs.store import open_store
from tests.builders import Builder
from tests.dumps import (
    IDS,
    MODEL,
    SHARDS,
    WRITERS,
    assert_imported,
    fp8_file,
    importing,
    prompts_of,
    reasons,
    refused,
    stacked,
    state_file,
    write_speculators,
    write_vllm,
)


def test_folders_in_folders_and_links(tmp_path: Path) -> None:
    prompts = prompts_of(6)
    folder = write_vllm(tmp_path / "dump", prompts)
    (folder / "b").mkdir()
    (folder / "req-00003.safetensors").rename(folder / "b" / "x.safetensors")
    (folder / ".hidden.safetensors").write_bytes(b"")
    (tmp_path / "elsewhere").mkdir()
    (folder / "req-00004.safetensors").rename(tmp_path / "elsewhere" / "y.safetensors")
    (folder / "a").symlink_to(tmp_path / "elsewhere")
    (folder / "gone.safetensors").symlink_to("nowhere")
    importing("vllm", folder, tmp_path / "out", code=3)
    index = rayhs.open(str(tmp_path / "out")).index
    assert index["sample_id"].to_pylist() == ["gone", "req-00000", "req-00001", "req-00002", "req-00005", "a/y", "b/x"]
    assert reasons(tmp_path / "out") == {"gone": "no file: gone.safetensors does not exist"}
    (folder / "b" / "loop").symlink_to(folder)
    assert "b/loop: a link to a folder that it lies in; remove it" in refused(
        folder, tmp_path / "other", "--from", "vllm", "--model", MODEL, "--layers", IDS
    )


def damaged(prompts: list[list[int]]) -> dict[int, tuple[bytes | None, str]]:
    """What to write in the place of a file, and what must be said of it."""
    good = [state_file(prompt) for prompt in prompts]
    states = [stacked(prompt) for prompt in prompts]
    states[4][1, 2, 3] = np.nan
    states[5][:] = 0
    states[6][:, 1] = states[6][0, 1]
    states[8] = states[8][:, :2]
    return {
        0: (good[0][:-5], "damaged file: safetensors tensors end at byte"),
        1: (good[1][:7], "damaged file: not a safetensors file: shorter than its length prefix"),
        2: (b"", "damaged file: not a safetensors file"),
        3: (
            good[3].replace(b"token_ids", b"other_ids"),
            "wrong tensors: no token_ids; there are hidden_states, other_ids",
        ),
        4: (state_file(prompts[4], hidden_states=states[4]), "not finite: layer 4 has NaN"),
        5: (state_file(prompts[5], hidden_states=states[5]), "all zero: layer 1"),
        6: (state_file(prompts[6], hidden_states=states[6]), "constant: layer 3 has the same state for every token"),
        8: (state_file(prompts[8], hidden_states=states[8]), "wrong states: 2 layers of 8, not 3 of 8"),
        9: (state_file(prompts[9], "bfloat16"), "wrong states: they are bfloat16, those of the other files float32"),
        10: (
            state_file(prompts[10], hidden_states=states[10].astype(STATE_DTYPES["float8_e4m3fn"])),
            "wrong tensors: f",
        ),
        11: (state_file(prompts[11], token_ids=np.arange(99)), "wrong tensors: token_ids is int64 [99] for"),
        12: (state_file(prompts[12], hidden_states=states[12][:, 0]), "wrong tensors: hidden_states is float32 ["),
        13: (b"\xff" * 9, "damaged file: not a safetensors file: a header of"),
    }


@pytest.mark.parametrize("kind", WRITERS)
def test_a_damaged_file_is_a_failed_sample_with_a_reason(tmp_path: Path, kind: str) -> None:
    prompts = prompts_of(20)
    folder = WRITERS[kind](tmp_path / "dump", [prompts[7], *prompts])  # the first file says what all are
    name = "hidden_states/hs_{}.safetensors" if kind == "speculators" else "req-{:05d}.safetensors"
    expected = damaged(prompts)
    for i, (data, _) in expected.items():
        (folder / name.format(i + 1)).write_bytes(data or b"")
    told = importing(kind, folder, tmp_path / "out", "--set", SHARDS, code=3)
    assert (told["ok"], told["failed"]) == (21 - len(expected), len(expected))
    found = reasons(tmp_path / "out")
    names = "hs_{}" if kind == "speculators" else "req-{:05d}"
    assert sorted(found) == sorted(names.format(i + 1) for i in expected)
    for i, (_, reason) in expected.items():
        assert found[names.format(i + 1)].startswith(reason), found
    dataset = rayhs.open(str(tmp_path / "out"))
    kept = [i for i in range(20) if i not in expected]
    for i in kept:
        assert dataset.by_id(names.format(i + 1)).token_ids.tolist() == prompts[i]


def test_rows_of_speculators_without_their_file_or_of_other_tokens(tmp_path: Path) -> None:
    prompts = prompts_of(12)
    folder = write_speculators(tmp_path / "dump", [*prompts, [], [5000, 1]])
    files = folder / "hidden_states"
    (files / "hs_3.safetensors").unlink()
    (files / "hs_4.safetensors").write_bytes(state_file(prompts[5]))
    (files / "hs_6.safetensors").unlink()
    (files / "hs_6.safetensors").mkdir()
    (files / "hs_99.safetensors").write_bytes(state_file(prompts[0]))
    told = importing("speculators", folder, tmp_path / "out", code=3)
    assert (told["ok"], told["failed"], told["rejected"]) == (9, 3, 2)
    assert told["notes"] == ["1 files in hidden_states have no row in the table and are left out"]
    found = reasons(tmp_path / "out")
    assert found["hs_3"] == "no file: hs_3.safetensors does not exist"
    assert found["hs_4"].startswith("other tokens: the file has")
    assert found["hs_6"] == "unreadable file: not a regular file"
    assert found["hs_12"].startswith("no tokens")
    assert found["hs_13"] == "token outside vocabulary: 5000, the model has 0..1023"


def test_files_that_vllm_is_writing_or_never_wrote(tmp_path: Path) -> None:
    """A lock that nobody holds is what vLLM leaves behind of every request."""
    prompts = prompts_of(5)
    folder = write_vllm(tmp_path / "dump", prompts)
    (folder / "req-00000.safetensors.lock").touch()
    (folder / "req-00009.safetensors.lock").touch()
    os.mkfifo(folder / "req-00010.safetensors")
    with open(folder / "req-00002.safetensors.lock", "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        importing("vllm", folder, tmp_path / "out", code=3)
    assert reasons(tmp_path / "out") == {
        "req-00002": "being written: its .lock file is held by a writer",
        "req-00009": "never written: there is its .lock file alone",
        "req-00010": "unreadable file: not a regular file",
    }


def test_files_changed_after_planning_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = prompts_of(6)
    folder = write_vllm(tmp_path / "dump", prompts)
    (folder / "req-00002.safetensors").write_bytes(b"")
    begin = rayhs.importing.ImportRun.pack_missing

    def change(run: Any, dataset: Any) -> Any:
        (folder / "req-00002.safetensors").write_bytes(state_file(prompts[2]))
        (folder / "req-00003.safetensors").write_bytes(state_file(prompts[2]))
        (folder / "req-00004.safetensors").unlink()
        return begin(run, dataset)

    monkeypatch.setattr("rayhs.importing.ImportRun.pack_missing", change)
    importing("vllm", folder, tmp_path / "out", code=3)
    found = reasons(tmp_path / "out")
    assert found["req-00002"].startswith("other tokens") and found["req-00003"].startswith("other tokens")
    assert found["req-00004"].startswith("no file")


def test_a_folder_that_goes_away_fails_no_sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = prompts_of(30)
    folder, out = write_speculators(tmp_path / "dump", prompts), tmp_path / "out"
    begin = rayhs.importing.ImportRun.pack_missing

    def unmount(run: Any, dataset: Any) -> Any:
        (folder / "hidden_states").rename(tmp_path / "away")
        return begin(run, dataset)

    with monkeypatch.context() as patched:
        patched.setattr("rayhs.importing.ImportRun.pack_missing", unmount)
        arguments = [folder, out, "--from", "speculators", "--model", MODEL, "--layers", IDS, "--set", SHARDS]
        assert "gone while it was read" in refused(*arguments)
    assert not (out / "commits").exists()
    (tmp_path / "away").rename(folder / "hidden_states")
    importing("speculators", folder, out, "--set", SHARDS)
    assert_imported(rayhs.open(str(out)), prompts)


def test_a_host_that_can_not_read_now_fails_no_sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_vllm(tmp_path / "dump", prompts_of(6))
    opened = os.open

    def open_few(path: Any, *arguments: Any, **named: Any) -> int:
        if str(path).endswith("req-00003.safetensors"):
            raise OSError(24, "Too many open files")
        return opened(path, *arguments, **named)

    monkeypatch.setattr(os, "open", open_few)
    arguments = [folder, tmp_path / "out", "--from", "vllm", "--model", MODEL, "--layers", IDS]
    assert "Too many open files; run the same command again to go on" in refused(*arguments)


@pytest.mark.parametrize("kind", WRITERS)
def test_wrong_use_is_one_line(tmp_path: Path, kind: str) -> None:
    folder = WRITERS[kind](tmp_path / "dump", prompts_of(4))
    out, source = tmp_path / "out", ("--from", kind)
    model, layers = ("--model", MODEL), ("--layers", IDS)

    def told(*arguments: Any, place: Path = out, of: Path = folder) -> str:
        return refused(of, place, *arguments)

    assert "name it with --model" in told(*source, *layers)
    assert "name all, ascending (--layers 2,15,27,30)" in told(*source, *model)
    assert "states of 3 layers, --layers names 2 (3,4); name those in the files" in told(
        *source, *model, "--layers", "3,4"
    )
    for layers_named in ("4,3,1", "1,1,3,4", "-1,1,3"):
        assert "files have them ascending, each once; give [1, 3, 4]" in told(*source, *model, "--layers", layers_named)
    assert "layers: id 9 is outside 0..4" in told(*source, *model, "--layers", "1,3,9")
    assert "unknown preset 'some'" in told(*source, *model, "--layers", "some")
    assert "states of hidden size 8, fake/4x9 has 9" in told(*source, *layers, "--model", "fake/4x9")
    assert "fake/x is not fake/<layers>x<hidden>" in told(*source, *layers, "--model", "fake/x")
    assert f"model {tmp_path}: the folder has no config.json" in told(*source, *layers, "--model", tmp_path)
    assert "--from other: no such kind of dump; there are speculators, vllm" in told("--from", "other", *model, *layers)
    assert "an import takes shards.*" in told(*source, *model, *layers, "--set", "engine.dtype=float32")
    assert "an import takes shards.*" in told(*source, *model, *layers, "--set", "engine=3")
    assert "did you mean 'format'?" in told(*source, *model, *layers, "--set", "shards.formt=parquet")
    assert "give a place outside of it" in told(*source, *model, *layers, place=folder / "out")
    assert "only a local folder is read" in refused("s3://bucket/dump", out, *source, *model, *layers)
    missing = "no state.json" if kind == "speculators" else "no such folder"
    assert missing in told(*source, *model, *layers, of=tmp_path / "none")
    assert not out.exists()


def test_dumps_that_are_none(tmp_path: Path) -> None:
    model = ("--model", MODEL, "--layers", IDS)
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "can be read (there is none); is it a dump of vllm?" in refused(
        empty, tmp_path / "out", "--from", "vllm", *model
    )
    assert "no state.json" in refused(empty, tmp_path / "out", "--from", "speculators", *model)
    (empty / "a.safetensors").write_bytes(b"")
    assert "can be read (damaged file:" in refused(empty, tmp_path / "out", "--from", "vllm", *model)
    folder = write_speculators(tmp_path / "dump", prompts_of(4))
    told = refused(folder, tmp_path / "out", "--from", "speculators", "--model", "fake/5x8", "--layers", IDS)
    assert told.startswith("--layers 1,3,4: the last state of a dump of speculators is the one after all 5 layers")
    table = folder / "data-00001-of-00002.arrow"
    table.write_bytes(table.read_bytes()[:-300])
    assert "not a whole Arrow stream" in refused(folder, tmp_path / "out", "--from", "speculators", *model)
    (folder / "dataset_dict.json").write_text("{}")
    assert "holds several splits" in refused(folder, tmp_path / "out", "--from", "speculators", *model)


def test_an_export_that_is_not_what_it_says(tmp_path: Path) -> None:
    built = Builder(tmp_path / "data", model="fake/4x8").write()
    export_dataset(rayhs.open(str(built.folder)), "vllm", str(tmp_path / "dump"))
    folder, out = tmp_path / "dump", tmp_path / "out"
    assert "holds an export for vllm, not speculators; say so with --from" in refused(
        folder, out, "--from", "speculators"
    )
    assert "says 0,2,4; leave it out" in refused(folder, out, "--from", "vllm", "--layers", "0,1,4")
    (folder / "11.safetensors").write_bytes(b"")
    assert "11.safetensors: sample_ids.jsonl beside it has 11 lines" in refused(folder, out, "--from", "vllm")
    (folder / "11.safetensors").unlink()
    manifest = json.loads((folder / "rayhs-export.json").read_text())
    (folder / "rayhs-export.json").write_text(json.dumps({**manifest, "complete": False}))
    assert "an export that is not complete" in refused(folder, out, "--from", "vllm")


def test_a_store_that_refuses_ends_the_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, out = write_vllm(tmp_path / "dump", prompts_of(40)), tmp_path / "out"
    arguments = [folder, out, "--from", "vllm", "--model", MODEL, "--layers", IDS, "--set", SHARDS]

    def full(*_: Any) -> None:
        raise StoreError("no space left")

    with monkeypatch.context() as patched:
        patched.setattr("rayhs.importing.packing.write_shard", full)
        result = CliRunner().invoke(app, ["import", *map(str, arguments)])
    assert result.exit_code == 1 and "no space left; 3 shards in a row could not be stored" in result.stderr
    assert not (out / "commits").exists() and list(open_store(str(out)).list("index")) == []
    importing("vllm", folder, out, "--set", SHARDS)


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    cut=st.integers(0, 900),
    flips=st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), max_size=3),
)
def test_a_file_of_any_bytes_is_read_or_has_a_reason(tmp_path: Path, cut: int, flips: list[tuple[int, int]]) -> None:
    data = bytearray(fp8_file([1, 2, 3]))
    for place, value in flips:
        data[place % len(data)] = value
    (tmp_path / "one").write_bytes(data[: max(len(data) - cut, 0)])
    with contextlib.suppress(SampleError):
        header, token_ids, states, scales = read_states(str(tmp_path / "one"))
        assert len(token_ids) == len(states) and (scales is None or len(scales) == len(states))
        assert states.shape == header.states.shape
