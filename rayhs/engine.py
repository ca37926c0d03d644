"""The engines behind an extractor: vLLM's AsyncLLM with our connector, or the fake one."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Sequence
from importlib import metadata
from typing import Any, Protocol

from rayhs.codec import FP8
from rayhs.config import EngineConfig, RunConfig, fake_shape
from rayhs.errors import EngineError, SampleError, one_line
from rayhs.fake import FakeEngine
from rayhs.model import ModelInfo, engine_dtype
from rayhs.parts import StagedParts

_CPU_CACHE_MOST_GIB = 16


class Engine(Protocol):
    """Turns token ids into a staged sample; many calls of `extract` run at once."""

    async def start(self) -> None:
        """Load the model. Raises EngineError."""
        ...

    async def extract(self, key: str, token_ids: Sequence[int]) -> None:
        """Run one prompt; its states (or their failure) arrive in the staging area under ``key``.

        Raises:
            SampleError: this prompt is refused; others go on.
            EngineError: the engine is dead.
        """
        ...

    def is_dead(self) -> bool:
        """Whether it has died since it was started."""
        ...

    async def stop(self) -> None: ...


def make_engine(
    config: RunConfig, model: ModelInfo, layers: Sequence[int], area: StagedParts, metrics: bool = False
) -> Engine:
    """Not started; with ``metrics`` the connector writes a `rayhs.metrics.MetricsFile` into ``area``."""
    if fake_shape(config.model):
        return FakeEngine(
            area,
            layers,
            model.hidden_size,
            engine_dtype(config, model),
            config.engine.include_generated,
            quantizes=config.shards.dtype == FP8,
        )
    return VllmEngine(config, engine_dtype(config, model), layers, area, metrics)


def speculative_config(layers: Sequence[int]) -> dict[str, Any]:
    """vLLM's ``speculative_config`` that caches the states of ``layers``."""
    return {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": list(layers)}},
    }


def kv_transfer_config(area: StagedParts, metrics: bool = False, quantizes: bool = False) -> dict[str, Any]:
    """vLLM's ``kv_transfer_config`` that stages those states in ``area``, in float8_e4m3fn if it ``quantizes``."""
    return {
        "kv_connector": "HiddenStatesConnector",
        "kv_connector_module_path": "rayhs.connector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {
            "staging_dir": str(area.directory),
            "staging_bytes": area.max_bytes,
            "parts": len(area.areas),
            "metrics": metrics,
            "dtype": FP8 if quantizes else None,
        },
    }


def plain_arguments(config: RunConfig, dtype: str) -> dict[str, Any]:
    """Keyword arguments of vLLM's engine without extraction; ``engine.vllm`` is laid over the defaults.

    ``dtype`` is stated always: vLLM's own "auto" turns a float32 checkpoint into bfloat16.

    Raises:
        EngineError: ``engine.vllm`` sets what rayhs itself decides.
    """
    engine: EngineConfig = config.engine
    ours: dict[str, Any] = {
        "model": config.model,
        "revision": config.revision,
        "dtype": dtype,
        "max_model_len": engine.max_model_len,
        "tensor_parallel_size": engine.tensor_parallel_size,
        "distributed_executor_backend": _executor(engine),
        "trust_remote_code": engine.trust_remote_code,
        "skip_tokenizer_init": True,
    }
    clash = sorted((set(ours) | {"speculative_config", "kv_transfer_config"}) & set(engine.vllm))
    if clash:
        raise EngineError(f"engine.vllm.{clash[0]}: rayhs sets it itself; use the run file's own key")
    return {**ours, **engine.vllm}


def engine_arguments(
    config: RunConfig, dtype: str, layers: Sequence[int], area: StagedParts, metrics: bool = False
) -> dict[str, Any]:
    """`plain_arguments`, and the extraction of ``layers`` into ``area``.

    Raises:
        EngineError: also where vLLM would overwrite layer 0.
    """
    if 0 in layers and config.engine.vllm.get("enforce_eager") and device() == "cuda":
        raise EngineError("engine.vllm.enforce_eager: vLLM overwrites layer 0 then; leave it off, or layer 0 out")
    return {
        **plain_arguments(config, dtype),
        "speculative_config": speculative_config(layers),
        "kv_transfer_config": kv_transfer_config(area, metrics, quantizes=config.shards.dtype == FP8),
    }


