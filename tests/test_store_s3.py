"""S3 beyond the common contract: credentials and endpoints, faults, refusals and their messages."""

from __future__ import annotations

import json
import os
import pickle
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from rayhs.config import StorageConfig
from rayhs.errors import ConfigError, InputError, ObjectNotFound, StoreError
from rayhs.store import input_filesystem, open_store
from rayhs.store.client import client_config
from rayhs.store.pieces import PART_BYTES
from rayhs.store.settings import resolve_s3
from tests.fault_proxy import FaultProxy
from tests.s3_servers import S3Server, free_port, use

pytestmark = pytest.mark.s3


@pytest.fixture
def proxy(moto_server: S3Server) -> Iterator[FaultProxy]:
    with FaultProxy(moto_server.endpoint) as proxy:
        yield proxy


@contextmanager
def refused(*words: str, within: float = 5) -> Iterator[None]:
    """Exactly one clear StoreError line, soon, and no secret in it."""
    begin = time.monotonic()
    with pytest.raises(StoreError) as caught:
        yield
    assert time.monotonic() - begin < within
    message = str(caught.value)
    assert all(word in message for word in ("s3://", "; ", *words)), message
    assert "\n" not in message
    assert len(message) < 300
    assert "secret-key" not in message.replace("wrong secret key", "")


def test_wrong_secret(ceph_uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "not-the-secret-key")
    store = open_store(ceph_uri)
    for call in (lambda: store.get("x"), lambda: store.put("x", b"1"), lambda: list(store.list(""))):
        with refused("wrong secret key", "AWS_SECRET_ACCESS_KEY"):
            call()
    with refused("wrong secret key"):
        store.put_stream("x", [bytes(2 * PART_BYTES)], 2 * PART_BYTES)
    with refused("403"):
        store.size("x")  # a HEAD is refused without a reason


def test_unknown_access_key(ceph_uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "nobody")
    with refused("unknown access key"):
        open_store(ceph_uri).get("x")


def test_no_such_bucket(s3_uri: str) -> None:
    store = open_store("s3://no-such-bucket-here/x")
    calls = [lambda: store.get("x"), lambda: store.put("x", b"1"), lambda: store.get_ranges("x", [(0, 1)])]
    streamed = lambda: store.put_stream("x", [bytes(2 * PART_BYTES)], 2 * PART_BYTES)  # noqa: E731
    for call in [*calls, streamed, lambda: list(store.list(""))]:
        with refused("no such bucket", "create it"):
            call()


