"""Bounded host memory between vLLM's worker and the uploader: one file a sample, handed over whole.

A staged sample appears under its key by an atomic rename, or its failure as a small JSON file; a
reader never sees a part of either. Runs inside vLLM's worker processes, so it imports neither Ray
nor an object-store client. Files on ``/dev/shm`` are memory: creating one reserves its pages, so a
full staging area is an error at creation and never a crash later.
"""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import re
import shutil
import tempfile
from pathlib import Path

from rayhs.errors import RayhsError, SampleError

_KEY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
_STAGED, _FAILED, _PARTIAL = ".safetensors", ".failed", ".partial"
_DIRECTORY_PREFIX, _NEW_PREFIX = "rayhs-", ".rayhs-new-"
_LOCK = "owner.lock"


class StagingFull(SampleError):
    """The sample is larger than the whole staging limit."""


class NoRoomNow(RayhsError):
    """The file system has no room at the moment, whatever the limit: others fill it too."""


def is_key(key: object) -> bool:
    """Whether ``key`` can name a staged sample: letters, digits, '.', '_' and '-'; no path."""
    return isinstance(key, str) and _KEY.fullmatch(key) is not None


class StagedFile:
    """A staged sample being written; `buffer` is its memory, shared with the reader after `publish`."""

    def __init__(self, final: Path, nbytes: int) -> None:
        self._final = final
        self._partial = final.with_suffix(_PARTIAL)
        descriptor = os.open(self._partial, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, nbytes)
            self.buffer = mmap.mmap(descriptor, nbytes)
        except OSError as error:
            self._partial.unlink()
            raise NoRoomNow(f"{final.parent}: {error.strerror} for {nbytes} bytes; free some of it") from None
        finally:
            os.close(descriptor)

    def publish(self) -> None:
        """Hand the whole sample over (atomic)."""
        os.rename(self._partial, self._final)

    def discard(self) -> None:
        """Drop a sample that will not be handed over."""
        self._partial.unlink(missing_ok=True)


class StagingArea:
    """One directory of staged samples with a byte limit.

    Any number of processes may open the same directory; only one of them writes samples. The limit
    counts the bytes of files written and not yet released.
    """

    def __init__(self, directory: str | os.PathLike[str], max_bytes: int) -> None:
        self.directory = Path(directory)
        self.max_bytes = max_bytes
        self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._used_at_most = self._measure()

    def path(self, key: str) -> Path:
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
        if self._used_at_most + nbytes > self.max_bytes:
            self._used_at_most = self._measure()
        return self._used_at_most + nbytes <= self.max_bytes

    def create(self, key: str, nbytes: int) -> StagedFile:
        """Reserve a file of ``nbytes`` bytes; raises NoRoomNow when the file system has no room for it."""
        staged = StagedFile(self.path(key), nbytes)
        self._used_at_most += nbytes
        return staged

    def fail(self, key: str, reason: str) -> None:
        """Hand over that the sample could not be staged, and why."""
        partial = self.directory / f"{key}.failed{_PARTIAL}"
        partial.write_text(json.dumps({"reason": reason}))
        os.rename(partial, self.directory / (key + _FAILED))

    def arrivals(self) -> set[str]:
        """Keys handed over (staged or failed) and not taken."""
        with os.scandir(self.directory) as entries:
            names = [entry.name for entry in entries]
        return {name[: -len(end)] for name in names for end in (_STAGED, _FAILED) if name.endswith(end)}

    def take(self, key: str) -> memoryview:
        """Map a sample that has arrived and remove its name; its memory is freed with the last view of it.

        Raises:
            SampleError: the writer handed over a failure; the message is its reason.
        """
        failed = self.directory / (key + _FAILED)
        if failed.exists():
            reason = json.loads(failed.read_text())["reason"]
            failed.unlink()
            raise SampleError(str(reason))
        with self.path(key).open("rb") as file:
            memory = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        self.path(key).unlink()
        return memory

    def _measure(self) -> int:
        total = 0
        with os.scandir(self.directory) as entries:
            for entry in entries:
                try:
                    total += entry.stat().st_size
                except FileNotFoundError:
                    continue  # taken while we looked
        return total


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
