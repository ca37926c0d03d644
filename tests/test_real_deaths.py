"""A prompt that kills a real vLLM engine fails alone. Six starts of the engine: `make chaos` runs it."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from rayhs.config import parse_config
from rayhs.cores import CoreClaim
from rayhs.identity import dataset_record, identity_of
from rayhs.job import Job, Receipt
from rayhs.layout import CommitRecord
from rayhs.model import describe_model
from rayhs.replica import Replica
from rayhs.store import open_store
from tests.models import random_prompts, save_tiny_model
from tests.planning import plan_here

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.chaos]

BEYOND_THE_EMBEDDING = 600  # of 512 rows: the lookup fails inside the engine, which dies of it


def test_a_prompt_that_kills_vllm_fails_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_tiny_model("llama", tmp_path / "model")
    prompts = random_prompts([40] * 12, seed=1)
    prompts[7] = [3, BEYOND_THE_EMBEDDING, 4]
    config = parse_config(
        {
            "model": str(folder),
            "prompts": {"rows": [{"ids": p} for p in prompts], "token_ids": "ids"},
            "layers": [0, 3],
            "output": str(tmp_path / "out"),
            "engine": {"max_model_len": 256, "vllm": {"enforce_eager": True, "max_num_seqs": 8}},
            "shards": {"target_bytes": 2**26},
        }
    )
    model = describe_model(config)
    monkeypatch.setattr("tests.planning.describe_model", lambda config: replace(model, vocab_size=1000))
    plan, _ = plan_here(config, (0, 3))
    job = Job(config, model, dataset_record(identity_of(config, model, (0, 3)), plan))
    cores = CoreClaim(2)
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", cores.thread_binding(1))

    async def run() -> list[Receipt]:
        replica = Replica(job)
        try:
            return list(await asyncio.gather(*map(replica.run_shard, plan.shard_ids())))
        finally:
            await replica.stop()

    receipts = asyncio.run(run())
    cores.release()
    assert [r.error for r in receipts if r.error] == []
    assert sum(r.failed for r in receipts) == 1
    store = open_store(config.output)
    for name, _ in store.list("commits"):
        record: CommitRecord = CommitRecord.from_bytes(store.get(name), name)
        reasons = {i: r for i, r in zip(record.index, record.reason, strict=True) if r}
        assert set(reasons) == {7} and reasons[7].startswith("killed the engine: the engine died")
