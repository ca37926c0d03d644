"""Our connector, which also notes when each forward was launched and when the GPU ran it: is it fed in time?"""

from __future__ import annotations

import json
import os
import time
from typing import Any

import torch

from rayhs.connector import HiddenStatesConnector

FILE = "RAYHS_STEPS"  # environment variable: where rank R writes its lines, at FILE.R
_BEHIND = 8  # steps; the GPU has certainly done the one before


class TimesSteps(HiddenStatesConnector):
    """A line a forward, seconds since the start: ``[launch begins, launched, GPU begins, GPU done]``."""

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        super().register_kv_caches(kv_caches)
        from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

        self._steps: list[tuple[float, float, torch.cuda.Event, torch.cuda.Event]] = []
        self._lines = open(f"{os.environ[FILE]}.{get_tensor_model_parallel_rank()}", "w", buffering=1)  # noqa: SIM115
        self._base = torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        self._base.record()
        torch.cuda.synchronize()
        self._zero = time.time()
        self._begun: tuple[float, torch.cuda.Event] | None = None

    def start_load_kv(self, *args: Any, **kwargs: Any) -> None:
        self._begun = (time.time() - self._zero, _now())
        super().start_load_kv(*args, **kwargs)

    def wait_for_save(self) -> None:
        if self._begun is not None:
            launched, begins = self._begun
            self._steps.append((launched, time.time() - self._zero, begins, _now()))
            self._begun = None
        if len(self._steps) > 50 + _BEHIND:
            for first, last, begins, ends in self._steps[:50]:
                gpu = [self._base.elapsed_time(event) / 1000 for event in (begins, ends)]
                print(json.dumps([self._zero, first, last, *gpu]), file=self._lines)
            del self._steps[:50]


def _now() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
