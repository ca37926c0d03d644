from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayhs.config import RunConfig, load_config, parse_config
from rayhs.errors import ConfigError
from rayhs.layers import resolve_layers

GOOD = {"model": "m", "prompts": "p.jsonl", "output": "o"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"Model": "x"}, "unknown key 'Model'; did you mean 'model'?"),
        ({"_x": 1}, "unknown key '_x'; known keys: model, "),
        ({".": 1}, "unknown key '.'; known keys"),
        ({"engine": {"Dtype": "float32"}}, "unknown key 'engine.Dtype'; did you mean 'dtype'?"),
        ({"engine": {"tensor_paralel_size": 2}}, "did you mean 'tensor_parallel_size'?"),
        ({"prompts": {"path": "p", "colunm": "x"}}, "unknown key 'prompts.colunm'; known keys: path"),
        ({"cluster": {"replicas": [3]}}, "config: cluster.replicas: "),
        ({"cluster": {"replicas": "two"}}, "config: cluster.replicas: "),
        ({"cluster": {"replicas": [3, 1]}}, "[3, 1] has its minimum over its maximum"),
        ({"layers": True}, "config: layers: "),
        ({"layers": [1.5]}, "config: layers: "),
        ({"shards": {"target_bytes": "lots"}}, "config: shards.target_bytes: "),
        ({"prompts": {"path": "p", "text": "a", "messages": "b"}}, "name one of text, messages and token_ids"),
        ({"model": "fake/0x1"}, "not fake/<layers>x<hidden>"),
    ],
)
def test_what_is_wrong_is_named_by_its_key(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_config({**GOOD, **change})
    text = str(error.value)
    assert message in text and "\n" not in text
    assert "constrained" not in text and "function-" not in text


@pytest.mark.parametrize("text", ["output: 2026-13-45", "a: [", "- 1", "\x00", "model: " + "[" * 3000])
def test_files_that_are_no_run_file(tmp_path: Path, text: str) -> None:
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"run\.yaml: "):
        load_config(tmp_path / "run.yaml")


@pytest.mark.parametrize("override", ["output=2026-13-45", "=3", "x", "a=[", "Output=3", ".=3"])
def test_overrides_that_are_none(tmp_path: Path, override: str) -> None:
    (tmp_path / "run.yaml").write_text("model: m\nprompts: p\noutput: o\n")
    with pytest.raises(ConfigError):
        load_config(tmp_path / "run.yaml", [override])


def test_overrides(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("model: m\nprompts: p\noutput: o\n")
    overrides = ["prompts.text=body", "cluster.replicas=[1, 8]", "shards.target_bytes=1MiB", "layers=[2, last]"]
    config: RunConfig = load_config(tmp_path / "run.yaml", overrides)
    assert (config.prompts.path, config.prompts.text) == ("p", "body")
    assert config.cluster.replica_range == (1, 8) and config.shards.target_bytes == 2**20
    assert config.layers == [2, "last"]


@given(st.recursive(st.none() | st.booleans() | st.floats() | st.text(), lambda c: st.dictionaries(st.text(), c)))
def test_any_mapping_is_a_config_or_one_line(value: Any) -> None:
    for data in ({**GOOD, "engine": value}, {**GOOD, "cluster": value, "x": value}):
        try:
            parse_config(data)
        except ConfigError as error:
            assert str(error)


@pytest.mark.parametrize(
    ("spec", "layers", "ids"),
    [
        ("eagle3", 30, (2, 15, 27)),
        (["eagle3", "last"], 30, (2, 15, 27, 30)),
        ("dflash", 36, (2, 10, 18, 26, 34)),
        ("all", 3, (0, 1, 2, 3)),
        ([5, 1, 5, -1], 8, (1, 5, 8)),
        (0, 8, (0,)),
    ],
)
def test_layers_are_sorted_and_unique(spec: Any, layers: int, ids: tuple[int, ...]) -> None:
    assert resolve_layers(spec, layers) == ids


@pytest.mark.parametrize(
    ("spec", "layers"), [([9], 8), ([-10], 8), ([], 8), ("eagle", 8), ("eagle3", 3), ("dflash", 8)]
)
def test_layers_a_model_has_not(spec: Any, layers: int) -> None:
    with pytest.raises(ConfigError, match="^layers: "):
        resolve_layers(spec, layers)
