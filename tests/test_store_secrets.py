"""No key, token or signature in what the store logs, raises, shows or pickles."""

from __future__ import annotations

import logging
import pickle
import re
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta

import pytest

from rayhs import log
from rayhs.config import StorageConfig
from rayhs.errors import RayhsError
from rayhs.store import Store, open_store
from tests.fault_proxy import FaultProxy
from tests.http_wire import Head
from tests.s3_servers import S3Server

pytestmark = pytest.mark.s3

TOKEN = "session-token-FwoGZXIvYXdzEBYaDH"
SECRET = "wrong-secret-wJalrXUtnFEMI"


class Recorder:
    """Everything that a store lets out, and what must not be in it."""

    def __init__(self, secrets: set[str]) -> None:
        self.secrets = secrets
        self._out: list[str] = []

    def note(self, *things: object) -> None:
        self._out += [str(thing) for thing in things]

    def watch(self, proxy: FaultProxy) -> None:
        """Take the signatures that pass by for secrets."""
        draw = proxy.faults.draw

        def drawn(head: Head) -> str | None:
            found = re.search(r"Signature=(\w+)", head.fields.get("authorization", ""))
            self.secrets |= {found[1]} if found else set()
            return draw(head)

        proxy.faults.draw = drawn  # type: ignore[method-assign]

    def call(self, call: Callable[[], object]) -> None:
        try:
            call()
        except RayhsError as error:
            self.note(error, repr(error), *traceback.format_exception(error), pickle.dumps(error))

    def calls(self, store: Store) -> None:
        """Run every operation, whatever becomes of it."""
        data = bytes(5 << 20)
        calls: list[Callable[[], object]] = [
            lambda: store.put("x", b"1"),
            lambda: store.put_stream("y", [data, b"1"], len(data) + 1),
            lambda: store.get("x"),
            lambda: store.get_ranges("y", [(0, 1), (5 << 20, 1)]),
            lambda: store.get("absent"),
            lambda: store.get_ranges("x", [(7, 7)]),
            lambda: store.size("x"),
            lambda: list(store.list("")),
            lambda: store.delete(["x"]),
        ]
        self.call(calls[0])  # alone, as threads that come at once would make a client each
        with ThreadPoolExecutor(len(calls)) as pool:
            list(pool.map(self.call, calls[1:]))
        self.note(store, repr(store), pickle.dumps(store), pickle.loads(pickle.dumps(store)), vars(store))

    def leaks(self, records: list[logging.LogRecord]) -> list[str]:
        formatter = logging.Formatter("%(message)s")
        self.note(*(formatter.format(record) for record in records), *(record.__dict__ for record in records))
        return [text for text in self._out if any(secret in text for secret in self.secrets)]


@pytest.fixture
def log_records(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[logging.LogRecord]]:
    """Of rayhs' logger, set up as by RAYHS_LOG=DEBUG."""
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    monkeypatch.setattr(log.logger, "handlers", [])
    monkeypatch.setattr(log.logger, "propagate", True)
    monkeypatch.setenv("RAYHS_LOG", "DEBUG")
    level = log.logger.level
    log.configure()
    log.logger.addHandler(handler)
    yield records
    log.logger.setLevel(level)


@contextmanager
def short_budgets(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setattr("rayhs.store.pieces.PART_BYTES", 5 << 20)
        for when in ("_FIRST", "_LATER"):
            patch.setattr(f"rayhs.store.client.{when}_RETRIES", timedelta(seconds=0.3))
        yield


def test_good_keys_and_faults(
    moto_uri: str, moto_server: S3Server, monkeypatch: pytest.MonkeyPatch, log_records: list[logging.LogRecord]
) -> None:
    monkeypatch.setenv("AWS_SESSION_TOKEN", TOKEN)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)  # moto takes any
    recorder = Recorder({TOKEN, SECRET})
    with short_budgets(monkeypatch), FaultProxy(moto_server.endpoint) as proxy:
        recorder.watch(proxy)
        store = open_store(moto_uri, StorageConfig(endpoint=proxy.endpoint))
        recorder.calls(store)
        for kind in ("slow-down", "cut-reply", "denied"):
            proxy.script([kind] * 1000)
            recorder.calls(store)
            proxy.forget()
        proxy.script(["denied"])
        recorder.call(lambda: list(store.unfinished()))
    assert recorder.leaks(log_records) == []
    assert log_records
    assert len(recorder.secrets) > 20  # a signature a request


def test_wrong_secret(
    ceph_uri: str, ceph_server: S3Server, monkeypatch: pytest.MonkeyPatch, log_records: list[logging.LogRecord]
) -> None:
    recorder = Recorder({SECRET, TOKEN})
    with FaultProxy(ceph_server.endpoint) as proxy:
        recorder.watch(proxy)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
        store = open_store(ceph_uri, StorageConfig(endpoint=proxy.endpoint))
        recorder.calls(store)
        recorder.call(lambda: list(store.unfinished()))
        monkeypatch.setenv("AWS_SESSION_TOKEN", TOKEN)
        recorder.calls(open_store(ceph_uri, StorageConfig(endpoint=proxy.endpoint)))
    assert recorder.leaks(log_records) == []
    assert log_records


@pytest.fixture
def repeating(moto_uri: str, moto_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorder]:
    """What comes of a server that repeats what was signed.

    Amazon's SignatureDoesNotMatch holds the signature and all signed fields, the session token among them.
    """
    monkeypatch.setenv("AWS_SESSION_TOKEN", TOKEN)
    recorder = Recorder({TOKEN})
    with FaultProxy(moto_server.endpoint) as proxy:
        recorder.watch(proxy)
        proxy.script(["mismatch"] * 1000)
        recorder.calls(open_store(moto_uri, StorageConfig(endpoint=proxy.endpoint)))
        yield recorder


def test_errors_do_not_repeat_what_was_signed(repeating: Recorder) -> None:
    assert repeating.leaks([]) == []


def test_log_does_not_repeat_what_was_signed(log_records: list[logging.LogRecord], repeating: Recorder) -> None:
    assert repeating.leaks(log_records) == []
