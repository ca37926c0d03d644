"""The run file: one pydantic model a section, sizes as ``512MiB``, unknown keys refused by name."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ByteSize,
    ConfigDict,
    Field,
    StrictInt,
    ValidationError,
    model_validator,
)

from rayhs.errors import ConfigError, one_line
from rayhs.layout import ShardFormat

_FAKE_MODEL = re.compile(r"fake/([1-9]\d{0,3})x([1-9]\d{0,5})")

StorageDtype = Literal["model", "float16", "bfloat16", "float32", "float8_e4m3fn"]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class PromptsConfig(Section):
    """Where the prompts are and which of their columns mean what."""

    path: str | list[str] | None = None
    rows: list[Any] | None = Field(default=None, repr=False)
    format: Literal["jsonl", "parquet", "huggingface"] | None = None
    text: str | None = None
    messages: str | None = None
    token_ids: str | None = None
    loss_mask: str | None = None
    id: str | None = None
    add_generation_prompt: bool = False
    add_special_tokens: bool = True
    max_tokens: Annotated[int, Field(gt=0)] | None = None
    too_long: Literal["reject", "truncate"] = "reject"
    max_rejected: Annotated[float, Field(ge=0, le=1)] = 0.5

    @model_validator(mode="after")
    def _one_source(self) -> PromptsConfig:
        if (self.path is None) == (self.rows is None):
            raise ValueError("give exactly one of path and rows")
        kinds = [k for k in ("text", "messages", "token_ids") if getattr(self, k) is not None]
        if len(kinds) > 1:
            raise ValueError(f"name one of text, messages and token_ids, not {' and '.join(kinds)}")
        if self.loss_mask is not None and self.token_ids is None:
            raise ValueError("loss_mask needs token_ids (messages make their own loss mask)")
        return self

    @property
    def kind(self) -> Literal["text", "messages", "token_ids"]:
        """What a prompt column holds; ``text`` when nothing is named."""
        return "messages" if self.messages else "token_ids" if self.token_ids else "text"

    @property
    def column(self) -> str:
        return self.messages or self.token_ids or self.text or "text"


class EngineConfig(Section):
    """vLLM's engine; ``vllm`` is passed through to its engine arguments.

    A run stops when more than ``max_consecutive_failures`` samples of a replica fail one after the other.
    """

    tensor_parallel_size: Annotated[int, Field(gt=0)] = 1
    dtype: Literal["auto", "float16", "bfloat16", "float32"] = "auto"
    max_model_len: Annotated[int, Field(gt=1)] | None = None
    include_generated: Annotated[int, Field(ge=0)] = 0
    trust_remote_code: bool = False
    distributed_executor: Literal["auto", "mp", "ray"] = "auto"
    max_consecutive_failures: Annotated[int, Field(gt=0)] = 100
    vllm: dict[str, Any] = {}


class ClusterConfig(Section):
    """The Ray cluster: ``auto`` joins a running one or starts one here, ``local`` always starts one."""

    address: str = "auto"
    replicas: Annotated[int, Field(gt=0)] | tuple[Annotated[int, Field(gt=0)], Annotated[int, Field(gt=0)]] = 1
    cpus_per_replica: Annotated[int, Field(gt=0)] | None = None
    plan_workers: Annotated[int, Field(gt=0)] | None = None

    @model_validator(mode="after")
    def _ordered(self) -> ClusterConfig:
        low, high = self.replica_range
        if low > high:
            raise ValueError(f"replicas: [{low}, {high}] has its minimum over its maximum")
        return self

    @property
    def replica_range(self) -> tuple[int, int]:
        return (self.replicas, self.replicas) if isinstance(self.replicas, int) else self.replicas


class ShardsConfig(Section):
    """How states are stored: a shard is cut when its states would pass ``target_bytes``."""

    format: ShardFormat = "safetensors"
    target_bytes: Annotated[ByteSize, Field(gt=0)] = ByteSize(512 * 2**20)
    dtype: StorageDtype = "model"
    rows_per_file: Annotated[int, Field(gt=0)] = 8192
    attempts: Annotated[int, Field(gt=0)] = 3


class StagingConfig(Section):
    """Host memory between the engine and the uploader, for each replica."""

    path: str = "/dev/shm"
    max_bytes: Annotated[ByteSize, Field(gt=0)] | None = None


class StorageConfig(Section):
    """S3 settings that are not in the usual AWS variables and files; never holds a secret."""

    endpoint: str | None = None
    region: str | None = None
    profile: str | None = None
    path_style: bool | None = None


def _prompts_shorthand(value: object) -> object:
    return {"path": value} if isinstance(value, (str, Path)) else {"rows": value} if isinstance(value, list) else value


class RunConfig(Section):
    """A whole run."""

    model: str
    revision: str | None = None
    tokenizer: str | None = None
    prompts: Annotated[PromptsConfig, BeforeValidator(_prompts_shorthand)]
    layers: str | StrictInt | list[str | StrictInt] = "eagle3"
    output: str
    engine: EngineConfig = EngineConfig()
    cluster: ClusterConfig = ClusterConfig()
    shards: ShardsConfig = ShardsConfig()
    staging: StagingConfig = StagingConfig()
    storage: StorageConfig = StorageConfig()

    @model_validator(mode="after")
    def _fake_is_whole(self) -> RunConfig:
        if self.model.startswith("fake/") and fake_shape(self.model) is None:
            raise ValueError(f"model: {self.model} is not fake/<layers>x<hidden>, such as fake/8x64")
        return self


def fake_shape(model: str) -> tuple[int, int] | None:
    """``(layers, hidden)`` of the fake engine's models, ``fake/<layers>x<hidden>``; None for any other model."""
    match = _FAKE_MODEL.fullmatch(model)
    return (int(match[1]), int(match[2])) if match else None


