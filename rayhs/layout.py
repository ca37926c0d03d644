"""Names and records of a dataset in the store: the format other people's code depends on.

Every record read back is validated here, so that a truncated, corrupt or hostile one becomes a
`FormatError` and no name in it can point outside the dataset.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

import pyarrow as pa
from pydantic import FailFast, Field, model_validator

from rayhs.errors import FormatError
from rayhs.record import Record

FORMAT_VERSION = 1
DATASET = "dataset.json"
SUMMARY = "summary.json"

ShardFormat = Literal["safetensors", "parquet"]
Status = Literal["ok", "failed", "rejected"]
SampleStatus = Literal["ok", "failed"]

# Limits far over any real dataset, under what int64, Arrow's int32 and memory can take.
MAX_LAYERS = 4096
MAX_HIDDEN = 2**24
MAX_SAMPLES = MAX_TOKENS = 2**48
Count = Annotated[int, Field(ge=0, le=MAX_TOKENS)]

# ASCII digits, and few of them: \d takes any script's, and int() refuses thousands.
# No number has two spellings: another one would make one shard two.
_NUMBERS = r"([0-9]{5}|[1-9][0-9]{5,8})-([0-9]{4}|[1-9][0-9]{4,8})"
_SHARD_ID = re.compile(_NUMBERS)
_OBJECT = re.compile(rf"shards/{_NUMBERS}-([0-9a-f]{{16}})\.(?:safetensors|parquet)")
_COMMIT = re.compile(rf"commits/{_NUMBERS}\.json")

# samples/<file>.parquet: every input row in input order; a row group is a shard. ``columns`` is a
# JSON object of the pass-through columns; a rejected row has no tokens.
SAMPLES_SCHEMA = pa.schema(
    [
        pa.field("index", pa.int64(), nullable=False),
        pa.field("sample_id", pa.string(), nullable=False),
        pa.field("status", pa.string(), nullable=False),
        pa.field("reason", pa.string()),
        pa.field("num_tokens", pa.int32(), nullable=False),
        pa.field("token_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("loss_mask", pa.list_(pa.uint8())),
        pa.field("columns", pa.string()),
    ]
)
# index/<file>.parquet: ``shard`` is the object's name, null without states.
INDEX_SCHEMA = pa.schema(
    [
        pa.field("index", pa.int64(), nullable=False),
        pa.field("sample_id", pa.string(), nullable=False),
        pa.field("shard", pa.string()),
        pa.field("token_start", pa.int64(), nullable=False),
        pa.field("num_tokens", pa.int64(), nullable=False),
        pa.field("status", pa.string(), nullable=False),
        pa.field("reason", pa.string()),
    ]
)
PLANNED = "planned"  # ``status`` of a samples row that is to be extracted; the other is "rejected"


@dataclass(frozen=True, order=True)
class ShardId:
    """Row group ``group`` of samples file ``file``; written as ``00007-0042``."""

    file: int
    group: int

    def __str__(self) -> str:
        return f"{self.file:05d}-{self.group:04d}"

    @classmethod
    def parse(cls, text: str) -> ShardId:
        """Raises FormatError on anything but ``<file>-<group>``."""
        shard = _shard_in(_SHARD_ID.fullmatch(text))
        if shard is None:
            raise FormatError(f"{text!r} is not a shard id such as 00007-0042")
        return shard


def samples_name(file: int) -> str:
    return f"samples/{file:05d}.parquet"


def index_name(file: int) -> str:
    return f"index/{file:05d}.parquet"


def commit_name(shard: ShardId) -> str:
    return f"commits/{shard}.json"


def shard_of_commit(name: str) -> ShardId | None:
    """The shard a commit record's object name stands for; None for any other name."""
    return _shard_in(_COMMIT.fullmatch(name))


def shard_of_object(name: str) -> ShardId | None:
    """The shard whose attempt an object's name stands for; None for any other name."""
    return _shard_in(_OBJECT.fullmatch(name))


def is_object_name(name: str) -> bool:
    """Whether `shard_of_object` is a shard, for many names."""
    return _OBJECT.fullmatch(name) is not None


def _shard_in(match: re.Match[str] | None) -> ShardId | None:
    return ShardId(int(match[1]), int(match[2])) if match else None


def new_attempt() -> str:
    """A random attempt id: 16 hex digits (64 bits)."""
    return secrets.token_hex(8)


def object_name(shard: ShardId, attempt: str, shard_format: ShardFormat) -> str:
    return f"shards/{shard}-{attempt}.{shard_format}"


class SamplesFile(Record):
    """One samples file: its rows, how its row groups (shards) are filled, and xxh3_128 of its bytes in hex."""

    rows: Count
    rejected: Count
    shard_tokens: Annotated[list[Count], FailFast()]
    checksum: str


class Plan(Record):
    """The frozen assignment of samples to shards.

    ``fingerprint`` covers every sample's id, token ids, loss mask and rejection and every cut
    between shards; ``input`` is a cheap fingerprint of the input files, to know an unchanged one.
    """

    fingerprint: str
    input: str
    files: Annotated[list[SamplesFile], FailFast()]

    @model_validator(mode="after")
    def _check(self) -> Plan:
        if self.samples > MAX_SAMPLES or self.tokens > MAX_TOKENS:
            raise ValueError(f"{self.samples} samples of {self.tokens} tokens are more than a dataset can have")
        return self

    @property
    def samples(self) -> int:
        return sum(f.rows for f in self.files)

    @property
    def rejected(self) -> int:
        return sum(f.rejected for f in self.files)

    @property
    def tokens(self) -> int:
        return sum(sum(f.shard_tokens) for f in self.files)

    def shard_ids(self) -> list[ShardId]:
        return [ShardId(i, g) for i, f in enumerate(self.files) for g in range(len(f.shard_tokens))]


