"""Which files are the input: a path, a folder, a glob or a `save_to_disk` folder turned into a list.

Any fsspec URL works. Pure: no Ray.
"""

from __future__ import annotations

import json
import posixpath
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, Literal

import xxhash

from rayhs.config import PromptsConfig, StorageConfig
from rayhs.errors import InputError, RayhsError, first_line
from rayhs.store import input_filesystem

FileFormat = Literal["jsonl", "parquet", "arrow"]

_SUFFIXES: dict[str, FileFormat] = {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}
_BUFFER_BYTES = 4 * 2**20
_HASHED_WHOLE_BYTES = 2**30
_GLOB = "*?["
_VERSION_KEYS = ("ETag", "etag", "mtime", "LastModified", "last_modified", "updated")  # back ends differ


@dataclass(frozen=True)
class InputFile:
    """One file of the input.

    ``source`` is the URL that leads to the file system, ``path`` the file in it; ``label`` is what
    sample ids and messages call the file, unique within an input. ``size`` is in bytes where the file
    system tells; ``version`` is its etag or time of modification.
    """

    source: str
    path: str
    label: str
    format: FileFormat
    gzip: bool
    local: bool
    size: int | None
    version: str

    @property
    def sequential(self) -> bool:
        """Whether a row can only be reached through all rows before it."""
        return self.gzip or (self.format == "arrow" and not self.local)


@contextmanager
def reading(what: str) -> Iterator[None]:
    """Turn whatever a file system or a decoder raises into an InputError that names ``what``."""
    try:
        yield
    except RayhsError:
        raise
    # fsspec's many back ends share no base class of errors.
    except Exception as error:
        detail = "no such file" if isinstance(error, FileNotFoundError) else first_line(error)
        raise InputError(f"{what}: can't be read ({detail}); check prompts.path") from error


def open_file(file: InputFile, storage: StorageConfig) -> BinaryIO:
    """Open the stored bytes (still compressed), seekable."""
    if file.local:
        return open(file.path, "rb", buffering=_BUFFER_BYTES)
    filesystem, _ = input_filesystem(file.source, storage)
    return filesystem.open(file.path, "rb", block_size=_BUFFER_BYTES)  # type: ignore[no-any-return]


def discover(prompts: PromptsConfig, storage: StorageConfig) -> list[InputFile]:
    """The input's files: paths in the order given, the files of a folder or glob sorted by path.

    Raises:
        InputError: a missing or unreadable path, no file of a known format, several formats, a file
            named twice, a folder of several splits.
    """
    paths = [prompts.path] if isinstance(prompts.path, str) else list(prompts.path or ())
    if not paths:
        raise InputError("prompts.path: the list is empty; name at least one file")
    found: list[InputFile] = []
    for path in paths:
        url = path if "://" in path or "::" in path else str(Path(path).expanduser().absolute())
        with reading(path):
            found += _expand(path, url, prompts, storage)
    seen: set[tuple[str, str]] = set()
    for file in found:
        place = ("" if file.local else file.source.partition("://")[0], file.path)
        if place in seen:
            raise InputError(f"{file.path}: named twice in prompts.path; its rows would be extracted twice")
        seen.add(place)
    if len({file.format for file in found}) > 1:
        raise InputError(
            f"{paths[0]}: holds files of several formats; name those of one format, for example with a glob"
        )
    return _labelled(found)


def _expand(shown: str, url: str, prompts: PromptsConfig, storage: StorageConfig) -> list[InputFile]:
    filesystem, root = input_filesystem(url, storage)
    if filesystem.isdir(root):
        names = _folder(shown, filesystem, root, prompts)
    elif prompts.format == "huggingface":
        raise InputError(f"{shown}: not a folder written by save_to_disk; give one, or another prompts.format")
    elif filesystem.exists(root):
        names = [root]
    elif any(character in root for character in _GLOB):
        names = sorted(name for name in filesystem.glob(root) if not filesystem.isdir(name))
        if not names:
            raise InputError(f"{shown}: no file matches; check prompts.path")
    else:
        raise InputError(f"{shown}: no such file or folder; check prompts.path")
    return [_file(name, url, filesystem, prompts) for name in names]


