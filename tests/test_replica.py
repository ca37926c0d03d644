"""A replica with the fake engine, without Ray: from a plan in a store to committed shards."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rayhs
from rayhs.codec import decode, header_length, parse_header, state_name
from rayhs.config import parse_config
from rayhs.engine import kv_transfer_config
from rayhs.errors import EngineError, SampleError
from rayhs.fake import NAN_TOKEN, REFUSED_TOKEN, FakeEngine, fake_states
from rayhs.identity import dataset_record, identity_of
from rayhs.indexing import write_index
from rayhs.job import Job, Receipt, staging_bytes
from rayhs.layout import DATASET, CommitRecord, ShardId, commit_name
from rayhs.model import describe_model
from rayhs.reading.plan_reader import PlanReader
from rayhs.replica import Replica
from rayhs.store import open_store
from tests.planning import plan_here

HIDDEN = 32


def make_job(tmp_path: Path, prompts: Sequence[Sequence[int]], **sections: Any) -> Job:
    """A job over ``prompts`` whose shards hold about four of them."""
    settings: dict[str, Any] = {
        "model": f"fake/8x{HIDDEN}",
        "prompts": {"rows": [{"ids": list(p)} for p in prompts], "token_ids": "ids"},
        "layers": [2, 8],
        "output": str(tmp_path / "out"),
        "shards": {"target_bytes": 4 * 20 * 2 * HIDDEN * 4},
        "staging": {"path": str(tmp_path / "shm")},
        **sections,
    }
    (tmp_path / "shm").mkdir(exist_ok=True)
    config = parse_config(settings)
    model = describe_model(config)
    plan, _ = plan_here(config, (2, 8))
    return Job(config, model, dataset_record(identity_of(config, model, (2, 8)), plan))


def run_all(job: Job, shards: Sequence[ShardId] | None = None) -> tuple[list[Receipt], int]:
    async def run() -> tuple[list[Receipt], int]:
        replica = Replica(job)
        try:
            wanted = shards if shards is not None else job.dataset.plan.shard_ids()
            return list(await asyncio.gather(*(replica.run_shard(s) for s in wanted))), replica.budget.peak
        finally:
            await replica.stop()

    return asyncio.run(run())


def stored_states(job: Job) -> dict[int, dict[int, np.ndarray]]:
    """States of every good sample by index and layer, read from what the commit records name."""
    store = open_store(job.config.output)
    samples: dict[int, dict[int, np.ndarray]] = {}
    for shard in job.dataset.plan.shard_ids():
        record: CommitRecord = CommitRecord.from_bytes(store.get(commit_name(shard)), "commit")
        if record.object is None:
            continue
        data = memoryview(store.get(record.object))
        length = header_length(bytes(data[:8]), len(data))
        tensors, _ = parse_header(bytes(data[8 : 8 + length]), len(data))
        for i, start, count, status in zip(
            record.index, record.token_start, record.num_tokens, record.status, strict=True
        ):
            if status == "ok":
                arrays = {k: tensors[state_name(k)] for k in job.dataset.layers}
                samples[i] = {
                    k: decode(t, data[t.start : t.start + t.nbytes])[start : start + count] for k, t in arrays.items()
                }
    return samples


def prompts_of(count: int, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 600, rng.integers(1, 40)).tolist() for _ in range(count)]


def test_every_sample_is_committed_with_the_engines_states(tmp_path: Path) -> None:
    prompts = prompts_of(40)
    job = make_job(tmp_path, prompts)
    receipts, _ = run_all(job)
    assert len(receipts) > 5 and sum(r.samples for r in receipts) == 40
    assert sum(r.tokens for r in receipts) == sum(map(len, prompts))
    assert not any(r.error or r.failed for r in receipts)
    samples = stored_states(job)
    assert sorted(samples) == list(range(40))
    for i, prompt in enumerate(prompts):
        for layer in (2, 8):
            assert np.array_equal(samples[i][layer], fake_states(prompt, layer, HIDDEN))
    assert list((tmp_path / "shm").glob("rayhs-*")) == []


def test_a_refused_prompt_fails_alone(tmp_path: Path) -> None:
    prompts = prompts_of(12)
    prompts[5] = [1, REFUSED_TOKEN, 2]
    job = make_job(tmp_path, prompts)
    receipts, _ = run_all(job)
    assert sum(r.failed for r in receipts) == 1 and not any(r.error for r in receipts)
    assert sorted(stored_states(job)) == [i for i in range(12) if i != 5]
    store = open_store(job.config.output)
    shard = next(s for s in job.dataset.plan.shard_ids() if 5 in _record(store, s).index)
    record = _record(store, shard)
    assert record.reason[record.index.index(5)] == f"refused by the engine: token {REFUSED_TOKEN}"


def _record(store: Any, shard: ShardId) -> CommitRecord:
    record: CommitRecord = CommitRecord.from_bytes(store.get(commit_name(shard)), "commit")
    return record


def test_a_shard_that_is_committed_already_is_not_extracted_again(tmp_path: Path) -> None:
    job = make_job(tmp_path, prompts_of(12))
    first, _ = run_all(job)
    objects = sorted(name for name, _ in open_store(job.config.output).list("shards/"))
    again, _ = run_all(job)
    assert [(r.shard, r.samples, r.tokens, r.bytes) for r in again] == [
        (r.shard, r.samples, r.tokens, r.bytes) for r in first
    ]
    assert sorted(name for name, _ in open_store(job.config.output).list("shards/")) == objects


def test_staging_never_passes_its_limit(tmp_path: Path) -> None:
    job = make_job(tmp_path, prompts_of(60))
    limit = job.largest_shard_bytes
    job = make_job(tmp_path, prompts_of(60), staging={"path": str(tmp_path / "shm"), "max_bytes": limit})
    receipts, peak = run_all(job)
    assert not any(r.error for r in receipts)
    assert 0 < peak <= limit


def test_staging_that_the_file_system_has_no_room_for_is_noticed_at_start(tmp_path: Path) -> None:
    job = make_job(tmp_path, prompts_of(10), staging={"path": str(tmp_path / "shm"), "max_bytes": 2**60})
    with pytest.raises(EngineError, match=r"staging\.max_bytes is \d+, but .* has room for \d+ bytes"):
        staging_bytes(job)


def test_staging_too_small_for_one_shard_says_so(tmp_path: Path) -> None:
    job = make_job(tmp_path, prompts_of(10), staging={"path": str(tmp_path / "shm"), "max_bytes": 1000})
    with pytest.raises(EngineError, match=r"raise staging\.max_bytes, .* or lower shards\.target_bytes"):
        staging_bytes(job)


def test_a_failure_handed_over_by_the_connector_fails_the_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Failing(FakeEngine):
        async def extract(self, key: str, token_ids: Sequence[int]) -> None:
            if len(token_ids) == 7:
                self._area.areas[0].fail(key, "copy failed: from the GPU: misaligned")
            elif len(token_ids) == 9:
                raise SampleError("refused by the engine: too odd")
            else:
                await super().extract(key, token_ids)

    monkeypatch.setattr(
        "rayhs.replica.make_engine", lambda c, m, layers, area, metrics: Failing(area, layers, HIDDEN, "float32")
    )
    job = make_job(tmp_path, [[1, 2], list(range(7)), list(range(9)), [3, 4, 5]])
    receipts, _ = run_all(job)
    assert sum(r.failed for r in receipts) == 2
    assert sorted(stored_states(job)) == [0, 3]


@pytest.mark.parametrize(("stored", "shard_format"), [("bfloat16", "safetensors"), ("float16", "parquet")])
def test_states_are_converted_to_the_stored_dtype(tmp_path: Path, stored: str, shard_format: str) -> None:
    job = make_job(tmp_path, [[1, 2, 3], [4, 5]], shards={"dtype": stored, "format": shard_format})
    receipts, _ = run_all(job)
    assert sum(r.failed for r in receipts) == 0
    record = _record(open_store(job.config.output), ShardId(0, 0))
    assert str(record.object).endswith(shard_format) and record.num_tokens == [3, 2]


@pytest.mark.parametrize("shard_format", ["safetensors", "parquet"])
@pytest.mark.parametrize("engine_dtype", ["float32", "bfloat16"])
def test_states_in_float8(tmp_path: Path, engine_dtype: str, shard_format: str) -> None:
    prompts = [[1, 2, 3], [4, NAN_TOKEN], [4, 5]]
    shards = {"dtype": "float8_e4m3fn", "format": shard_format}
    job = make_job(tmp_path, prompts, shards=shards, engine={"dtype": engine_dtype})
    receipts, _ = run_all(job)
    assert sum(r.failed for r in receipts) == 1
    record = _record(open_store(job.config.output), ShardId(0, 0))
    assert record.status == ["ok", "failed", "ok"] and "not finite" in str(record.reason[1])
    assert set(record.errors) == {"2", "8"}
    open_store(job.config.output).put(DATASET, job.dataset.to_bytes())
    totals = write_index(open_store(job.config.output), job.dataset.plan)
    assert totals.errors == record.errors
    dataset = rayhs.open(job.config.output, partial=True)
    for i in (0, 2):
        for layer, states in dataset[i].hidden_states.items():
            exact = fake_states(prompts[i], layer, HIDDEN, engine_dtype)
            assert states.dtype == exact.dtype
            a, b = states.astype(np.float32), exact.astype(np.float32)
            off = np.linalg.norm(a - b, axis=1) / np.linalg.norm(b, axis=1)
            assert off.max() <= record.errors[str(layer)].max + 5e-3


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("generated", [0, 5, 5000])
@pytest.mark.parametrize("target", ["20kB", "64MiB"])
def test_no_shard_takes_more_staging_than_the_largest_is_said_to(
    tmp_path: Path, target: str, generated: int, ranks: int
) -> None:
    engine = {"include_generated": generated, "tensor_parallel_size": ranks}
    job = make_job(tmp_path, prompts_of(40), engine=engine, shards={"target_bytes": target})
    plan = PlanReader(open_store(job.config.output), job.dataset.plan)
    for shard in job.dataset.plan.shard_ids():
        lengths = plan.rows(shard, ["num_tokens"])["num_tokens"].to_pylist()
        assert sum(job.sample_bytes(n + generated) for n in lengths) <= job.largest_shard_bytes


def test_over_several_nodes_rank_0_stages_all(tmp_path: Path) -> None:
    """The others' memory is not the replica's."""
    one = make_job(tmp_path, [[1, 2]], engine={"tensor_parallel_size": 4, "distributed_executor": "mp"})
    several = make_job(tmp_path, [[1, 2]], engine={"tensor_parallel_size": 4, "distributed_executor": "ray"})
    assert (one.ranks, several.ranks) == (4, 1)
    area = Replica(several)._make_area("engine0")
    told = kv_transfer_config(area)["kv_connector_extra_config"]
    assert told["parts"] == len(area.areas) == 1
    assert area.areas[0].max_bytes == area.max_bytes == told["staging_bytes"]


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_stage_their_shares(tmp_path: Path, ranks: int) -> None:
    prompts = [*prompts_of(12), [4, NAN_TOKEN], [4, 5]]
    job = make_job(tmp_path, prompts, engine={"tensor_parallel_size": ranks})
    receipts, _ = run_all(job)
    assert sum(r.failed for r in receipts) == 1
    states = stored_states(job)
    assert sorted(states) == [*range(12), 13]
    for index, layers in states.items():
        assert all(np.array_equal(layers[k], fake_states(prompts[index], k, HIDDEN)) for k in (2, 8))


def test_a_replica_killed_leaves_staging_that_the_next_one_frees(tmp_path: Path) -> None:
    job = make_job(tmp_path, prompts_of(4))
    code = (
        "import sys; from rayhs.staging import OwnedDirectory, StagingArea\n"
        "StagingArea(OwnedDirectory(sys.argv[1]).path / 'engine1', 2**20).create('a', 1000)\n"
        "import os, signal; print(1, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    killed = subprocess.run([sys.executable, "-c", code, str(tmp_path / "shm")], check=False, env=os.environ)
    assert killed.returncode == -signal.SIGKILL
    assert len(list((tmp_path / "shm").iterdir())) == 1
    run_all(job)
    assert list((tmp_path / "shm").iterdir()) == []
