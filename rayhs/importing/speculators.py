"""A folder of speculators: a table as `datasets` saves it, and ``hidden_states/hs_<row>.safetensors``.

Source: speculators 0.9.0, `train/data.py` (`ArrowDataset`), `data_generation/offline.py`; datasets 5.1, `save_to_disk`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from rayhs.errors import ConfigError, InputError, first_line
from rayhs.importing.dump import BATCH_ROWS, SUFFIX, Dump, file_stamp, is_row
from rayhs.log import logger
from rayhs.prompts.readers import InputRow
from rayhs.prompts.rows import PlannedSample, SampleMaker
from rayhs.shards import PlannedSample as ShardSample

_IDS, _MASK = "input_ids", "loss_mask"
_DERIVED = "seq_len"


class SpeculatorsDump(Dump):
    """Rows are those of the table, in its order; a sample is called ``hs_<row>``. Other columns pass through."""

    kind = "speculators"

    def __init__(self, folder: Path) -> None:
        """Raises InputError unless table and states are there."""
        super().__init__(folder)
        self._tables = [folder / name for name in _table_names(folder)]
        if not self.state_folder.is_dir():
            raise InputError(f"{self.state_folder}: no such folder; it holds the files hs_<row>{SUFFIX} of a dump")
        self._has_mask = self._columns()
        if not self._has_mask:
            self.notes.append(f"the table has no {_MASK}: the loss is taken to count on every token")
        if extra := self._without_row():
            self.notes.append(f"{extra:,} files in {self.state_folder.name} have no row in the table and are left out")
            logger.warning("%s: %s", folder, self.notes[-1])

    @property
    def state_folder(self) -> Path:
        return self.folder / "hidden_states"

    @cached_property
    def _rows(self) -> int:
        return sum(batch.num_rows for table in self._tables for batch in _batches(table))

    def _without_row(self) -> int:
        with os.scandir(self.state_folder) as entries:
            names = (entry.name for entry in entries if entry.name.startswith("hs_") and entry.name.endswith(SUFFIX))
            return sum(not is_row(name.removeprefix("hs_").removesuffix(SUFFIX), self._rows) for name in names)

    def _columns(self) -> bool:
        """Whether all tables have a loss mask."""
        schemas = [_schema(table) for table in self._tables]
        for table, schema in zip(self._tables, schemas, strict=True):
            if _IDS not in schema.names or not _is_list(schema.field(_IDS).type):
                raise InputError(f"{table}: no column {_IDS} of lists; it has {', '.join(schema.names) or 'none'}")
        return bool(schemas) and all(_MASK in schema.names for schema in schemas)

    def paths(self) -> Iterator[str]:
        prefix = f"{self.state_folder}{os.sep}hs_"
        return (f"{prefix}{row}{SUFFIX}" for row in range(self._rows))

    def path(self, sample: ShardSample) -> str:
        return f"{self.state_folder}{os.sep}hs_{sample.index}{SUFFIX}"

    def samples(self, vocab_size: int) -> Iterator[PlannedSample]:
        maker = SampleMaker(self.rules(_MASK if self._has_mask else None, vocab_size), None, "", ())
        first = 0
        for table in self._tables:
            for batch in _batches(table):
                for start in range(0, batch.num_rows, BATCH_ROWS):
                    rows = _input_rows(batch.slice(start, BATCH_ROWS), first)
                    for row, sample in zip(rows, maker.make(rows, {}), strict=True):
                        yield replace(sample, sample_id=f"hs_{row.number}")
                    first += len(rows)

    def refuse_layers(self, layers: Sequence[int], num_layers: int) -> None:
        if layers[-1] != num_layers:
            raise ConfigError(
                f"--layers {','.join(map(str, layers))}: the last state of a dump of speculators is the one after all "
                f"{num_layers} layers; name it too (...,{num_layers})"
            )

    def _facts(self) -> Iterator[bytes]:
        for table in self._tables:
            yield table.name.encode() + b"\0" + file_stamp(table)


def _table_names(folder: Path) -> list[str]:
    if (folder / "dataset_dict.json").is_file():
        raise InputError(f"{folder}: holds several splits; give the folder of one of them")
    try:
        names = [entry["filename"] for entry in json.loads((folder / "state.json").read_bytes())["_data_files"]]
    except FileNotFoundError:
        raise InputError(f"{folder}: no state.json, so not a folder that datasets' save_to_disk wrote") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{folder}/state.json: can't be read ({first_line(error)}); write the folder anew") from None
    if not names or not all(isinstance(name, str) and name == os.path.basename(name) for name in names):
        raise InputError(f"{folder}/state.json: names no file of the table; write the folder anew")
    return names


@contextmanager
def _reading(table: Path) -> Iterator[None]:
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"{table}: not a whole Arrow stream ({first_line(error)}); write the folder anew") from None


def _schema(table: Path) -> pa.Schema:
    with _reading(table), pa.memory_map(str(table)) as source, pa.ipc.open_stream(source) as stream:
        return stream.schema


def _batches(table: Path) -> Iterator[pa.RecordBatch]:
    with _reading(table), pa.memory_map(str(table)) as source, pa.ipc.open_stream(source) as stream:
        yield from stream


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def _input_rows(batch: pa.RecordBatch, first: int) -> list[InputRow]:
    names = [name for name in batch.schema.names if name != _DERIVED]
    columns = [_values(batch.column(name), as_arrays=name in (_IDS, _MASK)) for name in names]
    rows = zip(*columns, strict=True)
    return [InputRow(first + i, dict(zip(names, row, strict=True))) for i, row in enumerate(rows)]


def _values(column: pa.Array, as_arrays: bool) -> Sequence[Any]:
    if not as_arrays or not _is_list(column.type):
        return column.to_pylist()  # type: ignore[no-any-return]
    return [_array(item.values) if item.is_valid else None for item in column]


def _array(values: pa.Array) -> Any:
    array = values.to_numpy(zero_copy_only=False)
    return array.astype(np.uint8) if array.dtype == bool else array
