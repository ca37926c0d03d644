"""Whichever way a damaged dataset is read, the error names the object and says what tells more."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

import rayhs
from rayhs.dataset import Dataset
from tests.builders import Builder


def truncated(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def overwritten(path: Path) -> None:
    path.write_bytes(b"\0" * path.stat().st_size)


READS: dict[str, Callable[[Dataset], object]] = {
    "samples": lambda ds: [ds[i] for i in range(len(ds)) if ds.good[i]],
    "by_id": lambda ds: [ds.by_id(f"row-{i}") for i in range(len(ds)) if ds.good[i]],
    "stream": lambda ds: list(ds.stream()),
    "arrow": lambda ds: ds.arrow().read_all(),
    "index": lambda ds: (ds.index, ds.samples(range(len(ds)))),
}


@pytest.mark.parametrize("damage", [os.unlink, truncated, overwritten])
@pytest.mark.parametrize("kind", ["shards", "index"])
@pytest.mark.parametrize("how", READS)
@pytest.mark.parametrize("shard_format", ["safetensors", "parquet"])
def test_reading_something_damaged(
    tmp_path: Path, damage: Callable[[Path], None], kind: str, how: str, shard_format: str
) -> None:
    Builder(tmp_path, shard_format=shard_format).write()
    path = sorted((tmp_path / kind).iterdir())[-1]
    damage(path)
    if (kind, how) == ("shards", "index"):
        READS[how](rayhs.open(str(tmp_path)))  # needs no shard
        return
    with pytest.raises(rayhs.RayhsError, match=f"{kind}/{path.name}: .*run rayhs verify {tmp_path}") as caught:
        READS[how](rayhs.open(str(tmp_path)))
    assert str(caught.value).count("rayhs verify") == 1 and "\n" not in str(caught.value)
