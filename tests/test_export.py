"""What holds of every export: resumable, whole, refused where it doesn't fit, and the command line around it."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import rayhs
from rayhs.cli import app
from rayhs.dataset import Dataset
from rayhs.errors import EXIT_FAILED, EXIT_OK, EXIT_USAGE, ConfigError, IdentityMismatch, RayhsError
from rayhs.export import EXPORTERS, ExportReport, export_dataset
from rayhs.export.target import MANIFEST
from rayhs.layout import ShardId
from rayhs.reading.cutting import cut
from tests.builders import HIDDEN, Builder
from tests.exports import CONTEXT, OPTIONS, states_of

each = pytest.mark.parametrize("to", OPTIONS)


@pytest.fixture
def built(tmp_path: Path) -> Builder:
    return Builder(tmp_path / "data").write()


def export(built: Builder, to: str, folder: Path | str, **options: Any) -> ExportReport:
    return export_dataset(rayhs.open(str(built.folder)), to, str(folder), options={**OPTIONS[to], **options})


def files(folder: Path) -> dict[str, Path]:
    found = {str(path.relative_to(folder)): path for path in sorted(folder.rglob("*")) if path.is_file()}
    return {name: path for name, path in found.items() if name != MANIFEST}


def contents(folder: Path) -> dict[str, bytes]:
    return {name: path.read_bytes() for name, path in files(folder).items()}


@each
def test_the_manifest_says_what_the_export_is(built: Builder, tmp_path: Path, to: str) -> None:
    """Two of the dataset's thirteen samples have no states."""
    report = export(built, to, tmp_path / "out")
    manifest = json.loads((tmp_path / "out" / MANIFEST).read_text())
    assert (report.samples, report.skipped) == (11, 2)
    assert manifest["complete"] and manifest["format"] == to and manifest["samples"] == 11
    assert manifest["source_uri"] == str(built.folder) and manifest["model"] == "tests/random"
    there = files(tmp_path / "out")
    assert report.files == manifest["files"] == len(there) == report.written
    assert report.nbytes == manifest["bytes"] == sum(path.stat().st_size for path in there.values())
    assert {key: manifest[key] for key in report.notes} == json.loads(json.dumps(dict(report.notes)))


@each
def test_the_same_dataset_gives_the_same_bytes_anywhere(built: Builder, tmp_path: Path, to: str) -> None:
    for name in ("one", "two"):
        export(built, to, tmp_path / name)
    assert contents(tmp_path / "one") == contents(tmp_path / "two")


