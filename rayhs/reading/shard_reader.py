"""Read single samples out of shards of either format: a cached header a shard, one range read a sample."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import pyarrow.parquet as pq

from rayhs import codec, fp8, parquet_codec
from rayhs.codec import Array, StoredTensor, state_name
from rayhs.errors import FormatError, ObjectNotFound
from rayhs.layout import DatasetRecord
from rayhs.parquet_footer import Group, footer_bytes
from rayhs.reading.lru import LruCache
from rayhs.store import Store

_FIRST_READ = 64 * 1024
_HEADERS = 64


@dataclass(frozen=True, eq=False)
class StoredSample:
    """What a shard holds of one sample: ids int32 `[tokens]`, mask uint8 `[tokens]`, states `[tokens, hidden]`.

    Of float8_e4m3fn states it has ``scales``, float32 `[tokens]` a layer.
    """

    token_ids: Array
    loss_mask: Array
    states: Mapping[int, Array]
    scales: Mapping[int, Array]

    @property
    def lengths(self) -> set[int]:
        """Of all arrays; of a sound sample there is one."""
        return {len(a) for a in (*self.states.values(), *self.scales.values(), self.token_ids, self.loss_mask)}

    def tokens(self, first: int, stop: int) -> StoredSample:
        """Some of the tokens, as views."""
        some = slice(first, stop)
        states, scales = ({k: array[some] for k, array in part.items()} for part in (self.states, self.scales))
        return StoredSample(self.token_ids[some], self.loss_mask[some], states, scales)

    def engine_states(self, dtype: str) -> dict[int, Array]:
        """States by layer as they are stored; those of float8_e4m3fn in ``dtype``, the engine's."""
        return {k: fp8.dequantize(s, self.scales[k], dtype) if self.scales else s for k, s in self.states.items()}


@dataclass(frozen=True)
class TensorShard:
    """The parsed header of a safetensors shard and the place of each of its samples."""

    tensors: Mapping[str, StoredTensor]
    metadata: Mapping[str, str]
    tokens: int
    places: Mapping[int, tuple[int, int]]  # sample index -> first row, number of rows


@dataclass(frozen=True)
class ParquetShard:
    """The footer of a Parquet shard and the row group of each of its samples."""

    footer: pq.FileMetaData
    groups: Sequence[Group]
    metadata: Mapping[str, str]
    places: Mapping[int, int]  # sample index -> row group
    object_bytes: int


Shard: TypeAlias = TensorShard | ParquetShard


class ShardReader:
    """Reads samples of a dataset's shards; picklable, safe for many threads."""

    def __init__(self, store: Store, record: DatasetRecord, layers: Sequence[int]) -> None:
        self._store = store
        self._record = record
        self._layers = tuple(layers)
        self._scale_names = codec.scale_names(layers, record.dtype)
        self._shards: LruCache[str, Shard] = LruCache(_HEADERS)

    def read(
        self, name: str, index: int, token_start: int, num_tokens: int, first: int = 0, stop: int | None = None
    ) -> StoredSample:
        """Sample ``index``, which the dataset's index puts at ``token_start`` of object ``name``.

        ``first`` and ``stop`` are those of the tokens wanted, within the sample.

        Raises:
            ObjectNotFound, StoreError: the object is missing or can't be read.
            FormatError: it is damaged, or holds another sample at this place.
        """
        shard = self._shards.get(name, lambda: open_shard(self._store, self._record, name))
        end = num_tokens if stop is None else stop
        try:
            if isinstance(shard, TensorShard):
                if shard.places.get(index) != (token_start, num_tokens):
                    end_row = token_start + num_tokens - 1
                    raise FormatError(f"sample {index} is not at rows {token_start}..{end_row}")
                sample = self._read_tensors(name, shard, token_start + first, end - first)
            else:
                sample = self._read_row(name, shard, index, num_tokens).tokens(first, end)
        except FormatError as error:
            raise FormatError(f"{name}: {error}; run rayhs verify {self._store.uri}") from None
        return sample

    def _read_tensors(self, name: str, shard: TensorShard, start: int, count: int) -> StoredSample:
        names = (*map(state_name, self._layers), *self._scale_names, "token_ids", "loss_mask")
        wanted = [shard.tensors[n] for n in names]
        data = self._store.get_ranges(name, [codec_range(tensor, start, count) for tensor in wanted])
        *arrays, token_ids, loss_mask = (codec.decode(t, d, count) for t, d in zip(wanted, data, strict=True))
        states, scales = arrays[: len(self._layers)], arrays[len(self._layers) :]
        return self._sample(token_ids, loss_mask, states, scales)

    def _sample(self, token_ids: Array, loss_mask: Array, states: list[Array], scales: list[Array]) -> StoredSample:
        return StoredSample(
            token_ids,
            loss_mask,
            dict(zip(self._layers, states, strict=True)),
            dict(zip(self._layers, scales, strict=False)),
        )

    def _read_row(self, name: str, shard: ParquetShard, index: int, num_tokens: int) -> StoredSample:
        if index not in shard.places:
            raise FormatError(f"sample {index} is not in it")
        columns = ("index", "token_ids", "loss_mask", *map(state_name, self._layers), *self._scale_names)
        group = shard.places[index]
        chunks = parquet_codec.shard_chunks(shard.groups[group], columns)
        data = self._store.get_ranges(name, [(c.start, c.length) for c in chunks])
        row = parquet_codec.read_row(shard.footer, group, chunks, data, shard.object_bytes)
        if row["index"][0].as_py() != index:
            raise FormatError(f"row group {group} is not sample {index}")
        hidden, dtype = self._record.hidden_size, self._record.dtype
        sample = self._sample(
            parquet_codec.decode_list(row["token_ids"], np.int32),
            parquet_codec.decode_list(row["loss_mask"], np.uint8),
            [parquet_codec.decode_states(row[state_name(k)], hidden, dtype) for k in self._layers],
            [parquet_codec.decode_list(row[name], np.float32) for name in self._scale_names],
        )
        if sample.lengths != {num_tokens}:
            raise FormatError(f"sample {index} has {sorted(sample.lengths)} tokens, the index says {num_tokens}")
        return sample


