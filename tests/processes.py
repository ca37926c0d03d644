"""Finding the processes that tests kill."""

from __future__ import annotations

import psutil


def engine_processes() -> list[psutil.Process]:
    """vLLM's engine processes."""
    return _titled("VLLM::EngineCore")


def worker_processes() -> list[psutil.Process]:
    """The processes of vLLM's tensor parallel ranks."""
    return _titled("VLLM::Worker")


def extractor_actors() -> list[psutil.Process]:
    """Ray's actor processes that host a replica."""
    return [process for process in _titled("ray::") if "Extractor" in _title(process)]


def _titled(start: str) -> list[psutil.Process]:
    started_here = psutil.Process().children(recursive=True)  # others may test on this machine, too
    return [process for process in started_here if _title(process).startswith(start)]


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""  # gone meanwhile
