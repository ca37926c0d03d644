"""Bounded host memory between vLLM's worker and the uploader: one file a sample, handed over whole.

A staged sample appears under its key by an atomic rename, or its failure as a small JSON file; a
reader never sees a part of either. Samples lie in one arena, allocated once, or in files of their own
where there is none or it has no gap as large. Runs inside vLLM's worker processes, so it imports
neither Ray nor an object-store client. Files on ``/dev/shm`` are memory: creating one reserves its
pages, so a full staging area is an error at creation and never a crash later.
"""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import re
import shutil
import tempfile
import threading
from pathlib import Path

from rayhs.arena import Arena, NoRoomNow, allocate_file
from rayhs.errors import SampleError
from rayhs.log import logger

_KEY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
_STAGED, _FAILED, _SLOT, _PARTIAL = ".safetensors", ".failed", ".slot", ".partial"
_OWN_FILES = (_STAGED, _PARTIAL)
_ARENA, _HELD = "arena", "held"
_LARGEST_ARENA = 16 * 2**30  # zeroing and page-locking take seconds for each 10 GiB
_DIRECTORY_PREFIX, _NEW_PREFIX = "rayhs-", ".rayhs-new-"
_LOCK = "owner.lock"


class StagingFull(SampleError):
    """The sample is larger than the whole staging limit."""


def is_key(key: object) -> bool:
    """Whether ``key`` can name a staged sample: letters, digits, '.', '_' and '-'; no path."""
    return isinstance(key, str) and _KEY.fullmatch(key) is not None


class StagedFile:
    """A staged sample being written, in a file of its own; `buffer` is its memory, the reader's after `publish`."""

    def __init__(self, final: Path, nbytes: int) -> None:
        self._final = final
        self._partial = final.with_suffix(_PARTIAL)
        self.buffer = memoryview(allocate_file(self._partial, nbytes))

    def publish(self) -> None:
        """Hand the whole sample over (atomic)."""
        os.rename(self._partial, self._final)

    def discard(self) -> None:
        """Drop a sample that will not be handed over."""
        self._partial.unlink(missing_ok=True)


class StagedSlot:
    """The same in a piece of the arena."""

    def __init__(self, area: StagingArea, record: Path, buffer: memoryview, offset: int) -> None:
        self._area, self._record, self._offset = area, record, offset
        self.buffer = buffer

    def publish(self) -> None:
        # A symbolic link is created with its text at once: here the place of the sample.
        os.symlink(f"{self._offset} {len(self.buffer)}", self._record)
        self._area.published(self._record.name)

    def discard(self) -> None:
        self._area.discarded(self._record.name)


