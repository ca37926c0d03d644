"""What planning and storing need to know of a model, read from its configuration alone."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from rayhs.config import RunConfig, fake_shape
from rayhs.errors import ConfigError, first_line
from rayhs.prompts.tokenizer import TokenizerSource, open_tokenizer
from rayhs.weights import weights_digest

UNUSED_TOKENIZER = "unused"
FAKE_VOCABULARY = 1024
FAKE_POSITIONS = 131_072
_STATE_DTYPES = ("float32", "float16", "bfloat16")
_VOLATILE = ("transformers_version", "_name_or_path", "_commit_hash", "_attn_implementation_internal")


@dataclass(frozen=True)
class ModelInfo:
    """A model's identity and shape.

    ``num_layers`` is n of the layer ids 0..n; ``dtype`` is the checkpoint's; ``max_positions`` is
    the longest context it was made for, in tokens; ``revision`` is the hub commit where known.
    """

    name: str
    revision: str | None
    num_layers: int
    hidden_size: int
    vocab_size: int
    dtype: str
    max_positions: int
    model_hash: str
    tokenizer_hash: str
    chat_template_hash: str | None


def tokenizer_source(config: RunConfig) -> TokenizerSource:
    """The tokenizer a run uses: its own, or the model's."""
    revision = config.revision if config.tokenizer is None else None
    return TokenizerSource(config.tokenizer or config.model, revision, config.engine.trust_remote_code)


def describe_model(config: RunConfig) -> ModelInfo:
    """Read the model's configuration and load its tokenizer, unless prompts are token ids. No weights are loaded.

    Raises:
        ConfigError: the model or its tokenizer can't be read, or the configuration lacks what is needed.
    """
    shape = fake_shape(config.model)
    return _describe_fake(config, *shape) if shape else _describe_real(config)


def max_prompt_tokens(config: RunConfig, model: ModelInfo) -> int:
    """The longest prompt, in tokens, that is extracted.

    One token of the engine's context is kept free, for the one it must generate, and
    ``include_generated`` more; ``prompts.max_tokens`` may lower the limit.

    Raises:
        ConfigError: the context leaves no token for a prompt.
    """
    context = config.engine.max_model_len or model.max_positions
    limit = context - 1 - config.engine.include_generated
    if limit < 1:
        raise ConfigError(
            f"engine.max_model_len: {context} leaves no room for a prompt; it must be over "
            f"{1 + config.engine.include_generated} (include_generated + 1)"
        )
    return min(limit, config.prompts.max_tokens or limit)


def engine_dtype(config: RunConfig, model: ModelInfo) -> str:
    """The dtype the engine computes in: ``engine.dtype``, or for "auto" the checkpoint's."""
    return model.dtype if config.engine.dtype == "auto" else config.engine.dtype


def state_dtype(config: RunConfig, model: ModelInfo) -> str:
    """The dtype states are stored in: ``shards.dtype``, or for "model" the engine's."""
    return engine_dtype(config, model) if config.shards.dtype == "model" else config.shards.dtype


def _describe_fake(config: RunConfig, layers: int, hidden: int) -> ModelInfo:
    tokenizer = open_tokenizer(tokenizer_source(config))
    tokenizer_hash, template_hash = tokenizer.hashes()
    return ModelInfo(
        name=config.model,
        revision=None,
        num_layers=layers,
        hidden_size=hidden,
        vocab_size=max(FAKE_VOCABULARY, len(tokenizer)),
        dtype="float32",
        max_positions=FAKE_POSITIONS,
        model_hash=f"fake-{layers}x{hidden}",
        tokenizer_hash=tokenizer_hash,
        chat_template_hash=template_hash,
    )


def _tokenizer_hashes(config: RunConfig) -> tuple[str, str | None]:
    # Token ids need no tokenizer, and a model made for a benchmark has none.
    if config.prompts.kind == "token_ids" and config.tokenizer is None:
        return UNUSED_TOKENIZER, None
    return open_tokenizer(tokenizer_source(config)).hashes()


def _describe_real(config: RunConfig) -> ModelInfo:
    whole = _load_config(config)
    text = whole.get_text_config()
    tokenizer_hash, template_hash = _tokenizer_hashes(config)
    return ModelInfo(
        name=config.model,
        revision=getattr(whole, "_commit_hash", None) or config.revision,
        num_layers=_size(config, text, "num_hidden_layers"),
        hidden_size=_size(config, text, "hidden_size"),
        vocab_size=_size(config, text, "vocab_size"),
        dtype=_dtype(config, whole, text),
        max_positions=_positions(config, text),
        model_hash=model_hash(config.model, whole),
        tokenizer_hash=tokenizer_hash,
        chat_template_hash=template_hash,
    )


def _load_config(config: RunConfig) -> Any:
    from transformers import AutoConfig

    folder = Path(config.model)
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise ConfigError(f"model {config.model}: the folder has no config.json; give the folder of a whole model")
    try:
        return AutoConfig.from_pretrained(
            config.model, revision=config.revision, trust_remote_code=config.engine.trust_remote_code
        )
    # Beside OSError and ValueError, a configuration's own code (some of it remote) raises anything.
    except Exception as error:
        what = "its config.json can't be used" if folder.is_dir() else "not a local folder, and the hub gave nothing"
        raise ConfigError(
            f"model {config.model}: {what} ({first_line(error)}); "
            "give a folder with config.json or a hub id reachable from here"
        ) from error


def _size(config: RunConfig, text: Any, key: str) -> int:
    value = getattr(text, key, None)
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise ConfigError(f"model {config.model}: its configuration has no {key}; a causal language model is needed")
    return value


def _positions(config: RunConfig, text: Any) -> int:
    value = getattr(text, "max_position_embeddings", None)
    if isinstance(value, int) and value > 0:
        return value
    if config.engine.max_model_len is None:
        raise ConfigError(f"model {config.model}: its configuration has no context length; set engine.max_model_len")
    return config.engine.max_model_len


def _dtype(config: RunConfig, whole: Any, text: Any) -> str:
    for source in (whole, text):
        value = str(getattr(source, "dtype", None)).removeprefix("torch.")
        if value in _STATE_DTYPES:
            return value
    if config.engine.dtype != "auto":
        return config.engine.dtype
    raise ConfigError(
        f"model {config.model}: its configuration states no dtype out of {', '.join(_STATE_DTYPES)}; set engine.dtype"
    )


def config_hash(whole: Any) -> str:
    """Of a transformers configuration: `model_hash` of a model of the hub."""
    return _config_digest(whole).hexdigest()


def _config_digest(whole: Any) -> xxhash.xxh3_128:
    return xxhash.xxh3_128(json.dumps(_stable(whole.to_dict()), sort_keys=True, default=str).encode())


def model_hash(name: str, whole: Any) -> str:
    """Of the configuration ``whole``; of a model in a folder of its weights, too, as `weights_digest` looks at them."""
    digest = _config_digest(whole)
    folder = Path(name)
    if folder.is_dir():
        digest.update(weights_digest(folder))
    return digest.hexdigest()


def _stable(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _stable(item) for key, item in value.items() if key not in _VOLATILE}
    return [_stable(item) for item in value] if isinstance(value, (list, tuple)) else value
