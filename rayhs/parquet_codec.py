"""The bytes of a Parquet shard: one row and one row group a sample, so that the states of one
sample and layer are one column chunk.

Columns: ``index`` int64, ``sample_id`` string, ``token_ids`` list<int32>, ``loss_mask`` list<uint8>
and ``hidden_states.<k>`` for each layer. float32 and float16 states are `[tokens][hidden]` nested
lists. bfloat16 and float8_e4m3fn have no Arrow type: they are one little-endian byte string a sample,
with dtype and shape in the field's metadata; ``hidden_scales.<k>`` list<float32> belongs to float8_e4m3fn.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rayhs.codec import STATE_DTYPES, Array, scale_names, state_name
from rayhs.errors import FormatError, SampleError, one_line
from rayhs.parquet_footer import Chunk, Group, parse_groups
from rayhs.parquet_pages import ARROW_ERRORS, Buffer, check_pages, chunks_of, read_group

# index, sample_id, token_ids int32 [tokens], loss_mask uint8 [tokens], states {layer: [tokens, hidden]},
# scales {layer: [tokens]} (empty but for float8_e4m3fn)
ShardRow = tuple[int, str, Array, Array, Mapping[int, Array], Mapping[int, Array]]

_MAX_VALUE_BYTES = 2**31 - 2**16  # Parquet counts the bytes of a page in an int32
_TOKENS = pa.list_(pa.field("element", pa.int32(), nullable=False))
_MASK = pa.list_(pa.field("element", pa.uint8(), nullable=False))
_SCALES = pa.list_(pa.field("element", pa.float32(), nullable=False))
_ARROW = {"float32": pa.float32(), "float16": pa.float16()}


def shard_schema(
    layers: Sequence[int], hidden: int, dtype: str, metadata: Mapping[str, str] | None = None
) -> pa.Schema:
    """The Arrow schema of a shard; ``metadata`` (the identity) becomes the file's metadata."""
    stated = {"dtype": dtype, "shape": f"tokens,{hidden}"}
    kind = _state_type(hidden, dtype)
    fields = [
        pa.field("index", pa.int64(), nullable=False),
        pa.field("sample_id", pa.string(), nullable=False),
        pa.field("token_ids", _TOKENS, nullable=False),
        pa.field("loss_mask", _MASK, nullable=False),
        *(pa.field(state_name(k), kind, nullable=False, metadata=stated) for k in layers),
        *(pa.field(name, _SCALES, nullable=False) for name in scale_names(layers, dtype)),
    ]
    return pa.schema(fields, metadata=dict(metadata or {}))


def write_shard(
    sink: BinaryIO | pa.NativeFile,
    samples: Iterable[ShardRow],
    *,
    layers: Sequence[int],
    hidden: int,
    dtype: str,
    metadata: Mapping[str, str] | None = None,
) -> int:
    """Write one row group a sample to ``sink``, holding one sample in memory at a time.

    Args:
        sink: a binary file open for writing; it is not closed.
        samples: good samples in plan order: index, sample id, token ids int32 `[tokens]`, loss mask
            uint8 `[tokens]`, for each layer its states `[tokens, hidden]` in ``dtype``, and for each
            layer of float8_e4m3fn its scales float32 `[tokens]`.

    Returns:
        The number of samples written.

    Raises:
        SampleError: a sample whose states of one layer are over Parquet's 2 GiB a value.
    """
    schema = shard_schema(layers, hidden, dtype, metadata)
    rows = 0
    # Statistics of ``index`` alone let a reader find a sample's row group from the footer.
    with pq.ParquetWriter(
        sink, schema, compression="none", use_dictionary=False, write_statistics=["index"], write_page_checksum=True
    ) as writer:
        for row in samples:
            writer.write_batch(_encode_row(row, layers, schema), row_group_size=1)
            rows += 1
    return rows


def parse_footer(tail: Buffer, object_bytes: int) -> tuple[pq.FileMetaData, list[Group]]:
    """Arrow's and our own view of the footer, from an object's last bytes (at least `footer_bytes`).

    Raises:
        FormatError: not a Parquet footer.
    """
    groups = parse_groups(tail, object_bytes)
    try:
        footer = pq.read_metadata(pa.BufferReader(tail))
    except ARROW_ERRORS as error:
        raise FormatError(f"not a Parquet file: {one_line(error, 200)}") from None
    if footer.num_row_groups != len(groups):
        raise FormatError("Parquet footer: ambiguous number of row groups")
    return footer, groups


def arrow_schema(footer: pq.FileMetaData) -> pa.Schema:
    """The Arrow schema of a parsed footer; raises FormatError."""
    try:
        return footer.schema.to_arrow_schema()
    except ARROW_ERRORS as error:
        raise FormatError(f"not a Parquet shard: {one_line(error, 200)}") from None


def check_schema(schema: pa.Schema, layers: Sequence[int], hidden: int, dtype: str) -> None:
    """Raises FormatError where ``schema`` is not a shard of these layers, size and dtype."""
    for want in shard_schema(layers, hidden, dtype):
        position = schema.get_field_index(want.name)
        have = schema.field(position) if position >= 0 else None
        if have is None or not have.type.equals(want.type):
            found = "is missing" if have is None else f"is {have.type}"
            raise FormatError(f"column {want.name!r} {found}; the dataset's is {want.type}")


def sample_groups(groups: Sequence[Group]) -> dict[int, int]:
    """Row group of each sample ``index``, from the statistics in the footer.

    Raises:
        FormatError: a row group without them, with more than one row, or an index that repeats.
    """
    found: dict[int, int] = {}
    for number, group in enumerate(groups):
        minimum = next((c.minimum for c in group.chunks if c.column == "index"), None)
        if group.rows != 1 or minimum is None or len(minimum) != 8:
            raise FormatError(f"row group {number} is not one sample with statistics of its index")
        (index,) = struct.unpack("<q", minimum)
        if found.setdefault(index, number) != number:
            raise FormatError(f"sample {index} is in two row groups")
    return found


