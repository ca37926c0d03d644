"""CPU cores claimed by engines of one host, so that two CPU replicas never share a core."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from rayhs.errors import EngineError


class CoreClaim:
    """Exclusive claim on ``count`` cores of this host, held until `release` or the process ends.

    Raises:
        EngineError: fewer cores are free.
    """

    def __init__(self, count: int, root: str | os.PathLike[str] = "/dev/shm") -> None:
        directory = Path(root) / f"rayhs-cores-{os.getuid()}"
        directory.mkdir(mode=0o700, exist_ok=True)
        self.cores: list[int] = []
        self._locks: list[int] = []
        for core in sorted(os.sched_getaffinity(0)):
            if len(self.cores) == count:
                break
            lock = os.open(directory / str(core), os.O_RDWR | os.O_CREAT, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(lock)
                continue
            self.cores.append(core)
            self._locks.append(lock)
        if len(self.cores) < count:
            free, there = len(self.cores), len(os.sched_getaffinity(0))
            self.release()
            raise EngineError(
                f"{count} CPU cores wanted for a replica, {free} of {there} are free and the rest other engines' of "
                "this host; wait for those to end, or lower cluster.cpus_per_replica"
            )

    def bind(self, ranks: int) -> None:
        """Have vLLM engines that this process starts use these cores and no others."""
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = self.thread_binding(ranks)

    def thread_binding(self, ranks: int) -> str:
        """vLLM's ``VLLM_CPU_OMP_THREADS_BIND``: the cores of each tensor parallel rank, ``0,1|2,3``."""
        share = max(1, len(self.cores) // ranks)
        parts = [self.cores[i * share : (i + 1) * share] or self.cores[-1:] for i in range(ranks)]
        return "|".join(",".join(map(str, part)) for part in parts)

    def release(self) -> None:
        for lock in self._locks:
            os.close(lock)
        self._locks = []
