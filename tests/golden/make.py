"""Made the golden datasets of format version 1, once: `PYTHONPATH=. python tests/golden/make.py FOLDER`.

They stay as they are: what a later version reads differently is a dataset lost. A new format version gets a folder
and a list of its own.
"""

from __future__ import annotations

import base64
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

import rayhs
from rayhs.fake import NAN_TOKEN, REFUSED_TOKEN

HIDDEN = 8
KINDS: dict[str, dict[str, Any]] = {
    "safetensors-float32": {},
    "safetensors-bfloat16": {"engine": {"dtype": "bfloat16"}},
    "safetensors-float16-generated": {"shards": {"dtype": "float16"}, "engine": {"include_generated": 3}},
    "safetensors-float8": {"shards": {"dtype": "float8_e4m3fn"}, "engine": {"dtype": "bfloat16"}},
    "parquet-float32": {"shards": {"format": "parquet"}},
    "parquet-bfloat16": {"shards": {"format": "parquet"}, "engine": {"dtype": "bfloat16"}},
    "parquet-float8": {"shards": {"format": "parquet", "dtype": "float8_e4m3fn"}},
}


def prompts() -> list[dict[str, Any]]:
    rng = np.random.default_rng(1)
    rows = []
    for i in range(14):
        ids = rng.integers(0, 600, rng.integers(1, 12)).tolist()
        mask = rng.integers(0, 2, len(ids)).tolist()
        rows.append({"id": f"row-{i}", "ids": ids, "mask": mask, "topic": f"größe {i}", "score": i / 4})
    rows[3]["id"] = "Ünïcode/with:signs 漢字"
    rows[5]["ids"], rows[5]["mask"] = [1, REFUSED_TOKEN], [0, 1]
    rows[6]["ids"], rows[6]["mask"] = [2, NAN_TOKEN, 3], [0, 1, 1]
    rows[8]["ids"], rows[8]["mask"] = [], []
    rows[9]["id"] = "row-1"  # a repeat: rejected
    return rows


def expected(dataset: rayhs.Dataset) -> list[dict[str, Any]]:
    """Every row of the index, good ones with all that is stored of them."""
    rows = []
    for position, row in enumerate(dataset.index.to_pylist()):
        entry = {key: row[key] for key in ("index", "sample_id", "status", "reason", "num_tokens")}
        if row["status"] == "ok":
            entry |= content(dataset[position])
        rows.append(entry)
    return rows


def content(sample: rayhs.Sample) -> dict[str, Any]:
    states = {str(k): base64.b64encode(np.ascontiguousarray(s)).decode() for k, s in sample.hidden_states.items()}
    ids, mask = sample.token_ids.tolist(), sample.loss_mask.tolist()
    return {"token_ids": ids, "loss_mask": mask, "columns": sample.columns, "states": states}


def main() -> None:
    folder = Path(sys.argv[1])
    for kind, sections in KINDS.items():
        shards = {"target_bytes": 1200, "rows_per_file": 8, **sections.get("shards", {})}
        rows = {"rows": prompts(), "id": "id", "token_ids": "ids", "loss_mask": "mask"}
        run = rayhs.extract(
            model=f"fake/4x{HIDDEN}",
            prompts=rows,
            layers=[0, 2, 4],
            output=str(folder / kind),
            **{**sections, "shards": shards, "cluster": {"address": "local"}},
        )
        dataset = rayhs.open(run.uri)
        (folder / f"{kind}.json").write_text(json.dumps(expected(dataset), ensure_ascii=False, indent=1) + "\n")


if __name__ == "__main__":
    main()
