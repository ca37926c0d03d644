"""Read single samples out of shards of either format: a cached header a shard, one range read a sample."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import pyarrow as pa
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

    def copied(self) -> StoredSample:
        """The same in memory of its own: what was read together shares one piece of it."""
        states, scales = ({k: array.copy() for k, array in part.items()} for part in (self.states, self.scales))
        return StoredSample(self.token_ids.copy(), self.loss_mask.copy(), states, scales)

    def engine_states(self, dtype: str) -> dict[int, Array]:
        """States by layer as they are stored; those of float8_e4m3fn in ``dtype``, the engine's."""
        return {k: self.engine_state(k, dtype) for k in self.states}

    def engine_state(self, layer: int, dtype: str) -> Array:
        """As `engine_states`, of one layer."""
        states = self.states[layer]
        return fp8.dequantize(states, self.scales[layer], dtype) if self.scales else states


@dataclass(frozen=True)
class Place:
    """A sample as the index has it, and which of its tokens are wanted: ``first`` to ``stop``, by default all."""

    index: int
    token_start: int
    num_tokens: int
    first: int = 0
    stop: int | None = None

    @property
    def count(self) -> int:
        return (self.num_tokens if self.stop is None else self.stop) - self.first


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

    def read(self, name: str, index: int, token_start: int, num_tokens: int) -> StoredSample:
        """Sample ``index``, which the dataset's index puts at ``token_start`` of object ``name``; see `read_many`."""
        return self.read_many(name, [Place(index, token_start, num_tokens)])[0]

    def read_many(self, name: str, places: Sequence[Place]) -> list[StoredSample]:
        """Samples of one object, read at once: what lies side by side in one piece.

        Raises:
            ObjectNotFound, StoreError: the object is missing or can't be read.
            FormatError: it is damaged, or holds another sample at a place.
        """
        try:
            shard = self._shards.get(name, lambda: open_shard(self._store, self._record, name))
        except FormatError as error:
            raise FormatError(f"{error}; run rayhs verify {self._store.uri}") from None
        try:
            if isinstance(shard, TensorShard):
                return self._read_tensors(name, shard, places)
            return self._read_rows(name, shard, places)
        except FormatError as error:
            raise FormatError(f"{name}: {error}; run rayhs verify {self._store.uri}") from None

    def _read_tensors(self, name: str, shard: TensorShard, places: Sequence[Place]) -> list[StoredSample]:
        names = (*map(state_name, self._layers), *self._scale_names, "token_ids", "loss_mask")
        wanted = [shard.tensors[n] for n in names]
        for place in places:
            if shard.places.get(place.index) != (place.token_start, place.num_tokens):
                last = place.token_start + place.num_tokens - 1
                raise FormatError(f"sample {place.index} is not at rows {place.token_start}..{last}")
        ranges = [codec_range(t, place.token_start + place.first, place.count) for place in places for t in wanted]
        data = iter(self._store.get_ranges(name, ranges))
        return [self._sample([codec.decode(t, next(data), place.count) for t in wanted]) for place in places]

    def _sample(self, arrays: Sequence[Array]) -> StoredSample:
        """Of states, scales, token ids and loss mask, in this order."""
        *states_and_scales, token_ids, loss_mask = arrays
        states, scales = states_and_scales[: len(self._layers)], states_and_scales[len(self._layers) :]
        return StoredSample(
            token_ids,
            loss_mask,
            dict(zip(self._layers, states, strict=True)),
            dict(zip(self._layers, scales, strict=False)),
        )

    def _read_rows(self, name: str, shard: ParquetShard, places: Sequence[Place]) -> list[StoredSample]:
        columns = ("index", "token_ids", "loss_mask", *map(state_name, self._layers), *self._scale_names)
        for place in places:
            if place.index not in shard.places:
                raise FormatError(f"sample {place.index} is not in it")
        groups = [shard.places[place.index] for place in places]
        chunks = [parquet_codec.shard_chunks(shard.groups[group], columns) for group in groups]
        data = iter(self._store.get_ranges(name, [(c.start, c.length) for own in chunks for c in own]))
        samples = []
        for place, group, own in zip(places, groups, chunks, strict=True):
            row = parquet_codec.read_row(shard.footer, group, own, [next(data) for _ in own], shard.object_bytes)
            if row["index"][0].as_py() != place.index:
                raise FormatError(f"row group {group} is not sample {place.index}")
            sample = self._sample(self._decoded(row))
            if sample.lengths != {place.num_tokens}:
                found = sorted(sample.lengths)
                raise FormatError(f"sample {place.index} has {found} tokens, the index says {place.num_tokens}")
            samples.append(sample.tokens(place.first, place.first + place.count))
        return samples

    def _decoded(self, row: pa.Table) -> list[Array]:
        hidden, dtype = self._record.hidden_size, self._record.dtype
        return [
            *(parquet_codec.decode_states(row[state_name(k)], hidden, dtype) for k in self._layers),
            *(parquet_codec.decode_list(row[name], np.float32) for name in self._scale_names),
            parquet_codec.decode_list(row["token_ids"], np.int32),
            parquet_codec.decode_list(row["loss_mask"], np.uint8),
        ]


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