class StagingArea:
    """One directory of staged samples with a byte limit.

    Any number of processes may open the same directory; only one of them writes samples, and only
    one takes them. The limit counts the bytes of samples written and not yet released.
    """

    def __init__(self, directory: str | os.PathLike[str], max_bytes: int) -> None:
        self.directory = Path(directory)
        self.max_bytes = max_bytes
        self._held = self.directory / _HELD
        self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._used_at_most = self._files_bytes()
        self.arena: Arena | None = None
        self._slots: dict[str, tuple[int, int]] = {}  # (offset, bytes) by record name
        self._published: set[str] = set()
        self._mapped: memoryview | None = None
        self._lock = threading.RLock()

    # --- writer, any number of threads ----------------------------------------------------------

    def preallocate(self) -> None:
        """Take the memory of the whole limit at once, or 16 GiB; whoever takes a sample must then `release` it.

        What finds no place there gets a file of its own. No key may be used twice.
        """
        try:
            self._held.mkdir(exist_ok=True)
            self.arena = Arena(self.directory / _ARENA, min(self.max_bytes, _LARGEST_ARENA))
        except NoRoomNow as error:
            logger.warning("staging memory is not allocated at once: %s", error)

    def path(self, key: str) -> Path:
        """The file of a sample that has one of its own."""
        return self.directory / (key + _STAGED)

    def has_room(self, nbytes: int) -> bool:
        """Whether ``nbytes`` more fit the limit now.

        Raises:
            StagingFull: they never will.
        """
        if nbytes > self.max_bytes:
            raise StagingFull(
                f"staging full: the sample's states are {nbytes} bytes, over the staging limit of {self.max_bytes}"
            )
        with self._lock:
            if self._used_at_most + nbytes > self.max_bytes:
                self._measure()
            return self._used_at_most + nbytes <= self.max_bytes

    def create(self, key: str, nbytes: int) -> StagedFile | StagedSlot:
        """Reserve ``nbytes`` bytes for a sample; raises NoRoomNow when the file system has no room for a file."""
        with self._lock:
            slot = self._slot(key, nbytes)
            self._used_at_most += nbytes
        return slot or self._file(key, nbytes)

    def _file(self, key: str, nbytes: int) -> StagedFile:
        try:
            return StagedFile(self.path(key), nbytes)
        except NoRoomNow:
            with self._lock:
                self._used_at_most -= nbytes
            raise

    def _slot(self, key: str, nbytes: int) -> StagedSlot | None:
        if self.arena is None:
            return None
        offset = self.arena.allocate(nbytes)
        if offset is None:
            self._measure()
            offset = self.arena.allocate(nbytes)
        if offset is None:
            return None  # free memory is in pieces too small
        record = self.directory / (key + _SLOT)
        self._slots[record.name] = (offset, nbytes)
        return StagedSlot(self, record, self.arena.memory[offset : offset + nbytes], offset)

    def published(self, record: str) -> None:
        with self._lock:
            self._published.add(record)

    def discarded(self, record: str) -> None:
        assert self.arena is not None
        with self._lock:
            self.arena.free(self._slots.pop(record)[0])

    def _measure(self) -> None:
        """Count what is still used, and take back the slots that were released."""
        if self._published:
            # In this order: a record moves from the first to the second when it is taken.
            there = {*os.listdir(self.directory), *os.listdir(self._held)}
            for record in self._published.difference(there):
                self._published.discard(record)
                self.discarded(record)
        self._used_at_most = self._files_bytes() + sum(nbytes for _, nbytes in self._slots.values())

    def _files_bytes(self) -> int:
        total = 0
        with os.scandir(self.directory) as entries:
            for entry in entries:
                try:
                    if entry.name.endswith(_OWN_FILES):
                        total += entry.stat(follow_symlinks=False).st_size
                except FileNotFoundError:
                    continue  # taken while we looked
        return total

    def fail(self, key: str, reason: str) -> None:
        """Hand over that the sample could not be staged, and why."""
        partial = self.directory / f"{key}.failed{_PARTIAL}"
        partial.write_text(json.dumps({"reason": reason}))
        os.rename(partial, self.directory / (key + _FAILED))

    # --- reader ---------------------------------------------------------------------------------

    def arrivals(self) -> set[str]:
        """Keys handed over (staged or failed) and not taken."""
        names = os.listdir(self.directory)
        return {name[: -len(end)] for name in names for end in (_STAGED, _FAILED, _SLOT) if name.endswith(end)}

    def take(self, key: str) -> memoryview:
        """The bytes of a sample that has arrived, for as long as it is not released.

        Raises:
            SampleError: the writer handed over a failure; the message is its reason.
        """
        # The usual one first, and each call to the system once: it gives up the GIL, which many threads want.
        record = self.directory / (key + _SLOT)
        try:
            offset, nbytes = map(int, os.readlink(record).split())
        except FileNotFoundError:
            return self._take_file(key)
        os.rename(record, self._held / record.name)
        return self._mapping()[offset : offset + nbytes]

    def _take_file(self, key: str) -> memoryview:
        failed = self.directory / (key + _FAILED)
        if failed.exists():
            reason = json.loads(failed.read_text())["reason"]
            failed.unlink()
            raise SampleError(str(reason))
        with self.path(key).open("rb") as file:
            memory = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        self.path(key).unlink()
        return memory

    def release(self, key: str) -> None:
        """Give the memory of a taken sample back: it will be written over.

        That of a sample with a file of its own is freed with the last view of it.
        """
        (self._held / (key + _SLOT)).unlink(missing_ok=True)

    def _mapping(self) -> memoryview:
        if self._mapped is None:
            with (self.directory / _ARENA).open("rb") as file:
                # Populated: else every page is looked up when it is read first, by threads that are timed.
                flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
                self._mapped = memoryview(mmap.mmap(file.fileno(), 0, flags, mmap.PROT_READ))
        return self._mapped


class OwnedDirectory:
    """A fresh staging directory that belongs to this process and is recognisably dead without it."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        sweep_dead(root)
        made = Path(tempfile.mkdtemp(prefix=_NEW_PREFIX, dir=root))
        self._lock = os.open(made / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        # Named only now: another replica that sweeps must never see it without a lock.
        self.path = made.rename(made.with_name(_DIRECTORY_PREFIX + made.name.removeprefix(_NEW_PREFIX)))

    def remove(self) -> None:
        """Delete the directory; mappings already taken stay valid. Once more is fine."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def sweep_dead(root: str | os.PathLike[str]) -> None:
    """Free staging directories under ``root`` whose owner is gone (its lock is free)."""
    for directory in Path(root).glob(_DIRECTORY_PREFIX + "*"):
        try:
            lock = os.open(directory / _LOCK, os.O_RDWR)
        except OSError:
            continue  # not ours, or being made right now
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(directory, ignore_errors=True)
        except BlockingIOError:
            pass  # alive
        finally:
            os.close(lock)
