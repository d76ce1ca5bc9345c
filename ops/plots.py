"""A line plot as a Markdown image. An SVG string takes microseconds; a plotting library would cost more per step than
all other bookkeeping together."""

from __future__ import annotations

import base64
from html import escape

WIDTH, HEIGHT, LEFT, TOP = 560, 180, 70, 28


def line_plot(points: list[tuple[int, float]], title: str) -> str:
    """Markdown image of a value over steps; says so when there is nothing to draw yet."""
    if not points:
        return f"{title}: no steps yet"
    image = base64.b64encode(_svg(points, title).encode()).decode()
    return f"![{title}](data:image/svg+xml;base64,{image})"


def _svg(points: list[tuple[int, float]], title: str) -> str:
    steps, values = zip(*points, strict=True)
    low, high = min(values), max(values)
    span, first = (high - low) or 1.0, steps[0]
    width = (steps[-1] - first) or 1
    x = [LEFT + (WIDTH - LEFT - 10) * (step - first) / width for step in steps]
    y = [HEIGHT - 24 - (HEIGHT - 24 - TOP) * (value - low) / span for value in values]
    line = " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(x, y, strict=True))
    style = 'font-family="sans-serif" font-size="11"'
    return f"""<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" {style}>
<rect width="100%" height="100%" fill="white"/>
<text x="{LEFT}" y="16" font-size="13">{escape(title)}</text>
<text x="{LEFT - 6}" y="{TOP + 4}" text-anchor="end">{high:.4g}</text>
<text x="{LEFT - 6}" y="{HEIGHT - 20}" text-anchor="end">{low:.4g}</text>
<text x="{LEFT}" y="{HEIGHT - 6}">step {first}</text>
<text x="{WIDTH - 10}" y="{HEIGHT - 6}" text-anchor="end">step {steps[-1]}</text>
<path d="M{LEFT} {TOP}V{HEIGHT - 24}H{WIDTH - 10}" fill="none" stroke="#999"/>
<polyline points="{line}" fill="none" stroke="#4f43dd" stroke-width="2"/>
<circle cx="{x[-1]:.1f}" cy="{y[-1]:.1f}" r="3" fill="#4f43dd"/>
</svg>"""
