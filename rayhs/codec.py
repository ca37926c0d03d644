"""The bytes of a safetensors shard: header built and parsed here, tensors as numpy arrays.

Format: https://huggingface.co/docs/safetensors (8 bytes little-endian header length, JSON header,
data). Ours because a shard is streamed from many staged samples without ever being whole in
memory, and because `safetensors.numpy` has no bfloat16 (ml_dtypes carries it here).
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from rayhs.errors import FormatError

Array = npt.NDArray[Any]

# The safetensors package takes 100 MB; ours have at most layout.MAX_LAYERS tensors of 120 bytes, and
# JSON of many small values takes dozens of times its size once parsed.
MAX_HEADER_BYTES = 2**20
FP8 = "float8_e4m3fn"
STATE_DTYPES: dict[str, np.dtype[Any]] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    FP8: np.dtype(ml_dtypes.float8_e4m3fn),
}
_CODES: dict[str, np.dtype[Any]] = {
    "F32": STATE_DTYPES["float32"],
    "F16": STATE_DTYPES["float16"],
    "BF16": STATE_DTYPES["bfloat16"],
    "F8_E4M3": STATE_DTYPES[FP8],
    "U8": np.dtype(np.uint8),
    "I32": np.dtype(np.int32),
    "I64": np.dtype(np.int64),
}
_MAX_RANK = 8
# Shards have no booleans; files of exports do.
_CODE_OF = {dtype: code for code, dtype in _CODES.items()} | {np.dtype(np.bool_): "BOOL"}


@dataclass(frozen=True)
class TensorSpec:
    """Name, dtype and shape of one tensor, in file order."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class StoredTensor(TensorSpec):
    """A tensor of a parsed header; ``start`` is its first byte in the object."""

    start: int


def state_name(layer: int) -> str:
    return f"hidden_states.{layer}"


def scale_name(layer: int) -> str:
    return f"hidden_scales.{layer}"


def scale_names(layers: Sequence[int], dtype: str) -> list[str]:
    """The names of the scales beside states of ``dtype``: none but for float8_e4m3fn."""
    return [scale_name(k) for k in layers] if dtype == FP8 else []


def error_name(layer: int) -> str:
    return f"hidden_errors.{layer}"


def token_bytes(layers: Sequence[int], hidden: int, dtype: str) -> int:
    """Bytes of the states of one token as they are stored, scales included."""
    scale = 4 if dtype == FP8 else 0
    return len(layers) * (hidden * STATE_DTYPES[dtype].itemsize + scale)


def shard_specs(layers: Sequence[int], hidden: int, dtype: str, token_counts: Sequence[int]) -> list[TensorSpec]:
    """The tensors of a shard whose samples have ``token_counts`` tokens, in file order.

    ``hidden_states.<k>`` `[tokens, hidden]` for each layer, ``offsets`` int64 `[samples + 1]`,
    ``sample_index`` int64 `[samples]`, of float8_e4m3fn states ``hidden_scales.<k>`` float32 `[tokens]`
    for each layer, ``token_ids`` int32 `[tokens]`, ``loss_mask`` uint8 `[tokens]`.
    """
    return tensors_of_shard(layers, hidden, dtype, sum(token_counts), len(token_counts))


def tensors_of_shard(layers: Sequence[int], hidden: int, dtype: str, tokens: int, samples: int) -> list[TensorSpec]:
    """`shard_specs` of a shard of so many tokens and samples; takes no memory for either."""
    # int64 before float32 and int32 before uint8 keeps every tensor aligned to its item size.
    return [
        *_states(layers, hidden, dtype, tokens),
        TensorSpec("offsets", np.dtype(np.int64), (samples + 1,)),
        TensorSpec("sample_index", np.dtype(np.int64), (samples,)),
        *_scales(layers, dtype, tokens),
        TensorSpec("token_ids", np.dtype(np.int32), (tokens,)),
        TensorSpec("loss_mask", np.dtype(np.uint8), (tokens,)),
    ]