def _cpu_cache_gib() -> int:
    # vLLM's own default takes most of the host's memory, and refuses to start where others use some.
    with open("/proc/meminfo") as file:
        available_kib = next(int(line.split()[1]) for line in file if line.startswith("MemAvailable:"))
    return max(1, min(_CPU_CACHE_MOST_GIB, available_kib // 2**20 // 8))


def _executor(engine: EngineConfig) -> str | None:
    # Always set: inside a placement group vLLM would choose Ray by itself.
    if engine.tensor_parallel_size == 1 and engine.distributed_executor != "ray":
        return None
    return "mp" if engine.distributed_executor == "auto" else engine.distributed_executor


def prepare_vllm() -> None:
    """Set what vLLM reads from the environment; before it is imported."""
    # A forked core hangs for ever once its parent has run torch.
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    if device() == "cpu":
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", str(_cpu_cache_gib()))


def device() -> str:
    """``cpu`` where vLLM's CPU build is installed, else ``cuda``."""
    try:
        metadata.version("vllm-cpu")
    except metadata.PackageNotFoundError:
        return "cuda"
    return "cpu"


class VllmEngine:
    """vLLM's AsyncLLM; its core runs in a process of its own, started by spawn."""

    def __init__(
        self, config: RunConfig, dtype: str, layers: Sequence[int], area: StagedParts, metrics: bool = False
    ) -> None:
        self._arguments = engine_arguments(config, dtype, layers, area, metrics)
        self._generated = config.engine.include_generated
        self._llm: Any = None

    async def start(self) -> None:
        prepare_vllm()
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.async_llm import AsyncLLM

        try:
            # In a thread: it takes a minute, in which the replica may be told to stop.
            # As for offline work: else vLLM takes 2048 tokens a step and 128 sequences, whatever the GPU.
            self._llm = await asyncio.to_thread(
                AsyncLLM.from_engine_args,
                AsyncEngineArgs(**self._arguments),
                usage_context=UsageContext.LLM_CLASS,
            )
        except (RuntimeError, ValueError, TypeError, OSError, AssertionError, NotImplementedError) as error:
            raise EngineError(f"vLLM did not start: {one_line(error)}") from error

    async def extract(self, key: str, token_ids: Sequence[int]) -> None:
        from vllm import SamplingParams
        from vllm.inputs import tokens_input
        from vllm.sampling_params import RequestOutputKind
        from vllm.v1.engine.exceptions import EngineDeadError

        transfer = {"rayhs_key": key, "include_output_tokens": self._generated > 0}
        sampling = SamplingParams(
            temperature=0.0,
            max_tokens=1 + self._generated,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            extra_args={"kv_transfer_params": transfer},
            skip_clone=True,  # vLLM's deep copy would take a third of what a short prompt costs this process
        )
        prompt = tokens_input(list(token_ids))  # as vLLM itself would have made it of them, in a thread
        try:
            answers = [answer async for answer in self._llm.generate(prompt, sampling, request_id=key)]
        except EngineDeadError as error:
            raise EngineError(f"the engine died: {one_line(error)}") from error
        except _request_errors() as error:
            raise SampleError(f"refused by the engine: {one_line(error)}") from None
        refused = (answers[-1].kv_transfer_params or {}).get("hidden_states_error")
        if refused:
            raise SampleError(f"not extracted: {refused}")

    def is_dead(self) -> bool:
        return self._llm is not None and bool(self._llm.errored)

    async def stop(self) -> None:
        if self._llm is not None:
            with contextlib.suppress(TimeoutError):
                self._llm.shutdown()


def _request_errors() -> tuple[type[Exception], ...]:
    # vLLM gave its errors a common base in 0.27; before, a refused request was a ValueError.
    import vllm.exceptions
    from vllm.v1.engine.exceptions import EngineGenerateError

    base: type[Exception] = getattr(vllm.exceptions, "VLLMError", ValueError)
    return (base, ValueError, TypeError, EngineGenerateError)
