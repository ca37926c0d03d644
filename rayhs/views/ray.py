"""A dataset as a source of Ray Data: a read task a shard, hidden states as tensors."""

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
from rayhs.reading.outline import Rows, ShardRows, good_between
from rayhs.store import Store
from rayhs.views import arrow
from rayhs.views.arrow import Dtype, RowReader

_VALUES = {"float32": pa.float32(), "float16": pa.float16()}
# Ray takes some milliseconds of time and kilobytes of memory for a task before the first one begins.
_MOST_TASKS = 8192


class TensorRows(RowReader):
    """Rows whose states are Ray's variable-shaped tensors `[tokens, hidden]` of one of Arrow's own dtypes."""

    def _encode_states(self, states: Sequence[Array], field: pa.Field, rows: pa.Table) -> pa.Array:
        return ArrowVariableShapedTensorArray.from_numpy(list(states))


class RayhsDatasource(Datasource):
    """A `ray.data.Datasource` of good samples: where those of each shard are in the index, whose rows its task reads.

    Rows, sizes and schema are known without reading. Columns that a later ``select_columns`` drops are not read.
    """

    def __init__(self, reader: RowReader, rows: Rows, shards: Sequence[ShardRows], uri: str) -> None:
        super().__init__()
        self._reader, self._rows, self._shards, self._uri = reader, rows, shards, uri
        self._projection: dict[str, str] | None = None

    def estimate_inmemory_data_size(self) -> int:
        return self._nbytes(self._shards)

    def get_read_tasks(
        self, parallelism: int, per_task_row_limit: int | None = None, data_context: object = None
    ) -> list[ReadTask]:
        """One task a shard, whatever the ``parallelism``: a header is read once, and a lost task is little work.

        Of over `_MOST_TASKS` shards a task reads several, one after the other.
        """
        shared = ray.put((self._reader, self._rows))
        some = max(1, -(-len(self._shards) // _MOST_TASKS))
        groups = (self._shards[first : first + some] for first in range(0, len(self._shards), some))
        return [self._task(shared, _first_rows(group, per_task_row_limit), per_task_row_limit) for group in groups]

    def _task(self, shared: ray.ObjectRef, shards: Sequence[ShardRows], limit: int | None) -> ReadTask:
        places = [(shard.first, shard.stop, shard.samples) for shard in shards]

        def read() -> Iterator[pa.Table]:
            reader, rows = ray.get(shared)
            tables = (good_between(rows, first, stop).slice(0, samples) for first, stop, samples in places)
            for batch in reader.batches(tables):
                yield pa.Table.from_batches([batch])

        metadata = BlockMetadata(
            num_rows=sum(shard.samples for shard in shards),
            size_bytes=self._nbytes(shards),
            exec_stats=None,
            input_files=tuple(f"{self._uri}/{shard.name}" for shard in shards),
        )
        return ReadTask(read, metadata, schema=self._reader.schema, per_task_row_limit=limit)

    def _nbytes(self, shards: Sequence[ShardRows]) -> int:
        return sum(self._reader.nbytes(shard.samples, shard.tokens) for shard in shards)

    def supports_projection_pushdown(self) -> bool:
        return True

    def get_projection_map(self) -> dict[str, str] | None:
        return self._projection

    def apply_projection(self, projection_map: Mapping[str, str] | None) -> RayhsDatasource:
        if projection_map is None:
            return self
        # Ray asks for no column where it only counts; blocks without any would have no rows.
        names = list(projection_map) or ["index"]
        clone = RayhsDatasource(self._reader.select(names), self._rows, self._shards, self._uri)
        clone._projection = {name: name for name in projection_map}
        return clone


def _first_rows(shards: Sequence[ShardRows], limit: int | None) -> list[ShardRows]:
    """The shards that have the first ``limit`` rows, the last with as many as are left, of average length."""
    kept: list[ShardRows] = []
    for shard in shards:
        left = shard.samples if limit is None else min(shard.samples, limit - sum(one.samples for one in kept))
        if left > 0:
            kept.append(shard._replace(samples=left, tokens=shard.tokens * left // shard.samples))
    return kept


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


def read_rows(reader: RowReader, rows: Rows, shards: Sequence[ShardRows], uri: str, **options: Any) -> ray.data.Dataset:
    """A dataset of `RayhsDatasource`; ``options`` are those of `ray.data.read_datasource`."""
    return ray.data.read_datasource(RayhsDatasource(reader, rows, shards, uri), **options)
