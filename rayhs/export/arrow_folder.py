"""A folder as `datasets.Dataset.save_to_disk` writes it, without `datasets`: Arrow stream files and two JSON ones.

Source: datasets 5.1, `arrow_dataset.py`, `Dataset.save_to_disk` and `load_from_disk`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import IO, Any

import numpy as np
import pyarrow as pa

from rayhs.codec import Array
from rayhs.export.target import Target

Features = Mapping[str, Any]
"""Column name to `datasets` feature, as in ``dataset_info.json``."""


def value(dtype: str) -> dict[str, Any]:
    """The feature of a number or text, such as int64, float32, string."""
    return {"dtype": dtype, "_type": "Value"}


def list_of(feature: Mapping[str, Any], length: int = -1) -> dict[str, Any]:
    """The feature of a list, -1: of any length; datasets before 4 called it Sequence, which later ones still read."""
    return {"feature": feature, "length": length, "_type": "Sequence"}


def array2d(shape: tuple[int | None, int], dtype: str) -> dict[str, Any]:
    """The feature of a matrix; its first dimension may be None, which is another in each row."""
    return {"shape": list(shape), "dtype": dtype, "_type": "Array2D"}


def array2d_field(name: str, shape: tuple[int | None, int], dtype: str) -> pa.Field:
    """A column of that feature, its extension type named as `datasets` would: it is known where `datasets` is."""
    stored = pa.list_(pa.list_(pa.from_numpy_dtype(dtype)))
    extension = {
        "ARROW:extension:name": "datasets.features.features.Array2DExtensionType",
        "ARROW:extension:metadata": json.dumps((shape, dtype)),
    }
    return pa.field(name, stored, metadata=extension)


def encode_arrays(arrays: Sequence[Array]) -> pa.Array:
    """A row for each of ``arrays`` `[rows, columns]`; one alone is not copied."""
    rows = _joined(arrays)
    inner = pa.ListArray.from_arrays(_offsets([rows.shape[1]] * len(rows)), pa.array(rows.reshape(-1)))
    return pa.ListArray.from_arrays(_offsets([len(array) for array in arrays]), inner)


def encode_lists(arrays: Sequence[Array]) -> pa.Array:
    """A row for each 1-d array."""
    return pa.ListArray.from_arrays(_offsets([len(array) for array in arrays]), pa.array(_joined(arrays)))


def _joined(arrays: Sequence[Array]) -> Array:
    return np.ascontiguousarray(arrays[0]) if len(arrays) == 1 else np.concatenate(arrays)


def _offsets(lengths: Sequence[int]) -> pa.Array:
    return pa.array(np.cumsum([0, *lengths]), pa.int32())


def file_name(number: int, files: int) -> str:
    """Of one of the folder's Arrow files, as `datasets` names them."""
    return f"data-{number:05d}-of-{files:05d}.arrow"


def arrow_schema(fields: Sequence[pa.Field], features: Features) -> pa.Schema:
    """The schema of the folder's files, which repeats the features as `datasets` does."""
    return pa.schema(fields, metadata={"huggingface": json.dumps({"info": {"features": features}})})


def write_batches(file: IO[bytes], schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> None:
    with pa.ipc.new_stream(file, schema) as stream:
        for batch in batches:
            stream.write_batch(batch)


def finish_folder(target: Target, features: Features, files: Sequence[str], rows_as: str | None = None) -> None:
    """Write the two JSON files: now `datasets.load_from_disk` opens the folder.

    Args:
        files: names of the Arrow files, in order.
        rows_as: what rows come as: numpy or torch; default Python lists.
    """
    info = {"citation": "", "description": "", "features": features, "homepage": "", "license": ""}
    state: dict[str, Any] = {
        "_data_files": [{"filename": name} for name in files],
        # What `datasets` finds results of its own by that it has kept: another one where anything differs.
        "_fingerprint": target.fingerprint,
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": rows_as,
        "_output_all_columns": False,
        "_split": None,
    }
    for name, document in (("dataset_info.json", info), ("state.json", state)):
        if not target.has(name):
            target.put(name, json.dumps(document, indent=2).encode())
