"""What is wrong with the rows of one index file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa

from rayhs import layout

# A plan may claim any number of rows: memory is taken for as many as are there, and this many more.
_NAMED_ONE_BY_ONE = 1_000_000


def index_problems(table: pa.Table, expected: pa.Table, rows: range) -> Iterator[tuple[str, list[str]]]:
    """What is wrong with one index file, which must have each of ``rows`` once, in order.

    Args:
        table: the file's rows.
        expected: what plan and commit records say, for the shards whose records are sound.
    """
    if abs(len(table) - len(rows)) > _NAMED_ONE_BY_ONE:
        yield f"{len(table)} rows, the plan has {len(rows)}", []
        return
    index = table["index"].to_numpy()
    inside = (index >= rows.start) & (index < rows.stop)
    counts = np.bincount(index[inside] - rows.start, minlength=len(rows))
    names = dict(zip(expected["index"].to_pylist(), expected["sample_id"].to_pylist(), strict=True))

    def named(positions: Sequence[int]) -> list[str]:
        return [str(names.get(i, f"#{i}")) for i in positions]

    if not inside.all():
        yield f"rows that belong elsewhere, such as index {index[~inside][0]}", []
    missing = (np.flatnonzero(counts == 0) + rows.start).tolist()
    if missing:
        yield "samples missing from the index", named(missing)
    doubled = (np.flatnonzero(counts > 1) + rows.start).tolist()
    if doubled:
        yield "samples more than once in the index", named(doubled)
    elif (np.diff(index) < 0).any():
        yield "rows are out of order", []
    place = np.full(len(rows), -1)
    place[index[inside] - rows.start] = np.flatnonzero(inside)
    wanted = place[expected["index"].to_numpy() - rows.start]
    have, want = table.take(wanted[wanted >= 0]), expected.filter(pa.array(wanted >= 0))
    for column in layout.INDEX_SCHEMA.names:
        pairs = zip(want["index"].to_pylist(), have[column].to_pylist(), want[column].to_pylist(), strict=True)
        wrong = [i for i, a, b in pairs if a != b]
        if wrong:
            yield f"{column} differs from plan and commit record", named(wrong)
