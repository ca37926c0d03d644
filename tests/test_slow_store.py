"""A store that is slower than the engine makes the engine wait: staging and memory stay flat."""

from __future__ import annotations

import pytest

from rayhs.store.pieces import PART_BYTES
from rayhs.store.s3 import PARTS_IN_FLIGHT
from tests.benchmarks.slow_store import MIB, measure
from tests.s3_servers import S3Server


@pytest.mark.s3
def test_a_slow_store_fills_neither_staging_nor_memory(ceph_uri: str, ceph_server: S3Server) -> None:
    found = measure(ceph_uri, ceph_server.endpoint, mib_per_second=30, mib=240, staging_mib=32)
    assert found.failed == 0 and found.mib > 200
    assert found.reserved_peak_mib <= found.staging_limit_mib
    assert found.staging_peak_mib <= found.staging_limit_mib
    # Two shards in flight, each with the buffers of an upload, and what a process takes anyway; 240 MiB pass.
    buffers = 2 * (PARTS_IN_FLIGHT + 2) * PART_BYTES / MIB
    assert found.memory_growth_mib < 32 + min(buffers, 2 * 12) + 60
