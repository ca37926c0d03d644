"""A folder as `datasets.Dataset.save_to_disk` writes it, without `datasets`: Arrow stream files and two JSON ones.

Source: datasets 5.1, `arrow_dataset.py`, `Dataset.save_to_disk` and `load_from_disk`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import IO, Any

import pyarrow as pa

from rayhs.export.target import Target

Features = Mapping[str, Any]
"""Column name to `datasets` feature, as in ``dataset_info.json``."""


def value(dtype: str) -> dict[str, Any]:
    """The feature of a number or text, such as int64, float32, string."""
    return {"dtype": dtype, "_type": "Value"}


def list_of(feature: Mapping[str, Any]) -> dict[str, Any]:
    """The feature of a list of any length; datasets before 4 called it Sequence, which later ones still read."""
    return {"feature": feature, "_type": "Sequence"}


def arrow_schema(fields: Sequence[pa.Field], features: Features) -> pa.Schema:
    """The schema of the folder's files, which repeats the features as `datasets` does."""
    return pa.schema(fields, metadata={"huggingface": json.dumps({"info": {"features": features}})})


def write_batches(file: IO[bytes], schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> None:
    with pa.ipc.new_stream(file, schema) as stream:
        for batch in batches:
            stream.write_batch(batch)


def finish_folder(target: Target, features: Features, files: Sequence[str], as_torch: bool = False) -> None:
    """Write the two JSON files: now `datasets.load_from_disk` opens the folder.

    Args:
        files: names of the Arrow files, in order.
        as_torch: rows come as torch tensors, not as Python lists.
    """
    info = {"citation": "", "description": "", "features": features, "homepage": "", "license": ""}
    state: dict[str, Any] = {
        "_data_files": [{"filename": name} for name in files],
        "_fingerprint": hashlib.sha256(json.dumps([target.uri, *files]).encode()).hexdigest()[:16],
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": "torch" if as_torch else None,
        "_output_all_columns": False,
        "_split": None,
    }
    for name, document in (("dataset_info.json", info), ("state.json", state)):
        target.put(name, json.dumps(document, indent=2).encode())
