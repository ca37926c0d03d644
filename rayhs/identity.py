"""What makes two runs the same dataset: the identity in ``dataset.json``, and the refusal of another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from rayhs.config import RunConfig
from rayhs.errors import IdentityMismatch
from rayhs.layout import FORMAT_VERSION, DatasetRecord, Plan
from rayhs.model import ModelInfo, engine_dtype, state_dtype
from rayhs.versions import installed_versions

Identity = Mapping[str, Any]


def identity_of(config: RunConfig, model: ModelInfo, layers: Sequence[int]) -> Identity:
    """Every key of ``dataset.json`` that a later run into the same place must agree with."""
    return {
        "model": model.name,
        "revision": model.revision,
        "model_hash": model.model_hash,
        "tokenizer_hash": model.tokenizer_hash,
        "chat_template_hash": model.chat_template_hash,
        "layers": list(layers),
        "num_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "dtype": state_dtype(config, model),
        "engine_dtype": engine_dtype(config, model),
        "shard_format": config.shards.format,
        "include_generated": config.engine.include_generated,
    }


def dataset_record(identity: Identity, plan: Plan, versions: Mapping[str, str] | None = None) -> DatasetRecord:
    """``dataset.json`` of a new dataset, by default with the versions installed here."""
    return DatasetRecord(
        format_version=FORMAT_VERSION,
        plan=plan,
        versions=installed_versions() if versions is None else dict(versions),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        **identity,
    )


_PROMPTS_DIFFER = "the prompts, or how they are read and cut, are not those it was planned from"
_EXTRACT_ADVICE = (
    "Give another place with --into URI, or go on with the settings of the one there (cluster, staging, storage, "
    "shards.attempts, engine.vllm and engine.max_consecutive_failures may change)"
)


def refuse_other(
    existing: DatasetRecord,
    wanted: Identity,
    input_fingerprint: str,
    uri: str,
    input_differs: str = _PROMPTS_DIFFER,
    advice: str = _EXTRACT_ADVICE,
) -> None:
    """Refuse to go on in a place that holds another dataset.

    Args:
        input_differs: what to say where it was planned from another input.
        advice: what to do about it.

    Raises:
        IdentityMismatch: names every key that differs, there and here.
    """
    differing = [
        f"{key} is {getattr(existing, key)!r} there, {value!r} here"
        for key, value in wanted.items()
        if getattr(existing, key) != value
    ]
    if existing.plan.input != input_fingerprint:
        differing.append(input_differs)
    if differing:
        raise IdentityMismatch(f"{uri} holds another dataset: {'; '.join(differing)}. {advice}")
