"""Every way a row can be bad ends as a rejected sample with a reason, beside its good neighbours."""

from __future__ import annotations

import datetime as dt
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rayhs.prompts.readers import InputRow
from rayhs.prompts.rows import PlannedSample, RowRules, SampleMaker, category, passed_columns
from rayhs.prompts.tokenizer import FakeTokenizer, Tokenizer, TokenizerSource, open_tokenizer
from tests.tokenizers_for_tests import STRICT, save_tokenizer

RULES = RowRules("text", "text", None, None, True, False, "reject", 10, 1024)
IDS = replace(RULES, kind="token_ids", column="ids", mask_column="mask")


def make(
    values: list[Any],
    rules: RowRules = RULES,
    tokenizer: Tokenizer | None = None,
    duplicates: dict[int, int] | None = None,
) -> list[PlannedSample]:
    rows = [InputRow(number, value) for number, value in enumerate(values)]
    maker = SampleMaker(rules, tokenizer or FakeTokenizer(), "a.jsonl", {"a.jsonl", "b.jsonl"})
    return maker.make(rows, duplicates or {})


def one(value: Any, rules: RowRules = RULES, tokenizer: Tokenizer | None = None) -> PlannedSample:
    (sample,) = make([value], rules, tokenizer)
    return sample


def test_good_text() -> None:
    sample = one({"text": "hi", "topic": "x"})
    assert (sample.sample_id, sample.token_ids.tolist(), sample.reason) == ("a.jsonl:0", [104, 105], None)
    assert sample.token_ids.dtype == np.int32
    assert json.loads(sample.columns or "") == {"topic": "x"}


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ({"text": None}, "no prompt"),
        ({"other": "x"}, "no prompt"),
        ({"text": 5}, "wrong type"),
        ({"text": ["x"]}, "wrong type"),
        ({"text": ""}, "empty"),
        ({"text": "12345678901"}, "too long: 11 tokens, the limit is 10"),
        ({"text": "\ud800"}, "tokenizer: UnicodeEncodeError"),
    ],
)
def test_bad_text_beside_good(value: Any, reason: str) -> None:
    before, bad, after = make([{"text": "a"}, value, {"text": "b"}])
    assert (before.reason, after.reason) == (None, None)
    assert (bad.reason or "").startswith(reason)
    assert bad.token_ids.size == 0 and bad.loss_mask is None and bad.sample_id == "a.jsonl:1"


@pytest.mark.parametrize(
    ("ids", "mask", "reason"),
    [
        ([], [], "no tokens"),
        ([1, True], [1, 1], "wrong type: token ids must be integers, not bool"),
        ([1, 2.0], [1, 1], "wrong type: token ids must be integers, not float"),
        ([1, None], [1, 1], "wrong type: token ids must be integers, not NoneType"),
        ("ab", [1, 1], "wrong type: token ids must be a list"),
        ([1, 1024], [1, 1], "token outside vocabulary: 1024"),
        ([-1, 5], [1, 1], "token outside vocabulary: -1"),
        ([2**70], [1], "wrong type: token ids are out of range"),
        ([1, 2], [1], "bad loss mask: 1 values for 2 tokens"),
        ([1, 2], [1, 2], "bad loss mask: values other"),
        ([1, 2], [1, True], "bad loss mask: its values must be integers"),
        ([1, 2], None, "bad loss mask: column 'mask' is null"),
        (list(range(11)), [1] * 11, "too long"),
    ],
)
def test_bad_token_ids(ids: Any, mask: Any, reason: str) -> None:
    assert (one({"ids": ids, "mask": mask}, IDS).reason or "").startswith(reason)


@pytest.mark.parametrize("dtype", [np.int16, np.uint64, np.int64])
def test_token_ids_as_arrays(dtype: Any) -> None:
    sample = one({"ids": np.array([1, 2, 3], dtype), "mask": np.array([0, 1, 1], np.uint8)}, IDS)
    assert sample.loss_mask is not None
    assert (sample.token_ids.tolist(), sample.loss_mask.tolist(), sample.reason) == ([1, 2, 3], [0, 1, 1], None)
    assert one({"ids": np.array([1.0]), "mask": [1]}, IDS).reason is not None
    assert one({"ids": np.array([2**63 + 1], np.uint64), "mask": [1]}, IDS).reason is not None


