"""One planning task: a block of input rows to samples files. Pure: no Ray."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from rayhs.config import StorageConfig
from rayhs.ids import Table, duplicates_within
from rayhs.layout import samples_name
from rayhs.plan import CutRule, Receipt, SamplesWriter
from rayhs.readers import Block, InputRow, missing_column, read_block
from rayhs.rows import RowRules, SampleMaker
from rayhs.store import Store
from rayhs.tokenizer import TokenizerSource, load_tokenizer

_BATCH_ROWS = 256


@dataclass(frozen=True)
class Job:
    """What a planning task needs beside its block."""

    rules: RowRules
    rule: CutRule
    tokenizer: TokenizerSource
    storage: StorageConfig
    labels: frozenset[str]
    store: Store | None


def tokenise_block(block: Block, job: Job, duplicates: Table | None) -> Iterator[Receipt]:
    """Make and write the samples files of a block, one receipt each.

    Raises:
        InputError: the file can't be read, or the first rows of the input lack a named column.
        StoreError: a samples file can't be written.
    """
    tokenizer = None if job.rules.kind == "token_ids" else load_tokenizer(job.tokenizer)
    maker = SampleMaker(job.rules, tokenizer, block.label, job.labels)
    rows = read_block(block, job.storage, _array_columns(job.rules))
    for span in block.spans:
        writer = SamplesWriter(span.number, span.index, job.rule)
        columns = ColumnCheck(job.rules.named_columns)
        index, end = span.index, span.index + span.rows
        while index < end:
            batch = list(islice(rows, min(_BATCH_ROWS, end - index)))
            columns.see(batch)
            writer.add(maker.make(batch, duplicates_within(duplicates, index, len(batch))))
            index += len(batch)
        if span.number == 0:
            columns.check(block.label)
        data, receipt = writer.finish()
        if job.store is not None:
            job.store.put(samples_name(span.number), data)
        yield receipt


def _array_columns(rules: RowRules) -> tuple[str, ...]:
    return tuple(c for c in (rules.column, rules.mask_column) if c is not None) if rules.kind == "token_ids" else ()


class ColumnCheck:
    """Tells a wrong column name (no row has it) from rows that lack a value."""

    def __init__(self, needed: Sequence[str]) -> None:
        self._missing, self._known = set(needed), dict[str, None]()
        self._objects = 0

    def see(self, rows: Iterable[InputRow]) -> None:
        for row in rows:
            if isinstance(row.value, dict):
                self._objects += 1
                if self._missing:
                    self._missing.difference_update(row.value)
                    self._known.update(dict.fromkeys(map(str, row.value)))

    def check(self, where: str) -> None:
        """Raises InputError if no object seen has a needed column."""
        if self._objects and self._missing:
            raise missing_column(where, sorted(self._missing)[0], list(self._known)[:20])
