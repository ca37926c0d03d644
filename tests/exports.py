"""Exports for tests, what must be read from them, and the consumers' real packages, which read them."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rayhs
from rayhs.dataset import Dataset
from rayhs.export import ExportReport, export_dataset
from rayhs.fp8 import dequantize
from rayhs.reading.sample import Sample
from tests.builders import HIDDEN, LAYERS, Builder, Row

ROOT = Path(__file__).parents[1]
CONTEXT = 4
SAE_LAYER = 4
OPTIONS: dict[str, dict[str, Any]] = {
    "speculators": {},
    "vllm": {},
    "sae-lens": {"layer": SAE_LAYER, "context_size": CONTEXT, "file_bytes": 700},
    "huggingface": {"file_bytes": 2000},
    "webdataset": {"shard_bytes": 90_000},
}
Arrays = dict[str, np.ndarray]


@pytest.fixture(scope="session")
def consumers_python() -> Path:
    """The interpreter of the consumers' environment, which the scripts in tests/consumers need."""
    path = ROOT / ".venv" / "consumers" / "bin" / "python"
    if not path.exists():
        pytest.skip("the consumers' environment is not installed (make test does it, or .ci/tools/consumers)")
    return path


def consume(python: Path, tasks: Sequence[Mapping[str, Any]], folder: Path) -> list[Any]:
    """What each task of `tests/consumers/run.py` returns."""
    (folder / "tasks.json").write_text(json.dumps(tasks))
    _run_script(python, "run.py", folder, str(folder / "tasks.json"), str(folder / "results.json"))
    results: list[Any] = json.loads((folder / "results.json").read_text())
    return results


