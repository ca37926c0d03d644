"""Files of every format, cut into spans anywhere, give the same rows; what can't be read is one clear error."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayhs.config import PromptsConfig, StorageConfig
from rayhs.errors import InputError
from rayhs.prompts.inputs import InputFile, discover, fingerprint_files
from rayhs.prompts.readers import InputRow, _parquet_blocks, file_blocks, read_block, scan_file

STORAGE = StorageConfig()


def rows_of(path: object, step: int = 3, columns: tuple[str, ...] = (), **options: Any) -> list[InputRow]:
    files = discover(PromptsConfig(path=path, **options), STORAGE)  # type: ignore[arg-type]
    scans = [scan_file(file, STORAGE, step, columns) for file in files]
    blocks = file_blocks(files, scans, step)
    spans = [span for block in blocks for span in block.spans]
    assert [span.number for span in spans] == list(range(len(spans)))
    assert [span.index for span in spans] == [sum(s.rows for s in spans[:i]) for i in range(len(spans))]
    assert all(0 < span.rows <= step for span in spans)
    rows = []
    for block in blocks:
        found = list(read_block(block, STORAGE, ("ids",)))
        assert len(found) == sum(span.rows for span in block.spans)
        rows += found
    return rows


def values(rows: list[InputRow]) -> list[Any]:
    return [
        {k: v.tolist() if hasattr(v, "tolist") else v for k, v in row.value.items()} if row.value else row.reason
        for row in rows
    ]


TABLE = [{"id": f"é{i}", "ids": [i, i + 1] if i % 4 else None, "n": None if i % 3 else i} for i in range(23)]
LINES = "".join(json.dumps(row) + ("\r\n" if i % 5 else "\n\n  \n") for i, row in enumerate(TABLE))


@pytest.mark.parametrize("step", [1, 3, 8, 23, 100])
def test_jsonl_plain_and_gzipped(tmp_path: Path, step: int) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + LINES.encode().rstrip())
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(LINES.encode()[:200]) + gzip.compress(LINES.encode()[200:]))
    plain, packed = rows_of(str(tmp_path / "a.jsonl"), step), rows_of(str(tmp_path / "b.jsonl.gz"), step)
    assert values(plain) == values(packed) == TABLE
    assert [row.number for row in plain] == [row.number for row in packed] == list(range(23))


@pytest.mark.parametrize("step", [1, 3, 8, 100])
@pytest.mark.parametrize("group", [1, 5, 23])
def test_parquet(tmp_path: Path, step: int, group: int) -> None:
    pq.write_table(pa.Table.from_pylist(TABLE), tmp_path / "a.parquet", row_group_size=group)
    rows = rows_of(str(tmp_path / "a.parquet"), step, ("ids",))
    assert values(rows) == TABLE and [row.number for row in rows] == list(range(23))


@given(st.lists(st.integers(0, 40), min_size=1, max_size=12), st.integers(1, 30))
def test_parquet_blocks_cover_every_row_once(groups: list[int], step: int) -> None:
    position = 0
    for block in _parquet_blocks(groups, step):
        assert block.row == position and block.rows > 0 and block.row % step == 0
        position += block.rows
    assert position == sum(groups)


@pytest.mark.parametrize("shards", [1, 3])
def test_hugging_face_save_to_disk(tmp_path: Path, shards: int) -> None:
    datasets = pytest.importorskip("datasets")
    whole = datasets.Dataset.from_list(TABLE)
    whole.save_to_disk(tmp_path / "one", num_shards=shards)
    assert values(rows_of(str(tmp_path / "one"))) == TABLE
    shuffled = whole.select(range(22, -1, -1))
    shuffled.save_to_disk(tmp_path / "two")
    assert values(rows_of(str(tmp_path / "two"), format="huggingface")) == TABLE[::-1]
    datasets.DatasetDict(train=whole, test=whole).save_to_disk(tmp_path / "splits")
    with pytest.raises(InputError, match=r"splits train, test; name one: .*/splits/train"):
        rows_of(str(tmp_path / "splits"))


def test_fsspec_url_and_folder_of_files(tmp_path: Path) -> None:
    fsspec = pytest.importorskip("fsspec")
    memory = fsspec.filesystem("memory")
    for name in ("b.jsonl", "deep/a.jsonl", ".hidden.jsonl", "_SUCCESS", "README.md"):
        memory.pipe(f"/corpus/{name}", LINES.encode())
    pa_file = tmp_path / "x.arrow"
    assert values(rows_of("memory://corpus")) == TABLE * 2
    files = discover(PromptsConfig(path="memory://corpus"), STORAGE)
    assert [file.label for file in files] == ["b.jsonl", "deep/a.jsonl"]
    assert not pa_file.exists() and not files[0].local
    memory.pipe("/packed/a.jsonl.gz", gzip.compress(LINES.encode()))
    assert values(rows_of("memory://packed/*.gz")) == TABLE


def test_remote_hugging_face_folder(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    fsspec = pytest.importorskip("fsspec")
    datasets.Dataset.from_list(TABLE).save_to_disk(tmp_path / "one")
    for path in (tmp_path / "one").iterdir():
        fsspec.filesystem("memory").pipe(f"/saved/{path.name}", path.read_bytes())
    assert values(rows_of("memory://saved")) == TABLE


def test_order_of_globs_and_lists(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.jsonl", "c.jsonl"):
        (tmp_path / name).write_text(json.dumps({"file": name}) + "\n")
    assert [r["file"] for r in values(rows_of(str(tmp_path / "*.jsonl")))] == ["a.jsonl", "b.jsonl", "c.jsonl"]
    listed = [str(tmp_path / "c.jsonl"), str(tmp_path / "a.jsonl")]
    assert [r["file"] for r in values(rows_of(listed))] == ["c.jsonl", "a.jsonl"]


def test_broken_lines_tell_their_line(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"a": 1}\n\n{"a": \n[1]\n"x"\n\xff\n' + b"[" * 100_000 + b'\n{"a": 2}')
    for step in (1, 2, 10):
        rows = rows_of(str(path), step)
        assert [row.number for row in rows] == list(range(7))
        reasons = [row.reason or "" for row in rows]
        assert reasons[0] == reasons[6] == ""
        assert reasons[1].startswith("broken JSON: line 3: ")
        assert reasons[2:5] == [
            "not an object: line 4 holds list",
            "not an object: line 5 holds str",
            "broken JSON: line 6: not UTF-8",
        ]
        assert reasons[5].startswith("broken JSON: line 7: ")


def test_unreadable_inputs_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("x")
    (tmp_path / "bad.parquet").write_text("not parquet")
    (tmp_path / "bad.jsonl.gz").write_bytes(gzip.compress(LINES.encode() * 50)[:-20])
    (tmp_path / "empty").mkdir()
    good = tmp_path / "good.parquet"
    pq.write_table(pa.Table.from_pylist(TABLE), good)
    cases: list[tuple[Any, str]] = [
        ("missing.jsonl", "no such file or folder"),
        ("missing-*.jsonl", "no file matches"),
        ("a.csv", "unknown format; set prompts.format"),
        ("empty", "no .jsonl, .jsonl.gz or .parquet"),
        ("bad.parquet", "can't be read"),
        ("bad.jsonl.gz", "can't be read"),
    ]
    for name, expected in cases:
        with pytest.raises(InputError) as caught:
            rows_of(str(tmp_path / name))
        assert expected in str(caught.value) and "\n" not in str(caught.value) and name in str(caught.value)
    with pytest.raises(InputError, match="no column 'text'; it has id, ids, n"):
        rows_of(str(good), columns=("text",))
    with pytest.raises(InputError, match="named twice"):
        rows_of([str(good), str(tmp_path / "*.parquet")])
    with pytest.raises(InputError, match="several formats"):
        rows_of([str(good), str(tmp_path / "bad.jsonl.gz")])
    with pytest.raises(InputError, match="nosuch"):
        rows_of("nosuch://bucket/x.jsonl")
    with pytest.raises(InputError, match="not a folder written by save_to_disk"):
        rows_of(str(good), format="huggingface")


def test_file_that_shrinks_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(LINES)
    (file,) = discover(PromptsConfig(path=str(path)), STORAGE)
    (block,) = file_blocks([file], [scan_file(file, STORAGE, 100, ())], 100)
    path.write_text(LINES[:100])
    with pytest.raises(InputError, match="fewer rows"):
        list(read_block(block, STORAGE, ()))


def test_text_that_is_not_utf8_in_parquet(tmp_path: Path) -> None:
    broken = pa.StringArray.from_buffers(2, pa.py_buffer(b"\0\0\0\0\1\0\0\0\2\0\0\0"), pa.py_buffer(b"a\xff"))
    pq.write_table(pa.table({"text": broken}), tmp_path / "a.parquet")
    assert values(rows_of(str(tmp_path / "a.parquet"))) == [{"text": "a"}, {"text": b"\xff"}]


def test_fingerprint_follows_content_not_place_or_time(tmp_path: Path) -> None:
    def fingerprint(folder: str, text: str) -> str:
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / "a.jsonl").write_text(text)
        files: list[InputFile] = discover(PromptsConfig(path=str(tmp_path / folder / "a.jsonl")), STORAGE)
        return fingerprint_files(files, STORAGE)

    assert fingerprint("one", LINES) == fingerprint("two", LINES)
    assert fingerprint("one", LINES) != fingerprint("two", LINES.replace("1", "2"))


@settings(max_examples=60)
@given(
    lines=st.lists(st.sampled_from(['{"a": 1}', "", " ", "{", "[]", '{"b": "é"}']), max_size=30),
    step=st.integers(1, 9),
)
def test_any_cut_of_any_lines_gives_the_same_rows(
    tmp_path_factory: pytest.TempPathFactory, lines: list[str], step: int
) -> None:
    path = tmp_path_factory.mktemp("lines") / "a.jsonl"
    path.write_text("\n".join(lines))
    assert rows_of(str(path), step) == rows_of(str(path), 1000)
