"""From staged samples to a committed shard: check, pack, upload, commit.

A shard's bytes are streamed to the store from the staged files, layer by layer; they are never
whole in memory. The commit record is written last, after the store has acknowledged the object.
"""

from __future__ import annotations

import io
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from rayhs import codec, parquet_codec
from rayhs.codec import Array
from rayhs.errors import FormatError, SampleError, StoreUnavailable
from rayhs.layout import CommitRecord, LayerError, ShardFormat, ShardId, commit_name, new_attempt, object_name
from rayhs.store import Store

_UPLOAD_PIECE = 8 * 2**20
_SMALL_PIECE = 2**20  # less is put together: every hash and every write gives the GIL away, which others want
COMMIT_WITHIN_S = 3 * 3600
"""An object is committed at most this long after its upload began, or never."""


@dataclass(frozen=True)
class PlannedSample:
    """One row of the plan that is to be extracted."""

    index: int
    sample_id: str
    token_ids: Array
    loss_mask: Array | None


@dataclass(frozen=True)
class GoodSample:
    """A sample with checked states, each `[tokens, hidden]`, in the dtype they are stored in.

    ``scales`` and ``errors``, float32 `[tokens]` a layer, are those of `rayhs.fp8`, or empty.
    """

    planned: PlannedSample
    token_ids: Array
    loss_mask: Array
    states: Mapping[int, Array]
    checksum: str
    scales: Mapping[int, Array] = field(default_factory=dict)
    errors: Mapping[int, Array] = field(default_factory=dict)

    def detached(self) -> GoodSample:
        """The same in memory of its own, for when its engine's staging memory goes away."""
        return replace(
            self,
            token_ids=self.token_ids.copy(),
            states=_copies(self.states),
            scales=_copies(self.scales),
            errors=_copies(self.errors),
        )


def _copies(arrays: Mapping[int, Array]) -> dict[int, Array]:
    return {layer: array.copy() for layer, array in arrays.items()}


@dataclass(frozen=True)
class FailedSample:
    planned: PlannedSample
    reason: str


@dataclass(frozen=True)
class ShardSpec:
    """What every shard of a run has in common; ``metadata`` goes into each object's header.

    Samples are staged in ``dtype`` where that is float8_e4m3fn, else in ``engine_dtype``.
    """

    layers: tuple[int, ...]
    hidden: int
    engine_dtype: str
    dtype: str
    format: ShardFormat
    metadata: Mapping[str, str]
    include_generated: int = 0


def read_staged(parts: Sequence[memoryview], planned: PlannedSample, spec: ShardSpec) -> GoodSample:
    """Read, check and convert one staged sample out of its parts; states are views of them where none is converted.

    Raises:
        SampleError: the ranks' tokens differ, or as `check_sample`.
    """
    arrays: dict[str, Array] = {}
    for tensors in map(_staged_tensors, parts):
        token_ids = tensors.pop("token_ids")
        if not np.array_equal(token_ids, arrays.setdefault("token_ids", token_ids)):
            raise SampleError("wrong states: the ranks staged other tokens than each other")
        arrays |= tensors
    return check_sample(arrays, planned, spec)


def check_sample(tensors: Mapping[str, Array], planned: PlannedSample, spec: ShardSpec) -> GoodSample:
    """Check and convert one sample's tensors, named and shaped as `rayhs.codec.staged_specs` has them.

    Raises:
        SampleError: other tokens than planned, missing or misshapen layers, or states that fail
            `check_states`.
    """
    arrays = dict(tensors)
    token_ids = arrays.pop("token_ids")
    prompt = len(planned.token_ids)
    extra = len(token_ids) - prompt
    if not 0 <= extra <= spec.include_generated or not np.array_equal(token_ids[:prompt], planned.token_ids):
        raise SampleError(
            f"wrong states: {len(token_ids)} tokens came back for a prompt of {prompt}, or of other tokens"
        )
    expected = {t.name for t in codec.staged_specs(spec.layers, spec.hidden, spec.dtype, 0)} - {"token_ids"}
    if set(arrays) != expected:
        raise SampleError(f"wrong states: layers {sorted(arrays)} came back, expected {sorted(expected)}")
    quantized = spec.layers if spec.dtype == codec.FP8 else ()
    scales = {k: _token_values(arrays[codec.scale_name(k)], token_ids, k) for k in quantized}
    errors = {k: _token_values(arrays[codec.error_name(k)], token_ids, k) for k in quantized}
    states = {k: _checked(arrays[codec.state_name(k)], scales.get(k), token_ids, k, spec) for k in spec.layers}
    loss_mask = np.ones(len(token_ids), np.uint8)
    if planned.loss_mask is not None:
        loss_mask[:prompt] = planned.loss_mask
    return GoodSample(planned, token_ids, loss_mask, states, sample_checksum(states, scales), scales, errors)


