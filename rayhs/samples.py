"""The planning job: input files to `samples/*.parquet` and the plan, with Ray tasks and Ray Data.

Every samples file is a function of its span of rows and the duplicates among all ids alone, so the
plan is the same whatever the number of workers, retries or the order of completion. The driver
holds one small entry a samples file, never one a row.
"""

from __future__ import annotations

import os
import pickle
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rayhs.config import RunConfig, StorageConfig
from rayhs.errors import ConfigError, InputError, RayhsError, first_line
from rayhs.layout import Plan
from rayhs.model import ModelInfo
from rayhs.plan import Receipt, assemble, input_fingerprint
from rayhs.prompts.ids import Table, find_duplicates, hash_ids, merge_duplicates, partitions_for
from rayhs.prompts.inputs import InputFile, discover
from rayhs.prompts.readers import PYTHON_LABEL, Block, FileScan, file_blocks, python_blocks, scan_file
from rayhs.ray_threads import iterated_apart
from rayhs.store import Store
from rayhs.tokenise import Job, make_job, tokenise_block

if TYPE_CHECKING:
    import pyarrow as pa

_TASK_RETRIES = 3  # of a task whose process died; Ray's own default is to retry for ever
_MAX_TASKS = 256
_HASHED_ROWS = 8192  # of a task and partition: 192 KiB


def make_plan(
    config: RunConfig,
    model: ModelInfo,
    layers: Sequence[int],
    store: Store | None,
    on_progress: Callable[[int], None],
) -> tuple[Plan, Counter[str]]:
    """Tokenise the input and write ``samples/*.parquet`` through ``store``. Ray is running already.

    Args:
        layers: the layer ids to be stored; with hidden size and dtype they say when a shard is full.
        store: where the samples files go; None makes the same plan and writes nothing.
        on_progress: called with the number of rows tokenised so far.

    Returns:
        The plan, and how many rows were rejected by category of reason.

    Raises:
        InputError: a path can't be read, a named column does not exist, or there is no row.
        ConfigError: the tokenizer has no chat template, or the context has no room for a prompt.
        StoreError: a samples file can't be written.
    """
    import ray

    try:
        return _make_plan(config, model, layers, store, on_progress)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, RayhsError):
            raise error.cause from None
        raise RayhsError(f"planning failed in a Ray task: {first_line(error.cause or error)}") from error
    except ray.exceptions.RayError as error:
        raise RayhsError(f"planning failed: {first_line(error)}; see Ray's logs") from error


def _make_plan(
    config: RunConfig,
    model: ModelInfo,
    layers: Sequence[int],
    store: Store | None,
    on_progress: Callable[[int], None],
) -> tuple[Plan, Counter[str]]:
    import ray

    _check_tokenizer(config, model)
    input_hash = input_fingerprint(config)
    files = discover(config.prompts, config.storage) if config.prompts.rows is None else []
    labels = frozenset(file.label for file in files) or frozenset([PYTHON_LABEL])
    job = make_job(config, model, layers, labels, store)
    step = config.shards.rows_per_file
    if config.prompts.rows is not None:
        blocks = python_blocks(config.prompts.rows, step)
    else:
        blocks = file_blocks(files, _scan(files, config.storage, step, job.rules.named_columns), step)
    if not blocks:
        raise InputError(f"{_shown_input(config)}: no row in the input; check prompts.path")
    job_ref = ray.put(job)
    duplicates_ref = _duplicates(blocks, job_ref) if job.rules.id_column else None
    receipts = []
    rows = 0
    for receipt in _tokenise(blocks, job_ref, duplicates_ref, config.cluster.plan_workers):
        receipts.append(receipt)
        rows += receipt.file.rows
        on_progress(rows)
    return assemble(receipts, input_hash)


def _shown_input(config: RunConfig) -> str:
    path = config.prompts.path
    return "prompts.rows" if path is None else path if isinstance(path, str) else ", ".join(path[:3])


def _check_tokenizer(config: RunConfig, model: ModelInfo) -> None:
    if config.prompts.kind == "messages" and model.chat_template_hash is None:
        raise ConfigError(
            f"prompts.messages: the tokenizer of {config.tokenizer or config.model} has no chat template; "
            "set tokenizer to one that has"
        )


