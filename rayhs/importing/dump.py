"""What every kind of dump has: rows in a fixed order, a file for each, and a cheap fingerprint of all files."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from rayhs.errors import InputError, SampleError
from rayhs.importing.ordered import in_order
from rayhs.importing.state_file import StateFile, read_header
from rayhs.layout import MAX_TOKENS
from rayhs.prompts.rows import PlannedSample, RowRules
from rayhs.shards import PlannedSample as ShardSample

SUFFIX = ".safetensors"
NO_TOKENS = np.zeros(0, np.int32)
BATCH_ROWS = 256


class Dump(ABC):
    """A folder of files of hidden states, one a sample; nothing a file is kept but its name.

    ``notes`` say what the dump lacks and the dataset therefore takes for granted.
    """

    kind: str

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.notes: list[str] = []

    @abstractmethod
    def paths(self) -> Iterator[str]:
        """The file of each row, in order, there or not."""

    @abstractmethod
    def samples(self, vocab_size: int) -> Iterator[PlannedSample]:
        """The rows of the plan, in order. One whose file can't be read has no tokens, and fails when it is packed."""

    @abstractmethod
    def path(self, sample: ShardSample) -> str:
        """The file of a planned sample."""

    @abstractmethod
    def refuse_layers(self, layers: Sequence[int], num_layers: int) -> None:
        """Raises ConfigError where such files can't hold the layers."""

    def refuse_unwritten(self, path: str) -> None:  # noqa: B027 - not every kind leaves a sign of it
        """Raises SampleError where the file at ``path`` is known not to be finished."""

    def refuse_gone(self) -> None:
        """Raises InputError where the folder is not there any more: its files are not missing one by one then."""
        if not os.path.isdir(self.state_folder):
            raise InputError(f"{self.state_folder}: gone while it was read; run the same command again once it is back")

    @property
    def state_folder(self) -> Path:
        return self.folder

    def first_header(self) -> tuple[str, StateFile]:
        """The first file that can be read, with its header.

        Raises:
            InputError: there is none; tells what is wrong with the first one.
        """
        reason = "there is none"
        for number, path in enumerate(self.paths()):
            try:
                return path, read_header(path)
            except SampleError as error:
                reason = str(error) if number == 0 else reason
        raise InputError(
            f"{self.folder}: no file of hidden states can be read ({reason}); is it a dump of {self.kind}?"
        )

    def fingerprint(self) -> str:
        """A hash of names, sizes and times of modification of all files, in order."""
        digest = xxhash.xxh3_128(self.kind.encode())
        for part in self._facts():
            digest.update(part)
        root = len(str(self.folder))
        for path, stamp in in_order(lambda path: (path, file_stamp(path)), self.paths()):
            digest.update(os.fsencode(path[root:]) + b"\0" + stamp)
        return digest.hexdigest()

    def _facts(self) -> Iterator[bytes]:
        """What else the plan is made from."""
        yield b""

    def rules(self, mask_column: str | None, vocab_size: int) -> RowRules:
        """A row is an object with ``input_ids``. However long it is, its states are there: no limit."""
        return RowRules(
            kind="token_ids",
            column="input_ids",
            id_column=None,
            mask_column=mask_column,
            add_special_tokens=False,
            add_generation_prompt=False,
            too_long="reject",
            max_tokens=MAX_TOKENS,
            vocab_size=vocab_size,
        )


def is_row(text: str, rows: int) -> bool:
    """Whether ``text`` is how one of so many rows is written."""
    return text.isdecimal() and str(int(text)) == text and int(text) < rows


def file_stamp(path: Any) -> bytes:
    """Size and time of modification, or that there is no such file."""
    try:
        status = os.stat(path)
    except OSError:
        return b"none\0"
    return f"{status.st_size} {status.st_mtime_ns}\0".encode()
