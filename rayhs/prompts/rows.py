"""Input rows to samples: ids, token ids, loss masks, pass-through columns; or a reason for rejection.

No row raises. A reason starts with its category and a colon ("too long: 5000 tokens, ..."), so that
reasons can be counted; `category` cuts it off. Pure: no Ray.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from rayhs.errors import PromptRejected, first_line
from rayhs.prompts.chat import parse_messages, tokenize_chat
from rayhs.prompts.readers import InputRow
from rayhs.prompts.tokenizer import Tokenizer

TRUNCATED_FROM = "rayhs_truncated_from"
"""Key added to a sample's ``columns`` where its prompt was truncated: its length before."""

_MAX_REASON = 500


@dataclass(frozen=True)
class RowRules:
    """How a row becomes a sample. ``max_tokens`` is the longest prompt, ``vocab_size`` the model's."""

    kind: Literal["text", "messages", "token_ids"]
    column: str
    id_column: str | None
    mask_column: str | None
    add_special_tokens: bool
    add_generation_prompt: bool
    too_long: Literal["reject", "truncate"]
    max_tokens: int
    vocab_size: int

    @property
    def named_columns(self) -> tuple[str, ...]:
        return tuple(name for name in (self.column, self.id_column, self.mask_column) if name is not None)


@dataclass(frozen=True)
class PlannedSample:
    """One row of the plan. ``token_ids`` int32 `[tokens]`, ``loss_mask`` uint8 `[tokens]` or None;
    a rejected row has a ``reason`` and no tokens. ``columns`` is JSON."""

    sample_id: str
    token_ids: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.uint8] | None
    reason: str | None
    columns: str | None


_NO_TOKENS = np.zeros(0, np.int32)


def category(reason: str) -> str:
    """The countable part of a reason."""
    return reason.partition(":")[0]


def fallback_id(label: str, row: int) -> str:
    """The id of a row without a usable one of its own: ``file:row``."""
    return f"{label}:{row}"


def usable_id(row: InputRow, rules: RowRules, label: str, labels: Collection[str]) -> str:
    """The row's own id; integers become decimal strings.

    Raises:
        PromptRejected: none, not a string or integer, or the ``file:row`` form of another row.
    """
    assert rules.id_column is not None
    if not isinstance(row.value, dict):
        raise PromptRejected(f"bad id: the row has no column {rules.id_column!r}")
    value = row.value.get(rules.id_column)
    if value is None:
        raise PromptRejected(f"bad id: column {rules.id_column!r} is null or missing")
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        raise PromptRejected(f"bad id: column {rules.id_column!r} holds {type(value).__name__}, not text or an integer")
    text = str(value)
    if not text:
        raise PromptRejected("bad id: empty")
    if not _is_unicode(text):
        raise PromptRejected("bad id: not valid Unicode")
    prefix, _, number = text.rpartition(":")
    if prefix in labels and number.isdecimal() and text != fallback_id(label, row.number):
        raise PromptRejected(f"bad id: {text!r} is what another row without an id is called")
    return text


