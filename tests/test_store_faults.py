"""The S3 store behind a faulty network and an ill server, fault by fault and operation by operation."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import pytest

from rayhs.config import StorageConfig
from rayhs.errors import ObjectNotFound, StoreError, StoreUnavailable
from rayhs.store import Store, open_store
from tests.fault_proxy import PASSING, FaultProxy
from tests.s3_servers import S3Server, use

pytestmark = pytest.mark.s3

PART = 5 << 20  # the least that S3 allows
LONG = os.urandom(2 * PART + 4321)
DATA = LONG[: PART + 4321]


@contextmanager
def behind(server: S3Server, uri: str) -> Iterator[tuple[FaultProxy, Store]]:
    with FaultProxy(server.endpoint) as proxy:
        yield proxy, open_store(uri, StorageConfig(endpoint=proxy.endpoint))


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rayhs.store.pieces.PART_BYTES", PART)


def set_budget(monkeypatch: pytest.MonkeyPatch, *, retries: float, request: float = 10) -> None:
    for when in ("_FIRST", "_LATER"):
        monkeypatch.setattr(f"rayhs.store.client.{when}_RETRIES", timedelta(seconds=retries))
        monkeypatch.setattr(f"rayhs.store.client.{when}_REQUEST", timedelta(seconds=request))


# Each takes the store behind the proxy, one past it, and a name of its own.
Act = Callable[[Store, Store, str], None]
SMALL = DATA[: 3 << 20]


def put(store: Store, past: Store, name: str) -> None:
    store.put(name, SMALL)
    assert past.get(name) == SMALL


def put_stream(store: Store, past: Store, name: str) -> None:
    store.put_stream(name, [DATA], len(DATA))
    assert past.get(name) == DATA


def put_long_stream(store: Store, past: Store, name: str) -> None:
    store.put_stream(name, [LONG], len(LONG))
    assert past.get(name) == LONG


def get(store: Store, past: Store, name: str) -> None:
    past.put(name, SMALL)
    assert store.get(name) == SMALL


def get_ranges(store: Store, past: Store, name: str) -> None:
    past.put(name, SMALL)
    near, far = store.get_ranges(name, [(5, 1000), (2 << 20, 4321)])
    assert (bytes(near), bytes(far)) == (SMALL[5:1005], SMALL[2 << 20 :][:4321])


def size(store: Store, past: Store, name: str) -> None:
    past.put(name, SMALL)
    assert store.size(name) == len(SMALL)


def list_all(store: Store, past: Store, name: str) -> None:
    past.put(f"{name}/a", b"1")
    past.put(f"{name}/b", b"22")
    assert sorted(store.list(name)) == [(f"{name}/a", 1), (f"{name}/b", 2)]


def delete(store: Store, past: Store, name: str) -> None:
    past.put(name, b"1")
    store.delete([name, f"{name}-absent"])
    assert past.size(name) is None


@dataclass(frozen=True)
class Operation:
    """What is done, and which of its requests is to meet with the fault (``{}`` is the name)."""

    act: Act
    method: str
    path: str = "{}"


OPERATIONS = {
    "put": Operation(put, "PUT"),
    "create": Operation(put_stream, "POST", "{}?uploads"),
    "part": Operation(put_long_stream, "PUT", "{}?partNumber=2"),
    "complete": Operation(put_stream, "POST", "{}?uploadId="),
    "get": Operation(get, "GET"),
    "get_ranges": Operation(get_ranges, "GET"),
    "size": Operation(size, "HEAD"),
    "list": Operation(list_all, "GET"),
    # It names the objects in its body only: one at a time, after the others.
    "delete": Operation(delete, "POST", "?delete"),
}
TIMES = {"slow-down": 3, "reset": 3}
Case = tuple[str, str, str]  # server, fault, operation
# Ceph with the faults that depend on the server, moto with all.
CASES: list[Case] = [("moto", kind, name) for kind in PASSING for name in OPERATIONS if kind != "delay"]
CASES += [("moto", "delay", name) for name in ("put", "part", "get")]
CASES += [
    ("ceph", kind, name)
    for kind in ("cut-reply", "lost-reply")
    for name in ("put", "create", "part", "complete", "delete")
]
# The stream can't be asked for its bytes again: whoever made it is told to try once more.
FOR_THE_CALLER = {("create", "cut-reply"), ("complete", "cut-reply")}


Outcome = AssertionError | StoreError | None


def attempt(proxy: FaultProxy, store: Store, past: Store, kind: str, operation_name: str) -> Outcome:
    operation, name = OPERATIONS[operation_name], f"{kind}-{operation_name}-x"
    rule = proxy.script([kind] * TIMES.get(kind, 1), method=operation.method, path=operation.path.format(name))
    try:
        operation.act(store, past, name)
        assert rule.kinds == [], "the faults were not met with"
    except (AssertionError, StoreError) as error:
        return error
    finally:
        rule.kinds.clear()
    return None


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Case], Outcome]:
    """Runs all cases of a server at once: they mostly wait before they try again."""
    done: dict[Case, Outcome] = {}

    def outcome(case: Case) -> Outcome:
        if case not in done:
            server: S3Server = request.getfixturevalue(f"{case[0]}_server")
            done.update(attempt_all(server, tmp_path_factory.mktemp("home")))
        return done[case]

    return outcome


def warm(*stores: Store) -> None:
    """Make the clients: threads that come at once would make one each."""
    for store in stores:
        assert store.size("absent") is None


def attempt_all(server: S3Server, home: Path) -> dict[Case, Outcome]:
    cases = [case for case in CASES if case[0] == server.name]
    with pytest.MonkeyPatch.context() as patch:
        use(patch, home, server)
        patch.setattr("rayhs.store.pieces.PART_BYTES", PART)
        # Two cores and many operations: a request may take its time.
        set_budget(patch, retries=60, request=60)
        uri = f"s3://{server.new_bucket()}/data"
        past = open_store(uri)
        with behind(server, uri) as (proxy, store), ThreadPoolExecutor(16) as pool:
            warm(past, store)
            together = {
                case: pool.submit(attempt, proxy, store, past, *case[1:]) for case in cases if case[2] != "delete"
            }
            done = {case: future.result() for case, future in together.items()}
            return done | {case: attempt(proxy, store, past, *case[1:]) for case in cases if case[2] == "delete"}


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_passing_fault(case: Case, outcomes: Callable[[Case], Outcome]) -> None:
    """The call succeeds, and past the proxy there are exactly the right bytes."""
    error = outcomes(case)
    if (case[2], case[1]) in FOR_THE_CALLER:
        assert isinstance(error, StoreUnavailable)
    elif error is not None:
        raise error


CALLS: dict[str, Callable[[Store], object]] = {
    "put": lambda store: store.put("x", b"1"),
    "put_stream": lambda store: store.put_stream("x", [DATA], len(DATA)),
    "get": lambda store: store.get("x"),
    "get_ranges": lambda store: store.get_ranges("x", [(0, 1)]),
    "size": lambda store: store.size("x"),
    "list": lambda store: list(store.list("")),
    "delete": lambda store: store.delete(["x"]),
}


@dataclass(frozen=True)
class Refusal:
    error: StoreError
    seconds: float


def refusals(store: Store, *but: str) -> dict[str, Refusal]:
    """The errors of all calls, made at once; ``but`` some."""

    def refusal(call: Callable[[Store], object]) -> Refusal:
        begin = time.monotonic()
        with pytest.raises(StoreError) as caught:
            call(store)
        assert "\n" not in str(caught.value)
        assert len(str(caught.value)) < 300
        return Refusal(caught.value, time.monotonic() - begin)

    chosen = {name: call for name, call in CALLS.items() if name not in but}
    with ThreadPoolExecutor(len(chosen)) as pool:
        return dict(zip(chosen, pool.map(refusal, chosen.values()), strict=True))


@pytest.mark.parametrize("answered_before", [False, True])
def test_storm_outlasts_the_budget(
    answered_before: bool, moto_uri: str, moto_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_budget(monkeypatch, retries=60)
    when = "_LATER" if answered_before else "_FIRST"
    monkeypatch.setattr(f"rayhs.store.client.{when}_RETRIES", timedelta(seconds=1))
    with behind(moto_server, moto_uri) as (proxy, store):
        if answered_before:
            store.put("x", b"1")
        proxy.script(["slow-down", "error-500"] * 1000)
        for refusal in refusals(store).values():
            assert isinstance(refusal.error, StoreUnavailable)
            assert "again and again" in str(refusal.error)
            assert "; wait until the store is well and run the same command again" in str(refusal.error)
            assert refusal.seconds < 1 + 4 + 1  # the budget, one wait, a busy machine


def test_budgets() -> None:
    from rayhs.store import client

    assert timedelta(seconds=12) >= client._FIRST_RETRIES
    assert timedelta(minutes=2) >= client._LATER_RETRIES


@pytest.mark.parametrize(
    ("kind", "words"),
    [("skewed", "the clock is off"), ("denied", "access denied"), ("no-bucket", "no such bucket")],
)
def test_refusal_is_permanent_at_once(kind: str, words: str, moto_uri: str, moto_server: S3Server) -> None:
    with behind(moto_server, moto_uri) as (proxy, store):
        store.put("x", b"1")
        proxy.script([kind] * 1000)
        # A HEAD is refused without a reason; 404 means that the object isn't there.
        found = refusals(store, *(["size"] if kind == "no-bucket" else []))
        for name, refusal in found.items():
            assert not isinstance(refusal.error, (StoreUnavailable, ObjectNotFound))
            assert ("403" if name == "size" else words) in str(refusal.error)
            assert refusal.seconds < 5
        assert proxy.report()["requests"] == 1 + len(found)


def test_bucket_deleted_between_calls(s3_uri: str, s3_server: S3Server) -> None:
    bucket = s3_uri.split("/")[2]
    store = open_store(s3_uri)
    store.put("x", b"1")
    s3_server.client().delete_object(Bucket=bucket, Key="data/x")
    s3_server.client().delete_bucket(Bucket=bucket)
    # A HEAD can't tell an object that isn't there from a bucket that isn't.
    for name, refusal in refusals(store, "size").items():
        assert "no such bucket" in str(refusal.error), name
        assert not isinstance(refusal.error, (StoreUnavailable, ObjectNotFound)), name
        assert refusal.seconds < 5


def test_hanging_request_is_given_up_and_made_again(
    moto_uri: str, moto_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_budget(monkeypatch, retries=30, request=2)
    past = open_store(moto_uri)
    with behind(moto_server, moto_uri) as (proxy, store), ThreadPoolExecutor(9) as pool:
        warm(past, store)
        names = ("put", "part", "get", "get_ranges", "size", "list")
        assert list(pool.map(lambda name: attempt(proxy, store, past, "hang", name), names)) == [None] * len(names)


def uploads(server: S3Server, uri: str) -> list[object]:
    """Unfinished multipart uploads, seen past rayhs; an abort may still be under way."""
    client, found = server.client(), [object()]
    for _ in range(10):
        if found:
            time.sleep(0.1)
            found = client.list_multipart_uploads(Bucket=uri.split("/")[2]).get("Uploads", [])
    return found


@pytest.mark.parametrize(
    ("kind", "path", "error"),
    [
        ("denied", "partNumber=2", "access denied"),
        ("denied", "?uploadId=", "access denied"),
        ("slow-down", "partNumber=", "503"),
    ],
)
def test_failed_stream_leaves_nothing(
    kind: str, path: str, error: str, s3_uri: str, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_budget(monkeypatch, retries=0.5)
    method = "POST" if path == "?uploadId=" else "PUT"
    with behind(s3_server, s3_uri) as (proxy, store):
        proxy.script([kind] * 1000, method=method, path=path)
        with pytest.raises(StoreError, match=error):
            store.put_stream("x", [DATA], len(DATA))
    assert open_store(s3_uri).size("x") is None
    assert uploads(s3_server, s3_uri) == []


def test_upload_whose_beginning_was_lost_is_shown(s3_uri: str, s3_server: S3Server) -> None:
    """Its handle never came back, so that nobody but gc can end it."""
    with behind(s3_server, s3_uri) as (proxy, store):
        proxy.script(["lost-reply"], method="POST", path="x?uploads")
        store.put_stream("x", [DATA], len(DATA))
        remains = list(store.unfinished())
        assert [one.name for one in remains] == ["x"]
        store.discard(remains)
        assert store.get("x") == DATA
    assert uploads(s3_server, s3_uri) == []


@pytest.mark.parametrize("kind", ["lost-reply", "cut-reply"])
def test_lost_reply_of_complete(kind: str, s3_uri: str, s3_server: S3Server) -> None:
    """Whatever the call says, the object is whole; and the same call again succeeds."""
    with behind(s3_server, s3_uri) as (proxy, store):
        proxy.script([kind], method="POST", path="?uploadId=")
        try:
            store.put_stream("x", [DATA], len(DATA))
        except StoreUnavailable:
            assert kind == "cut-reply"  # "try again", though it is there
        assert open_store(s3_uri).get("x") == DATA
        store.put_stream("x", [DATA[::-1]], len(DATA))
        assert open_store(s3_uri).get("x") == DATA[::-1]
    assert uploads(s3_server, s3_uri) == []


def test_complete_of_a_completed_upload(moto_uri: str, moto_server: S3Server) -> None:
    """Servers that forget an upload once it is complete answer the request made again with NoSuchUpload."""
    with behind(moto_server, moto_uri) as (proxy, store):
        proxy.script(["lost-reply", "no-upload"], method="POST", path="?uploadId=")
        with pytest.raises(StoreUnavailable, match="the multipart upload is gone"):
            store.put_stream("x", [DATA], len(DATA))
        assert open_store(moto_uri).get("x") == DATA
        store.put_stream("x", [DATA[::-1]], len(DATA))
    assert open_store(moto_uri).get("x") == DATA[::-1]
