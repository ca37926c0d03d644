"""The command line against a real S3 server: prompts and dataset in a bucket, credentials from the environment."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import yaml

import rayhs
from rayhs.fake import fake_states
from rayhs.store import open_store

pytestmark = [pytest.mark.s3, pytest.mark.ray, pytest.mark.slow]


@pytest.fixture
def ray_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where Ray keeps the logs of this test's runs, and of no others beside it."""
    # Ray's sockets lie here: the path must be short.
    with tempfile.TemporaryDirectory(prefix="rayhs-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        monkeypatch.setenv("RAY_TMPDIR", folder)
        yield Path(folder)


def rayhs_command(*arguments: str, code: int = 0) -> str:
    command = [sys.executable, "-m", "rayhs", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == code, done.stderr[-3000:]
    return done.stdout + done.stderr


def assert_no_secret(uri: str, output: str, ray_folder: Path) -> None:
    """The secret key is in no object of the dataset, in nothing printed or logged, and in none of Ray's own logs."""
    secret, store = os.environ["AWS_SECRET_ACCESS_KEY"].encode(), open_store(uri)
    assert secret.decode() not in output
    assert [name for name, _ in store.list("") if secret in store.get(name)] == []
    logs = [path for path in ray_folder.rglob("session_*/logs/**/*") if path.is_file()]
    assert logs and [path for path in logs if secret in path.read_bytes()] == []


def test_from_a_bucket_into_a_bucket(
    ceph_uri: str, tmp_path: Path, ray_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [f"prompt number {i} " * (i % 40 + 1) for i in range(300)]
    rows = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    open_store(ceph_uri.rsplit("/", 1)[0]).put("prompts/a.jsonl", rows.encode())
    run_file = tmp_path / "run.yaml"
    settings = {
        "model": "fake/8x128",
        "prompts": ceph_uri.rsplit("/", 1)[0] + "/prompts/a.jsonl",
        "layers": "all",
        "output": ceph_uri,
        "shards": {"target_bytes": "12MiB"},  # several of more than one multipart part
        "cluster": {"address": "local"},
    }
    run_file.write_text(yaml.safe_dump(settings))
    monkeypatch.setenv("RAYHS_LOG", "DEBUG")
    output = rayhs_command("extract", str(run_file), "--json")
    summary = json.loads(output.partition("\n}")[0] + "}")
    assert summary["ok"] == 300 and summary["shards"] > 3
    assert "sound" in rayhs_command("verify", ceph_uri)
    dataset = rayhs.open(ceph_uri)
    assert_no_secret(ceph_uri, output, ray_folder)
    for i in (0, 133, 299):
        assert bytes(dataset[i].token_ids.tolist()).decode() == texts[i]
        assert np.array_equal(dataset[i].hidden_states[5], fake_states(dataset[i].token_ids.tolist(), 5, 128))


def test_a_wrong_secret_is_one_line_before_any_engine(
    ceph_uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "not-the-secret")
    run_file = tmp_path / "run.yaml"
    prompts = {"rows": [{"text": "a"}]}
    run_file.write_text(yaml.safe_dump({"model": "fake/8x32", "prompts": prompts, "output": ceph_uri}))
    output = rayhs_command("extract", str(run_file), code=1)
    assert "Traceback" not in output and "not-the-secret" not in output
    assert output.strip().splitlines()[-1].startswith("rayhs: ")
