"""Files of vLLM's `ExampleHiddenStatesConnector`, or of `rayhs export --to vllm`.

Source: vLLM 0.33, `example_hidden_states_connector.py`. ``<name>.safetensors.lock`` is made when a request arrives and
held with flock until its file is written; it stays behind, unless a client removes it. A failed write is only logged.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import groupby, islice
from pathlib import Path

from rayhs.codec import Array
from rayhs.errors import InputError, SampleError
from rayhs.importing.dump import BATCH_ROWS, NO_TOKENS, SUFFIX, Dump, is_row
from rayhs.importing.ordered import in_order
from rayhs.importing.state_file import read_tokens, told
from rayhs.prompts.readers import InputRow
from rayhs.prompts.rows import PlannedSample, SampleMaker
from rayhs.shards import PlannedSample as ShardSample

_LOCK = ".lock"
_IDS = "sample_ids.jsonl"


class VllmDump(Dump):
    """Files in a folder and the folders below it, by name, those of a folder first; an id is a path without suffix.

    With ``sample_ids.jsonl``, which `rayhs export` writes, row i is ``i.safetensors`` and line i its id, a JSON string.
    """

    kind = "vllm"

    def __init__(self, folder: Path) -> None:
        """Raises InputError: no such folder, or files beside those that ``sample_ids.jsonl`` counts."""
        super().__init__(folder)
        if not folder.is_dir():
            raise InputError(f"{folder}: no such folder; give the one with the files *{SUFFIX}")
        self._listed = (folder / _IDS).is_file()
        if self._listed:
            self._refuse_unlisted()
        self.notes.append("files of vLLM have no loss mask: the loss is taken to count on every token")

    def paths(self) -> Iterator[str]:
        return (path for _, path in self._rows())

    def path(self, sample: ShardSample) -> str:
        return self._path_of(str(sample.index) if self._listed else sample.sample_id)

    def samples(self, vocab_size: int) -> Iterator[PlannedSample]:
        maker = SampleMaker(self.rules(None, vocab_size), None, "", ())
        found = in_order(lambda row: (row[0], self._tokens(row[1])), self._rows())
        while batch := list(islice(found, BATCH_ROWS)):
            made = iter(maker.make([InputRow(0, {"input_ids": ids}) for _, ids in batch if ids is not None], {}))
            for sample_id, ids in batch:
                sample = PlannedSample(sample_id, NO_TOKENS, None, None, None) if ids is None else next(made)
                yield _named(sample, sample_id)

    def refuse_layers(self, layers: Sequence[int], num_layers: int) -> None:
        pass  # vLLM writes what it is asked for, ascending

    def refuse_unwritten(self, path: str) -> None:
        with told(path):
            try:
                lock = os.open(path + _LOCK, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            except FileNotFoundError:
                return
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                raise SampleError("being written: its .lock file is held by a writer") from None
            except OSError:
                pass  # a file system without locks: whether the file is whole tells
            finally:
                os.close(lock)
        if not os.path.lexists(path):
            raise SampleError("never written: there is its .lock file alone")

    def _facts(self) -> Iterator[bytes]:
        if self._listed:
            yield (self.folder / _IDS).read_bytes()

    def _tokens(self, path: str) -> Array | None:
        try:
            self.refuse_unwritten(path)
            return read_tokens(path)
        except SampleError:
            return None  # found again, and recorded, when the sample is packed

    def _path_of(self, name: str) -> str:
        return f"{self.folder}{os.sep}{name}{SUFFIX}"

    def _rows(self) -> Iterator[tuple[str, str]]:
        """Id and file of each row."""
        if self._listed:
            return ((sample_id, self._path_of(str(row))) for row, sample_id in enumerate(self._lines()))
        return ((name, self._path_of(name)) for name in _walk(str(self.folder), "", ()))

    def _lines(self) -> Iterator[str]:
        for number, line in enumerate(self._raw_lines(), 1):
            try:
                sample_id = json.loads(line)
            except (ValueError, RecursionError):
                sample_id = None
            if not isinstance(sample_id, str):
                raise InputError(f"{self.folder}/{_IDS}: line {number} is not a JSON string; move the file elsewhere")
            yield sample_id

    def _raw_lines(self) -> Iterator[bytes]:
        with open(self.folder / _IDS, "rb") as lines:
            yield from lines

    @cached_property
    def _count(self) -> int:
        return sum(1 for _ in self._raw_lines())

    def _refuse_unlisted(self) -> None:
        with os.scandir(self.folder) as entries:
            names = (entry.name.removesuffix(_LOCK) for entry in entries)
            others = (name for name in names if name.endswith(SUFFIX))
            other = next((name for name in others if not is_row(name.removesuffix(SUFFIX), self._count)), None)
        if other is not None:
            raise InputError(
                f"{self.folder}/{other}: {_IDS} beside it has {self._count} lines, for 0{SUFFIX} and so on; "
                "move one of them elsewhere"
            )


def _named(sample: PlannedSample, sample_id: str) -> PlannedSample:
    try:
        sample_id.encode()
    except UnicodeEncodeError:
        shown = os.fsencode(sample_id).decode(errors="backslashreplace")
        return PlannedSample(shown, NO_TOKENS, None, "bad id: not valid Unicode", None)
    if not sample_id:
        return replace(sample, token_ids=NO_TOKENS, reason="bad id: empty")
    return replace(sample, sample_id=sample_id)


def _walk(folder: str, prefix: str, above: tuple[tuple[int, int], ...]) -> Iterator[str]:
    """Paths below ``folder`` without suffix; the names of one folder after the other are in memory."""
    status = os.stat(folder)
    place = (status.st_dev, status.st_ino)
    if place in above:
        raise InputError(f"{folder}: a link to a folder that it lies in; remove it")
    files, folders = [], []
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith("."):
                continue
            if entry.is_dir():
                folders.append(entry.name)
            elif (name := entry.name.removesuffix(_LOCK)).endswith(SUFFIX):
                files.append(name.removesuffix(SUFFIX))
    files.sort()
    for name, _ in groupby(files):  # a file and its lock
        yield prefix + name
    del files
    for name in sorted(folders):
        yield from _walk(f"{folder}{os.sep}{name}", f"{prefix}{name}/", (*above, place))
