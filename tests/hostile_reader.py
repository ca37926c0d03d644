"""Reads hostile datasets one after the other and says how each went: one JSON line a folder.

Run as ``python -m tests.hostile_reader FOLDER...``, so that one that crashes is seen by whom it doesn't hurt.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import rayhs
from rayhs import report
from rayhs.errors import RayhsError
from rayhs.store import open_store
from rayhs.verify import verify

LIMIT_BYTES = 8 * 2**30  # of address space: who asks for terabytes is told no, as on a small machine


def read(folder: str, partial: bool = False) -> str:
    ds = rayhs.open(folder, partial=partial)
    for position in range(min(len(ds), 20)):
        if ds.index["status"][position].as_py() == "ok":
            sample = ds[position]
            assert {len(s) for s in sample.hidden_states.values()} == {len(sample.token_ids)}
            _ = sample.columns
    return "fine"


def check(folder: str) -> str:
    found = verify(folder).findings
    return f"finding: {found[0]}" if found else "fine"


def look(folder: str) -> str:
    store = open_store(folder)
    verbs: list[Callable[[], object]] = [
        lambda: report.status(store),
        lambda: list(report.failures(store)),
        lambda: report.show(store),
    ]
    last = "fine"
    for verb in verbs:
        try:
            verb()
        except RayhsError as error:
            last = f"{type(error).__name__}: {error}"
            assert last.isprintable(), last
    return last


def unfinished(folder: str) -> str:
    (Path(folder) / "summary.json").unlink(missing_ok=True)
    looked = look(folder)
    done = read(folder, partial=True)
    return done if looked == "fine" else looked


STEPS: dict[str, Callable[[str], str]] = {"read": read, "verify": check, "look": look, "unfinished": unfinished}


def attempt(step: Callable[[str], str], folder: str) -> str:
    try:
        return step(folder)
    except RayhsError as error:
        return f"{type(error).__name__}: {error}"
    except BaseException as error:  # noqa: BLE001 - whatever got out is what the test wants to know
        return f"ESCAPED {type(error).__name__}: {error}"


def memory(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


def outcome_of(folder: str) -> dict[str, Any]:
    before, began = memory("VmRSS"), time.monotonic()
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts anew
    outcome: dict[str, Any] = {name: attempt(step, folder) for name, step in STEPS.items()}
    return {**outcome, "grown": memory("VmHWM") - before, "seconds": time.monotonic() - began}


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (LIMIT_BYTES, LIMIT_BYTES))
    for folder in sys.argv[1:]:
        print(json.dumps(outcome_of(folder)), flush=True)


if __name__ == "__main__":
    main()
