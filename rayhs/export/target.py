"""Where an export goes: a folder or bucket of whole files, each written once, and a manifest that says what it is."""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from functools import partial
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from rayhs.config import StorageConfig
from rayhs.errors import ConfigError, FormatError, IdentityMismatch, ObjectNotFound
from rayhs.reading.ahead import in_order
from rayhs.reading.sample import Sample
from rayhs.store import Store, open_store

if TYPE_CHECKING:
    from rayhs.dataset import Dataset

MANIFEST = "rayhs-export.json"
_WRITERS = 8
_PIECE = 8 * 2**20

OnProgress = Callable[[int, int], None]
"""Called with how many files of samples are written, and how many there are."""


class Target:
    """The files of one export; safe for any number of threads.

    A file is written whole or not at all, so that what is there is done: an export that was interrupted goes on
    with what is missing. The manifest is written first, without ``"complete": true``, and last, with it.
    """

    def __init__(self, store: Store, identity: Mapping[str, Any], on_progress: OnProgress) -> None:
        """Use `open_target`."""
        self.uri = store.uri
        self._store, self._identity, self._on_progress = store, identity, on_progress
        self._sizes = dict(store.list(""))
        self.written = 0
        self._began = time.time()

    @property
    def fingerprint(self) -> str:
        """Sixteen hexadecimal digits of what is exported; the same wherever it is written to."""
        return hashlib.sha256(_json(self._identity)).hexdigest()[:16]

    def has(self, name: str) -> bool:
        return name in self._sizes

    def check_room(self, nbytes: int, advice: str) -> None:
        """Raises ConfigError where ``nbytes``, less what is there, are more than a folder's disk has room for."""
        if "://" in self.uri:
            return
        left, free = nbytes - sum(self._sizes.values()), shutil.disk_usage(self.uri).free
        if left > free:
            raise ConfigError(
                f"{self.uri}: the export takes {left / 2**20:,.0f} MiB more, and there is room for "
                f"{free / 2**20:,.0f}; {advice}"
            )

    def progress(self, done: int, total: int) -> None:
        """Tell who asked for the export how many samples are written."""
        self._on_progress(done, total)

    def put(self, name: str, data: bytes) -> None:
        """Raises StoreError."""
        self._store.put(name, data)
        self._sizes[name] = len(data)
        self.written += 1

    @contextmanager
    def file(self, name: str) -> Iterator[IO[bytes]]:
        """A temporary file that becomes ``name`` at the end of the block; for what is too large for memory."""
        with tempfile.TemporaryFile() as spool:
            yield spool
            size = spool.tell()
            spool.seek(0)
            self._store.put_stream(name, iter(lambda: spool.read(_PIECE), b""), size)
        self._sizes[name] = size
        self.written += 1

    def put_samples(self, dataset: Dataset, name: Callable[[int], str], encode: Callable[[Sample], bytes]) -> None:
        """One file a good sample, named by its number among them; those that are there already are not read.

        Some sixteen samples are in memory.

        Raises:
            RayhsError: whatever reading, ``encode`` or writing one raises; those before it stay.
        """
        positions = np.flatnonzero(dataset.good).tolist()
        missing = [number for number in range(len(positions)) if not self.has(name(number))]
        done, total = len(positions) - len(missing), len(positions)
        self._on_progress(done, total)

        def write(number: int, sample: Sample) -> None:
            self.put(name(number), encode(sample))

        samples = dataset.samples([positions[number] for number in missing])
        writes = (partial(write, number, sample) for number, sample in zip(missing, samples, strict=True))
        with closing(in_order(writes, _WRITERS - 1, _WRITERS)) as written:
            for _ in written:
                done += 1
                self._on_progress(done, total)

    def finish(self, facts: Mapping[str, Any]) -> dict[str, Any]:
        """Write the manifest, complete: the identity and ``facts``, with the number and bytes of all files."""
        names = [name for name in self._sizes if name != MANIFEST]
        totals = {"files": len(names), "bytes": sum(self._sizes[name] for name in names)}
        manifest = {**self._identity, **facts, **totals, "complete": True}
        self._store.put(MANIFEST, _json(manifest))
        # What killed exports left: everything is there, so that nobody is still at it.
        self._store.discard([left for left in self._store.unfinished() if left.begun < self._began])
        return manifest


def open_target(
    uri: str, identity: Mapping[str, Any], on_progress: OnProgress, storage: StorageConfig | None = None
) -> Target:
    """Begin an export, or go on with one.

    Raises:
        ConfigError: there is something else at ``uri``.
        IdentityMismatch: there is another export; names what differs.
        FormatError: there is a complete one whose files have changed since.
        StoreError: nothing can be written there.
    """
    store = open_store(uri, storage or StorageConfig())
    store.prepare()
    try:
        standing = json.loads(store.get(MANIFEST))
        if not isinstance(standing, dict):
            raise ValueError
    except ObjectNotFound:
        if next(iter(store.list("")), None) is not None:
            raise ConfigError(f"{store.uri}: there are files, and not of an export; give an empty folder") from None
        if not store.put_new(MANIFEST, _json({**identity, "complete": False})):
            _refuse_another(store.uri, json.loads(store.get(MANIFEST)), identity)  # begun at the same moment
    except ValueError:
        raise FormatError(f"{store.uri}/{MANIFEST}: not a JSON object; delete what is there and export again") from None
    else:
        if _is_begun(store, standing):
            _refuse_another(store.uri, standing, identity)
            _refuse_changed(store, standing)
        else:
            # One that stopped before its first file, on a wrong option, say: the right one may go here.
            store.put(MANIFEST, _json({**identity, "complete": False}))
    return Target(store, identity, on_progress)


def _is_begun(store: Store, standing: Mapping[str, Any]) -> bool:
    return bool(standing.get("complete")) or any(name != MANIFEST for name, _ in store.list(""))


def _refuse_another(uri: str, standing: Mapping[str, Any], identity: Mapping[str, Any]) -> None:
    for key, value in json.loads(_json(identity)).items():
        if standing.get(key) != value:
            raise IdentityMismatch(
                f"{uri}: holds an export with {key} {standing.get(key)}, this one has {value}; give another folder"
            )


def _refuse_changed(store: Store, standing: Mapping[str, Any]) -> None:
    """A file that is there counts as done, so that one which was changed or lost later would never be noticed."""
    if not standing.get("complete"):
        return
    sizes = [size for name, size in store.list("") if name != MANIFEST]
    if (len(sizes), sum(sizes)) != (standing.get("files"), standing.get("bytes")):
        raise FormatError(
            f"{store.uri}: {len(sizes)} files of {sum(sizes)} bytes, the export was complete with "
            f"{standing.get('files')} of {standing.get('bytes')}; delete the folder and export again"
        )


def _json(document: Mapping[str, Any]) -> bytes:
    return (json.dumps(document, indent=1) + "\n").encode()
