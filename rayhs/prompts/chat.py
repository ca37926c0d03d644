"""Messages to token ids and a loss mask over the assistant's turns.

With ``{% generation %}`` marks in the chat template the mask covers what they enclose. Without, a
turn is the difference between two renderings: the conversation before it with the generation
prompt, and the conversation up to and including it. Where a template renders a past turn in
another way than the last (reasoning removed), the turn's end is found by its rendering's tail.
Whatever can't be located for certain rejects the prompt; nothing is guessed.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

from rayhs.errors import PromptRejected
from rayhs.prompts.tokenizer import CharSpan, Message, Tokenizer


def parse_messages(value: object) -> list[Message]:
    """Check a conversation and flatten its text parts (joined by a newline, as vLLM does).

    Raises:
        PromptRejected: not a list of objects, no role, content that isn't text, no message at all.
    """
    if not isinstance(value, list):
        raise PromptRejected(f"bad messages: a list of messages is needed, not {type(value).__name__}")
    if not value:
        raise PromptRejected("empty: the conversation has no message")
    return [_parse_message(message, position) for position, message in enumerate(value)]


def _parse_message(message: object, position: int) -> Message:
    where = f"bad messages: message {position}"
    if not isinstance(message, dict):
        raise PromptRejected(f"{where} is {type(message).__name__}, not an object with role and content")
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not role:
        raise PromptRejected(f"{where} has no role")
    # Columnar files give every message every key; absent ones come as nulls.
    parsed = {key: item for key, item in message.items() if item is not None}
    if isinstance(content, list):
        parsed["content"] = "\n".join(_part_text(part, where) for part in content)
    elif content is None and "tool_calls" in parsed:
        parsed["content"] = ""
    elif not isinstance(content, str):
        raise PromptRejected(f"{where} ({role}) has content of type {type(content).__name__}, not text")
    return parsed


def _part_text(part: Any, where: str) -> str:
    if not isinstance(part, dict) or part.get("type", "text") != "text" or not isinstance(part.get("text"), str):
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        raise PromptRejected(f"{where} has a content part that is not text ({kind})")
    return str(part["text"])


def tokenize_chat(
    tokenizer: Tokenizer, messages: Sequence[Message], add_generation_prompt: bool
) -> tuple[list[int], list[int]]:
    """Token ids of a conversation, and a mask of the same length with 1 on the assistant's tokens.

    A token that straddles the border of a turn belongs to what follows the border.

    Raises:
        PromptRejected: an assistant turn can't be located for certain.
        Exception: whatever the chat template or the tokenizer raise.
    """
    if tokenizer.has_generation_marks:
        text, spans = tokenizer.render_marked(messages, add_generation_prompt)
    else:
        text = tokenizer.render(messages, add_generation_prompt)
        spans = _turn_spans(tokenizer, messages, text)
    ids, offsets = tokenizer.encode_with_offsets(text)
    border = _Borders(tokenizer, text, ids, offsets)
    mask = [0] * len(ids)
    for start, end in spans:
        first, last = border.token_at(start), border.token_at(end)
        mask[first:last] = [1] * (last - first)
    return ids, mask


def _turn_spans(tokenizer: Tokenizer, messages: Sequence[Message], text: str) -> list[CharSpan]:
    spans: list[CharSpan] = []
    for position, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = tokenizer.render(messages[:position], True) if position else _first_header(tokenizer, messages)
        if not text.startswith(before):
            raise PromptRejected(
                f"chat template: what it renders before assistant message {position} is no prefix of the "
                "conversation; give a template with generation marks"
            )
        spans.append((len(before), _turn_end(tokenizer, messages, position, len(before), text)))
    return spans


def _first_header(tokenizer: Tokenizer, messages: Sequence[Message]) -> str:
    # Nothing comes before, and no template renders an empty conversation: the header is what a
    # generation prompt adds after this very message.
    turn = tokenizer.render(messages[:1], False)
    header = tokenizer.render(messages[:1], True)[len(turn) :]
    start = turn.find(header) if header else -1
    end = start + len(header)
    if start < 0 or messages[0]["content"].strip() not in turn[end:]:
        raise PromptRejected("chat template: the header of an opening assistant message can't be located")
    return turn[:end]


def _turn_end(tokenizer: Tokenizer, messages: Sequence[Message], position: int, start: int, text: str) -> int:
    turn = tokenizer.render(messages[: position + 1], False)
    if text.startswith(turn) and len(turn) >= start:
        return len(turn)
    # Reasoning removed from a past turn: text goes on, after the header, with the tail of the turn.
    answer = messages[position]["content"].split("</think>")[-1].strip()
    for cut in range(start, turn.rfind(answer) + 1 if answer else start):
        if text.startswith(turn[cut:], start):
            return start + len(turn) - cut
    raise PromptRejected(
        f"chat template: assistant message {position} is rendered in another way inside the conversation than "
        "at its end; give a template with generation marks"
    )


class _Borders:
    """Maps characters of a text to its tokens, exactly or not at all."""

    def __init__(self, tokenizer: Tokenizer, text: str, ids: list[int], offsets: Sequence[CharSpan] | None) -> None:
        self._tokenizer, self._text, self._ids, self._offsets = tokenizer, text, ids, offsets
        self._ends = [end for _, end in offsets] if offsets is not None else []

    def token_at(self, char: int) -> int:
        """The first token that reaches past ``char``; the number of tokens at the end of the text.

        Raises:
            PromptRejected: the tokens around ``char`` don't tell.
        """
        if char == 0:
            return 0
        if char >= len(self._text):
            return len(self._ids)
        if self._offsets is not None:
            token = bisect_left(self._ends, char) + 1
            if token < len(self._ids) and self._ends[token - 1] == char == self._offsets[token][0]:
                return token
        return self._by_prefix(char)

    def _by_prefix(self, char: int) -> int:
        # Offsets are no help where the tokenizer has none, trims blanks off them or merged a token
        # over the border. Tokens of the text before the border decide.
        prefix, _ = self._tokenizer.encode_with_offsets(self._text[:char])
        common = 0
        for left, right in zip(prefix, self._ids, strict=False):
            if left != right:
                break
            common += 1
        if common == len(prefix):
            return common
        if common == len(prefix) - 1 and common < len(self._ids):
            spelled = self._tokenizer.token_text
            if spelled(self._ids[common]).startswith(spelled(prefix[common])):
                return common
        raise PromptRejected("chat template: the border of an assistant turn falls inside tokens")
