"""Our connector, which also notes what vLLM's engine core and workers are at, and when the GPU ran each forward.

``gpu`` are a step's forward and its drafter's on the device, ``launch`` the same on the host.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

from rayhs.connector import HiddenStatesConnector
from tests.benchmarks.noted import Lines

_BEHIND = 8  # steps; the GPU has certainly done the one before
_EXECUTION = ("execute_model", "_update_states", "_prepare_inputs", "_build_attention_metadata", "_model_forward")
_SAMPLING = ("sample_tokens", "_sample", "propose_draft_token_ids", "_bookkeeping_sync")


class TimesSteps(HiddenStatesConnector):
    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        if role == KVConnectorRole.SCHEDULER:
            from vllm.v1.core.sched.scheduler import Scheduler
            from vllm.v1.engine.core import EngineCore
            from vllm.v1.executor.multiproc_executor import FutureWrapper, MultiprocExecutor

            self._lines = Lines("core")
            self._lines.watch(Scheduler, "schedule", "update_from_output", "add_request")
            self._lines.watch(MultiprocExecutor, "execute_model", "sample_tokens")
            self._lines.watch(FutureWrapper, "result")
            self._lines.watch(EngineCore, "step_with_batch_queue", "preprocess_add_request")

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        self._lines.flush()
        return super().build_connector_meta(scheduler_output)

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        super().register_kv_caches(kv_caches)
        from vllm.v1.worker.gpu_model_runner import GPUModelRunner

        self._lines = Lines(str(get_tensor_model_parallel_rank()))
        self._lines.watch(GPUModelRunner, *_EXECUTION, *_SAMPLING)
        self._steps: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._base = torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        self._base.record()
        torch.cuda.synchronize()
        self._zero = time.time()
        self._begun: tuple[float, torch.cuda.Event] | None = None

    def start_load_kv(self, *args: Any, **kwargs: Any) -> None:
        self._begun = (time.time(), _now())
        super().start_load_kv(*args, **kwargs)

    def get_finished(self, finished_req_ids: set[str]) -> Any:
        begin = time.time()
        found = super().get_finished(finished_req_ids)
        self._lines.add("get_finished", begin, time.time())
        return found

    def wait_for_save(self) -> None:
        if self._begun is None:
            return
        launched, begins = self._begun
        self._lines.add("launch", launched, time.time())
        self._steps.append((begins, _now()))
        self._begun = None
        if len(self._steps) > 50 + _BEHIND:
            for events in self._steps[:50]:
                begin, end = (self._zero + self._base.elapsed_time(event) / 1000 for event in events)
                self._lines.add("gpu", begin, end)
            del self._steps[:50]
            self._lines.flush()


def _now() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
