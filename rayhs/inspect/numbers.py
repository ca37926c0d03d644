"""Numbers as people read them."""

from __future__ import annotations

import math


def shown(value: float | None) -> str:
    """``12,345``, ``0.1235``, ``1.2e+12``; a dash where there is no number."""
    if value is None or not math.isfinite(value):
        return "–"  # noqa: RUF001 - a dash as people set it
    if isinstance(value, int):
        return f"{value:,}"
    if 1000 <= abs(value) < 1e9:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def percent(share: float | None) -> str:
    """``12.3 %``; small shares keep two digits."""
    if share is None or not math.isfinite(share):
        return "–"  # noqa: RUF001
    return f"{100 * share:.1f} %" if share == 0 or share >= 0.01 else f"{100 * share:.2g} %"
