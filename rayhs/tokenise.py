"""One planning task: a block of input rows to samples files. Pure: no Ray."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from rayhs.codec import token_bytes
from rayhs.config import RunConfig, StorageConfig
from rayhs.layout import samples_name
from rayhs.model import ModelInfo, max_prompt_tokens, state_dtype, tokenizer_source
from rayhs.plan import CutRule, Receipt, SamplesWriter
from rayhs.prompts.ids import Table, duplicates_within
from rayhs.prompts.readers import Block, InputRow, missing_column, read_block
from rayhs.prompts.rows import RowRules, SampleMaker
from rayhs.prompts.tokenizer import Hashes, TokenizerSource, worker_tokenizer
from rayhs.store import Store

_BATCH_ROWS = 256


@dataclass(frozen=True)
class Job:
    """What a planning task needs beside its block."""

    rules: RowRules
    rule: CutRule
    tokenizer: TokenizerSource
    tokenizer_hashes: Hashes
    storage: StorageConfig
    labels: frozenset[str]
    store: Store | None


def make_job(
    config: RunConfig, model: ModelInfo, layers: Sequence[int], labels: frozenset[str], store: Store | None
) -> Job:
    """What every task of a run needs. Raises ConfigError if the context has no room for a prompt."""
    bytes_per_token = token_bytes(layers, model.hidden_size, state_dtype(config, model))
    return Job(
        rules=_rules(config, model),
        rule=CutRule(int(config.shards.target_bytes), bytes_per_token, config.engine.include_generated),
        tokenizer=tokenizer_source(config),
        tokenizer_hashes=(model.tokenizer_hash, model.chat_template_hash),
        storage=config.storage,
        labels=labels,
        store=store,
    )


def _rules(config: RunConfig, model: ModelInfo) -> RowRules:
    prompts = config.prompts
    return RowRules(
        kind=prompts.kind,
        column=prompts.column,
        id_column=prompts.id,
        mask_column=prompts.loss_mask,
        add_special_tokens=prompts.add_special_tokens,
        add_generation_prompt=prompts.add_generation_prompt,
        too_long=prompts.too_long,
        max_tokens=max_prompt_tokens(config, model),
        vocab_size=model.vocab_size,
    )


def tokenise_block(block: Block, job: Job, duplicates: Table | None) -> Iterator[Receipt]:
    """Make and write the samples files of a block, one receipt each.

    Raises:
        InputError: the file can't be read, or the first rows of the input lack a named column.
        ConfigError: the tokenizer can't be loaded here, or is another one than the driver's.
        StoreError: a samples file can't be written.
    """
    tokenizer = None if job.rules.kind == "token_ids" else worker_tokenizer(job.tokenizer, job.tokenizer_hashes)
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
