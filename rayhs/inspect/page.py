"""The figures as one HTML page without scripts that loads nothing: it can be mailed, and opened offline.

Whatever comes out of the dataset (ids, reasons, names) is escaped; the page's own policy forbids requests besides.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from rayhs.errors import printable
from rayhs.inspect import svg
from rayhs.inspect.figures import Inspection, Lengths, Massive, States
from rayhs.inspect.numbers import percent, shown
from rayhs.inspect.tables import largest_table, layer_table, massive_table, read_states

_CSS = """
:root { color-scheme: light dark; --paper: #fff; --ink: #1b1f24; --soft: #57606a; --rule: #d8dee4;
  --main: #2563a8; --bad: #c2410c; }
@media (prefers-color-scheme: dark) {
  :root { --paper: #15181c; --ink: #e3e7eb; --soft: #9aa4ae; --rule: #343b43; --main: #6ea8e5; --bad: #f08c4a; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1rem; max-width: 60rem; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.4rem; line-height: 1.25; } h2 { font-size: 1.15rem; margin: 2rem 0 .5rem; }
p, figcaption { color: var(--soft); margin: .4rem 0; max-width: 45rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .9rem; }
th, td { padding: .25rem .7rem .25rem 0; border-bottom: 1px solid var(--rule); text-align: right; white-space: nowrap; }
th:first-child, td:first-child, .text td, .text th { text-align: left; }
.text td { white-space: normal; }
figure { margin: 1rem 0; } svg { display: block; width: 100%; max-width: 44rem; height: auto; }
svg text { fill: var(--soft); font-size: 11px; } .grid { stroke: var(--rule); } .ok, .cell { fill: var(--main); }
.failed { fill: var(--bad); } .band { fill: var(--main); fill-opacity: .2; }
.line { fill: none; stroke: var(--main); stroke-width: 2; } .dot { fill: var(--main); }
"""
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


def render(found: Inspection) -> str:
    """The page as text; write it in UTF-8."""
    parts = [
        f"<h1>{_safe(found.uri)}</h1>",
        _table(("", ""), _facts(found), "text"),
        *_lengths(found.lengths),
        *_layers(found.states),
        *_massive(found.states.massive),
        *_duplicates(found),
        *_reasons(found),
    ]
    body = "\n".join(parts)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>rayhs inspect {_safe(found.uri)}</title>
<style>{_CSS}</style>
</head>
<body>
{body}
</body>
</html>
"""


def _facts(found: Inspection) -> list[tuple[str, str]]:
    loss = found.loss
    return [
        ("model", found.model),
        ("states", f"layers {', '.join(found.states.layers)} of hidden size {found.hidden_size:,}, {found.dtype}"),
        ("samples", f"{found.ok:,} of {found.samples:,}; {found.failed:,} failed, {found.rejected:,} rejected"),
        ("loss", f"{percent(loss.share)} of {loss.tokens:,} tokens; {loss.samples_without:,} samples have none"),
        ("duplicates", f"{found.duplicates.extra:,} samples repeat another's token ids"),
        ("states read", read_states(found.states, found.ok)),
    ]


def _lengths(lengths: Lengths) -> list[str]:
    rows = [
        (name, *(shown(value) for value in (own.count, own.total, own.mean, own.min, own.median, own.p99, own.max)))
        for name, own in (("ok", lengths.ok), ("failed", lengths.failed))
        if own is not None
    ]
    bins = [(one.first, one.last) for one in lengths.histogram]
    series = {name: [getattr(one, name) for one in lengths.histogram] for name in ("ok", "failed")}
    plot = svg.bars(bins, series, "length (tokens; bins begin at powers of √2)", "samples")
    return [
        "<h2>Lengths</h2>",
        _table(("status", "samples", "tokens", "mean", "min", "median", "p99", "max"), rows),
        _figure(plot if lengths.histogram else "", "All samples; failed ones as planned."),
    ]


def _layers(states: States) -> list[str]:
    header, rows = layer_table(states)
    ids, own = [int(layer) for layer in states.layers], list(states.layers.values())
    band = [(layer.norm_p1, layer.norm_p99) for layer in own]
    norms = svg.lines(ids, [one.norm_median for one in own], "layer id", "norm of a token's state", band=band, log=True)
    pairs = [(layer, one.cosine_before) for layer, one in zip(ids, own, strict=True) if one.cosine_before is not None]
    cosines = svg.lines([k for k, _ in pairs], [c for _, c in pairs], "layer id", "mean cosine", log=False)
    return [
        "<h2>Layers</h2>",
        "<p>Layer k is the residual stream after k decoder layers. Median and p99 are within 0.5 %.</p>",
        _table(header, rows),
        _figure(norms, "Euclidean norm of a token's state: median, and the band from p1 to p99; logarithmic."),
        _figure(
            cosines, "Cosine between a token's states in a layer and in the stored layer before, mean over tokens."
        ),
    ]


def _massive(massive: Massive) -> list[str]:
    definition = (
        "<h2>Massive activations</h2><p>Values over 100 and at least 1000 times the median magnitude of their hidden "
        "state, which is all of a layer in one sample (Sun et al. 2024, arXiv:2402.17762). A massive token has one.</p>"
    )
    found = {layer: own.positions for layer, own in massive.layers.items() if own.tokens}
    if not found:
        return [definition, "<p>None.</p>"]
    x_title = "position in the sample (tokens; bins begin at powers of 2)"
    plot = svg.count_map(list(found), massive.position_bins, list(found.values()), x_title, "layer id")
    return [
        definition,
        _table(*massive_table(massive)),
        _figure(plot, "Massive tokens by position, the fuller the more (logarithmic)."),
        "<p>The largest, one a layer and dimension:</p>",
        _table(*largest_table(massive)),
    ]


def _duplicates(found: Inspection) -> list[str]:
    own = found.duplicates
    if not own.groups:
        return []
    rows = [(one.first_id, shown(one.samples), shown(one.tokens)) for one in own.largest]
    text = f"<p>{own.groups:,} groups of samples have the same token ids; {own.extra:,} samples repeat another.</p>"
    return ["<h2>Duplicates</h2>", text, _table(("first sample", "samples", "tokens"), rows)]


def _reasons(found: Inspection) -> list[str]:
    rows = [(why, status, shown(count)) for status, reasons in found.reasons.items() for why, count in reasons.items()]
    return ["<h2>Samples without states</h2>", _table(("reason", "status", "samples"), rows[:50])] if rows else []


def _table(header: Sequence[str], rows: Iterable[Sequence[str]], kind: str = "") -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in header) if any(header) else ""
    lines = [f"<tr>{''.join(f'<td>{_safe(cell)}</td>' for cell in row)}</tr>" for row in rows]
    return (
        f'<div class="wide"><table class="{kind}">{f"<tr>{head}</tr>" if head else ""}\n'
        + "\n".join(lines)
        + "</table></div>"
    )


def _figure(plot: str, caption: str) -> str:
    return f"<figure>{plot}<figcaption>{escape(caption)}</figcaption></figure>" if plot else ""


def _safe(text: str) -> str:
    return escape(printable(text))
