"""An S3 bucket, or a prefix in one, as a store.

obstore over s3fs and pyarrow.fs: see the figures of ``benchmarks/store.py``. It aborts the multipart
upload of a failed put, and nothing here needs conditional writes.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import numpy as np

from rayhs.config import StorageConfig
from rayhs.errors import ConfigError, ObjectNotFound
from rayhs.log import logger
from rayhs.store.base import Chunk, Ranges, Store, as_bytes, check_name, check_prefix, check_ranges, short_answer, sized
from rayhs.store.client import ClientCache
from rayhs.store.explain import explain, was_answered
from rayhs.store.range_file import RangeFile

if TYPE_CHECKING:
    from obstore.store import S3Store

PART_BYTES = 8 << 20
PARTS_IN_FLIGHT = 6
_MAX_PARTS = 10_000  # S3's limit
_DELETE_BATCH = 1000
_LIST_PAGE = 1000
_MERGE_GAP = 1 << 20  # a request costs more than this many bytes
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,254}")


class S3ObjectStore(Store):
    """Objects are keys below ``s3://bucket/prefix``.

    A streamed put takes about ``PART_BYTES * (PARTS_IN_FLIGHT + 2)`` bytes of memory, more only for
    objects over 78 GiB. A process killed in the middle of one leaves an unfinished multipart upload
    that no listing shows; a lifecycle rule of the bucket (AbortIncompleteMultipartUpload) ends it.
    """

    def __init__(self, uri: str, storage: StorageConfig) -> None:
        bucket, prefix = _split(uri)
        self.uri = f"s3://{bucket}/{prefix}".rstrip("/")
        self._storage = storage
        self._cache = ClientCache(bucket, prefix, storage)

    def __reduce__(self) -> tuple[Any, ...]:
        return (S3ObjectStore, (self.uri, self._storage))

    def get(self, name: str) -> bytes:
        import obstore

        with self._asking(check_name(name)) as client:
            return bytes(obstore.get(client, name).bytes())

    def get_ranges(self, name: str, ranges: Ranges) -> list[memoryview]:
        import obstore

        check_ranges(check_name(name), ranges)
        spans = _spans(ranges)
        starts, ends = [start for start, _ in spans], [end for _, end in spans]
        views: list[memoryview] = []
        if spans:
            with self._asking(name) as client:
                answers = obstore.get_ranges(client, name, starts=starts, ends=ends, coalesce=0)
            views = [memoryview(answer) for answer in answers]
        return [self._slice(name, starts, views, start, length) for start, length in ranges]

    def _slice(
        self, name: str, starts: Sequence[int], views: Sequence[memoryview], start: int, length: int
    ) -> memoryview:
        if length == 0:
            return memoryview(b"")
        span = bisect_right(starts, start) - 1
        offset = start - starts[span]
        view = views[span][offset : offset + length]
        if view.nbytes != length:
            raise short_answer(self._where(name), start, length, view.nbytes)
        return view

    def put(self, name: str, data: bytes) -> None:
        import obstore

        with self._asking(check_name(name)) as client:
            obstore.put(client, name, data, use_multipart=False)

    def put_stream(self, name: str, chunks: Iterable[Chunk], size: int) -> None:
        import obstore

        where = self._where(check_name(name))
        part_bytes = _part_bytes(size)
        source = _Watched(sized(map(as_bytes, chunks), size, where))
        parts = _parts(source, size, part_bytes)
        if size <= part_bytes:
            self.put(name, b"".join(parts))
            return
        with self._asking(name, source) as client:
            obstore.put(client, name, parts, chunk_size=part_bytes, max_concurrency=PARTS_IN_FLIGHT, use_multipart=True)

    def size(self, name: str) -> int | None:
        import obstore

        try:
            with self._asking(check_name(name)) as client:
                return obstore.head(client, name)["size"]
        except ObjectNotFound:
            return None

    def list(self, prefix: str) -> Iterator[tuple[str, int]]:
        return self._pages(check_prefix(prefix))

    def _pages(self, prefix: str) -> Iterator[tuple[str, int]]:
        import obstore

        with self._asking(prefix) as client:
            pages = obstore.list(client, prefix or None, chunk_size=_LIST_PAGE)
        while True:
            with self._asking(prefix):
                page = next(pages, None)
            if page is None:
                return
            yield from ((item["path"], item["size"]) for item in page)

    def delete(self, names: Iterable[str]) -> None:
        import obstore

        remaining = map(check_name, names)
        while batch := list(islice(remaining, _DELETE_BATCH)):
            with self._asking(batch[0]) as client:
                obstore.delete(client, batch)

    def open_input(self, name: str) -> Any:
        import pyarrow as pa

        size = self.size(name)
        if size is None:
            raise ObjectNotFound(f"{self._where(name)}: no such object; check the name")
        return pa.PythonFile(RangeFile(self, name, size), mode="r")

    def _where(self, name: str) -> str:
        return f"{self.uri}/{name}" if name else self.uri

    @contextmanager
    def _asking(self, name: str, source: _Watched | None = None) -> Iterator[S3Store]:
        """Hand out the client and turn what obstore raises into an error of ours."""
        from obstore.exceptions import BaseError

        client = self._cache.get()
        try:
            yield client
        except (BaseError, OSError) as error:
            if source is not None and source.raised:
                raise  # the caller's own
            logger.debug("%s: %s", self._where(name), error)
            self._cache.answered = self._cache.answered or was_answered(error)
            raise explain(self._where(name), self._cache.settings, error) from None
        self._cache.answered = True


def _spans(ranges: Ranges) -> list[tuple[int, int]]:
    """Sorted ``(start, end)`` that cover the ranges, close ones in one.

    Done here because obstore, merging ranges itself, panics when the object is too short for one.
    """
    spans: list[tuple[int, int]] = []
    for start, length in sorted(ranges):
        if length and spans and start - spans[-1][1] <= _MERGE_GAP:
            spans[-1] = (spans[-1][0], max(spans[-1][1], start + length))
        elif length:
            spans.append((start, start + length))
    return spans


def _slice(
    where: str, spans: Sequence[tuple[int, int]], views: Sequence[memoryview], start: int, length: int
) -> memoryview:
    if length == 0:
        return memoryview(b"")
    span = bisect_right(spans, start, key=itemgetter(0)) - 1
    offset = start - spans[span][0]
    view = views[span][offset : offset + length]
    if view.nbytes != length:
        raise short_answer(where, start, length, view.nbytes)
    return view


class _Watched:
    """An iterator that remembers whether it raised, to tell its errors from the store's."""

    def __init__(self, views: Iterator[memoryview]) -> None:
        self._views = views
        self.raised = False

    def __iter__(self) -> _Watched:
        return self

    def __next__(self) -> memoryview:
        try:
            return next(self._views)
        except StopIteration:
            raise
        except BaseException:
            self.raised = True
            raise


