"""Check one shard against its plan rows and its commit record, reading the object in bounded chunks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rayhs import codec, fp8, layout
from rayhs.codec import Array, StoredTensor, state_name
from rayhs.errors import FormatError, ObjectNotFound
from rayhs.layout import CommitRecord, DatasetRecord, LayerError, ShardId
from rayhs.reading.catalog import read_commit
from rayhs.reading.index_table import index_rows
from rayhs.reading.plan_reader import PlanReader
from rayhs.reading.shard_reader import ShardReader, check_tensors, open_shard
from rayhs.store import Store
from rayhs.verify.findings import Finding, Findings
from rayhs.verify.states import ObjectStream, SampleState

_PIECE = 2**20


@dataclass
class ShardCheck:
    """The outcome for one shard; ``index`` is what the dataset's index must say of it."""

    findings: list[Finding]
    object: str | None = None
    index: pa.Table | None = None
    rejected: int = 0
    failed: int = 0
    ok: int = 0
    tokens: int = 0
    bytes: int = 0
    errors: Mapping[str, LayerError] = field(default_factory=dict)


@dataclass(frozen=True)
class _Expected:
    """A good sample as plan and commit record have it.

    ``token_ids`` and ``loss_mask`` are of the prompt alone, the mask all ones where none was planned.
    """

    sample_id: str
    index: int
    token_ids: Array
    loss_mask: Array
    start: int
    tokens: int
    checksum: str | None


def check_shard(store: Store, record: DatasetRecord, plan: PlanReader, shard: ShardId) -> ShardCheck:
    """Check everything about one shard. Damage becomes findings; only StoreError gets out."""
    found = Findings()
    check = ShardCheck([])
    try:
        rows = plan.rows(shard)
        _check_rows(record, plan, shard, rows)
    except (FormatError, ObjectNotFound) as error:
        found.add(layout.samples_name(shard.file), f"{_without_name(error)}; shard {shard} can't be checked")
        check.findings = list(found)
        return check
    try:
        commit = _commit_of(store, shard, rows)
        check.index = index_rows(rows, commit)
    except (FormatError, ObjectNotFound) as error:
        found.add(layout.commit_name(shard), _without_name(error), _planned_ids(rows))
        check.findings = list(found)
        return check
    _count(check, commit, check.index)
    if commit is not None and commit.object is not None:
        check.object, check.errors = commit.object, commit.errors
        quantized = [str(layer) for layer in record.layers] if record.dtype == codec.FP8 else []
        if sorted(commit.errors) != sorted(quantized):
            found.add(
                layout.commit_name(shard), f"it has the errors of layers {sorted(commit.errors)}, not {quantized}"
            )
        _check_object(store, record, commit, rows, found)
    check.findings = list(found)
    return check


def _commit_of(store: Store, shard: ShardId, rows: pa.Table) -> CommitRecord | None:
    """The shard's commit record; one without a planned row needs none."""
    try:
        return read_commit(store, shard)
    except ObjectNotFound:
        if not _planned_ids(rows):
            return None
        raise ObjectNotFound("missing: the shard was not committed; run rayhs extract (or import) again") from None


def _planned_ids(rows: pa.Table) -> list[str]:
    pairs = zip(rows["sample_id"].to_pylist(), rows["status"].to_pylist(), strict=True)
    return [sample_id for sample_id, status in pairs if status == layout.PLANNED]


def _check_rows(record: DatasetRecord, plan: PlanReader, shard: ShardId, rows: pa.Table) -> None:
    """Raises FormatError where the rows of a samples file are not what ``dataset.json`` planned."""
    first = plan.first_index(shard)
    if not np.array_equal(rows["index"].to_numpy(), np.arange(first, first + len(rows))):
        raise FormatError(f"the rows of shard {shard} are not samples {first}..{first + len(rows) - 1} in order")
    if any(rows[f.name].null_count for f in layout.SAMPLES_SCHEMA if not f.nullable):
        raise FormatError(f"the rows of shard {shard} have nulls where there must be none")
    lengths = np.asarray(pc.list_value_length(rows["token_ids"]))
    counted, planned = rows["num_tokens"].to_numpy(), record.plan.files[shard.file].shard_tokens[shard.group]
    if not np.array_equal(lengths, counted) or counted.sum() != planned:
        raise FormatError(f"the rows of shard {shard} have {counted.sum()} tokens, the plan has {planned}")


