"""Exports read back, and trained on, by the consumers' real packages (.venv/consumers)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rayhs
from rayhs.errors import ConfigError
from rayhs.export import export_dataset
from tests.builders import Builder
from tests.exports import (
    FAULTS,
    HOOK_FAULT,
    OPTIONS,
    Arrays,
    Case,
    consume,
    differences,
    export_case,
    load,
    speculators_train,
)

pytestmark = pytest.mark.slow

DTYPES = ("float32", "float16", "bfloat16", "float8_e4m3fn")
ROUND_TRIPS = [Case(to, dtype) for to in OPTIONS for dtype in DTYPES] + [
    Case("sae-lens", options={"pack": False}),
    Case("sae-lens", options={"only_loss": True, "layer": 2}),
    Case("sae-lens", options={"only_loss": True, "pack": False, "file_bytes": 10**6}),
    Case("huggingface", options={"file_bytes": 1}),
    Case("webdataset", options={"shard_bytes": 10**6}),
]
FAULTY = [
    Case(to, fault=fault, options={"only_loss": True} if to == "sae-lens" else {})
    for to in OPTIONS
    for fault in FAULTS
    if (to, fault) != ("vllm", "mask shifted")  # these files have no mask
] + [Case("sae-lens", fault=HOOK_FAULT)]
SAE_SETTINGS: dict[str, Any] = {"hook": "blocks.14.hook_resid_post", "context": 32, "hidden": 576}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Builder]:
    return {dtype: Builder(tmp_path_factory.mktemp(dtype), dtype=dtype).write() for dtype in DTYPES}


@pytest.fixture(scope="module")
def smollm(tmp_path_factory: pytest.TempPathFactory) -> Builder:
    """The states of SmolLM2-135M for parts of the demo's prompts, by transformers; two of twelve samples have none."""
    from transformers import AutoTokenizer

    from rayhs.demo import cache_folder, prepare_demo
    from tests.models import Oracle

    try:
        model, prompts = prepare_demo(cache_folder(), 12)
    except ConfigError as error:
        pytest.skip(str(error))
    tokenizer, oracle = AutoTokenizer.from_pretrained(model), Oracle(model)
    texts = [json.loads(line)["text"] for line in prompts.read_text().splitlines()]
    folder = tmp_path_factory.mktemp("smollm")
    built = Builder(folder, layers=(2, 15, 27, 30), hidden=576, groups=((5, 7),), model=str(model))
    for row in built.good():
        row.token_ids = np.asarray(tokenizer(texts[row.index])["input_ids"][: 200 - 12 * row.index], np.int32)
        row.loss_mask = (np.arange(len(row.token_ids)) >= 10).astype(np.uint8)
        states = oracle.states(row.token_ids.tolist())
        row.states = {k: states[k] for k in built.layers}
    return built.write()


@pytest.fixture(scope="module")
def results(
    built: dict[str, Builder], smollm: Builder, consumers_python: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """What the consumers found, by the name of the case; all in one process of theirs."""
    folder = tmp_path_factory.mktemp("exports")
    tasks = {}
    for case in ROUND_TRIPS + FAULTY:
        target = folder / str(case)
        tasks[str(case)] = case.task(target, export_case(case, built[case.dtype], target))
    dataset = rayhs.open(str(smollm.folder))
    export_dataset(dataset, "speculators", str(folder / "eagle3"), options={"draft_vocab_size": 2048})
    export_dataset(dataset, "sae-lens", str(folder / "sae"), options={"layer": 15, "context_size": 32})
    eagle3 = {"reader": "speculators_training:run", "folder": str(folder / "eagle3"), "model": smollm.model}
    tasks["eagle3"] = {**eagle3, "steps": 30}
    tasks["real speculators"] = {
        "reader": "reading:speculators",
        "folder": str(folder / "eagle3"),
        "out": f"{folder}/e",
    }
    tasks["sae"] = {
        "reader": "sae_training:run",
        "folder": str(folder / "sae"),
        "steps": 60,
        "batch": 32,
        **SAE_SETTINGS,
    }
    return dict(zip(tasks, consume(consumers_python, list(tasks.values()), folder), strict=True))


def read(results: dict[str, Any], case: Case) -> Arrays:
    found = results[str(case)]
    return {} if "refused" in found else load(found["out"])


@pytest.mark.parametrize("case", ROUND_TRIPS, ids=str)
def test_the_consumer_reads_what_is_in_the_dataset(
    results: dict[str, Any], built: dict[str, Builder], case: Case
) -> None:
    expected = case.expected(built[case.dtype])
    assert len(expected) > 1 and not differences(read(results, case), expected), results[str(case)]


@pytest.mark.parametrize("case", FAULTY, ids=str)
def test_a_faulty_conversion_is_noticed(results: dict[str, Any], built: dict[str, Builder], case: Case) -> None:
    assert ("refused" in results[str(case)]) == (case.fault == HOOK_FAULT)
    assert differences(read(results, case), case.expected(built[case.dtype]))


def test_speculators_trains_an_eagle3_draft_on_the_states_of_a_real_model(
    results: dict[str, Any], smollm: Builder
) -> None:
    found = load(results["real speculators"]["out"] + ".npz")
    for i, row in enumerate(smollm.good()):
        assert np.array_equal(found[f"{i}/last"], row.states[30]) and np.array_equal(found[f"{i}/ids"], row.token_ids)
        assert np.array_equal(found[f"{i}/below"], np.concatenate([row.states[k] for k in (2, 15, 27)], axis=1))
    losses = results["eagle3"]["losses"]
    assert len(losses) == 30 and np.mean(losses[-5:]) < 0.8 * np.mean(losses[:5]), losses


def test_the_train_command_of_speculators(
    results: dict[str, Any], smollm: Builder, consumers_python: Path, tmp_path: Path
) -> None:
    """Its own loaders, trainer and checkpoints; on the CPU, which the trainer is told to take."""
    export = Path(results["real speculators"]["out"]).parent / "eagle3"
    options = ["--total-seq-len", "256", "--epochs", "2", "--lr", "1e-3", "--optimizer", "adamw", "--ttt-steps", "1"]
    told = speculators_train(
        consumers_python, export, smollm.model, tmp_path, *options, "--hidden-states-dtype", "float32"
    )
    first = next(step["train"]["loss"] for step in told if "train" in step)
    last = [step["val"]["loss_epoch"] for step in told if "val" in step][-1]
    assert len([step for step in told if "train" in step]) >= 8 and last < 0.7 * first, told
    assert all(step["train"]["error_records"] == 0 for step in told if "train" in step)
    draft = json.loads((tmp_path / "checkpoints" / "1" / "config.json").read_text())
    assert draft["eagle_aux_hidden_state_layer_ids"] == [2, 15, 27] and draft["draft_vocab_size"] == 2048


def test_sae_lens_trains_an_autoencoder_on_the_states_of_a_real_model(results: dict[str, Any]) -> None:
    assert results["sae"]["after"] < 0.5 * results["sae"]["before"], results["sae"]
