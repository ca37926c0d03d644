"""Small plots as SVG text: bars, lines with a band, a map of counts. Colours are CSS variables of the page."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from rayhs.inspect.numbers import shown

# In units of the viewBox, small enough that text is readable where the plot is as wide as a phone.
_WIDTH, _HEIGHT = 480, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 12, 10, 46
_MOST_LABELS = 12  # of the y axis

Bin = tuple[int, int]  # first and last, both included


@dataclass(frozen=True)
class Scale:
    """Values from ``low`` to ``high`` at pixels from ``start`` to ``end``, linear or logarithmic."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def at(self, value: float) -> float:
        low, high, value = (math.log10(v) if self.log else v for v in (self.low, self.high, value))
        return self.start + (self.end - self.start) * ((value - low) / (high - low) if high > low else 0.5)

    def ticks(self) -> list[float]:
        """Round values in range, about five."""
        if self.log and self.high / self.low >= 10:
            first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
            powers = [10.0**power for power in range(first, last + 1, max(1, round((last - first) / 5)))]
            within = [power * times for power in powers for times in ((1, 2, 5) if last - first < 4 else (1,))]
            return [value for value in within if self.low <= value <= self.high]
        step = _round_step((self.high - self.low) / 5)
        return [k * step for k in range(math.ceil(self.low / step), math.floor(self.high / step) + 1)] if step else []


def _round_step(rough: float) -> float:
    if rough <= 0:
        return 0.0
    power = 10.0 ** math.floor(math.log10(rough))
    return next(power * times for times in (1, 2, 5, 10) if power * times >= rough)


def bars(bins: Sequence[Bin], series: Mapping[str, Sequence[int]], x_title: str, y_title: str) -> str:
    """Stacked bars, one a bin; ``series`` are CSS classes with a height a bin."""
    totals = [sum(parts) for parts in zip(*series.values(), strict=True)]
    scale = Scale(0, max([1, *totals]), _HEIGHT - _BOTTOM, _TOP)
    width = (_WIDTH - _LEFT - _RIGHT) / max(1, len(bins))
    marks = []
    for i, own in enumerate(bins):
        below = 0
        for name, heights in series.items():
            top, bottom = scale.at(below + heights[i]), scale.at(below)
            if heights[i]:
                box = f'x="{_LEFT + i * width + 0.5:.1f}" y="{top:.1f}"'
                size = f'width="{width - 1:.1f}" height="{bottom - top:.1f}"'
                marks.append(
                    f'<rect class="{name}" {box} {size}>{_hint(f"{_range(own)}: {heights[i]:,} {name}")}</rect>'
                )
            below += heights[i]
    centres = [_LEFT + (i + 0.5) * width for i in range(len(bins))]
    return _plot([*_y_axis(scale), *_labels(centres, _firsts(bins)), *marks], x_title, y_title)


def lines(
    x: Sequence[int],
    y: Sequence[float],
    x_title: str,
    y_title: str,
    *,
    band: Sequence[tuple[float, float]] = (),
    log: bool,
) -> str:
    """A line through the points, over a band from low to high where there is one."""
    values = [*y, *(value for pair in band for value in pair)]
    values = [value for value in values if math.isfinite(value) and (value > 0 or not log)]
    if len(values) < len(y) + 2 * len(band) or not values:
        return ""
    low, high = min(values), max(values)
    scale = _around(low, high, log)
    across = Scale(min(x), max(x), _LEFT + 10, _WIDTH - _RIGHT - 10)
    places = [across.at(layer) for layer in x]
    marks = [_area(places, [scale.at(a) for a, _ in band], [scale.at(b) for _, b in band])] if band else []
    heights = [scale.at(value) for value in y]
    points = " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(places, heights, strict=True))
    marks.append(f'<polyline class="line" points="{points}"/>')
    for i, (a, b) in enumerate(zip(places, heights, strict=True)):
        between = f", p1 {shown(band[i][0])}, p99 {shown(band[i][1])}" if band else ""
        marks.append(
            f'<circle class="dot" cx="{a:.1f}" cy="{b:.1f}" r="3">{_hint(f"{x[i]}: {shown(y[i])}{between}")}</circle>'
        )
    return _plot([*_y_axis(scale), *_labels(places, [str(layer) for layer in x]), *marks], x_title, y_title)