def _staged_tensors(memory: memoryview) -> dict[str, Array]:
    try:
        length = codec.header_length(bytes(memory[:8]), len(memory))
        tensors, _ = codec.parse_header(bytes(memory[8 : 8 + length]), len(memory))
    except FormatError as error:
        raise SampleError(f"wrong states: staged file: {error}") from None
    return {name: codec.decode(t, memory[t.start : t.start + t.nbytes]) for name, t in tensors.items()}


def sample_checksum(states: Mapping[int, Array], scales: Mapping[int, Array]) -> str:
    """xxh3_64 of a sample's stored states, then of its scales, layers ascending; `CommitRecord.checksum`."""
    digest = xxhash.xxh3_64()
    for arrays in (states, scales):
        for layer in sorted(arrays):
            digest.update(_bytes(arrays[layer]))
    return digest.hexdigest()


def _token_values(values: Array, token_ids: Array, layer: int) -> Array:
    if values.shape != token_ids.shape:
        raise SampleError(f"wrong states: layer {layer} has {list(values.shape)} scales of {len(token_ids)} tokens")
    return values


def _checked(states: Array, scales: Array | None, token_ids: Array, layer: int, spec: ShardSpec) -> Array:
    if states.shape != (len(token_ids), spec.hidden):
        raise SampleError(
            f"wrong states: layer {layer} has shape {list(states.shape)}, expected {[len(token_ids), spec.hidden]}"
        )
    check_states(states, token_ids, layer, scales)
    if states.dtype == codec.STATE_DTYPES[spec.dtype]:
        return states
    with np.errstate(over="ignore"):
        converted = states.astype(codec.STATE_DTYPES[spec.dtype])
    check_states(converted, token_ids, layer)
    return converted


_BITS: dict[str, tuple[type, type, int]] = {
    # dtype: (unsigned view, signed view, bits of infinity)
    "float32": (np.uint32, np.int32, 0x7F80_0000),
    "float16": (np.uint16, np.int16, 0x7C00),
    "bfloat16": (np.uint16, np.int16, 0x7F80),
    codec.FP8: (np.uint8, np.int8, 0x7F),  # it has no infinity: this is NaN
}


def check_states(states: Array, token_ids: Array, layer: int, scales: Array | None = None) -> None:
    """Refuse states `[tokens, hidden]` that are not finite, all zero, or the same for every token.

    Those of float8_e4m3fn have ``scales`` float32 `[tokens]`.

    The same state for every token is right where every token id is the same (nothing distinguishes
    the positions), so that case passes.

    Raises:
        SampleError: which check failed, on which layer.
    """
    unsigned, signed, infinity = _BITS[str(states.dtype)]
    bits: npt.NDArray[Any] = states.view(unsigned)
    # Bits of floats of one sign order as the floats do: the largest signed value is the largest positive
    # float, the largest unsigned one the most negative. Two calls a layer, as each gives the GIL away once.
    sign = 1 << (8 * bits.itemsize - 1)
    largest = max(int(states.view(signed).max()), int(bits.max()) & ~sign)
    if largest >= infinity or not (scales is None or np.isfinite(scales).all()):
        raise SampleError(f"not finite: layer {layer} has NaN or infinite states")
    if largest == 0:
        raise SampleError(f"all zero: layer {layer}")
    same_scale = scales is None or bool((scales == scales[0]).all())
    if same_scale and _constant(bits) and not (token_ids == token_ids[0]).all():
        raise SampleError(f"constant: layer {layer} has the same state for every token")


def _constant(bits: npt.NDArray[Any]) -> bool:
    return len(bits) > 1 and np.array_equal(bits[0], bits[-1]) and bool((bits == bits[0]).all())


def write_shard(
    store: Store, shard: ShardId, results: Sequence[GoodSample | FailedSample], spec: ShardSpec
) -> CommitRecord:
    """Upload the good samples as one object, then write the commit record (in plan order).

    Guarantees: the record is written only after the store acknowledged the whole object; on any
    error nothing of this attempt is part of the dataset. A record that stands is left alone, and is
    what is returned: of two attempts the first to commit wins, and the other's object is an orphan
    for `rayhs gc`, which takes none that may still be committed (`COMMIT_WITHIN_S`).

    Raises:
        StoreError: the store refused for good; StoreUnavailable: it did not answer in time, or the
            upload took so long that the object might be taken for an orphan.
        FormatError: the record that stands is damaged.
    """
    attempt = new_attempt()
    good = [r for r in results if isinstance(r, GoodSample)]
    started = time.monotonic()
    upload = _Upload(store, object_name(shard, attempt, spec.format))
    if good:
        upload.run(*_pack(shard, attempt, good, spec))
    seconds = time.monotonic() - started
    if seconds > COMMIT_WITHIN_S:
        raise StoreUnavailable(
            f"{upload.name}: the upload took {seconds / 3600:.1f} h, over the limit; lower shards.target_bytes"
        )
    record = _record(shard, attempt, results, upload, {"upload": seconds})
    if store.put_new(commit_name(shard), record.to_bytes()):
        return record
    # Of another attempt, or our own where the reply was lost.
    standing: CommitRecord = CommitRecord.from_bytes(store.get(commit_name(shard)), commit_name(shard))
    return standing