def test_unreachable_endpoint(moto_uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    endpoint = f"http://127.0.0.1:{free_port()}"
    with refused("Connection refused", endpoint, within=20):
        open_store(moto_uri, StorageConfig(endpoint=endpoint)).get("x")


def test_endpoint_that_never_answers(moto_uri: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with refused("no answer in time", endpoint, within=22):
            open_store(moto_uri, StorageConfig(endpoint=endpoint)).get("x")


@pytest.mark.parametrize("fault", ["slow-down", "reset", "lost-reply"])
def test_passing_faults_are_retried(moto_uri: str, proxy: FaultProxy, fault: str) -> None:
    store = open_store(moto_uri, StorageConfig(endpoint=proxy.endpoint))
    data = bytes(range(256)) * (10 * PART_BYTES // 1024)
    proxy.script([fault] * 2)
    store.put("small", b"1")
    proxy.script([fault] * 3)
    store.put_stream("large", [data], len(data))
    proxy.script([fault] * 2)
    assert (store.get("small"), bytes(store.get_ranges("large", [(5, 300)])[0])) == (b"1", data[5:305])
    assert store.get("large") == data


def test_server_that_stays_ill(moto_uri: str, proxy: FaultProxy) -> None:
    proxy.script(["slow-down"] * 1000)
    with refused("503", "run the same command again", within=20):
        open_store(moto_uri, StorageConfig(endpoint=proxy.endpoint)).put("x", b"1")


def test_no_credentials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    use(monkeypatch, tmp_path, None)
    with pytest.raises(StoreError, match="no credentials found; set AWS_ACCESS_KEY_ID"):
        open_store("s3://bucket/x").get("x")


def write_profiles(home: Path, server: S3Server) -> None:
    keys = f"aws_access_key_id = {server.access_key}\naws_secret_access_key = {server.secret_key}\n"
    (home / "aws-credentials").write_text(f"[work]\n{keys}")
    (home / "aws-config").write_text(f"[profile work]\nendpoint_url = {server.endpoint}\nregion = eu-west-3\n")


def test_profile_with_endpoint(
    s3_server: S3Server, s3_uri: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    use(monkeypatch, tmp_path, None)
    write_profiles(tmp_path, s3_server)
    storage = StorageConfig(profile="work")
    store = open_store(s3_uri, storage)
    store.put("x", b"1")
    assert pickle.loads(pickle.dumps(store)).get("x") == b"1"
    assert (resolve_s3(storage).region, resolve_s3(storage).endpoint) == ("eu-west-3", s3_server.endpoint)
    files, path = input_filesystem(f"{s3_uri}/x", storage)
    assert files.cat(path) == b"1"
    monkeypatch.setenv("AWS_PROFILE", "work")
    assert open_store(s3_uri).get("x") == b"1"
    with pytest.raises(ConfigError, match="play"):
        open_store(s3_uri, StorageConfig(profile="play")).get("x")


def test_which_endpoint_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    use(monkeypatch, tmp_path, S3Server("none", "http://general:1", "a", "b"))
    assert resolve_s3(StorageConfig()).endpoint == "http://general:1"
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://service:2")
    assert resolve_s3(StorageConfig()).endpoint == "http://service:2"
    given = resolve_s3(StorageConfig(endpoint="https://given:3/", region="there"))
    assert (given.endpoint, given.region, given.path_style) == ("https://given:3", "there", True)
    assert resolve_s3(StorageConfig(path_style=False)).path_style is False
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.delenv(name)
    assert (resolve_s3(StorageConfig()).endpoint, resolve_s3(StorageConfig()).path_style) == (None, False)
    with pytest.raises(ConfigError, match="credentials") as caught:
        resolve_s3(StorageConfig(endpoint="http://me:hunter2@host:1"))
    assert "hunter2" not in str(caught.value)
    with pytest.raises(ConfigError, match="endpoint"):
        resolve_s3(StorageConfig(endpoint="not a url"))


def test_given_endpoint_beats_variables(moto_uri: str, moto_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    store = open_store(moto_uri, StorageConfig(endpoint=moto_server.endpoint))
    store.put("x", b"1")
    assert store.get("x") == b"1"


def test_addressing_styles(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    use(monkeypatch, tmp_path, S3Server("none", "http://host:1", "a", "b"))
    virtual = client_config("bucket", resolve_s3(StorageConfig(path_style=False)))
    assert (virtual["endpoint"], virtual["virtual_hosted_style_request"]) == ("http://bucket.host:1", True)
    path = client_config("bucket", resolve_s3(StorageConfig()))
    assert (path["aws_endpoint_url_s3"], path["virtual_hosted_style_request"]) == ("http://host:1", False)
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    aws = resolve_s3(StorageConfig())
    assert client_config("bucket", aws)["virtual_hosted_style_request"] is True
    assert client_config("bucket.dotted", aws)["virtual_hosted_style_request"] is False


def test_credentials_that_are_renewed(
    ceph_uri: str, ceph_server: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A credential process whose keys run out is asked again while the store is in use."""
    monkeypatch.setattr("rayhs.store.settings.CREDENTIAL_LIFE", timedelta(0))  # of minutes
    use(monkeypatch, tmp_path, None)
    calls = tmp_path / "calls"
    keys = {"Version": 1, "AccessKeyId": ceph_server.access_key, "SecretAccessKey": ceph_server.secret_key}
    keys["Expiration"] = (datetime.now(UTC) + timedelta(seconds=2)).isoformat()
    program = tmp_path / "keys.py"
    program.write_text(f"open({str(calls)!r}, 'a').write('x')\nprint({json.dumps(json.dumps(keys))})\n")
    (tmp_path / "aws-config").write_text(f"[default]\ncredential_process = {sys.executable} {program}\n")
    store = open_store(ceph_uri, StorageConfig(endpoint=ceph_server.endpoint))
    store.put("x", b"1")
    before = len(calls.read_text())
    assert store.get("x") == b"1"
    assert len(calls.read_text()) > before
    program.write_text("raise SystemExit('hunter2')\n")
    with refused("the credentials could not be renewed"):
        store.get("x")
    with pytest.raises(StoreError, match="could not be fetched") as caught:
        open_store(ceph_uri, StorageConfig(endpoint=ceph_server.endpoint)).get("x")
    assert "hunter2" not in str(caught.value)


def test_forked_child_is_told(moto_uri: str) -> None:
    store = open_store(moto_uri)
    store.put("x", b"1")
    child = os.fork()
    if child == 0:
        status = 1
        try:
            open_store(moto_uri).get("x")
        except StoreError as error:
            status = 0 if "spawn" in str(error) else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize("uri", ["s3://", "s3:///x", "s3://b/../x", "s3://bucket/a//b", "s3://me:hunter2@bucket/x"])
def test_uris_that_are_refused(uri: str) -> None:
    with pytest.raises(ConfigError) as caught:
        open_store(uri)
    assert "hunter2" not in str(caught.value)


def test_uri_is_normalised() -> None:
    assert open_store("s3://bucket").uri == open_store("s3://bucket/").uri == "s3://bucket"
    assert open_store("s3://bucket/a/b/").uri == "s3://bucket/a/b"


def test_input_by_url(s3_uri: str, tmp_path: Path) -> None:
    import zipfile

    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("in.jsonl", "{}\n")
    store = open_store(s3_uri)
    store.put("in/a.zip", (tmp_path / "a.zip").read_bytes())
    store.put("in/b.jsonl", b"[]")
    files, path = input_filesystem(f"{s3_uri}/in/*.jsonl", StorageConfig())
    assert [name.rpartition("/")[2] for name in files.glob(path)] == ["b.jsonl"]
    files, path = input_filesystem(f"zip://in.jsonl::{s3_uri}/in/a.zip", StorageConfig())
    assert files.cat(path) == b"{}\n"
    files, path = input_filesystem(str(tmp_path / "a.zip"), StorageConfig())
    assert files.size(path) > 0


def test_unknown_input_protocol() -> None:
    with pytest.raises(InputError, match="nosuch"):
        input_filesystem("nosuch://x/y", StorageConfig())


def test_absent_is_told_from_forbidden(s3_uri: str) -> None:
    with pytest.raises(ObjectNotFound, match="no such object at http://"):
        open_store(s3_uri).get("x")
