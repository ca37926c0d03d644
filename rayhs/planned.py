"""Rows of the plan as the samples whose states are to be had."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from rayhs.layout import PLANNED
from rayhs.shards import PlannedSample

PLAN_COLUMNS = ["index", "sample_id", "status", "token_ids", "loss_mask"]
"""The columns of `rayhs.layout.SAMPLES_SCHEMA` that `planned_samples` needs."""


def planned_samples(rows: pa.Table) -> list[PlannedSample]:
    """The samples to extract, out of the rows of a shard (rejected rows are left out)."""
    kept = rows.filter(pc.equal(rows["status"], PLANNED)).combine_chunks()
    ids = kept["index"].to_pylist(), kept["sample_id"].to_pylist()
    rows_of_ids = zip(*ids, _lists(kept["token_ids"]), _lists(kept["loss_mask"]), strict=True)
    return [PlannedSample(i, sample_id, tokens, mask) for i, sample_id, tokens, mask in rows_of_ids]


def _lists(column: pa.ChunkedArray) -> list[Any]:
    """The rows of a column of lists as numpy views of its values; None where a row is null."""
    rows: list[Any] = []
    for chunk in column.chunks:
        values, offsets = chunk.values.to_numpy(), chunk.offsets.to_pylist()
        valid = chunk.is_valid().to_pylist()
        rows += [values[a:b] if there else None for a, b, there in zip(offsets, offsets[1:], valid, strict=False)]
    return rows