def speculators_train(python: Path, export: Path, model: str, folder: Path, *options: str) -> list[dict[str, Any]]:
    """What the real `speculators train` says of its steps; checkpoints are in ``folder/checkpoints``.

    A draft for EAGLE-3 with the export's layers and vocabulary maps.
    """
    manifest = json.loads((export / "rayhs-export.json").read_text())
    arguments = ["--speculator-type", "eagle3", "--verifier-name-or-path", model, "--data-path", str(export)]
    arguments += [*manifest["train_with"].split(), "--draft-vocab-size", str(manifest["options"]["draft_vocab_size"])]
    arguments += ["--on-missing", "raise", "--draft-attn-impl", "sdpa", "--loss-implementation", "eager"]
    arguments += ["--num-workers", "1", "--save-path", str(folder / "checkpoints"), *options]
    _run_script(python, "train_command.py", folder, str(folder / "metrics.jsonl"), "train", *arguments)
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def _run_script(python: Path, name: str, folder: Path, *arguments: str) -> None:
    environment = {
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(folder / "hf"),
        "WANDB_MODE": "disabled",
        "OMP_WAIT_POLICY": "PASSIVE",
    }
    done = subprocess.run(
        [str(python), str(ROOT / "tests" / "consumers" / name), *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr[-4000:]


def states_of(row: Row, layer: int) -> np.ndarray:
    """As a reader gets them, in float32."""
    states = dequantize(row.states[layer], row.scales[layer], "bfloat16") if row.scales else row.states[layer]
    return states.astype(np.float32)


@dataclass(frozen=True)
class Case:
    """An export to be read back; ``fault`` names what is done wrong on the way (`FAULTS`)."""

    to: str
    dtype: str = "float32"
    fault: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return "-".join([self.to, self.dtype, self.fault or "right", *map(str, self.options)]).replace(" ", "_")

    @property
    def all_options(self) -> dict[str, Any]:
        return {**OPTIONS[self.to], **self.options}

    def task(self, folder: Path, report: ExportReport) -> dict[str, Any]:
        """The task that reads it, by the names that the consumer is told, not by those that were written."""
        task = {"reader": f"reading:{self.to.replace('-', '_')}", "folder": str(folder), "out": f"{folder}.npz"}
        if self.to == "sae-lens":
            hook = f"blocks.{self.all_options['layer'] - 1}.hook_resid_post"
            task |= {"hook": hook, "context": CONTEXT, "hidden": HIDDEN}
        return task | ({"urls": report.notes["urls"]} if self.to == "webdataset" else {})

    def expected(self, built: Builder) -> Arrays:
        """What the consumer must read."""
        rows = built.good()
        if self.to == "sae-lens":
            return _expected_of_sae(rows, self.all_options)
        found: Arrays = {"sample_ids": np.asarray([r.sample_id for r in rows])} if self.to == "vllm" else {}
        for i, row in enumerate(rows):
            found |= {f"{i}/{name}": value for name, value in _expected_of(self.to, row).items()}
        return found


def _expected_of(to: str, row: Row) -> Arrays:
    states = [states_of(row, k) for k in LAYERS]
    if to == "speculators":
        below = np.concatenate(states[:-1], axis=1)
        return {"ids": row.token_ids, "mask": row.loss_mask, "below": below, "last": states[-1]}
    if to == "vllm":
        return {"ids": row.token_ids, "states": np.stack(states, axis=1)}
    found = {"token_ids": row.token_ids, "loss_mask": row.loss_mask, "index": np.asarray(row.index)}
    found |= {f"hidden_states.{k}": states_of(row, k) for k in LAYERS} | {"sample_id": np.asarray(row.sample_id)}
    return found | ({"tokens": np.asarray(len(row.token_ids))} if to == "webdataset" else {})


def _expected_of_sae(rows: Sequence[Row], options: Mapping[str, Any]) -> Arrays:
    states, ids = [], []
    for row in rows:
        kept = np.flatnonzero(row.loss_mask) if options.get("only_loss") else np.arange(len(row.token_ids))
        if not options.get("pack", True):
            kept = kept[: len(kept) // CONTEXT * CONTEXT]
        states.append(states_of(row, options["layer"])[kept])
        ids.append(row.token_ids[kept])
    whole = sum(map(len, ids)) // CONTEXT * CONTEXT
    return {"states": np.concatenate(states)[:whole], "ids": np.concatenate(ids)[:whole]}


def differences(read: Mapping[str, np.ndarray], expected: Arrays) -> list[str]:
    """The names of what is not as it must be: missing, too much, of another shape or other values."""
    found = sorted(set(read) ^ set(expected))
    for name in set(read) & set(expected):
        if read[name].shape != expected[name].shape or not np.array_equal(read[name], expected[name]):
            found.append(name)
    return found


def load(path: str) -> Arrays:
    with np.load(path) as file:
        return {name.replace("|", "/"): file[name] for name in file.files}


def _moved(sample: Sample, order: Sequence[int]) -> Sample:
    return replace(
        sample, hidden_states={k: sample.hidden_states[LAYERS[i]] for k, i in zip(LAYERS, order, strict=True)}
    )


FAULTS = {
    "layers off by one": lambda sample: _moved(sample, (1, 2, 0)),
    "layers reversed": lambda sample: _moved(sample, (2, 1, 0)),
    "mask shifted": lambda sample: replace(sample, loss_mask=np.roll(sample.loss_mask, 1)),
    "states shifted": lambda sample: replace(
        sample, hidden_states={k: np.roll(states, 1, axis=0) for k, states in sample.hidden_states.items()}
    ),
}
HOOK_FAULT = "hook off by one"


def break_conversion(fault: str, uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every sample that an exporter gets is wrong, whatever layers it asks for; or the name that it gives them."""
    if fault == HOOK_FAULT:
        monkeypatch.setattr("rayhs.export.sae_lens.hook_name", "blocks.{}.hook_resid_post".format)
        return
    wrong = {sample.index: FAULTS[fault](sample) for sample in rayhs.open(uri)}

    def sample(self: Dataset, row: Mapping[str, Any], stored: object) -> Sample:
        one = wrong[row["index"]]
        return replace(one, hidden_states={k: one.hidden_states[k] for k in self.layers})

    monkeypatch.setattr(Dataset, "_sample", sample)


def export_case(case: Case, built: Builder, folder: Path) -> ExportReport:
    with pytest.MonkeyPatch.context() as monkeypatch:
        if case.fault:
            break_conversion(case.fault, str(built.folder), monkeypatch)
        return export_dataset(rayhs.open(str(built.folder)), case.to, str(folder), options=case.all_options)
