"""One file of hidden states as vLLM's example connector and speculators write it.

``hidden_states`` `[tokens, layers, hidden]` and ``token_ids`` `[tokens]`; of float8_e4m3fn states also
``hidden_states_scales`` float32 `[tokens, 1, 1]`, one scale a token over all its layers.

Sources: vLLM 0.33, `example_hidden_states_connector.py`; speculators 0.9, `hs_connectors/fp8_utils.py`.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import PurePath

import numpy as np

from rayhs.codec import FP8, STATE_DTYPES, Array, StoredTensor, decode, header_length, parse_header
from rayhs.errors import FormatError, InputError, SampleError

STATES, TOKENS, SCALES = "hidden_states", "token_ids", "hidden_states_scales"
DEQUANTIZED = "bfloat16"
"""What float8_e4m3fn files are read as: speculators' own default."""

_FIRST_READ = 4096  # more than any header of these few tensors
_PASSING = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.ESTALE, errno.ETIMEDOUT)


@dataclass(frozen=True)
class StateFile:
    """The header of a file, checked: three dimensions, as many token ids and scales as states."""

    states: StoredTensor
    token_ids: StoredTensor
    scales: StoredTensor | None

    @property
    def dtype(self) -> str:
        """That of the states, once dequantised."""
        return DEQUANTIZED if self.scales is not None else self.states.dtype.name


def read_header(path: str) -> StateFile:
    """The header alone.

    Raises:
        SampleError: there is no such file, it is not whole, or has other tensors.
        InputError: nothing is known of the file: this host or the file system could not read now.
    """
    with _opened(path) as file:
        return file.header


def read_tokens(path: str) -> Array:
    """The token ids `[tokens]`; raises as `read_header`."""
    with _opened(path) as file:
        return file.array(file.header.token_ids)


def read_states(path: str) -> tuple[StateFile, Array, Array, Array | None]:
    """Header, token ids `[tokens]`, states `[tokens, layers, hidden]` and scales float32 `[tokens]` or None, as stored.

    Raises as `read_header`.
    """
    with _opened(path) as file:
        header = file.header
        scales = None if header.scales is None else file.array(header.scales).reshape(-1)
        return header, file.array(header.token_ids), file.array(header.states), scales


class _Open:
    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise SampleError("unreadable file: not a regular file")
        start = self._read(0, min(_FIRST_READ, status.st_size))
        length = header_length(bytes(start[:8]), status.st_size)
        missing = self._read(len(start), max(8 + length - len(start), 0))
        tensors, _ = parse_header((bytes(start) + bytes(missing))[8 : 8 + length], status.st_size)
        self.header = _checked(tensors)

    def array(self, tensor: StoredTensor) -> Array:
        return decode(tensor, self._read(tensor.start, tensor.nbytes))

    def _read(self, start: int, length: int) -> memoryview:
        view = np.empty(length, np.uint8).data
        done = 0
        while done < length:
            count = os.preadv(self._descriptor, [view[done:]], start + done)
            if count == 0:
                raise FormatError(f"ends at byte {start + done}")
            done += count
        return view


@contextmanager
def _opened(path: str) -> Iterator[_Open]:
    with told(path):
        # Without O_NONBLOCK a pipe of that name would never open.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            yield _Open(descriptor)
        finally:
            os.close(descriptor)


@contextmanager
def told(path: str) -> Iterator[None]:
    """What goes wrong with a file as SampleError; what is not the file's fault as InputError."""
    try:
        yield
    except FileNotFoundError:
        raise SampleError(f"no file: {PurePath(path).name} does not exist") from None
    except FormatError as error:
        raise SampleError(f"damaged file: {error}") from None
    except OSError as error:
        if error.errno in _PASSING:
            raise InputError(f"{path}: {error.strerror}; run the same command again to go on") from None
        raise SampleError(f"unreadable file: {error.strerror}") from None


def _checked(tensors: Mapping[str, StoredTensor]) -> StateFile:
    for name in (STATES, TOKENS):
        if name not in tensors:
            raise SampleError(f"wrong tensors: no {name}; there are {', '.join(tensors) or 'none'}")
    states, token_ids = tensors[STATES], tensors[TOKENS]
    if len(states.shape) != 3 or states.dtype.name not in STATE_DTYPES:
        raise SampleError(
            f"wrong tensors: {STATES} is {states.dtype.name} {list(states.shape)}, "
            "not [tokens, layers, hidden] of floats"
        )
    tokens = states.shape[0]
    if token_ids.dtype.kind not in "iu" or token_ids.shape != (tokens,):
        raise SampleError(
            f"wrong tensors: {TOKENS} is {token_ids.dtype.name} {list(token_ids.shape)} for {tokens} tokens of states"
        )
    if states.dtype != STATE_DTYPES[FP8]:
        return StateFile(states, token_ids, None)
    scales = tensors.get(SCALES)
    if scales is None or scales.dtype != np.float32 or scales.shape[:1] != (tokens,) or scales.nbytes != 4 * tokens:
        raise SampleError(f"wrong tensors: {FP8} states need {SCALES}, float32, one a token")
    return StateFile(states, token_ids, scales)