def interrupt(monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    """Reading ends with an error behind so many samples."""
    right, left = Dataset.read, iter(range(after))

    def read(self: Dataset, *args: Any) -> Any:
        if next(left, None) is None:
            raise RayhsError("the network is gone")
        return right(self, *args)

    monkeypatch.setattr(Dataset, "read", read)


@each
def test_an_interrupted_export_goes_on(
    built: Builder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, to: str
) -> None:
    export(built, to, tmp_path / "whole")
    with monkeypatch.context() as patch, pytest.raises(RayhsError, match="the network is gone"):
        interrupt(patch, 7)
        export(built, to, tmp_path / "out")
    assert not json.loads((tmp_path / "out" / MANIFEST).read_text())["complete"]
    begun = {path: path.stat().st_mtime_ns for name, path in files(tmp_path / "out").items() if is_of_samples(name)}
    assert 0 < len(begun) < sum(map(is_of_samples, files(tmp_path / "whole")))
    export(built, to, tmp_path / "out")
    assert {path: path.stat().st_mtime_ns for path in begun} == begun
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def is_of_samples(name: str) -> bool:
    """Rather than beside them; the table of speculators has no states."""
    return name.endswith((".safetensors", ".tar")) or (name.endswith(".arrow") and "-of-00001" not in name)


@each
def test_a_complete_export_is_not_read_again(
    built: Builder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, to: str
) -> None:
    export(built, to, tmp_path / "out")
    before = contents(tmp_path / "out")
    interrupt(monkeypatch, 0)
    export(built, to, tmp_path / "out")
    assert contents(tmp_path / "out") == before


def test_another_export_into_the_same_place_is_refused(built: Builder, tmp_path: Path) -> None:
    out = tmp_path / "out"
    export(built, "huggingface", out)
    before = contents(out)
    with pytest.raises(IdentityMismatch, match="holds an export with format huggingface, this one has webdataset"):
        export(built, "webdataset", out)
    with pytest.raises(IdentityMismatch, match=r"options .*'dtype': None.*, this one has .*'dtype': 'float16'"):
        export(built, "huggingface", out, dtype="float16")
    built.model = "tests/other"
    with pytest.raises(IdentityMismatch, match="model tests/random, this one has tests/other"):
        export(built.write(), "huggingface", out)
    assert contents(out) == before


def test_another_dataset_is_another_export(tmp_path: Path) -> None:
    """Also one of the same prompts, model and stored dtype: its files would lie beside those of the first."""
    made: dict[str, Any] = {"shard_format": "safetensors", "dtype": "float8_e4m3fn"}
    first = rayhs.open(str(Builder(tmp_path / "first", **made).write().folder))
    export_dataset(first, "vllm", str(tmp_path / "out"))
    others = {"engine_dtype": {"engine_dtype": "float32"}, "include_generated": {"include_generated": 2}}
    for name, change in others.items():
        other = rayhs.open(str(Builder(tmp_path / name, **made, **change).write().folder))
        with pytest.raises(IdentityMismatch, match=f"holds an export with {name}"):
            export_dataset(other, "vllm", str(tmp_path / "out"))
    fewer = Builder(tmp_path / "fewer", **made)
    row = fewer.good()[0]
    row.status, row.reason = "failed", "not finite: layer 2"
    later = rayhs.open(str(tmp_path / "first"))
    later.info = later.info.model_copy(update={"created": "2026-01-02T00:00:00Z"})
    for other, what in ((rayhs.open(str(fewer.write().folder)), "samples"), (later, "dataset_created")):
        with pytest.raises(IdentityMismatch, match=f"holds an export with {what}"):
            export_dataset(other, "vllm", str(tmp_path / "out"))


def test_a_place_inside_the_dataset_is_refused(built: Builder, tmp_path: Path) -> None:
    before = contents(built.folder)
    link = tmp_path / "link"
    link.symlink_to(built.folder)
    inside = built.folder / "export"
    for place in (built.folder, inside, built.folder / "shards" / ".." / "export", link / "export", f"file://{inside}"):
        for source in (built.folder, link):
            with pytest.raises(ConfigError, match="which is exported; give a place outside of it"):
                export_dataset(rayhs.open(str(source)), "vllm", str(place))
    assert contents(built.folder) == before


def test_a_folder_of_other_files_is_refused(built: Builder, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("years of work")
    with pytest.raises(ConfigError, match="there are files, and not of an export; give an empty folder"):
        export(built, "vllm", tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize(
    ("to", "options", "message"),
    [
        (
            "sae-lens",
            {"contextsize": 8},
            "export to sae-lens: unknown option 'contextsize'; did you mean 'context_size'?",
        ),
        ("vllm", {"layers": [2]}, "unknown option 'layers'; known are: none"),
        ("sae-lens", {"layer": 2}, r"export to sae-lens: context_size is needed \(--set context_size=...\)"),
        ("sae-lens", {"context_size": 8}, r"layer: a folder has one; choose among \[0, 2, 4\]"),
        ("sae-lens", {"context_size": 8, "layer": 3}, "layer 3 is not stored"),
        ("sae-lens", {"context_size": 0, "layer": 2}, "context_size: Input should be greater than 0"),
        ("sae-lens", {"context_size": 99, "layer": 2}, "context_size: 99 tokens fill no row; the longest sample has 8"),
        ("huggingface", {"layers": [3]}, "layer 3 is not stored; the dataset has layers"),
        ("huggingface", {"dtype": "bfloat16"}, "dtype: Input should be 'float32' or 'float16'"),
        ("huggingface", {"file_bytes": "much"}, "file_bytes"),
        ("webdataset", {"shard_bytes": 0}, "shard_bytes: Input should be greater than 0"),
        ("sealens", {}, "no exporter 'sealens'; there are .*sae-lens"),
    ],
)
def test_options_that_are_refused(
    built: Builder, tmp_path: Path, to: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        export_dataset(rayhs.open(str(built.folder)), to, str(tmp_path / "out"), options=options)
    assert "\n" not in str(error.value)


def test_an_unfinished_dataset_is_refused(tmp_path: Path) -> None:
    built = Builder(tmp_path / "data", finished=False, uncommitted=frozenset({ShardId(0, 1)})).write()
    with pytest.raises(ConfigError, match="not finished; run rayhs extract .or import. again, then export"):
        export_dataset(rayhs.open(str(built.folder), partial=True), "vllm", str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_a_dataset_without_states_is_refused(tmp_path: Path) -> None:
    built = Builder(tmp_path / "data", groups=((1,),))
    built.rows[0][0][0].status, built.rows[0][0][0].reason = "failed", "states are not finite"
    (built.folder / "shards").mkdir(parents=True)
    with pytest.raises(ConfigError, match="no sample has states; nothing to export"):
        export(built.write(), "vllm", tmp_path / "out")


def test_states_beyond_float16_are_not_made_infinite(built: Builder, tmp_path: Path) -> None:
    built.rows[0][0][1].states[2][0, 0] = 1e5
    with pytest.raises(ConfigError, match=r"sample row-1, layer 2: a state of 100000 is beyond float16"):
        export(built.write(), "huggingface", tmp_path / "out", dtype="float16")


def test_a_folder_of_datasets_on_s3(built: Builder, moto_uri: str, tmp_path: Path) -> None:
    from rayhs.store import open_store

    export(built, "huggingface", tmp_path / "local")
    report = export(built, "huggingface", moto_uri)
    store = open_store(moto_uri)
    assert report.uri == moto_uri and {name for name, _ in store.list("")} == {MANIFEST, *files(tmp_path / "local")}
    assert {name: store.get(name) for name in files(tmp_path / "local")} == contents(tmp_path / "local")
    assert export(built, "huggingface", moto_uri).written == 0


def test_files_of_bounded_size(tmp_path: Path) -> None:
    built = Builder(tmp_path / "data", groups=((20, 20, 20),), lengths=(50, 300), hidden=64).write()
    for to, option in (("huggingface", "file_bytes"), ("webdataset", "shard_bytes"), ("sae-lens", "file_bytes")):
        limit = 600_000
        export(built, to, tmp_path / to, **{option: limit})
        sizes = [
            path.stat().st_size for name, path in files(tmp_path / to).items() if name.endswith((".arrow", ".tar"))
        ]
        assert len(sizes) > 3 and max(sizes) <= limit + 4096 and min(sizes[:-1]) > limit / 3, (to, sizes)


def test_cutting() -> None:
    sizes = np.array([3, 3, 3, 9, 1, 1])
    assert [sizes[some].tolist() for some in cut(sizes, 7)] == [[3, 3], [3], [9], [1, 1]]
    assert [sizes[some].tolist() for some in cut(sizes, 1)] == [[3], [3], [3], [9], [1], [1]]
    assert cut(sizes, 10**9) == [slice(0, 6)] and cut(sizes[:0], 7) == []


def test_rows_of_sae_lens_tell_what_was_dropped(built: Builder, tmp_path: Path) -> None:
    lengths = [len(row.token_ids) for row in built.good()]
    packed, cut_each = (export(built, "sae-lens", tmp_path / str(pack), pack=pack).notes for pack in (True, False))
    assert (
        packed["tokens"] + packed["tokens_dropped"] == cut_each["tokens"] + cut_each["tokens_dropped"] == sum(lengths)
    )
    assert packed["tokens_dropped"] == sum(lengths) % CONTEXT
    assert cut_each["tokens_dropped"] == sum(length % CONTEXT for length in lengths)
    assert packed["hook_name"] == "blocks.3.hook_resid_post" and packed["layer_id"] == 4 and packed["d_in"] == HIDDEN


def test_the_embeddings_are_a_hook_before_the_first_layer(built: Builder, tmp_path: Path) -> None:
    assert export(built, "sae-lens", tmp_path / "out", layer=0).notes["hook_name"] == "blocks.0.hook_resid_pre"


def test_chosen_layers(built: Builder, tmp_path: Path) -> None:
    from datasets import load_from_disk

    export(built, "huggingface", tmp_path / "hf", layers=[0, 4])
    rows = load_from_disk(str(tmp_path / "hf"))
    assert [name for name in rows.column_names if "states" in name] == ["hidden_states.0", "hidden_states.4"]
    assert all(np.array_equal(rows[i]["hidden_states.4"], states_of(row, 4)) for i, row in enumerate(built.good()))
    export(built, "webdataset", tmp_path / "wds", layers=[2])
    with tarfile.open(tmp_path / "wds" / "shard-000000.tar") as tar:
        first = tar.getmembers()[:4]
    assert [m.name for m in first] == [
        f"000000000.{s}" for s in ("json", "token_ids.pth", "loss_mask.pth", "hidden_states.2.pth")
    ]
    assert {(m.mtime, m.uid, m.uname) for m in first} == {(0, 0, "")}


@each
def test_progress_is_told(built: Builder, tmp_path: Path, to: str) -> None:
    told: list[tuple[int, int]] = []
    dataset = rayhs.open(str(built.folder))
    export_dataset(dataset, to, str(tmp_path / "out"), options=OPTIONS[to], on_progress=lambda *now: told.append(now))
    assert told == sorted(told) and told[0] == (0, 11) and told[-1] == (11, 11)


Cli = Callable[..., str]


@pytest.fixture
def cli() -> Iterator[Cli]:
    def run(*arguments: str | Path, code: int = EXIT_OK) -> str:
        result = CliRunner().invoke(app, ["export", *map(str, arguments)], prog_name="rayhs")
        assert result.exit_code == code, result.output + repr(result.exception)
        return result.stdout if code == EXIT_OK else result.stderr

    yield run


def test_the_command_lists_exporters(cli: Cli) -> None:
    text = cli("--list")
    assert not any(line.endswith(" ") for line in text.splitlines())
    assert all(name in text for name in EXPORTERS)
    found = json.loads(cli("--list", "--json"))
    assert list(found) == list(EXPORTERS)
    assert all(one["consumer"] and one["needs"] and one["writes"] and one["converts"] for one in found.values())
    assert list(found["sae-lens"]["options"]) == ["layer", "context_size", "pack", "only_loss", "file_bytes"]
    assert found["sae-lens"]["options"]["context_size"] == "..." and found["sae-lens"]["options"]["pack"] is True
    assert "webdataset" not in cli("--list", "--to", "vllm")


def test_the_command_exports(built: Builder, tmp_path: Path, cli: Cli) -> None:
    out = tmp_path / "out"
    command = (built.folder, out, "--to", "sae-lens", "--set", "layer=2", "--set", "context_size=4")
    report = json.loads(cli(*command, "--json"))
    assert (
        report["samples"] == 11
        and report["skipped"] == 2
        and report["notes"]["hook_name"] == "blocks.1.hook_resid_post"
    )
    assert "11, 2 without states left out" in cli(*command)
    (line,) = cli(*command, "--set", "pack=false", code=EXIT_USAGE).splitlines()
    assert "holds an export with options" in line and "'pack': False" in line
    (line,) = cli(built.folder, out, "--to", "sae-lense", code=EXIT_USAGE).splitlines()
    assert "no exporter 'sae-lense'" in line
    assert "write it as key=value" in cli(built.folder, out, "--to", "vllm", "--set", "layer", code=EXIT_USAGE)
    assert "no dataset here" in cli(tmp_path / "absent", out, "--to", "vllm", code=EXIT_FAILED)
