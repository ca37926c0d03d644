"""A dataset as a `torch.utils.data.Dataset`, map-style or iterable."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, Protocol

import numpy as np
import pyarrow as pa
import torch

from rayhs.codec import Array
from rayhs.errors import ConfigError
from rayhs.reading.sample import Sample
from rayhs.views.stream import Stream

Select = Literal["all", "loss", "last"]
Item = dict[str, Any]

_READERS = 8


class Readable(Protocol):
    """What is read: a `rayhs.Dataset` of the layers wanted."""

    layers: tuple[int, ...]

    @property
    def index(self) -> pa.Table: ...

    @property
    def good(self) -> Array: ...

    def read(self, position: int, start: int = 0, stop: int | None = None) -> Sample: ...


class TorchView(torch.utils.data.Dataset[Item]):
    """The good samples, or windows of them, as dictionaries of tensors; see `rayhs.Dataset.torch`.

    Picklable, so that it goes to DataLoader workers by fork or spawn (a dataset on S3 by spawn). It has
    ``__getitems__``, by which a DataLoader reads the samples of a batch at once.

    Example:
        >>> view = ds.torch(layers=15, window=4)
        >>> len(view), [len(view[item]["token_ids"]) for item in range(3)]
        (35, [4, 4, 4])
    """

    def __init__(self, dataset: Readable, layer: int | None, window: int | None, select: Select) -> None:
        _refuse(select, dataset.layers)
        if window is not None and (not isinstance(window, int | np.integer) or window < 1 or select == "last"):
            raise ConfigError(f"window={window!r}: give a whole number of tokens, and no window with select='last'")
        self._dataset, self._layer, self._window, self._select = dataset, layer, window, select
        self._positions = np.flatnonzero(dataset.good)
        self._tokens = dataset.index["num_tokens"].to_numpy()[self._positions]
        windows = np.ones_like(self._tokens) if window is None else -(-self._tokens // window)
        self._ends = np.cumsum(windows)  # items up to and with each good sample

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, item: int) -> Item:
        """The item; see `rayhs.Dataset.torch`.

        Raises:
            TypeError: not a whole number.
            IndexError: no such item.
            FormatError, StoreError: its shard is damaged or can't be read.
        """
        try:
            item = operator.index(item)
        except TypeError:
            wrong = type(item).__name__
            raise TypeError(f"an item is a whole number, not {wrong}; __getitems__ reads several") from None
        if not -len(self) <= item < len(self):
            raise IndexError(f"item {item} of {len(self)}")
        position, start, stop = self._place(item % len(self))
        return _as_item(self._dataset.read(position, start, stop), self._layer, self._select, start)

    def __getitems__(self, items: Sequence[int]) -> list[Item]:
        with ThreadPoolExecutor(min(len(items), _READERS) or 1) as pool:
            return list(pool.map(self.__getitem__, items))

    def _place(self, item: int) -> tuple[int, int, int]:
        """Position of the item's sample in the dataset, and which of its tokens."""
        sample = int(np.searchsorted(self._ends, item, side="right"))
        tokens = int(self._tokens[sample])
        start, stop = 0, tokens
        if self._select == "last":
            start = tokens - 1
        elif self._window is not None:
            before = int(self._ends[sample - 1]) if sample else 0
            start = (item - before) * self._window
            stop = min(start + self._window, tokens)
        return int(self._positions[sample]), start, stop


