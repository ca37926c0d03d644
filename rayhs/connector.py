"""The KV connector: carries hidden states out of vLLM's cache into staged files.

vLLM's speculative method ``extract_hidden_states`` writes the states of every forward into the KV
cache of a dummy drafter. When a request has finished, this connector copies them out of its blocks
into one safetensors file in the staging directory (``hidden_states.<layer id>`` `[tokens, hidden]`,
``token_ids`` int32 `[tokens]`), handed over by an atomic rename, and only then lets vLLM free the
blocks. A sample that can't be staged is handed over as a failure, never left out.

Usable without the rest of rayhs::

    vllm serve MODEL \\
      --speculative-config '{"method": "extract_hidden_states", "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": [2, 15, 27]}}}' \\
      --kv-transfer-config '{"kv_connector": "HiddenStatesConnector",
        "kv_connector_module_path": "rayhs.connector", "kv_role": "kv_producer",
        "kv_connector_extra_config": {"staging_dir": "/dev/shm/states", "staging_bytes": 4294967296}}'

The answer's ``kv_transfer_params.hidden_states_path`` names the file; whoever reads it deletes it.
With ``"parts": n`` samples lie in arenas instead, of each of ``n`` tensor parallel ranks a share of the
layers, for a reader that uses `rayhs.parts.StagedParts`;
with ``"dtype": "float8_e4m3fn"`` they are staged as `rayhs.fp8` says (`rayhs.codec.staged_specs`).
A request may name its file with ``kv_transfer_params: {"rayhs_key": "row-17"}`` and ask for the
states of generated tokens with ``{"include_output_tokens": true}``.

This module runs inside vLLM's processes: it imports neither Ray nor an object-store client.
"""

from __future__ import annotations

import time
from array import array
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.config import get_layers_from_vllm_config
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    ExampleHiddenStatesConnector,
    extract_from_kv_cache,
)
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

from rayhs.arena import NoRoomNow
from rayhs.codec import FP8
from rayhs.copying import BlockCopier, HostCopier, StagedLayout, StateCache
from rayhs.cuda_copying import CudaCopier
from rayhs.errors import EngineError, SampleError
from rayhs.log import logger
from rayhs.metrics import Metrics, MetricsFile
from rayhs.parts import StagedParts
from rayhs.staging import StagingArea, is_key
from rayhs.versions import check_vllm

DEFAULT_STAGING_BYTES = 4 * 2**30
DEFAULT_PINNED_BYTES = 256 * 2**20
_BLOCKED_PAUSE_S = 0.001


@dataclass
class Save:
    """One finished request whose states are to be staged."""

    req_id: str
    key: str
    token_ids: array[int]  # 4 bytes a token: travels to the workers, and from there into staging, without a loop
    block_ids: list[int]


@dataclass
class SaveMetadata(KVConnectorMetadata):
    """Scheduler to workers, each step: what finished since the last one."""

    saves: list[Save] = field(default_factory=list)