class SampleMaker:
    """Makes the samples of one block's rows. ``labels`` are the labels of all input files."""

    def __init__(self, rules: RowRules, tokenizer: Tokenizer | None, label: str, labels: Collection[str]) -> None:
        self._rules, self._tokenizer, self._label, self._labels = rules, tokenizer, label, labels

    def make(self, rows: Sequence[InputRow], duplicates: Mapping[int, int]) -> list[PlannedSample]:
        """Samples of ``rows``, in order. ``duplicates`` maps a row's position in ``rows`` to the
        global index of the row that has its id already."""
        encoded = self._encode_texts(rows)
        return [self._sample(row, encoded.get(i), duplicates.get(i)) for i, row in enumerate(rows)]

    def _encode_texts(self, rows: Sequence[InputRow]) -> dict[int, list[int]]:
        # One call for many rows is faster; where it fails, each row is tried alone and gets its own reason.
        if self._rules.kind != "text" or self._tokenizer is None:
            return {}
        texts = {i: text for i, row in enumerate(rows) if isinstance(text := self._prompt(row), str) and text}
        try:
            ids = self._tokenizer.encode(list(texts.values()), self._rules.add_special_tokens) if texts else []
        except Exception:  # noqa: BLE001 - raised again, and recorded, for the row it belongs to
            return {}
        return dict(zip(texts, ids, strict=True))

    def _prompt(self, row: InputRow) -> Any:
        # Rows of a Python list may be bare prompts.
        return row.value.get(self._rules.column) if isinstance(row.value, dict) else row.value

    def _sample(self, row: InputRow, encoded: list[int] | None, first: int | None) -> PlannedSample:
        rules, own = self._rules, fallback_id(self._label, row.number)
        sample_id, columns = own, None
        try:
            if row.reason is not None:
                raise PromptRejected(row.reason)
            columns = passed_columns(row.value, rules.named_columns)
            if rules.id_column is not None:
                sample_id = usable_id(row, rules, self._label, self._labels)
                if first is not None:
                    duplicate, sample_id = sample_id, own
                    raise PromptRejected(f"duplicate id: {duplicate!r}, first at row {first}")
            ids, mask = self._tokens(row, encoded)
            sample = self._checked(sample_id, ids, mask, columns)
        except PromptRejected as error:
            return PlannedSample(sample_id, _NO_TOKENS, None, _clean(str(error)), columns)
        return sample

    def _tokens(self, row: InputRow, encoded: list[int] | None) -> tuple[Any, Any]:
        rules, prompt = self._rules, self._prompt(row)
        if prompt is None:
            raise PromptRejected(f"no prompt: column {rules.column!r} is null or missing")
        if rules.kind == "token_ids":
            mask = row.value.get(rules.mask_column) if rules.mask_column and isinstance(row.value, dict) else None
            if rules.mask_column is not None and mask is None:
                raise PromptRejected(f"bad loss mask: column {rules.mask_column!r} is null or missing")
            return prompt, mask
        assert self._tokenizer is not None
        if rules.kind == "messages":
            messages = parse_messages(prompt)
            generate = rules.add_generation_prompt
            ids, mask = _guarded("chat template", lambda t: tokenize_chat(t, messages, generate), self._tokenizer)
            return ids, mask
        if not isinstance(prompt, str):
            raise PromptRejected(f"wrong type: column {rules.column!r} holds {type(prompt).__name__}, not text")
        if not prompt:
            raise PromptRejected(f"empty: column {rules.column!r} is an empty text")
        if encoded is None:
            (encoded,) = _guarded("tokenizer", lambda t: t.encode([prompt], rules.add_special_tokens), self._tokenizer)
        return encoded, None

    def _checked(self, sample_id: str, ids: Any, mask: Any, columns: str | None) -> PlannedSample:
        rules = self._rules
        tokens = _integers(ids, "wrong type: token ids")
        if not tokens.size:
            raise PromptRejected("no tokens: the prompt has no token")
        low, high = int(tokens.min()), int(tokens.max())
        if low < 0 or high >= rules.vocab_size:
            wrong = low if low < 0 else high
            raise PromptRejected(f"token outside vocabulary: {wrong}, the model has 0..{rules.vocab_size - 1}")
        checked = None if mask is None else _check_mask(mask, tokens.size)
        if tokens.size > rules.max_tokens:
            if rules.too_long == "reject":
                raise PromptRejected(f"too long: {tokens.size} tokens, the limit is {rules.max_tokens}")
            columns = json.dumps({**json.loads(columns or "{}"), TRUNCATED_FROM: int(tokens.size)})
            tokens = tokens[: rules.max_tokens]
            checked = None if checked is None else checked[: rules.max_tokens]
        return PlannedSample(sample_id, tokens.astype(np.int32), checked, None, columns)


def _guarded(what: str, call: Any, tokenizer: Tokenizer) -> Any:
    try:
        return call(tokenizer)
    except PromptRejected:
        raise
    # Templates and tokenizers raise their own kinds, some of them bare Exception; the reason keeps it.
    except Exception as error:
        raise PromptRejected(f"{what}: {first_line(error)}") from error


def _integers(values: Any, what: str) -> npt.NDArray[np.int64]:
    if isinstance(values, np.ndarray) and values.ndim == 1 and values.dtype.kind in "iu":
        if values.dtype == np.uint64 and values.size and values.max() > np.iinfo(np.int64).max:
            raise PromptRejected(f"{what} are out of range")
        return values.astype(np.int64)
    if not isinstance(values, list):
        raise PromptRejected(f"{what} must be a list of integers, not {type(values).__name__}")
    others = {type(value) for value in values} - {int}
    if others:
        raise PromptRejected(f"{what} must be integers, not {sorted(kind.__name__ for kind in others)[0]}")
    try:
        return np.array(values, np.int64)
    except OverflowError:
        raise PromptRejected(f"{what} are out of range") from None


def _check_mask(mask: Any, tokens: int) -> npt.NDArray[np.uint8]:
    values = _integers(mask, "bad loss mask: its values")
    if values.size != tokens:
        raise PromptRejected(f"bad loss mask: {values.size} values for {tokens} tokens")
    if values.min() < 0 or values.max() > 1:
        raise PromptRejected("bad loss mask: values other than 0 and 1")
    return values.astype(np.uint8)


def passed_columns(value: Any, used: Sequence[str]) -> str | None:
    """The columns rayhs doesn't use, as a JSON object; None where there are none.

    What JSON can't carry becomes a string: dates as ISO 8601, bytes and other objects as Python
    writes them, NaN and infinities as "nan", "inf", "-inf".
    """
    if not isinstance(value, dict):
        return None
    others = {str(key): item for key, item in value.items() if key not in used}
    if not others:
        return None
    try:
        return json.dumps(others, allow_nan=False)
    except (TypeError, ValueError):
        return json.dumps(_jsonable(others))
    except RecursionError:
        raise PromptRejected("wrong type: the other columns are nested too deeply") from None


def _jsonable(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_jsonable(item) for item in value]
    if isinstance(value, (np.ndarray, np.generic)):
        return _jsonable(value.tolist())
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    return value.isoformat() if hasattr(value, "isoformat") else str(value)


def _is_unicode(text: str) -> bool:
    # JSON can spell lone surrogates, which no UTF-8 column holds.
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _clean(reason: str) -> str:
    line = " ".join(reason.split()).encode(errors="backslashreplace").decode()
    return line if len(line) <= _MAX_REASON else line[: _MAX_REASON - 3] + "..."
