"""HTTP/1.1 messages on a socket as they pass by: heads are understood, bodies stay raw and are never gathered."""

from __future__ import annotations

import select
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

PIECE_BYTES = 256 << 10
_HEAD_LIMIT = 128 << 10

Framing = int | str  # bytes of a body, or one of these
CHUNKED, TO_THE_END = "chunked", "to the end"


class WireError(Exception):
    """The other side went away in the middle of a message, or does not speak HTTP."""


@dataclass(frozen=True)
class Head:
    """Start line and fields, with the blank line after them, byte for byte as received."""

    raw: bytes

    @cached_property
    def start(self) -> list[str]:
        return self.raw.partition(b"\r\n")[0].decode("latin-1").split(" ", 2)

    @cached_property
    def fields(self) -> dict[str, str]:
        lines = self.raw.decode("latin-1").split("\r\n")[1:]
        pairs = (line.partition(":") for line in lines if line)
        return {name.strip().lower(): value.strip() for name, _, value in pairs}

    @property
    def method(self) -> str:
        return self.start[0]

    @property
    def path(self) -> str:
        return self.start[1]

    @property
    def status(self) -> int:
        return int(self.start[1])

    @property
    def waits_for_continue(self) -> bool:
        return self.fields.get("expect", "").lower() == "100-continue"

    @property
    def closes(self) -> bool:
        """Whether the connection ends after this message."""
        said = self.fields.get("connection", "").lower()
        return said == "close" or ("HTTP/1.0" in (self.start[0], self.start[-1]) and said != "keep-alive")

    def request_framing(self) -> Framing:
        return self._framing(0)

    def reply_framing(self, method: str) -> Framing:
        if method == "HEAD" or self.status in (204, 304):
            return 0
        return self._framing(TO_THE_END)

    def _framing(self, otherwise: Framing) -> Framing:
        if self.fields.get("transfer-encoding", "").lower() == CHUNKED:
            return CHUNKED
        return int(self.fields["content-length"]) if "content-length" in self.fields else otherwise


class Wire:
    """One side of a connection. What ``body`` yields is good until the next piece is asked for."""

    def __init__(self, sock: socket.socket, piece_bytes: int = PIECE_BYTES) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock = sock
        self._unread = bytearray()
        self._buffer = memoryview(bytearray(piece_bytes))
        self._poll = select.poll()  # select() ends at the 1024th descriptor
        self._poll.register(sock, select.POLLIN)

    def head(self) -> Head | None:
        """The next message's head; None when the other side has closed between messages."""
        while not (end := self._unread.find(b"\r\n\r\n") + 4) > 3:
            data = self.sock.recv(1 << 16)
            if not data and not self._unread:
                return None
            if not data or len(self._unread) > _HEAD_LIMIT:
                raise WireError("half a head")
            self._unread += data
        return Head(self._take(end))

    def body(self, framing: Framing) -> Iterator[memoryview]:
        if framing == CHUNKED:
            return self._chunks()
        if framing == TO_THE_END:
            return self._rest()
        return self._count(int(framing))

    def is_readable(self, seconds: float = 0) -> bool:
        """Whether bytes, or the end, can be read at once."""
        return bool(self._unread) or bool(self._poll.poll(seconds * 1000))

    def send(self, data: bytes | memoryview) -> None:
        self.sock.sendall(data)

    def reset(self) -> None:
        """Close by RST: the other side's next read or write fails."""
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.sock.close()

    def _take(self, count: int) -> bytes:
        taken = bytes(self._unread[:count])
        del self._unread[:count]
        return taken

    def _count(self, left: int) -> Iterator[memoryview]:
        while left:
            piece = self._piece(left)
            if not piece:
                raise WireError("half a body")
            left -= len(piece)
            yield piece

    def _piece(self, most: int) -> memoryview:
        if self._unread:
            return memoryview(self._take(min(most, len(self._buffer))))
        return self._buffer[: self.sock.recv_into(self._buffer, min(most, len(self._buffer)))]

    def _rest(self) -> Iterator[memoryview]:
        while piece := self._piece(len(self._buffer)):
            yield piece

    def _chunks(self) -> Iterator[memoryview]:
        while True:
            line = self._line()
            yield memoryview(line)
            size = int(line.partition(b";")[0], 16)
            if not size:
                break
            yield from self._count(size + 2)
        while line != b"\r\n":  # trailing fields
            line = self._line()
            yield memoryview(line)

    def _line(self) -> bytes:
        while not (end := self._unread.find(b"\r\n") + 2) > 1:
            data = self.sock.recv(1 << 16)
            if not data or len(self._unread) > _HEAD_LIMIT:
                raise WireError("half a line")
            self._unread += data
        return self._take(end)


def first_half(pieces: Iterator[memoryview], framing: Framing) -> Iterator[memoryview]:
    """Half of a body; of one whose length nobody knows, a few bytes."""
    left = framing // 2 if isinstance(framing, int) else 9
    while left:
        piece = next(pieces)[:left]
        left -= len(piece)
        yield piece
