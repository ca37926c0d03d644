"""The whole run on a real local Ray with the fake engine: identity, resume, failures, exit codes."""

from __future__ import annotations

import io
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import yaml

import rayhs
from rayhs.cli.output import print_run
from rayhs.cluster import graceful_stop
from rayhs.config import RunConfig, parse_config
from rayhs.dataset_run import RunResult
from rayhs.errors import ConfigError, IdentityMismatch, InputError, RayhsError, TooManyRejected
from rayhs.extractor import ReplicaPlan, extract_shards
from rayhs.fake import REFUSED_TOKEN, fake_states
from rayhs.job import Job
from rayhs.model import describe_model
from rayhs.pipeline import run_extract, run_plan
from rayhs.reading.catalog import read_dataset_record
from rayhs.report import status
from rayhs.store import open_store
from rayhs.tally import Progress
from rayhs.verify import verify
from tests.fault_proxy import FaultProxy
from tests.s3_servers import S3Server

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("local_ray")]

HIDDEN = 32
LAYERS = (2, 4, 5, 8)


def prompts_of(count: int, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 600, rng.integers(1, 50)).tolist() for _ in range(count)]


def settings(output: Path | str, prompts: list[list[int]], **sections: Any) -> dict[str, Any]:
    return {
        "model": f"fake/8x{HIDDEN}",
        "prompts": {"rows": [{"ids": p, "id": f"row-{i}", "topic": i % 3} for i, p in enumerate(prompts)]}
        | {"token_ids": "ids", "id": "id"},
        "layers": ["eagle3", "last"],
        "output": str(output),
        "shards": {"target_bytes": 100 * HIDDEN * 4 * 4, "rows_per_file": 25},
        **sections,
    }


def run(output: Path | str, prompts: list[list[int]], **sections: Any) -> RunResult:
    return run_extract(parse_config(settings(output, prompts, **sections)))


def assert_complete(output: Path | str, prompts: list[list[int]], missing: tuple[int, ...] = ()) -> None:
    dataset = rayhs.open(str(output))
    assert len(dataset) == len(prompts)
    for i, prompt in enumerate(prompts):
        if i in missing:
            continue
        sample = dataset[i]
        assert sample.sample_id == f"row-{i}" and sample.token_ids.tolist() == prompt
        for layer in LAYERS:
            assert np.array_equal(sample.hidden_states[layer], fake_states(prompt, layer, HIDDEN))


def test_prompts_become_a_dataset(tmp_path: Path) -> None:
    prompts = prompts_of(60)
    seen: list[Progress] = []
    (tmp_path / "staging").mkdir()
    config = settings(tmp_path / "out", prompts, staging={"path": str(tmp_path / "staging")}, cluster={"replicas": 2})
    result = run_extract(parse_config(config), seen.append)
    assert list((tmp_path / "staging").iterdir()) == []
    assert result.exit_code == 0 and result.summary.ok == 60
    assert result.summary.tokens == sum(map(len, prompts))
    assert_complete(tmp_path / "out", prompts)
    assert [p for i, p in enumerate(s.phase for s in seen) if i == 0 or seen[i - 1].phase != p] == [
        "preparing",
        "planning",
        "starting",
        "extracting",
        "indexing",
    ]
    assert seen[-2].done == seen[-2].total == result.summary.shards
    assert seen[-2].samples == 60 and seen[-2].tokens == result.summary.tokens


def test_extract_takes_keywords_or_a_run_file(tmp_path: Path) -> None:
    prompts = prompts_of(5)
    result = rayhs.extract(**settings(tmp_path / "a", prompts))
    assert result.summary.ok == 5
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(settings(tmp_path / "b", prompts)))
    assert rayhs.extract(tmp_path / "run.yaml").summary.ok == 5
    with pytest.raises(ConfigError):
        rayhs.extract()


def test_a_run_in_float8_takes_a_quarter_of_float32(tmp_path: Path) -> None:
    prompts = prompts_of(30)
    shards = {"dtype": "float8_e4m3fn", "target_bytes": 100 * HIDDEN * 4}
    result = run(tmp_path / "out", prompts, shards=shards)
    tokens = sum(map(len, prompts))
    assert result.summary.bytes < tokens * len(LAYERS) * (HIDDEN + 4) + tokens * 5 + 8000 * result.summary.shards
    assert set(result.summary.errors) == set(map(str, LAYERS))
    assert all(0.01 < error.mean < error.max < 0.05 for error in result.summary.errors.values())
    report = verify(str(tmp_path / "out"))
    assert report.ok and report.tokens == tokens
    told = status(open_store(str(tmp_path / "out")))
    assert told.dtype == "float8_e4m3fn" and set(told.errors) == set(result.summary.errors)
    out = io.StringIO()
    print_run(result, out)
    assert out.getvalue().count("float8 error") == len(LAYERS)