def with_whole_paths(config: RunConfig) -> RunConfig:
    """The same with folders of this machine by their whole path: Ray's processes stand where Ray was started."""
    names = {"tokenizer": config.tokenizer, "model": None if fake_shape(config.model) else config.model}
    folders = {key: os.path.abspath(name) for key, name in names.items() if name and os.path.isdir(name)}
    staging = config.staging.model_copy(update={"path": os.path.abspath(config.staging.path)})
    return config.model_copy(update={**folders, "staging": staging})


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a run file and apply ``a.b=c`` overrides (values are YAML).

    Raises:
        ConfigError: unreadable, not YAML, an unknown key (the nearest known key is named), a wrong value.
    """
    try:
        data = yaml.safe_load(Path(path).read_text())
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}; give the path of a run file") from None
    # PyYAML lets a date that does not exist come through as a ValueError.
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not YAML: {one_line(error)}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: a run file is a mapping with model, prompts and output")
    for override in overrides:
        apply_override(data, override)
    return parse_config(data, str(path))


def parse_config(data: Mapping[str, Any], source: str = "config") -> RunConfig:
    """Validate a mapping; ``source`` names it in messages. Raises ConfigError."""
    try:
        return RunConfig.model_validate(data)
    except ValidationError as error:
        raise ConfigError(f"{source}: {'; '.join(_explain(error))}") from None


def apply_override(data: dict[str, Any], override: str) -> None:
    """Set one ``a.b=c`` in the document of a run file; the value is YAML. Raises ConfigError."""
    key, separator, text = override.partition("=")
    if not separator or not key:
        raise ConfigError(f"--set {override}: write it as key.key=value")
    node: Any = data
    *parents, leaf = key.split(".")
    for part in parents:
        if not isinstance(node.get(part), dict):
            node[part] = _prompts_shorthand(node[part]) if part == "prompts" and node.get(part) is not None else {}
        node = node[part]
    try:
        node[leaf] = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError):
        raise ConfigError(f"--set {override}: the value is not YAML; quote it if it is text") from None


def _explain(error: ValidationError) -> Iterator[str]:
    told: set[str] = set()
    for item in error.errors():
        location = _keys(item["loc"], item["type"] == "extra_forbidden")
        where = ".".join(location)
        if where in told:
            continue  # one of several types a key may have; the first says enough
        told.add(where)
        if item["type"] == "extra_forbidden":
            known = _keys_beside(location)
            near = difflib.get_close_matches(location[-1].lower(), known, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(known)}"
            yield f"unknown key {where!r}; {hint}"
        elif item["type"] == "missing":
            yield f"{where}: missing"
        else:
            yield f"{where}: {item['msg'].removeprefix('Value error, ')}".removeprefix(": ")


def _keys(location: Sequence[str | int], unknown: bool) -> list[str]:
    """The keys of the run file in an error's location, without pydantic's names of the types it tried."""
    keys: list[str] = []
    for position, part in enumerate(location):
        is_last = position == len(location) - 1
        if isinstance(part, str) and (part in _keys_beside([*keys, part]) or (unknown and is_last)):
            keys.append(part)
    return keys


def _keys_beside(location: Sequence[str]) -> list[str]:
    model: type[BaseModel] = RunConfig
    for part in location[:-1]:
        annotation = model.model_fields[part].annotation
        if not isinstance(annotation, type) or not issubclass(annotation, BaseModel):
            return []
        model = annotation
    return list(model.model_fields)
