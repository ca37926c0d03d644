"""What every store promises, and the checks on names and sizes they share."""

from __future__ import annotations

import unicodedata
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rayhs.errors import StoreError

# Anything with a C-contiguous buffer: bytes, memoryview, numpy arrays of standard dtypes.
# collections.abc.Buffer exists from Python 3.12 on only.
Chunk = Any
Ranges = Sequence[tuple[int, int]]

PARTIAL = ".partial-"  # a local object that is still being written


@dataclass(frozen=True)
class Entry:
    """An object in a listing: ``size`` in bytes, ``modified`` in Unix seconds by the store's clock.

    Amazon dates an object of a multipart upload by the upload's beginning.
    """

    name: str
    size: int
    modified: float


@dataclass(frozen=True)
class Unfinished:
    """The remains of a write that never ended: no object, but room taken.

    ``size`` in bytes where the store tells it, else 0; ``begun`` in Unix seconds; ``handle`` is the store's own.
    """

    name: str
    size: int
    begun: float
    handle: str


class Store(ABC):
    """A flat set of named objects under one root.

    Names are relative to the root, segments separated by ``/``. Any number of threads may use one
    store at once. A store can be pickled: it opens again where it is unpickled, with the credentials
    found there. Every method raises, in one line without secrets, StoreError when the store refuses
    and StoreUnavailable when it keeps failing after the retries that make sense.
    """

    uri: str
    """Normalised root, without trailing slash and without secrets."""

    def prepare(self) -> None:  # noqa: B027 - most stores have nothing to find out without writing
        """Find out early, as far as that is possible without writing an object, that nothing could be written.

        Raises:
            StoreError: so it is.
        """

    @abstractmethod
    def get(self, name: str) -> bytes:
        """The whole object. Raises ObjectNotFound when there is none."""

    @abstractmethod
    def get_ranges(self, name: str, ranges: Ranges) -> list[memoryview]:
        """Read ``(start, length)`` byte ranges of one object, in the order given.

        Ranges may touch, overlap or be empty. Each answer is a one-dimensional view of bytes,
        exactly ``length`` long.

        Raises:
            ObjectNotFound: no such object.
            StoreError: a range reaches past the end of the object.
        """

    @abstractmethod
    def put(self, name: str, data: bytes) -> None:
        """Write the whole object or nothing; an object of that name is replaced."""

    @abstractmethod
    def put_new(self, name: str, data: bytes) -> bool:
        """Write the whole object unless there is one of that name; whether it was written.

        False also where this very call wrote it and the reply was lost: who must know reads it back.
        Two callers at the same moment may both be told True, the last one staying, by a server that
        ignores the condition (``If-None-Match``), as some do.
        """

    @abstractmethod
    def put_stream(self, name: str, chunks: Iterable[Chunk], size: int) -> None:
        """Write an object of ``size`` bytes from consecutive buffers: the whole object or nothing.

        A buffer is copied or written before the next is asked for, so its memory may be reused.
        Memory stays bounded, whatever ``size``. ``chunks`` is iterated in the calling thread; what
        it raises comes out unchanged.

        Raises:
            StoreError: the buffers add up to other than ``size`` bytes, or the store failed. In
                either case, and when ``chunks`` raises, nothing becomes visible or is left behind.
        """

    @abstractmethod
    def size(self, name: str) -> int | None:
        """Bytes of the object; None when there is none."""

    @abstractmethod
    def entries(self, prefix: str) -> Iterator[Entry]:
        """Stream all objects below the folder ``prefix`` ("" is the root).

        ``commits`` and ``commits/`` are the same and do not match ``commits-old/x``. In no order.
        """

    def list(self, prefix: str) -> Iterator[tuple[str, int]]:
        """``(name, bytes)`` of `entries`."""
        return ((entry.name, entry.size) for entry in self.entries(prefix))

    @abstractmethod
    def unfinished(self) -> Iterator[Unfinished]:
        """What killed writers left below the root, and what is being written right now: only age tells which."""

    @abstractmethod
    def discard(self, remains: Iterable[Unfinished]) -> None:
        """Free what `unfinished` named; a writer that was still at it fails. Gone already is fine."""

    @abstractmethod
    def delete(self, names: Iterable[str]) -> None:
        """Delete objects; names that do not exist are fine."""

    @abstractmethod
    def open_input(self, name: str) -> Any:
        """A seekable ``pyarrow.NativeFile`` on the object, for ``pyarrow.parquet.ParquetFile``.

        Reads what is asked for and no more. Raises ObjectNotFound when there is none.
        """

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.uri!r})"


def check_name(name: str) -> str:
    """Return ``name`` when it is one of an object below the root.

    Raises:
        StoreError: empty, absolute, with empty, ``.`` or ``..`` segments, backslashes or control
            characters, or a name kept for objects in the making.
    """
    segments = name.split("/")
    if any(s in ("", ".", "..") or s.startswith(PARTIAL) for s in segments) or not _is_plain(name):
        raise StoreError(f"{name!r} is not an object name; give a relative name such as shards/a.bin")
    return name


def check_prefix(prefix: str) -> str:
    """A listing's prefix without trailing slash; raises StoreError like ``check_name``."""
    bare = prefix.removesuffix("/")
    return check_name(bare) if bare else ""


def check_ranges(name: str, ranges: Ranges) -> None:
    """Raises StoreError for a range with a negative start or length."""
    for start, length in ranges:
        if start < 0 or length < 0:
            raise StoreError(f"{name}: {length} bytes at {start} is not a byte range; run rayhs verify")


def _is_plain(name: str) -> bool:
    return "\\" not in name and not any(unicodedata.category(c) in ("Cc", "Cs") for c in name)


def as_bytes(chunk: Chunk) -> memoryview:
    """A one-dimensional view of the bytes of a C-contiguous buffer; TypeError for anything else."""
    view = memoryview(chunk)
    # Casting refuses shapes with a zero in them.
    return view.cast("B") if view.nbytes else memoryview(b"")


def sized(views: Iterable[memoryview], size: int, where: str) -> Iterator[memoryview]:
    """Pass views on as long as they can add up to ``size``; StoreError as soon as they can't."""
    total = 0
    for view in views:
        total += view.nbytes
        if total > size:
            raise StoreError(f"{where}: more than the {size} bytes announced were given; nothing was written")
        yield view
    if total != size:
        raise StoreError(f"{where}: {total} bytes were given where {size} were announced; nothing was written")


def short_answer(where: str, start: int, length: int, got: int) -> StoreError:
    return StoreError(
        f"{where}: {got} bytes at {start} where {length} were asked for: the object is shorter than it should be; "
        "run rayhs verify"
    )