def _around(low: float, high: float, log: bool) -> Scale:
    if log:
        return Scale(low / 1.2, high * 1.2, _HEIGHT - _BOTTOM, _TOP, True)
    room = 0.08 * (high - low) or 0.1
    return Scale(low - room, high + room, _HEIGHT - _BOTTOM, _TOP)


def _area(places: Sequence[float], lows: Sequence[float], highs: Sequence[float]) -> str:
    edge = [*zip(places, highs, strict=True), *reversed(list(zip(places, lows, strict=True)))]
    points = " ".join(f"{a:.1f},{b:.1f}" for a, b in edge)
    return f'<polygon class="band" points="{points}"/>'


def count_map(
    rows: Sequence[str], columns: Sequence[Bin], counts: Sequence[Sequence[int]], x_title: str, y_title: str
) -> str:
    """A box for each row and column, the fuller the larger the logarithm of its count."""
    width, height = (_WIDTH - _LEFT - _RIGHT) / len(columns), (_HEIGHT - _TOP - _BOTTOM) / len(rows)
    most = max(1, *(count for row in counts for count in row))
    marks = []
    for i, row in enumerate(counts):
        for j, count in enumerate(row):
            share = math.log1p(count) / math.log1p(most)
            box = f'x="{_LEFT + j * width + 0.5:.1f}" y="{_TOP + i * height + 0.5:.1f}"'
            size = f'width="{width - 1:.1f}" height="{max(1.0, height - 1):.1f}"'
            hint = _hint(f"layer {rows[i]}, position {_range(columns[j])}: {count:,}")
            marks.append(f'<rect class="cell" {box} {size} fill-opacity="{0.05 + 0.95 * share:.2f}">{hint}</rect>')
    centres = [_TOP + (i + 0.5) * height for i in range(len(rows))]
    down = [_text(_LEFT - 6, centres[i] + 4, rows[i], "end") for i in _thinned(len(rows))]
    across = _labels([_LEFT + (j + 0.5) * width for j in range(len(columns))], _firsts(columns))
    return _plot([*down, *across, *marks], x_title, y_title)


def _plot(parts: Sequence[str], x_title: str, y_title: str) -> str:
    middle = (_TOP + _HEIGHT - _BOTTOM) / 2
    titles = [
        _text((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 8, x_title, "middle"),
        f'<text x="12" y="{middle}" text-anchor="middle" transform="rotate(-90 12 {middle})">{escape(y_title)}</text>',
    ]
    label = escape(f"{y_title} by {x_title}")
    body = "\n".join([*parts, *titles])
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{label}">\n{body}\n</svg>'


def _y_axis(scale: Scale) -> list[str]:
    parts = []
    for value in scale.ticks():
        y = scale.at(value)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        # 0.30000000000000004 is 0.3, and 20000.0 is 20,000.
        value = round(value, 12)
        parts.append(
            _text(_LEFT - 6, y + 4, shown(int(value) if value.is_integer() and abs(value) < 1e9 else value), "end")
        )
    return parts


def _labels(places: Sequence[float], labels: Sequence[str]) -> list[str]:
    """Below the x axis, those that don't touch the one before."""
    parts, end = [], -math.inf
    for x, label in zip(places, labels, strict=True):
        half = 3.5 * len(label) + 3
        if x - half >= end:
            parts.append(_text(x, _HEIGHT - _BOTTOM + 16, label, "middle"))
            end = x + half
    return parts


def _thinned(count: int) -> range:
    return range(0, count, max(1, -(-count // _MOST_LABELS)))


def _firsts(bins: Sequence[Bin]) -> list[str]:
    return [f"{first:,}" for first, _ in bins]


def _range(own: Bin) -> str:
    first, last = own
    return f"{first:,}" if first == last else f"{first:,} to {last:,}"


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _hint(text: str) -> str:
    return f"<title>{escape(text)}</title>"
