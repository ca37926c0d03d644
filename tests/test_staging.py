from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rayhs.arrivals import Arrivals
from rayhs.budget import ByteBudget
from rayhs.errors import EngineError, SampleError
from rayhs.staging import NoRoomNow, OwnedDirectory, StagingArea, StagingFull, is_key, sweep_dead


def stage(area: StagingArea, key: str, data: bytes) -> None:
    staged = area.create(key, len(data))
    staged.buffer[:] = data
    staged.publish()


def test_a_sample_appears_whole_and_once(tmp_path: Path) -> None:
    area = StagingArea(tmp_path, 1000)
    staged = area.create("a", 3)
    assert area.arrivals() == set()
    staged.buffer[:] = b"abc"
    staged.publish()
    assert area.arrivals() == {"a"}
    memory = area.take("a")
    assert bytes(memory) == b"abc"
    assert area.arrivals() == set() and list(tmp_path.iterdir()) == []
    assert bytes(memory) == b"abc"


def test_a_failure_is_handed_over_as_one(tmp_path: Path) -> None:
    area = StagingArea(tmp_path, 1000)
    area.fail("a", "copy failed: disk")
    assert area.arrivals() == {"a"}
    with pytest.raises(SampleError, match="copy failed: disk"):
        area.take("a")
    assert area.arrivals() == set()


def test_the_limit_holds_until_samples_are_taken(tmp_path: Path) -> None:
    area = StagingArea(tmp_path, 100)
    stage(area, "a", bytes(60))
    assert not area.has_room(41)
    assert area.has_room(40)
    area.take("a")
    assert area.has_room(100)


def test_a_sample_over_the_limit_is_an_error_not_a_wait(tmp_path: Path) -> None:
    with pytest.raises(StagingFull, match="101 bytes, over the staging limit of 100"):
        StagingArea(tmp_path, 100).has_room(101)


def test_a_full_file_system_is_an_error_of_the_sample(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("mounting a small tmpfs needs root")
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)], check=False).returncode:
        pytest.skip("this machine can't mount a tmpfs")
    try:
        area = StagingArea(tmp_path / "area", 2**30)
        with pytest.raises(NoRoomNow, match="No space left"):
            area.create("a", 2**21)
        assert list(area.directory.iterdir()) == []
        stage(area, "b", bytes(1000))
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


@pytest.mark.parametrize("key", ["../x", "a/b", "", ".hidden", "a\0", "x" * 201, 7, None, "a b"])
def test_keys_never_leave_the_directory(key: object) -> None:
    assert not is_key(key)


def test_directories_of_dead_owners_are_swept_and_living_ones_kept(tmp_path: Path) -> None:
    code = (
        "import sys, time; from rayhs.staging import OwnedDirectory, StagingArea\n"
        "owned = OwnedDirectory(sys.argv[1]); StagingArea(owned.path / 'engine1', 100).create('a', 50)\n"
        "print('up', flush=True); time.sleep(60)"
    )
    mine = OwnedDirectory(tmp_path)
    other = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE)
    assert other.stdout is not None and other.stdout.readline() == b"up\n"
    sweep_dead(tmp_path)
    assert len(list(tmp_path.iterdir())) == 2
    other.send_signal(signal.SIGKILL)
    other.wait()
    sweep_dead(tmp_path)
    assert list(tmp_path.iterdir()) == [mine.path]
    mine.remove()
    assert list(tmp_path.iterdir()) == []


def test_arrivals_serve_many_waiters_and_time_out(tmp_path: Path) -> None:
    area = StagingArea(tmp_path, 10_000)

    async def run() -> list[bytes]:
        arrivals = Arrivals(area, lambda: False)
        waiting = [asyncio.create_task(arrivals.wait(f"k{i}")) for i in range(20)]
        await asyncio.sleep(0.02)
        for i in reversed(range(20)):
            stage(area, f"k{i}", bytes([i]))
        memories = await asyncio.gather(*waiting)
        with pytest.raises(EngineError, match="no states"):
            await arrivals.wait("never", timeout=0.05)
        stage(area, "later", b"z")
        return [bytes(m) for m in memories] + [bytes(await arrivals.wait("later"))]

    assert asyncio.run(run()) == [bytes([i]) for i in range(20)] + [b"z"]


def test_the_budget_is_first_come_first_served_and_never_passed() -> None:
    async def run() -> tuple[list[int], int]:
        budget = ByteBudget(10)
        order: list[int] = []

        async def use(number: int, nbytes: int) -> None:
            async with budget.reserve(nbytes):
                order.append(number)
                await asyncio.sleep(0.005)

        await asyncio.gather(*(use(i, n) for i, n in enumerate([6, 6, 1, 10, 1])))
        assert budget.used == 0
        return order, budget.peak

    order, peak = asyncio.run(run())
    assert order == [0, 1, 2, 3, 4]
    assert peak <= 10


def test_a_cancelled_reservation_frees_its_place() -> None:
    async def run() -> None:
        budget = ByteBudget(10)
        async with budget.reserve(8):
            blocked = asyncio.create_task(_hold(budget, 9))
            behind = asyncio.create_task(_hold(budget, 2))
            await asyncio.sleep(0.01)
            blocked.cancel()
            await asyncio.wait_for(behind, 1)
        assert budget.used == 0

    started = time.monotonic()
    asyncio.run(run())
    assert time.monotonic() - started < 5


async def _hold(budget: ByteBudget, nbytes: int) -> None:
    async with budget.reserve(nbytes):
        pass


def test_many_owners_at_once_never_sweep_each_other(tmp_path: Path) -> None:
    with ThreadPoolExecutor(16) as pool:
        for _ in range(20):
            owned = list(pool.map(lambda _: OwnedDirectory(tmp_path), range(16)))
            assert all(one.path.is_dir() for one in owned)
            for one in owned:
                one.remove()
    assert list(tmp_path.iterdir()) == []
