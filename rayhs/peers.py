"""What extraction is measured against: vLLM's prefill alone, and vLLM's own example connector."""

from __future__ import annotations

import fcntl
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rayhs.config import RunConfig
from rayhs.cores import CoreClaim
from rayhs.engine import plain_arguments, prepare_vllm, speculative_config
from rayhs.extractor import ReplicaPlan
from rayhs.model import ModelInfo, engine_dtype
from rayhs.staging import OwnedDirectory

PeerKind = Literal["plain", "stock"]
_WARM_UP = 8


@dataclass(frozen=True)
class PeerJob:
    """Which engine a peer runs, and where the example connector's files go."""

    kind: PeerKind
    config: RunConfig
    model: ModelInfo
    layers: Sequence[int]


class Peer:
    """A Ray actor with the resources of a replica: the same engine and prompts, without rayhs."""

    def __init__(self, job: PeerJob, plan: ReplicaPlan) -> None:
        self._job = job
        self._cores = CoreClaim(0)
        self._owned: OwnedDirectory | None = None
        self._engine_cores = plan.engine_cores

    def start(self, prompts: Sequence[Sequence[int]]) -> None:
        """Start the engine and run a few prompts, reversed, so that nothing of them is in the prefix cache later."""
        if self._engine_cores:
            self._cores = CoreClaim(self._engine_cores)
            self._cores.bind(self._job.config.engine.tensor_parallel_size)
        if self._job.kind == "stock":
            self._owned = OwnedDirectory(self._job.config.staging.path)
        prepare_vllm()
        from vllm import LLM

        self._llm: Any = LLM(**self._arguments())
        self._generate([list(reversed(p)) for p in prompts[:_WARM_UP]])

    def device(self) -> str:
        """What vLLM calls the device it runs on."""
        from vllm.platforms import current_platform

        return str(current_platform.get_device_name())

    def run(self, prompts: Sequence[Sequence[int]]) -> None:
        """Returns once every prompt is prefilled and, by the example connector, every file is whole."""
        self._generate(prompts)

    def clear(self) -> None:
        """Forget the prompts and files of a round."""
        self._llm.reset_prefix_cache()
        if self._owned is not None:
            for path in self._owned.path.glob("*.safetensors*"):
                path.unlink()

    def stop(self) -> None:
        self._llm.llm_engine.engine_core.shutdown()
        if self._owned is not None:
            self._owned.remove()
        self._cores.release()

    def _arguments(self) -> dict[str, Any]:
        job = self._job
        arguments = plain_arguments(job.config, engine_dtype(job.config, job.model))
        if self._owned is None:
            return arguments
        transfer = {
            "kv_connector": "ExampleHiddenStatesConnector",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {"shared_storage_path": str(self._owned.path)},
        }
        return {**arguments, "speculative_config": speculative_config(job.layers), "kv_transfer_config": transfer}

    def _generate(self, prompts: Sequence[Sequence[int]]) -> None:
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False)
        answers = self._llm.generate([{"prompt_token_ids": list(p)} for p in prompts], sampling, use_tqdm=False)
        for answer in answers:
            path = (answer.kv_transfer_params or {}).get("hidden_states_path")
            if path is not None:
                wait_until_whole(path)


def wait_until_whole(path: str) -> None:
    """Return once the example connector has written this file: until then it holds a lock beside it."""
    with open(f"{path}.lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
