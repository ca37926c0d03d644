"""Finding the prompt that kills the engine, and keeping all others.

After two deaths of the engine under a shard its samples are run with nothing else in the engine, in
smaller groups, down to one. What a dying engine had already handed over is kept. A sample is given
up when it was alone in three engines that died: one may also die by chance.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence

from rayhs.errors import EngineError
from rayhs.shards import FailedSample, GoodSample, PlannedSample
from rayhs.turns import Turns

_DEATHS_TOGETHER = 2
_TRIES_ALONE = 3
_FEW = 32  # running so many one by one costs less than another start of the engine

Results = dict[int, GoodSample | FailedSample]
RunGroup = Callable[[Sequence[PlannedSample]], Awaitable[EngineError | None]]
GiveUp = Callable[[PlannedSample, EngineError], None]


async def run_all(
    planned: Sequence[PlannedSample], results: Results, run: RunGroup, give_up: GiveUp, turns: Turns
) -> None:
    """Run samples until each has a result.

    Args:
        results: by ``PlannedSample.index``; filled.
        run: runs samples at once and fills ``results``; its answer is the error when the engine died.
        give_up: fills the result of a sample that killed the engine alone.

    Raises:
        EngineError: ``run`` raised it, as no engine can be had any more.
    """
    for _ in range(_DEATHS_TOGETHER):
        if left := _left(planned, results):
            async with turns.shared():
                await run(left)
    if left := _left(planned, results):
        async with turns.alone():
            await _isolate(left, results, run, give_up)


async def _isolate(samples: Sequence[PlannedSample], results: Results, run: RunGroup, give_up: GiveUp) -> None:
    size = math.isqrt(len(samples)) if len(samples) > _FEW else 1
    for first in range(0, len(samples), size):
        group = samples[first : first + size]
        if size == 1:
            await _run_alone(group[0], results, run, give_up)
            continue
        await run(group)
        if left := _left(group, results):
            await _isolate(left, results, run, give_up)


async def _run_alone(sample: PlannedSample, results: Results, run: RunGroup, give_up: GiveUp) -> None:
    error: EngineError | None = None
    for _ in range(_TRIES_ALONE):
        error = await run([sample])
        if sample.index in results:
            return
    assert error is not None
    give_up(sample, error)


def _left(samples: Sequence[PlannedSample], results: Results) -> list[PlannedSample]:
    return [sample for sample in samples if sample.index not in results]
