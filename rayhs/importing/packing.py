"""From planned samples and their files to committed shards: read, check, convert, pack, upload, commit."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import stamina

from rayhs.codec import FP8, Array, error_name, scale_name, state_name
from rayhs.errors import REPAIR_HINT, FormatError, RayhsError, SampleError, StoreError, StoreUnavailable
from rayhs.fp8 import dequantize, quantize
from rayhs.importing.dump import Dump
from rayhs.importing.ordered import CHUNK, in_order
from rayhs.importing.state_file import StateFile, read_states
from rayhs.job import Receipt
from rayhs.layout import CommitRecord, ShardId
from rayhs.log import logger
from rayhs.planned import PLAN_COLUMNS, planned_samples
from rayhs.reading.plan_reader import PlanReader
from rayhs.shards import FailedSample, GoodSample, PlannedSample, ShardSpec, check_sample, write_shard
from rayhs.store import Store
from rayhs.tally import Tally

_READERS = 4  # of each shard in flight; a file is in memory twice while its layers are taken apart
_IN_FLIGHT = 2  # one is read while the one before is uploaded
_MOST_STORE_FAILURES = 3  # shards in a row; each has had its attempts and the store's own retries


class _Stopped(Exception):
    """The import ends before this shard was read."""


class Packer:
    """Packs shards, two at once; their states are in memory, and nothing else is."""

    def __init__(self, dump: Dump, store: Store, plan: PlanReader, spec: ShardSpec, attempts: int) -> None:
        """``attempts``: how often an upload is tried that fails in ways that pass."""
        self._dump, self._store, self._plan, self._spec, self._attempts = dump, store, plan, spec, attempts
        self._stop = threading.Event()
        self._store_failures = 0

    def run(self, shards: Sequence[ShardId], done: Tally, on_shard: Callable[[], None]) -> None:
        """Pack all ``shards`` and add a receipt of each to ``done``; an interruption finishes those being uploaded.

        Raises:
            InputError: the files are gone, or can't be read at the moment.
            RayhsError: three shards in a row could not be stored.
        """
        pending: deque[Future[Receipt]] = deque()
        with ThreadPoolExecutor(_IN_FLIGHT, thread_name_prefix="rayhs-pack") as packers:
            try:
                for shard in shards:
                    pending.append(packers.submit(self._pack, shard))
                    if len(pending) >= _IN_FLIGHT:
                        self._take(pending.popleft().result(), done, on_shard)
                while pending:
                    self._take(pending.popleft().result(), done, on_shard)
            finally:
                self._stop.set()
                packers.shutdown(wait=False, cancel_futures=True)

    def _take(self, receipt: Receipt, done: Tally, on_shard: Callable[[], None]) -> None:
        done.add(receipt)
        if not receipt.error:
            self._store_failures = 0
        elif (failures := self._store_failures + 1) < _MOST_STORE_FAILURES:
            self._store_failures = failures
            logger.warning("shard %s: %s", receipt.shard, receipt.error)
        else:
            raise RayhsError(
                f"{receipt.error}; {failures} shards in a row could not be stored; run the same command again to go on"
            )
        on_shard()

    def _pack(self, shard: ShardId) -> Receipt:
        started = time.time()
        try:
            planned = planned_samples(self._plan.rows(shard, PLAN_COLUMNS))
            chunk = min(CHUNK, 1 + len(planned) // (2 * _READERS))
            results = list(in_order(self._read, planned, _READERS, chunk))
            self._dump.refuse_gone()
            record = self._commit(shard, results)
        except FormatError as error:
            return Receipt(str(shard), error=f"{error}; {REPAIR_HINT}")
        except StoreError as error:
            return Receipt(str(shard), error=str(error))
        return Receipt.of(record, started)

    def _read(self, planned: PlannedSample) -> GoodSample | FailedSample:
        if self._stop.is_set():
            raise _Stopped
        try:
            return read_sample(self._dump, planned, self._spec)
        except SampleError as error:
            return FailedSample(planned, str(error))

    def _commit(self, shard: ShardId, results: Sequence[GoodSample | FailedSample]) -> CommitRecord:
        for attempt in stamina.retry_context(
            on=StoreUnavailable, attempts=self._attempts, timeout=None, wait_initial=1.0, wait_max=30.0
        ):
            with attempt:
                return write_shard(self._store, shard, results, self._spec)
        raise AssertionError("unreachable")


def read_sample(dump: Dump, planned: PlannedSample, spec: ShardSpec) -> GoodSample:
    """Read, check and convert one sample; its states are in memory of their own.

    Raises:
        SampleError: its file is not there, not finished or not whole, is of other tokens or layers, or its states
            fail `rayhs.shards.check_states`.
        InputError: as `rayhs.importing.state_file.read_header`.
    """
    path = dump.path(planned)
    dump.refuse_unwritten(path)
    header, token_ids, states, scales = read_states(path)
    if not np.array_equal(token_ids, planned.token_ids):
        raise SampleError(
            f"other tokens: the file has {len(token_ids)} token ids, {len(planned.token_ids)} are planned, or others"
        )
    _refuse_shape(header, spec)
    return check_sample(_tensors(planned.token_ids, states, scales, spec), planned, spec)


def _refuse_shape(header: StateFile, spec: ShardSpec) -> None:
    shape = list(header.states.shape[1:])
    if shape != [len(spec.layers), spec.hidden]:
        raise SampleError(f"wrong states: {shape[0]} layers of {shape[1]}, not {len(spec.layers)} of {spec.hidden}")
    if header.dtype != spec.engine_dtype:
        raise SampleError(f"wrong states: they are {header.dtype}, those of the other files {spec.engine_dtype}")


def _tensors(token_ids: Array, states: Array, scales: Array | None, spec: ShardSpec) -> Mapping[str, Array]:
    tensors: dict[str, Array] = {"token_ids": token_ids}
    for position, layer in enumerate(spec.layers):
        layer_states = np.ascontiguousarray(states[:, position])
        if scales is not None:
            layer_states = dequantize(layer_states, scales, spec.engine_dtype)
        if spec.dtype == FP8:
            parts = quantize(layer_states)
            names = (state_name(layer), scale_name(layer), error_name(layer))
            tensors |= dict(zip(names, parts, strict=True))
        else:
            tensors[state_name(layer)] = layer_states
    return tensors
