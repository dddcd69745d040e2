"""
``fencing timeline``: recordings, drawn as one SVG, with a lane for each lock, holder and resource.

The signs are shapes: no font is certain to have them.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fencing_sdk.cli._streams import check_output
from fencing_sdk.cli._svg import (
    FAINT,
    INK,
    PAPER,
    RULE,
    STRIPE,
    Element,
    add,
    canvas,
    cut,
    group,
    text,
    title,
    width_of,
    write,
)
from fencing_sdk.cli.recordings import DrawnAccess, Span, Story, lock_of, read_recording, stories_of
from fencing_sdk.errors import ConfigurationError, shown
from fencing_sdk.testing.history._facts import RecordedLease


def draw_recordings(recordings: Sequence[Path], svg: Path) -> None:
    """
    Draw the runs in *recordings*, which one machine made, into the file *svg*.

    Raises:
        ConfigurationError: a file cannot be read or written, or there is nothing to draw.
    """
    check_output(svg)
    stories = stories_of(read_recording(recordings))
    if not stories:
        msg = f"nothing to draw in {', '.join(shown(str(path)) for path in recordings)}"
        raise ConfigurationError(msg)
    try:
        svg.write_text(draw(stories), encoding="utf-8")
    except OSError as error:
        msg = f"cannot write {shown(str(svg))}: {error.strerror}"
        raise ConfigurationError(msg) from error


WIDTH = 1100
_LEFT, _RIGHT = 150, 30
_HEAD, _HEAD_WITHOUT_TITLE, _LANE, _BAR, _CAPTION, _AXIS = 68, 24, 54, 24, 36, 44
_ROOM_AT_THE_END = 1.25
"""The scale leaves some room after the last event, for what is said about it."""
_MOST_ROWS = 3

Lane = tuple[str, str]
"""What a lane shows (a lock, a holder, a storage), and its name."""


def draw(stories: Sequence[Story]) -> str:
    """Return the picture of *stories*, one panel under the other on one scale of time, as SVG text."""
    longest = max([1e-3, *(story.duration for story in stories)])
    scale = (WIDTH - _LEFT - _RIGHT) / (longest * _ROOM_AT_THE_END)
    panels = [_Panel(story, scale) for story in stories]
    bottom = sum(panel.height for panel in panels) + 6
    legend = Element("g")
    height = bottom + draw_legend(legend, stories, WIDTH)
    root = canvas(WIDTH, height)
    title(root, "Timeline. " + " ".join(f"{story.title}: {story.outcome}." for story in stories if story.title))
    define_pattern(root)
    top = 0.0
    for panel in panels:
        panel.draw(group(root, 0, top))
        top += panel.height
    legend.set("transform", f"translate(0 {bottom:g})")
    root.append(legend)
    return write(root)


@dataclass(slots=True)
class _TextRow:
    """Keeps the texts of one row apart."""

    taken: list[tuple[float, float]] = field(default_factory=list)
    """In their order."""

    def take(self, left: float, right: float) -> bool:
        """Reserve a stretch; False when another text is there."""
        place = bisect_left(self.taken, (left, right))
        before, after = self.taken[max(place - 1, 0) : place], self.taken[place : place + 1]
        if any(left < end and start < right for start, end in (*before, *after)):
            return False
        self.taken.insert(place, (left, right))
        return True


@dataclass(frozen=True, slots=True)
class _Caption:
    """What is said about one access, and where."""

    access: DrawnAccess
    lines: tuple[str, str]
    x: float
    row: int


class _Panel:
    """One story: its lanes from top to bottom, and the axis."""

    def __init__(self, story: Story, scale: float) -> None:
        self._story = story
        self._scale = scale
        tokens = sorted({lease.token for lease in story.leases})
        self._colours = {token: TOKENS[index % len(TOKENS)] for index, token in enumerate(tokens)}
        self._accesses: dict[str, list[DrawnAccess]] = {resource: [] for resource in story.resources}
        for access in story.accesses:
            self._accesses[access.resource].append(access)
        self._captions = {resource: self._arrange(resource) for resource in story.resources}
        self._middle: dict[Lane, float] = {}
        self._top = float(_HEAD if story.title or story.outcome else _HEAD_WITHOUT_TITLE)
        self._bottom = self._top
        for room, names in (("lock", story.locks), ("holder", story.lanes), ("storage", story.resources)):
            for name in names:
                self._middle[room, name] = self._bottom + _LANE / 2
                self._bottom += self._lane_height(room, name)
        self.height = self._bottom + _AXIS

    def draw(self, panel: Element) -> None:
        """Draw everything, what lies in the background first."""
        text(panel, 24, 36, self._story.title, size=19, weight=600)
        text(panel, 24, 57, self._story.outcome, fill=FAINT, size=15)
        self._draw_lanes(panel)
        self._draw_axis(panel)
        for wait in self._story.waits:
            self._draw_wait(panel, wait)
        for lease in self._story.leases:
            self._draw_grant(panel, lease)
            self._draw_lease(panel, lease)
        for freeze in self._story.freezes:
            self._draw_freeze(panel, freeze)
        for access in self._story.accesses:
            self._draw_arrow(panel, access)
        for lease in self._story.leases:
            self._draw_loss(panel, lease)
        for resource in self._story.resources:
            self._draw_storage(panel, resource)

    def _x(self, moment: float) -> float:
        return _LEFT + (moment - self._story.start) * self._scale

    def _seconds(self, moment: float) -> str:
        return f"{moment - self._story.start:.2f} s"

    def _lane_height(self, room: str, name: str) -> float:
        rows = 1 + max((caption.row for caption in self._captions[name]), default=0) if room == "storage" else 0
        return _LANE + rows * _CAPTION - (12 if rows else 0)

    def _arrange(self, resource: str) -> list[_Caption]:
        """Find a row for each caption; what must not be missing comes first, what has no room is left out."""
        rows = [_TextRow() for _ in range(_MOST_ROWS)]
        placed = [
            self._place(access, rows)
            for access in sorted(self._accesses[resource], key=lambda one: (not _telling(one), one.at))
        ]
        return [caption for caption in placed if caption is not None]

    def _place(self, access: DrawnAccess, rows: Sequence[_TextRow]) -> _Caption | None:
        lines = _words(access)
        x, half = self._x(access.at), max(width_of(line) for line in lines) / 2 + 1
        right, left = x + half - 8, x - half + 8
        tries = [right, x, left] if _telling(access) else [x, right, left]
        for index, row in enumerate(rows):
            for middle in tries:
                inside = middle - half > _LEFT - 52 and middle + half < WIDTH - 14
                if inside and row.take(middle - half, middle + half):
                    return _Caption(access, lines, middle, index)
        return None

    def _draw_lanes(self, panel: Element) -> None:
        for index, ((room, name), y) in enumerate(self._middle.items()):
            height = self._lane_height(room, name)
            add(panel, "rect", x=12, y=y - _LANE / 2, width=WIDTH - 24, height=height, fill=(STRIPE, PAPER)[index % 2])
            if room == "holder":
                text(panel, 24, y + 5, cut(name, 14), weight=600, tip=name)
            else:
                text(panel, 24, y - 3, room, size=14, weight=600)
                text(panel, 24, y + 14, cut(name, 16), fill=FAINT, tip=name)

    def _draw_axis(self, panel: Element) -> None:
        shown = (WIDTH - _RIGHT - _LEFT) / self._scale
        step = _step(shown / _ROOM_AT_THE_END)  # not by this story: a short one beside a long one had endless marks
        for index in range(math.floor(shown / step) + 1):
            x = _LEFT + index * step * self._scale
            add(panel, "line", x1=x, x2=x, y1=self._top, y2=self._bottom + 5, stroke=RULE)
            text(panel, x, self._bottom + 20, f"{index * step:g} s", fill=FAINT, anchor="middle")

    def _draw_grant(self, panel: Element, lease: RecordedLease) -> None:
        """The store's view: the grant, until the store may hand the lock on."""
        lane, span = ("lock", lock_of(lease)), (lease.acquired, self._story.handed_on(lease))
        tip = f"{lock_of(lease)}: token {lease.token}, granted at {self._seconds(lease.acquired)}"
        self._bar(panel, lane, span, self._colours[lease.token], tip)
        self._bar_text(panel, lane, span, f"token {lease.token}")

    def _draw_lease(self, panel: Element, lease: RecordedLease) -> None:
        """The holder's view: until its own deadline, which lies before the store's expiry."""
        lane, span = ("holder", lease.actor), (lease.acquired, self._story.used_until(lease))
        tip = f"{lease.actor} may work until {self._seconds(span[1])}: {lock_of(lease)}, token {lease.token}"
        self._bar(panel, lane, span, self._colours[lease.token], tip)
        for renewal in lease.renewals:
            notch = draw_renewal(panel, self._x(renewal), self._middle[lane] + _BAR / 2)
            title(notch, f"renewed at {self._seconds(renewal)}")
        self._bar_text(panel, lane, span, f"holds, token {lease.token}")
        if (band := self._story.safety_of(lease)) is not None:
            stops, hands_on = (self._seconds(moment) for moment in band)
            self._bar(
                panel, lane, band, AMBER, f"safety: the holder stops at {stops}, the store hands on at {hands_on}"
            )

    def _draw_wait(self, panel: Element, wait: Span) -> None:
        left, right, y = self._x(wait.start), self._x(wait.end), self._middle["holder", wait.lane]
        if right - left < 4:  # noqa: PLR2004  (pixels: too short to be seen)
            return
        line = add(panel, "line", x1=left, x2=right, y1=y, y2=y, stroke=FAINT, stroke_width=2)
        line.set("stroke-dasharray", "2 5")
        title(line, f"{wait.lane} waits for {wait.lock} for {wait.end - wait.start:.2f} s")
        if right - left > width_of("waits") + 8:
            text(panel, (left + right) / 2, y - 8, "waits", fill=FAINT, anchor="middle")

    def _draw_freeze(self, panel: Element, freeze: Span) -> None:
        y, lasted = self._middle["holder", freeze.lane], freeze.end - freeze.start
        left, width = self._x(freeze.start), max(2.0, lasted * self._scale)
        box = add(panel, "rect", x=left, y=y - 17, width=width, height=34, rx=3, fill=FROZEN, stroke=INK)
        box.set("stroke-dasharray", "4 3")
        title(box, f"{freeze.lane} is frozen for {lasted:.2f} s, from {self._seconds(freeze.start)}")
        words = f"frozen for {lasted:.1f} s"
        half = width_of(words) / 2 + 5
        if width > 3 * half:  # and what lies below can still be seen
            x = left + max(half + 5, width / 4)
            add(panel, "rect", x=x - half, y=y - 10, width=2 * half, height=20, rx=4, fill=PAPER, stroke=INK)
            text(panel, x, y + 4.5, words, weight=600, anchor="middle")

    def _draw_loss(self, panel: Element, lease: RecordedLease) -> None:
        if lease.lost is None:
            return
        x, y = self._x(lease.lost), self._middle["holder", lease.actor]
        mark = add(panel, "line", x1=x, x2=x, y1=y - 19, y2=y + 19, stroke=RED, stroke_width=3)
        title(mark, f"lease lost at {self._seconds(lease.lost)}: {lease.reason}")
        words = "LeaseLostError" + (f": {lease.reason}" if lease.reason else "")
        if x + 10 + width_of(words) < WIDTH - 14:
            text(panel, x + 10, y + 4.5, words, fill=RED, weight=600)
        else:
            text(panel, x - 8, y - 21, words, fill=RED, weight=600, anchor="end")

    def _draw_arrow(self, panel: Element, access: DrawnAccess) -> None:
        """From the holder down to the storage."""
        if access.kind == "fence":
            return
        x = self._x(access.at)
        top, bottom = self._middle["holder", access.lane] + _BAR / 2, self._middle["storage", access.resource]
        line = add(panel, "line", x1=x, x2=x, y1=top, y2=bottom, stroke=colour_of(access), stroke_width=1.5)
        if access.kind == "read":
            line.set("stroke-dasharray", "3 3")

    def _draw_storage(self, panel: Element, resource: str) -> None:
        y = self._middle["storage", resource]
        end = self._x(self._story.end)
        add(panel, "line", x1=_LEFT, x2=end, y1=y, y2=y, stroke=FAINT, stroke_width=1.5)
        for access in self._accesses[resource]:
            sign = draw_sign(panel, sign_of(access), self._x(access.at), y)
            said = " ".join(part for part in _words(access) if part)
            title(sign, f"{access.lane}, token {access.token}, at {self._seconds(access.at)}: {said}")
        for caption in self._captions[resource]:
            top = y + 27 + caption.row * _CAPTION
            text(panel, caption.x, top, caption.lines[0], fill=colour_of(caption.access), weight=600, anchor="middle")
            text(panel, caption.x, top + 15, caption.lines[1], anchor="middle")

    def _bar(self, panel: Element, lane: Lane, span: tuple[float, float], fill: str, tip: str) -> None:
        left, right = self._x(span[0]), self._x(span[1])
        box = {"x": left, "y": self._middle[lane] - _BAR / 2, "width": max(1.5, right - left), "height": _BAR}
        title(add(panel, "rect", **box, rx=3, fill=fill), tip)

    def _bar_text(self, panel: Element, lane: Lane, span: tuple[float, float], words: str) -> None:
        left, right = self._x(span[0]), self._x(span[1])
        if 1.2 * width_of(words) + 14 < right - left:  # bold digits are wide
            text(panel, left + 8, self._middle[lane] + 3.5, words, fill=PAPER, weight=600)


def _telling(access: DrawnAccess) -> bool:
    """Return whether the picture is about this access."""
    return sign_of(access) in {"refused", "stale"}


def _words(access: DrawnAccess) -> tuple[str, str]:
    """What is said about *access*, in two short lines."""
    if access.kind == "fence":
        return "fence raised", f"to {access.token}"
    if access.kind == "read":
        return "read", access.text
    if access.kind == "accepted" and not access.stale:
        return f"token {access.token} writes", access.text
    if access.stale:
        return f"token {access.token} < {access.fence}: accepted", access.text
    unwritten = f"not written: {access.text}" if access.text else ""
    why = "" if access.fence is None else f" < {access.fence}"
    why = " of two holders" if access.fence == access.token else why
    return f"token {access.token}{why}: refused", unwritten


def _step(duration: float) -> float:
    """Seconds between two marks of the axis: 1, 2 or 5 times a power of ten, five to ten marks."""
    rough = max(duration, 1e-3) / 8
    power = 10.0 ** math.floor(math.log10(rough))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)


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