def test_two_replicas_give_the_dataset_of_one(tmp_path: Path) -> None:
    prompts = prompts_of(80)
    run(tmp_path / "one", prompts)
    run(tmp_path / "two", prompts, cluster={"replicas": 2})
    one, two = rayhs.open(str(tmp_path / "one")), rayhs.open(str(tmp_path / "two"))
    without_attempt = [c for c in one.index.column_names if c != "shard"]
    assert one.index.select(without_attempt).equals(two.index.select(without_attempt))
    assert one.info.plan.fingerprint == two.info.plan.fingerprint
    assert_complete(tmp_path / "two", prompts)


def test_replicas_share_the_shards(tmp_path: Path) -> None:
    run_plan(parse_config(settings(tmp_path, prompts_of(400), cluster={"replicas": 2})))
    config = parse_config(settings(tmp_path, [], cluster={"replicas": 2}))
    record = read_dataset_record(open_store(str(tmp_path)))
    job = Job(config, describe_model(config), record, measured=True)  # they begin together, however late one starts
    shards = job.dataset.plan.shard_ids()
    with graceful_stop() as stop:
        receipts = list(extract_shards(job, shards, ReplicaPlan(config, [], "cpu"), stop).iter_rows())
    assert len(receipts) == len(shards) > 100 and not any(receipt["error"] for receipt in receipts)
    counts = Counter(receipt["replica"] for receipt in receipts)
    assert len(counts) == 2 and min(counts.values()) > len(shards) // 10, counts


def test_the_same_command_again_does_nothing_new(tmp_path: Path) -> None:
    prompts = prompts_of(20)
    run(tmp_path, prompts)
    before = sorted(p.name for p in (tmp_path / "shards").iterdir())
    again = run(tmp_path, prompts)
    assert again.exit_code == 0 and again.summary.ok == 20
    assert sorted(p.name for p in (tmp_path / "shards").iterdir()) == before


def test_a_run_goes_on_where_commits_end(tmp_path: Path) -> None:
    prompts = prompts_of(60)
    run(tmp_path, prompts)
    commits = sorted((tmp_path / "commits").iterdir())
    for path in [*commits[::2], tmp_path / "summary.json", *(tmp_path / "index").iterdir()]:
        path.unlink()
    kept = {path.name: path.stat().st_mtime_ns for path in commits[1::2]}
    run(tmp_path, prompts)
    assert {name: (tmp_path / "commits" / name).stat().st_mtime_ns for name in kept} == kept
    assert_complete(tmp_path, prompts)


def test_a_damaged_shard_is_redone_once_its_commit_record_is_deleted(tmp_path: Path) -> None:
    prompts = prompts_of(60)
    run(tmp_path, prompts)
    damaged = tmp_path / rayhs.open(str(tmp_path)).index["shard"][30].as_py()
    victim = tmp_path / "commits" / f"{damaged.name.rpartition('-')[0]}.json"
    damaged.write_bytes(damaged.read_bytes()[:100])
    victim.unlink()
    complete_meanwhile: list[bool] = []

    def look(progress: Progress) -> None:
        if progress.phase in ("extracting", "indexing"):
            complete_meanwhile.append((tmp_path / "summary.json").exists())

    assert run_extract(parse_config(settings(tmp_path, prompts)), look).exit_code == 0
    assert complete_meanwhile and not any(complete_meanwhile)
    assert_complete(tmp_path, prompts)


def test_a_finished_dataset_without_its_index_gets_it_again(tmp_path: Path) -> None:
    prompts = prompts_of(30)
    first = run(tmp_path, prompts)
    index = sorted((tmp_path / "index").iterdir())
    before = [path.read_bytes() for path in index]
    index[1].unlink()
    assert run(tmp_path, prompts).summary.tokens_per_second == first.summary.tokens_per_second
    assert [path.read_bytes() for path in index] == before


