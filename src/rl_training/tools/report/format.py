"""Numbers, durations and settings as readable text."""

from __future__ import annotations

import json
import math
from html import escape
from typing import Any

from rl_training.terminal import printable

NONE = "\N{EN DASH}"
_MINUS = "\N{MINUS SIGN}"


def compact(value: float) -> str:
    """Return a number of steps with three digits: 1.5k, 2M."""
    for limit, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:.3g}{suffix}".replace("-", _MINUS)
    return f"{value:.3g}".replace("-", _MINUS)


def tick(value: float) -> str:
    """Return an axis label for a return: up to five digits in full."""
    return compact(value) if abs(value) >= 1e5 else f"{value:,.5g}".replace("-", _MINUS)


def number(value: float | None) -> str:
    """Return a score with about four digits, in powers of ten only if it is tiny or huge."""
    if value is None or not math.isfinite(value):
        return NONE
    size = abs(value)
    if size >= 1e15:
        text = f"{value:.4g}"
    elif size >= 1000:
        text = f"{value:,.0f}"
    elif size >= 100:
        text = f"{value:.1f}"
    elif size >= 0.1 or size == 0:
        text = f"{value:.2f}"
    else:
        text = f"{value:.3g}"
    return text.replace("-", _MINUS)


def whole(value: float) -> str:
    """Return a count with thousands separators."""
    return f"{value:,.0f}"


def duration(seconds: float) -> str:
    """Return a duration such as ``3.6 s``, ``4 min 10 s`` or ``2 h 05 min``."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def time_unit(seconds: float) -> tuple[str, float]:
    """Return the unit of a time axis up to ``seconds``, and that unit in seconds."""
    if seconds < 120:
        return "s", 1.0
    return ("min", 60.0) if seconds < 7200 else ("h", 3600.0)


def setting(value: Any) -> str:
    """Return a config value almost as it is written in YAML."""
    return value if isinstance(value, str) else json.dumps(value, default=str)


def html(value: Any) -> str:
    """Return text escaped for HTML, attributes included; control characters are escaped, too."""
    return escape(plain(value), quote=True)


def plain(value: Any) -> str:
    """Return text with control characters escaped, as a page may show it."""
    return printable(_decoded(str(value)))


def _decoded(text: str) -> str:
    """Return a file name decoded as UTF-8 where Python's file system encoding failed."""
    try:
        return text.encode("utf-8", "surrogateescape").decode("utf-8")
    except UnicodeError:
        return text