class HiddenStatesConnector(KVConnectorBase_V1, SupportsHMA):
    """Store-only connector.

    Tensor parallel ranks hold the same states. Rank 0 carries them all into a file a sample; into arenas
    each carries its share.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any = None) -> None:
        check_vllm()
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        if vllm_config.parallel_config.pipeline_parallel_size > 1:
            raise EngineError("hidden states can't be extracted with pipeline parallelism; use tensor parallelism")
        spec = vllm_config.speculative_config
        if spec is None or spec.method != "extract_hidden_states":
            raise EngineError("HiddenStatesConnector needs the speculative method extract_hidden_states")
        self._layers = sorted(set(spec.draft_model_config.hf_config.eagle_aux_hidden_state_layer_ids))
        _refuse_overwritten_embeddings(vllm_config, self._layers)
        self._max_model_len = int(vllm_config.model_config.max_model_len)
        self._spec_tokens = int(spec.num_speculative_tokens)
        self._group, self._block_size = _state_group(vllm_config, kv_cache_config)
        extra = self._kv_transfer_config.get_from_extra_config
        directory = extra("staging_dir", "/dev/shm/rayhs")
        max_bytes = int(extra("staging_bytes", DEFAULT_STAGING_BYTES))
        self._area = StagingArea(directory, max_bytes)
        self._parts: StagedParts | None = None
        if parts := int(extra("parts", 0)):
            self._parts = StagedParts(directory, max_bytes, self._layers, parts)
        self._quantizes = _quantizes(extra("dtype", None))
        self._pinned_bytes = int(extra("pinned_bytes", DEFAULT_PINNED_BYTES))
        self._metrics = Metrics()
        self._measures = bool(extra("metrics", False))
        self._metrics_file: MetricsFile | None = None
        # Scheduler side.
        self._finished: list[Save] = []
        self._unwritten_from: dict[str, int] = {}
        # Worker side.
        self._queue: deque[Save] = deque()
        self._copier: BlockCopier | None = None
        self._told_no_room = False

    # --- scheduler side -------------------------------------------------------------------------

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        return None

    def build_connector_meta(self, scheduler_output: Any) -> SaveMetadata:
        for req, first in _left_out(scheduler_output, self._max_model_len - self._spec_tokens).items():
            self._unwritten_from[req] = min(first, self._unwritten_from.get(req, first))
        metadata = SaveMetadata(self._finished)
        self._finished = []
        return metadata

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        blocks = block_ids[self._group] if self._group < len(block_ids) else []
        return self.request_finished(request, blocks)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Queue the finished request's states; its blocks stay until they are staged."""
        unwritten_from = self._unwritten_from.pop(request.request_id, None)
        if request.status.name == "FINISHED_ABORTED":
            return False, None
        params = request.kv_transfer_params or {}
        key = params.get("rayhs_key", request.request_id)
        if not is_key(key):
            return False, {"hidden_states_error": f"rayhs_key {key!r} is not a file name of letters, digits, . _ -"}
        # The last sampled token was never an input, so it has no state.
        token_ids = (
            list(request.all_token_ids)[:-1] if params.get("include_output_tokens") else request.prompt_token_ids
        )
        reason = self._why_not(request, token_ids, block_ids, unwritten_from)
        if reason is not None:
            if self._parts is None:
                self._area.fail(key, f"not extracted: {reason}")
            return False, {"hidden_states_error": reason}
        self._finished.append(Save(request.request_id, key, array("i", token_ids), list(block_ids)))
        return True, {} if self._parts else {"hidden_states_path": str(self._area.path(key))}

    def _why_not(self, request: Any, token_ids: Any, block_ids: list[int], unwritten_from: int | None) -> str | None:
        if not token_ids:
            return "the prompt has no token ids (prompt embeddings can't be extracted)"
        if unwritten_from is not None and unwritten_from < len(token_ids):
            return (
                f"vLLM left the states out from token {unwritten_from} on, as a sequence of the step reached "
                f"max_model_len {self._max_model_len}; keep prompt and output tokens 2 below it"
            )
        if request.num_computed_tokens < len(token_ids) or len(block_ids) * self._block_size < len(token_ids):
            return f"only {request.num_computed_tokens} of {len(token_ids)} tokens were computed"
        if 0 in block_ids[: -(-len(token_ids) // self._block_size)]:
            return "blocks of the hidden-state cache were freed before the request finished"
        return None

    # --- worker side ----------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        from vllm.model_executor.models.extract_hidden_states import CacheOnlyAttentionLayer

        layers = get_layers_from_vllm_config(self._vllm_config, CacheOnlyAttentionLayer, list(kv_caches))
        if len(layers) != 1:
            raise EngineError(f"expected one hidden-state cache layer, found {sorted(layers)}")
        tensor = kv_caches[next(iter(layers))]
        axis, rank = _block_axis(tensor, len(self._layers), self._block_size), get_tensor_model_parallel_rank()
        if rank >= self.get_finished_count():
            return  # the others carry all layers there are
        cache = StateCache(tensor, axis, tuple(self._layers))
        if self._parts is not None:
            cache = cache.share(rank, len(self._parts.areas), self._parts.shares[rank])
            self._area = self._parts.areas[rank]
            self._area.preallocate()
        if self._measures:
            self._metrics_file = MetricsFile(self._area.directory, self._metrics)
        layout = StagedLayout(cache, self._quantizes)
        self._copier = (
            CudaCopier(layout, self._area, self._pinned_bytes, self._metrics)
            if tensor.device.type == "cuda"
            else HostCopier(layout, self._area, self._metrics)
        )

    def start_load_kv(self, *args: Any, **kwargs: Any) -> None:
        if self._copier is not None:
            self._copier.forward_begins()

    def wait_for_layer_load(self, layer_name: str) -> None:
        return None

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None:
        return None

    def wait_for_save(self) -> None:
        return None

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Start copies for what finished; return the requests whose blocks are copied."""
        if self._copier is None:
            return None, None
        with self._metrics.timed("step"):
            done = self._advance(self._copier)
        if self._metrics_file is not None:
            self._metrics_file.write()
        return done or None, None

    def _advance(self, copier: BlockCopier) -> set[str]:
        if self.has_connector_metadata():
            metadata = self._get_connector_metadata()
            if isinstance(metadata, SaveMetadata):
                self._queue.extend(metadata.saves)
        done: set[str] = set()
        while self._queue:
            outcome = self._start(self._queue[0])
            self._metrics.waiting("wait for staging", outcome is None)
            if outcome is None:
                time.sleep(_BLOCKED_PAUSE_S)  # the uploader is behind; keep the blocks, so that vLLM waits too
                break
            save = self._queue.popleft()
            if not outcome:
                done.add(save.req_id)
        done.update(copier.poll())
        return done

    def _start(self, save: Save) -> bool | None:
        """True: copying; False: handed over as a failure; None: no room in the staging area yet."""
        assert self._copier is not None
        try:
            nbytes = self._copier.staged_bytes(len(save.token_ids))
            if not self._area.has_room(nbytes):
                return None
            self._copier.start(save.req_id, save.key, save.token_ids, save.block_ids)
        except NoRoomNow as error:
            if not self._told_no_room:
                logger.warning("staging waits: %s", error)
            self._told_no_room = True
            return None
        except SampleError as error:
            self._area.fail(save.key, str(error))
            return False
        return True

    def shutdown(self) -> None:
        if self._copier is not None:
            self._copier.close()

    # --- what vLLM asks of the class ------------------------------------------------------------

    def get_finished_count(self) -> int:
        return len(self._parts.areas) if self._parts else 1  # ranks that report; the default waits for every one

    @property
    def prefer_cross_layer_blocks(self) -> bool:
        return False  # the drafter's cache must stay a tensor of its own

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        layout: str | None = ExampleHiddenStatesConnector.get_required_kvcache_layout(vllm_config)
        return layout


def _quantizes(dtype: object) -> bool:
    if dtype not in (None, FP8):
        raise EngineError(f"kv_connector_extra_config: dtype {dtype!r} is not {FP8}; leave it out for the model's own")
    return dtype == FP8


def _refuse_overwritten_embeddings(vllm_config: Any, layers: list[int]) -> None:
    # Without torch.compile vLLM's models hand out the embeddings themselves as state 0, and the fused
    # add-and-norm of the layers then adds to them in place (seen on CUDA with vLLM 0.26: 57 times off).
    compiled = int(vllm_config.compilation_config.mode or 0) > 0
    if 0 in layers and not compiled and vllm_config.device_config.device_type == "cuda":
        raise EngineError(
            "layer id 0 is overwritten by vLLM where it runs on a GPU without torch.compile; "
            "leave enforce_eager off, or leave layer 0 out"
        )


def _left_out(scheduler_output: Any, longest_allowed: int) -> dict[str, int]:
    """Requests whose states a step will not write, each with its first token that is left out.

    vLLM runs a whole step without the drafter, without a word, when one of its sequences comes
    within num_speculative_tokens of max_model_len.
    """
    scheduled = scheduler_output.num_scheduled_tokens
    cached = scheduler_output.scheduled_cached_reqs
    computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    computed.update((new.req_id, new.num_computed_tokens) for new in scheduler_output.scheduled_new_reqs)
    longest = max((computed[req] + count for req, count in scheduled.items()), default=0)
    return {req: computed[req] for req in scheduled} if longest > longest_allowed else {}


def _state_group(vllm_config: Any, kv_cache_config: Any) -> tuple[int, int]:
    """KV cache group of the hidden-state layer and its own block size (hybrid models give it another)."""
    if kv_cache_config is None or not kv_cache_config.kv_cache_groups:
        return 0, int(vllm_config.cache_config.block_size)
    groups = kv_cache_config.kv_cache_groups
    holding = [i for i, group in enumerate(groups) if any("cache_only_layers" in name for name in group.layer_names)]
    if len(holding) != 1:
        raise EngineError(f"the hidden-state cache is in {len(holding)} of {len(groups)} KV cache groups, expected one")
    return holding[0], int(groups[holding[0]].kv_cache_spec.block_size)


def _block_axis(cache: torch.Tensor, num_layers: int, block_size: int) -> int:
    """Axis of the positions within a block: 1 or 2 of ``[blocks, ., ., hidden]``; it moved in vLLM 0.29.

    The installed vLLM's own reader decides (it differs where layers and block size are equal), and
    the tensor must agree.
    """
    probe = extract_from_kv_cache(torch.zeros(1, 2, 3, 1), torch.zeros(1, dtype=torch.long), 1)
    axis = 1 if probe.shape[1] == 3 else 2
    expected = {axis: block_size, 3 - axis: num_layers}
    if cache.dim() != 4 or any(cache.shape[i] != size for i, size in expected.items()):
        raise EngineError(
            f"unknown hidden-state cache shape {list(cache.shape)} for {num_layers} layers, blocks of {block_size}; "
            "this vLLM lays it out in a way rayhs doesn't know"
        )
    return axis
