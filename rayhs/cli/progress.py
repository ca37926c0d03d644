"""Progress on standard error: a bar on a terminal, else a plain line at most every few seconds."""

from __future__ import annotations

import sys
import threading
import time
from types import TracebackType
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from rayhs.cli.output import nbytes

if TYPE_CHECKING:
    from rayhs import tally

LINE_SECONDS = 5.0
BEAT_SECONDS = 20.0
_UNITS = {
    "checking": "shards",
    "planning": "rows",
    "starting": "replicas",
    "extracting": "shards",
    "importing": "shards",
    "indexing": "files",
    "measuring": "rounds",
}


class Display:
    """One phase at a time, as a bar or as lines."""

    def __init__(self) -> None:
        # An explicit stream: standard output may be redirected to standard error by then.
        self._console = Console(file=sys.stderr, highlight=False)
        self._bar: Progress | None = None
        self._phase: str | None = None
        self._line = ""
        self._printed = float("-inf")
        self._started = time.monotonic()
        self._lock = threading.Lock()
        self._ended = threading.Event()

    def _enter(self) -> None:
        if not self._console.is_terminal:
            threading.Thread(target=self._beat, name="rayhs-progress", daemon=True).start()
            return
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[text]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self._console,
            transient=True,
        )
        self._bar.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        if self._bar is not None:
            self._bar.stop()

    def update(self, phase: str, done: int, total: int | None, text: str) -> None:
        changed, self._phase = phase != self._phase, phase
        if self._bar is not None:
            if changed:
                for task in self._bar.task_ids:
                    self._bar.remove_task(task)
                self._bar.add_task(phase, total=total, text=text)
            self._bar.update(self._bar.task_ids[-1], completed=done, total=total, text=text)
            return
        with self._lock:
            self._line = f"{phase}: {text}"
            due = time.monotonic() - self._printed >= LINE_SECONDS
            if changed or due or (total is not None and done >= total):
                self._print()

    def _print(self) -> None:
        self._printed = time.monotonic()
        self._console.print(Text(f"[{self._printed - self._started:6.0f} s] {self._line}"), soft_wrap=True)

    def _beat(self) -> None:
        # Says the last line again while nothing changes, so that a log shows a run that is alive.
        while not self._ended.wait(LINE_SECONDS):
            with self._lock:
                if self._line and time.monotonic() - self._printed >= BEAT_SECONDS:
                    self._print()


class RunProgress(Display):
    """Shows the `rayhs.tally.Progress` records of a run; call it with each."""

    def __enter__(self) -> RunProgress:
        self._enter()
        self.update("preparing", 0, None, "model and prompts")
        return self

    def __init__(self) -> None:
        super().__init__()
        self._last: tuple[str, int] | None = None

    def __call__(self, progress: tally.Progress) -> None:
        if self._last == (progress.phase, progress.done) and progress.done == progress.total:
            return  # a phase that is done says so once
        self._last = (progress.phase, progress.done)
        self.update(progress.phase, progress.done, progress.total, self._text(progress))

    def _text(self, progress: tally.Progress) -> str:
        parts = []
        if progress.done or progress.total:
            of = f" of {progress.total:,}" if progress.total is not None else ""
            parts.append(f"{progress.done:,}{of} {_UNITS.get(progress.phase, '')}".rstrip())
        if progress.samples:
            parts.append(f"{progress.samples:,} samples")
        if progress.tokens:
            parts.append(f"{progress.tokens:,} tokens")
        if progress.tokens_per_second:
            parts.append(f"{progress.tokens_per_second:,.0f} tokens/s")
        if progress.bytes:
            parts.append(nbytes(progress.bytes))
        if progress.message:
            parts.append(progress.message)
        return ", ".join(parts) or "..."


class VerifyProgress(Display):
    """Shows shards checked and bytes read; call it with both."""

    def __enter__(self) -> VerifyProgress:
        self._enter()
        return self

    def __call__(self, done: int, total: int, read: int) -> None:
        self.update("verifying", done, total, f"{done:,} of {total:,} shards, {nbytes(read)}")