def _states(layers: Sequence[int], hidden: int, dtype: str, tokens: int) -> list[TensorSpec]:
    return [TensorSpec(state_name(k), STATE_DTYPES[dtype], (tokens, hidden)) for k in layers]


def _scales(layers: Sequence[int], dtype: str, tokens: int) -> list[TensorSpec]:
    return [TensorSpec(name, np.dtype(np.float32), (tokens,)) for name in scale_names(layers, dtype)]


def build_header(specs: Sequence[TensorSpec], metadata: Mapping[str, str]) -> bytes:
    """Length prefix and JSON header, padded with spaces so that data starts at a multiple of 8."""
    entries: dict[str, Any] = {"__metadata__": dict(metadata)}
    offset = 0
    for spec in specs:
        end = offset + spec.nbytes
        entries[spec.name] = {"dtype": _CODE_OF[spec.dtype], "shape": list(spec.shape), "data_offsets": [offset, end]}
        offset = end
    return _framed(json.dumps(entries, separators=(",", ":")))


def _framed(text: str) -> bytes:
    body = text.encode()
    body += b" " * (-len(body) % 8)
    return struct.pack("<Q", len(body)) + body


def header_length(prefix: bytes, object_bytes: int) -> int:
    """Length of the JSON header, from the first 8 bytes of an object of ``object_bytes`` bytes.

    Raises:
        FormatError: too short, or a header that can't fit the object (nothing large is allocated).
    """
    if len(prefix) < 8:
        raise FormatError("not a safetensors file: shorter than its length prefix")
    (length,) = struct.unpack("<Q", prefix[:8])
    if length > min(MAX_HEADER_BYTES, object_bytes - 8):
        raise FormatError(f"not a safetensors file: a header of {length} bytes in an object of {object_bytes}")
    return int(length)


def parse_header(header: bytes, object_bytes: int) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    """Parse the JSON header (without its length prefix) of an object of ``object_bytes`` bytes.

    Returns:
        The tensors by name, and the string metadata.

    Raises:
        FormatError: not JSON, unknown dtype, wrong sizes, tensors that overlap, leave gaps or end
            elsewhere than the object.
    """
    try:
        entries = json.loads(header, object_pairs_hook=_unique)
    except (ValueError, RecursionError):
        raise FormatError("safetensors header is not JSON") from None
    if not isinstance(entries, dict):
        raise FormatError("safetensors header is not a JSON object")
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise FormatError("safetensors metadata is not a mapping of strings")
    base = 8 + len(header)
    tensors = {name: _parse_tensor(name, entry, base) for name, entry in entries.items()}
    position = base
    for tensor in sorted(tensors.values(), key=lambda t: (t.start, t.nbytes)):
        if tensor.start != position:
            raise FormatError(f"safetensors tensor {tensor.name!r} overlaps another or leaves a gap")
        position += tensor.nbytes
    if position != object_bytes:
        raise FormatError(f"safetensors tensors end at byte {position}, the object has {object_bytes}")
    return tensors, metadata


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    # Of a key given twice, json takes the last and other readers the first.
    entries = dict(pairs)
    if len(entries) != len(pairs):
        raise FormatError("safetensors header has a key twice")
    return entries


