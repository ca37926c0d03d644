"""Folders may be named from where a run is started, wherever Ray's processes stand."""

from __future__ import annotations

from pathlib import Path

import pytest

import rayhs
from rayhs.config import parse_config, with_whole_paths
from tests.tokenizers_for_tests import save_tokenizer


@pytest.mark.ray
def test_a_run_on_a_ray_that_was_started_elsewhere(
    local_ray: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tokenizer(tmp_path / "tokenizer")
    (tmp_path / "prompts").mkdir()
    (tmp_path / "prompts" / "a.jsonl").write_text('{"text": "hello world"}\n{"text": "and again"}\n')
    (tmp_path / "staging").mkdir()
    monkeypatch.chdir(tmp_path)
    result = rayhs.extract(
        model="fake/4x8",
        tokenizer="tokenizer",
        prompts={"path": "prompts/*.jsonl", "text": "text"},
        output="out",
        layers=[2],
        staging={"path": "staging", "max_bytes": 2**22},
        shards={"target_bytes": 2**16},
    )
    assert (result.exit_code, result.summary.ok) == (0, 2)
    assert rayhs.open("out").info.model == "fake/4x8" and not list((tmp_path / "staging").iterdir())


def test_whole_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    settings = {"prompts": {"rows": [], "token_ids": "ids"}, "output": "out", "layers": [1]}
    placed = with_whole_paths(parse_config({"model": "model", "tokenizer": "org/name", **settings}, "test"))
    assert (placed.model, placed.tokenizer) == (str(tmp_path / "model"), "org/name")
    placed = with_whole_paths(parse_config({"model": "fake/4x8", **settings}, "test"))
    assert (placed.model, placed.tokenizer) == ("fake/4x8", None)
