"""For SAELens, which trains sparse autoencoders: its cached activations.

Source: sae-lens 6.54.12, `cache_activations_runner.py` (what it writes) and `training/activations_store.py`
(`load_cached_activation_dataset` and `_load_raw_llm_batch_from_cached`: what it checks).
Its hooks count from 0: ``blocks.<k>.hook_resid_post`` is what comes out of decoder layer k, our layer k + 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import pyarrow as pa
from pydantic import ByteSize, Field, NonNegativeInt, PositiveInt

from rayhs.codec import Array
from rayhs.errors import ConfigError
from rayhs.export.arrow_folder import (
    array2d,
    array2d_field,
    arrow_schema,
    encode_arrays,
    file_name,
    finish_folder,
    list_of,
    value,
    write_batches,
)
from rayhs.export.options import About, ExportOptions
from rayhs.export.rows import lengths_of, positions_of
from rayhs.export.target import Target
from rayhs.reading.sample import Sample

if TYPE_CHECKING:
    from rayhs.dataset import Dataset

ABOUT = About(
    consumer="SAELens 6.54: ActivationsStore, cached_activations_path=OUT with use_cached_activations",
    needs="context_size, the tokens of a row; layer, where several are stored: a folder has one",
    writes="a datasets folder with the column blocks.<layer - 1>.hook_resid_post (of layer 0 blocks.0.hook_resid_pre) "
    "float32 [context_size, hidden] and token_ids int32",
    converts="states to float32, rows cut to context_size. pack=true (the default, as SAELens itself does) joins "
    "samples in order, and only the last row's rest is dropped; pack=false cuts each sample and drops each one's rest. "
    "States are those of a token in its own sample either way. only_loss=true drops tokens the loss does not count",
)
_BATCH_BYTES = 16 * 2**20


class Options(ExportOptions):
    """``layer``: ours; ``file_bytes``: of a file, at most, unless one row is larger."""

    layer: NonNegativeInt | None = None
    context_size: PositiveInt
    pack: bool = True
    only_loss: bool = False
    file_bytes: Annotated[ByteSize, Field(gt=0)] = ByteSize(512 * 2**20)


def export(dataset: Dataset, target: Target, options: Options) -> dict[str, Any]:
    layer = _layer(dataset, options.layer)
    kept = _kept(dataset, options.only_loss)
    context = options.context_size
    rows = Rows(layer, context, dataset.hidden_size, options, kept if options.pack else kept // context * context)
    if not rows.count:
        raise ConfigError(
            f"context_size: {context} tokens fill no row; the longest sample has {kept.max()}, "
            f"all together have {kept.sum()}"
        )
    names = [file_name(number, rows.files) for number in range(rows.files)]
    for number, name in enumerate(names):
        target.progress(rows.samples_before(number), len(kept))
        if not target.has(name):
            with target.file(name) as file:
                write_batches(file, rows.schema, rows.batches(dataset.with_layers([layer]), number))
    finish_folder(target, rows.features, names)
    target.progress(len(kept), len(kept))
    return {
        "layer_id": layer,
        "hook_name": hook_name(layer),
        "d_in": dataset.hidden_size,
        "rows": rows.count,
        "tokens": rows.count * context,
        "tokens_dropped": int(kept.sum()) - rows.count * context,
    }


def hook_name(layer: int) -> str:
    """TransformerLens' name of the residual stream after ``layer`` decoder layers."""
    return f"blocks.{layer - 1}.hook_resid_post" if layer else "blocks.0.hook_resid_pre"


