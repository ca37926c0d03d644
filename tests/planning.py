"""The planning job without Ray: the same steps, in one process and any order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pyarrow.parquet as pq

from rayhs.config import RunConfig, parse_config
from rayhs.layout import Plan, samples_name
from rayhs.model import describe_model
from rayhs.plan import assemble
from rayhs.prompts.ids import find_duplicates, hash_ids, merge_duplicates
from rayhs.prompts.inputs import discover
from rayhs.prompts.readers import PYTHON_LABEL, Block, file_blocks, python_blocks, scan_file
from rayhs.store import Store, open_store
from rayhs.tokenise import make_job, tokenise_block

LAYERS = (0, 2)


def run_config(output: object, prompts: Any, **sections: Any) -> RunConfig:
    """A run of the fake model, 4 layers of 8: 64 bytes a token for `LAYERS`."""
    return parse_config({"model": "fake/4x8", "prompts": prompts, "output": str(output), **sections})


def blocks_of(config: RunConfig) -> tuple[list[Block], frozenset[str]]:
    prompts, step = config.prompts, config.shards.rows_per_file
    if prompts.rows is not None:
        return python_blocks(prompts.rows, step), frozenset([PYTHON_LABEL])
    files = discover(prompts, config.storage)
    columns = tuple(c for c in (prompts.column, prompts.id, prompts.loss_mask) if c)
    scans = [scan_file(file, config.storage, step, columns) for file in files]
    return file_blocks(files, scans, step), frozenset(file.label for file in files)


def plan_here(
    config: RunConfig, layers: Sequence[int] = LAYERS, reverse: bool = False, partitions: int = 3
) -> tuple[Plan, Counter[str]]:
    model = describe_model(config)
    blocks, labels = blocks_of(config)
    job = make_job(config, model, layers, labels, open_store(config.output))
    rules = job.rules
    duplicates = None
    if rules.id_column:
        parts = [hash_ids([block], config.storage, rules, labels, partitions) for block in blocks]
        duplicates = merge_duplicates([find_duplicates(tables) for tables in zip(*parts, strict=True)])
    ordered = reversed(blocks) if reverse else blocks
    return assemble([r for block in ordered for r in tokenise_block(block, job, duplicates)], "input")


def read_rows(store: Store, plan: Plan) -> list[dict[str, Any]]:
    """All planned rows; checks that row groups are the plan's shards."""
    rows: list[dict[str, Any]] = []
    for number, file in enumerate(plan.files):
        parquet = pq.ParquetFile(store.open_input(samples_name(number)))
        assert parquet.num_row_groups == len(file.shard_tokens)
        for group, tokens in enumerate(file.shard_tokens):
            shard = parquet.read_row_group(group).to_pylist()
            assert sum(row["num_tokens"] for row in shard) == tokens
            rows += shard
    assert [row["index"] for row in rows] == list(range(plan.samples))
    return rows
