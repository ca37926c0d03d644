"""The plan's arithmetic: where shards are cut, what a samples file holds, fingerprints. Pure: no Ray."""

from __future__ import annotations

import io
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from rayhs.config import RunConfig
from rayhs.layout import PLANNED, SAMPLES_SCHEMA, Plan, SamplesFile
from rayhs.prompts.inputs import discover, fingerprint_files
from rayhs.prompts.rows import PlannedSample, category

_FINGERPRINT_VERSION = 1


@dataclass(frozen=True)
class CutRule:
    """When a shard is full. ``generated`` tokens are stored beside each prompt's own."""

    target_bytes: int
    bytes_per_token: int
    generated: int = 0

    def passes(self, held: int, tokens: int) -> bool:
        """Whether a prompt of ``tokens`` tokens would take a shard over its target that holds
        ``held`` stored tokens. A shard is never left empty, and rejected rows (0 tokens) always fit."""
        added = self.stored(tokens)
        return held > 0 and added > 0 and (held + added) * self.bytes_per_token > self.target_bytes

    def stored(self, tokens: int) -> int:
        return tokens + self.generated if tokens else 0


def cut(token_counts: Iterable[int], rule: CutRule) -> list[list[int]]:
    """Consecutive token counts in shards: a shard ends before the prompt that would pass the target."""
    shards: list[list[int]] = []
    held = 0
    for tokens in token_counts:
        if not shards or rule.passes(held, tokens):
            shards.append([])
            held = 0
        shards[-1].append(tokens)
        held += rule.stored(tokens)
    return shards


@dataclass(frozen=True)
class Receipt:
    """One samples file: its number, its entry in the plan, a digest of its content and its reasons."""

    number: int
    file: SamplesFile
    digest: str
    reasons: Counter[str]


class SamplesWriter:
    """Builds one samples file, a row group a shard; holds one shard's rows beside the file's bytes."""

    def __init__(self, number: int, first_index: int, rule: CutRule) -> None:
        self._number, self._index, self._rule = number, first_index, rule
        self._sink = io.BytesIO()
        self._writer = pq.ParquetWriter(self._sink, SAMPLES_SCHEMA, compression="zstd", write_page_checksum=True)
        self._shard: list[PlannedSample] = []
        self._held = 0
        self._digest = xxhash.xxh3_128()
        self._shard_tokens: list[int] = []
        self._rows = 0
        self._reasons: Counter[str] = Counter()

    def add(self, samples: Iterable[PlannedSample]) -> None:
        for sample in samples:
            tokens = sample.token_ids.size
            if self._rule.passes(self._held, tokens):
                self._flush()
            self._shard.append(sample)
            self._held += self._rule.stored(tokens)
            if sample.reason is not None:
                self._reasons[category(sample.reason)] += 1

    def finish(self) -> tuple[bytes, Receipt]:
        """The file's bytes and its receipt."""
        self._flush()
        self._writer.close()
        data = self._sink.getvalue()
        file = SamplesFile(
            rows=self._rows,
            rejected=self._reasons.total(),
            shard_tokens=self._shard_tokens,
            checksum=xxhash.xxh3_128(data).hexdigest(),
        )
        return data, Receipt(self._number, file, self._digest.hexdigest(), self._reasons)

    def _flush(self) -> None:
        if not self._shard:
            return
        table = samples_table(self._shard, self._index + self._rows)
        self._writer.write_table(table, row_group_size=table.num_rows)
        update_digest(self._digest, self._shard)
        self._rows += len(self._shard)
        self._shard_tokens.append(sum(sample.token_ids.size for sample in self._shard))
        self._shard, self._held = [], 0


