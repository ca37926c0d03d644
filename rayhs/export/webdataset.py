"""For webdataset: tar files that `webdataset.WebDataset(urls).decode()` reads without a decoder of one's own.

Source: webdataset 1.0.2, `autodecode.py` (what decodes by itself: .npy has no bfloat16, .pth has) and
`tariterators.py` (a key ends at the first dot, the files of a sample lie side by side).
"""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Iterator
from typing import IO, TYPE_CHECKING, Annotated, Any

import numpy as np
import pyarrow.compute as pc
from pydantic import ByteSize, Field

from rayhs.codec import Array, state_name
from rayhs.export.convert import as_torch, state_dtype, torch_bytes
from rayhs.export.options import About, ExportOptions
from rayhs.export.rows import ids_of, lengths_of, positions_of, put_shards
from rayhs.export.target import Target
from rayhs.reading.cutting import cut
from rayhs.reading.sample import Sample

if TYPE_CHECKING:
    from rayhs.dataset import Dataset

ABOUT = About(
    consumer='webdataset (1.0): WebDataset("OUT/shard-{000000..<last>}.tar").decode()',
    needs="torch",
    writes="shard-<number>.tar; of a sample <index>.json (sample_id, index, tokens) and the tensors <index>."
    "token_ids.pth int64, .loss_mask.pth bool, .hidden_states.<layer id>.pth [tokens, hidden], those of Dataset.torch",
    converts="nothing: states keep their dtype, bfloat16 too; float8_e4m3fn dequantised",
)
# More than torch.save adds to a tensor, and tar's own header and padding.
_TENSOR_BYTES, _MEMBER_BYTES = 3072, 1024


class Options(ExportOptions):
    """``shard_bytes``: of a file, at most, unless one sample is larger."""

    layers: tuple[int, ...] | None = None
    shard_bytes: Annotated[ByteSize, Field(gt=0)] = ByteSize(512 * 2**20)


def export(dataset: Dataset, target: Target, options: Options) -> dict[str, Any]:
    if options.layers is not None:
        dataset = dataset.with_layers(options.layers)
    slices = cut(_most_bytes(dataset), options.shard_bytes - 2 * tarfile.RECORDSIZE)
    positions = positions_of(dataset)

    def write(file: IO[bytes], count: int, samples: Iterator[Sample]) -> None:
        with tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT) as tar:
            for sample in samples:
                _add(tar, sample, dataset.layers)

    put_shards(dataset, target, [positions[some] for some in slices], shard_name, write)
    return {"layer_ids": list(dataset.layers), "urls": f"shard-{{{0:06d}..{len(slices) - 1:06d}}}.tar"}


def shard_name(number: int) -> str:
    return f"shard-{number:06d}.tar"


def _most_bytes(dataset: Dataset) -> Array:
    """More than each row takes in a file, from the index alone."""
    layers = len(dataset.layers)
    token_bytes = 8 + 1 + layers * dataset.hidden_size * state_dtype(dataset).itemsize
    ids = np.asarray(pc.binary_length(ids_of(dataset)), np.int64)
    fixed = (2 + layers) * (_TENSOR_BYTES + _MEMBER_BYTES) + _MEMBER_BYTES + 128
    most: Array = lengths_of(dataset) * token_bytes + 6 * ids + fixed  # \u0000 is six characters
    return most


def _add(tar: tarfile.TarFile, sample: Sample, layers: tuple[int, ...]) -> None:
    about = {"sample_id": sample.sample_id, "index": sample.index, "tokens": len(sample.token_ids)}
    _add_file(tar, sample, "json", json.dumps(about).encode())
    _add_file(tar, sample, "token_ids.pth", torch_bytes(as_torch(sample.token_ids).long()))
    _add_file(tar, sample, "loss_mask.pth", torch_bytes(as_torch(sample.loss_mask).bool()))
    for layer in layers:
        _add_file(tar, sample, f"{state_name(layer)}.pth", torch_bytes(as_torch(sample.hidden_states[layer])))


def _add_file(tar: tarfile.TarFile, sample: Sample, suffix: str, data: bytes) -> None:
    # The default TarInfo has time, owner and group 0: the same samples give the same file.
    member = tarfile.TarInfo(f"{sample.index:09d}.{suffix}")
    member.size = len(data)
    tar.addfile(member, io.BytesIO(data))
