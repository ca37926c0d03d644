"""Importing many small files: files a second, and the memory of the process that does it.

    python tests/benchmarks/importing.py 50000
    python tests/benchmarks/importing.py 2000 --tokens 500 --hidden 1024 --target 64MiB

Each kind of dump is written once, imported in a process of its own whose largest resident set is taken, and imported
again, which finds all of it done. A process that imports a single file tells what the code alone takes.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from rayhs.export.convert import safetensors_bytes
from rayhs.verify import verify

LAYERS = (2, 4, 5, 8)
# ru_maxrss of a child begins at what its parent had when it was forked.
_CHILD = "import atexit, sys; atexit.register(lambda: sys.stderr.write(open('/proc/self/status').read())); "
_CHILD += "from rayhs.cli import main; main()"
_MIB = 2**20


def prompts(count: int, tokens: int) -> Iterator[np.ndarray]:
    rng = np.random.default_rng(0)
    for _ in range(count):
        yield rng.integers(0, 1000, rng.integers(max(2, tokens // 2), 2 * tokens))


def write(folder: Path, kind: str, count: int, tokens: int, hidden: int) -> None:
    """``count`` files of bfloat16 states that differ from token to token."""
    table = np.random.default_rng(1).standard_normal((4096, len(LAYERS), hidden), np.float32)
    states = (table.view(np.uint32) >> 16).astype(np.uint16)
    import ml_dtypes

    states = states.view(ml_dtypes.bfloat16)
    name = "hidden_states/hs_{}.safetensors" if kind == "speculators" else "{:09d}.safetensors"
    (folder / "hidden_states").mkdir(parents=True) if kind == "speculators" else folder.mkdir(parents=True)
    rows = []
    for i, ids in enumerate(prompts(count, tokens)):
        tensors = {"hidden_states": states[(ids + np.arange(len(ids))) % 4096], "token_ids": ids.astype(np.int64)}
        (folder / name.format(i)).write_bytes(safetensors_bytes(tensors))
        if kind == "speculators":
            rows.append({"input_ids": ids, "loss_mask": np.ones(len(ids), np.int64), "seq_len": len(ids)})
    if kind == "speculators":
        lists = pa.list_(pa.int64())
        schema = pa.schema([("input_ids", lists), ("loss_mask", lists), ("seq_len", pa.int64())])
        with pa.OSFile(str(folder / "data.arrow"), "wb") as sink, pa.ipc.new_stream(sink, schema) as stream:
            for first in range(0, len(rows), 1000):
                stream.write_batch(pa.RecordBatch.from_pylist(rows[first : first + 1000], schema))
        (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data.arrow"}]}))


def run(folder: Path, out: Path, kind: str, hidden: int, target: str) -> tuple[dict[str, Any], float, float]:
    """The result, seconds and largest resident set in MiB of ``rayhs import`` in a process of its own."""
    command = [sys.executable, "-c", _CHILD, "import", str(folder), str(out), "--from", kind, "--json"]
    command += ["--model", f"fake/8x{hidden}", "--layers", ",".join(map(str, LAYERS))]
    command += ["--set", f"shards.target_bytes={target}"]
    started = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    seconds = time.perf_counter() - started
    (peak,) = re.findall(r"VmHWM:\s+(\d+) kB", done.stderr)
    return json.loads(done.stdout), seconds, int(peak) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=int)
    parser.add_argument("--tokens", type=int, default=8, help="tokens a file, on average 1.25 times as many")
    parser.add_argument("--hidden", type=int, default=16)
    parser.add_argument("--target", default="4MiB", help="shards.target_bytes")
    parser.add_argument("--folder", help="where the files go; default the folder for temporary ones")
    arguments = parser.parse_args()
    for kind in ("speculators", "vllm"):
        with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
            root = Path(name)
            write(root / "one", kind, 1, arguments.tokens, arguments.hidden)
            _, _, alone = run(root / "one", root / "one-out", kind, arguments.hidden, arguments.target)
            write(root / "dump", kind, arguments.files, arguments.tokens, arguments.hidden)
            found, seconds, rss = run(root / "dump", root / "out", kind, arguments.hidden, arguments.target)
            _, again, _ = run(root / "dump", root / "out", kind, arguments.hidden, arguments.target)
            assert found["ok"] == arguments.files and verify(str(root / "out")).ok
            report = {
                "kind": kind,
                "files": arguments.files,
                "mib": round(found["bytes"] / _MIB, 1),
                "shards": found["shards"],
                "seconds": round(seconds, 1),
                "files_per_second": round(arguments.files / seconds),
                "mib_per_second": round(found["bytes"] / _MIB / seconds, 1),
                "seconds_again": round(again, 1),
                "peak_rss_mib": round(rss),
                "peak_rss_of_one_file_mib": round(alone),
            }
        sys.stdout.write(json.dumps(report) + "\n")


if __name__ == "__main__":
    main()