def codec_range(tensor: StoredTensor, row: int, rows: int) -> tuple[int, int]:
    """Start and length in bytes of ``rows`` rows of a tensor from ``row`` on."""
    row_bytes = tensor.nbytes // tensor.shape[0]
    return tensor.start + row * row_bytes, rows * row_bytes


def open_shard(store: Store, record: DatasetRecord, name: str) -> Shard:
    """Read and check the header of an object: format, tensors, dtype and sizes as ``record`` says.

    Raises:
        ObjectNotFound, StoreError: the object is missing or can't be read.
        FormatError: it is not a shard of this dataset; one line that names the object.
    """
    size = store.size(name)
    if size is None:
        raise ObjectNotFound(f"{store.uri}/{name}: the shard is missing; run rayhs verify {store.uri}")
    try:
        if record.shard_format == "parquet":
            return _open_parquet(store, record, name, size)
        return _open_tensors(store, record, name, size)
    except FormatError as error:
        raise FormatError(f"{name}: {error}") from None


def _open_tensors(store: Store, record: DatasetRecord, name: str, size: int) -> TensorShard:
    (head,) = store.get_ranges(name, [(0, min(size, _FIRST_READ))])
    length = codec.header_length(bytes(head[:8]), size)
    if 8 + length > len(head):
        (head,) = store.get_ranges(name, [(0, 8 + length)])
    tensors, metadata = codec.parse_header(bytes(head[8 : 8 + length]), size)
    tokens = check_tensors(tensors, record)
    wanted = [tensors["offsets"], tensors["sample_index"]]
    data = store.get_ranges(name, [(t.start, t.nbytes) for t in wanted])
    offsets, index = (codec.decode(t, d) for t, d in zip(wanted, data, strict=True))
    return TensorShard(tensors, metadata, tokens, sample_places(offsets, index, tokens))


def check_tensors(tensors: Mapping[str, StoredTensor], record: DatasetRecord) -> int:
    """The number of tokens of a shard, whose tensors must be those of the dataset.

    Raises:
        FormatError: a tensor is missing, unknown, or has another dtype or shape.
    """
    tokens, samples = _rows(tensors.get(state_name(record.layers[0]))), _rows(tensors.get("sample_index"))
    specs = codec.tensors_of_shard(record.layers, record.hidden_size, record.dtype, tokens, samples)
    expected = {spec.name: spec for spec in specs}
    for name, want in expected.items():
        have = tensors.get(name)
        if have is None or have.dtype != want.dtype or have.shape != want.shape:
            found = "is missing" if have is None else f"is {have.dtype} {list(have.shape)}"
            raise FormatError(f"tensor {name!r} {found}; the dataset's is {want.dtype} {list(want.shape)}")
    unknown = sorted(set(tensors) - set(expected))
    if unknown:
        raise FormatError(f"unknown tensor {unknown[0]!r}")
    return tokens


def _rows(tensor: StoredTensor | None) -> int:
    return tensor.shape[0] if tensor is not None and tensor.shape else 0


def sample_places(offsets: Array, index: Array, tokens: int) -> dict[int, tuple[int, int]]:
    """First row and number of rows of each sample, from a shard's own tables; raises FormatError."""
    counts = np.diff(offsets)
    if offsets[0] != 0 or offsets[-1] != tokens or (counts <= 0).any() or len(set(index.tolist())) != len(index):
        raise FormatError(f"its offsets are not consecutive samples of {tokens} tokens")
    return dict(zip(index.tolist(), zip(offsets[:-1].tolist(), counts.tolist(), strict=True), strict=True))


def _open_parquet(store: Store, record: DatasetRecord, name: str, size: int) -> ParquetShard:
    first = min(size, _FIRST_READ)
    (tail,) = store.get_ranges(name, [(size - first, first)])
    length = footer_bytes(tail, size)
    if length > len(tail):
        (tail,) = store.get_ranges(name, [(size - length, length)])
    footer, groups = parquet_codec.parse_footer(tail, size)
    schema = parquet_codec.arrow_schema(footer)
    parquet_codec.check_schema(schema, record.layers, record.hidden_size, record.dtype)
    metadata = {k.decode(errors="replace"): v.decode(errors="replace") for k, v in (schema.metadata or {}).items()}
    return ParquetShard(footer, groups, metadata, parquet_codec.sample_groups(groups), size)
