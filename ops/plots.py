"""Line plots as Markdown images. An SVG string takes microseconds; a plotting library would cost more per step than all
other bookkeeping together."""

from __future__ import annotations

import base64
from html import escape

WIDTH, HEIGHT, LEFT, TOP = 560, 180, 70, 28
COLOURS = ("#4f43dd", "#d9731a", "#2a8f5b", "#b0306a", "#6b6b6b")

Points = list[tuple[int, float]]
"""(step, value), in order."""


def line_plot(points: Points, title: str) -> str:
    """Markdown image of a value over steps; says so when there is nothing to draw yet."""
    return lines_plot({"": points}, title)


def lines_plot(lines: dict[str, Points], title: str) -> str:
    """Markdown image of several runs' values over steps, on one scale, by name; those without a point are left out."""
    image = lines_svg(lines, title)
    if not image:
        return f"{title}: no steps yet"
    return f"![{title}](data:image/svg+xml;base64,{base64.b64encode(image.encode()).decode()})"


def lines_svg(lines: dict[str, Points], title: str) -> str:
    """The image of `lines_plot` as it stands in a file; empty when there is nothing to draw."""
    drawn = {name: points for name, points in lines.items() if points}
    if not drawn:
        return ""
    steps = [step for points in drawn.values() for step, _ in points]
    values = [value for points in drawn.values() for _, value in points]
    first, last, low, high = min(steps), max(steps), min(values), max(values)
    width, span = (last - first) or 1, (high - low) or 1.0
    curves = []
    for number, (name, points) in enumerate(drawn.items()):
        colour = COLOURS[number % len(COLOURS)]
        x = [LEFT + (WIDTH - LEFT - 10) * (step - first) / width for step, _ in points]
        y = [HEIGHT - 24 - (HEIGHT - 24 - TOP) * (value - low) / span for _, value in points]
        line = " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(x, y, strict=True))
        curves.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        curves.append(f'<circle cx="{x[-1]:.1f}" cy="{y[-1]:.1f}" r="3" fill="{colour}"/>')
        place = f'x="{WIDTH - 10}" y="{16 + 13 * number}" text-anchor="end" fill="{colour}"'
        curves.append(f"<text {place}>{escape(name)}</text>" if name else "")
    style = 'font-family="sans-serif" font-size="11"'
    return f"""<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" {style}>
<rect width="100%" height="100%" fill="white"/>
<text x="{LEFT}" y="16" font-size="13">{escape(title)}</text>
<text x="{LEFT - 6}" y="{TOP + 4}" text-anchor="end">{high:.4g}</text>
<text x="{LEFT - 6}" y="{HEIGHT - 20}" text-anchor="end">{low:.4g}</text>
<text x="{LEFT}" y="{HEIGHT - 6}">step {first}</text>
<text x="{WIDTH - 10}" y="{HEIGHT - 6}" text-anchor="end">step {last}</text>
<path d="M{LEFT} {TOP}V{HEIGHT - 24}H{WIDTH - 10}" fill="none" stroke="#999"/>
{"".join(curves)}
</svg>"""