class TorchStream(torch.utils.data.IterableDataset[Item]):
    """A `rayhs.views.stream.Stream` for a DataLoader; the state is that of the process that iterates.

    Each worker has a part of its own, so that every sample comes once. Workers that are started anew for each
    iteration begin with this object's epoch: call `set_epoch`, or keep them (``persistent_workers=True``): those go
    on to the next epoch, also where the loader left one early, and follow `set_epoch`. A loader asks workers for more
    than it hands out, so their states are of use to torchdata's StatefulDataLoader alone, which takes and loads them.

    Example:
        >>> items = ds.stream(shuffle_buffer=4).torch(15)
        >>> first = next(iter(items))
        >>> first["index"], first["hidden_states"].shape
        (3, torch.Size([5, 8]))
    """

    def __init__(self, stream: Stream, layer: int | None, select: Select) -> None:
        _refuse(select, stream.layers)
        self._stream, self._layer, self._select = stream, layer, select
        self._split, self._begun = False, False
        # Seen by workers, however they were started: how often an epoch was set, which, and whether workers iterate.
        self._shared = torch.zeros(3, dtype=torch.int64).share_memory_()
        self._followed = 0

    def __iter__(self) -> Iterator[Item]:
        own = self._own()
        if self._split:
            self._begin_in_worker(own)
        else:
            self._shared[2] = 0
        # A worker stays in its epoch at its end: those of others may still last, and a state says so.
        for sample in own.rest() if self._split else own:
            yield _as_item(sample, self._layer, self._select, 0)

    def _begin_in_worker(self, own: Stream) -> None:
        """The epoch that was set, or the one after the last, whose rest the loader threw away; or what was loaded."""
        set_times, epoch, _ = self._shared.tolist()
        if set_times != self._followed:
            own.set_epoch(epoch)
        elif self._begun:
            own.set_epoch(own.state_dict()["epoch"] + 1)
        self._followed, self._begun = set_times, True
        self._shared[2] = 1

    def set_epoch(self, epoch: int) -> None:
        """Begin this epoch with the next iteration, here and in workers.

        Example:
            >>> items = ds.stream(shuffle_buffer=4).torch()
            >>> items.set_epoch(1)
            >>> items.state_dict()["epoch"]
            1
        """
        self._stream.set_epoch(epoch)
        self._shared[1] = epoch
        self._shared[0] += 1

    def state_dict(self) -> dict[str, Any]:
        """As `rayhs.views.stream.Stream.state_dict`, of the process that iterates.

        Raises:
            ConfigError: workers iterate, and this is not one of them.

        Example:
            >>> state = ds.stream().torch().state_dict()
            >>> state["epoch"], state["done"]
            (0, 0)
        """
        own = self._own()
        if self._shared[2] and not self._split:
            raise ConfigError(
                "workers iterate this stream, and where they are is not known here: "
                "use torchdata's StatefulDataLoader and its state_dict(), or num_workers=0"
            )
        return own.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Before iterating; raises ConfigError for the state of another order or number of workers.

        Example:
            >>> items = ds.stream().torch()
            >>> items.load_state_dict({**items.state_dict(), "done": 15})
            >>> [item["index"] for item in items]
            [17, 18, 19, 20, 21, 22, 23]
        """
        self._own().load_state_dict(state)
        self._begun = False

    def _own(self) -> Stream:
        worker = torch.utils.data.get_worker_info()
        if worker is not None and not self._split:
            self._stream, self._split = self._stream.split(worker.id, worker.num_workers), True
            self._followed = int(self._shared[0])
        return self._stream


def _refuse(select: str, layers: tuple[int, ...]) -> None:
    if not layers:
        raise ConfigError("no layer is read of this dataset: items have hidden states; choose layers")
    if select not in ("all", "loss", "last"):
        raise ConfigError(f"select={select!r} is not all, loss or last")


def _as_item(sample: Sample, layer: int | None, select: Select, start: int) -> Item:
    """Of a sample whose first token read is its ``start``-th."""
    states = sample.torch(layer)
    item = {
        "hidden_states": states,
        "token_ids": torch.from_numpy(sample.token_ids.astype(np.int64)),
        "loss_mask": torch.from_numpy(sample.loss_mask.astype(np.bool_)),
        "position_ids": torch.arange(start, start + len(states)),
    }
    kept = {"all": slice(None), "loss": item["loss_mask"], "last": slice(-1, None)}[select]
    return {
        **{name: tensor[kept] for name, tensor in item.items()},
        "sample_id": sample.sample_id,
        "index": sample.index,
    }


def pad_collate(items: Sequence[Item]) -> Item:
    """A batch of items of unlike lengths, for ``DataLoader(collate_fn=...)``.

    Tensors are padded with zeros behind, to `[batch, longest, ...]`; ``attention_mask`` bool
    `[batch, longest]` is True where tokens are. ``sample_id`` and ``index`` are lists.

    Example:
        >>> view = ds.torch(layers=15)
        >>> batch = rayhs.pad_collate([view[0], view[1]])
        >>> batch["hidden_states"].shape, batch["attention_mask"].sum(1).tolist(), batch["index"]
        (torch.Size([2, 8, 8]), [8, 6], [0, 1])
    """
    lengths = [len(item["token_ids"]) for item in items]
    mask = torch.arange(max(lengths))[None, :] < torch.tensor(lengths)[:, None]
    batch: Item = {"attention_mask": mask}
    for name, first in items[0].items():
        values = [item[name] for item in items]
        padded = isinstance(first, torch.Tensor)
        batch[name] = torch.nn.utils.rnn.pad_sequence(values, batch_first=True) if padded else values
    return batch
