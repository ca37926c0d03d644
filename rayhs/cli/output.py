"""How results look: small rich tables, or one JSON document."""

from __future__ import annotations

import io
import json
import math
import os
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from rayhs.bench import BenchReport
    from rayhs.dataset_run import RunResult
    from rayhs.gc import GcReport
    from rayhs.pipeline import PlanResult
    from rayhs.report import StatusReport
    from rayhs.verify import VerifyReport


@contextmanager
def results_apart() -> Iterator[TextIO]:
    """Standard output for results alone: all else this process or its children print goes to standard error."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    out = io.TextIOWrapper(os.fdopen(kept, "wb"), encoding="utf-8", errors="replace")
    try:
        yield out
    finally:
        sys.stdout.flush()
        out.flush()
        os.dup2(kept, 1)
        out.close()


def print_json(document: Mapping[str, Any], out: TextIO | None = None) -> None:
    """One JSON document; NaN and infinities, which JSON lacks, become null."""
    text = json.dumps(_plain(document), ensure_ascii=False, indent=2, allow_nan=False)
    (out or sys.stdout).write(text + "\n")


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def nbytes(count: float) -> str:
    """Bytes for people: ``1.5 GiB``."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(count) < 1024 or unit == "TiB":
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError("unreachable")


def print_run(result: RunResult, out: TextIO, import_notes: Sequence[str] | None = None) -> None:
    """The totals of a run, or of an import with its notes."""
    summary = result.summary
    took = f"{summary.seconds:,.1f} s"
    if import_notes is None:
        work = {"extracting": f"{took}, without the engine's start"}
    else:
        work = {"importing": took, "note": "; ".join(import_notes)}
    rows = {
        "samples": f"{summary.ok:,} of {summary.samples:,}",
        "tokens": f"{summary.tokens:,}",
        "tokens/s": f"{summary.tokens_per_second:,.0f}",
        "stored": f"{nbytes(summary.bytes)} in {summary.shards:,} shards",
        **_errors({layer: error.model_dump() for layer, error in summary.errors.items()}),
        "failed": f"{summary.failed:,}",
        "rejected": f"{summary.rejected:,}",
        **_reasons(summary.reasons),
        **{key: text for key, text in work.items() if text},
        "output": result.uri,
        "next": f"rayhs show {shlex.quote(result.uri)}",
    }
    if summary.failed or summary.rejected:
        rows["list them"] = f"rayhs failures {shlex.quote(result.uri)}"
    print_pairs(rows, out)


def print_plan(result: PlanResult, out: TextIO) -> None:
    rows = {
        "samples": f"{result.samples:,}",
        "rejected": f"{result.rejected:,}",
        **_reasons(result.reasons),
        "tokens": f"{result.tokens:,}",
        "layers": ", ".join(map(str, result.layers)),
        "states": f"{nbytes(result.state_bytes)} of {result.dtype}, hidden size {result.hidden_size}",
        "shards": f"{result.shards:,}",
        "output": result.uri,
    }
    print_pairs(rows, out)


def print_bench(report: BenchReport, out: TextIO) -> None:
    ratio = "" if report.ratio is None else f"   {report.ratio:.3f} of plain"
    stock = "" if report.stock_ratio is None else f"   {report.stock_ratio:.3f} of plain"
    rows = {
        "model": f"{report.model}, {report.engine_dtype}, layers {', '.join(map(str, report.layers))}",
        "stored as": report.dtype if report.dtype != report.engine_dtype else "",
        "on": f"{report.replicas} x {report.tensor_parallel_size} {report.device}",
        "prompts": f"{report.samples:,}, {report.tokens:,} tokens, {nbytes(report.state_bytes)} of states",
        "plain vLLM": _rates(report.plain),
        "rayhs": _rates(report.rayhs) + ratio,
        "stock": _rates(report.stock) + stock,
        "bottleneck": report.bottleneck,
    }
    print_pairs({key: value for key, value in rows.items() if value}, out)
    table = Table("stage", "seconds", "of the run", "moved", "a second", box=None)
    for stage in report.stages:
        rate = nbytes(stage.bytes / stage.seconds) if stage.bytes and stage.seconds else ""
        moved = nbytes(stage.bytes) if stage.bytes else ""
        table.add_row(stage.stage, f"{stage.seconds:,.1f}", f"{stage.seconds / report.seconds:.1%}", moved, rate)
    Console(file=out, highlight=False).print(table)


def _rates(rates: Sequence[float]) -> str:
    return f"{' / '.join(f'{rate:,.0f}' for rate in rates)} tokens/s" if rates else ""


def print_status(result: StatusReport) -> None:
    state = (
        f"complete since {result.finished}" if result.complete else "unfinished; run rayhs extract (or import) to go on"
    )
    rows = {
        "dataset": result.uri,
        "state": state,
        "model": result.model,
        "layers": f"{', '.join(map(str, result.layers))} of hidden size {result.hidden_size}",
        "stored as": f"{result.dtype}, {result.shard_format}",
        "shards": f"{result.committed_shards:,} of {result.shards:,} committed, {nbytes(result.bytes)}",
        "samples": f"{result.ok:,} of {result.samples:,}; {result.remaining:,} to go",
        "tokens": f"{result.tokens:,} stored, {result.planned_tokens:,} planned",
        "failed": f"{result.failed:,}",
        "rejected": f"{result.rejected:,}",
        **_reasons(result.reasons),
        **_errors(result.errors),
    }
    print_pairs(rows)


