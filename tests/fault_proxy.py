"""A proxy before an S3 server that gives some requests a fault.

    python -m tests.fault_proxy --target http://127.0.0.1:9000 --rate 0.05 --seed 7 --report faults.json

prints its endpoint and serves until SIGTERM. In a test: ``FaultProxy(endpoint)``, then
``proxy.script(["reset"], method="PUT", path="partNumber=2")`` for the next requests that match.
Requests pass unchanged, the Host field too, so that their signatures stay valid.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tests.http_wire import PIECE_BYTES, Head, Wire, WireError, first_half

DELAY = 1.0
_ANSWERS = {
    "slow-down": ("503 Slow Down", "SlowDown", "Please reduce your request rate."),
    "error-500": ("500 Internal Server Error", "InternalError", "We encountered an internal error."),
    "error-in-200": ("200 OK", "InternalError", "We encountered an internal error."),
    "skewed": ("403 Forbidden", "RequestTimeTooSkewed", "The difference between the clocks is too large."),
    "mismatch": ("403 Forbidden", "SignatureDoesNotMatch", "The request signature does not match."),
    "denied": ("403 Forbidden", "AccessDenied", "Access Denied"),
    "no-bucket": ("404 Not Found", "NoSuchBucket", "The specified bucket does not exist"),
    "no-upload": ("404 Not Found", "NoSuchUpload", "The specified upload does not exist."),
}
# Faults that pass: a client that retries gets through.
PASSING = ("slow-down", "error-500", "reset", "cut-request", "cut-reply", "lost-reply", "delay")
KINDS = frozenset({*PASSING, *_ANSWERS, "hang"})


@dataclass
class Rule:
    """Faults for the next requests of a method, with ``path`` in path or query; the ones met with leave ``kinds``."""

    kinds: list[str]
    method: str
    path: str

    def fits(self, head: Head) -> bool:
        return bool(self.kinds) and self.method in ("", head.method) and self.path in head.path


class Faults:
    """Which request meets with which fault, and how many have."""

    def __init__(self, rate: float, seed: int) -> None:
        self._rate, self._random = rate, random.Random(seed)
        self._lock = threading.Lock()
        self._rules: list[Rule] = []
        self._requests, self._counts = 0, Counter[str]()

    def script(self, kinds: Iterable[str], method: str, path: str) -> Rule:
        rule = Rule(list(kinds), method, path)
        assert KINDS.issuperset(rule.kinds), rule.kinds
        with self._lock:
            self._rules.append(rule)
        return rule

    def draw(self, head: Head) -> str | None:
        with self._lock:
            self._requests += 1
            kind = self._scripted(head) or self._drawn()
            self._counts.update([kind] if kind else [])
            return kind

    def _scripted(self, head: Head) -> str | None:
        return next((rule.kinds.pop(0) for rule in self._rules if rule.fits(head)), None)

    def _drawn(self) -> str | None:
        return self._random.choice(PASSING) if self._random.random() < self._rate else None

    def unused(self) -> int:
        with self._lock:
            return sum(len(rule.kinds) for rule in self._rules)

    def forget(self) -> None:
        with self._lock:
            self._rules.clear()

    def report(self) -> dict[str, Any]:
        with self._lock:
            return {"requests": self._requests, "faults": dict(sorted(self._counts.items()))}


class Throttle:
    """Bytes a second for both directions of all connections together."""

    def __init__(self, bytes_per_second: float | None) -> None:
        self.piece_bytes = PIECE_BYTES
        if bytes_per_second:
            self.piece_bytes = max(1024, min(PIECE_BYTES, int(bytes_per_second / 20)))
        self._rate = bytes_per_second
        self._lock, self._free_at = threading.Lock(), 0.0

    def pass_on(self, pieces: Iterable[memoryview]) -> Iterator[memoryview]:
        for piece in pieces:
            if self._rate:
                self._wait(len(piece) / self._rate)
            yield piece

    def _wait(self, seconds: float) -> None:
        with self._lock:
            now = time.monotonic()
            self._free_at = max(self._free_at, now) + seconds
            pause = self._free_at - now
        time.sleep(pause)


class FaultProxy:
    """Listens on loopback from its making until ``close``."""

    def __init__(
        self,
        target: str,
        *,
        rate: float = 0.0,
        seed: int = 0,
        bytes_per_second: float | None = None,
        port: int = 0,
    ) -> None:
        parts = urlsplit(target)
        self.target = (parts.hostname or "127.0.0.1", parts.port or 80)
        self.faults, self.throttle = Faults(rate, seed), Throttle(bytes_per_second)
        self.closing = threading.Event()
        self._lock, self._clients = threading.Lock(), set[socket.socket]()
        self._listener = socket.create_server(("127.0.0.1", port), backlog=512)
        self.endpoint = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def script(self, kinds: Iterable[str], *, method: str = "", path: str = "") -> Rule:
        """Let the next requests of this method, with ``path`` in path or query, meet with ``kinds``, one each."""
        return self.faults.script(kinds, method, path)

    def unused(self) -> int:
        """Scripted faults that no request has met with yet."""
        return self.faults.unused()

    def forget(self) -> None:
        """Drop the scripted faults that are left."""
        self.faults.forget()

    def report(self) -> dict[str, Any]:
        """Requests seen, and faults given by kind."""
        return self.faults.report()

    def close(self) -> None:
        self.closing.set()
        # Closing alone does not wake a thread in accept().
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            for sock in self._clients:
                with suppress(OSError):  # closed already
                    sock.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> FaultProxy:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _accept(self) -> None:
        while not self.closing.is_set():
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with self._lock:
            self._clients.add(client)
        try:
            _Connection(self, client).serve()
        finally:
            with self._lock:
                self._clients.discard(client)
                client.close()


class _Reset(Exception):
    """Both sides are to be reset."""


class _Connection:
    """One client's connection, and the server's that goes with it, request after request."""

    def __init__(self, proxy: FaultProxy, client: socket.socket) -> None:
        self._proxy, self._pass_on = proxy, proxy.throttle.pass_on
        self._client = self._wire(client)
        self._server: Wire | None = None
        self._early: Head | None = None  # a final answer that came before the request was through

    def _wire(self, sock: socket.socket) -> Wire:
        return Wire(sock, self._proxy.throttle.piece_bytes)

    def serve(self) -> None:
        try:
            while (head := self._client.head()) and self._serve_one(head):
                pass
        except (OSError, WireError, _Reset):
            for wire in self._wires():
                wire.reset()
        finally:
            if self._server:
                self._server.sock.close()

    def _wires(self) -> list[Wire]:
        return [wire for wire in (self._client, self._server) if wire and wire.sock.fileno() >= 0]

    def _serve_one(self, head: Head) -> bool:
        """Serve a request; whether the connection may take another."""
        kind = self._proxy.faults.draw(head)
        if kind in _ANSWERS:
            return self._answer(head, *_ANSWERS[kind])
        if kind == "reset":
            raise _Reset
        if kind == "hang":
            return self._hang()
        if kind == "delay":
            time.sleep(DELAY)
        self._forward(head, cut=kind == "cut-request")
        return self._reply(head, kind)

    def _answer(self, head: Head, status: str, code: str, message: str) -> bool:
        if not head.waits_for_continue:
            for _ in self._pass_on(self._client.body(head.request_framing())):
                pass
        more = _signed(head) if code == "SignatureDoesNotMatch" else ""
        xml = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{message}</Message>{more}</Error>".encode()
        ending = "Connection: close\r\n" if head.waits_for_continue else ""
        fields = f"Content-Type: application/xml\r\nContent-Length: {len(xml)}\r\n{ending}\r\n"
        self._client.send(f"HTTP/1.1 {status}\r\n{fields}".encode() + (b"" if head.method == "HEAD" else xml))
        return not head.waits_for_continue and not head.closes

    def _hang(self) -> bool:
        """Take what comes and say nothing, until the client goes."""
        while not self._proxy.closing.is_set():
            if self._client.is_readable(0.5) and not self._client.sock.recv(1 << 16):
                break
        return False

    def _forward(self, head: Head, *, cut: bool) -> None:
        framing = head.request_framing()
        server = self._connected()
        if cut and not framing:
            server.send(head.raw[: len(head.raw) // 2])
            raise _Reset
        server.send(head.raw)
        if head.waits_for_continue and not self._may_continue(server):
            return
        pieces = self._client.body(framing)
        for piece in self._pass_on(first_half(pieces, framing) if cut else pieces):
            if self._early is None:
                self._send_piece(server, piece)
        if cut:
            raise _Reset

    def _connected(self) -> Wire:
        """The server's side: a fresh connection when the server has closed the last."""
        if self._server and self._server.is_readable():
            self._server.sock.close()
            self._server = None
        if self._server is None:
            self._server = self._wire(socket.create_connection(self._proxy.target))
        return self._server

    def _may_continue(self, server: Wire) -> bool:
        """Pass on a 100 if one comes; False when a final answer came instead."""
        while not server.is_readable(0.05):
            if self._client.is_readable():
                return True  # it did not wait
        self._early = self._interim(server)
        return self._early is None

    def _send_piece(self, server: Wire, piece: memoryview) -> None:
        """Send a piece of a request's body, unless the server answers already."""
        if server.is_readable():
            self._early = self._interim(server)
        if self._early is None:
            try:
                server.send(piece)
            except OSError:
                self._early = self._final_head(server)  # it may have answered before it went

    def _final_head(self, server: Wire) -> Head:
        while (head := self._interim(server)) is None:
            pass
        return head

    def _interim(self, server: Wire) -> Head | None:
        """The next head from the server; an interim one (1xx) is passed on, and None returned."""
        head = server.head()
        if head is None:
            raise WireError("closed in place of an answer")
        if head.status >= 200:
            return head
        self._client.send(head.raw)
        return None

    def _reply(self, head: Head, kind: str | None) -> bool:
        assert self._server is not None
        early = self._early is not None
        reply = self._early or self._final_head(self._server)
        framing = reply.reply_framing(head.method)
        pieces = self._server.body(framing)
        if kind == "lost-reply":
            for _ in pieces:
                pass
            raise _Reset
        if kind == "cut-reply":
            self._send_half(reply, pieces, framing)
        self._client.send(reply.raw)
        for piece in self._pass_on(pieces):
            self._client.send(piece)
        return not (early or head.closes or reply.closes or framing == "to the end")

    def _send_half(self, reply: Head, pieces: Iterator[memoryview], framing: int | str) -> None:
        if not framing:
            self._client.send(reply.raw[: len(reply.raw) // 2])
            raise _Reset
        self._client.send(reply.raw)
        for piece in self._pass_on(first_half(pieces, framing)):
            self._client.send(piece)
        # A reset throws away what has not been sent yet.
        time.sleep(0.05)
        raise _Reset


def _signed(head: Head) -> str:
    """What Amazon adds to a refused signature: all that was signed, and the signature."""
    signature = head.fields.get("authorization", "").rpartition("Signature=")[2]
    fields = "\n".join(f"{name}:{value}" for name, value in head.fields.items() if name.startswith("x-amz-"))
    return f"<SignatureProvided>{signature}</SignatureProvided><CanonicalRequest>{fields}</CanonicalRequest>"


def _write_report(path: Path | None, proxy: FaultProxy) -> None:
    if path is not None:
        fresh = path.with_name(path.name + ".new")
        fresh.write_text(json.dumps(proxy.report()) + "\n")
        os.replace(fresh, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="the server, http://host:port")
    parser.add_argument("--rate", type=float, default=0.0, help="share of the requests that meet with a fault")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--bytes-per-second", type=float, help="both directions of all connections together")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--report", type=Path, help="a JSON file of counts, rewritten every second")
    options = parser.parse_args()
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    limit, port = options.bytes_per_second, options.port
    with FaultProxy(options.target, rate=options.rate, seed=options.seed, bytes_per_second=limit, port=port) as proxy:
        print(proxy.endpoint, flush=True)
        while not stop.wait(1):
            _write_report(options.report, proxy)
        _write_report(options.report, proxy)


if __name__ == "__main__":
    main()
