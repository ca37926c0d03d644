"""Runs in the consumers' environment, once for many exports: importing these packages takes longer than using them.

    python run.py TASKS RESULTS

TASKS is a JSON list of objects: ``reader``, the name of a module:function beside this file, and its arguments. RESULTS
gets the list of what the readers return, or ``{"refused": ...}`` where a consumer raises ValueError.
"""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any


def run(reader: str, **arguments: Any) -> Any:
    module, _, name = reader.partition(":")
    try:
        return getattr(import_module(module), name)(**arguments)
    except ValueError as error:
        return {"refused": str(error)}


if __name__ == "__main__":
    tasks, results = map(Path, sys.argv[1:])
    results.write_text(json.dumps([run(**task) for task in json.loads(tasks.read_text())]))
