"""Positions of samples by their ids, in a few bytes a sample however long the ids are."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import pyarrow as pa
import xxhash

from rayhs.codec import Array
from rayhs.reading.outline import good_rows

ID_COLUMNS = ("sample_id", "status")
# The function itself: one of our own around it would take longer than the hash.
_hash: Callable[[bytes], int] = xxhash.xxh3_64_intdigest


class IdLookup:
    """Sorted 64-bit hashes of all ids with their positions: 12 bytes a sample, 8 more where there are over 2^32.

    Hashes (xxh3_64 of the id in UTF-8) of unlike ids may be equal, so that a position is one only once the id
    there is the one asked for. ``good`` is a bool a sample: whether it has states.
    """

    def __init__(self, tables: Iterable[pa.Table]) -> None:
        """Of tables with the columns `ID_COLUMNS`, in the order of positions; each is used once."""
        parts = [(hash_ids(table["sample_id"]), good_rows(table)) for table in tables]
        hashes = np.concatenate([part[0] for part in parts]) if parts else np.zeros(0, np.uint64)
        self.good: Array = np.concatenate([part[1] for part in parts]) if parts else np.zeros(0, bool)
        del parts
        order = np.argsort(hashes)
        self._hashes = hashes[order]
        self._positions = order.astype(np.uint32 if len(order) < 2**32 else np.int64)

    def find(self, sample_id: str, id_at: Callable[[int], str]) -> int | None:
        """The position of an id: of a good sample where one has it, else of the first; None where none has it.

        Args:
            id_at: the id at a position; asked for each that may be it, mostly one.
        """
        wanted = np.uint64(_hash(sample_id.encode(errors="surrogatepass")))
        first, last = (int(np.searchsorted(self._hashes, wanted, side)) for side in ("left", "right"))
        places = np.sort(self._positions[first:last])
        has_states = self.good[places]
        for position in np.concatenate([places[has_states], places[~has_states]]).tolist():
            if id_at(position) == sample_id:
                return int(position)
        return None


def hash_ids(ids: pa.ChunkedArray) -> Array:
    """uint64 `[ids]`: the hash of each id in UTF-8, of ids as plain text or as dictionaries."""
    parts = [
        _hashes(chunk.dictionary)[chunk.indices.to_numpy()] if pa.types.is_dictionary(ids.type) else _hashes(chunk)
        for chunk in ids.chunks
    ]
    return np.concatenate([np.zeros(0, np.uint64), *parts])


def _hashes(texts: pa.Array) -> Array:
    return np.fromiter(map(_hash, texts.cast(pa.binary()).to_numpy(zero_copy_only=False)), np.uint64, len(texts))
