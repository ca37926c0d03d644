"""A dataset as a stream: large reads in storage order, an order that can be computed without reading, and a state."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from rayhs.codec import Array
from rayhs.errors import ConfigError
from rayhs.reading.ahead import in_order
from rayhs.reading.cutting import cut
from rayhs.reading.outline import Outline, ShardRows
from rayhs.reading.sample import Sample

if TYPE_CHECKING:
    from rayhs.views.torch import Select, TorchStream

READ_BYTES = 16 * 2**20
_READS = 4  # at once, ahead of the sample in use


class Readable(Protocol):
    """What is read: a `rayhs.Dataset` of the layers wanted."""

    layers: tuple[int, ...]

    @property
    def uri(self) -> str: ...

    @property
    def outline(self) -> Outline: ...

    @property
    def token_bytes(self) -> int: ...

    def read_together(self, positions: Sequence[int], own_memory: bool) -> list[Sample]: ...


class Stream:
    """The good samples one after the other, epoch after epoch; see `rayhs.Dataset.stream`.

    Iterating goes through what is left of the current epoch, then the next iteration begins another. The order of
    an epoch is a function of seed, epoch and part alone, so that a state is the epoch and how many samples of it
    are done. One iteration at a time.

    Example:
        >>> stream = ds.stream(shuffle_buffer=4)
        >>> len(stream), [sample.index for sample in stream] == [sample.index for sample in stream]
        (22, False)
    """

    def __init__(self, dataset: Readable, shuffle_buffer: int, seed: int, part: tuple[int, int]) -> None:
        if not isinstance(part, Sequence) or len(part) != 2:
            raise ConfigError(f"shard={part!r}: give (rank, world)")
        rank, world = part
        whole = all(isinstance(number, int | np.integer) for number in (shuffle_buffer, seed, rank, world))
        if not whole or shuffle_buffer < 0 or seed < 0 or not 0 <= rank < world:
            raise ConfigError(
                f"{shuffle_buffer=}, {seed=}, shard={part}: give whole numbers from 0 on, and rank < world"
            )
        self._dataset, self._shuffle_buffer, self._seed = dataset, int(shuffle_buffer), int(seed)
        self._part = (int(rank), int(world))
        self._epoch = 0
        self._done = 0

    @property
    def layers(self) -> tuple[int, ...]:
        """Of which samples have states.

        Example:
            >>> ds.stream(layers=15).layers
            (15,)
        """
        return self._dataset.layers

    def __len__(self) -> int:
        """Samples of an epoch in this part."""
        return sum(shard.samples for shard in self._shards())

    def split(self, part: int, parts: int) -> Stream:
        """One of ``parts`` streams that share this one's samples, of the same epoch, from its beginning on.

        Raises:
            ConfigError: this one has begun its epoch: what it has done can't be told apart any more.

        Example:
            >>> [len(ds.stream().split(part, 2)) for part in range(2)]
            [14, 8]
        """
        if self._done:
            raise ConfigError(
                f"{self._dataset.uri}: the stream has done {self._done} samples of its epoch, and workers or parts "
                "would do them again: begin one with set_epoch(), or load states of workers by a StatefulDataLoader"
            )
        rank, world = self._part
        stream = Stream(self._dataset, self._shuffle_buffer, self._seed, (rank * parts + part, world * parts))
        stream._epoch = self._epoch
        return stream

    def torch(self, layer: int | None = None, *, select: Select = "all") -> TorchStream:
        """This stream as a `torch.utils.data.IterableDataset` whose workers share the samples; needs torch.

        Items are those of `rayhs.Dataset.torch`: ``hidden_states`` of one ``layer`` are `[tokens, hidden]`.

        Raises:
            ConfigError: ``select`` is not all, loss or last.

        Example:
            >>> next(iter(ds.stream().torch(15)))["hidden_states"].shape
            torch.Size([8, 8])
        """
        from rayhs.views.torch import TorchStream

        return TorchStream(self, layer, select)

    def set_epoch(self, epoch: int) -> None:
        """Begin this epoch; each has an order of its own where the stream is shuffled.

        Example:
            >>> stream = ds.stream(shuffle_buffer=4)
            >>> stream.set_epoch(3)
            >>> stream.state_dict()["epoch"]
            3
        """
        if epoch < 0:
            raise ConfigError(f"epoch {epoch}: give 0 or more")
        self._epoch, self._done = epoch, 0

    def state_dict(self) -> dict[str, Any]:
        """Where the stream is: `load_state_dict` of one made alike goes on with the next sample; plain JSON.

        Example:
            >>> stream = ds.stream(shuffle_buffer=4)
            >>> begun = [sample.index for _, sample in zip(range(3), stream)]
            >>> state = stream.state_dict()
            >>> state["epoch"], state["done"], sorted(state["order"])
            (0, 3, ['samples', 'seed', 'shard', 'shuffle_buffer'])
        """
        return {"epoch": self._epoch, "done": self._done, "order": self._made()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where the state was taken.

        Raises:
            ConfigError: it is of a stream of another order or of other samples, or none of a stream.

        Example:
            >>> stream = ds.stream()
            >>> stream.load_state_dict({**stream.state_dict(), "done": 15})
            >>> [sample.index for sample in stream]
            [17, 18, 19, 20, 21, 22, 23]
        """
        if not isinstance(state, Mapping) or state.keys() != {"epoch", "done", "order"}:
            raise ConfigError(f"no state of a stream: {state!r:.200}")
        if state["order"] != self._made():
            raise ConfigError(f"the state is of a stream with {state['order']}, this one has {self._made()}")
        epoch, done = state["epoch"], state["done"]
        if not (isinstance(epoch, int) and isinstance(done, int) and epoch >= 0 and 0 <= done <= len(self)):
            raise ConfigError(f"the state has {epoch=}, {done=}; an epoch of this stream has {len(self)} samples")
        self._epoch, self._done = epoch, done

    def __iter__(self) -> Iterator[Sample]:
        yield from self.rest()
        self.set_epoch(self._epoch + 1)

    def rest(self) -> Iterator[Sample]:
        """What is left of the epoch; unlike iterating it stays in that epoch at its end.

        Example:
            >>> stream = ds.stream()
            >>> len(list(stream.rest())), len(list(stream.rest())), stream.state_dict()["done"]
            (22, 0, 22)
        """
        outline, order = self._dataset.outline, self._order()
        unread = outline.good.copy()
        unread[np.fromiter(islice(order, self._done), np.int64)] = False
        held: dict[int, Sample] = {}
        reads = self._reads(outline, unread)
        try:
            for position in order:
                while position not in held:
                    held |= next(reads)
                # Counted first: a state taken while the sample is in use goes on behind it.
                self._done += 1
                yield held.pop(position)
        finally:
            reads.close()

    def _made(self) -> dict[str, Any]:
        samples = self._dataset.outline.fingerprint
        return {
            "samples": samples, "shuffle_buffer": self._shuffle_buffer, "seed": self._seed, "shard": list(self._part)
        }  # fmt: skip

    def _shards(self) -> list[ShardRows]:
        """Those of this part."""
        rank, world = self._part
        return self._dataset.outline.shards[rank::world]

    def _drawn(self) -> tuple[list[ShardRows], np.random.Generator]:
        """The shards as they are read in this epoch, and what the rest of its order is drawn from."""
        shards = self._shards()
        rng = np.random.default_rng([self._seed, self._epoch, *self._part])
        return ([shards[i] for i in rng.permutation(len(shards))] if self._shuffle_buffer else shards), rng

    def _order(self) -> Iterator[int]:
        """Positions as they are handed out in this epoch; none is held before its turn but those of the buffer."""
        shards, rng = self._drawn()
        parts = map(self._dataset.outline.positions, shards)
        if self._shuffle_buffer:
            return _shuffled(parts, self._shuffle_buffer, rng)
        return (position for part in parts for position in part.tolist())

    def _reads(self, outline: Outline, unread: Array) -> Generator[dict[int, Sample], None, None]:
        """Samples by position, in large reads, a few of them ahead.

        Args:
            unread: which rows are wanted, bool `[rows]`.
        """
        return in_order((partial(self._read, some) for some in self._cut(outline, unread)), _READS - 1, _READS)

    def _cut(self, outline: Outline, unread: Array) -> Iterator[list[int]]:
        """Positions of one shard that are read together: `READ_BYTES`, or one sample that is larger."""
        for shard in self._drawn()[0]:
            positions = outline.positions(shard)
            wanted = positions[unread[positions]]
            for some in cut(outline.num_tokens[wanted] * self._dataset.token_bytes, READ_BYTES):
                yield wanted[some].tolist()

    def _read(self, positions: list[int]) -> dict[int, Sample]:
        copies = self._shuffle_buffer > 0  # else one that waits would hold the memory of all that were read with it
        return dict(zip(positions, self._dataset.read_together(positions, copies), strict=True))


def _shuffled(parts: Iterable[Array], size: int, rng: np.random.Generator) -> Iterator[int]:
    """What a buffer of ``size`` hands out that is filled in order and gives up one at random for each that comes."""
    buffer: list[int] = []
    for part in parts:
        room = size - len(buffer)
        buffer += part[:room].tolist()
        late = part[room:].tolist()
        for place, position in zip(rng.integers(0, size, len(late)).tolist(), late, strict=True):
            yield buffer[place]
            buffer[place] = position
    yield from rng.permutation(np.array(buffer, np.int64)).tolist()
