"""`rayhs export`: the list of exporters, and an export with its progress."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rayhs.cli.output import nbytes, print_json, print_pairs
from rayhs.cli.progress import Display
from rayhs.cli.terminable import terminable
from rayhs.config import StorageConfig
from rayhs.errors import ConfigError


class _Progress(Display):
    def __enter__(self) -> _Progress:
        self._enter()
        return self

    def __call__(self, done: int, total: int) -> None:
        self.update("exporting", done, total, f"{done:,} of {total:,} samples")


def list_exporters(name: str | None, json: bool) -> None:
    """What each of them, or ``name``, needs, writes and converts."""
    from rayhs.export import EXPORTERS, about, option_defaults

    names = EXPORTERS if name is None else (name,)
    if json:
        print_json({one: {**vars(about(one)), "options": option_defaults(one)} for one in names})
        return
    for one in names:
        described = about(one)
        options = ", ".join(f"{key}={_shown(value)}" for key, value in option_defaults(one).items()) or "none"
        print_pairs({one: described.consumer, **_rows(vars(described), options)}, sys.stdout)
        sys.stdout.write("\n")


def _shown(value: object) -> str:
    return "" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _rows(described: dict[str, str], options: str) -> dict[str, str]:
    return {f"  {key}": described[key] for key in ("needs", "writes", "converts")} | {"  --set": options}


def run_export(
    uri: str | None, output: str | None, to: str | None, settings: Sequence[str], storage: StorageConfig, json: bool
) -> None:
    """Raises ConfigError where an argument is missing."""
    from rayhs.dataset import open_dataset
    from rayhs.export import export_dataset
    from rayhs.export.options import parse_settings

    if uri is None or output is None or to is None:
        raise ConfigError("write rayhs export URI --to NAME OUT; rayhs export --list explains the names")
    dataset = open_dataset(uri, storage=storage)
    options = parse_settings(settings)
    with _Progress() as shown, terminable(shown) as progress:
        report = export_dataset(dataset, to, output, options=options, storage=storage, on_progress=progress)
    if json:
        print_json(report.to_dict())
        return
    rows = {
        "exported": report.uri,
        "for": to,
        "samples": f"{report.samples:,}" + f", {report.skipped:,} without states left out" * bool(report.skipped),
        "files": f"{report.files:,}, {nbytes(report.nbytes)}; {report.written:,} of them written now",
    }
    print_pairs(rows | {key: str(value) for key, value in report.notes.items()}, sys.stdout)