def _parse_tensor(name: str, entry: object, base: int) -> StoredTensor:
    if not isinstance(entry, dict):
        raise FormatError(f"safetensors tensor {name!r} is not described by an object")
    dtype = _CODES.get(entry.get("dtype", "")) if isinstance(entry.get("dtype"), str) else None
    shape, offsets = _counts(entry.get("shape")), _counts(entry.get("data_offsets"))
    if dtype is None:
        raise FormatError(f"safetensors tensor {name!r} has the unknown dtype {entry.get('dtype')!r}")
    if shape is None or offsets is None or len(offsets) != 2:
        raise FormatError(f"safetensors tensor {name!r} has a malformed shape or malformed offsets")
    if len(shape) > _MAX_RANK or max([*shape, *offsets]) >= 2**63:
        raise FormatError(f"safetensors tensor {name!r} has a shape or offsets that no array can have")
    tensor = StoredTensor(name, dtype, tuple(shape), base + offsets[0])
    found = offsets[1] - offsets[0]
    if found != tensor.nbytes:
        raise FormatError(f"safetensors tensor {name!r}: shape {shape} and its {found} bytes disagree")
    return tensor


def _counts(value: object) -> list[int] | None:
    if isinstance(value, list) and all(isinstance(v, int) and not isinstance(v, bool) and v >= 0 for v in value):
        return value
    return None


def decode(tensor: TensorSpec, data: bytes | memoryview, rows: int | None = None) -> Array:
    """View ``data`` as ``rows`` rows (default: all) of ``tensor``; no copy.

    Raises:
        FormatError: ``data`` has another length than the rows need.
    """
    shape = tensor.shape if rows is None else (rows, *tensor.shape[1:])
    if len(data) != math.prod(shape) * tensor.dtype.itemsize:
        raise FormatError(f"{tensor.name}: {len(data)} bytes read for shape {list(shape)} of {tensor.dtype}")
    return np.frombuffer(data, dtype=tensor.dtype).reshape(shape)


def staged_specs(layers: Sequence[int], hidden: int, dtype: str, tokens: int) -> list[TensorSpec]:
    """The tensors of one staged sample: a state `[tokens, hidden]` a layer, ``token_ids`` int32 `[tokens]`.

    Of float8_e4m3fn states also ``hidden_scales.<k>`` and, as `rayhs.fp8` has it, ``hidden_errors.<k>``
    float32 `[tokens]` for each layer.
    """
    scales = _scales(layers, dtype, tokens)
    errors = [TensorSpec(error_name(k), s.dtype, s.shape) for k, s in zip(layers, scales, strict=False)]
    ids = TensorSpec("token_ids", np.dtype(np.int32), (tokens,))
    return [*_states(layers, hidden, dtype, tokens), *scales, *errors, ids]


def staged_bytes_at_most(layers: Sequence[int], hidden: int, dtype: str, tokens: int) -> int:
    """An upper bound of a staged file's size in bytes, header included."""
    specs = staged_specs(layers, hidden, dtype, tokens)
    return 512 + sum(160 + spec.nbytes for spec in specs)


class StagedHeader:
    """`build_header` of `staged_specs` of any number of tokens: made once, then filled in.

    vLLM's worker loop needs one a sample, and launches no kernels meanwhile.
    """

    def __init__(self, layers: Sequence[int], hidden: int, dtype: str, metadata: Mapping[str, str]) -> None:
        one = staged_specs(layers, hidden, dtype, 1)
        self.token_bytes = sum(spec.nbytes for spec in one)  # every tensor grows with the tokens
        self._empty_at_most = staged_bytes_at_most(layers, hidden, dtype, 0)
        text = json.dumps({"__metadata__": dict(metadata)}, separators=(",", ":"))[:-1].replace("%", "%%")
        begin, self._factors = 0, []
        for spec in one:
            rest = "".join(f",{size}" for size in spec.shape[1:])
            text += f',"{spec.name}":{{"dtype":"{_CODE_OF[spec.dtype]}","shape":[%d{rest}],"data_offsets":[%d,%d]}}'
            self._factors += [1, begin, begin + spec.nbytes]
            begin += spec.nbytes
        self._template = text + "}"

    def build(self, tokens: int) -> bytes:
        return _framed(self._template % tuple([factor * tokens for factor in self._factors]))

    def at_most(self, tokens: int) -> int:
        """`staged_bytes_at_most`."""
        return self._empty_at_most + tokens * self.token_bytes
