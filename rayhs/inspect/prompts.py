"""The pass over index and plan: lengths, reasons, duplicates and loss masks of all samples, no states read."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from rayhs.codec import Array
from rayhs.dataset import Dataset
from rayhs.inspect.figures import Distribution, DuplicateGroup, Duplicates, LengthBin, Lengths, Loss
from rayhs.inspect.sketch import half_octaves
from rayhs.reading.outline import good_rows

_PLAN_COLUMNS = ("num_tokens", "token_ids", "loss_mask")
_LISTED_GROUPS = 5


class Prompts:
    """What index and plan say of every sample, in 40 bytes each.

    ``stored`` and ``planned`` int64 `[samples]` are tokens, ``good`` bool `[samples]`; ``reasons`` by status count the
    samples without states.
    """

    def __init__(self, dataset: Dataset, on_rows: Callable[[int], None]) -> None:
        """Reads both; ``on_rows`` is told how many rows of the plan are done."""
        self._dataset = dataset
        self.good: Array = dataset.good
        self.reasons: dict[str, Counter[str]] = {"failed": Counter(), "rejected": Counter()}
        self.stored = self._read_index()
        samples = len(self.stored)
        self.planned = np.zeros(samples, np.int64)
        self._hashes = np.zeros((samples, 2), np.uint64)
        self._loss_tokens = self._loss_counted = self._without_loss = 0
        start = 0
        for table in dataset.plan_tables(_PLAN_COLUMNS):
            self._read_plan(start, table)
            start += len(table)
            on_rows(start)

    def _read_index(self) -> Array:
        stored = [np.zeros(0, np.int64)]
        for table in self._dataset.index_tables(("num_tokens", "status", "reason")):
            stored.append(table["num_tokens"].to_numpy())
            bad = table.filter(pa.array(~good_rows(table))).select(["status", "reason"])
            for status, reason in zip(*bad.to_pydict().values(), strict=True):
                # As in the summary: with their numbers equal, the kinds of reason stay few.
                self.reasons.setdefault(status, Counter())[re.sub(r"\d+", "N", reason or "no reason recorded")] += 1
        return np.concatenate(stored)

    def _read_plan(self, start: int, table: pa.Table) -> None:
        rows = slice(start, start + len(table))
        planned = table["num_tokens"].to_numpy().astype(np.int64)
        good, stored = self.good[rows], self.stored[rows]
        self.planned[rows] = planned
        ids, ends = _lists(table["token_ids"])
        for row in np.flatnonzero(good).tolist():
            digest = xxhash.xxh3_128_digest(ids[ends[row] : ends[row + 1]].tobytes())
            self._hashes[start + row] = np.frombuffer(digest, np.uint64)
        mask, mask_ends = _lists(table["loss_mask"])
        before = np.concatenate([[0], np.cumsum(mask != 0)])
        masked = np.asarray(table["loss_mask"].is_valid())
        # Without a mask the loss counts every token, and always the generated ones.
        counted = np.where(masked, before[mask_ends[1:]] - before[mask_ends[:-1]] + stored - planned, stored)[good]
        self._loss_tokens += int(stored[good].sum())
        self._loss_counted += int(counted.sum())
        self._without_loss += int((counted == 0).sum())

    def lengths(self) -> Lengths:
        ok, failed = self.stored[self.good], self.planned[~self.good & (self.planned > 0)]
        bins = half_octaves(int(max(ok.max(initial=0), failed.max(initial=0))))
        first = np.array([start for start, _ in bins], np.int64)
        counts = [np.bincount(np.searchsorted(first, some, "right") - 1, minlength=len(bins)) for some in (ok, failed)]
        used = np.flatnonzero(counts[0] + counts[1])
        histogram = [LengthBin(*bins[at], int(counts[0][at]), int(counts[1][at])) for at in _from_first_to_last(used)]
        return Lengths(distribution(ok), distribution(failed), histogram)

    def loss(self) -> Loss:
        share = self._loss_counted / self._loss_tokens if self._loss_tokens else None
        return Loss(self._loss_tokens, self._loss_counted, share, self._without_loss)

    def duplicates(self) -> Duplicates:
        positions = np.flatnonzero(self.good)
        hashes = self._hashes[positions]
        # Stable: the first of a group in this order is the first of the dataset.
        order = np.lexsort((hashes[:, 0], hashes[:, 1]))
        hashes = hashes[order]
        new = np.concatenate([[True], (hashes[1:] != hashes[:-1]).any(axis=1)]) if len(hashes) else np.zeros(0, bool)
        starts = np.flatnonzero(new)
        sizes = np.diff(starts, append=len(hashes))
        several = sizes > 1
        largest = np.flatnonzero(several)[np.argsort(-sizes[several], kind="stable")[:_LISTED_GROUPS]]
        groups = [self._group(int(positions[order[starts[group]]]), int(sizes[group])) for group in largest]
        return Duplicates(int(several.sum()), int((sizes[several] - 1).sum()), groups)

    def _group(self, position: int, samples: int) -> DuplicateGroup:
        sample_id = self._dataset.index_row(position)["sample_id"]
        return DuplicateGroup(samples, int(self.planned[position]), sample_id)


def _from_first_to_last(places: Array) -> range:
    return range(int(places[0]), int(places[-1]) + 1) if len(places) else range(0)


def _lists(column: pa.ChunkedArray) -> tuple[Array, Array]:
    """The values of a list column, one after the other, and where each list ends: int64 `[rows + 1]`, from 0 on."""
    lengths = np.asarray(pc.list_value_length(column).fill_null(0), np.int64)
    return pc.list_flatten(column).to_numpy(), np.concatenate([[0], np.cumsum(lengths)])


def distribution(values: Array) -> Distribution | None:
    """Of whole numbers `[n]`; None of none."""
    if not len(values):
        return None
    ranks = [math.floor(q * (len(values) - 1)) for q in (0, 0.5, 0.99, 1)]
    ordered = np.partition(values, ranks)
    low, median, p99, high = (int(ordered[rank]) for rank in ranks)
    total = int(values.sum())
    return Distribution(len(values), total, total / len(values), low, median, p99, high)
