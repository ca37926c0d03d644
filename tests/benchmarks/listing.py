"""How long a resumed run looks for what is committed: the listing of many commit records, and its memory.

    python tests/benchmarks/listing.py s3://bucket/fresh-prefix --objects 100000     # usual AWS variables

Writes the records by obstore from some threads, then lists them in a fresh process. Prints one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from rayhs import layout
from rayhs.config import StorageConfig
from rayhs.layout import ShardId
from rayhs.reading.catalog import committed_shards
from rayhs.store import open_store
from rayhs.store.settings import resolve_s3

GROUPS = 1000  # of a samples file
BODY = b"{" + b" " * 398 + b"}"


def fill(uri: str, objects: int, threads: int) -> float:
    """Seconds to write the records."""
    import obstore
    from obstore.store import S3Store

    settings = resolve_s3(StorageConfig())
    bucket, _, prefix = uri.removeprefix("s3://").partition("/")
    client = S3Store(
        bucket,
        prefix=prefix,
        config={"endpoint": settings.endpoint or "", "region": settings.region},
        client_options={"allow_http": True},
        credential_provider=settings.credentials,
    )

    def put(number: int) -> None:
        name = layout.commit_name(ShardId(number // GROUPS, number % GROUPS))
        obstore.put(client, name, BODY, use_multipart=False)

    def batches() -> Iterator[range]:
        return (range(start, min(start + 5000, objects)) for start in range(0, objects, 5000))

    begin = time.monotonic()
    with ThreadPoolExecutor(threads) as pool:
        for batch in batches():
            list(pool.map(put, batch))
            print(f"{batch.stop} written, {time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True)
    return time.monotonic() - begin


def listed(uri: str) -> dict[str, float]:
    store = open_store(uri)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begin, cpu = time.monotonic(), time.process_time()
    shards = committed_shards(store)
    return {
        "shards": len(shards),
        "seconds": round(time.monotonic() - begin, 2),
        "cpu_seconds": round(time.process_time() - cpu, 2),
        "rss_mib_before": before >> 10,
        "peak_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("uri", help="s3://bucket/prefix, a fresh one")
    parser.add_argument("--objects", type=int, default=100_000)
    parser.add_argument("--threads", type=int, default=24)
    parser.add_argument("--only-list", action="store_true", help="the records are there already")
    options = parser.parse_args()
    if options.only_list:
        print(json.dumps(listed(options.uri)))
        return
    seconds = fill(options.uri, options.objects, options.threads)
    again = [sys.executable, __file__, options.uri, "--only-list"]
    figures = json.loads(subprocess.run(again, check=True, stdout=subprocess.PIPE).stdout)
    print(json.dumps({"objects": options.objects, "fill_seconds": round(seconds, 1), **figures}))


if __name__ == "__main__":
    main()