@pytest.fixture(scope="module")
def committed(local_ray: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset of `prompts_of(5)` that no test changes."""
    folder = tmp_path_factory.mktemp("committed")
    run(folder, prompts_of(5))
    return folder


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model": "fake/8x64"}, "hidden_size is 32 there, 64 here"),
        ({"layers": [1, 2]}, "layers is"),
        ({"shards": {"dtype": "float16", "target_bytes": 51200, "rows_per_file": 25}}, "dtype is 'float32' there"),
        ({"shards": {"target_bytes": 99999, "rows_per_file": 25}}, "the prompts, or how they are read and cut"),
        ({"engine": {"include_generated": 2}}, "include_generated is 0 there, 2 here"),
    ],
)
def test_another_identity_is_refused_with_what_differs(committed: Path, change: dict[str, Any], named: str) -> None:
    with pytest.raises(IdentityMismatch, match=named):
        run(committed, prompts_of(5), **change)
    with pytest.raises(IdentityMismatch, match="the prompts"):
        run(committed, prompts_of(5, seed=1))


def test_a_plan_without_any_commit_may_be_made_anew(tmp_path: Path) -> None:
    prompts = prompts_of(12)
    run_plan(parse_config(settings(tmp_path, prompts, layers="all")))
    assert run(tmp_path, prompts).exit_code == 0
    assert_complete(tmp_path, prompts)


def test_rejected_and_refused_prompts_are_counted_and_the_rest_is_kept(tmp_path: Path) -> None:
    prompts = prompts_of(20)
    prompts[3], prompts[7], prompts[11] = [], [1, REFUSED_TOKEN], [1, 99_999]
    result = run(tmp_path, prompts)
    assert result.exit_code == 3
    assert (result.summary.ok, result.summary.failed, result.summary.rejected) == (17, 1, 2)
    assert result.summary.reasons["refused by the engine"] == 1
    assert_complete(tmp_path, prompts, missing=(3, 7, 11))
    statuses = rayhs.open(str(tmp_path)).index["status"].to_pylist()
    assert [i for i, s in enumerate(statuses) if s != "ok"] == [3, 7, 11]


def test_too_many_rejected_stop_the_run_before_any_engine(tmp_path: Path) -> None:
    prompts = [[]] * 6 + prompts_of(4)
    with pytest.raises(TooManyRejected, match="6 of 10 prompts were rejected, over prompts.max_rejected 0.5"):
        run(tmp_path, prompts)
    assert not (tmp_path / "commits").exists()


@pytest.mark.parametrize("shard_format", ["safetensors", "parquet"])
def test_generated_tokens_are_stored_too(tmp_path: Path, shard_format: str) -> None:
    shards = {"format": shard_format}
    run(tmp_path, [[5, 6, 7], [9]], engine={"include_generated": 2}, shards=shards)
    sample = rayhs.open(str(tmp_path))[0]
    assert sample.token_ids.tolist() == [5, 6, 7, 0, 1]
    assert sample.loss_mask is not None and sample.loss_mask.tolist()[3:] == [1, 1]
    assert np.array_equal(sample.hidden_states[8], fake_states([5, 6, 7, 0, 1], 8, HIDDEN))


def test_an_upload_that_fails_for_good_ends_unfinished_and_resumes(tmp_path: Path) -> None:
    prompts = prompts_of(30)
    run_plan(parse_config(settings(tmp_path, prompts)))
    (tmp_path / "shards").write_text("a file where the folder must go")
    with pytest.raises(RayhsError, match="a file is where a folder should be.*run the same command again"):
        run(tmp_path, prompts)
    assert not (tmp_path / "summary.json").exists()
    (tmp_path / "shards").unlink()
    assert run(tmp_path, prompts).exit_code == 0
    assert_complete(tmp_path, prompts)


def test_a_missing_input_is_one_clear_error(tmp_path: Path) -> None:
    config = {"model": "fake/8x32", "output": str(tmp_path / "out"), "prompts": {"path": str(tmp_path / "none.jsonl")}}
    with pytest.raises(InputError, match=r"none\.jsonl"):
        run_extract(parse_config(config))


def test_the_plan_tells_exact_numbers(tmp_path: Path) -> None:
    prompts = prompts_of(30)
    plan = run_plan(parse_config(settings(tmp_path, prompts)))
    tokens = sum(map(len, prompts))
    assert (plan.samples, plan.tokens, plan.layers) == (30, tokens, LAYERS)
    assert plan.state_bytes == tokens * len(LAYERS) * HIDDEN * 4
    run(tmp_path, prompts)
    assert len(list((tmp_path / "commits").iterdir())) == plan.shards


@pytest.mark.s3
def test_sigterm_hands_shards_back_and_the_same_command_finishes(
    moto_uri: str, moto_server: S3Server, tmp_path: Path
) -> None:
    """SIGKILL of each kind of process is in test_chaos."""
    prompts, store = prompts_of(300), open_store(moto_uri)
    (tmp_path / "staging").mkdir()
    # A store that is slow enough for the run to be in its middle when the signal has come through.
    with FaultProxy(moto_server.endpoint, bytes_per_second=400_000) as proxy:
        sections = {"cluster": {"address": "local"}, "staging": {"path": str(tmp_path / "staging")}}
        sections["storage"] = {"endpoint": proxy.endpoint}
        file = tmp_path / "run.yaml"
        file.write_text(yaml.safe_dump(settings(moto_uri, prompts, **sections)))
        command = [sys.executable, "-m", "rayhs", "extract", str(file)]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as running:
            deadline = time.monotonic() + 240
            while not any(store.list("commits")) and running.poll() is None:
                assert time.monotonic() < deadline
                time.sleep(0.1)
            running.send_signal(signal.SIGTERM)
            _, told = running.communicate(timeout=60)
    assert running.returncode == 130
    assert told.strip().splitlines()[-1] == "rayhs: interrupted; run the same command again to go on"
    assert "Traceback" not in told
    assert list((tmp_path / "staging").iterdir()) == [], told
    assert list(store.unfinished()) == []
    done = sum(1 for _ in store.list("commits"))
    assert 0 < done < len(read_dataset_record(store).plan.shard_ids())
    again = [*command, "--set", f"storage.endpoint={moto_server.endpoint}"]
    assert subprocess.run(again, capture_output=True, check=False).returncode == 0
    assert_complete(moto_uri, prompts)


def replica_plan(nodes: list[dict[str, float]], device: str, **sections: Any) -> ReplicaPlan:
    config: RunConfig = parse_config({"model": "some/model", "prompts": "p", "output": "o", **sections})
    return ReplicaPlan(config, nodes, device)


GPU_NODE = {"CPU": 32.0, "GPU": 4.0}


def test_resources_of_a_replica_follow_from_the_config() -> None:
    one_node = replica_plan([GPU_NODE], "cuda", engine={"tensor_parallel_size": 2})
    assert (one_node.gpus, one_node.executor, one_node.bundles) == (2, "mp", [])
    two_nodes = replica_plan([GPU_NODE, GPU_NODE], "cuda", engine={"tensor_parallel_size": 8})
    assert (two_nodes.gpus, two_nodes.executor) == (0, "ray")
    assert two_nodes.bundles == [{"GPU": 1.0, "CPU": 1.0}] * 8
    cores = replica_plan([{"CPU": 8.0}], "cpu", cluster={"replicas": 2})
    assert (cores.engine_cores, cores.cpus, cores.gpus) == (4, 4.0, 0)
    assert (two_nodes.most_on(GPU_NODE), cores.most_on({"CPU": 8.0}), cores.most_on({})) == (1, 2, 1)
    # Counted on the node itself: the cluster may have grown since the start.
    grown = replica_plan([{"CPU": 4.0}], "cuda", cluster={"replicas": [1, 8]})
    assert (grown.most_on({"GPU": 1.0}), grown.most_on(GPU_NODE)) == (1, 4)
    ranged = replica_plan([GPU_NODE], "cuda", cluster={"replicas": [1, 4]})
    assert ranged.replicas == (1, 4)


def test_resources_that_the_cluster_lacks_are_refused() -> None:
    with pytest.raises(ConfigError, match="mp needs 8 GPUs on one node, the largest has 4"):
        replica_plan([GPU_NODE], "cuda", engine={"tensor_parallel_size": 8, "distributed_executor": "mp"})
    with pytest.raises(ConfigError, match="don't fit the cluster"):
        replica_plan([{"CPU": 2.0}], "cpu", cluster={"replicas": 3, "cpus_per_replica": 1})


def test_the_index_is_one_row_a_sample_in_input_order(tmp_path: Path) -> None:
    prompts = prompts_of(55)
    run(tmp_path, prompts)
    index: pa.Table = rayhs.open(str(tmp_path)).index
    assert index["index"].to_pylist() == list(range(55))
    assert index["num_tokens"].to_pylist() == [len(p) for p in prompts]
