"""Fixtures that several test files share."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import pytest

pytest_plugins = ["tests.exports", "tests.s3_servers"]

# Engines and Ray workers must not spend the run compiling Python files anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# Threads of torch and of engines that wait give their core to the tests that run beside.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Ray's workers, and engines in them, else run at the lowest priority, and starve beside other tests.
os.environ.setdefault("RAY_worker_niceness", "0")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")

with contextlib.suppress(ImportError):  # a bare GPU host has no hypothesis, and runs no test that needs it
    import hypothesis

    # How long an example takes is no property of the code where other work takes the cores.
    hypothesis.settings.register_profile("untimed", deadline=None)
    hypothesis.settings.load_profile("untimed")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--run-chaos", action="store_true", help="run the tests marked chaos, too")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.suffix == ".ipynb":
            item.add_marker("ray")
            item.add_marker("vllm")
    if not config.getoption("--run-chaos"):
        for item in items:
            if item.get_closest_marker("chaos"):
                item.add_marker(pytest.mark.skip(reason="minutes of kills: make chaos"))


@pytest.fixture(scope="session")
def local_ray() -> Iterator[None]:
    """One Ray for the tests of a session that need one."""
    import ray

    started = not ray.is_initialized()
    if started:
        ray.init(address="local", num_cpus=2, log_to_driver=False, include_dashboard=False)
    yield
    if started:
        ray.shutdown()
