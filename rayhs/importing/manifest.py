"""``rayhs-export.json``, which `rayhs export` leaves beside its files and which knows what they lack."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rayhs.errors import ConfigError, FormatError
from rayhs.export.rows import SAMPLE_IDS
from rayhs.export.target import MANIFEST


@dataclass(frozen=True)
class Manifest:
    """Of an export; all None where there is no manifest."""

    model: str | None = None
    revision: str | None = None
    layers: tuple[int, ...] | None = None


def read_manifest(folder: Path, kind: str) -> Manifest:
    """Raises ConfigError: an export of another kind, not complete or without its ids; FormatError: it is damaged."""
    path = folder / MANIFEST
    try:
        document = json.loads(path.read_bytes())
    except FileNotFoundError:
        return Manifest()
    except (OSError, ValueError):
        raise FormatError(f"{path}: not a JSON document that can be read; export again") from None
    if not isinstance(document, dict):
        raise FormatError(f"{path}: not a JSON object; export again")
    if document.get("format") != kind:
        raise ConfigError(f"{folder}: holds an export for {document.get('format')}, not {kind}; say so with --from")
    if document.get("complete") is not True:
        raise ConfigError(f"{folder}: an export that is not complete; run rayhs export again, then import")
    if "sample_ids" in document and not (folder / SAMPLE_IDS).is_file():
        raise ConfigError(
            f"{folder}: {SAMPLE_IDS} is gone, and with it the ids of the samples; export again, then import"
        )
    return _checked(path, document)


def _checked(path: Path, document: Mapping[str, Any]) -> Manifest:
    model, revision, layers = (document.get(key) for key in ("model", "revision", "layer_ids"))
    known = isinstance(model, str) and isinstance(revision, str | None) and isinstance(layers, list)
    if not known or not all(type(layer) is int for layer in layers or ()):
        raise FormatError(f"{path}: without model, revision or layer_ids; export again")
    return Manifest(str(model), revision, tuple(layers or ()))