def _count(check: ShardCheck, commit: CommitRecord | None, index: pa.Table) -> None:
    status = index["status"].to_pylist()
    check.ok, check.failed, check.rejected = (status.count(s) for s in ("ok", "failed", "rejected"))
    check.tokens = int(index["num_tokens"].to_numpy().sum())
    check.bytes = commit.object_bytes if commit is not None else 0


def _expected(commit: CommitRecord, rows: pa.Table) -> list[_Expected]:
    first = rows["index"][0].as_py()
    places = zip(commit.index, commit.status, commit.token_start, commit.num_tokens, commit.checksum, strict=True)
    samples = []
    for index, status, start, tokens, checksum in places:
        if status == "ok":
            row = index - first
            ids, mask = rows["token_ids"][row].values.to_numpy(), rows["loss_mask"][row].values
            samples.append(
                _Expected(
                    rows["sample_id"][row].as_py(),
                    index,
                    ids,
                    np.ones(len(ids), np.uint8) if mask is None else mask.to_numpy(),
                    start,
                    tokens,
                    checksum,
                )
            )
    return samples


def _check_object(store: Store, record: DatasetRecord, commit: CommitRecord, rows: pa.Table, found: Findings) -> None:
    name, samples = str(commit.object), _expected(commit, rows)
    ids = [s.sample_id for s in samples]
    size = store.size(name)
    if size is None or size != commit.object_bytes:
        problem = "missing" if size is None else f"{size} bytes, its commit record says {commit.object_bytes}"
        found.add(name, problem, ids)
        return
    stream = ObjectStream(store, name, size)
    try:
        if record.shard_format == "parquet":
            _check_parquet(store, record, name, samples, found)
        else:
            _check_tensors(stream, record, name, samples, found)
    except FormatError as error:
        found.add(name, _without_name(error), ids)
    if stream.finish() != commit.object_checksum:
        found.add(name, f"its xxh3_128 checksum differs from its commit record's {commit.object_checksum}")


def _check_parquet(
    store: Store, record: DatasetRecord, name: str, samples: Sequence[_Expected], found: Findings
) -> None:
    shard = open_shard(store, record, name)
    check_metadata(shard.metadata, record)
    reader = ShardReader(store, record, record.layers)
    for sample in samples:
        try:
            stored = reader.read(name, sample.index, sample.start, sample.tokens)
        except FormatError as error:
            found.add(name, _without_name(error).replace(f"; run rayhs verify {store.uri}", ""), [sample.sample_id])
            continue
        state = SampleState(sample.token_ids)
        for layer in record.layers:
            state.start_layer(layer, stored.states[layer].shape[1] * stored.states[layer].itemsize)
            state.update(stored.states[layer].view(np.uint8).reshape(-1), record.dtype)
        for layer, scales in stored.scales.items():
            state.add_scales(layer, scales, fp8.largest_scale(record.engine_dtype))
        _report(found, name, sample, record, state, stored.token_ids, stored.loss_mask)


