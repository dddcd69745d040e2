"""The signs of a picture and the legend that explains them. They are shapes: no font is certain to have them."""

from __future__ import annotations

from collections.abc import Sequence

from fencing_sdk.cli._story import DrawnAccess, Story
from fencing_sdk.cli._svg import FAINT, INK, PAPER, RULE, Element, add, group, text, width_of

AMBER, GREEN, RED = "#f4b740", "#15803d", "#c81e1e"
TOKENS = ("#2563eb", "#0f9488", "#7c3aed", "#be185d", "#4d7c0f", "#b45309")
FROZEN = "url(#frozen)"

_MEANINGS = {
    "lease": "lease, coloured by token",
    "renewal": "renewal",
    "safety": "safety band: the holder stops before the store hands on",
    "frozen": "process frozen",
    "read": "read",
    "accepted": "write accepted",
    "stale": "late write accepted",
    "refused": "late write refused",
    "fence": "fence raised",
}
_SHAPES = {"accepted": "M-4.5 0.5l3 3.5l6 -7", "refused": "M-4 -4l8 8M4 -4l-8 8", "stale": "M0 -5.5v6M0 4.2v1"}


def sign_of(access: DrawnAccess) -> str:
    """The name of the sign for *access*."""
    return "stale" if access.stale else access.kind


def colour_of(access: DrawnAccess) -> str:
    """The colour of what is said about *access*."""
    return {"accepted": GREEN, "read": FAINT, "fence": INK}.get(sign_of(access), RED)


def draw_sign(parent: Element, name: str, x: float, y: float) -> Element:
    """A tick, a cross, an exclamation mark, a ring, or a post."""
    sign = group(parent, x, y)
    if name == "fence":
        add(sign, "path", d="M0 -11v22M-4 -11h8M-4 11h8", stroke=INK, stroke_width=2.5, fill="none")
    elif name == "read":
        add(sign, "circle", r=5, fill=PAPER, stroke=FAINT, stroke_width=2)
    else:
        add(sign, "circle", r=10, fill=GREEN if name == "accepted" else RED, stroke=PAPER, stroke_width=1.5)
        add(sign, "path", d=_SHAPES[name], stroke=PAPER, stroke_width=2.4, fill="none", stroke_linecap="round")
    return sign


def define_pattern(root: Element) -> None:
    """The hatching of what is frozen: what lies below stays visible."""
    pattern = add(add(root, "defs"), "pattern", id="frozen", width=8, height=8, patternTransform="rotate(45)")
    pattern.set("patternUnits", "userSpaceOnUse")
    add(pattern, "rect", width=8, height=8, fill=PAPER, fill_opacity="0.35")
    add(pattern, "line", x1=0, x2=0, y1=0, y2=8, stroke=INK, stroke_opacity="0.45", stroke_width=3)


def draw_legend(parent: Element, stories: Sequence[Story], width: int) -> float:
    """Explain the signs that appear, and no others; return the height that took."""
    add(parent, "line", x1=12, x2=width - 12, y1=0, y2=0, stroke=RULE)
    x, y = 24.0, 24.0
    for name in [name for name in _MEANINGS if name in _appearing(stories)]:
        needed = 30 + width_of(_MEANINGS[name])
        if x + needed > width - 20:
            x, y = 24.0, y + 28
        _swatch(parent, name, x, y)
        text(parent, x + 30, y + 4.5, _MEANINGS[name], fill=FAINT)
        x += needed + 22
    return y + 20


def _appearing(stories: Sequence[Story]) -> set[str]:
    leases = [lease for story in stories for lease in story.leases]
    shown = {
        "lease": bool(leases),
        "renewal": any(lease.renewals for lease in leases),
        "safety": any(story.safety_of(lease) is not None for story in stories for lease in story.leases),
        "frozen": any(story.freezes for story in stories),
    }
    return {name for name, appears in shown.items() if appears} | {
        sign_of(access) for story in stories for access in story.accesses
    }


def _swatch(parent: Element, name: str, x: float, y: float) -> None:
    fills = {"lease": TOKENS[0], "renewal": TOKENS[0], "safety": AMBER, "frozen": FROZEN}
    if name not in fills:
        draw_sign(parent, name, x + 11, y)
        return
    box = add(parent, "rect", x=x, y=y - 8, width=22, height=16, rx=3, fill=fills[name])
    if name == "frozen":
        box.set("stroke", INK)
        box.set("stroke-dasharray", "4 3")
    if name == "renewal":
        draw_renewal(parent, x + 11, y + 8)


def draw_renewal(parent: Element, x: float, bottom: float) -> Element:
    """A notch in the lower edge of a bar."""
    return add(parent, "line", x1=x, x2=x, y1=bottom - 5, y2=bottom, stroke=PAPER, stroke_width=2.5)
