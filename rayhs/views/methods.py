"""The methods of a dataset that give it to other libraries, which are imported when one is called."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from rayhs.reading.indexed import Indexed

if TYPE_CHECKING:
    from ray.data import Dataset as RayDataset

    from rayhs.dataset import Dataset
    from rayhs.views.arrow import Dtype
    from rayhs.views.stream import Stream
    from rayhs.views.torch import Select, TorchView


class Views(Indexed, ABC):
    """What `rayhs.Dataset` inherits: its good samples in the forms of torch, Arrow, Ray Data and SQL engines."""

    layers: tuple[int, ...]

    @abstractmethod
    def with_layers(self, layers: Collection[int]) -> Dataset: ...

    @abstractmethod
    def _choose(self, layers: int | Collection[int] | None) -> Dataset: ...

    def torch(
        self, layers: int | Collection[int] | None = None, *, window: int | None = None, select: Select = "all"
    ) -> TorchView:
        """The good samples as a map-style `torch.utils.data.Dataset`, for a DataLoader; needs torch.

        Its items are dictionaries: ``hidden_states`` `[tokens, layers, hidden]` in the stored dtype (float8 ones
        dequantised), or `[tokens, hidden]` of one layer given as a number; ``token_ids`` int64, ``loss_mask`` bool
        and ``position_ids`` int64, each `[tokens]`; ``sample_id`` and ``index``. Items are of unlike lengths:
        batch them with ``collate_fn=rayhs.pad_collate``.

        Args:
            layers: which to read, ascending as items have them; default those of this dataset.
            window: cut samples into items of so many tokens, the last of a sample shorter. Only their bytes are
                read (of a Parquet shard, those of the whole sample).
            select: ``loss`` keeps the tokens that the loss counts, possibly none of an item; ``last`` reads the
                last token of each sample.

        Raises:
            ConfigError: a layer that is not stored, layers out of order, or other arguments out of range.

        Example:
            >>> ds.torch(layers=15)[0]["hidden_states"].shape
            torch.Size([8, 8])
            >>> loader = torch.utils.data.DataLoader(ds.torch(), batch_size=4, collate_fn=rayhs.pad_collate)
            >>> next(iter(loader))["hidden_states"].shape
            torch.Size([4, 8, 3, 8])
        """
        from rayhs.views.torch import TorchView

        single = int(layers) if isinstance(layers, int | np.integer) else None
        return TorchView(self._choose(layers), single, window, select)

    def stream(
        self,
        layers: int | Collection[int] | None = None,
        *,
        shuffle_buffer: int = 0,
        seed: int = 0,
        shard: tuple[int, int] = (0, 1),
    ) -> Stream:
        """The good samples one after the other, in large reads; for training over much more than fits a cache.

        Each iteration is an epoch, or what is left of one after `rayhs.views.stream.Stream.load_state_dict`. Memory
        is that of ``shuffle_buffer`` samples, of four reads of 16 MiB and of some ten bytes a sample of the dataset.

        Args:
            layers: which to read, ascending; default those of this dataset.
            shuffle_buffer: shuffle the shards, and the samples of so many that wait in memory. 0: storage order.
            seed: of the shuffled order, which is another in every epoch.
            shard: ``(rank, world)``: this is one of ``world`` streams, which share the shards between them. Their
                lengths differ where the shards do.

        Raises:
            ConfigError: a layer that is not stored, layers out of order, or other arguments out of range.

        Example:
            >>> stream = ds.stream(layers=15, shuffle_buffer=4, shard=(0, 2))
            >>> [sample.index for sample in stream]
            [19, 18, 20, 16, 22, 0, 23, 17, 1, 3, 5, 21, 2, 6]
        """
        from rayhs.views.stream import Stream

        return Stream(self._choose(layers), shuffle_buffer, seed, shard)

    def arrow(
        self,
        layers: int | Collection[int] | None = None,
        *,
        states: bool = True,
        columns: Sequence[str] | None = None,
        dtype: Dtype = "stored",
    ) -> pa.RecordBatchReader:
        """The good samples as Arrow record batches, a row a sample, read as they are asked for; once through.

        Columns, of the types that Parquet shards have, whatever the format of this dataset's:

        - those of `index`; ``columns``, the input row's other columns as a JSON object
        - ``token_ids`` list<int32> `[tokens]`, ``loss_mask`` list<uint8> `[tokens]`
        - ``hidden_states.<k>`` for each layer: float32 and float16 as list<fixed_size_list> `[tokens][hidden]`;
          bfloat16 and float8_e4m3fn, which Arrow has not, as little-endian bytes. The field's metadata has
          ``dtype`` and ``shape``
        - ``hidden_scales.<k>`` list<float32> `[tokens]` of float8_e4m3fn: a state is its value times its token's

        Batches are of one shard and of about 16 MiB, or of one larger sample; three are read ahead. Engines that
        drop columns of a reader, as DuckDB does, drop them after the read: choose here what is read.

        Args:
            layers: which to read, ascending; default those of this dataset.
            states: False reads none.
            columns: which of the others; default all. Where only columns of the index are left, no shard is read.
            dtype: of the states: ``stored``; ``float32``, which holds every stored dtype exactly, for SQL on
                states (DuckDB takes no float16); ``float16``, where states beyond 65504 become infinite.

        Raises:
            ConfigError: a layer that is not stored, an unknown column or dtype, or no column.
            SampleError, FormatError, StoreError: while reading, of a shard or index file that is damaged or lost.

        Example:
            >>> rows = ds.arrow(layers=[15], dtype="float32")
            >>> found = duckdb.sql('select sample_id, "hidden_states.15"[num_tokens] from rows where num_tokens > 7')
            >>> len(found.fetchall())
            4
        """
        from rayhs.views.arrow import make_reader, record_batches

        wanted = self._choose(layers).layers if states else ()
        return record_batches(make_reader(self._store, self.info, wanted, columns, dtype), self._checked_index())

    def ray(
        self,
        layers: int | Collection[int] | None = None,
        *,
        states: bool = True,
        columns: Sequence[str] | None = None,
        dtype: Dtype | None = None,
        **options: Any,
    ) -> RayDataset:
        """The good samples as a `ray.data.Dataset`, a row a sample, read by a task a shard; needs Ray.

        Columns are those of `arrow`, but ``hidden_states.<k>`` are tensors: `[tokens, hidden]` in a row, an object
        array of such in a batch of numpy. Ray's tensors have neither bfloat16 nor float8, so these states come as
        float32, which holds them exactly. A task hands on blocks of about 16 MiB, or of one larger sample; of over
        8192 shards it reads several, one after the other.
        Of the layers chosen here only those are read that a ``select_columns`` right behind leaves, and no shard for
        columns of the index alone. Workers find the store's credentials where they run.

        Args:
            layers: which to read, ascending; default those of this dataset.
            states: False reads none.
            columns: which of the others; default all.
            dtype: of the states: ``float32``; ``float16``, where states beyond 65504 become infinite; ``stored``,
                which is no tensor but what `arrow` has, half the size of float32 for bfloat16. Default: as
                stored where that is float32 or float16, else float32.
            options: of `ray.data.read_datasource`, such as ``concurrency``.

        Raises:
            ConfigError: a layer that is not stored, an unknown column or dtype, or no column.
            RayTaskError: while reading, of a shard that is damaged or lost; it is our error, too.

        Example:
            >>> rows = ds.ray(layers=[15], columns=["sample_id"])
            >>> norms = rows.map_batches(lambda batch: {"norm": [np.linalg.norm(s) for s in batch["hidden_states.15"]]})
            >>> norms.count()
            22
        """
        from rayhs.views.ray import make_reader, read_rows

        wanted = self._choose(layers).layers if states else ()
        reader = make_reader(self._store, self.info, wanted, columns, dtype)
        return read_rows(reader, self._stored_rows(), self.outline.shards, self._store.uri, **options)

    def shard_uris(self) -> list[str]:
        """Addresses of the objects that hold the good samples, in order: those committed, and no others.

        Beside them may lie objects of attempts that lost or never ended, so ``shards/*`` is not the dataset.

        Example:
            >>> duckdb.read_parquet(ds.shard_uris()).shape  # of a dataset with shards.format: parquet
            (22, 7)
        """
        return [f"{self._store.uri}/{shard.name}" for shard in self.outline.shards]