def shard_chunks(group: Group, columns: Sequence[str]) -> list[Chunk]:
    """The column chunks of ``columns`` in one row group.

    Raises:
        FormatError: a column is missing or twice, or compressed (no shard is written so).
    """
    chunks = chunks_of(group, columns)
    for chunk in chunks:
        if chunk.compressed:
            raise FormatError(f"column {chunk.column!r} is compressed; shards are written without compression")
    return chunks


def read_row(
    footer: pq.FileMetaData, group: int, chunks: Sequence[Chunk], parts: Sequence[Buffer], object_bytes: int
) -> dict[str, pa.Array]:
    """Decode the columns of one row group, a sample, from its chunks' bytes ``parts``.

    Raises:
        FormatError: pages that don't decode, or that claim more than they hold.
    """
    for chunk, part in zip(chunks, parts, strict=True):
        check_pages(part, chunk, most=len(part), plain=True)
    table = read_group(footer, group, chunks, parts, object_bytes)
    return {name: _only(table.column(name)) for name in table.column_names}


def decode_states(column: pa.Array, hidden: int, dtype: str) -> Array:
    """States `[tokens, hidden]` in ``dtype`` of a column of one row; a view of the column's memory.

    Raises:
        FormatError: a null, or a length that is not whole tokens.
    """
    if dtype not in _ARROW:
        flat = np.frombuffer(column[0].as_buffer() or b"", dtype=np.uint8)
        if flat.size % (STATE_DTYPES[dtype].itemsize * hidden):
            raise FormatError(f"{flat.size} bytes of states are not whole tokens of {hidden} {dtype} values")
        return flat.view(STATE_DTYPES[dtype]).reshape(-1, hidden)
    rows = column.flatten()
    values = rows.flatten()
    if rows.null_count or values.null_count or len(values) != len(rows) * hidden:
        raise FormatError("the states have nulls or rows of another length")
    array: Array = values.to_numpy(zero_copy_only=True)
    return array.reshape(-1, hidden)


def decode_list(column: pa.Array, dtype: type[np.generic]) -> Array:
    """The values of a list column of one row as a 1-d array. Raises FormatError on a null."""
    values = column.flatten()
    if column.null_count or values.null_count:
        raise FormatError("a list has nulls")
    array: Array = values.to_numpy(zero_copy_only=True)
    return array.astype(dtype, copy=False)


def _state_type(hidden: int, dtype: str) -> pa.DataType:
    if dtype not in _ARROW:
        return pa.binary()
    return pa.list_(pa.field("element", pa.list_(pa.field("element", _ARROW[dtype], nullable=False), hidden), False))


def _encode_row(row: ShardRow, layers: Sequence[int], schema: pa.Schema) -> pa.RecordBatch:
    index, sample_id, token_ids, loss_mask, states, scales = row
    for k in layers:
        check_value(states[k], sample_id)
    columns = [
        pa.array([index], pa.int64()),
        pa.array([sample_id], pa.string()),
        encode_lists([np.asarray(token_ids, np.int32)], _TOKENS),
        encode_lists([np.asarray(loss_mask, np.uint8)], _MASK),
    ]
    columns += [encode_states([states[k]], schema.field(state_name(k)).type) for k in layers]
    columns += [encode_lists([scales[k]], _SCALES) for k in layers if k in scales]
    return pa.record_batch(columns, schema=schema)


def check_value(states: Array, sample_id: str) -> None:
    """Raises SampleError for states of one layer that are too large for a value of Parquet or Arrow."""
    if states.nbytes > _MAX_VALUE_BYTES:
        raise SampleError(
            f"sample {sample_id}: {states.nbytes} bytes of states a layer are over Parquet's 2 GiB a value; "
            "use shards.format: safetensors, and read it by its position"
        )


def encode_states(states: Sequence[Array], kind: pa.DataType) -> pa.Array:
    """A row for each of ``states`` `[tokens, hidden]`, of a type of `shard_schema`; one alone is not copied."""
    if pa.types.is_binary(kind):
        # As bytes: numpy joins the values of ml_dtypes one by one.
        data = _joined([np.ascontiguousarray(part).view(np.uint8).reshape(-1) for part in states])
        ends = _offsets([part.nbytes for part in states])
        return pa.BinaryArray.from_buffers(kind, len(states), [None, ends.buffers()[1], pa.py_buffer(data)])
    rows = pa.FixedSizeListArray.from_arrays(pa.array(_joined(states).reshape(-1)), type=kind.value_type)
    return pa.ListArray.from_arrays(_offsets([len(part) for part in states]), rows, type=kind)


def encode_lists(values: Sequence[Array], kind: pa.DataType) -> pa.Array:
    """A row for each 1-d array, of a list type of `shard_schema`; one alone is not copied."""
    return pa.ListArray.from_arrays(_offsets([len(part) for part in values]), pa.array(_joined(values)), type=kind)


def _joined(arrays: Sequence[Array]) -> Array:
    return np.ascontiguousarray(arrays[0]) if len(arrays) == 1 else np.concatenate(arrays)


def _offsets(lengths: Sequence[int]) -> pa.Array:
    return pa.array(np.cumsum([0, *lengths]), pa.int32())


def _only(column: pa.ChunkedArray) -> pa.Array:
    if len(column) != 1 or column.null_count:
        raise FormatError("a row group is not one sample without nulls")
    return column.combine_chunks() if column.num_chunks != 1 else column.chunk(0)
