"""The index of a finished dataset by its files: a row costs one small file, a pass over all of them little memory."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate

import numpy as np
import pyarrow as pa

from rayhs.errors import FormatError
from rayhs.layout import INDEX_SCHEMA, Plan, index_name
from rayhs.reading.ahead import in_order
from rayhs.reading.index_table import check_index, read_index_file, verify_advised
from rayhs.reading.lru import LruCache
from rayhs.store import Store

_READERS = 4
_KEPT_FILES = 64
_KEPT_ROWS = 2**19  # of about a hundred bytes


class IndexFiles:
    """Rows of ``index/*.parquet`` by position, or a table a file; picklable, safe for many threads.

    The files used last stay in memory, decoded: up to 64 of them, or half a million rows.
    """

    def __init__(self, store: Store, plan: Plan) -> None:
        self._store, self._plan = store, plan
        self._ends = list(accumulate(file.rows for file in plan.files))
        largest = max((file.rows for file in plan.files), default=1)
        self._files: LruCache[int, pa.Table] = LruCache(min(_KEPT_FILES, max(1, _KEPT_ROWS // max(1, largest))))

    def __len__(self) -> int:
        """Rows of all files, as the plan has them."""
        return self._ends[-1] if self._ends else 0

    def slice(self, offset: int, length: int) -> pa.Table:
        """Rows from a position on that lie in its file, ``length`` at most, texts as dictionaries; the file is checked.

        Raises:
            ObjectNotFound, FormatError: the file is missing, damaged or says something impossible.
        """
        file = bisect_right(self._ends, offset)
        table = self._files.get(file, partial(self._checked, file, INDEX_SCHEMA.names))
        return table.slice(offset - self._start(file), length)

    def tables(self, columns: Sequence[str] = tuple(INDEX_SCHEMA.names)) -> Iterator[pa.Table]:
        """``columns`` of each file in order, with the rows that the plan has; a few are read ahead.

        Their texts are dictionaries: see `rayhs.reading.outline.distinct`.

        Raises:
            ObjectNotFound, FormatError: a file is missing, damaged or has other rows, at its turn.
        """
        return self._each(self._read, columns)

    def checked_tables(self, columns: Sequence[str] = tuple(INDEX_SCHEMA.names)) -> Iterator[pa.Table]:
        """As `tables`, each file checked as `slice` does; ``columns`` are `OUTLINE_COLUMNS` at least."""
        return self._each(self._checked, columns)

    def _each(self, read: Callable[[int, Sequence[str]], pa.Table], columns: Sequence[str]) -> Iterator[pa.Table]:
        return in_order((partial(read, file, columns) for file in range(len(self._plan.files))), _READERS, _READERS)

    def _start(self, file: int) -> int:
        return self._ends[file - 1] if file else 0

    def _read(self, file: int, columns: Sequence[str]) -> pa.Table:
        with verify_advised(self._store):
            table = read_index_file(self._store, file, columns, plain=False)
        if len(table) != self._plan.files[file].rows:
            raise self._misplaced(file)
        return table

    def _checked(self, file: int, columns: Sequence[str]) -> pa.Table:
        table = self._read(file, columns)
        if not np.array_equal(table["index"].to_numpy(), np.arange(self._start(file), self._ends[file])):
            raise self._misplaced(file)
        with verify_advised(self._store):
            check_index(table)
        return table

    def _misplaced(self, file: int) -> FormatError:
        where = f"{self._store.uri}/{index_name(file)}"
        return FormatError(f"{where}: the index is not one row a sample, in order; run rayhs verify {self._store.uri}")
