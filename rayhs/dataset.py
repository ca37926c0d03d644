"""Read a dataset back from a folder or a bucket; needs neither Ray, vLLM nor (for numpy) torch."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from functools import partial
from typing import Any, SupportsIndex, overload

import numpy as np
import pyarrow as pa

from rayhs.codec import token_bytes
from rayhs.config import StorageConfig
from rayhs.errors import ConfigError, IncompleteDataset, SampleError
from rayhs.layers import refuse_disorder
from rayhs.layout import DatasetRecord, Summary
from rayhs.reading.ahead import in_order
from rayhs.reading.catalog import committed_shards, read_dataset_record, read_summary
from rayhs.reading.sample import LayerStates, Sample
from rayhs.reading.shard_reader import Place, ShardReader, StoredSample
from rayhs.reading.slices import Slice, as_position
from rayhs.store import Store, open_store
from rayhs.views.methods import Views

__all__ = ["Dataset", "Sample", "open_dataset"]


def open_dataset(
    uri: str,
    *,
    layers: Collection[int] | None = None,
    storage: StorageConfig | None = None,
    partial: bool = False,
) -> Dataset:
    """Open the dataset at ``uri``: a local path, ``file://`` or ``s3://``.

    Args:
        layers: read these layers only (each is a byte range of its own), ascending; default all stored ones.
        storage: S3 endpoint, region and profile that are not in the usual AWS variables and files.
        partial: open an unfinished dataset too and show what is committed so far.

    Raises:
        IncompleteDataset: its run has not finished and ``partial`` is not set.
        ConfigError: a layer that is not stored, layers out of order, or an address of an unknown kind.
        ObjectNotFound, StoreError, FormatError: no dataset, no access, or a damaged one.

    Example:
        >>> ds = rayhs.open("states", layers=[15])
        >>> ds[0].hidden_states[15].shape
        (8, 8)
    """
    store = open_store(uri, storage or StorageConfig())
    record, summary = read_dataset_record(store), read_summary(store)
    if summary is None and not partial:
        done, planned = len(committed_shards(store)), len(record.plan.shard_ids())
        raise IncompleteDataset(
            f"{store.uri}: not finished, {done} of {planned} shards are committed; "
            "run rayhs extract (or import) again to finish it, or open it with partial=True"
        )
    return Dataset(store, record, summary, layers)


class Dataset(Views):
    """Samples of one dataset, by position, by id or one after the other; and as other libraries want them (`Views`).

    A position is a row of `index`: every planned sample in input order, so in a complete dataset
    position and ``Sample.index`` are the same number. Rows that failed or were rejected keep their
    position but have no states: reading one raises SampleError, iterating passes over them.

    Reading a sample is one range read of the layers asked for, after a cached header a shard.
    Any number of threads may read at once; a pickled dataset opens again where it is unpickled.

    Example:
        >>> len(ds), ds.complete, int(ds.good.sum()), ds.info.plan.samples
        (24, True, 22, 24)
        >>> ds.model, ds.layers, ds.hidden_size, ds.dtype, ds.token_bytes
        ('tests/random', (2, 15, 27), 8, 'float32', 96)
        >>> ds.uri.endswith("states") and ds.summary.ok
        22
    """

    def __init__(
        self, store: Store, record: DatasetRecord, summary: Summary | None, layers: Collection[int] | None = None
    ) -> None:
        super().__init__(store, record, summary)
        self.layers = _chosen_layers(record, layers)
        self._shards = ShardReader(store, record, self.layers)

    @property
    def model(self) -> str:
        return self.info.model

    @property
    def hidden_size(self) -> int:
        return self.info.hidden_size

    @property
    def dtype(self) -> str:
        """Name of the stored dtype: float32, float16, bfloat16 or float8_e4m3fn."""
        return self.info.dtype

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's states of the layers read, as they are stored."""
        return token_bytes(self.layers, self.hidden_size, self.dtype)

    @overload
    def __getitem__(self, key: SupportsIndex) -> Sample: ...

    @overload
    def __getitem__(self, key: slice) -> Slice: ...

    def __getitem__(self, key: SupportsIndex | slice) -> Sample | Slice:
        """The sample at a position, negative ones from the end; or of a slice, a `Slice`, which reads nothing yet.

        A slice behaves as the dataset does: ``len(ds[2:10])`` counts positions without states too, iterating
        passes over them.

        Raises:
            TypeError: neither a whole number nor a slice.
            IndexError: no such position.
            SampleError: the sample failed or was rejected; the message has its id and reason.
            FormatError, StoreError: its shard is damaged or can't be read.

        Example:
            >>> [sample.sample_id for sample in ds[-3:]]
            ['row-21', 'row-22', 'row-23']
            >>> ds[17].token_ids.dtype
            dtype('int32')
        """
        if isinstance(key, slice):
            return Slice(self, range(len(self))[key])
        return self.read(as_position(key))

    def read(self, position: int, start: int = 0, stop: int | None = None) -> Sample:
        """As ``dataset[position]``, with the tokens ``start`` to ``stop`` (default the last) and their states only.

        Of a safetensors shard no other bytes are read.

        Raises:
            IndexError: no such position, or no tokens there; and as ``dataset[position]``.

        Example:
            >>> ds.read(17, stop=2).hidden_states[15].shape
            (2, 8)
        """
        if not -len(self) <= position < len(self):
            raise IndexError(f"sample {position} of a dataset of {len(self)} samples")
        row = self.index_row(position % len(self))
        if row["status"] != "ok":
            what = "failed" if row["status"] == "failed" else "was rejected"
            why = row["reason"] or "no reason recorded"
            raise SampleError(f"sample {row['sample_id']} (position {position}) {what}: {why}")
        tokens = row["num_tokens"]
        end = tokens if stop is None else stop
        if not 0 <= start < end <= tokens:
            raise IndexError(f"tokens {start} to {end} of sample {row['sample_id']}, which has {tokens}")
        place = Place(row["index"], row["token_start"], tokens, start, end)
        return self._sample(row, self._shards.read_many(row["shard"], [place])[0])

    def read_together(self, positions: Sequence[int], own_memory: bool = False) -> list[Sample]:
        """Good samples of one shard, ascending, read at once: what lies side by side in one piece.

        Their arrays are views of what was read, which stays as long as one of them does, or have memory of their own.

        Raises:
            FormatError, StoreError: the shard is damaged or can't be read.

        Example:
            >>> [sample.index for sample in ds.read_together([8, 9, 11])]
            [8, 9, 11]
        """
        first = positions[0]
        some = self._rows.slice(first, positions[-1] + 1 - first)
        rows: list[dict[str, Any]] = some.take(pa.array(np.asarray(positions) - first)).to_pylist()
        places = [Place(row["index"], row["token_start"], row["num_tokens"]) for row in rows]
        stored = self._shards.read_many(rows[0]["shard"], places)
        return [self._sample(row, one.copied() if own_memory else one) for row, one in zip(rows, stored, strict=True)]

    def _sample(self, row: Mapping[str, Any], stored: StoredSample) -> Sample:
        return Sample(
            sample_id=row["sample_id"],
            index=row["index"],
            token_ids=stored.token_ids,
            loss_mask=stored.loss_mask,
            hidden_states=LayerStates(stored.engine_states(self.info.engine_dtype)),
            status=row["status"],
            _plan=self._plan,
            _quantized=LayerStates({k: (stored.states[k], scales) for k, scales in stored.scales.items()}),
        )

    def by_id(self, sample_id: str) -> Sample:
        """The sample of that id. Of rows that share an id (repeats are rejected) it is the good one.

        Raises:
            KeyError: no such id.
            SampleError: the sample failed or was rejected.

        Example:
            >>> ds.by_id("row-17").index
            17
            >>> ds.by_id("row-4")
            Traceback (most recent call last):
            rayhs.errors.SampleError: sample row-4 (position 4) was rejected: the prompt is empty
        """
        return self[self.position_of(sample_id)]

    def __iter__(self) -> Iterator[Sample]:
        """Good samples in order, read ahead by a few; see `samples`."""
        return self.samples()

    def __reversed__(self) -> Iterator[Sample]:
        return self.samples(range(len(self))[::-1])

    def samples(self, positions: Iterable[int] | None = None, *, prefetch: int = 8) -> Iterator[Sample]:
        """Good samples at ``positions`` (default all), in the order given; others are passed over.

        Up to ``prefetch`` samples are in memory or on their way besides the one in use.

        Raises:
            IndexError: a position outside the dataset.
            FormatError, StoreError: a damaged or unreadable shard, at the sample's turn.

        Example:
            >>> [sample.index for sample in ds.samples([9, 4, 3], prefetch=2)]  # 4 was rejected
            [9, 3]
        """
        if prefetch < 1:
            raise ConfigError(f"prefetch={prefetch}: give at least 1")
        wanted = range(len(self)) if positions is None else positions
        calls = (partial(self.read, int(position)) for position in wanted if self._is_good(position))
        return in_order(calls, prefetch, min(prefetch, 8))

    def with_layers(self, layers: Collection[int]) -> Dataset:
        """The same dataset, reading only ``layers``.

        Raises:
            ConfigError: a layer that is not stored, none, or not in the order in which samples have them, ascending.

        Example:
            >>> list(ds.with_layers([15])[0].hidden_states)
            [15]
        """
        view = Dataset(self._store, self.info, self.summary, layers)
        view._index_files = self._index_files
        for name in ("index", "outline", "_ids", "good"):
            if name in self.__dict__:
                view.__dict__[name] = self.__dict__[name]
        return view

    def tokens_only(self) -> Dataset:
        """The same dataset, reading no states: its samples have token ids and loss masks alone.

        Example:
            >>> sum(len(sample.token_ids) for sample in ds.tokens_only())
            114
        """
        view = self.with_layers(self.info.layers)
        view.layers = ()
        view._shards = ShardReader(self._store, self.info, ())
        return view

    def _choose(self, layers: int | Collection[int] | None) -> Dataset:
        if layers is None:
            return self
        return self.with_layers([layers] if isinstance(layers, int | np.integer) else layers)

    def __repr__(self) -> str:
        state = "complete" if self.complete else "unfinished"
        return f"Dataset({self.uri!r}, model={self.model!r}, layers={list(self.layers)}, {self.dtype}, {state})"

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k not in ("_ids", "good")}

    def _is_good(self, position: int) -> bool:
        if not -len(self) <= position < len(self):
            raise IndexError(f"sample {position} of a dataset of {len(self)} samples")
        return bool(self.good[position])


def _chosen_layers(record: DatasetRecord, layers: Collection[int] | None) -> tuple[int, ...]:
    if layers is not None and not isinstance(layers, Iterable):
        raise ConfigError(f"layers: {layers!r} is no list of layer ids; the dataset has layers {record.layers}")
    given = list(record.layers if layers is None else layers)
    unknown = [layer for layer in given if not isinstance(layer, int | np.integer) or layer not in record.layers]
    if unknown or not given:
        wrong = f"layer {unknown[0]!r} is not stored" if unknown else "no layer chosen"
        raise ConfigError(f"{wrong}; the dataset has layers {record.layers}")
    chosen = sorted(map(int, given)) if isinstance(layers, Set) else [int(layer) for layer in given]
    refuse_disorder(chosen, "samples")
    return tuple(chosen)
