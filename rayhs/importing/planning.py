"""The plan of an import, in one process: a row after the other, a samples file at a time in memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import chain, count, islice

from rayhs.layout import Plan, samples_name
from rayhs.plan import CutRule, Receipt, SamplesWriter, assemble
from rayhs.prompts.rows import PlannedSample
from rayhs.store import Store

_TOLD_ROWS = 1024


def write_plan(
    samples: Iterator[PlannedSample],
    rule: CutRule,
    rows_per_file: int,
    source: str,
    store: Store | None,
    on_rows: Callable[[int], None],
) -> tuple[Plan, Counter[str]]:
    """Cut ``samples`` into shards and write ``samples/*.parquet``, unless ``store`` is None.

    Args:
        source: fingerprint of what they are read from.
        on_rows: called with the number of rows so far.

    Returns:
        The plan, and its rejected rows by category.
    """
    receipts: list[Receipt] = []
    rows = 0
    for number in count():
        first = next(samples, None)
        if first is None:
            return assemble(receipts, source)
        writer = SamplesWriter(number, rows, rule)
        left = chain([first], islice(samples, rows_per_file - 1))
        while part := list(islice(left, _TOLD_ROWS)):
            writer.add(part)
            rows += len(part)
            on_rows(rows)
        data, receipt = writer.finish()
        if store is not None:
            store.put(samples_name(number), data)
        receipts.append(receipt)
    raise AssertionError("unreachable")