def _part_bytes(size: int) -> int:
    smallest = -(-size // _MAX_PARTS)
    return max(PART_BYTES, -(-smallest // (1 << 20)) << 20)


def _parts(views: Iterable[memoryview], size: int, part_bytes: int) -> Iterator[memoryview]:
    """Copy views into parts of ``part_bytes``: obstore keeps what it is given until it is sent."""
    left, filled = size, 0
    part = np.empty(min(part_bytes, left), np.uint8)
    for view in views:
        source = np.frombuffer(view, np.uint8)
        while source.size:
            count = min(source.size, part.size - filled)
            part[filled : filled + count] = source[:count]
            source, filled = source[count:], filled + count
            if filled == part.size:
                yield part.data
                left -= filled
                part, filled = np.empty(min(part_bytes, left), np.uint8), 0


def _split(uri: str) -> tuple[str, str]:
    bucket, _, prefix = uri.partition("://")[2].partition("/")
    if "@" in bucket or ":" in bucket:
        raise ConfigError(
            "s3://: the URI holds credentials or a port; give s3://bucket/prefix, and keys by AWS_* variables"
        )
    prefix = prefix.strip("/")
    if not _BUCKET.fullmatch(bucket):
        raise ConfigError(f"{uri}: no bucket name after s3://; give s3://bucket/prefix")
    if any(segment in ("", ".", "..") for segment in prefix.split("/")) and prefix:
        raise ConfigError(f"{uri}: the prefix has empty, '.' or '..' segments; give s3://bucket/prefix")
    return bucket, prefix
