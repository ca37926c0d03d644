"""A store that is slower than the engine makes the engine wait: staging and memory stay flat."""

from __future__ import annotations

import pytest

from tests.benchmarks.slow_store import measure
from tests.s3_servers import S3Server


@pytest.mark.s3
def test_a_slow_store_fills_neither_staging_nor_memory(ceph_uri: str, ceph_server: S3Server) -> None:
    found = measure(ceph_uri, ceph_server.endpoint, mib_per_second=30, mib=240, staging_mib=32)
    assert found.failed == 0 and found.mib > 200
    assert found.reserved_peak_mib <= found.staging_limit_mib
    assert found.staging_peak_mib <= found.staging_limit_mib
    assert found.late_growth_mib < 32  # of 120 MiB that pass in the second half
