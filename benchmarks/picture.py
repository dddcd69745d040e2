"""A chart of bars, as SVG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

WIDTH, ROW, LEFT, RIGHT = 720, 22, 220, 90
_STYLE = (
    "text{font:13px system-ui,sans-serif;fill:#1f2328}.head{font-weight:600}.bar{fill:#4c78a8}"
    "@media(prefers-color-scheme:dark){text{fill:#e6edf3}.bar{fill:#7aa6d6}}"
)


def bars(title: str, groups: Mapping[str, Sequence[tuple[str, float]]], *, unit: str) -> str:
    """
    Draw one bar for each value, under the name of its group. All bars have one scale.

    Args:
        title: What the chart shows.

        groups: The bars of each group: a name and a value.

        unit: Of the values.
    """
    longest = max(value for group in groups.values() for _, value in group)
    lines, y = [], 40
    for name, group in groups.items():
        lines.append(f'<text class="head" x="10" y="{y + 15}">{escape(name)}</text>')
        for label, value in group:
            length = (WIDTH - LEFT - RIGHT) * value / longest
            lines.append(f'<text x="{LEFT - 8}" y="{y + 15}" text-anchor="end">{escape(label)}</text>')
            lines.append(
                f'<rect class="bar" x="{LEFT}" y="{y + 3}" width="{max(1.0, length):.1f}" height="{ROW - 7}"/>'
            )
            lines.append(f'<text x="{LEFT + length + 6:.1f}" y="{y + 15}">{value:.2f} {escape(unit)}</text>')
            y += ROW
        y += 8
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y}" role="img" aria-label="{escape(title)}">'
    caption = f'<text class="head" x="10" y="22">{escape(title)}</text>'
    return "\n".join([head, f"<style>{_STYLE}</style>", caption, *lines, "</svg>", ""])