class DatasetRecord(Record):
    """``dataset.json``: what the states are. Two runs with another identity never share a place."""

    format_version: int
    model: str
    revision: str | None = None
    model_hash: str
    tokenizer_hash: str
    chat_template_hash: str | None = None
    layers: list[Annotated[int, Field(ge=0, le=MAX_LAYERS)]] = Field(min_length=1, max_length=MAX_LAYERS + 1)
    num_layers: int = Field(gt=0, le=MAX_LAYERS)
    hidden_size: int = Field(gt=0, le=MAX_HIDDEN)
    dtype: str
    shard_format: ShardFormat
    final_norm: Literal[False] = False
    include_generated: Count = 0
    engine_dtype: str
    plan: Plan
    versions: dict[str, str]
    created: str

    @model_validator(mode="after")
    def _check(self) -> DatasetRecord:
        if self.format_version != FORMAT_VERSION:
            raise ValueError(f"format version {self.format_version}; this rayhs reads version {FORMAT_VERSION}")
        if self.layers != sorted(set(self.layers)) or self.layers[-1] > self.num_layers:
            raise ValueError(f"layers {self.layers} are not sorted, unique ids within 0..{self.num_layers}")
        return self


class LayerError(Record):
    """How far the float8_e4m3fn states of a layer are from the engine's, over tokens: ``||x - q s|| / ||x||``."""

    mean: Annotated[float, Field(ge=0, le=2)]
    max: Annotated[float, Field(ge=0, le=2)]


LayerErrors = dict[Annotated[str, Field(pattern=r"^(0|[1-9][0-9]{0,3})$")], LayerError]


class CommitRecord(Record):
    """``commits/<shard>.json``: makes one attempt of a shard the valid one.

    Lists have one entry a planned sample of the shard, in plan order. ``token_start`` and
    ``num_tokens`` are rows of the object's tensors (0 and 0 for a failed sample); ``checksum`` is
    xxh3_64 (16 hex digits) of the sample's stored states, layers ascending, each `[tokens, hidden]`
    in row-major order, then of its scales, layers ascending, where there are any. ``object_checksum``
    is xxh3_128 of the whole object. A shard without any good sample has no object. ``errors`` are by
    layer id, of the shard's good samples, where states are stored in float8_e4m3fn.
    """

    shard: str
    attempt: str
    object: str | None = None
    object_bytes: Count = 0
    object_checksum: str | None = None
    index: Annotated[list[Count], FailFast()]
    token_start: Annotated[list[Count], FailFast()]
    num_tokens: Annotated[list[Count], FailFast()]
    status: Annotated[list[SampleStatus], FailFast()]
    reason: Annotated[list[str | None], FailFast()]
    checksum: Annotated[list[str | None], FailFast()]
    errors: LayerErrors = Field(default_factory=dict)
    seconds: dict[str, float] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _check(self) -> CommitRecord:
        columns = (self.token_start, self.num_tokens, self.status, self.reason, self.checksum)
        if any(len(column) != len(self.index) for column in columns):
            raise ValueError("the per-sample lists differ in length")
        if self.object is not None:
            match = _OBJECT.fullmatch(self.object)
            if match is None or f"{match[1]}-{match[2]}" != self.shard or match[3] != self.attempt:
                raise ValueError(
                    f"object name {self.object!r} is not one of shard {self.shard}, attempt {self.attempt}"
                )
        elif "ok" in self.status:
            raise ValueError("good samples without an object")
        if self.errors and "ok" not in self.status:
            raise ValueError("errors of states without a good sample")
        expected = 0
        for start, count, status in zip(self.token_start, self.num_tokens, self.status, strict=True):
            if status == "ok" and (start != expected or count <= 0):
                raise ValueError("token ranges of the samples are not consecutive")
            expected += count if status == "ok" else 0
        return self

    @property
    def good_tokens(self) -> list[int]:
        return [n for n, s in zip(self.num_tokens, self.status, strict=True) if s == "ok"]


class ErrorTotals:
    """The `LayerError` of many shards together."""

    def __init__(self) -> None:
        self.errors: dict[str, LayerError] = {}
        self._tokens = 0

    def add(self, errors: Mapping[str, LayerError], tokens: int) -> None:
        self._tokens += tokens
        for layer, error in errors.items():
            before = self.errors.get(layer, error)
            mean = before.mean + (error.mean - before.mean) * tokens / self._tokens
            self.errors[layer] = LayerError(mean=mean, max=max(before.max, error.max))


class Summary(Record):
    """``summary.json``: totals of a finished run; its presence means complete.

    ``index_checksums``: xxh3_128 in hex of the bytes of each index file, in order. ``errors`` as in
    `CommitRecord`, of all shards.
    """

    samples: Count
    ok: Count
    failed: Count
    rejected: Count
    tokens: Count
    shards: Count
    bytes: Count
    seconds: float
    tokens_per_second: float
    reasons: dict[str, Count]
    errors: LayerErrors = Field(default_factory=dict)
    index_checksums: Annotated[list[str], FailFast()]
    finished: str
