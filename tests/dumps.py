"""Dumps as speculators and vLLM leave them, of the fake engine's states, and `rayhs import` of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pyarrow as pa
from typer.testing import CliRunner

import rayhs
from rayhs.cli import app
from rayhs.codec import Array
from rayhs.dataset import Dataset
from rayhs.export.convert import safetensors_bytes
from rayhs.fake import fake_states
from rayhs.verify import verify

MODEL, NUM_LAYERS, HIDDEN = "fake/4x8", 4, 8
LAYERS = (1, 3, 4)


def prompts_of(count: int, seed: int = 0, longest: int = 12) -> list[list[int]]:
    """Prompts of two tokens or more whose ids differ, so that their states are not constant."""
    rng = np.random.default_rng(seed)
    return [rng.choice(600, rng.integers(2, longest + 1), replace=False).tolist() for _ in range(count)]


def stacked(prompt: Sequence[int], layers: Sequence[int] = LAYERS, dtype: str = "float32") -> Array:
    """States `[tokens, layers, hidden]`."""
    return np.stack([fake_states(prompt, k, HIDDEN, dtype) for k in layers], axis=1)


def state_file(prompt: Sequence[int], dtype: str = "float32", **changed: Array) -> bytes:
    """A file of vLLM's connector; ``changed`` replaces tensors or adds some."""
    tensors = {"hidden_states": stacked(prompt, dtype=dtype), "token_ids": np.asarray(prompt, np.int64)}
    return safetensors_bytes(tensors | changed)


def fp8_file(prompt: Sequence[int]) -> bytes:
    """As speculators' fp8 connector: one scale a token over all layers."""
    states = stacked(prompt)
    scales = (np.abs(states).max(axis=(1, 2), keepdims=True) / np.float32(448)).astype(np.float32)
    quantized = (states / scales).astype(ml_dtypes.float8_e4m3fn)
    return state_file(prompt, hidden_states=quantized, hidden_states_scales=scales)


def write_vllm(folder: Path, prompts: Sequence[Sequence[int]], dtype: str = "float32") -> Path:
    """``req-<i>.safetensors`` for each prompt."""
    folder.mkdir(parents=True)
    for i, prompt in enumerate(prompts):
        (folder / f"req-{i:05d}.safetensors").write_bytes(state_file(prompt, dtype))
    return folder


def masks_of(prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    return [[(i + j) % 2 for j in range(len(prompt))] for i, prompt in enumerate(prompts)]


def write_speculators(
    folder: Path, prompts: Sequence[Sequence[int]], dtype: str = "float32", tables: int = 2, **columns: Any
) -> Path:
    """A ``save_to_disk`` folder of several Arrow files, and the states of each row."""
    (folder / "hidden_states").mkdir(parents=True)
    rows = {
        "input_ids": pa.array(prompts, pa.list_(pa.int64())),
        "loss_mask": pa.array(masks_of(prompts), pa.list_(pa.int64())),
        "seq_len": pa.array([len(prompt) for prompt in prompts]),
        **columns,
    }
    table = pa.table({name: column for name, column in rows.items() if column is not None})
    names = [f"data-{i:05d}-of-{tables:05d}.arrow" for i in range(tables)]
    step = -(-len(prompts) // tables)
    for i, name in enumerate(names):
        with pa.OSFile(str(folder / name), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as stream:
            stream.write_table(table.slice(i * step, step), max_chunksize=7)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    for i, prompt in enumerate(prompts):
        (folder / "hidden_states" / f"hs_{i}.safetensors").write_bytes(state_file(prompt, dtype))
    return folder


IDS = ",".join(map(str, LAYERS))
SHARDS = "shards.target_bytes=4kB"  # some five samples
WRITERS = {"speculators": write_speculators, "vllm": write_vllm}


def run(*arguments: Any, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["import", *map(str, arguments)], prog_name="rayhs")
    assert result.exit_code == code, result.output + repr(result.exception)
    return result.stdout


def importing(kind: str, folder: Path, out: Path, *arguments: Any, code: int = 0) -> dict[str, Any]:
    told = run(folder, out, "--from", kind, "--model", MODEL, "--layers", IDS, "--json", *arguments, code=code)
    found: dict[str, Any] = json.loads(told)
    assert found["exit_code"] == code and verify(str(out)).ok
    return found


def refused(*arguments: Any) -> str:
    result = CliRunner().invoke(app, ["import", *map(str, arguments)], prog_name="rayhs")
    assert result.exit_code == 2 and result.stdout == "", result.output
    return result.stderr.strip().splitlines()[-1].removeprefix("rayhs: ")


def reasons(out: Path) -> dict[str, str]:
    rows = rayhs.open(str(out)).index.to_pylist()
    return {row["sample_id"]: row["reason"] for row in rows if row["status"] != "ok"}


def assert_imported(dataset: Dataset, prompts: list[list[int]], dtype: str = "float32", masked: bool = True) -> None:
    assert len(dataset) == len(prompts)
    for i, (prompt, mask) in enumerate(zip(prompts, masks_of(prompts), strict=True)):
        sample = dataset[i]
        assert sample.token_ids.tolist() == prompt
        assert sample.loss_mask.tolist() == (mask if masked else [1] * len(prompt))
        assert list(sample.hidden_states) == list(LAYERS)
        for layer, states in sample.hidden_states.items():
            wanted = fake_states(prompt, layer, HIDDEN, dtype)
            assert states.dtype == wanted.dtype and states.tobytes() == wanted.tobytes()
