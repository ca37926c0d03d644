"""An S3 bucket, or a prefix in one, as a store.

By obstore: of it, s3fs and pyarrow.fs it has the fastest or nearly fastest puts and range reads
(``tests/benchmarks/store.py``; twice s3fs), it aborts the multipart upload of a failed put, and it sends
nothing that older S3 servers refuse.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar

import stamina

from rayhs.config import StorageConfig
from rayhs.errors import ConfigError, ObjectNotFound, StoreUnavailable
from rayhs.log import logger
from rayhs.store.base import (
    Chunk,
    Entry,
    Ranges,
    Store,
    Unfinished,
    as_bytes,
    check_name,
    check_prefix,
    check_ranges,
    sized,
)
from rayhs.store.client import ClientCache
from rayhs.store.explain import RangesIgnoredError, explain, was_answered
from rayhs.store.pieces import Watched, cut_out, part_size, parts_of, spans_of
from rayhs.store.range_file import RangeFile
from rayhs.store.uploads import abort_uploads, unfinished_uploads

if TYPE_CHECKING:
    from obstore.store import S3Store

PARTS_IN_FLIGHT = 6
_DELETE_BATCH = 1000
_LIST_PAGE = 1000
_TRIES = 6
T = TypeVar("T")
Spans = list[tuple[int, int]]
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,254}")


class S3ObjectStore(Store):
    """Objects are keys below ``s3://bucket/prefix``.

    A streamed put takes about 64 MiB of memory (``PARTS_IN_FLIGHT + 2`` parts), more only for objects
    over 78 GiB. A process killed in the middle of one leaves an unfinished multipart upload
    that no listing shows; `rayhs gc` or a lifecycle rule of the bucket (AbortIncompleteMultipartUpload) ends it.
    """

    def __init__(self, uri: str, storage: StorageConfig) -> None:
        bucket, prefix = _split(uri)
        self.uri = f"s3://{bucket}/{prefix}".rstrip("/")
        self._bucket, self._prefix = bucket, prefix
        self._storage = storage
        self._cache = ClientCache(bucket, prefix, storage)
        self._ranges_ignored = False

    def __reduce__(self) -> tuple[Any, ...]:
        return (S3ObjectStore, (self.uri, self._storage))

    def get(self, name: str) -> bytes:
        import obstore

        with self._asking(check_name(name)) as client:
            return bytes(obstore.get(client, name).bytes())

    def get_ranges(self, name: str, ranges: Ranges) -> list[memoryview]:
        check_ranges(check_name(name), ranges)
        spans = spans_of(ranges)
        views = self._read_spans(name, spans) if spans else []
        return [cut_out(self._where(name), spans, views, start, length) for start, length in ranges]

    def _read_spans(self, name: str, spans: Spans) -> list[memoryview]:
        import obstore

        if self._ranges_ignored:
            return self._read_through(name, spans)
        starts, ends = [start for start, _ in spans], [end for _, end in spans]
        try:
            with self._asking(name) as client:
                answers = obstore.get_ranges(client, name, starts=starts, ends=ends, coalesce=0)
        except RangesIgnoredError as error:
            logger.warning("%s; every read takes the whole object", error)
            self._ranges_ignored = True
            return self._read_through(name, spans)
        return [memoryview(answer) for answer in answers]

    def _read_through(self, name: str, spans: Spans) -> list[memoryview]:
        """Stream the whole object and keep the spans, for servers without range reads."""
        import obstore

        kept, position = [bytearray() for _ in spans], 0
        with self._asking(name) as client:
            for chunk in obstore.get(client, name).stream(min_chunk_size=1 << 20):
                for (start, end), buffer in zip(spans, kept, strict=True):
                    buffer += memoryview(chunk)[max(start - position, 0) : max(end - position, 0)]
                position += len(chunk)
        return [memoryview(buffer) for buffer in kept]

    def put(self, name: str, data: bytes) -> None:
        import obstore

        with self._asking(check_name(name)) as client:
            obstore.put(client, name, data, use_multipart=False)

    def put_new(self, name: str, data: bytes) -> bool:
        import obstore
        from obstore.exceptions import AlreadyExistsError, NotSupportedError

        # Asked first, for the servers that ignore the condition.
        if self.size(name) is not None:
            return False
        with self._asking(name) as client:
            try:
                obstore.put(client, name, data, mode="create", use_multipart=False)
            except AlreadyExistsError:
                return False
            except NotSupportedError:
                obstore.put(client, name, data, use_multipart=False)
        return True

    def put_stream(self, name: str, chunks: Iterable[Chunk], size: int) -> None:
        import obstore

        where = self._where(check_name(name))
        part_bytes = part_size(size)
        source = Watched(sized(map(as_bytes, chunks), size, where))
        parts = parts_of(source, size, part_bytes)
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

    def entries(self, prefix: str) -> Iterator[Entry]:
        return self._pages(check_prefix(prefix))

    def _pages(self, prefix: str) -> Iterator[Entry]:
        listing = _Listing(prefix)
        while page := self._again(lambda: self._page(prefix, listing)):
            listing.last = page[-1]["path"]
            for item in page:
                yield Entry(item["path"], item["size"], item["last_modified"].timestamp())

    def _page(self, prefix: str, listing: _Listing) -> Any:
        with self._asking(prefix) as client:
            try:
                return listing.page(client)
            except Exception:
                listing.pages = None  # the next try starts after the last name
                raise

    def unfinished(self) -> Iterator[Unfinished]:
        yield from unfinished_uploads(self._bucket, self._prefix, self._storage)

    def discard(self, remains: Iterable[Unfinished]) -> None:
        abort_uploads(self._bucket, self._prefix, self._storage, remains)

    def delete(self, names: Iterable[str]) -> None:
        remaining = map(check_name, names)
        while batch := list(islice(remaining, _DELETE_BATCH)):
            self._again(partial(self._delete, batch))

    def _delete(self, batch: Sequence[str]) -> None:
        import obstore

        with self._asking(batch[0]) as client:
            obstore.delete(client, batch)

    def _again(self, call: Callable[[], T]) -> T:
        """Call it again where it fails in passing: of some requests obstore does not know that this is safe.

        Not where it has used its budget up itself.
        """

        def passes(error: Exception) -> bool:
            return isinstance(error, StoreUnavailable) and self._cache.answered

        budget = self._cache.retry_seconds / 2
        for attempt in stamina.retry_context(on=passes, attempts=_TRIES, timeout=budget, wait_initial=0.2, wait_max=10):
            with attempt:
                answer = call()
        return answer

    def open_input(self, name: str) -> Any:
        import pyarrow as pa

        size = self.size(name)
        if size is None:
            raise ObjectNotFound(f"{self._where(name)}: no such object; check the name")
        return pa.PythonFile(RangeFile(self, name, size), mode="r")

    def _where(self, name: str) -> str:
        return f"{self.uri}/{name}" if name else self.uri

    @contextmanager
    def _asking(self, name: str, source: Watched | None = None) -> Iterator[S3Store]:
        """Hand out the client and turn what obstore raises into an error of ours."""
        from obstore.exceptions import BaseError

        client = self._cache.get()
        try:
            yield client
        except (BaseError, OSError) as error:
            if source is not None and source.raised:
                raise  # the caller's own
            # Its text is not logged: it can hold what the server repeats of the request, session tokens too.
            logger.debug("%s: %s", self._where(name), type(error).__name__)
            self._cache.answered = self._cache.answered or was_answered(error)
            raise explain(self._where(name), self._cache.settings, error) from None
        self._cache.answered = True


@dataclass
class _Listing:
    """A listing in progress, by pages; ``last`` is the last name handed out."""

    prefix: str
    last: str | None = None
    pages: Any = None

    def page(self, client: S3Store) -> Any:
        """The next page; None at the end."""
        import obstore

        if self.pages is None:
            self.pages = obstore.list(client, self.prefix or None, offset=self.last, chunk_size=_LIST_PAGE)
        return next(self.pages, None)


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
