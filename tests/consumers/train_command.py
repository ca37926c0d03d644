"""`speculators train ...` as its command line runs it; its metrics also go into a file, a JSON line a step.

    python tests/consumers/train_command.py METRICS train --verifier-name-or-path ...

Its trainer wants an accelerator; where torch knows none, it is told to take the CPU for one.
"""

from __future__ import annotations

import json
import logging
import runpy
import sys
from collections.abc import Mapping
from typing import Any

import torch
from speculators.train import trainer


def train_on_the_cpu() -> None:
    made = trainer.Trainer.__init__

    def make(self: Any, *arguments: Any, **named: Any) -> None:
        made(self, *arguments, **named)
        self.device_type = "cpu"

    trainer.Trainer.__init__ = make
    trainer.get_local_rank = lambda: torch.device("cpu")
    torch.accelerator.synchronize = lambda: None


def main() -> None:
    with open(sys.argv.pop(1), "w") as metrics:

        def noted(record: logging.LogRecord) -> bool:
            if isinstance(record.msg, Mapping):
                step = getattr(record, "step", None)
                metrics.write(json.dumps({"step": step, **record.msg}, default=str) + "\n")
            return True

        # A filter, as the command sets the logger's handlers itself.
        logging.getLogger("speculators.metrics").addFilter(noted)
        if not torch.accelerator.is_available():
            train_on_the_cpu()
        runpy.run_module("speculators", run_name="__main__")


if __name__ == "__main__":
    main()