def print_failures(rows: Iterable[Mapping[str, Any]]) -> None:
    """A line a sample, tab-separated and streamed: there may be many."""
    first = True
    for row in rows:
        if first:
            sys.stdout.write("sample_id\tindex\tstatus\treason\n")
            first = False
        reason = " ".join(str(row["reason"] or "").split())
        sys.stdout.write(f"{row['sample_id']}\t{row['index']}\t{row['status']}\t{reason}\n")
    if first:
        sys.stdout.write("no failures\n")


def print_verify(report: VerifyReport, out: TextIO | None = None) -> None:
    file = out or sys.stdout
    for finding in report.findings:
        file.write(f"{finding}\n")
    if report.more_findings:
        file.write(f"and {report.more_findings:,} more problems\n")
    rows = {
        "verified": report.uri,
        "result": "sound" if report.ok else f"{len(report.findings) + report.more_findings:,} problems",
        "samples": f"{report.ok_samples:,} stored of {report.samples:,}, by its records",
        "tokens": f"{report.tokens:,}",
        "read": f"{nbytes(report.bytes)} in {report.shards:,} shards, {report.seconds:.1f} s",
    }
    if report.orphans:
        rows["orphans"] = (
            f"{report.orphans:,} objects, {nbytes(report.orphan_bytes)}, in no commit record; rayhs gc removes those "
            "of attempts that lost"
        )
    others = len(report.findings) - len(report.reference.over_limit if report.reference else []) - (not report.finished)
    if others:
        rows["repair"] = "rayhs extract RUN.yaml (or import) --repair makes what is damaged anew, and only that"
    elif not report.finished:
        rows["next"] = "rayhs extract RUN.yaml (or import) finishes it"
    if report.reference is not None:
        limits = f"{report.reference.limit:.2g} and {report.reference.token_limit}"
        rows["reference"] = f"{report.reference.model}, {len(report.reference.samples)} samples"
        for layer, error in report.reference.errors.items():
            mark = "over" if layer in report.reference.over_limit else "within"
            worst = f"worst token {report.reference.worst[layer]:.2e}"
            rows[f"  layer {layer}"] = f"relative error {error:.2e}, {worst}: {mark} the limits {limits}"
            rows[f"  layer {layer}"] += f"; the stored dtype alone {report.reference.rounding[layer]:.2e}"
            if recorded := report.recorded_errors.get(str(layer)):
                rows[f"  layer {layer}"] += f", recorded {recorded.mean:.2e}, at most {recorded.max:.2e}"
    print_pairs(rows, file)


def print_gc(report: GcReport) -> None:
    verb = "would be removed" if report.dry_run else "removed"
    for name in report.names:
        sys.stdout.write(f"{name}\n")
    rows = {
        "dataset": report.uri,
        "orphans": f"{report.objects:,} objects, {nbytes(report.bytes)} {verb}",
        "unfinished": f"{report.unfinished:,} writes, {nbytes(report.unfinished_bytes)} {verb}",
        "too young": f"{report.young:,} left, not older than {report.older_than / 3600:.3g} h",
    }
    if report.damaged:
        rows["undecided"] = f"{report.damaged:,} left, the commit records of their shards are damaged"
    print_pairs(rows)


def print_show(result: Mapping[str, Any], out: TextIO | None = None) -> None:
    file = out or sys.stdout
    identity, sample = result["identity"], result["sample"]
    shown = {key: _short(value) for key, value in identity.items()}
    print_pairs(shown, file)
    file.write("\n")
    if sample is None:
        file.write("no good sample\n")
        return
    rows = {
        "sample": f"{sample['sample_id']} (index {sample['index']})",
        "tokens": f"{sample['tokens']}, loss on {sample['loss_tokens']}",
        "first ids": _short(sample["first_token_ids"]),
        **{key: _short(value) for key, value in sample["columns"].items()},
    }
    for layer, found in sample["layers"].items():
        shape = " x ".join(map(str, found["shape"]))
        rows[f"layer {layer}"] = f"{shape}, norm {found['norm_mean']:.4g} on average, {found['norm_max']:.4g} at most"
    print_pairs(rows, file)


def _short(value: Any) -> str:
    if isinstance(value, Mapping):
        text = ", ".join(f"{k} {v}" for k, v in value.items())
    elif isinstance(value, list):
        text = ", ".join(map(str, value))
    else:
        text = str(value)
    text = " ".join(text.split())
    return text if len(text) <= 120 else text[:117] + "..."


def _errors(errors: Mapping[str, Mapping[str, float]]) -> dict[str, str]:
    return {f"  layer {k}": f"float8 error {e['mean']:.2%}, {e['max']:.2%} at most" for k, e in errors.items()}


def _reasons(reasons: Mapping[str, int]) -> dict[str, str]:
    ordered = sorted(reasons.items(), key=lambda item: (-item[1], item[0]))
    return {f"  {_short(reason) or 'no reason'}": f"{count:,}" for reason, count in ordered[:10]}


def print_pairs(rows: Mapping[str, str], out: TextIO | None = None) -> None:
    file = out or sys.stdout
    if not file.isatty():  # no width to fit: one long line each stays easy to grep
        width = max(map(len, rows), default=0)
        file.writelines(
            f"{name:{width}}  {' '.join(value.splitlines())}".rstrip() + "\n" for name, value in rows.items()
        )
        return
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold", overflow="fold")
    table.add_column(overflow="fold")
    for name, value in rows.items():
        # Text, not str: names and reasons come from data and may hold what looks like markup.
        table.add_row(Text(name), Text(value))
    Console(file=file, soft_wrap=False, highlight=False).print(table)