class _Upload:
    """Streams an object and hashes it on the way."""

    def __init__(self, store: Store, name: str) -> None:
        self._store, self.name = store, name
        self.nbytes = 0
        self._digest = xxhash.xxh3_128()

    @property
    def checksum(self) -> str:
        return self._digest.hexdigest()

    def run(self, pieces: Iterator[memoryview], nbytes: int) -> None:
        self.nbytes = nbytes
        self._store.put_stream(self.name, self._hashed(pieces), nbytes)

    def _hashed(self, pieces: Iterator[memoryview]) -> Iterator[memoryview]:
        for piece in _gathered(pieces):
            for first in range(0, len(piece), _UPLOAD_PIECE):
                part = piece[first : first + _UPLOAD_PIECE]
                self._digest.update(part)
                yield part


def _gathered(pieces: Iterator[memoryview]) -> Iterator[memoryview]:
    """The same bytes, with runs of small pieces joined."""
    small: list[memoryview] = []
    held = 0
    for piece in pieces:
        if small and held + len(piece) > _SMALL_PIECE:
            yield memoryview(b"".join(small))
            small, held = [], 0
        if len(piece) < _SMALL_PIECE:
            small.append(piece)
            held += len(piece)
        else:
            yield piece
    if small:
        yield memoryview(b"".join(small))


def _pack(
    shard: ShardId, attempt: str, good: Sequence[GoodSample], spec: ShardSpec
) -> tuple[Iterator[memoryview], int]:
    metadata = {**spec.metadata, "shard": str(shard), "attempt": attempt}
    if spec.format == "parquet":
        return _parquet_pieces(good, spec, metadata)
    specs = codec.shard_specs(spec.layers, spec.hidden, spec.dtype, [len(g.token_ids) for g in good])
    header = codec.build_header(specs, metadata)
    return _safetensors_pieces(header, good, spec), len(header) + sum(s.nbytes for s in specs)


def _parquet_pieces(
    good: Sequence[GoodSample], spec: ShardSpec, metadata: Mapping[str, str]
) -> tuple[Iterator[memoryview], int]:
    # Whole in memory, unlike safetensors: a Parquet file's length is known only once it is written.
    sink = io.BytesIO()
    rows = ((g.planned.index, g.planned.sample_id, g.token_ids, g.loss_mask, g.states, g.scales) for g in good)
    parquet_codec.write_shard(sink, rows, layers=spec.layers, hidden=spec.hidden, dtype=spec.dtype, metadata=metadata)
    data = sink.getbuffer()
    return iter([data]), len(data)


def _safetensors_pieces(header: bytes, good: Sequence[GoodSample], spec: ShardSpec) -> Iterator[memoryview]:
    yield memoryview(header)
    for layer in spec.layers:
        for sample in good:
            yield _bytes(sample.states[layer])
    counts = [len(sample.token_ids) for sample in good]
    yield _bytes(np.concatenate([[0], np.cumsum(counts)]).astype(np.int64))
    yield _bytes(np.asarray([sample.planned.index for sample in good], np.int64))
    for layer in good[0].scales:
        for sample in good:
            yield _bytes(sample.scales[layer])
    for sample in good:
        yield _bytes(sample.token_ids.astype(np.int32))
    for sample in good:
        yield _bytes(sample.loss_mask)


def _bytes(array: Array) -> memoryview:
    return np.ascontiguousarray(array).view(np.uint8).reshape(-1).data


def _record(
    shard: ShardId,
    attempt: str,
    results: Sequence[GoodSample | FailedSample],
    upload: _Upload,
    seconds: dict[str, float],
) -> CommitRecord:
    counts = [len(r.token_ids) if isinstance(r, GoodSample) else 0 for r in results]
    ends = np.cumsum(counts).tolist()
    return CommitRecord(
        shard=str(shard),
        attempt=attempt,
        object=upload.name if upload.nbytes else None,
        object_bytes=upload.nbytes,
        object_checksum=upload.checksum if upload.nbytes else None,
        index=[r.planned.index for r in results],
        token_start=[end - count if count else 0 for end, count in zip(ends, counts, strict=True)],
        num_tokens=counts,
        status=["ok" if isinstance(r, GoodSample) else "failed" for r in results],
        reason=[r.reason if isinstance(r, FailedSample) else None for r in results],
        checksum=[r.checksum if isinstance(r, GoodSample) else None for r in results],
        errors=_errors([r for r in results if isinstance(r, GoodSample)]),
        seconds=seconds,
    )


def _errors(good: Sequence[GoodSample]) -> dict[str, LayerError]:
    layers = good[0].errors if good else ()
    tokens = {k: np.concatenate([sample.errors[k] for sample in good]) for k in layers}
    return {str(k): LayerError(mean=float(e.mean(dtype=np.float64)), max=float(e.max())) for k, e in tokens.items()}
