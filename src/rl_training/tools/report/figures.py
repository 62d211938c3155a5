"""Learning curves: as SVG in the colours of the page's theme, and as a separate PNG."""

from __future__ import annotations

import dataclasses
import io
import re
from collections.abc import Callable, Sequence
from typing import Any

from rl_training.terminal import one_line
from rl_training.tools.report.format import compact, tick, time_unit
from rl_training.tools.report.stats import AXIS_NAMES, Axis, Curve, thin

COLOURS = 6
"""Number of colours; further lines reuse them with another dash pattern."""
_DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1.5, 1.5)), (0, (5, 1.5, 1.5, 1.5)))
_SET_ASIDE_DASH = (0, (2, 2))
_LONGEST_TEXT = 120
"""Most characters of a title or a label in a picture."""
_FEW = 12
"""Lines of at most this many points have markers."""


@dataclasses.dataclass(frozen=True)
class Line:
    """The curves of one group in a panel."""

    label: str
    order: int
    """Index among the groups of its environment; selects colour and dash."""
    curve: Curve | None
    not_aggregated: tuple[Curve, ...]
    """Curves of single runs that are not aggregated."""


@dataclasses.dataclass(frozen=True)
class Panel:
    """One metric of one environment against one axis."""

    env_id: str
    metric: str
    axis: Axis
    lines: tuple[Line, ...]


@dataclasses.dataclass(frozen=True)
class Theme:
    """Colours of a figure."""

    ink: str
    faint: str
    series: tuple[str, ...]


# Okabe and Ito's hues, darkened to 4.5:1 on white; the page has its own for dark.
_LIGHT = Theme(
    "#3c4149", "#e3e5e8", ("#0068a8", "#bf4a00", "#007a58", "#a1417a", "#8a5a00", "#565b63")
)
# Placeholder colours, which are replaced in the SVG by variables of the page's style.
_VARIABLES = Theme(
    "#0a0001", "#0a0002", tuple(f"#0b000{number}" for number in range(1, COLOURS + 1))
)


def panel_svg(panel: Panel, prefix: str, label: str) -> str:
    """Return the figure of a panel as inline SVG; ``prefix`` makes its ids unique."""
    return svg(lambda axes, theme: _draw(axes, panel, theme), prefix, label)


def svg(draw: Callable[[Any, Theme], object], prefix: str, label: str) -> str:
    """Return what ``draw`` draws as inline SVG without external references.

    ``prefix`` makes its ids unique; ``label`` is HTML that describes it.
    """
    import matplotlib as mpl
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.6, 2.9), layout="constrained")
    FigureCanvasSVG(figure)
    draw(figure.add_subplot(), _VARIABLES)
    text = io.StringIO()
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": prefix}):
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None})
    return _page_svg(text.getvalue(), prefix, label)


