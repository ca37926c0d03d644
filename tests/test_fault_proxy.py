"""The fault proxy itself, before a small HTTP server of the standard library."""

from __future__ import annotations

import http.client
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.fault_proxy import PASSING, FaultProxy

BODY = bytes(range(256)) * 4096


class Handler(BaseHTTPRequestHandler):
    """GET gives BODY (in chunks under /chunked); PUT answers with the digest of what came."""

    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(BODY)))
        self.end_headers()

    def do_GET(self) -> None:
        if self.path != "/chunked":
            self.do_HEAD()
            self.wfile.write(BODY)
            return
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for part in (BODY[:1000], BODY[1000:], b""):
            self.wfile.write(b"%x\r\n%s\r\n" % (len(part), part))

    def do_DELETE(self) -> None:
        self.send_response(204)
        self.end_headers()

    def do_PUT(self) -> None:
        digest = sha256(self._content()).hexdigest().encode()
        assert isinstance(self.server, Server)
        with self.server.lock:
            self.server.applied += 1
        self.send_response(200)
        self.send_header("Content-Length", str(len(digest)))
        self.send_header("Host-Seen", self.headers["Host"])
        self.end_headers()
        self.wfile.write(digest)

    def _content(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers["Content-Length"]))
        content = b""
        while size := int(self.rfile.readline(), 16):
            content += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return content

    def log_message(self, *_: object) -> None:
        pass


class Server(ThreadingHTTPServer):
    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.applied, self.lock = 0, threading.Lock()

    def handle_error(self, *_: object) -> None:
        """A connection cut by the proxy is what these tests are about."""


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture
def proxy(server: Server) -> Iterator[FaultProxy]:
    with FaultProxy(f"http://127.0.0.1:{server.server_port}") as proxy:
        yield proxy


def connect(proxy: FaultProxy) -> http.client.HTTPConnection:
    return http.client.HTTPConnection(proxy.endpoint.removeprefix("http://"), timeout=10)


def test_messages_pass_unchanged_on_one_connection(proxy: FaultProxy) -> None:
    connection = connect(proxy)
    for method, path, body, status, expected in (
        ("GET", "/x", None, 200, BODY),
        ("HEAD", "/x", None, 200, b""),
        ("GET", "/chunked", None, 200, BODY),
        ("DELETE", "/x", None, 204, b""),
        ("PUT", "/x", BODY, 200, sha256(BODY).hexdigest().encode()),
        ("PUT", "/x", iter([BODY[:5], BODY[5:]]), 200, sha256(BODY).hexdigest().encode()),
        ("GET", "/x", None, 200, BODY),
    ):
        connection.request(method, path, body, encode_chunked=not isinstance(body, bytes))
        answer = connection.getresponse()
        assert (answer.status, answer.read()) == (status, expected), (method, path)
        assert answer.headers["Host-Seen"] in (None, f"{connection.host}:{connection.port}")
    assert proxy.report() == {"requests": 7, "faults": {}}


def test_waits_for_continue(proxy: FaultProxy) -> None:
    with socket.create_connection(("127.0.0.1", int(proxy.endpoint.rpartition(":")[2])), 10) as sock:
        sock.sendall(b"PUT /x HTTP/1.1\r\nHost: h\r\nContent-Length: 3\r\nExpect: 100-continue\r\n\r\n")
        assert sock.recv(1000).startswith(b"HTTP/1.1 100 ")
        sock.sendall(b"abc")
        answer = b""
        while not answer.endswith(sha256(b"abc").hexdigest().encode()):
            answer += sock.recv(1000)
        assert answer.startswith(b"HTTP/1.1 200 ")
        proxy.script(["denied"])
        sock.sendall(b"PUT /x HTTP/1.1\r\nHost: h\r\nContent-Length: 3\r\nExpect: 100-continue\r\n\r\n")
        assert sock.recv(1000).startswith(b"HTTP/1.1 403 ")


@pytest.mark.parametrize(
    ("kind", "applied"), [("reset", 0), ("cut-request", 0), ("cut-reply", 1), ("lost-reply", 1), ("hang", 0)]
)
def test_what_the_server_gets_to_see(server: Server, proxy: FaultProxy, kind: str, applied: int) -> None:
    proxy.script([kind], method="PUT", path="x=1")
    connection = connect(proxy)
    if kind == "hang":
        connection.timeout = 0.5
    with pytest.raises((OSError, http.client.HTTPException)):
        connection.request("PUT", "/?x=1", BODY)
        connection.getresponse().read()
    assert server.applied == applied
    assert proxy.report()["faults"] == {kind: 1}


def test_cut_reply_is_half(proxy: FaultProxy) -> None:
    proxy.script(["cut-reply"])
    connection = connect(proxy)
    connection.request("GET", "/x")
    answer, got = connection.getresponse(), b""
    with pytest.raises(ConnectionResetError):
        while True:
            got += answer.read(4096)
    assert got == BODY[: len(BODY) // 2]


def test_random_faults_are_seeded(server: Server) -> None:
    def kinds(seed: int) -> dict[str, int]:
        with FaultProxy(f"http://127.0.0.1:{server.server_port}", rate=0.4, seed=seed) as proxy:
            proxy.faults.script(["denied"], "HEAD", "")
            for _ in range(20):
                head = http.client.HTTPConnection(proxy.endpoint.removeprefix("http://"), timeout=10)
                try:
                    head.request("HEAD", "/x")
                    head.getresponse()
                except (OSError, http.client.HTTPException):
                    continue
            report = proxy.report()
            assert report["requests"] == 20
            return dict(report["faults"])

    first = kinds(7)
    assert first == kinds(7)
    assert first.pop("denied") == 1
    assert set(first) <= set(PASSING)
    assert 3 <= sum(first.values()) <= 14


def test_throughput_is_shared(server: Server) -> None:
    target = f"http://127.0.0.1:{server.server_port}"
    with FaultProxy(target, bytes_per_second=4 * len(BODY)) as proxy, ThreadPoolExecutor(4) as pool:

        def get(_: int) -> int:
            connection = connect(proxy)
            connection.request("GET", "/x")
            return len(connection.getresponse().read())

        begin = time.monotonic()
        assert sum(pool.map(get, range(4))) == 4 * len(BODY)
        assert 0.7 < time.monotonic() - begin < 2


def test_as_a_program(server: Server, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    command = [sys.executable, "-m", "tests.fault_proxy", "--target", f"http://127.0.0.1:{server.server_port}"]
    command += ["--rate", "1", "--seed", "3", "--report", str(report)]
    root = Path(__file__).parent.parent
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=root) as process:
        assert process.stdout is not None
        endpoint = process.stdout.readline().strip()
        connection = http.client.HTTPConnection(endpoint.removeprefix("http://"), timeout=10)
        try:
            connection.request("GET", "/x")
            connection.getresponse().read()
        except (OSError, http.client.HTTPException):
            pass
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0
    counts = json.loads(report.read_text())
    assert counts["requests"] == sum(counts["faults"].values()) == 1
