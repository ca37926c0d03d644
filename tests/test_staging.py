from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayhs.arena import Arena, NoRoomNow
from rayhs.arrivals import Arrivals
from rayhs.budget import ByteBudget
from rayhs.codec import staged_bytes_at_most
from rayhs.errors import EngineError, SampleError
from rayhs.parts import StagedParts, fractions, shares
from rayhs.staging import OwnedDirectory, StagingArea, StagingFull, is_key, sweep_dead


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
    with small_tmpfs(tmp_path, "1m"):
        area = StagingArea(tmp_path / "area", 2**30)
        with pytest.raises(NoRoomNow, match="No space left"):
            area.create("a", 2**21)
        assert list(area.directory.iterdir()) == []
        assert area.has_room(2**30), "what was not created does not count"
        stage(area, "b", bytes(1000))


@contextmanager
def small_tmpfs(path: Path, size: str) -> Iterator[None]:
    if os.geteuid() != 0:
        pytest.skip("mounting a small tmpfs needs root")
    if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)], check=False).returncode:
        pytest.skip("this machine can't mount a tmpfs")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


@given(st.lists(st.tuples(st.integers(1, 12_000), st.integers(0, 9)), max_size=60))
def test_pieces_of_the_arena_never_overlap(steps: list[tuple[int, int]]) -> None:
    """Each step frees one piece in ten, then allocates one."""
    with tempfile.TemporaryDirectory() as folder:
        arena = Arena(Path(folder) / "arena", 65_536)
        used: dict[int, int] = {}
        for nbytes, fate in steps:
            if fate < 6 and used:
                offset = sorted(used)[fate % len(used)]
                arena.free(offset)
                del used[offset]
            offset_or_none = arena.allocate(nbytes)
            if offset_or_none is None:
                assert _largest_gap(used) < -(-nbytes // 4096) * 4096
                continue
            end = offset_or_none + nbytes
            assert offset_or_none >= 0 and end <= 65_536
            assert all(end <= start or offset_or_none >= start + size for start, size in used.items())
            used[offset_or_none] = nbytes


def _largest_gap(used: dict[int, int]) -> int:
    ends = [0, *(start + -(-size // 4096) * 4096 for start, size in sorted(used.items()))]
    return max(start - end for end, start in zip(ends, [*sorted(used), 65_536], strict=True))


class TestArena:
    @pytest.fixture
    def areas(self, tmp_path: Path) -> tuple[StagingArea, StagingArea]:
        """The writer's and the reader's."""
        writer = StagingArea(tmp_path, 100_000)
        writer.preallocate()
        return writer, StagingArea(tmp_path, 100_000)

    def test_a_sample_stays_until_it_is_released(self, areas: tuple[StagingArea, StagingArea]) -> None:
        writer, reader = areas
        staged = writer.create("a", 60_000)
        assert reader.arrivals() == set()
        staged.buffer[:] = b"a" * 60_000
        staged.publish()
        assert reader.arrivals() == {"a"}
        memory = reader.take("a")
        assert reader.arrivals() == set()
        assert not writer.has_room(60_000)
        assert bytes(memory) == b"a" * 60_000
        reader.release("a")
        assert writer.has_room(60_000)
        stage(writer, "b", b"b" * 60_000)
        assert bytes(memory[:3]) == b"bbb", "one arena, written over"
        assert bytes(reader.take("b")) == b"b" * 60_000

    def test_what_fits_no_gap_gets_a_file_and_the_limit_still_holds(
        self, areas: tuple[StagingArea, StagingArea]
    ) -> None:
        writer, reader = areas
        for key in "abcde":
            stage(writer, key, key.encode() * 16_000)
            reader.take(key)
        reader.release("b")
        reader.release("d")
        assert writer.has_room(36_000) and not writer.has_room(52_001)
        stage(writer, "f", b"f" * 36_000)
        assert writer.path("f").exists()
        assert not writer.has_room(16_001) and writer.has_room(16_000)
        memory = reader.take("f")
        assert bytes(memory) == b"f" * 36_000 and not writer.path("f").exists()
        reader.release("f")
        assert writer.has_room(36_000)

    def test_discarded_and_failed_samples_leave_nothing(self, areas: tuple[StagingArea, StagingArea]) -> None:
        writer, reader = areas
        writer.create("a", 90_000).discard()
        stage(writer, "b", bytes(90_000))
        writer.fail("c", "copy failed")
        assert reader.arrivals() == {"b", "c"}
        with pytest.raises(SampleError):
            reader.take("c")
        reader.release("c")

    @given(data=st.data())
    @settings(max_examples=30)
    def test_no_sample_is_written_over_while_it_is_held(self, data: st.DataObject) -> None:
        with tempfile.TemporaryDirectory() as folder:
            writer, reader = StagingArea(folder, 65_536), StagingArea(folder, 65_536)
            writer.preallocate()
            held: dict[str, tuple[memoryview, bytes]] = {}
            for number in range(data.draw(st.integers(1, 40))):
                if held and data.draw(st.booleans()):
                    key = data.draw(st.sampled_from(sorted(held)))
                    reader.release(key)
                    del held[key]
                nbytes = data.draw(st.integers(1, 30_000))
                if writer.has_room(nbytes):
                    content = bytes([number + 1]) * nbytes
                    stage(writer, f"k{number}", content)
                    held[f"k{number}"] = (reader.take(f"k{number}"), content)
                assert all(bytes(memory) == content for memory, content in held.values())


def test_the_arena_is_no_larger_than_16_gib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rayhs.staging._LARGEST_ARENA", 2**16)
    area = StagingArea(tmp_path, 2**40)
    area.preallocate()
    assert (tmp_path / "arena").stat().st_size == 2**16
    stage(area, "a", bytes(2**16))
    stage(area, "b", b"b" * 2**17)
    assert area.path("b").exists() and bytes(area.take("b")) == b"b" * 2**17


def test_a_file_system_without_room_for_the_arena_still_stages(tmp_path: Path) -> None:
    with small_tmpfs(tmp_path, "1m"):
        area = StagingArea(tmp_path / "area", 2**30)
        area.preallocate()
        stage(area, "a", b"abc")
        assert bytes(area.take("a")) == b"abc"
        area.release("a")


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
    parts = StagedParts(tmp_path, 10_000, [3])
    (area,) = parts.areas

    async def run() -> list[bytes]:
        arrivals = Arrivals(parts, lambda: False)
        waiting = [asyncio.create_task(arrivals.wait(f"k{i}")) for i in range(20)]
        await asyncio.sleep(0.02)
        for i in reversed(range(20)):
            stage(area, f"k{i}", bytes([i]))
        memories = await asyncio.gather(*waiting)
        with pytest.raises(EngineError, match="no states"):
            await arrivals.wait("never", timeout=0.05)
        stage(area, "later", b"z")
        return [bytes(m) for (m,) in [*memories, await arrivals.wait("later")]]

    assert asyncio.run(run()) == [bytes([i]) for i in range(20)] + [b"z"]


def test_ranks_carry_every_layer_once_and_none_two_more_than_another() -> None:
    for count in range(1, 9):
        for ranks in range(1, 10):
            got = shares(list(range(count)), ranks)
            assert sorted(layer for share in got for layer in share) == list(range(count))
            assert len(got) == min(ranks, count) and max(map(len, got)) - min(map(len, got)) <= 1


@pytest.mark.parametrize("layers", [[1], [1, 2], [1, 2, 3], list(range(29))])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_areas_of_parts_keep_the_limit_and_hold_what_is_reserved(tmp_path: Path, layers: list[int], ranks: int) -> None:
    parts = StagedParts(tmp_path, 10 * 2**20, layers, ranks)
    limits = [area.max_bytes for area in parts.areas]
    assert sum(limits) <= 10 * 2**20
    usable = 10 * 2**20 / sum(fractions(parts.shares))
    for tokens in (1, 40, 100_000):  # headers are most of it, or states
        sizes = [staged_bytes_at_most(share, 64, "bfloat16", tokens) for share in parts.shares]
        for size, limit in zip(sizes, limits, strict=True):
            assert size / sum(sizes) * usable <= limit + len(limits)


@pytest.mark.parametrize("preallocates", [False, True])
def test_a_sample_has_arrived_when_every_part_has(tmp_path: Path, preallocates: bool) -> None:
    parts = StagedParts(tmp_path, 2**20, [2, 5, 8], ranks=2)
    assert parts.shares == [(2, 8), (5,)]
    first, second = parts.areas
    if preallocates:
        first.preallocate()
        second.preallocate()
    reader = StagedParts(tmp_path, 2**20, [2, 5, 8], ranks=2)
    stage(first, "a", b"abc")
    assert reader.arrivals() == set()
    stage(second, "a", b"de")
    stage(second, "b", b"f")
    first.fail("b", "copy failed: x")
    assert reader.arrivals() == {"a", "b"}
    assert [bytes(part) for part in reader.take("a")] == [b"abc", b"de"]
    with pytest.raises(SampleError, match="copy failed: x"):
        reader.take("b")
    reader.release("a")
    assert reader.arrivals() == set()
    if preallocates:
        assert list(tmp_path.rglob("*.slot")) == [], "the other part of a failed sample is given back too"


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