def environment_png(panels: Sequence[Panel]) -> bytes:
    """Return a PNG of all panels of an environment, with a legend."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    rows = (len(panels) + 1) // 2
    names = list(dict.fromkeys(line.label for panel in panels for line in panel.lines))
    height = 0.6 + 3.0 * rows + 0.24 * len(names)
    layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.1)
    figure = Figure(figsize=(10, height), layout=layout, facecolor="white")
    FigureCanvasAgg(figure)
    figure.suptitle(literal(panels[0].env_id), fontsize=13, color=_LIGHT.ink)
    handles: dict[str, Any] = {}
    for place, panel in enumerate(panels, start=1):
        axes = figure.add_subplot(rows, 2, place)
        handles |= _draw(axes, panel, _LIGHT)
        axes.set_title(literal(panel.metric), fontsize=10.5, color=_LIGHT.ink, loc="left")
    figure.legend(
        list(handles.values()),
        [literal(name) for name in handles],
        loc="outside lower left",
        frameon=False,
        fontsize=10,
        labelcolor=_LIGHT.ink,
    )
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=150, metadata={"Software": None})
    return picture.getvalue()


def _draw(axes: Any, panel: Panel, theme: Theme) -> dict[str, Any]:
    """Draw a panel and return the handles of its lines by label."""
    furthest = max((curve.x[-1] for curve in _curves(panel.lines)), default=1.0)
    unit, scale = time_unit(furthest) if panel.axis == "seconds" else ("", 1.0)
    handles: dict[str, Any] = {}
    for line in panel.lines:
        colour = theme.series[line.order % COLOURS]
        dash = _DASHES[line.order // COLOURS % len(_DASHES)]
        for curve in line.not_aggregated:
            (handle,) = axes.plot(
                *_plain(curve, scale), color=colour, linewidth=1.0, linestyle=_SET_ASIDE_DASH
            )
            handles.setdefault(line.label, handle)
        if line.curve is None:
            continue
        x, y = _plain(line.curve, scale)
        marker = "o" if line.curve.logged and len(x) <= _FEW else None
        if line.curve.low is not None:
            axes.fill_between(
                x, line.curve.low, line.curve.high, color=colour, alpha=0.17, linewidth=0
            )
            if len(x) == 1:  # a band of one point has no width
                axes.vlines(x, line.curve.low, line.curve.high, color=colour, linewidth=1.6)
        (handle,) = axes.plot(
            x, y, color=colour, linewidth=1.8, linestyle=dash, marker=marker, markersize=3.6
        )
        handles[line.label] = handle
    name = AXIS_NAMES[panel.axis]
    style_axes(axes, theme, f"{name} ({unit})" if panel.axis == "seconds" else name)
    return handles


def style_axes(axes: Any, theme: Theme, x_label: str) -> None:
    """Give axes the look of the page; the horizontal one begins at zero."""
    axes.set_facecolor("none")
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(theme.faint)
    axes.grid(axis="y", color=theme.faint, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=theme.ink, labelsize=9.5, length=0, pad=5)
    axes.set_xlabel(x_label, fontsize=9.5, color=theme.ink, labelpad=6)
    axes.margins(x=0.02, y=0.08)
    axes.set_xlim(left=0)
    axes.xaxis.get_major_locator().set_params(nbins=5)
    axes.yaxis.get_major_locator().set_params(nbins=5)
    axes.xaxis.set_major_formatter(lambda value, _: compact(value))
    axes.yaxis.set_major_formatter(lambda value, _: tick(value))


def has_curves(lines: Sequence[Line]) -> bool:
    """Return whether there is a curve to draw: seeds may have no common range."""
    return bool(_curves(lines))


def _curves(lines: Sequence[Line]) -> list[Curve]:
    own = [line.curve for line in lines if line.curve is not None and len(line.curve.x)]
    return own + [curve for line in lines for curve in line.not_aggregated if len(curve.x)]


def _plain(curve: Curve, scale: float) -> tuple[Any, Any]:
    return curve.x / scale, curve.y


def literal(text: str) -> str:
    """Return ``text`` shortened, without control characters, and with matplotlib's "$" escaped."""
    return one_line(text)[:_LONGEST_TEXT].replace("$", r"\$")


def _page_svg(svg: str, prefix: str, label: str) -> str:
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\sxmlns(:\w+)?="[^"]*"', "", svg)
    svg = re.sub(r'\b(id|clip-path|href)="(url\()?(#?)', rf'\1="\2\3{prefix}-', svg)
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"| height="[\d.]+pt"', r"\1", svg, count=2)
    variables = {_VARIABLES.ink: "--ink-soft", _VARIABLES.faint: "--rule"}
    variables |= {colour: f"--series-{i}" for i, colour in enumerate(_VARIABLES.series, start=1)}
    for colour, variable in variables.items():
        svg = svg.replace(colour, f"var({variable})")
    return svg.replace("<svg", f'<svg role="img" aria-label="{label}"', 1).strip()


def raw_curve(x: Any, y: Any) -> Curve:
    """Return the curve of a single run, thinned."""
    import numpy as np

    kept = np.unique(np.searchsorted(x, thin(x)))
    return Curve(x[kept], y[kept], logged=True)
