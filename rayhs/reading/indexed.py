"""A dataset's index as its reader sees it: by position, by id, in pieces or as a whole; the base of `rayhs.Dataset`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property, partial
from typing import Any

import numpy as np
import pyarrow as pa

from rayhs.layout import INDEX_SCHEMA, DatasetRecord, Summary
from rayhs.reading.ahead import in_order
from rayhs.reading.catalog import committed_shards
from rayhs.reading.id_lookup import ID_COLUMNS, IdLookup
from rayhs.reading.index_files import IndexFiles
from rayhs.reading.index_table import partial_index, read_index
from rayhs.reading.outline import OUTLINE_COLUMNS, Outline, Rows, good_rows, outline_of
from rayhs.reading.plan_reader import PlanReader
from rayhs.store import Store


class Indexed:
    """The rows of a dataset's index and plan. Of a finished one no more is in memory than was asked for."""

    def __init__(self, store: Store, record: DatasetRecord, summary: Summary | None) -> None:
        self._store = store
        self.info = record
        self.summary = summary
        self._plan = PlanReader(store, record.plan)
        self._index_files = IndexFiles(store, record.plan)

    @property
    def uri(self) -> str:
        return self._store.uri

    @property
    def complete(self) -> bool:
        """Whether the run that made the dataset has finished."""
        return self.summary is not None

    @cached_property
    def index(self) -> pa.Table:
        """One row a sample, in input order: index, sample_id, shard, token_start, num_tokens, status, reason.

        ``status`` is ok, failed or rejected; ``shard`` names the object with the states. Of an
        unfinished dataset: the rows of its committed shards, as of the first use.

        Example:
            >>> ds.index["status"].value_counts().to_pylist()
            [{'values': 'ok', 'counts': 22}, {'values': 'rejected', 'counts': 1}, {'values': 'failed', 'counts': 1}]
        """
        if self.summary is not None:
            return read_index(self._store, self.info.plan)
        planned = set(self.info.plan.shard_ids())
        done = [shard for shard in committed_shards(self._store) if shard in planned]
        return partial_index(self._store, self._plan, done)

    def __len__(self) -> int:
        """Number of rows of `index`, those without states included."""
        return len(self._index_files) if self.complete else len(self.index)

    def position_of(self, sample_id: str) -> int:
        """The position of the sample of that id; raises KeyError, and TypeError for an id that is no text.

        Example:
            >>> ds.position_of("row-4")
            4
        """
        if not isinstance(sample_id, str):
            raise TypeError(
                f"a sample id is a str, not {type(sample_id).__name__}; ds[i] reads a sample by its position"
            )
        position = self._ids.find(sample_id, lambda at: str(self.index_row(at)["sample_id"]))
        if position is None:
            raise KeyError(f"no sample {sample_id!r} in {self.uri}")
        return position

    def __contains__(self, sample_id: object) -> bool:
        """Whether there is a sample of that id, with states or without; raises TypeError for what is no text."""
        try:
            return self.position_of(sample_id) >= 0  # type: ignore[arg-type]  # refuses others
        except KeyError:
            return False

    @cached_property
    def _ids(self) -> IdLookup:
        return IdLookup(self.index_tables(ID_COLUMNS))

    @cached_property
    def good(self) -> Any:
        """Which rows of `index` have states: numpy bool `[rows]`.

        Example:
            >>> ds.good[3:6].tolist()
            [True, False, True]
        """
        if "outline" in self.__dict__ or "_ids" in self.__dict__:
            return self.outline.good if "outline" in self.__dict__ else self._ids.good
        return np.concatenate([np.zeros(0, bool), *map(good_rows, self.index_tables(["status"]))])

    @cached_property
    def outline(self) -> Outline:
        """Which rows of `index` have states, of how many tokens and in which shards; made in one pass over it.

        Raises:
            ObjectNotFound, FormatError: a file of the index is missing, damaged or says something impossible.

        Example:
            >>> [(shard.samples, shard.tokens) for shard in ds.outline.shards]
            [(6, 35), (8, 40), (8, 39)]
        """
        return outline_of(self._checked_index(OUTLINE_COLUMNS), len(self))

    def _checked_index(self, columns: Sequence[str] = tuple(INDEX_SCHEMA.names)) -> Iterable[pa.Table]:
        return [self.index] if self._has_index else self._index_files.checked_tables(columns)

    def index_tables(self, columns: Sequence[str]) -> Iterable[pa.Table]:
        """`index` in pieces, in order, with ``columns`` at least; no more of it comes into memory than already is.

        Raises:
            ObjectNotFound, FormatError: a file of the index is missing or damaged, at its turn.

        Example:
            >>> sum(len(table) for table in ds.index_tables(["num_tokens"]))
            24
        """
        return [self.index] if self._has_index else self._index_files.tables(columns)

    def plan_tables(self, columns: Sequence[str]) -> Iterator[pa.Table]:
        """Rows of the plan (`rayhs.layout.SAMPLES_SCHEMA`) in input order, a table a shard; a few are read ahead.

        Raises:
            ObjectNotFound, FormatError: a file of the plan is missing or damaged, at its turn.

        Example:
            >>> [table["index"][0].as_py() for table in ds.plan_tables(["index"])]
            [0, 8, 16]
        """
        return in_order((partial(self._plan.rows, shard, columns) for shard in self.info.plan.shard_ids()), 8, 4)

    @property
    def _has_index(self) -> bool:
        return "index" in self.__dict__ or not self.complete

    @property
    def _rows(self) -> Rows:
        return self.index if self._has_index else self._index_files

    def _stored_rows(self) -> Rows:
        """As `_rows`, small enough for Ray's object store where the dataset is large."""
        return self._index_files if self.complete else self.index

    def index_row(self, position: int) -> dict[str, Any]:
        """A row of `index`; of that, no more than the file with the row is read.

        Raises:
            ObjectNotFound, FormatError: the file is missing or damaged.

        Example:
            >>> ds.index_row(4)["reason"]
            'the prompt is empty'
        """
        rows: list[dict[str, Any]] = self._rows.slice(position, 1).to_pylist()
        return rows[0]
