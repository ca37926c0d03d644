"""A dataset as a source of Ray Data: one read task a shard, hidden states as tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa
import ray
from ray.data import Datasource
from ray.data.block import BlockMetadata
from ray.data.datasource import ReadTask
from ray.data.extensions import ArrowVariableShapedTensorArray, ArrowVariableShapedTensorType

from rayhs.codec import Array, state_name
from rayhs.layout import DatasetRecord
from rayhs.store import Store
from rayhs.views import arrow
from rayhs.views.arrow import Dtype, RowReader

_VALUES = {"float32": pa.float32(), "float16": pa.float16()}


class TensorRows(RowReader):
    """Rows whose states are Ray's variable-shaped tensors `[tokens, hidden]` of one of Arrow's own dtypes."""

    def _encode_states(self, states: Sequence[Array], field: pa.Field, rows: pa.Table) -> pa.Array:
        return ArrowVariableShapedTensorArray.from_numpy(list(states))


class RayhsDatasource(Datasource):
    """A `ray.data.Datasource` of good samples, from rows of the index, a table for each shard.

    Rows, sizes and schema are known without reading. Columns that a later ``select_columns`` drops are not read.
    """

    def __init__(self, reader: RowReader, shards: Sequence[pa.Table], uri: str) -> None:
        super().__init__()
        self._reader, self._shards, self._uri = reader, shards, uri
        self._projection: dict[str, str] | None = None

    def estimate_inmemory_data_size(self) -> int:
        return sum(map(self._reader.nbytes, self._shards))

    def get_read_tasks(
        self, parallelism: int, per_task_row_limit: int | None = None, data_context: object = None
    ) -> list[ReadTask]:
        """One task a shard, whatever the ``parallelism``: a header is read once, and a lost task is little work."""
        shared = ray.put(self._reader)
        return [self._task(shared, rows.slice(0, per_task_row_limit), per_task_row_limit) for rows in self._shards]

    def _task(self, shared: ray.ObjectRef, rows: pa.Table, limit: int | None) -> ReadTask:
        def read() -> Iterator[pa.Table]:
            for batch in ray.get(shared).batches([rows]):
                yield pa.Table.from_batches([batch])

        files = (f"{self._uri}/{rows['shard'][0]}",)
        metadata = BlockMetadata(
            num_rows=len(rows), size_bytes=self._reader.nbytes(rows), exec_stats=None, input_files=files
        )
        return ReadTask(read, metadata, schema=self._reader.schema, per_task_row_limit=limit)

    def supports_projection_pushdown(self) -> bool:
        return True

    def get_projection_map(self) -> dict[str, str] | None:
        return self._projection

    def apply_projection(self, projection_map: Mapping[str, str] | None) -> RayhsDatasource:
        if projection_map is None:
            return self
        # Ray asks for no column where it only counts; blocks without any would have no rows.
        names = list(projection_map) or ["index"]
        clone = RayhsDatasource(self._reader.select(names), self._shards, self._uri)
        clone._projection = {name: name for name in projection_map}
        return clone


def make_reader(
    store: Store, record: DatasetRecord, layers: Sequence[int], columns: Sequence[str] | None, dtype: Dtype | None
) -> RowReader:
    """As `rayhs.views.arrow.make_reader`, of tensors unless ``dtype`` is stored; None takes one that Arrow has."""
    if dtype is None:
        dtype = "stored" if record.dtype in _VALUES else "float32"
    elif dtype == "stored":
        return arrow.make_reader(store, record, layers, columns, dtype)
    plain = arrow.make_reader(store, record, layers, columns, dtype)
    kind = ArrowVariableShapedTensorType(_VALUES[plain.dtype], 2)
    states = {state_name(k) for k in layers}
    fields = [pa.field(f.name, kind) if f.name in states else f for f in plain.schema]
    return TensorRows(store, record, pa.schema(fields), plain.dtype)


def read_rows(reader: RowReader, shards: Sequence[pa.Table], uri: str, **options: Any) -> ray.data.Dataset:
    """A dataset of `RayhsDatasource`; ``options`` are those of `ray.data.read_datasource`."""
    return ray.data.read_datasource(RayhsDatasource(reader, shards, uri), **options)
