"""`rayhs import`: a dump of another tool into a dataset."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from rayhs.cli.output import print_json, print_run
from rayhs.cli.progress import RunProgress
from rayhs.cli.terminable import terminable
from rayhs.config import StorageConfig, apply_override


def run_import(
    folder: str,
    output: str,
    kind: str,
    model: str | None,
    layers: str | None,
    settings: Sequence[str],
    storage: StorageConfig,
    repair: bool,
    json: bool,
) -> int:
    """The exit code; raises as `rayhs.importing.import_files`."""
    from rayhs.importing import import_files

    document: dict[str, Any] = {"storage": storage.model_dump(exclude_none=True)}
    for setting in settings:
        apply_override(document, setting)
    named = None if layers is None else [_layer(part) for part in layers.split(",") if part.strip()]
    with RunProgress() as shown, terminable(shown) as progress:
        result, notes = import_files(
            folder,
            output,
            kind,
            model=model,
            layers=named,
            settings=document,
            on_progress=progress,
            repair_first=repair,
        )
    if json:
        totals = result.summary.model_dump(exclude={"index_checksums"})
        print_json({"uri": result.uri, "exit_code": result.exit_code, "notes": list(notes), **totals})
    else:
        print_run(result, sys.stdout, notes)
    return result.exit_code


def _layer(text: str) -> str | int:
    part = text.strip()
    return int(part) if part.removeprefix("-").isdecimal() else part
