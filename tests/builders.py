"""A small valid dataset in a local folder, made without the pipeline: what the format says, by hand."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from rayhs import codec, layout, parquet_codec
from rayhs.fp8 import quantize
from rayhs.layout import CommitRecord, DatasetRecord, LayerError, Plan, SamplesFile, ShardId, Summary
from rayhs.record import seal

LAYERS = (0, 2, 4)
HIDDEN = 8
REJECTED = 4
FAILED = 7


@dataclass
class Row:
    index: int
    token_ids: np.ndarray
    loss_mask: np.ndarray
    states: dict[int, np.ndarray]
    scales: dict[int, np.ndarray] = field(default_factory=dict)
    status: str = "planned"
    reason: str | None = None

    @property
    def sample_id(self) -> str:
        return f"row-{self.index}"


@dataclass
class Builder:
    """Settings of a dataset; `write` makes it. ``rows[file][group]`` are its samples."""

    folder: Path
    shard_format: str = "safetensors"
    dtype: str = "float32"
    layers: Sequence[int] = LAYERS
    hidden: int = HIDDEN
    groups: Sequence[Sequence[int]] = ((3, 4), (3, 2, 1))
    lengths: tuple[int, int] = (2, 9)
    finished: bool = True
    uncommitted: frozenset[ShardId] = frozenset()
    engine_dtype: str | None = None
    include_generated: int = 0
    model: str = "tests/random"
    rows: list[list[list[Row]]] = field(default_factory=list)
    record: DatasetRecord | None = None

    def __post_init__(self) -> None:
        rng, index = np.random.default_rng(7), 0
        for sizes in self.groups:
            file: list[list[Row]] = []
            for size in sizes:
                file.append([self._row(rng, index + i) for i in range(size)])
                index += size
            self.rows.append(file)

    def _row(self, rng: np.random.Generator, index: int) -> Row:
        tokens = int(rng.integers(*self.lengths))
        states = {k: rng.standard_normal((tokens, self.hidden)) for k in self.layers}
        ids, mask = np.arange(tokens, dtype=np.int32) + 10 * index, (np.arange(tokens) % 2).astype(np.uint8)
        row = Row(index, ids, mask, {k: s.astype(codec.STATE_DTYPES[self.dtype]) for k, s in states.items()})
        if self.dtype == codec.FP8:
            quantized = {k: quantize(s) for k, s in states.items()}
            row.states, row.scales = ({k: parts[i] for k, parts in quantized.items()} for i in (0, 1))
        if index == REJECTED:
            row.status, row.reason, row.states, row.scales = "rejected", "the prompt is empty", {}, {}
            row.token_ids, row.loss_mask = row.token_ids[:0], row.loss_mask[:0]
        if index == FAILED:
            row.status, row.reason = "failed", "states are not finite"
        return row

    def all_rows(self) -> list[Row]:
        return [row for file in self.rows for group in file for row in group]

    def good(self) -> list[Row]:
        return [row for row in self.all_rows() if row.status == "planned"]

    def shards(self) -> list[ShardId]:
        return [ShardId(f, g) for f, file in enumerate(self.rows) for g in range(len(file))]

    def put(self, name: str, data: bytes) -> None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    def write(self) -> Builder:
        files = [self._write_samples(f, groups) for f, groups in enumerate(self.rows)]
        self.record = DatasetRecord(
            format_version=1,
            model=self.model,
            model_hash="m" * 16,
            tokenizer_hash="t" * 16,
            layers=list(self.layers),
            num_layers=max(4, *self.layers),
            hidden_size=self.hidden,
            dtype=self.dtype,
            shard_format=self.shard_format,  # type: ignore[arg-type]
            engine_dtype=self.engine_dtype or ("bfloat16" if self.dtype == codec.FP8 else self.dtype),
            include_generated=self.include_generated,
            plan=Plan(fingerprint="f" * 32, input="i" * 32, files=files),
            versions={"rayhs": "0.1.0"},
            created="2026-01-01T00:00:00Z",
        )
        self.put(layout.DATASET, self.record.to_bytes())
        for shard in self.shards():
            if shard not in self.uncommitted:
                self.write_shard(shard)
        if self.finished:
            for f in range(len(self.rows)):
                self.write_index(f, self.index_rows(f))
            self.write_summary()
        return self

    def write_shard(self, shard: ShardId, attempt: str = "0123456789abcdef") -> None:
        """The object and the commit record of one shard, consistent with the rows as they are now."""
        rows = [r for r in self.rows[shard.file][shard.group] if r.status != "rejected"]
        good = [r for r in rows if r.status == "planned"]
        name = layout.object_name(shard, attempt, self.shard_format)  # type: ignore[arg-type]
        data = self.encode(good) if good else b""
        starts = iter(np.cumsum([0, *(len(r.token_ids) for r in good)]).tolist())
        commit = CommitRecord(
            shard=str(shard),
            attempt=attempt,
            object=name if good else None,
            object_bytes=len(data),
            object_checksum=xxhash.xxh3_128(data).hexdigest() if good else None,
            index=[r.index for r in rows],
            token_start=[next(starts) if r in good else 0 for r in rows],
            num_tokens=[len(r.token_ids) if r in good else 0 for r in rows],
            status=["ok" if r in good else "failed" for r in rows],
            reason=[r.reason for r in rows],
            checksum=[self.checksum(r) if r in good else None for r in rows],
            errors=self.errors if good else {},
        )
        if good:
            self.put(name, data)
        self.put(layout.commit_name(shard), commit.to_bytes())

    @property
    def errors(self) -> dict[str, LayerError]:
        layers = self.layers if self.dtype == codec.FP8 else ()
        return {str(k): LayerError(mean=0.02, max=0.03) for k in layers}

    def encode(self, good: Sequence[Row]) -> bytes:
        record = self.record
        assert record is not None
        identity = record.model_dump(exclude={"plan", "layers", "versions", "created", "final_norm"}, exclude_none=True)
        metadata = {key: str(value) for key, value in identity.items()}
        metadata |= {"plan": record.plan.fingerprint, "layers": ",".join(map(str, record.layers))}
        if self.shard_format == "parquet":
            sink = io.BytesIO()
            samples = ((r.index, r.sample_id, r.token_ids, r.loss_mask, r.states, r.scales) for r in good)
            parquet_codec.write_shard(
                sink, samples, layers=self.layers, hidden=self.hidden, dtype=self.dtype, metadata=metadata
            )
            return sink.getvalue()
        counts = [len(r.token_ids) for r in good]
        specs = codec.shard_specs(self.layers, self.hidden, self.dtype, counts)
        tensors: list[Any] = [np.concatenate([r.states[k] for r in good]) for k in self.layers]
        tensors.append(np.cumsum([0, *counts]).astype(np.int64))
        tensors.append(np.array([r.index for r in good], np.int64))
        tensors += [np.concatenate([r.scales[k] for r in good]) for k in self.layers if self.dtype == codec.FP8]
        tensors.append(np.concatenate([r.token_ids for r in good]))
        tensors.append(np.concatenate([r.loss_mask for r in good]))
        return codec.build_header(specs, metadata) + b"".join(t.tobytes() for t in tensors)

    def checksum(self, row: Row) -> str:
        parts = [part[k].tobytes() for part in (row.states, row.scales) if part for k in self.layers]
        return xxhash.xxh3_64(b"".join(parts)).hexdigest()

    def _write_samples(self, file: int, groups: Sequence[Sequence[Row]]) -> SamplesFile:
        sink = io.BytesIO()
        with pq.ParquetWriter(sink, layout.SAMPLES_SCHEMA, write_page_checksum=True) as writer:
            for rows in groups:
                writer.write_table(pa.Table.from_pylist([_samples_row(r) for r in rows], layout.SAMPLES_SCHEMA))
        data = sink.getvalue()
        self.put(layout.samples_name(file), data)
        return SamplesFile(
            rows=sum(map(len, groups)),
            rejected=sum(r.status == "rejected" for rows in groups for r in rows),
            shard_tokens=[sum(len(r.token_ids) for r in rows) for rows in groups],
            checksum=xxhash.xxh3_128(data).hexdigest(),
        )

    def index_rows(self, file: int) -> list[dict[str, Any]]:
        rows = []
        for group, group_rows in enumerate(self.rows[file]):
            start = 0
            for row in group_rows:
                good = row.status == "planned"
                name = layout.object_name(ShardId(file, group), "0123456789abcdef", self.shard_format)  # type: ignore[arg-type]
                rows.append(
                    {
                        "index": row.index,
                        "sample_id": row.sample_id,
                        "shard": name if good else None,
                        "token_start": start if good else 0,
                        "num_tokens": len(row.token_ids) if good else 0,
                        "status": "ok" if good else row.status,
                        "reason": row.reason,
                    }
                )
                start += len(row.token_ids) if good else 0
        return rows

    def edit_record(self, name: str, change: Callable[[dict[str, Any]], object]) -> None:
        """Change a stored JSON record and seal it again, as someone who means it would."""
        document = json.loads((self.folder / name).read_text())
        del document["record_checksum"]
        change(document)
        self.put(name, seal(json.dumps(document).encode()))

    def write_index(self, file: int, rows: Iterable[dict[str, Any]]) -> None:
        sink = io.BytesIO()
        pq.write_table(pa.Table.from_pylist(list(rows), layout.INDEX_SCHEMA), sink, write_page_checksum=True)
        self.put(layout.index_name(file), sink.getvalue())

    def write_summary(self) -> None:
        rows = self.all_rows()
        reasons = [r.reason for r in rows if r.reason]
        summary = Summary(
            samples=len(rows),
            ok=len(self.good()),
            failed=sum(r.status == "failed" for r in rows),
            rejected=sum(r.status == "rejected" for r in rows),
            tokens=sum(len(r.token_ids) for r in self.good()),
            shards=len(self.shards()),
            bytes=sum(p.stat().st_size for p in (self.folder / "shards").iterdir()),
            seconds=2.0,
            tokens_per_second=10.0,
            reasons={reason: reasons.count(reason) for reason in reasons},
            errors=self.errors,
            index_checksums=[
                xxhash.xxh3_128((self.folder / layout.index_name(f)).read_bytes()).hexdigest()
                for f in range(len(self.rows))
            ],
            finished="2026-01-01T00:01:00Z",
        )
        self.put(layout.SUMMARY, summary.to_bytes())


def _samples_row(row: Row) -> dict[str, Any]:
    return {
        "index": row.index,
        "sample_id": row.sample_id,
        "status": "rejected" if row.status == "rejected" else layout.PLANNED,
        "reason": row.reason if row.status == "rejected" else None,
        "num_tokens": len(row.token_ids),
        "token_ids": row.token_ids.tolist(),
        "loss_mask": row.loss_mask.tolist(),
        "columns": json.dumps({"topic": f"topic {row.index}"}),
    }
