"""For DeepSpec, which trains DSpark and DFlash drafts from a target cache.

Source: deepseek-ai/DeepSpec, `deepspec/data/target_cache_dataset.py` (4351696e: version 2), `scripts/data/
prepare_target_cache.py` and `deepspec/modeling/target_extract.py` (1bcc590c).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import IO, TYPE_CHECKING, Annotated, Any

import numpy as np
from pydantic import ByteSize, Field

from rayhs.codec import STATE_DTYPES, Array
from rayhs.export.convert import auxiliary_layers, concatenated, last_layer, post_norm, zero_based
from rayhs.export.options import About, ExportOptions
from rayhs.export.rows import SAMPLE_IDS, lengths_of, positions_of, put_sample_ids, put_shards
from rayhs.export.target import Target
from rayhs.export.target_model import TargetModel
from rayhs.reading.sample import Sample

if TYPE_CHECKING:
    from rayhs.dataset import Dataset

ABOUT = About(
    consumer="DeepSpec (target cache version 2): data.target_cache_path: OUT",
    needs="layer n (layers: [dflash, last]); torch and the model's weights, of which the final norm is read",
    writes="manifest.json, samples.idx, shard-<number>.bin; sample_ids.jsonl (line i: sample i)",
    converts="all states to bfloat16; the last state gets the final norm, computed in float32; layers side by side, "
    "ascending; float8_e4m3fn dequantised. Nothing is shifted, padded or cut; samples of few loss tokens stay in",
)
_BFLOAT16 = STATE_DTYPES["bfloat16"]
_TENSORS = ("input_ids", "attention_mask", "loss_mask", "target_hidden_states", "target_last_hidden_states")
_RECORD = np.dtype(
    [("sample_id", "<u8"), ("shard_id", "<u4"), ("seq_len", "<u4"), *((name, "<u8") for name in _TENSORS)]
)
_INDEX = "samples.idx"


class Options(ExportOptions):
    """``layers``: default all below the last; ``shard_bytes``: of a file, at most, unless one sample is larger."""

    layers: tuple[int, ...] | None = None
    shard_bytes: Annotated[ByteSize, Field(gt=0)] = ByteSize(2**30)
    model: str | None = None


def export(dataset: Dataset, target: Target, options: Options) -> dict[str, Any]:
    last = last_layer(dataset, "DeepSpec")
    layers = auxiliary_layers(dataset, options.layers)
    model = TargetModel(dataset.info, options.model)
    hidden = dataset.hidden_size
    records = _records(lengths_of(dataset), token_bytes(len(layers), hidden), options.shard_bytes)
    firsts = np.flatnonzero(np.diff(records["shard_id"], prepend=-1)).tolist()
    positions = positions_of(dataset)
    shards = [positions[first:stop] for first, stop in zip(firsts, [*firsts[1:], None], strict=True)]

    def write(file: IO[bytes], count: int, samples: Iterator[Sample]) -> None:
        for sample in samples:
            file.write(sample.token_ids.astype("<i4").tobytes())
            file.write(np.ones(len(sample.token_ids), np.uint8).tobytes())
            file.write(sample.loss_mask.astype(np.uint8).tobytes())
            file.write(concatenated(sample, layers).astype(_BFLOAT16).tobytes())
            file.write(post_norm(model, sample.hidden_states[last], _BFLOAT16).tobytes())

    put_shards(dataset.with_layers((*layers, last)), target, shards, shard_name, write)
    if not target.has(_INDEX):
        target.put(_INDEX, records.tobytes())
    put_sample_ids(dataset, target)
    target.put("manifest.json", _manifest(len(positions), len(shards), zero_based(layers), hidden, model.name))
    return {
        "layer_ids": list(layers),
        "target_layer_ids": zero_based(layers),
        "target_model_name_or_path": f"{model.name}; DeepSpec refuses a training whose name for it differs",
        "rows": f"line i of {SAMPLE_IDS} is sample i",
    }


def shard_name(number: int) -> str:
    return f"shard-{number:05d}.bin"


def token_bytes(layers: int, hidden: int) -> Array:
    """Bytes of a token in each of the five tensors."""
    return np.array([4, 1, 1, 2 * layers * hidden, 2 * hidden], np.int64)


def _records(lengths: Array, each: Array, shard_bytes: int) -> Array:
    """The index: in which shard each sample is, and where in it; samples fill one shard after the other, in order."""
    records = np.zeros(len(lengths), _RECORD)
    records["sample_id"], records["seq_len"] = np.arange(len(lengths)), lengths
    shard, start = 0, 0
    starts = np.zeros(len(lengths), np.int64)
    numbers = np.zeros(len(lengths), np.int64)
    for row, nbytes in enumerate((lengths * each.sum()).tolist()):
        if start and start + nbytes > shard_bytes:
            shard, start = shard + 1, 0
        starts[row], numbers[row] = start, shard
        start += nbytes
    records["shard_id"] = numbers
    for name, before in zip(_TENSORS, [0, *np.cumsum(each)[:-1].tolist()], strict=True):
        records[name] = starts + lengths * before
    return records


def _manifest(samples: int, shards: int, layer_ids: Sequence[int], hidden: int, model: str) -> bytes:
    manifest = {
        "version": 2,
        "num_samples": samples,
        "num_shards": shards,
        "target_layer_ids": list(layer_ids),
        "hidden_dtype": "bfloat16",
        "token_dtype": "int32",
        "mask_dtype": "uint8",
        "index_record_size": _RECORD.itemsize,
        "hidden_size": hidden,
        "shards": [{"shard_id": number, "file_name": shard_name(number)} for number in range(shards)],
        "target_model_name_or_path": model,
    }
    return json.dumps(manifest, indent=2, sort_keys=True).encode()
