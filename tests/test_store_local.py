"""The local folder beyond the common contract: URIs, errors of the file system, forks, light imports."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rayhs.errors import ConfigError, ObjectNotFound, StoreError
from rayhs.store import open_store


def test_uris(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    here = str(tmp_path / "a b")
    for uri in (
        "a b",
        "./a b/",
        "~/a b",
        f"{here}/x/..",
        f"file://{tmp_path}/a%20b",
        f"FILE://localhost{tmp_path}/a%20b/",
    ):
        assert open_store(uri).uri == here
    assert not Path(here).exists()


@pytest.mark.parametrize("uri", ["", "gs://bucket/x", "http://host/x", "file://host/x", "file://", "a\0b"])
def test_uris_that_are_refused(uri: str) -> None:
    with pytest.raises(ConfigError, match=r"give|write it") as caught:
        open_store(uri)
    assert "\n" not in str(caught.value)


def test_file_where_a_folder_should_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(StoreError, match="a file is where a folder should be"):
        open_store(str(tmp_path / "file")).put("a", b"1")
    with pytest.raises(StoreError, match="folder is where a file") as caught:
        (tmp_path / "folder" / "sub").mkdir(parents=True)
        open_store(str(tmp_path)).put("folder", b"1")
    assert "\n" not in str(caught.value)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "folder"]
    with pytest.raises(ObjectNotFound):
        open_store(str(tmp_path)).get("file/below")


FULL = """
import resource, signal, sys
from rayhs.errors import StoreError
from rayhs.store import open_store

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
try:
    open_store(sys.argv[1]).put_stream("x", [bytes(1 << 19)] * 5, 5 << 19)
except StoreError as error:
    sys.exit(0 if "File too large" in str(error) else 2)
sys.exit(1)
"""


def test_write_that_fails_half_way_leaves_nothing(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", FULL, str(tmp_path)], timeout=60, check=False)
    assert (done.returncode, list(tmp_path.iterdir())) == (0, [])


def test_usable_in_a_forked_child(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    store.put("x", b"1")
    child = os.fork()
    if child == 0:
        status = 1
        try:
            store.put("y", store.get("x"))
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert store.get("y") == b"1"


def test_symbolic_links_are_followed(tmp_path: Path) -> None:
    (tmp_path / "big disk").mkdir()
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "shards").symlink_to(tmp_path / "big disk")
    store = open_store(str(tmp_path / "data"))
    store.put("shards/x", b"1")
    assert list(store.list("")) == [("shards/x", 1)]
    assert (tmp_path / "big disk" / "x").read_bytes() == b"1"


def test_new_files_get_the_usual_permissions(tmp_path: Path) -> None:
    open_store(str(tmp_path)).put("x", b"1")
    (tmp_path / "y").write_text("1")
    assert (tmp_path / "x").stat().st_mode == (tmp_path / "y").stat().st_mode


LIGHT = """
import sys
for name in ("obstore", "botocore", "s3fs", "fsspec", "ray", "torch", "vllm", "transformers"):
    sys.modules[name] = None
from rayhs.store import open_store
store = open_store(sys.argv[1])
store.put("x", b"1")
assert [store.get("x"), list(store.list(""))] == [b"1", [("x", 1)]]
open_store("s3://bucket/x")
"""


def test_needs_no_s3_package(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", LIGHT, str(tmp_path)], timeout=60, check=True)


def test_a_place_that_can_t_be_written_is_found_out_at_once(tmp_path: Path) -> None:
    open_store(str(tmp_path / "new" / "place")).prepare()
    (tmp_path / "file").write_text("")
    for place, why in ((tmp_path / "file", "a file is where a folder should be"), (Path("/proc/x"), "/proc/x: ")):
        with pytest.raises(StoreError, match=why):
            open_store(str(place)).prepare()
