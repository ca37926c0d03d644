"""Exports to SpecForge, Model-Optimizer, DeepSpec and NeMo Automodel, read back as those read them."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rayhs.dataset import Dataset
from rayhs.errors import ConfigError, IdentityMismatch, RayhsError
from rayhs.export import EXPORTERS, ExportReport, about, export_dataset
from rayhs.export.model_optimizer import file_name
from rayhs.export.specforge import file_name as specforge_name
from rayhs.export.target import MANIFEST
from rayhs.export.target_model import TargetModel
from rayhs.store import open_store
from tests.builders import Builder
from tests.real_datasets import RealDataset, save_model, write_real_dataset

pytest.importorskip("torch")

from tests.consumers import offline_readers as readers
from tests.export_checks import LAYERS, OPTIONS, check


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model("llama", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def real(model: Path, tmp_path_factory: pytest.TempPathFactory) -> RealDataset:
    return write_real_dataset(tmp_path_factory.mktemp("real"), model)


def export(real: RealDataset, folder: Path, name: str, **more: Any) -> ExportReport:
    to = max((one for one in EXPORTERS if name.startswith(one)), key=len)
    return export_dataset(real.open(), to, str(folder), options={**OPTIONS[name], **more})


@pytest.mark.parametrize("name", OPTIONS)
def test_what_the_consumer_reads_is_the_dataset(real: RealDataset, tmp_path: Path, name: str) -> None:
    report = export(real, tmp_path, name)
    check(real, tmp_path, name)
    assert report.samples == len(real.rows) and report.skipped == 2
    before = {path: path.stat().st_mtime_ns for path in files(tmp_path) if path.name != "manifest.json"}
    export(real, tmp_path, name)
    assert {path: path.stat().st_mtime_ns for path in before} == before


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn"])
@pytest.mark.parametrize("name", OPTIONS)
def test_other_dtypes(model: Path, tmp_path: Path, dtype: str, name: str) -> None:
    real = write_real_dataset(tmp_path / "data", model, dtype, layers=(*LAYERS, 6), shard_format="parquet")
    export(real, tmp_path / "out", name)
    check(real, tmp_path / "out", name)


@pytest.mark.parametrize("name", ["specforge", "model-optimizer", "deepspec", "automodel"])
def test_generated_tokens(model: Path, tmp_path: Path, name: str) -> None:
    real = write_real_dataset(tmp_path / "data", model, generated=True)
    assert all(row.loss_mask[-2:].all() for row in real.rows)
    export(real, tmp_path / "out", name)
    check(real, tmp_path / "out", name)


def test_a_model_of_another_family_and_default_layers(tmp_path: Path) -> None:
    model = save_model("qwen3", tmp_path / "model")
    real = write_real_dataset(tmp_path / "data", model, layers=(*LAYERS, 6))
    for name in ("specforge", "automodel"):
        export(real, tmp_path / name, name, layers=None)
        check(real, tmp_path / name, name)


def files(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != MANIFEST]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in files(folder)}


def failing(module: str, monkeypatch: pytest.MonkeyPatch, calls: int) -> None:
    """Make the conversion of one sample fail, after others went through."""
    target = f"rayhs.export.{module}.concatenated"
    right, count = pytest.importorskip(f"rayhs.export.{module}").concatenated, itertools.count()

    def wrong(*args: Any) -> Any:
        if next(count) == calls:
            raise RayhsError("the disk is full")
        return right(*args)

    monkeypatch.setattr(target, wrong)


@pytest.mark.parametrize("name", ["specforge", "model-optimizer", "deepspec", "automodel"])
def test_an_interrupted_export_goes_on(
    real: RealDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    export(real, tmp_path / "whole", name)
    with monkeypatch.context() as patch, pytest.raises(RayhsError, match="the disk is full"):
        failing(name.replace("-", "_"), patch, 7)
        export(real, tmp_path / "out", name)
    there = {path: path.stat().st_mtime_ns for path in files(tmp_path / "out")}
    assert 1 < len(there) < len(files(tmp_path / "whole"))
    assert not json.loads((tmp_path / "out" / MANIFEST).read_text())["complete"]
    with monkeypatch.context() as patch:
        read: list[int] = []
        right = Dataset.read
        patch.setattr(Dataset, "read", lambda self, position, *more: read.append(position) or right(self, position))
        report = export(real, tmp_path / "out", name)
    assert {path: path.stat().st_mtime_ns for path in there} == there
    assert 0 < len(read) < len(real.rows) and report.samples == len(real.rows)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def rolled(samples: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
    def wrong(self: Any, *args: Any, **kwargs: Any) -> Iterator[Any]:
        for sample in samples(self, *args, **kwargs):
            yield replace(sample, loss_mask=np.roll(sample.loss_mask, 1))

    return wrong


def up(find: Callable[..., tuple[int, ...]]) -> Callable[..., tuple[int, ...]]:
    return lambda *args: tuple(layer + (layer < LAYERS[-1]) for layer in find(*args))


def twice(norm: Callable[..., Any]) -> Callable[..., Any]:
    return lambda model, states, *dtype: norm(model, norm(model, states), *dtype)


def absolute(maps: Callable[..., Any]) -> Callable[..., Any]:
    def wrong(*args: Any) -> Any:
        offsets, held = maps(*args)
        return offsets + np.arange(len(offsets)), held

    return wrong


NO_NORM = lambda _: lambda model, states, dtype=None: states.astype(dtype or states.dtype)  # noqa: E731
FAULTS: list[tuple[str, str, Callable[..., Any]]] = [
    *((name, f"rayhs.export.{name}.post_norm", twice) for name in ("specforge", "model_optimizer", "deepspec")),
    *((name, f"rayhs.export.{name}.post_norm", NO_NORM) for name in ("specforge", "model_optimizer", "deepspec")),
    ("automodel", "rayhs.export.target_model.TargetModel.normed", twice),
    ("automodel", "rayhs.export.target_model.TargetModel.normed", lambda _: lambda self, s: s.astype(np.float32)),
    *((name, f"rayhs.export.{name}.eagle3_layers", up) for name in ("specforge", "automodel")),
    *((name, f"rayhs.export.{name}.auxiliary_layers", up) for name in ("model_optimizer", "deepspec")),
    *(
        (name, f"rayhs.export.{name}.zero_based", lambda _: list)
        for name in ("specforge", "model_optimizer", "deepspec", "automodel")
    ),
    *(
        (name, "rayhs.dataset.Dataset.samples", rolled)
        for name in ("specforge", "model_optimizer", "deepspec", "automodel")
    ),
    ("automodel", "rayhs.export.automodel.next_tokens", lambda _: lambda values: values),
    ("specforge", "rayhs.export.specforge.draft_maps", absolute),
    ("automodel-draft", "rayhs.export.automodel.draft_maps", absolute),
]


@pytest.mark.parametrize(("name", "where", "wrong"), FAULTS, ids=[f"{n}-{w}-{i}" for i, (n, w, _) in enumerate(FAULTS)])
def test_a_wrong_conversion_is_noticed(
    real: RealDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, where: str, wrong: Callable[..., Any]
) -> None:
    name = name.replace("_", "-")
    owner, _, attribute = where.rpartition(".")
    right = getattr(pytest.importorskip(owner), attribute) if owner.islower() else getattr(owner_of(owner), attribute)
    monkeypatch.setattr(where, wrong(right))
    export(real, tmp_path, name)
    with pytest.raises((AssertionError, IndexError)):
        check(real, tmp_path, name)


def owner_of(path: str) -> type:
    return {"Dataset": Dataset, "TargetModel": TargetModel}[path.rpartition(".")[2]]


@pytest.mark.parametrize(
    "sample_id",
    ["a/b", "a:b", "a=2Fb", "a%b", ".", "..", ".hidden", "x" * 300, "x" * 301, "å", "a b\n", "", "a_b-c.d", "=x"],
)
def test_any_id_makes_a_file_name(sample_id: str) -> None:
    name = file_name(sample_id)
    assert name.endswith(".pt") and not name.startswith(".") and len(name) <= 200
    assert all(c.isascii() and (c.isalnum() or c in "._-=") for c in name)
    others = ["a/b", "a=2Fb", "a=b", "x" * 300, "x" * 301, file_name("x" * 300)[:-3], "=x", "=3Dx"]
    assert len({name, *map(file_name, set(others) - {sample_id})}) == len({sample_id, *others})


ODD_IDS = ["a/b", "a:b", "x" * 300, "..", "å"]


@pytest.fixture
def odd(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RealDataset:
    names = ODD_IDS + [f"r{i}" for i in range(99)]
    monkeypatch.setattr("tests.builders.Row.sample_id", property(lambda row: names[row.index]))
    return write_real_dataset(tmp_path / "data", model)


def test_odd_ids_come_back(odd: RealDataset, tmp_path: Path) -> None:
    export(odd, tmp_path / "out", "model-optimizer")
    check(odd, tmp_path / "out", "model-optimizer")


@pytest.mark.s3
@pytest.mark.parametrize("name", ["specforge", "model-optimizer", "deepspec", "automodel"])
def test_a_bucket_gets_the_same_files(odd: RealDataset, tmp_path: Path, moto_uri: str, name: str) -> None:
    export(odd, tmp_path / "out", name)
    to = max((one for one in EXPORTERS if name.startswith(one)), key=len)
    for _ in range(2):
        export_dataset(odd.open(), to, moto_uri, options=OPTIONS[name])
        store = open_store(moto_uri)
        found = {path: store.get(path) for path, _ in store.list("") if path != MANIFEST}
        assert found == contents(tmp_path / "out")


def test_file_groups_of_specforge() -> None:
    assert [specforge_name(row) for row in (0, 1999, 2000)] == [
        "rows_0-2000/data_0.ckpt",
        "rows_0-2000/data_1999.ckpt",
        "rows_2000-4000/data_2000.ckpt",
    ]


@pytest.mark.parametrize(
    ("to", "options", "message"),
    [
        ("specforge", {}, "takes 3 layers below the last"),
        ("automodel", {"layers": [1, 2]}, "takes 3 layers below the last"),
        ("specforge", {"layers": LAYERS, "draft_vocab_size": 10**6}, "is over the model's 512"),
        ("speculators", {"draft_vocab_size": 10**6}, "is over the model's 512"),
        ("automodel", {"layers": LAYERS, "draft_vocab_size": 10**6}, "is over the model's 512"),
        ("automodel", {"layers": [1, 2, 9]}, "9 is not one of"),
        ("deepspec", {"layers": [6]}, "6 is not one of"),
        ("deepspec", {"layers": [3, 1]}, "exports have them ascending, each once; give \\[1, 3\\]"),
        ("deepspec", {"shard_bytes": 0}, "shard_bytes: Input should be greater than 0"),
        ("specforge", {"method": "eagle"}, "method"),
        ("automodel", {"topk": 5}, "did you mean 'top_k'"),
    ],
)
def test_refusals(real: RealDataset, tmp_path: Path, to: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        export_dataset(real.open(), to, str(tmp_path / "out"), options=options)
    # What was refused takes no folder.
    export_dataset(real.open(), "vllm", str(tmp_path / "out"))
    with pytest.raises(IdentityMismatch):
        export_dataset(real.open(), "deepspec", str(tmp_path / "out"))


def test_the_embeddings_are_no_layer_to_automodel(model: Path, tmp_path: Path) -> None:
    real = write_real_dataset(tmp_path / "data", model, layers=(0, 1, 2, 6))
    with pytest.raises(ConfigError, match="the embeddings, is no layer"):
        export_dataset(real.open(), "automodel", str(tmp_path / "out"))
    export_dataset(real.open(), "deepspec", str(tmp_path / "deepspec"))
    assert readers.DeepSpecCache(tmp_path / "deepspec").manifest["target_layer_ids"] == [-1, 0, 1]


def test_automodel_says_before_how_much_room_it_takes(
    real: RealDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"layers": LAYERS, "seq_length": 64}
    report = export_dataset(real.open(), "automodel", str(tmp_path / "whole"), options=options)
    shards = sum(path.stat().st_size for path in (tmp_path / "whole").glob("shard-*"))
    assert shards < report.nbytes
    for free, fits in ((shards, True), (shards - 2000, False)):  # headers of its files aside
        monkeypatch.setattr(shutil, "disk_usage", lambda path, free=free: SimpleNamespace(free=free))
        if fits:
            export_dataset(real.open(), "automodel", str(tmp_path / "out"), options=options)
        else:
            with pytest.raises(ConfigError, match=r"takes \d MiB more.*top_k"):
                export_dataset(real.open(), "automodel", str(tmp_path / "small"), options=options)
            assert [path.name for path in (tmp_path / "small").iterdir()] == [MANIFEST]
    # Of one that goes on, only what is missing.
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=0))
    assert export_dataset(real.open(), "automodel", str(tmp_path / "out"), options=options).written == 0


def test_layer_n_and_weights_are_needed_only_where_used(tmp_path: Path) -> None:
    built = Builder(tmp_path / "data", layers=(0, 2)).write()
    dataset = RealDataset(built, tmp_path, None).open()  # type: ignore[arg-type]
    for to, options in (("deepspec", {}), ("model-optimizer", {"norm": "prenorm"}), ("specforge", {})):
        with pytest.raises(ConfigError, match=r"needs layer 4.*extract again"):
            export_dataset(dataset, to, str(tmp_path / to), options=options)
    report = export_dataset(dataset, "specforge", str(tmp_path / "dflash"), options={"method": "dflash"})
    assert report.samples == len(built.good())


def test_a_model_that_has_moved(model: Path, tmp_path: Path) -> None:
    old = tmp_path / "old"
    shutil.copytree(model, old)
    real = write_real_dataset(tmp_path / "data", old)
    old.rename(tmp_path / "new")
    with pytest.raises(ConfigError, match="no such folder; say where it is now"):
        export(real, tmp_path / "out", "deepspec")
    export(real, tmp_path / "out", "deepspec", model=str(tmp_path / "new"))
    check(replace(real, model=tmp_path / "new"), tmp_path / "out", "deepspec")


@pytest.mark.parametrize("name", EXPORTERS)
def test_what_is_told_of_each(name: str) -> None:
    told = about(name)
    assert all((told.consumer, told.needs, told.writes, told.converts))
    assert list(EXPORTERS) == sorted(EXPORTERS)
