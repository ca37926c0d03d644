"""Good samples as the rows of an export, numbered from 0: which is which, and files that hold several."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from rayhs.codec import Array
from rayhs.export.target import Target
from rayhs.reading.sample import Sample

if TYPE_CHECKING:
    from rayhs.dataset import Dataset

SAMPLE_IDS = "sample_ids.jsonl"


def positions_of(dataset: Dataset) -> list[int]:
    """Position in the dataset of each row."""
    positions: list[int] = np.flatnonzero(dataset.good).tolist()
    return positions


def lengths_of(dataset: Dataset) -> Array:
    """Tokens of each row, int64; reads the index only."""
    lengths: Array = np.asarray(dataset.index["num_tokens"])[dataset.good].astype(np.int64)
    return lengths


def ids_of(dataset: Dataset) -> Any:
    """The sample id of each row, a pyarrow array."""
    return dataset.index.filter(dataset.good)["sample_id"].combine_chunks()


def put_sample_ids(dataset: Dataset, target: Target) -> None:
    """`SAMPLE_IDS`: line i has the sample id of row i, as a JSON string: an id may hold a line break."""
    if target.has(SAMPLE_IDS):
        return
    with target.file(SAMPLE_IDS) as file:
        for batch in dataset.index.filter(dataset.good).select(["sample_id"]).to_batches():
            file.write("".join(f"{json.dumps(sample_id)}\n" for sample_id in batch.column(0).to_pylist()).encode())


def put_shards(
    dataset: Dataset,
    target: Target,
    shards: Sequence[Sequence[int]],
    name: Callable[[int], str],
    write: Callable[[IO[bytes], int, Iterator[Sample]], None],
) -> None:
    """Files of several rows, each made by ``write``; those that are there are not read.

    Some ten samples are in memory, the file itself is on disk until it is whole.

    Args:
        shards: positions in the dataset of the samples of each file.
        name: of a file, by its number.
        write: is given the file, the number of its rows and their samples in order.

    Raises:
        RayhsError: whatever reading, ``write`` or storing one raises; those before it stay.
    """
    missing = [number for number in range(len(shards)) if not target.has(name(number))]
    total = sum(map(len, shards))
    done = total - sum(len(shards[number]) for number in missing)
    target.progress(done, total)

    def counted(samples: Iterator[Sample]) -> Iterator[Sample]:
        nonlocal done
        for sample in samples:
            yield sample
            done += 1
            target.progress(done, total)

    for number in missing:
        samples: Any = dataset.samples(shards[number])
        with closing(samples), target.file(name(number)) as file:
            write(file, len(shards[number]), counted(samples))
