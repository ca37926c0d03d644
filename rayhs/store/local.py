"""A local (or mounted) folder as a store: plain files, written beside their name and renamed.

Own system calls instead of obstore's local store: they are as fast as a plain write of the same
bytes (``tests/benchmarks/store.py``; so is obstore, which keeps the caller's buffers while it asks for more
and can't be used in forked processes). Atomic against a killed process. A power cut may lose files of
the last seconds, as nothing is fsynced; ``rayhs verify`` finds such. Files of killed writers stay
under hidden names until `rayhs gc`.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np

from rayhs.errors import ConfigError, ObjectNotFound, StoreError, StoreUnavailable
from rayhs.store.base import (
    PARTIAL,
    Chunk,
    Entry,
    Ranges,
    Store,
    Unfinished,
    as_bytes,
    check_name,
    check_prefix,
    check_ranges,
    short_answer,
    sized,
)

_ABSENT = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
_PASSING = {errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EAGAIN, errno.EBUSY, errno.ENFILE, errno.EMFILE}
_ADVICE = {
    errno.ENOSPC: "free some space or choose another output",
    errno.EDQUOT: "free some space or choose another output",
    errno.EACCES: "give this user access or choose another place",
    errno.EPERM: "give this user access or choose another place",
    errno.EROFS: "choose a place that can be written",
    errno.ENOTDIR: "a file is where a folder should be: remove it or choose another place",
    errno.EEXIST: "a file is where a folder should be: remove it or choose another place",
    errno.EISDIR: "a folder is where a file should be: remove it or choose another place",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
}


class LocalFolderStore(Store):
    """Objects are files below a folder, which the first write creates."""

    def __init__(self, uri: str) -> None:
        self._root = _root_of(uri)
        self.uri = self._root

    def __reduce__(self) -> tuple[Any, ...]:
        return (LocalFolderStore, (self.uri,))

    def prepare(self) -> None:
        with self._writing(self._root):
            os.makedirs(self._root, exist_ok=True)
            if not os.access(self._root, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    def get(self, name: str) -> bytes:
        with self._reading(name) as path, open(path, "rb", buffering=0) as file:
            return file.readall()

    def get_ranges(self, name: str, ranges: Ranges) -> list[memoryview]:
        check_ranges(name, ranges)
        with self._reading(name) as path, open(path, "rb", buffering=0) as file:
            return [_read_range(file.fileno(), path, start, length) for start, length in ranges]

    def put(self, name: str, data: bytes) -> None:
        self.put_stream(name, [data], len(data))

    def put_new(self, name: str, data: bytes) -> bool:
        path = self._path(name)
        try:
            self._write(path, [data], len(data), _link)
        except FileExistsError:
            return False
        return True

    def put_stream(self, name: str, chunks: Iterable[Chunk], size: int) -> None:
        self._write(self._path(name), chunks, size, os.replace)

    def _write(self, path: str, chunks: Iterable[Chunk], size: int, publish: Callable[[str, str], None]) -> None:
        folder = os.path.dirname(path)
        partial = os.path.join(folder, PARTIAL + secrets.token_hex(8))
        with self._writing(path):
            os.makedirs(folder, exist_ok=True)
            file = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            try:
                for view in sized(map(as_bytes, chunks), size, path):
                    _write_all(file, view, path)
            finally:
                os.close(file)
            with self._writing(path, keep=(FileExistsError,)):
                publish(partial, path)
        finally:
            with suppress(FileNotFoundError):
                os.unlink(partial)

    def size(self, name: str) -> int | None:
        try:
            with self._reading(name) as path:
                status = os.stat(path)
        except ObjectNotFound:
            return None
        return status.st_size if stat.S_ISREG(status.st_mode) else None

    def entries(self, prefix: str) -> Iterator[Entry]:
        bare = check_prefix(prefix)
        files = self._walk(os.path.join(self._root, bare) if bare else self._root)
        return (entry for entry in files if not os.path.basename(entry.name).startswith(PARTIAL))

    def unfinished(self) -> Iterator[Unfinished]:
        for entry in self._walk(self._root):
            if os.path.basename(entry.name).startswith(PARTIAL):
                yield Unfinished(entry.name, entry.size, entry.modified, entry.name)

    def discard(self, remains: Iterable[Unfinished]) -> None:
        for one in remains:
            path = os.path.join(self._root, one.handle)
            with suppress(*_ABSENT), self._writing(path, keep=_ABSENT):
                os.unlink(path)

    def _walk(self, top: str) -> Iterator[Entry]:
        folders = [top]
        while folders:
            folder = folders.pop()
            try:
                with self._reading_path(folder), os.scandir(folder) as entries:
                    for entry in entries:
                        if entry.is_dir():
                            folders.append(entry.path)
                        else:
                            yield from self._entry(entry)
            except ObjectNotFound:
                continue

    def _entry(self, entry: os.DirEntry[str]) -> Iterator[Entry]:
        try:
            status = entry.stat()
        except FileNotFoundError:
            return  # deleted since the folder was read
        yield Entry(os.path.relpath(entry.path, self._root), status.st_size, status.st_mtime)

    def delete(self, names: Iterable[str]) -> None:
        for name in names:
            path = self._path(name)
            with suppress(*_ABSENT), self._writing(path, keep=_ABSENT):
                os.unlink(path)

    def open_input(self, name: str) -> Any:
        import pyarrow as pa

        with self._reading(name) as path:
            if os.path.isdir(path):
                raise IsADirectoryError(path)
            return pa.OSFile(path)

    def _path(self, name: str) -> str:
        return os.path.join(self._root, check_name(name))

    @contextmanager
    def _reading(self, name: str) -> Iterator[str]:
        path = self._path(name)
        with self._reading_path(path):
            yield path

    @contextmanager
    def _reading_path(self, path: str) -> Iterator[None]:
        try:
            yield
        except _ABSENT:
            raise ObjectNotFound(f"{path}: no such object; check the path") from None
        except OSError as error:
            raise _explain(path, error) from None

    @contextmanager
    def _writing(self, path: str, keep: tuple[type[OSError], ...] = ()) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if isinstance(error, keep):
                raise
            raise _explain(path, error) from None


def _root_of(uri: str) -> str:
    path = uri
    if uri.lower().startswith("file://"):
        host, slash, rest = uri[len("file://") :].partition("/")
        if not slash or host not in ("", "localhost"):
            raise ConfigError(f"{uri}: write it as file:///absolute/path")
        path = unquote("/" + rest)
    if not path or "\0" in path:
        raise ConfigError(f"{uri!r} is not a path; give a local path, file:///path or s3://bucket/prefix")
    return os.path.abspath(Path(path).expanduser())


def _link(partial: str, path: str) -> None:
    """Give the file its name; FileExistsError where there is one (a rename would replace it)."""
    try:
        os.link(partial, path)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK):
            raise
        # No hard links here: as good as it gets.
        if os.path.lexists(path):
            raise FileExistsError(path) from None
        os.replace(partial, path)


def _read_range(file: int, path: str, start: int, length: int) -> memoryview:
    held = os.fstat(file).st_size
    if length and start + length > held:  # before memory is taken for what isn't there
        raise short_answer(path, start, length, max(held - start, 0))
    # numpy leaves the memory unset where bytearray would first fill it with zeros.
    view = np.empty(length, np.uint8).data
    done = 0
    while done < length:
        count = os.preadv(file, [view[done:]], start + done)
        if count == 0:
            raise short_answer(path, start, length, done)
        done += count
    return view


def _write_all(file: int, view: memoryview, path: str) -> None:
    # Translated here, around the write alone: an OSError of the chunks' own is the caller's.
    try:
        while (count := os.write(file, view)) < view.nbytes:
            view = view[count:]
    except OSError as error:
        raise _explain(path, error) from None


def _explain(path: str, error: OSError) -> StoreError:
    advice = _ADVICE.get(error.errno or 0, "check the file system")
    kind = StoreUnavailable if error.errno in _PASSING else StoreError
    return kind(f"{path}: {error.strerror or error}; {advice}")
