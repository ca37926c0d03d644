"""Names and records of a dataset in the store: the format other people's code depends on.

Every record read back is validated here, so that a truncated, corrupt or hostile one becomes a
`FormatError` and no name in it can point outside the dataset.
"""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import pyarrow as pa
import xxhash
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from rayhs.errors import FormatError

FORMAT_VERSION = 1
DATASET = "dataset.json"
SUMMARY = "summary.json"

ShardFormat = Literal["safetensors", "parquet"]
Status = Literal["ok", "failed", "rejected"]
SampleStatus = Literal["ok", "failed"]

_SHARD_ID = re.compile(r"(\d{5,})-(\d{4,})")
_OBJECT = re.compile(r"shards/(\d{5,}-\d{4,})-([0-9a-f]{16})\.(safetensors|parquet)")
_COMMIT = re.compile(r"commits/(\d{5,}-\d{4,})\.json")
_SEAL_BYTES = 38
_SEAL = re.compile(rb',"record_checksum":"([0-9a-f]{16})"\}')

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
        match = _SHARD_ID.fullmatch(text)
        if match is None:
            raise FormatError(f"{text!r} is not a shard id such as 00007-0042")
        return cls(int(match[1]), int(match[2]))


def samples_name(file: int) -> str:
    return f"samples/{file:05d}.parquet"


def index_name(file: int) -> str:
    return f"index/{file:05d}.parquet"


def commit_name(shard: ShardId) -> str:
    return f"commits/{shard}.json"


def shard_of_commit(name: str) -> ShardId | None:
    """The shard a commit record's object name stands for; None for any other name."""
    match = _COMMIT.fullmatch(name)
    return ShardId.parse(match[1]) if match else None


def shard_of_object(name: str) -> ShardId | None:
    """The shard whose attempt an object's name stands for; None for any other name."""
    match = _OBJECT.fullmatch(name)
    return ShardId.parse(match[1]) if match else None


def new_attempt() -> str:
    """A random attempt id: 16 hex digits (64 bits)."""
    return secrets.token_hex(8)


def object_name(shard: ShardId, attempt: str, shard_format: ShardFormat) -> str:
    return f"shards/{shard}-{attempt}.{shard_format}"


class Record(BaseModel):
    """A JSON object of the dataset; unknown keys of later minor versions are ignored.

    Stored, its last key is its seal, the 38 bytes ``,"record_checksum":"<16 hex>"}`` at the very end.
    The checksum is xxh3_64 (seed 0, lower-case hex) of the bytes before the seal followed by one
    ``}``: of the JSON as it was before the key was added, byte for byte.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore")

    def to_bytes(self) -> bytes:
        return seal(self.model_dump_json(exclude_none=True).encode())

    @classmethod
    def from_bytes(cls, data: bytes, name: str) -> Any:
        """Parse and validate; ``name`` is the object's name, for the message.

        Raises:
            FormatError: not JSON, a missing key, a wrong type, values that contradict, or a byte
                that is not as it was written.
        """
        try:
            record = cls.model_validate_json(data)
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False, include_input=False)[0]
            where = ".".join(str(part) for part in first["loc"]) or "document"
            raise FormatError(f"{name}: {where}: {first['msg']}") from None
        # After the values: what a field has wrong says more than that something is.
        _check_seal(data, name)
        return record


def seal(document: bytes) -> bytes:
    """Append the checksum to a JSON object that has none and at least one key."""
    return document[:-1] + f',"record_checksum":"{xxhash.xxh3_64_hexdigest(document)}"}}'.encode()


def _check_seal(data: bytes, name: str) -> None:
    found = _SEAL.fullmatch(data[-_SEAL_BYTES:])
    if found is None:
        problem = "no record_checksum at its end"
    elif xxhash.xxh3_64_hexdigest(data[:-_SEAL_BYTES] + b"}") != found[1].decode():
        problem = "differs from its record_checksum"
    else:
        return
    raise FormatError(f"{name}: {problem}: damaged or edited; restore it from a copy or make it again")


class SamplesFile(Record):
    """One samples file: how many rows it has and how its row groups (shards) are filled."""

    rows: int = Field(ge=0)
    rejected: int = Field(ge=0)
    shard_tokens: list[Annotated[int, Field(ge=0)]]


class Plan(Record):
    """The frozen assignment of samples to shards.

    ``fingerprint`` covers every sample's id, token ids, loss mask and rejection and every cut
    between shards; ``input`` is a cheap fingerprint of the input files, to know an unchanged one.
    """

    fingerprint: str
    input: str
    files: list[SamplesFile]

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
    layers: list[Annotated[int, Field(ge=0)]] = Field(min_length=1)
    num_layers: int = Field(gt=0)
    hidden_size: int = Field(gt=0)
    dtype: str
    shard_format: ShardFormat
    final_norm: Literal[False] = False
    include_generated: int = Field(default=0, ge=0)
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


class CommitRecord(Record):
    """``commits/<shard>.json``: makes one attempt of a shard the valid one.

    Lists have one entry a planned sample of the shard, in plan order. ``token_start`` and
    ``num_tokens`` are rows of the object's tensors (0 and 0 for a failed sample); ``checksum`` is
    xxh3_64 (16 hex digits) of the sample's stored states, layers ascending, each `[tokens, hidden]`
    in row-major order (scales after each layer where there are any). ``object_checksum`` is
    xxh3_128 of the whole object. A shard without any good sample has no object.
    """

    shard: str
    attempt: str
    object: str | None = None
    object_bytes: int = Field(default=0, ge=0)
    object_checksum: str | None = None
    index: list[int]
    token_start: list[int]
    num_tokens: list[int]
    status: list[SampleStatus]
    reason: list[str | None]
    checksum: list[str | None]
    seconds: dict[str, float] = {}

    @model_validator(mode="after")
    def _check(self) -> CommitRecord:
        columns = (self.token_start, self.num_tokens, self.status, self.reason, self.checksum)
        if any(len(column) != len(self.index) for column in columns):
            raise ValueError("the per-sample lists differ in length")
        if self.object is not None:
            match = _OBJECT.fullmatch(self.object)
            if match is None or match[1] != self.shard or match[2] != self.attempt:
                raise ValueError(
                    f"object name {self.object!r} is not one of shard {self.shard}, attempt {self.attempt}"
                )
        elif "ok" in self.status:
            raise ValueError("good samples without an object")
        expected = 0
        for start, count, status in zip(self.token_start, self.num_tokens, self.status, strict=True):
            if status == "ok" and (start != expected or count <= 0):
                raise ValueError("token ranges of the samples are not consecutive")
            expected += count if status == "ok" else 0
        return self

    @property
    def good_tokens(self) -> list[int]:
        return [n for n, s in zip(self.num_tokens, self.status, strict=True) if s == "ok"]


class Summary(Record):
    """``summary.json``: totals of a finished run; its presence means complete."""

    samples: int
    ok: int
    failed: int
    rejected: int
    tokens: int
    shards: int
    bytes: int
    seconds: float
    tokens_per_second: float
    reasons: dict[str, int]
    finished: str