def _folder(shown: str, filesystem: Any, root: str, prompts: PromptsConfig) -> list[str]:
    if filesystem.exists(posixpath.join(root, "dataset_dict.json")):
        splits = json.loads(filesystem.cat_file(posixpath.join(root, "dataset_dict.json")))["splits"]
        raise InputError(f"{shown}: holds the splits {', '.join(splits)}; name one: {posixpath.join(shown, splits[0])}")
    if filesystem.exists(posixpath.join(root, "state.json")):
        state = json.loads(filesystem.cat_file(posixpath.join(root, "state.json")))
        return [posixpath.join(root, entry["filename"]) for entry in state["_data_files"]]
    if prompts.format == "huggingface":
        raise InputError(
            f"{shown}: not a folder written by save_to_disk (no state.json); give one, or another prompts.format"
        )
    wanted = (prompts.format,) if prompts.format else ("jsonl", "parquet")
    names = [name for name in sorted(filesystem.find(root)) if _format_of(name) in wanted and not _hidden(name, root)]
    if not names:
        raise InputError(f"{shown}: the folder has no .jsonl, .jsonl.gz or .parquet file; check prompts.path")
    return names


def _hidden(name: str, root: str) -> bool:
    return any(part.startswith((".", "_")) for part in name[len(root) :].split("/"))


def _format_of(name: str) -> FileFormat | None:
    stem, suffix = posixpath.splitext(name.lower())
    return _SUFFIXES.get(posixpath.splitext(stem)[1] if suffix == ".gz" else suffix)


def _file(name: str, url: str, filesystem: Any, prompts: PromptsConfig) -> InputFile:
    file_format: FileFormat | None = _format_of(name)
    if name.endswith(".arrow"):
        file_format = "arrow"
    elif prompts.format in ("jsonl", "parquet"):
        file_format = prompts.format
    if file_format is None:
        raise InputError(f"{name}: unknown format; set prompts.format to jsonl, parquet or huggingface")
    compressed = name.lower().endswith(".gz")
    if compressed and file_format != "jsonl":
        raise InputError(f"{name}: only jsonl is read gzipped; decompress it first")
    protocol = filesystem.protocol if isinstance(filesystem.protocol, str) else filesystem.protocol[0]
    info = filesystem.info(name)
    local = protocol in ("file", "local")
    versions = (str(info[key]) for key in _VERSION_KEYS if info.get(key) is not None)
    return InputFile(url, name, name, file_format, compressed, local, info.get("size"), next(versions, ""))


def _labelled(files: list[InputFile]) -> list[InputFile]:
    folders = [posixpath.dirname(file.path) for file in files]
    common = posixpath.commonpath(folders) if len({folder[:1] == "/" for folder in folders}) == 1 else ""
    labels = [posixpath.relpath(file.path, common) if common else file.path for file in files]
    if len(set(labels)) < len(labels):  # the same path in two file systems
        labels = [f"{file.source}/{file.path}" for file in files]
    return [replace(file, label=label) for file, label in zip(files, labels, strict=True)]


def fingerprint_files(files: Sequence[InputFile], storage: StorageConfig) -> str:
    """A hash of what the files hold: of their bytes where all are local and small together (a copy
    elsewhere gives the same), else of sizes and etags or times.

    Raises:
        InputError: a file can't be read.
    """
    digest = xxhash.xxh3_128()
    whole = all(file.local for file in files) and sum(file.size or 0 for file in files) <= _HASHED_WHOLE_BYTES
    for file in files:
        digest.update(f"{file.label}\0{file.format}\0{file.size}\0".encode())
        if not whole:
            digest.update(f"{file.version}\0".encode())
            continue
        with reading(file.path), open_file(file, storage) as raw:
            while piece := raw.read(_BUFFER_BYTES):
                digest.update(piece)
    return digest.hexdigest()