@dataclass(frozen=True)
class Rows:
    """The tokens of all samples one after the other, ``used`` of each, cut into rows, and these into files."""

    layer: int
    context: int
    hidden: int
    options: Options
    used: Array

    @property
    def row_bytes(self) -> int:
        return 4 * self.context * (self.hidden + 2)  # of a token its states, an offset and its id

    @property
    def count(self) -> int:
        return int(self.used.sum()) // self.context

    @property
    def rows_per_file(self) -> int:
        return max(1, int(self.options.file_bytes) // self.row_bytes)

    @property
    def files(self) -> int:
        return -(-self.count // self.rows_per_file)

    @property
    def features(self) -> dict[str, Any]:
        states = array2d((self.context, self.hidden), "float32")
        return {hook_name(self.layer): states, "token_ids": list_of(value("int32"), self.context)}

    @property
    def schema(self) -> pa.Schema:
        states = array2d_field(hook_name(self.layer), (self.context, self.hidden), "float32")
        return arrow_schema([states, pa.field("token_ids", pa.list_(pa.int32(), self.context))], self.features)

    def samples_before(self, number: int) -> int:
        """How many samples are done when file ``number`` begins."""
        return int(np.searchsorted(np.cumsum(self.used), number * self.rows_per_file * self.context, side="right"))

    def batches(self, dataset: Dataset, number: int) -> Iterator[pa.RecordBatch]:
        """The rows of file ``number``, some at a time."""
        each = self.context * max(1, _BATCH_BYTES // self.row_bytes)
        held: list[tuple[Array, Array]] = []
        count = 0
        for states, ids in self._pieces(dataset, number):
            for start in range(-count, len(ids), each):
                some = slice(max(start, 0), start + each)
                held.append((states[some], ids[some]))
                count += len(ids[some])
                if count == each:
                    yield self._batch(held)
                    held, count = [], 0
        if held:
            yield self._batch(held)

    def _pieces(self, dataset: Dataset, number: int) -> Iterator[tuple[Array, Array]]:
        """States float32 `[tokens, hidden]` and ids int32 `[tokens]` of file ``number``, sample by sample."""
        ends = np.cumsum(self.used)
        start = number * self.rows_per_file * self.context
        stop = min(start + self.rows_per_file * self.context, self.count * self.context)
        chosen = np.flatnonzero((ends > start) & (ends - self.used < stop) & (self.used > 0))
        positions = np.asarray(positions_of(dataset))[chosen]
        samples: Any = dataset.samples(positions.tolist())
        with closing(samples):
            for row, sample in zip(chosen.tolist(), samples, strict=True):
                first = int(ends[row] - self.used[row])
                states, ids = self._tokens(sample)
                some = slice(max(0, start - first), min(int(self.used[row]), stop - first))
                yield states[some], ids[some]

    def _tokens(self, sample: Sample) -> tuple[Array, Array]:
        states, ids = sample.hidden_states[self.layer], sample.token_ids.astype(np.int32)
        if self.options.only_loss:
            counts = sample.loss_mask.astype(bool)
            states, ids = states[counts], ids[counts]
        return states.astype(np.float32), ids

    def _batch(self, pieces: list[tuple[Array, Array]]) -> pa.RecordBatch:
        states, ids = (np.concatenate(parts) for parts in zip(*pieces, strict=True))
        rows = states.reshape(-1, self.context, self.hidden)
        tokens = pa.FixedSizeListArray.from_arrays(pa.array(ids), self.context)
        return pa.record_batch([encode_arrays(rows), tokens], schema=self.schema)


def _layer(dataset: Dataset, wanted: int | None) -> int:
    """Raises ConfigError where it is not stored, or several are and none is chosen."""
    if wanted is None and len(dataset.layers) > 1:
        raise ConfigError(f"layer: a folder has one; choose among {list(dataset.layers)} (--set layer=...)")
    return dataset.with_layers([dataset.layers[0] if wanted is None else wanted]).layers[0]


def _kept(dataset: Dataset, only_loss: bool) -> Array:
    """Tokens of each row's sample that are exported, int64; token ids and masks are read where the loss decides."""
    if not only_loss:
        return lengths_of(dataset)
    counts = (np.count_nonzero(sample.loss_mask) for sample in dataset.tokens_only().stream())
    return np.fromiter(counts, np.int64)
