"""For speculators, which trains EAGLE-3, P-EAGLE, DFlash and MTP drafts.

Source: speculators 0.9.0, `train/data.py`, `data_generation/preprocessing.py`, `train/vocab_mapping.py`.
Its layer ids are ours, its last state is before the final norm as ours is, and it shifts states against tokens itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from pydantic import PositiveInt

from rayhs.export.arrow_folder import arrow_schema, finish_folder, list_of, value, write_batches
from rayhs.export.convert import auxiliary_layers, last_layer, npy_bytes, safetensors_bytes, stacked, torch_bytes
from rayhs.export.options import About, ExportOptions
from rayhs.export.rows import put_sample_ids
from rayhs.export.target import Target
from rayhs.export.target_model import TargetModel
from rayhs.export.vocabulary import TokenCounts, draft_maps
from rayhs.reading.sample import Sample

if TYPE_CHECKING:
    from rayhs.dataset import Dataset

ABOUT = About(
    consumer="speculators 0.9: speculators train --data-path OUT",
    needs="layer n (layers: [eagle3, last]); torch; for draft_vocab_size the model's config",
    writes="a datasets folder, hidden_states/hs_<row>.safetensors, token_freq.pt, sample_ids.jsonl (line i: row i), "
    "d2t-<size>.npy and t2d-<size>.npy",
    converts="nothing: the same layer ids, the last state before the final norm, float8_e4m3fn dequantised",
)
_ROWS = 1024
_TABLE = "data-00000-of-00001.arrow"


class Options(ExportOptions):
    """``layers``: auxiliary ones, default all below the last; ``draft_vocab_size``: also write vocabulary maps."""

    layers: tuple[int, ...] | None = None
    draft_vocab_size: PositiveInt | None = None
    model: str | None = None


def export(dataset: Dataset, target: Target, options: Options) -> dict[str, Any]:
    last = last_layer(dataset, "speculators")
    layers = (*auxiliary_layers(dataset, options.layers), last)
    size = options.draft_vocab_size
    vocabulary = TargetModel(dataset.info, options.model).vocab_size_over(size) if size else 0
    counts = _write_table(dataset, target)
    target.put("token_freq.pt", torch_bytes(counts))
    if size:
        draft, targets = draft_maps(counts, size, vocabulary)
        target.put(f"d2t-{size}.npy", npy_bytes(draft))
        target.put(f"t2d-{size}.npy", npy_bytes(targets))

    def encode(sample: Sample) -> bytes:
        tensors = {"hidden_states": stacked(sample, layers), "token_ids": sample.token_ids.astype(np.int64)}
        return safetensors_bytes(tensors)

    put_sample_ids(dataset, target)
    target.put_samples(dataset.with_layers(layers), "hidden_states/hs_{}.safetensors".format, encode)
    return {"layer_ids": list(layers), "train_with": f"--target-layer-ids {' '.join(map(str, layers[:-1]))}"}


def _write_table(dataset: Dataset, target: Target) -> dict[int, int]:
    """The rows without their states; how often each token occurs where the loss counts."""
    counts = TokenCounts()
    ids = {"input_ids": list_of(value("int64")), "loss_mask": list_of(value("int64")), "seq_len": value("int64")}
    many = pa.list_(pa.int64())
    schema = arrow_schema(
        [pa.field("input_ids", many), pa.field("loss_mask", many), pa.field("seq_len", pa.int64())], ids
    )

    def batches() -> Iterator[pa.RecordBatch]:
        rows: list[tuple[Any, Any, int]] = []
        for sample in dataset.tokens_only().stream():
            counts.add(sample.token_ids, sample.loss_mask)
            rows.append((sample.token_ids, sample.loss_mask, len(sample.token_ids)))
            if len(rows) == _ROWS:
                yield _batch(rows, schema)
                rows = []
        if rows:
            yield _batch(rows, schema)

    with target.file(_TABLE) as file:
        write_batches(file, schema, batches())
    finish_folder(target, ids, [_TABLE], rows_as="torch")
    return counts.to_dict()


def _batch(rows: list[tuple[Any, Any, int]], schema: pa.Schema) -> pa.RecordBatch:
    arrays = [pa.array(column, field.type) for column, field in zip(zip(*rows, strict=True), schema, strict=True)]
    return pa.record_batch(arrays, schema=schema)
