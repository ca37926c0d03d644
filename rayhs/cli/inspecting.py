"""`rayhs inspect`: its progress, its tables, its page."""

from __future__ import annotations

import posixpath
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from rayhs.cli.output import print_json, print_pairs
from rayhs.cli.progress import Display
from rayhs.config import StorageConfig
from rayhs.errors import ConfigError, printable

if TYPE_CHECKING:
    from rayhs.inspect import Inspection


class _Progress(Display):
    def __enter__(self) -> _Progress:
        self._enter()
        return self

    def __call__(self, phase: str, done: int, total: int) -> None:
        self.update(f"inspecting {phase}", done, total, f"{done:,} of {total:,} samples")


def run_inspect(uri: str, html: str | None, samples: int | None, storage: StorageConfig, json: bool) -> None:
    """Raises ConfigError where the page's name is no file's."""
    from rayhs.dataset import open_dataset
    from rayhs.inspect import inspect_dataset
    from rayhs.inspect.page import render
    from rayhs.store import open_store

    folder, name = _split(html) if html is not None else ("", "")
    dataset = open_dataset(uri, storage=storage)
    with _Progress() as progress:
        found = inspect_dataset(dataset, samples=samples, on_progress=progress)
    if html is not None:
        open_store(folder, storage).put(name, render(found).encode())
    if json:
        print_json(found.to_dict())
        return
    _print(found)
    if html is not None:
        print_pairs({"page": html})


def _split(html: str) -> tuple[str, str]:
    folder, name = posixpath.split(html)
    if not name.endswith((".html", ".htm")) or name.startswith("."):
        raise ConfigError(f"--html {html}: give the name of a file that ends in .html")
    return folder or ".", name


def _print(found: Inspection) -> None:
    from rayhs.inspect.numbers import percent, shown
    from rayhs.inspect.tables import largest_table, layer_table, massive_table, read_states

    ok, loss, duplicates = found.lengths.ok, found.loss, found.duplicates
    without = f"{found.failed:,} failed, {found.rejected:,} rejected"
    rows = {
        "dataset": found.uri,
        "model": found.model,
        "samples": f"{found.ok:,} of {found.samples:,}; {without}",
        **{
            f"  {printable(why, 120)}": f"{n:,} {status}"
            for status, kinds in found.reasons.items()
            for why, n in list(kinds.items())[:5]
        },
        "loss": f"{percent(loss.share)} of {loss.tokens:,} tokens; {loss.samples_without:,} samples have none",
        "duplicates": f"{duplicates.extra:,} samples repeat another's token ids, {duplicates.groups:,} groups",
        "states of": read_states(found.states, found.ok),
    }
    if ok is not None:
        rows["lengths"] = (
            f"mean {shown(ok.mean)}, median {ok.median:,}, p99 {ok.p99:,}, {ok.min:,} to {ok.max:,} tokens"
        )
    print_pairs(rows)
    bins = [one for one in found.lengths.histogram if one.ok or one.failed]
    _print_table(
        ["length", "samples", "failed"], [[f"{b.first:,}-{b.last:,}", shown(b.ok), shown(b.failed)] for b in bins]
    )
    _print_table(*layer_table(found.states))
    massive = found.states.massive
    if massive.top:
        _print_table(*massive_table(massive))
        _print_table(*largest_table(massive))
    else:
        print_pairs({"massive": "no activation over 100 and 1000 times the median (arXiv:2402.17762)"})


def _print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    table = Table(box=None, pad_edge=False)
    for name in header:
        table.add_column(name, overflow="fold", justify="left" if name in ("layer", "sample", "length") else "right")
    for row in rows:
        # Text, not str: ids come from data and may look like markup, or move the cursor.
        table.add_row(*(Text(printable(cell, 200)) for cell in row))
    sys.stdout.write("\n")
    Console(file=sys.stdout, width=None if sys.stdout.isatty() else 400, highlight=False).print(table)
