"""`ray job submit --working-dir . -- rayhs extract run.yaml` on a real Ray head with token authentication."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sysconfig
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import rayhs

JOB = Path(__file__).parent.parent / "clusters" / "local"
SCRIPTS = sysconfig.get_path("scripts")
START_SECONDS = 90

pytestmark = [pytest.mark.ray, pytest.mark.slow]


@dataclass(frozen=True)
class Head:
    url: str
    environment: dict[str, str]

    def submit(self, *options: str, token: bool = True) -> subprocess.CompletedProcess[str]:
        """Submit `clusters/local` as its README says, with overrides; waits for the job's end."""
        environment = dict(self.environment) if token else {**self.environment, "RAY_AUTH_MODE": "disabled"}
        command = [f"{SCRIPTS}/ray", "job", "submit", "--address", self.url, "--working-dir", ".", "--"]
        return subprocess.run(
            [*command, "rayhs", "extract", "run.yaml", *options],
            cwd=JOB,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )

    def status(self, token: str | None) -> int:
        """HTTP status of the dashboard's version endpoint; 0 when nothing answers."""
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        try:
            with urllib.request.urlopen(urllib.request.Request(f"{self.url}/api/version", headers=headers)) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return 0


def free_ports(count: int) -> list[int]:
    """Outside what the system gives out by itself: a Ray of other tests would have them before the head has."""
    found: list[int] = []
    for port in random.sample(range(20_000, 32_000), 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            found.append(port)
    return found[:count]


@pytest.fixture(scope="module")
def head() -> Iterator[Head]:
    if not Path(SCRIPTS, "rayhs").exists():
        pytest.skip("the command rayhs is not installed in this environment")
    # Ray's sockets lie here: the path must be short.
    folder = Path(tempfile.mkdtemp(prefix="rayhs-", dir="/tmp"))
    gcs, dashboard, agent, client = free_ports(4)
    environment = {
        "PATH": f"{SCRIPTS}:{os.environ['PATH']}",
        "HOME": str(folder),
        "RAY_AUTH_MODE": "token",
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_worker_niceness": "0",
    }
    subprocess.run([f"{SCRIPTS}/ray", "get-auth-token", "--generate"], env=environment, check=True, capture_output=True)
    options = {
        "node-ip-address": "127.0.0.1",
        "port": gcs,
        "dashboard-port": dashboard,
        "dashboard-agent-listen-port": agent,
        "ray-client-server-port": client,
        "num-cpus": 2,
        "temp-dir": folder / "ray",
    }
    command = [f"{SCRIPTS}/ray", "start", "--head", "--block", *(f"--{key}={value}" for key, value in options.items())]
    log = (folder / "head.log").open("w")
    process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
    running = Head(f"http://127.0.0.1:{dashboard}", environment)
    try:
        wait_until_ready(process, running, folder)
        yield running
    finally:
        stop(process)
        log.close()
        shutil.rmtree(folder, ignore_errors=True)


def wait_until_ready(process: subprocess.Popen[bytes], head: Head, folder: Path) -> None:
    token = (folder / ".ray" / "auth_token").read_text()
    deadline = time.monotonic() + START_SECONDS
    while head.status(token) != 200:
        assert process.poll() is None, (folder / "head.log").read_text()
        assert time.monotonic() < deadline, f"Ray's head did not start in {START_SECONDS} s"
        time.sleep(0.3)


def stop(process: subprocess.Popen[bytes]) -> None:
    """End the head and what it started; `ray stop` would end every Ray on the machine."""
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def test_job(head: Head, tmp_path: Path) -> None:
    done = head.submit("--set", "model=fake/8x64", "--set", f"output={tmp_path}/out")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "succeeded" in done.stdout
    dataset = rayhs.open(str(tmp_path / "out"))
    rows = [json.loads(line) for line in (JOB / "prompts.jsonl").read_text().splitlines()]
    assert [sample.sample_id for sample in dataset] == [row["id"] for row in rows]
    assert dataset[0].hidden_states[8].shape == (len(dataset[0].token_ids), 64)


def test_a_failing_run_fails_the_job(head: Head, tmp_path: Path) -> None:
    done = head.submit("--set", "model=fake/8x64", "--set", f"output={tmp_path}/out", "--set", "layers=[99]")
    assert done.returncode != 0
    assert "rayhs: layers: id 99 is outside 0..8" in done.stdout
    assert not list(tmp_path.rglob("summary.json"))


def test_without_the_token_nothing_runs(head: Head, tmp_path: Path) -> None:
    assert head.status(token=None) == 401
    assert head.status(token="0" * 64) == 403
    done = head.submit("--set", "model=fake/8x64", "--set", f"output={tmp_path}/out", token=False)
    assert done.returncode != 0
    assert not list(tmp_path.iterdir())
