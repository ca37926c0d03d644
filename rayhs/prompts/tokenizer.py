"""Text and messages to token ids: transformers' tokenizers, and the bytes of the fake model.

transformers is imported here and in `rayhs.model` alone, when a tokenizer is first loaded.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import xxhash

from rayhs.config import fake_shape
from rayhs.errors import ConfigError, first_line

Message = dict[str, Any]
CharSpan = tuple[int, int]
Hashes = tuple[str, str | None]

_GENERATION_MARK = re.compile(r"{%-?\s*generation\s*-?%}")  # transformers' own test for the keyword


class Tokenizer(Protocol):
    """What planning needs of a tokenizer. Any method may raise anything on a bad prompt."""

    def encode(self, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
        """Token ids of each text."""
        ...

    def encode_with_offsets(self, text: str) -> tuple[list[int], Sequence[CharSpan] | None]:
        """Token ids without special tokens added, and each token's characters where they are known."""
        ...

    def token_text(self, token_id: int) -> str:
        """The token as its vocabulary spells it."""
        ...

    @property
    def has_chat_template(self) -> bool: ...

    @property
    def has_generation_marks(self) -> bool:
        """Whether the chat template marks assistant text with ``{% generation %}``."""
        ...

    def render(self, messages: Sequence[Message], add_generation_prompt: bool) -> str:
        """The conversation as text."""
        ...

    def render_marked(self, messages: Sequence[Message], add_generation_prompt: bool) -> tuple[str, list[CharSpan]]:
        """The conversation as text, and the character ranges inside generation marks."""
        ...

    def hashes(self) -> Hashes:
        """Hash of everything that turns text into ids, and of the chat template (None without one)."""
        ...

    def __len__(self) -> int:
        """Number of ids, added tokens included."""
        ...


@dataclass(frozen=True)
class TokenizerSource:
    """Where a tokenizer comes from."""

    name: str
    revision: str | None = None
    trust_remote_code: bool = False


def open_tokenizer(source: TokenizerSource) -> Tokenizer:
    """Load a tokenizer.

    Raises:
        ConfigError: neither a folder with a tokenizer nor a hub id reachable from here.
    """
    return FakeTokenizer() if fake_shape(source.name) else HuggingFaceTokenizer(source)


@functools.lru_cache(maxsize=4)
def worker_tokenizer(source: TokenizerSource, hashes: Hashes) -> Tokenizer:
    """The tokenizer whose `Tokenizer.hashes` are ``hashes``, loaded once a process.

    Raises:
        ConfigError: it can't be loaded, or what is found here (on this node, by now) is another one.
    """
    tokenizer = open_tokenizer(source)
    if tokenizer.hashes() != hashes:
        raise ConfigError(
            f"tokenizer {source.name}: its files on this node are not those the run began with; "
            "give every node the same and leave them alone meanwhile"
        )
    return tokenizer


class HuggingFaceTokenizer:
    """A transformers tokenizer."""

    def __init__(self, source: TokenizerSource) -> None:
        from transformers import AutoTokenizer

        try:
            self._inner: Any = AutoTokenizer.from_pretrained(
                source.name, revision=source.revision, trust_remote_code=source.trust_remote_code
            )
        # Beside OSError, code of the tokenizer's own (tiktoken, sentencepiece, remote code) raises anything.
        except Exception as error:
            raise ConfigError(
                f"tokenizer {source.name}: can't be loaded ({first_line(error)}); "
                "give a folder with tokenizer files or a hub id reachable from here"
            ) from error
        self._template = _template_text(self._inner.chat_template)

    def encode(self, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
        ids = self._inner(list(texts), add_special_tokens=add_special_tokens, verbose=False)["input_ids"]
        return _checked(ids, len(texts))

    def encode_with_offsets(self, text: str) -> tuple[list[int], Sequence[CharSpan] | None]:
        fast = bool(self._inner.is_fast)
        encoded = self._inner(text, add_special_tokens=False, return_offsets_mapping=fast, verbose=False)
        (ids,) = _checked([encoded["input_ids"]], 1)
        return ids, encoded["offset_mapping"] if fast else None

    def token_text(self, token_id: int) -> str:
        return str(self._inner.convert_ids_to_tokens(token_id))

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    @property
    def has_generation_marks(self) -> bool:
        return self._template is not None and _GENERATION_MARK.search(self._template) is not None

    def render(self, messages: Sequence[Message], add_generation_prompt: bool) -> str:
        text = self._inner.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=add_generation_prompt
        )
        if not isinstance(text, str):
            raise TypeError(f"the chat template gave {type(text).__name__}, not text")
        return text

    def render_marked(self, messages: Sequence[Message], add_generation_prompt: bool) -> tuple[str, list[CharSpan]]:
        # Not apply_chat_template(return_assistant_tokens_mask=True): where it finds no token at the
        # last character of a mark it sets the mask up to the end of the conversation.
        from transformers.utils.chat_template_utils import render_jinja_template

        texts, spans = render_jinja_template(
            conversations=[list(messages)],
            chat_template=self._template,
            return_assistant_tokens_mask=True,
            add_generation_prompt=add_generation_prompt,
            **self._inner.special_tokens_map,
        )
        return texts[0], [(start, end) for start, end in spans[0]]

    def hashes(self) -> Hashes:
        inner = self._inner
        parts = [type(inner).__name__, repr(sorted((k, str(v)) for k, v in inner.special_tokens_map.items()))]
        if inner.is_fast:
            parts.append(inner.backend_tokenizer.to_str())
        else:
            parts.append(repr(sorted(inner.get_vocab().items())))
        template = None if self._template is None else xxhash.xxh3_128_hexdigest(self._template.encode())
        return xxhash.xxh3_128_hexdigest("\0".join(parts).encode()), template

    def __len__(self) -> int:
        return len(self._inner)


def _template_text(template: str | Mapping[str, str] | None) -> str | None:
    return template.get("default") if isinstance(template, Mapping) else template


def _checked(ids: Any, count: int) -> list[list[int]]:
    # The return types of tokenizers changed between transformers' versions, and a silently
    # different one has cost others a dataset.
    if not isinstance(ids, list) or len(ids) != count or not all(isinstance(row, list) for row in ids):
        raise TypeError(f"the tokenizer gave {type(ids).__name__} instead of {count} lists of token ids")
    return ids


class FakeTokenizer:
    """The fake model's: a token is a byte of UTF-8, a message is a line ``role: content``."""

    has_chat_template = True
    has_generation_marks = False

    def encode(self, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
        return [list(text.encode()) for text in texts]

    def encode_with_offsets(self, text: str) -> tuple[list[int], Sequence[CharSpan] | None]:
        return list(text.encode()), None

    def token_text(self, token_id: int) -> str:
        return chr(token_id)

    def render(self, messages: Sequence[Message], add_generation_prompt: bool) -> str:
        lines = [f"{message['role']}: {message['content']}\n" for message in messages]
        return "".join(lines) + ("assistant: " if add_generation_prompt else "")

    def render_marked(self, messages: Sequence[Message], add_generation_prompt: bool) -> tuple[str, list[CharSpan]]:
        raise ValueError("the fake chat template has no generation marks")

    def hashes(self) -> Hashes:
        return "fake-utf8", "fake-lines"

    def __len__(self) -> int:
        return 256