def _scan(files: Sequence[InputFile], storage: StorageConfig, step: int, columns: Sequence[str]) -> list[FileScan]:
    import ray

    def scan(group: Sequence[InputFile]) -> list[FileScan]:
        return [scan_file(file, storage, step, columns) for file in group]

    task = ray.remote(max_retries=_TASK_RETRIES)(scan)
    found = ray.get([task.remote(group) for group in _groups(files)])
    return [scanned for group in found for scanned in group]


def _groups(items: Sequence[Any]) -> list[Sequence[Any]]:
    size = -(-len(items) // _MAX_TASKS)
    return [items[first : first + size] for first in range(0, len(items), size)]


def _duplicates(blocks: Sequence[Block], job_ref: Any) -> Any:
    """A reference to all duplicates; only tasks look into it."""
    import ray

    partitions = partitions_for(sum(block.start.rows for block in blocks))

    def hash_part(job: Job, group: Sequence[Block]) -> Table | list[Table]:
        tables = hash_ids(group, job.storage, job.rules, job.labels, partitions)
        return tables if partitions > 1 else tables[0]

    def find(*tables: Table) -> Table:
        return find_duplicates(tables)

    def merge(*tables: Table) -> Table:
        return merge_duplicates(tables)

    options = {"max_retries": _TASK_RETRIES}
    map_task = ray.remote(**options, num_returns=partitions)(hash_part)
    parts = [map_task.remote(job_ref, group) for group in _hash_groups(blocks, partitions)]
    by_partition = list(zip(*parts, strict=True)) if partitions > 1 else [parts]
    found = [ray.remote(**options)(find).remote(*tables) for tables in by_partition]
    return ray.remote(**options)(merge).remote(*found)


def _hash_groups(blocks: Sequence[Block], partitions: int) -> list[Sequence[Block]]:
    # Results under 100 kB are kept in the driver's own memory, so every task's tables must be larger.
    groups: list[list[Block]] = [[]]
    rows = 0
    for block in blocks:
        if rows >= partitions * _HASHED_ROWS:
            groups.append([])
            rows = 0
        groups[-1].append(block)
        rows += block.start.rows
    return list(groups)


def _tokenise(blocks: Sequence[Block], job_ref: Any, duplicates_ref: Any, workers: int | None) -> Iterator[Receipt]:
    import ray
    from ray.data import DataContext, TaskPoolStrategy

    def tokenise(batch: pa.Table) -> Iterator[pa.Table]:
        yield from _tokenise_batch(batch, ray.get(job_ref), duplicates_ref and ray.get(duplicates_ref))

    # Bytes, because Ray Data would turn dataclasses and rows of mixed types into Arrow types of its own.
    items = [{"block": pickle.dumps(block)} for block in blocks]
    context = DataContext.get_current().copy()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    with DataContext.current(context), warnings.catch_warnings():
        # max_retries has no named argument yet, and the default is to retry for ever.
        warnings.simplefilter("ignore", DeprecationWarning)
        dataset = ray.data.from_items(items, override_num_blocks=min(len(items), 4 * _MAX_TASKS)).map_batches(
            tokenise, batch_size=1, batch_format="pyarrow", compute=TaskPoolStrategy(workers), max_retries=_TASK_RETRIES
        )
    for batch in iterated_apart(dataset.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=0)):
        yield from _receipts(batch)


def _receipts(batch: pa.Table) -> Iterator[Receipt]:
    for data in batch.column("receipt").to_pylist():
        receipt = pickle.loads(data)  # noqa: S301 - written by our own task
        if isinstance(receipt, RayhsError):
            raise receipt
        yield receipt


def _tokenise_batch(batch: pa.Table, job: Job, duplicates: Table | None) -> Iterator[pa.Table]:
    import pyarrow as pa

    # Ray runs one process a core; a tokenizer's own threads would only fight over them.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    for data in batch.column("block").to_pylist():
        try:
            block = pickle.loads(data)  # noqa: S301 - written by our own driver
            for receipt in tokenise_block(block, job, duplicates):
                yield pa.table({"receipt": pa.array([pickle.dumps(receipt)], pa.binary())})
        except RayhsError as error:  # carried as a value: Ray Data would wrap it in pages of traceback
            yield pa.table({"receipt": pa.array([pickle.dumps(error)], pa.binary())})