def test_truncation_is_noted_and_cuts_the_mask() -> None:
    rules = replace(IDS, too_long="truncate", max_tokens=3)
    sample = one({"ids": [1, 2, 3, 4, 5], "mask": [0, 0, 1, 1, 1], "topic": "x"}, rules)
    assert sample.loss_mask is not None
    assert (sample.token_ids.tolist(), sample.loss_mask.tolist()) == ([1, 2, 3], [0, 0, 1])
    assert json.loads(sample.columns or "") == {"topic": "x", "rayhs_truncated_from": 5}


def test_token_ids_of_another_tokenizer_are_checked_too(tmp_path: Path) -> None:
    tokenizer = open_tokenizer(TokenizerSource(str(save_tokenizer(tmp_path))))
    assert (
        category(one({"text": "low"}, replace(RULES, vocab_size=3), tokenizer).reason or "")
        == "token outside vocabulary"
    )


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (None, "null or missing"),
        (1.5, "float"),
        (True, "bool"),
        ([1], "list"),
        ("", "empty"),
        ("\ud800", "not valid Unicode"),
        ("b.jsonl:7", "what another row"),
    ],
)
def test_bad_ids_fall_back_to_file_and_row(value: Any, reason: str) -> None:
    sample = one({"id": value, "text": "a"}, replace(RULES, id_column="id"))
    assert sample.sample_id == "a.jsonl:0"
    assert category(sample.reason or "") == "bad id" and reason in (sample.reason or "")


def test_good_ids() -> None:
    rules = replace(RULES, id_column="id")
    rows = [{"id": 7, "text": "a"}, {"id": "a.jsonl:1", "text": "a"}, {"id": "x:1", "text": ""}]
    assert [s.sample_id for s in make(rows, rules)] == ["7", "a.jsonl:1", "x:1"]


def test_duplicates_keep_their_place_under_another_id() -> None:
    rules = replace(RULES, id_column="id")
    first, second = make([{"id": "x", "text": "a"}, {"id": "x", "text": "b"}], rules, duplicates={1: 40})
    assert (first.sample_id, first.reason) == ("x", None)
    assert (second.sample_id, second.reason) == ("a.jsonl:1", "duplicate id: 'x', first at row 40")


def test_chat_template_that_raises(tmp_path: Path) -> None:
    tokenizer = open_tokenizer(TokenizerSource(str(save_tokenizer(tmp_path, STRICT))))
    rules = replace(RULES, kind="messages", column="messages", max_tokens=1000)
    talk = [{"role": "user", "content": "low"}]
    good, bad, malformed = make(
        [{"messages": talk}, {"messages": [{"role": "system", "content": "x"}, *talk]}, {"messages": [3]}],
        rules,
        tokenizer,
    )
    assert good.reason is None and good.loss_mask is not None and not good.loss_mask.any()
    assert (bad.reason or "").startswith("chat template: TemplateError: no system role here")
    assert category(malformed.reason or "") == "bad messages"


def test_bare_prompts_of_a_python_list() -> None:
    assert one("hi").token_ids.tolist() == [104, 105]
    assert one([4, 5], replace(IDS, mask_column=None)).token_ids.tolist() == [4, 5]
    assert category(one(5).reason or "") == "wrong type"
    assert category(one(None).reason or "") == "no prompt"


def test_pass_through_of_what_json_cannot_carry() -> None:
    row = {
        "text": "x",
        "when": dt.date(2026, 1, 2),
        "raw": b"\xff",
        "nan": float("nan"),
        "array": np.array([1, 2]),
        "deep": {"set": {1}},
    }
    assert json.loads(passed_columns(row, ["text"]) or "") == {
        "when": "2026-01-02",
        "raw": "b'\\xff'",
        "nan": "nan",
        "array": [1, 2],
        "deep": {"set": [1]},
    }
    assert passed_columns({"text": "x"}, ["text"]) is None
    assert passed_columns({"text": "x", "bad\ud800": "\ud800"}, ["text"]) == '{"bad\\ud800": "\\ud800"}'
