"""Datasets of format version 1, made by rayhs 0.1.0: whatever comes, they are read as they were written."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import safetensors.torch

import rayhs
from rayhs.errors import SampleError
from rayhs.store import open_store
from rayhs.verify import verify
from tests.golden.make import content, expected

VERSION_1 = Path(__file__).parent / "golden" / "v1"
KINDS = sorted(path.stem for path in VERSION_1.glob("*.json"))


def test_the_list_is_whole() -> None:
    assert len(KINDS) == 7 and {kind.split("-")[0] for kind in KINDS} == {"safetensors", "parquet"}


@pytest.mark.parametrize("kind", KINDS)
def test_every_row_is_as_it_was_written(kind: str) -> None:
    dataset = rayhs.open(str(VERSION_1 / kind))
    want = json.loads((VERSION_1 / f"{kind}.json").read_text())
    assert expected(dataset) == want
    good = [row for row in want if row["status"] == "ok"]
    assert 9 <= len(good) < len(want)
    by_content = [{key: row[key] for key in ("token_ids", "loss_mask", "columns", "states")} for row in good]
    assert [content(sample) for sample in dataset] == by_content
    assert [content(sample) for sample in dataset.stream()] == by_content
    for row in good:
        assert dataset.by_id(row["sample_id"]).index == row["index"]
    with pytest.raises(SampleError, match="refused by the engine"):
        dataset[5]


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_sound(kind: str) -> None:
    report = verify(open_store(str(VERSION_1 / kind)))
    assert report.ok and report.exit_code == 0, list(report.findings)


@pytest.mark.parametrize("kind", KINDS)
def test_other_readers_open_its_shards(kind: str) -> None:
    dataset = rayhs.open(str(VERSION_1 / kind))
    for name in {row["shard"] for row in dataset.index.to_pylist() if row["shard"]}:
        path = VERSION_1 / kind / name
        if kind.startswith("parquet"):
            assert {"hidden_states.0", "token_ids", "loss_mask"} <= set(pq.read_table(path).column_names)
        else:
            tensors = safetensors.torch.load_file(path)
            assert tensors["hidden_states.4"].shape == (len(tensors["token_ids"]), 8)
