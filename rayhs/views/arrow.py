"""A dataset as Arrow record batches: rows of the index joined with what their shards hold of them."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from functools import partial
from typing import Literal, Self, get_args

import numpy as np
import pyarrow as pa

from rayhs import codec, layout, parquet_codec
from rayhs.codec import STATE_DTYPES, Array, scale_name, state_name
from rayhs.errors import ConfigError
from rayhs.layout import DatasetRecord
from rayhs.reading.ahead import in_order
from rayhs.reading.cutting import cut
from rayhs.reading.outline import good_of_shards
from rayhs.reading.plan_reader import PlanReader
from rayhs.reading.shard_reader import Place, ShardReader, StoredSample
from rayhs.store import Store

Dtype = Literal["stored", "float32", "float16"]

READ_BYTES = 16 * 2**20
_READS = 4  # at once, with the batch in use

_COLUMNS = pa.field("columns", pa.string())
_FROM_INDEX = (*layout.INDEX_SCHEMA.names, _COLUMNS.name)
_TOKEN_BYTES = 4 + 1  # token_ids and loss_mask
_ROW_BYTES = 150  # of the columns of the index, about


def row_schema(hidden: int, dtype: str, layers: Sequence[int], columns: Sequence[str] | None = None) -> pa.Schema:
    """The columns of `rayhs.Dataset.arrow`: of the index, ``columns``, then those of a Parquet shard in ``dtype``.

    Args:
        columns: which of those that are no states; default all.

    Raises:
        ConfigError: an unknown column, or none left.
    """
    stored = parquet_codec.shard_schema(layers, hidden, dtype)
    own = [field for field in stored if field.name not in _FROM_INDEX]
    plain = [*layout.INDEX_SCHEMA, _COLUMNS, *own[:2]]
    names = [field.name for field in plain]
    chosen = names if columns is None else columns
    unknown = [name for name in chosen if name not in names]
    if unknown:
        raise ConfigError(f"column {unknown[0]!r} is not one of {names}; states are chosen by layers")
    fields = [*(field for field in plain if field.name in chosen), *own[2:]]
    if not fields:
        raise ConfigError("no column chosen: name one in columns, or leave states=True")
    return pa.schema(fields)


class RowReader:
    """Reads rows of the index as record batches of ``schema``, a `row_schema`; picklable, safe for many threads.

    Of the shards it reads the layers that the schema names, and nothing where it names no column of theirs.
    States become ``dtype`` where they are stored in another.
    """

    def __init__(self, store: Store, record: DatasetRecord, schema: pa.Schema, dtype: str) -> None:
        names = set(schema.names)
        self._store, self._record, self.dtype = store, record, dtype
        self.schema = schema
        self.layers = tuple(k for k in record.layers if {state_name(k), scale_name(k)} & names)
        self._layer_of = {name(k): k for k in self.layers for name in (state_name, scale_name)}
        self._reads_shards = not names.issubset(_FROM_INDEX)
        self._shards = ShardReader(store, record, self.layers)
        self._plan = PlanReader(store, record.plan)

    def select(self, names: Sequence[str]) -> Self:
        """A reader of some of the columns, in that order, which reads nothing of the others."""
        schema = pa.schema([self.schema.field(name) for name in names])
        return type(self)(self._store, self._record, schema, self.dtype)

    def batches(self, shards: Iterable[pa.Table]) -> Generator[pa.RecordBatch, None, None]:
        """The rows of each shard as batches of about `READ_BYTES`, or of one larger sample; a few are read ahead.

        Args:
            shards: rows of the index, each table good samples of one shard.

        Raises:
            SampleError: states of a sample that no Arrow value can hold.
            FormatError, StoreError: a damaged, lost or unreadable shard, at its turn.
        """
        return in_order(
            (partial(self._read, rows) for shard in shards for rows in self._cut(shard)), _READS - 1, _READS
        )

    def nbytes(self, rows: int, tokens: int) -> int:
        """About how many bytes the batches of so many rows, and tokens in all, take in memory."""
        return rows * _ROW_BYTES + tokens * self._token_bytes()

    def _token_bytes(self) -> int:
        if not self._reads_shards:
            return 0
        return codec.token_bytes(self.layers, self._record.hidden_size, self.dtype) + _TOKEN_BYTES

    def _cut(self, rows: pa.Table) -> Iterator[pa.Table]:
        for some in cut(rows["num_tokens"].to_numpy() * self._token_bytes(), READ_BYTES):
            yield rows.slice(some.start, some.stop - some.start)

    def _read(self, rows: pa.Table) -> pa.RecordBatch:
        stored = self._stored(rows) if self._reads_shards else []
        return pa.record_batch([self._column(field, rows, stored) for field in self.schema], schema=self.schema)

    def _stored(self, rows: pa.Table) -> list[StoredSample]:
        index, start, tokens = (rows[name].to_pylist() for name in ("index", "token_start", "num_tokens"))
        places = [Place(*place) for place in zip(index, start, tokens, strict=True)]
        return self._shards.read_many(rows["shard"][0].as_py(), places)

    def _column(self, field: pa.Field, rows: pa.Table, stored: Sequence[StoredSample]) -> pa.Array:
        if field.name in layout.INDEX_SCHEMA.names:
            return rows[field.name].combine_chunks()
        if field.name == _COLUMNS.name:
            return pa.array(self._passed_through(rows), field.type)
        if field.name in ("token_ids", "loss_mask"):
            return parquet_codec.encode_lists([getattr(sample, field.name) for sample in stored], field.type)
        layer = self._layer_of[field.name]
        if field.name == scale_name(layer):
            return parquet_codec.encode_lists([sample.scales[layer] for sample in stored], field.type)
        return self._encode_states([self._states(sample, layer) for sample in stored], field, rows)

    def _passed_through(self, rows: pa.Table) -> list[str | None]:
        shard = layout.shard_of_object(rows["shard"][0].as_py())
        assert shard is not None, "the index has been checked"
        return self._plan.columns_json(shard, rows["index"].to_pylist())

    def _states(self, sample: StoredSample, layer: int) -> Array:
        if self.dtype == self._record.dtype:
            return sample.states[layer]
        with np.errstate(over="ignore"):  # the caller chose float16
            states: Array = sample.engine_state(layer, self._record.engine_dtype).astype(STATE_DTYPES[self.dtype])
        return states

    def _encode_states(self, states: Sequence[Array], field: pa.Field, rows: pa.Table) -> pa.Array:
        if pa.types.is_binary(field.type):
            for sample_id, own in zip(rows["sample_id"].to_pylist(), states, strict=True):
                parquet_codec.check_value(own, sample_id)
        return parquet_codec.encode_states(states, field.type)


def make_reader(
    store: Store, record: DatasetRecord, layers: Sequence[int], columns: Sequence[str] | None, dtype: Dtype
) -> RowReader:
    """A reader of the columns of `row_schema`.

    Raises:
        ConfigError: an unknown column or dtype, or no column.
    """
    if dtype not in get_args(Dtype):
        raise ConfigError(f"dtype={dtype!r} is not one of {', '.join(get_args(Dtype))}")
    chosen = record.dtype if dtype == "stored" else dtype
    return RowReader(store, record, row_schema(record.hidden_size, chosen, layers, columns), chosen)


def record_batches(reader: RowReader, tables: Iterable[pa.Table]) -> pa.RecordBatchReader:
    """The good samples of pieces of an index, read as they are asked for."""
    return pa.RecordBatchReader.from_batches(reader.schema, reader.batches(good_of_shards(tables)))
