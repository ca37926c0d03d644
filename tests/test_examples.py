"""What people copy runs: the examples of public docstrings, and the code of the README."""

from __future__ import annotations

import doctest
import inspect
import re
import shlex
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
import yaml

import rayhs
from rayhs.cli import app
from rayhs.config import parse_config
from rayhs.export import export_dataset
from rayhs.importing import import_files
from rayhs.reading.slices import Slice
from rayhs.views.stream import Stream
from tests.builders import Builder
from tests.dumps import prompts_of, write_vllm

README = Path(__file__).parents[1] / "README.md"
LAYERS, GROUPS = (2, 15, 27), ((8, 8), (8,))
FUNCTIONS = [rayhs.open, rayhs.extract, rayhs.pad_collate, export_dataset, import_files, rayhs.RayhsError]
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def classes() -> list[type]:
    from rayhs.views.torch import TorchStream, TorchView

    return [rayhs.Dataset, rayhs.Sample, Slice, Stream, TorchView, TorchStream]


def members(kind: type) -> dict[str, Any]:
    """What is public of a class and its own bases."""
    own = [base for base in kind.__mro__ if base.__module__.startswith("rayhs")]
    found = {name: value for base in reversed(own) for name, value in vars(base).items()}
    kinds = (property, cached_property)
    return {n: v for n, v in found.items() if n[0] != "_" and (inspect.isfunction(v) or isinstance(v, kinds))}


def examples() -> dict[str, doctest.DocTest]:
    parser, found = doctest.DocTestParser(), {}
    documented = {f"{kind.__name__}.{name}": value for kind in classes() for name, value in members(kind).items()}
    documented |= {f"{kind.__name__}.[]": kind.__getitem__ for kind in classes() if hasattr(kind, "__getitem__")}
    documented |= {thing.__name__: thing for thing in (*classes(), *FUNCTIONS)}
    for name, thing in documented.items():
        test = parser.get_doctest(inspect.getdoc(thing) or "", {}, name, None, 0)
        if test.examples:
            found[name] = test
    return found


EXAMPLES = examples()
OF_RAY = {"Dataset.ray", "extract"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("examples")
    for name, options in {
        "states": {"shard_format": "parquet"},
        "states-fp8": {"dtype": "float8_e4m3fn"},
    }.items():
        Builder(folder / name, layers=LAYERS, groups=GROUPS, **options).write()  # type: ignore[arg-type]
    write_vllm(folder / "dump", prompts_of(3))
    return folder


@pytest.fixture
def names(folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What an example may use without making it, in a folder that has datasets and a dump."""
    import duckdb
    import torch

    monkeypatch.chdir(folder)
    ds = rayhs.open("states")
    libraries = {"rayhs": rayhs, "np": np, "torch": torch, "duckdb": duckdb}
    return {**libraries, "ds": ds, "export_dataset": export_dataset, "import_files": import_files}


@pytest.mark.parametrize("name", sorted(set(EXAMPLES) - OF_RAY))
def test_the_example_of(name: str, names: dict[str, Any]) -> None:
    told: list[str] = []
    test = EXAMPLES[name]
    test.globs = names
    doctest.DocTestRunner(optionflags=FLAGS).run(test, out=told.append, clear_globs=False)
    assert not told, "".join(told)


@pytest.mark.ray
@pytest.mark.usefixtures("local_ray")
@pytest.mark.parametrize("name", sorted(OF_RAY))
def test_the_example_with_ray_of(name: str, names: dict[str, Any]) -> None:
    test_the_example_of(name, names)


def test_all_that_is_public_has_an_example() -> None:
    assert {thing.__name__ for thing in (*classes(), *FUNCTIONS)} <= set(EXAMPLES)
    for kind in classes():
        shown = "".join(example.source for example in EXAMPLES[kind.__name__].examples)
        missing = [n for n in members(kind) if f".{n}" not in shown and f"{kind.__name__}.{n}" not in EXAMPLES]
        assert not missing, f"{kind.__name__}: no example of {', '.join(missing)}"
    assert set(rayhs.__all__) <= {"__version__", *(n for n in EXAMPLES), "open"}


def blocks(language: str) -> list[str]:
    fences = re.findall(r"^```(\w*)\n(.*?)^```$", README.read_text(), re.MULTILINE | re.DOTALL)
    return [code for own, code in fences if own == language]


def test_python_of_the_readme_without_ray(folder: Path, names: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    reading = blocks("python")[0]
    monkeypatch.setattr(rayhs, "open", lambda uri: names["ds"], raising=False)
    exec(reading, names | {"rank": 0, "world": 1})
    batch = next(iter(names["ds"].stream().torch()))
    assert batch["hidden_states"].shape[1:] == (len(LAYERS), 8)


@pytest.mark.ray
@pytest.mark.usefixtures("local_ray")
def test_python_of_the_readme_with_ray(names: dict[str, Any]) -> None:
    exec(blocks("python")[1], names)


def test_a_shard_without_rayhs(folder: Path, names: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder / "states-fp8")
    read = names | {}
    exec(blocks("python")[2].replace("<attempt>", "0123456789abcdef"), read)
    first = rayhs.open(".")[0].hidden_states[15]
    assert np.allclose(read["states"][: len(first)], first.astype(np.float32), rtol=2**-7)
    assert len(blocks("python")) == 3


def test_yaml_of_the_readme() -> None:
    whole, *parts = map(yaml.safe_load, blocks("yaml"))
    assert parse_config(whole).output == "s3://bucket/smollm2"
    assert parts
    for part in parts:
        parse_config(whole | part)


def command_lines() -> list[list[str]]:
    """Commands of the README, each form of those that stand for several; in its text, what is more than a verb."""
    found = [found for block in blocks("") for found in re.findall(r"^(?:ray .* -- )?rayhs ([a-z].*)$", block, re.M)]
    text = re.sub(r"^```.*?^```$", "", README.read_text(), flags=re.MULTILINE | re.DOTALL)
    found += [" ".join(code.split()) for code in re.findall(r"`rayhs\s+([a-z][^`]*\s[^`]*)`", text)]
    split = [[word.strip("[]") for word in shlex.split(line, comments=True)] for line in found]
    return [[verb, *words] for verbs, *words in split for verb in verbs.split("|")]


@pytest.mark.parametrize("words", command_lines(), ids=" ".join)
def test_commands_of_the_readme_are_valid(words: list[str]) -> None:
    root: Any = typer.main.get_command(app)
    context = root.make_context("rayhs", [words[0]], resilient_parsing=True)
    _, command, _ = root.resolve_command(context, [words[0]])
    assert command is not None
    command.make_context(words[0], words[1:], parent=context)
