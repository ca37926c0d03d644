"""For everything that reads a Hugging Face dataset: `datasets.load_from_disk`.

Source: datasets 5.1.0, `features/features.py`, `Array2D` (its first dimension may vary from row to row).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import IO, TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
import pyarrow as pa
from pydantic import ByteSize, Field

from rayhs.codec import Array, state_name
from rayhs.errors import ConfigError
from rayhs.export.arrow_folder import (
    array2d,
    array2d_field,
    arrow_schema,
    encode_arrays,
    encode_lists,
    file_name,
    finish_folder,
    list_of,
    value,
    write_batches,
)
from rayhs.export.convert import state_dtype
from rayhs.export.options import About, ExportOptions
from rayhs.export.rows import lengths_of, positions_of, put_shards
from rayhs.export.target import Target
from rayhs.reading.cutting import cut
from rayhs.reading.sample import Sample

if TYPE_CHECKING:
    from rayhs.dataset import Dataset

ABOUT = About(
    consumer="Hugging Face datasets (5.1): datasets.load_from_disk(OUT)",
    needs="nothing",
    writes="a datasets folder, a row a sample: sample_id, index, token_ids, loss_mask, hidden_states.<layer id> "
    "[tokens, hidden]; rows come as numpy arrays",
    converts="the dtype: Arrow has no bfloat16, which becomes float32 (exact), or float16 where that is asked for and "
    "every state is within 65504; float8_e4m3fn dequantised",
)
_BATCH_BYTES = 16 * 2**20
_MOST_VALUES = 2**31 - 1  # Arrow counts the values of a batch in an int32


class Options(ExportOptions):
    """``dtype``: default float16 for states that are, else float32; ``file_bytes``: of a file, or one larger sample."""

    layers: tuple[int, ...] | None = None
    dtype: Literal["float32", "float16"] | None = None
    file_bytes: Annotated[ByteSize, Field(gt=0)] = ByteSize(512 * 2**20)


def export(dataset: Dataset, target: Target, options: Options) -> dict[str, Any]:
    if options.layers is not None:
        dataset = dataset.with_layers(options.layers)
    rows = Rows(
        dataset, np.dtype(options.dtype or ("float16" if state_dtype(dataset).name == "float16" else "float32"))
    )
    lengths = lengths_of(dataset)
    rows.refuse_larger_than_arrow(lengths)
    slices = cut(lengths * rows.token_bytes, options.file_bytes)
    names = [file_name(number, len(slices)) for number in range(len(slices))]
    positions = positions_of(dataset)
    put_shards(dataset, target, [positions[some] for some in slices], names.__getitem__, rows.write)
    finish_folder(target, rows.features, names, rows_as="numpy")
    return {"layer_ids": list(dataset.layers), "states_dtype": rows.dtype.name, "rows": "in the order of the input"}


class Rows:
    """Samples as rows of Arrow files."""

    def __init__(self, dataset: Dataset, dtype: np.dtype[Any]) -> None:
        self.dtype, self._layers, self._hidden = dtype, dataset.layers, dataset.hidden_size
        # An id, a mask and, of each layer, an offset and the states.
        self.token_bytes = 5 + len(self._layers) * (4 + self._hidden * dtype.itemsize)
        ids, mask = value("int32"), value("uint8")
        self.features = {"sample_id": value("string"), "index": value("int64")}
        self.features |= {"token_ids": list_of(ids), "loss_mask": list_of(mask)}
        self.features |= {state_name(k): array2d((None, self._hidden), dtype.name) for k in self._layers}
        fields = [
            pa.field("sample_id", pa.string()),
            pa.field("index", pa.int64()),
            pa.field("token_ids", pa.list_(pa.int32())),
            pa.field("loss_mask", pa.list_(pa.uint8())),
            *(array2d_field(state_name(k), (None, self._hidden), dtype.name) for k in self._layers),
        ]
        self._schema = arrow_schema(fields, self.features)

    def refuse_larger_than_arrow(self, lengths: Array) -> None:
        """Raises ConfigError where the states of a layer of one sample are too many for Arrow."""
        if int(lengths.max()) * self._hidden > _MOST_VALUES:
            raise ConfigError(
                f"huggingface: a sample of {lengths.max()} tokens of {self._hidden} values is over the 2^31 values "
                "that Arrow has in a row; export to webdataset instead"
            )

    def write(self, file: IO[bytes], count: int, samples: Iterator[Sample]) -> None:
        write_batches(file, self._schema, self._batches(samples))

    def _batches(self, samples: Iterator[Sample]) -> Iterator[pa.RecordBatch]:
        held: list[Sample] = []
        nbytes = 0
        for sample in samples:
            size = len(sample.token_ids) * self.token_bytes
            if held and nbytes + size > _BATCH_BYTES:
                yield self._batch(held)
                held, nbytes = [], 0
            held.append(sample)
            nbytes += size
        if held:
            yield self._batch(held)

    def _batch(self, samples: list[Sample]) -> pa.RecordBatch:
        columns = [
            pa.array([sample.sample_id for sample in samples], pa.string()),
            pa.array([sample.index for sample in samples], pa.int64()),
            encode_lists([sample.token_ids.astype(np.int32) for sample in samples]),
            encode_lists([sample.loss_mask.astype(np.uint8) for sample in samples]),
            *(encode_arrays([self._states(sample, layer) for sample in samples]) for layer in self._layers),
        ]
        return pa.record_batch(columns, schema=self._schema)

    def _states(self, sample: Sample, layer: int) -> Array:
        states = sample.hidden_states[layer]
        with np.errstate(over="ignore"):
            converted = states.astype(self.dtype)
        if self.dtype.name == "float16" and not np.isfinite(converted).all():
            largest = float(np.abs(states.astype(np.float32)).max())
            raise ConfigError(
                f"sample {sample.sample_id}, layer {layer}: a state of {largest:.6g} is beyond float16, which ends at "
                "65504; export with dtype=float32 into an empty folder"
            )
        return converted
