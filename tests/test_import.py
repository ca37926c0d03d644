"""`rayhs import`: dumps of vLLM and speculators become a dataset; killed, changed and damaged on the way."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import rayhs
from rayhs.errors import ConfigError
from rayhs.export import export_dataset
from rayhs.fake import fake_states
from rayhs.fp8 import dequantize
from rayhs.importing import import_files
from rayhs.layout import DATASET
from rayhs.verify import verify
from tests.builders import Builder
from tests.dumps import (
    HIDDEN,
    IDS,
    LAYERS,
    MODEL,
    SHARDS,
    WRITERS,
    assert_imported,
    fp8_file,
    importing,
    masks_of,
    prompts_of,
    refused,
    run,
    stacked,
    state_file,
    write_speculators,
    write_vllm,
)
from tests.s3_servers import S3Server


@pytest.mark.parametrize("shard_format", ["safetensors", "parquet"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("kind", WRITERS)
def test_a_dump_becomes_a_dataset(tmp_path: Path, kind: str, dtype: str, shard_format: str) -> None:
    prompts = prompts_of(30)
    folder = WRITERS[kind](tmp_path / "dump", prompts, dtype)
    told = importing(kind, folder, tmp_path / "out", "--set", SHARDS, "--set", f"shards.format={shard_format}")
    assert (told["ok"], told["failed"], told["rejected"]) == (30, 0, 0) and told["shards"] > 2
    dataset = rayhs.open(str(tmp_path / "out"))
    assert_imported(dataset, prompts, dtype, masked=kind == "speculators")
    name = "hs_{}" if kind == "speculators" else "req-{:05d}"
    assert dataset.index["sample_id"].to_pylist() == [name.format(i) for i in range(30)]
    assert (dataset.info.dtype, dataset.info.engine_dtype) == (dtype, dtype)
    assert any("no loss mask" in note for note in told["notes"]) == (kind == "vllm")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", WRITERS)
def test_what_was_exported_comes_back(tmp_path: Path, kind: str, dtype: str) -> None:
    """The manifest of the export knows model and layers."""
    built = Builder(tmp_path / "data", model="fake/4x8", dtype=dtype).write()
    dataset = rayhs.open(str(built.folder))
    export_dataset(dataset, kind, str(tmp_path / "dump"))
    found = json.loads(run(tmp_path / "dump", tmp_path / "out", "--from", kind, "--json"))
    assert found["ok"] == 11 and verify(str(tmp_path / "out")).ok
    back = rayhs.open(str(tmp_path / "out"))
    assert back.info.layers == [0, 2, 4] and back.info.model == "fake/4x8"
    for row, sample in zip(built.good(), back, strict=True):
        assert sample.token_ids.tolist() == row.token_ids.tolist()
        assert sample.sample_id == (row.sample_id if kind == "vllm" else f"hs_{sample.index}")
        if kind == "speculators":
            assert sample.loss_mask.tolist() == row.loss_mask.tolist()
        assert all(sample.hidden_states[k].tobytes() == row.states[k].tobytes() for k in built.layers)


def test_an_export_that_lost_its_ids_is_refused(tmp_path: Path) -> None:
    """Its files alone would be samples in another order, with other ids."""
    built = Builder(tmp_path / "data", model="fake/4x8").write()
    export_dataset(rayhs.open(str(built.folder)), "vllm", str(tmp_path / "dump"))
    ids = tmp_path / "dump" / "sample_ids.jsonl"
    assert ids.is_file()
    ids.unlink()
    with pytest.raises(ConfigError, match="sample_ids.jsonl is gone"):
        import_files(str(tmp_path / "dump"), str(tmp_path / "out"), "vllm")
    assert not (tmp_path / "out").exists()


def test_files_of_the_packages_themselves(tmp_path: Path) -> None:
    import datasets
    import torch
    from safetensors.torch import save_file

    prompts = prompts_of(20)
    rows = {"input_ids": prompts, "loss_mask": masks_of(prompts), "seq_len": [len(prompt) for prompt in prompts]}
    table = datasets.Dataset.from_dict({key: column[::-1] for key, column in rows.items()})
    table = table.select(range(19, -1, -1)).with_format("torch")
    table.save_to_disk(str(tmp_path / "dump"), num_shards=3)
    (tmp_path / "dump" / "hidden_states").mkdir()
    for i, prompt in enumerate(prompts):
        tensors = {"hidden_states": torch.from_numpy(stacked(prompt)).bfloat16(), "token_ids": torch.tensor(prompt)}
        save_file(tensors, tmp_path / "dump" / "hidden_states" / f"hs_{i}.safetensors")
    importing("speculators", tmp_path / "dump", tmp_path / "out")
    assert_imported(rayhs.open(str(tmp_path / "out")), prompts, "bfloat16")


def test_other_columns_of_the_table_pass_through(tmp_path: Path) -> None:
    prompts = prompts_of(9)
    topics = [f"topic {i}" for i in range(9)]
    folder = write_speculators(tmp_path / "dump", prompts, topic=topics, loss_mask=None)
    told = importing("speculators", folder, tmp_path / "out")
    assert told["notes"] == ["the table has no loss_mask: the loss is taken to count on every token"]
    dataset = rayhs.open(str(tmp_path / "out"))
    assert_imported(dataset, prompts, masked=False)
    assert dataset[7].columns == {"topic": "topic 7"}


def test_float8_files_are_dequantised(tmp_path: Path) -> None:
    prompts = prompts_of(8)
    folder = write_speculators(tmp_path / "dump", prompts)
    for i, prompt in enumerate(prompts):
        (folder / "hidden_states" / f"hs_{i}.safetensors").write_bytes(fp8_file(prompt))
    importing("speculators", folder, tmp_path / "out")
    dataset = rayhs.open(str(tmp_path / "out"))
    assert dataset.info.dtype == "bfloat16"
    for prompt, sample in zip(prompts, dataset, strict=True):
        exact = stacked(prompt)
        scales = np.abs(exact).max(axis=(1, 2)) / np.float32(448)
        for i, layer in enumerate(LAYERS):
            q = (exact[:, i] / scales[:, None]).astype(ml_dtypes.float8_e4m3fn)
            wanted = dequantize(q, scales, "bfloat16")
            assert sample.hidden_states[layer].tobytes() == wanted.tobytes()
            off = np.linalg.norm(wanted.astype(np.float32) - exact[:, i], axis=1) / np.linalg.norm(exact[:, i], axis=1)
            assert off.max() < 0.05


@pytest.mark.parametrize("stored", ["float8_e4m3fn", "bfloat16"])
@pytest.mark.parametrize("shard_format", ["safetensors", "parquet"])
def test_states_are_stored_in_another_dtype(tmp_path: Path, stored: str, shard_format: str) -> None:
    prompts = prompts_of(8)
    folder = write_vllm(tmp_path / "dump", prompts)
    options = ("--set", f"shards.dtype={stored}", "--set", f"shards.format={shard_format}")
    told = importing("vllm", folder, tmp_path / "out", *options)
    assert set(told["errors"]) == (set(map(str, LAYERS)) if stored == "float8_e4m3fn" else set())
    dataset = rayhs.open(str(tmp_path / "out"))
    assert (dataset.info.dtype, dataset.info.engine_dtype) == (stored, "float32")
    for prompt, sample in zip(prompts, dataset, strict=True):
        for layer, states in sample.hidden_states.items():
            assert np.allclose(states.astype(np.float32), fake_states(prompt, layer, HIDDEN), rtol=0.07, atol=0.02)


def test_what_made_the_states_is_said_to_be_unknown(tmp_path: Path) -> None:
    importing("vllm", write_vllm(tmp_path / "dump", prompts_of(3)), tmp_path / "out")
    versions = rayhs.open(str(tmp_path / "out")).info.versions
    assert versions["imported_from"] == "vllm" and versions["vllm"] == versions["torch"] == "unknown"
    assert versions["rayhs"] == rayhs.__version__ and "ray" not in versions


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lengths=st.lists(st.integers(2, 30), min_size=1, max_size=40),
    kind=st.sampled_from(sorted(WRITERS)),
    target=st.integers(1, 20_000),
    rows_per_file=st.integers(1, 50),
)
def test_any_counts_and_lengths(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], kind: str, target: int, rows_per_file: int
) -> None:
    rng = np.random.default_rng(len(lengths))
    prompts = [rng.choice(600, length, replace=False).tolist() for length in lengths]
    root = tmp_path_factory.mktemp("any")
    folder = WRITERS[kind](root / "dump", prompts)
    sections = {"shards": {"target_bytes": target, "rows_per_file": rows_per_file}}
    result, _ = import_files(str(folder), str(root / "out"), kind, model=MODEL, layers=LAYERS, settings=sections)
    assert result.exit_code == 0 and verify(str(root / "out")).ok
    assert_imported(rayhs.open(str(root / "out")), prompts, masked=kind == "speculators")


COMMAND = [sys.executable, "-m", "rayhs", "import"]


@pytest.mark.parametrize("order", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize("kind", WRITERS)
def test_a_killed_import_goes_on_where_its_commits_end(tmp_path: Path, kind: str, order: signal.Signals) -> None:
    prompts, out = prompts_of(3000), tmp_path / "out"
    folder = WRITERS[kind](tmp_path / "dump", prompts)
    arguments = [str(folder), str(out), "--from", kind, "--model", MODEL, "--layers", IDS, "--set", SHARDS]
    with subprocess.Popen([*COMMAND, *arguments], stderr=subprocess.PIPE, text=True) as running:
        deadline = time.monotonic() + 60
        while not (out / "commits").is_dir() or len(list((out / "commits").glob("*.json"))) < 20:
            assert running.poll() is None and time.monotonic() < deadline
            time.sleep(0.005)
        running.send_signal(order)
        _, told = running.communicate(timeout=60)
    assert running.returncode == (-signal.SIGKILL if order == signal.SIGKILL else 130), told
    if order == signal.SIGTERM:
        assert told.strip().splitlines()[-1] == "rayhs: interrupted; run the same command again to go on"
    before = {path.name: path.read_bytes() for path in (out / "commits").glob("*.json")}
    found = importing(kind, folder, out, "--set", SHARDS)
    assert 20 <= len(before) < found["shards"] and found["ok"] == 3000
    assert {name: (out / "commits" / name).read_bytes() for name in before} == before
    assert_imported(rayhs.open(str(out)), prompts, masked=kind == "speculators")
    objects = {path.name: path.stat().st_mtime_ns for path in (out / "shards").iterdir()}
    summary = (out / "summary.json").read_bytes()
    importing(kind, folder, out, "--set", SHARDS)  # nothing is left to do
    assert (out / "summary.json").read_bytes() == summary
    assert {path.name: path.stat().st_mtime_ns for path in (out / "shards").iterdir()} == objects


@pytest.mark.parametrize("kind", WRITERS)
def test_a_change_of_the_files_is_refused(tmp_path: Path, kind: str) -> None:
    prompts = prompts_of(6)
    folder, out = WRITERS[kind](tmp_path / "dump", prompts), tmp_path / "out"
    importing(kind, folder, out)
    arguments = [folder, out, "--from", kind, "--model", MODEL, "--layers", IDS]
    file = next(folder.rglob("*_4.safetensors" if kind == "speculators" else "*004.safetensors"))
    status = file.stat()
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    advice = "Give another place, or go on with the files and settings of the one there"
    assert refused(*arguments) == (
        f"{out} holds another dataset: the files (names, sizes, times), or how they are cut, are not those it was "
        f"planned from. {advice}"
    )
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    importing(kind, folder, out)
    assert "the files (names" in refused(*arguments, "--set", SHARDS)
    assert "dtype is 'float32' there, 'bfloat16' here" in refused(*arguments, "--set", "shards.dtype=bfloat16")
    file.unlink()
    assert "the files (names" in refused(*arguments)


def test_damage_is_repaired_from_the_files(tmp_path: Path) -> None:
    prompts = prompts_of(40)
    folder, out = write_speculators(tmp_path / "dump", prompts), tmp_path / "out"
    importing("speculators", folder, out, "--set", SHARDS)
    victim = sorted((out / "shards").iterdir())[2]
    data = bytearray(victim.read_bytes())
    data[-1] ^= 1
    victim.write_bytes(data)
    (out / DATASET).write_text("{}")
    (out / "samples" / "00000.parquet").write_bytes(b"")
    others = {path.name for path in (out / "shards").iterdir()} - {victim.name}
    assert not verify(str(out)).ok
    importing("speculators", folder, out, "--set", SHARDS, "--repair")
    assert others < {path.name for path in (out / "shards").iterdir()}
    assert_imported(rayhs.open(str(out)), prompts)


def test_an_import_needs_neither_ray_nor_vllm_nor_torch(tmp_path: Path) -> None:
    folder = write_vllm(tmp_path / "dump", prompts_of(3))
    code = (
        "import sys; from rayhs.importing import import_files\n"
        f"import_files({str(folder)!r}, {str(tmp_path / 'out')!r}, 'vllm', model={MODEL!r}, layers={LAYERS})\n"
        "print([name for name in ('ray', 'vllm', 'torch') if name in sys.modules])"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout == "[]\n"


@pytest.mark.parametrize("kind", WRITERS)
def test_a_dump_of_a_real_model_stands_beside_its_reference(tmp_path: Path, kind: str) -> None:
    from tests.models import Oracle, random_prompts, save_tiny_model

    model = save_tiny_model("llama", tmp_path / "model")
    oracle, layers = Oracle(model), (2, 3, 6)
    prompts = random_prompts([5, 9, 30, 2])
    folder = WRITERS[kind](tmp_path / "dump", prompts)
    for i, prompt in enumerate(prompts):
        states = oracle.states(prompt)
        file = f"hidden_states/hs_{i}.safetensors" if kind == "speculators" else f"req-{i:05d}.safetensors"
        data = state_file(prompt, hidden_states=np.stack([states[k] for k in layers], axis=1))
        (folder / file).write_bytes(data)
    run(folder, tmp_path / "out", "--from", kind, "--model", model, "--layers", "2,3,6")
    report = verify(str(tmp_path / "out"), reference=str(model), samples=4)
    assert report.ok and report.reference is not None and max(report.reference.worst.values()) < 1e-5
    assert report.reference.limit == 5e-3  # what computed them is not known


def test_an_import_into_a_bucket(tmp_path: Path, moto_uri: str, moto_server: S3Server) -> None:
    prompts = prompts_of(20)
    folder = write_speculators(tmp_path / "dump", prompts)
    run(
        folder, moto_uri, "--from", "speculators", "--model", MODEL, "--layers", IDS, "--endpoint", moto_server.endpoint
    )
    assert verify(moto_uri).ok
    assert_imported(rayhs.open(moto_uri), prompts)
