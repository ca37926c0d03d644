"""A short chaos run: two Ray nodes, Ceph behind a faulty proxy, one kill of each kind. The long one is `make chaos`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.s3_servers import why_no_ceph

pytestmark = [pytest.mark.s3, pytest.mark.ray, pytest.mark.slow]


@pytest.mark.skipif(bool(why_no_ceph()), reason=why_no_ceph())
def test_nothing_is_lost_or_doubled_whatever_is_killed(tmp_path: Path) -> None:
    options = ["--seeds", "1", "--first", "7", "--samples", "1000", "--kills", "4", "--folder", str(tmp_path)]
    command = [sys.executable, "-m", "tests.chaos", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=560, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    outcome = json.loads(done.stdout)
    assert outcome["ok"] and outcome["shards"] > 1
    assert sum(outcome["kills"].values()) >= 2 and sum(outcome["faults"].values()) >= 1, outcome
