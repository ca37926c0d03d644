"""SIGTERM at any time of a run: it ends as an interruption, and nothing of Ray goes on in the process."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from rayhs.cli.terminable import terminable
from rayhs.ray_threads import iterated_apart

RUN = """
import os, signal, sys, threading, time
from rayhs.config import parse_config
from rayhs.pipeline import run_extract

phase, later, slow, folder = sys.argv[1], float(sys.argv[2]), sys.argv[3] == "True", sys.argv[4]
signal.signal(signal.SIGTERM, signal.default_int_handler)
rows = [{"ids": [i, i + 1, i + 2]} for i in range(16 if phase == "indexing" else 80)]
config = parse_config({
    "model": "fake/4x8", "prompts": {"rows": rows, "token_ids": "ids"}, "output": folder + "/out", "layers": [2, 4],
    "shards": {"target_bytes": 2000, "rows_per_file": 4}, "cluster": {"address": "local"},
    "staging": {"path": folder},
}, "test")
sent = []

def end():
    os.kill(os.getpid(), signal.SIGTERM)

def on_progress(progress):
    if progress.phase == phase and (progress.done or phase == "indexing" or later) and not sent:
        sent.append(progress)
        threading.Timer(later, end).start() if later else end()

if slow:  # as on a machine where others have the cores
    from ray.data._internal.execution.streaming_executor import StreamingExecutor

    step = StreamingExecutor._scheduling_loop_step

    def late(*arguments):
        time.sleep(4 * bool(sent))
        return step(*arguments)

    StreamingExecutor._scheduling_loop_step = late

try:
    run_extract(config, on_progress)
    print("finished")
except KeyboardInterrupt:
    print("interrupted")
import ray
joined = ray.is_initialized()
time.sleep(6 if slow else 1)
names = [thread.name for thread in threading.enumerate() if thread.name.startswith("StreamingExecutor")]
print(joined, ray.is_initialized(), names)
sys.exit(130)
"""


@pytest.mark.ray
@pytest.mark.parametrize(
    ("phase", "later", "slow"),
    [("planning", 0.7, True), ("extracting", 0, True), ("indexing", 0, False)],
)
def test_a_sigterm_ends_all(tmp_path: Path, phase: str, later: float, slow: bool) -> None:
    """Between two rows of Ray Data, while they are waited for, and after Ray has been left."""
    command = [sys.executable, "-c", RUN, phase, str(later), str(slow), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.splitlines() == ["interrupted", "False False []"], done.stderr[-2000:]
    assert done.returncode == 130
    assert "not all replicas stopped" not in done.stderr


@pytest.mark.parametrize("order", [signal.SIGTERM, signal.SIGINT])
def test_an_order_that_python_drops_is_heard_at_the_next_progress(
    order: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Leaves:
        def __del__(self) -> None:
            signal.raise_signal(order)

    before = signal.getsignal(order)
    monkeypatch.setattr(sys, "unraisablehook", lambda dropped: told.append(dropped.exc_type))
    told: list[object] = []
    with pytest.raises(KeyboardInterrupt), terminable(told.append) as progress:
        progress("begun")
        Leaves()
        progress("gone on")
    assert told == ["begun", KeyboardInterrupt]
    assert signal.getsignal(order) is before


def test_a_sigterm_after_the_last_word_does_not_change_the_exit_code() -> None:
    late = "import atexit, os, signal; atexit.register(lambda: os.kill(os.getpid(), signal.SIGTERM))"
    command = [sys.executable, "-c", f"{late}; from rayhs.cli import main; main()", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout.split()[0]) == (0, "rayhs"), done.stderr


def test_rows_are_handed_on_in_order() -> None:
    assert list(iterated_apart(range(1000))) == list(range(1000))
    assert list(iterated_apart([])) == []
    assert list(iterated_apart([None, KeyError])) == [None, KeyError]


def test_what_an_iteration_raises_is_raised_where_its_rows_are_wanted() -> None:
    def rows() -> Iterator[int]:
        yield 1
        raise LookupError("gone")

    handed = iterated_apart(rows())
    assert next(handed) == 1
    with pytest.raises(LookupError, match="gone"):
        next(handed)


def test_an_iteration_that_is_left_ends() -> None:
    go_on, closed = threading.Event(), threading.Event()

    def rows() -> Iterator[int]:
        try:
            yield 1
            go_on.wait(30)
            yield 2
            yield 3
        finally:
            closed.set()

    handed = iterated_apart(rows())
    assert next(handed) == 1
    handed.close()
    assert not closed.is_set()
    go_on.set()
    assert closed.wait(30)
