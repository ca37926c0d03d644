"""A dataset as a stream: large reads in storage order, an order that can be computed without reading, and a state."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import pyarrow as pa

from rayhs.codec import Array
from rayhs.errors import ConfigError
from rayhs.reading.ahead import in_order
from rayhs.reading.index_table import good_by_shard
from rayhs.reading.sample import Sample

if TYPE_CHECKING:
    from rayhs.views.torch import Select, TorchStream

READ_BYTES = 16 * 2**20
_READS = 4  # at once, ahead of the sample in use


class Readable(Protocol):
    """What is read: a `rayhs.Dataset` of the layers wanted."""

    @property
    def index(self) -> pa.Table: ...

    @property
    def good(self) -> Array: ...

    @property
    def token_bytes(self) -> int: ...

    def read_together(self, positions: Sequence[int], own_memory: bool) -> list[Sample]: ...


class Stream:
    """The good samples one after the other, epoch after epoch; see `rayhs.Dataset.stream`.

    Iterating goes through what is left of the current epoch, then the next iteration begins another. The order of
    an epoch is a function of seed, epoch and part alone, so that a state is the epoch and how many samples of it
    are done. One iteration at a time.
    """

    def __init__(self, dataset: Readable, shuffle_buffer: int, seed: int, part: tuple[int, int]) -> None:
        rank, world = part
        if shuffle_buffer < 0 or seed < 0 or not 0 <= rank < world:
            raise ConfigError(f"{shuffle_buffer=}, {seed=}, shard={part}: give 0 or more, and rank < world")
        self._dataset, self._shuffle_buffer, self._seed, self._part = dataset, shuffle_buffer, seed, part
        self._epoch = 0
        self._done = 0

    def __len__(self) -> int:
        """Samples of an epoch in this part."""
        return sum(map(len, self._shards()))

    def split(self, part: int, parts: int) -> Stream:
        """One of ``parts`` streams that share this one's samples, of the same epoch, from its beginning on."""
        rank, world = self._part
        stream = Stream(self._dataset, self._shuffle_buffer, self._seed, (rank * parts + part, world * parts))
        stream._epoch = self._epoch
        return stream

    def torch(self, layer: int | None = None, *, select: Select = "all") -> TorchStream:
        """This stream as a `torch.utils.data.IterableDataset` whose workers share the samples; needs torch.

        Items are those of `rayhs.Dataset.torch`: ``hidden_states`` of one ``layer`` are `[tokens, hidden]`.

        Raises:
            ConfigError: ``select`` is not all, loss or last.
        """
        from rayhs.views.torch import TorchStream

        return TorchStream(self, layer, select)

    def set_epoch(self, epoch: int) -> None:
        """Begin this epoch; each has an order of its own where the stream is shuffled."""
        self._epoch, self._done = epoch, 0

    def state_dict(self) -> dict[str, Any]:
        """Where the stream is: `load_state_dict` of one made alike goes on with the next sample."""
        return {"epoch": self._epoch, "done": self._done, "order": self._made()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises ConfigError for the state of a stream of another order."""
        if state["order"] != self._made():
            raise ConfigError(f"the state is of a stream with {state['order']}, this one has {self._made()}")
        self._epoch, self._done = int(state["epoch"]), int(state["done"])

    def __iter__(self) -> Iterator[Sample]:
        order, read = self._orders()
        left = order[self._done :]
        held: dict[int, Sample] = {}
        reads = self._reads(read[np.isin(read, left)])
        try:
            for position in left.tolist():
                while position not in held:
                    held |= next(reads)
                # Counted first: a state taken while the sample is in use goes on behind it.
                self._done += 1
                yield held.pop(position)
        finally:
            reads.close()
        self.set_epoch(self._epoch + 1)

    def _made(self) -> dict[str, Any]:
        return {"shuffle_buffer": self._shuffle_buffer, "seed": self._seed, "shard": list(self._part)}

    def _shards(self) -> list[Array]:
        """Positions of the good samples of each shard of this part."""
        rank, world = self._part
        return good_by_shard(self._dataset.index, self._dataset.good)[rank::world]

    def _orders(self) -> tuple[Array, Array]:
        """Positions as they are handed out in this epoch, and as they are read."""
        shards = self._shards()
        if not self._shuffle_buffer or not shards:
            read = np.concatenate(shards) if shards else np.zeros(0, np.int64)
            return read, read
        rng = np.random.default_rng([self._seed, self._epoch, *self._part])
        read = np.concatenate([shards[i] for i in rng.permutation(len(shards))])
        return _shuffled(read, self._shuffle_buffer, rng), read

    def _reads(self, positions: Array) -> Generator[dict[int, Sample], None, None]:
        """Samples by position, in large reads, a few of them ahead."""
        return in_order((partial(self._read, together) for together in self._cut(positions)), _READS - 1, _READS)

    def _read(self, positions: list[int]) -> dict[int, Sample]:
        copies = self._shuffle_buffer > 0  # else one that waits would hold the memory of all that were read with it
        return dict(zip(positions, self._dataset.read_together(positions, copies), strict=True))

    def _cut(self, positions: Array) -> Iterator[list[int]]:
        """Positions of one shard that are read together: `READ_BYTES`, or one sample that is larger."""
        index = self._dataset.index
        together: list[int] = []
        nbytes, shard = 0, None
        for first in range(0, len(positions), 4096):
            some = positions[first : first + 4096]
            rows = index.take(pa.array(some)).select(["shard", "num_tokens"]).to_pydict()
            for position, name, tokens in zip(some.tolist(), rows["shard"], rows["num_tokens"], strict=True):
                size = tokens * self._dataset.token_bytes
                if together and (name != shard or nbytes + size > READ_BYTES):
                    yield together
                    together, nbytes = [], 0
                together.append(position)
                nbytes, shard = nbytes + size, name
        if together:
            yield together


def _shuffled(read: Array, size: int, rng: np.random.Generator) -> Array:
    """What a buffer of ``size`` hands out that is filled in order and gives up one at random for each that comes."""
    buffer = read[:size].copy()
    order = np.empty_like(read)
    chosen = rng.integers(0, len(buffer), max(0, len(read) - size))
    for i, (place, position) in enumerate(zip(chosen.tolist(), read[size:].tolist(), strict=True)):
        order[i] = buffer[place]
        buffer[place] = position
    order[len(read) - len(buffer) :] = rng.permutation(buffer)
    return order