def samples_table(samples: Sequence[PlannedSample], first_index: int) -> pa.Table:
    """``samples`` as rows of `layout.SAMPLES_SCHEMA`."""
    counts = [sample.token_ids.size for sample in samples]
    masks = [sample.loss_mask for sample in samples]
    columns = [
        pa.array(np.arange(first_index, first_index + len(samples), dtype=np.int64)),
        pa.array([sample.sample_id for sample in samples], pa.string()),
        pa.array([PLANNED if sample.reason is None else "rejected" for sample in samples], pa.string()),
        pa.array([sample.reason for sample in samples], pa.string()),
        pa.array(counts, pa.int32()),
        _lists([sample.token_ids for sample in samples], pa.int32()),
        _lists(masks, pa.uint8()),
        pa.array([sample.columns for sample in samples], pa.string()),
    ]
    return pa.Table.from_arrays(columns, schema=SAMPLES_SCHEMA)


def _lists(arrays: Sequence[Any], kind: pa.DataType) -> pa.ListArray:
    present = [array for array in arrays if array is not None]
    ends = np.cumsum([0, *(0 if array is None else array.size for array in arrays)], dtype=np.int32)
    missing = pa.array([array is None for array in arrays]) if len(present) < len(arrays) else None
    values = pa.array(np.concatenate(present), kind) if present else pa.array([], kind)
    return pa.ListArray.from_arrays(pa.array(ends), values, type=pa.list_(kind), mask=missing)


def update_digest(digest: Any, shard: Sequence[PlannedSample]) -> None:
    """Add one shard: its size, and of each row the id, status, reason, token ids and loss mask.

    Taken from the values and not from Parquet's bytes, so that another writer version gives the same.
    """
    texts = [(sample.sample_id, sample.reason) for sample in shard]
    digest.update(json.dumps([len(shard), texts]).encode() + b"\0")
    masked = [sample.loss_mask is not None for sample in shard]
    digest.update(np.array([sample.token_ids.size for sample in shard], "<i8").tobytes())
    digest.update(np.array(masked, np.uint8).tobytes())
    for sample in shard:
        digest.update(sample.token_ids.astype("<i4", copy=False).tobytes())
        if sample.loss_mask is not None:
            digest.update(sample.loss_mask.tobytes())


def assemble(receipts: Iterable[Receipt], input_hash: str) -> tuple[Plan, Counter[str]]:
    """The plan of all samples files, in file order, and how many rows were rejected for what."""
    ordered = sorted(receipts, key=lambda receipt: receipt.number)
    digest = xxhash.xxh3_128(str(_FINGERPRINT_VERSION).encode())
    reasons: Counter[str] = Counter()
    for receipt in ordered:
        digest.update(receipt.digest.encode())
        reasons.update(receipt.reasons)
    return Plan(fingerprint=digest.hexdigest(), input=input_hash, files=[r.file for r in ordered]), reasons


def input_fingerprint(config: RunConfig) -> str:
    """A cheap hash of what is planned from: the input, and how it is read, limited and cut.

    Together with the model, its tokenizer, the layers and the dtype (which a dataset's identity has
    on their own) it decides the plan.

    Raises:
        InputError: a path can't be read.
    """
    prompts = config.prompts
    if prompts.rows is None:
        source = fingerprint_files(discover(prompts, config.storage), config.storage)
    else:
        source = _hash_rows(prompts.rows)
    settings = [
        [_FINGERPRINT_VERSION, source],
        [prompts.kind, prompts.column, prompts.id, prompts.loss_mask],
        [prompts.add_special_tokens, prompts.add_generation_prompt],
        [prompts.max_tokens, prompts.too_long, config.engine.max_model_len],
        [int(config.shards.target_bytes), config.shards.rows_per_file],
    ]
    return xxhash.xxh3_128_hexdigest(json.dumps(settings).encode())


def _hash_rows(rows: Sequence[Any]) -> str:
    digest = xxhash.xxh3_128()
    for row in rows:
        try:
            text = json.dumps(row, default=_hashable, sort_keys=True)
        except (TypeError, ValueError):
            text = repr(row)
        digest.update(text.encode(errors="backslashreplace") + b"\n")
    return digest.hexdigest()


def _hashable(value: Any) -> Any:
    # repr leaves out the middle of a long array.
    return value.tolist() if hasattr(value, "tolist") else repr(value)