def _check_tensors(
    stream: ObjectStream, record: DatasetRecord, name: str, samples: Sequence[_Expected], found: Findings
) -> None:
    length = codec.header_length(bytes(stream.read(min(8, stream.left))), stream.left + 8)
    tensors, metadata = codec.parse_header(bytes(stream.read(length)), stream.size)
    check_metadata(metadata, record)
    tokens = check_tensors(tensors, record)
    if tokens != sum(s.tokens for s in samples) or tensors["sample_index"].shape != (len(samples),):
        raise FormatError(f"{tokens} tokens of {tensors['sample_index'].shape[0]} samples, the commit has others")
    ordered = sorted(tensors.values(), key=lambda t: t.start)
    if [t.name for t in ordered[: len(record.layers)]] != [state_name(k) for k in record.layers]:
        raise FormatError("its tensors are not in ascending order of layers, states first")
    states = [SampleState(s.token_ids) for s in samples]
    for layer, tensor in zip(record.layers, ordered, strict=False):
        for sample, state in zip(samples, states, strict=True):
            state.start_layer(layer, _row_bytes(tensor))
            _stream_states(stream, state, sample.tokens * _row_bytes(tensor), tensor, record.dtype)
    small = {t.name: codec.decode(t, bytes(stream.read(t.nbytes))) for t in ordered[len(record.layers) :]}
    _check_places(small, samples)
    for sample, state in zip(samples, states, strict=True):
        part = slice(sample.start, sample.start + sample.tokens)
        for layer, scales in zip(record.layers, codec.scale_names(record.layers, record.dtype), strict=False):
            state.add_scales(layer, small[scales][part], fp8.largest_scale(record.engine_dtype))
        _report(found, name, sample, record, state, small["token_ids"][part], small["loss_mask"][part])


def check_metadata(metadata: Mapping[str, str], record: DatasetRecord) -> None:
    """The identity that a shard repeats must be the dataset's, key by key."""
    identity = record.model_dump(
        mode="json", exclude_none=True, exclude={"plan", "layers", "versions", "created", "final_norm"}
    )
    identity |= {"plan": record.plan.fingerprint, "layers": ",".join(map(str, record.layers))}
    for key, want in identity.items():
        if metadata.get(key, str(want)) != str(want):
            raise FormatError(f"its metadata says {key}={metadata[key]}, {layout.DATASET} says {want}")


def _check_places(small: Mapping[str, Array], samples: Sequence[_Expected]) -> None:
    ends = [0, *np.cumsum([s.tokens for s in samples]).tolist()]
    if small["sample_index"].tolist() != [s.index for s in samples] or small["offsets"].tolist() != ends:
        raise FormatError("its sample_index or offsets are not those of its commit record")


def _stream_states(stream: ObjectStream, state: SampleState, left: int, tensor: StoredTensor, dtype: str) -> None:
    step = max(1, _PIECE // _row_bytes(tensor)) * _row_bytes(tensor)
    while left:
        piece = stream.read(min(left, step))
        state.update(np.frombuffer(piece, np.uint8), dtype)
        left -= len(piece)


def _row_bytes(tensor: StoredTensor) -> int:
    return tensor.shape[1] * tensor.dtype.itemsize


def _report(
    found: Findings,
    name: str,
    sample: _Expected,
    record: DatasetRecord,
    state: SampleState,
    token_ids: Array,
    loss_mask: Array,
) -> None:
    for problem in _problems(sample, record, state, token_ids, loss_mask):
        found.add(name, problem, [sample.sample_id])


def _problems(
    sample: _Expected, record: DatasetRecord, state: SampleState, token_ids: Array, loss_mask: Array
) -> Iterator[str]:
    if state.hash.hexdigest() != sample.checksum:
        yield "states differ from the checksum in the commit record"
    for layer in record.layers:
        if layer in state.not_finite:
            yield f"layer {layer} is not finite"
        if layer in state.zero:
            yield f"layer {layer} is all zero"
        elif layer in state.constant:
            yield f"layer {layer} is the same for every token"
    prompt = len(sample.token_ids)
    if not prompt <= len(token_ids) <= prompt + record.include_generated:
        yield f"{len(token_ids)} tokens where the plan has another number"
    elif not np.array_equal(token_ids[:prompt], sample.token_ids):
        yield "token_ids differ from the plan's"
    if not np.array_equal(loss_mask[:prompt], sample.loss_mask):
        yield "loss_mask differs from the plan's"


def _without_name(error: Exception) -> str:
    """The message without the object name in front, which the finding states itself."""
    text = str(error)
    head, separator, rest = text.partition(": ")
    return rest if separator and "/" in head and " " not in head else text
