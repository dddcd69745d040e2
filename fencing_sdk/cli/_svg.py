"""
The few SVG elements a picture is made of.

Only `xml.etree` writes the text of a recording, so nothing in it can become markup.
"""

from __future__ import annotations

import xml.etree.ElementTree as ET

Element = ET.Element

INK, FAINT, RULE, PAPER, STRIPE = "#1f2933", "#5f6c7b", "#d9dee5", "#ffffff", "#f5f7fa"
_FONT = "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', Helvetica, Arial, sans-serif"


def canvas(width: int, height: float) -> Element:
    """An empty picture on light paper, which reads the same on a light and on a dark page."""
    size = {"viewBox": f"0 0 {width} {short(height)}", "width": str(width), "height": short(height)}
    root = Element("svg", {"xmlns": "http://www.w3.org/2000/svg", **size, "font-family": _FONT, "role": "img"})
    add(root, "rect", x=0.5, y=0.5, width=width - 1, height=height - 1, rx=10, fill=PAPER, stroke=RULE)
    return root


def write(root: Element) -> str:
    """The picture as text."""
    ET.indent(root)
    return ET.tostring(root, encoding="unicode") + "\n"


def add(parent: Element, tag: str, **attributes: float | str) -> Element:
    """Append an element; underscores in the names of attributes stand for hyphens."""
    return ET.SubElement(parent, tag, {key.replace("_", "-"): short(value) for key, value in attributes.items()})


def group(parent: Element, x: float, y: float) -> Element:
    """Append a group with an origin of its own."""
    return add(parent, "g", transform=f"translate({short(x)} {short(y)})")


def text(
    parent: Element,
    x: float,
    y: float,
    words: str,
    *,
    fill: str = INK,
    size: int = 13,
    weight: int = 400,
    anchor: str = "start",
    tip: str = "",
) -> None:
    """Append a line of text; *tip* is shown where it says more than the text."""
    if not words:
        return
    node = add(parent, "text", x=x, y=y, fill=fill, font_size=size, font_weight=weight, text_anchor=anchor)
    node.text = _clean(words)
    if tip not in {"", words}:
        title(node, tip)


def title(node: Element, words: str) -> None:
    """Give *node* a tooltip."""
    tip = Element("title")
    tip.text = _clean(words)
    node.insert(0, tip)


def cut(words: str, limit: int) -> str:
    """Shorten *words* to *limit* characters."""
    return words if len(words) <= limit else words[: limit - 1] + "…"


def width_of(words: str, size: int = 13) -> float:
    """Guess generously how wide *words* are: fonts differ, and a gap looks better than an overlap."""
    return len(words) * size * 0.6


def short(value: float | str) -> str:
    """A number with one decimal at most."""
    return value if isinstance(value, str) else f"{round(value, 1):g}"


def _clean(words: str) -> str:
    """Replace control characters and lone surrogates: XML cannot hold them, however they are escaped."""
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in words)
