"""
The picture of ``fencing demo``: one panel for each run, with a lane for the lock, for each worker and for the storage.

The signs are shapes: no font is certain to have them. Only `xml.etree` writes text, so nothing in it can become markup.
"""

from __future__ import annotations

import math
import xml.etree.ElementTree as ET
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Line = Mapping[str, Any]
"""One recorded event: at least ``t`` in seconds, ``kind``, and ``actor``."""

WIDTH = 1100
_LEFT, _RIGHT, _HEAD, _LANE, _BAR, _CAPTION, _AXIS = 150, 30, 68, 54, 24, 36, 44
_ROOM_AT_THE_END = 1.25
"""The scale leaves some room after the last event, for what is said about it."""
_ROWS = 3
"""The most rows of captions below the storage."""
_INK, _FAINT, _RULE, _PAPER, _STRIPE = "#1f2933", "#5f6c7b", "#d9dee5", "#ffffff", "#f5f7fa"
_AMBER, _GREEN, _RED, _FROZEN = "#f4b740", "#15803d", "#c81e1e", "url(#frozen)"
_TOKENS = ("#2563eb", "#0f9488")
_FONT = "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', Helvetica, Arial, sans-serif"
_SHAPES = {"accepted": "M-4.5 0.5l3 3.5l6 -7", "refused": "M-4 -4l8 8M4 -4l-8 8", "stale": "M0 -5.5v6M0 4.2v1"}
_SIGNS = {"read": "read", "fence_raised": "fence", "write_accepted": "accepted", "write_refused": "refused"}
_COLOURS = {"accepted": _GREEN, "read": _FAINT, "fence": _INK, "refused": _RED, "stale": _RED}
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


@dataclass(slots=True)
class _Lease:
    """One lease of a worker, as recorded."""

    actor: str
    token: int
    start: float
    ttl: float
    deadline: float
    expires: float
    """When the store may hand on."""
    lost: float = math.inf
    reason: str = ""
    renewals: list[float] = field(default_factory=list)


class _Run:
    """One run of the demo: a frozen worker, and another that takes over."""

    def __init__(self, title: str, outcome: str, lines: Sequence[Line]) -> None:
        self.title, self.outcome = title, outcome
        events = [line for line in lines if line["kind"] not in {"run", "ready", "outcome"}]
        events.sort(key=lambda line: float(line["t"]))
        self.start, self.end = float(events[0]["t"]), float(events[-1]["t"])
        self.leases: dict[str, _Lease] = {}
        self.waits: dict[str, float] = {}
        self.freeze = ("", self.start, self.start)
        self.accesses = _accesses(events)
        """The sign, the actor and the event of what reached the storage."""
        for line in events:
            self._see(line["kind"], line.get("lane", line["actor"]), line["t"], line)

    def _see(self, kind: str, actor: str, at: float, line: Line) -> None:
        lease = self.leases.get(actor)
        if kind == "acquiring":
            self.waits[actor] = at
        elif kind == "acquired":
            for before in self.leases.values():
                before.expires = min(before.expires, at)
            self.leases[actor] = _Lease(actor, line["token"], at, line["ttl"], line["deadline"], at + line["ttl"])
        elif kind == "frozen":
            self.freeze = (actor, at, self.end)
        elif kind == "resumed":
            self.freeze = (*self.freeze[:2], at)
        elif lease is None:
            return
        elif kind == "renewed":
            lease.expires, lease.deadline = at + lease.ttl, line["deadline"]
            lease.renewals.append(at)
        elif kind == "lost":
            lease.lost, lease.reason = at, line["reason"]
        elif kind == "released" and lease.lost == math.inf:
            lease.expires = lease.deadline = at


def _accesses(events: Sequence[Line]) -> list[tuple[str, str, Line]]:
    found: list[tuple[str, str, Line]] = []
    highest = 0
    for line in events:
        sign = _SIGNS.get(line["kind"])
        if sign == "accepted":
            sign = "stale" if line["token"] < highest else sign
            highest = max(highest, line["token"])
        if sign is not None:
            found.append((sign, line["actor"], line))
    return found


def draw(runs: Sequence[tuple[str, str, Sequence[Line]]]) -> str:
    """Return *runs* as SVG text, each a title, an outcome and its events; one panel under the other, on one scale."""
    drawn = [_Run(*run) for run in runs]
    longest = max(run.end - run.start for run in drawn)
    scale = (WIDTH - _LEFT - _RIGHT) / (longest * _ROOM_AT_THE_END)
    panels = [_Panel(run, scale) for run in drawn]
    bottom = sum(panel.height for panel in panels) + 6
    height = bottom + 72
    size = {"viewBox": f"0 0 {WIDTH} {height:g}", "width": f"{WIDTH}", "height": f"{height:g}"}
    root = ET.Element("svg", {"xmlns": "http://www.w3.org/2000/svg", **size, "font-family": _FONT, "role": "img"})
    ET.SubElement(root, "title").text = "Timeline. " + " ".join(f"{run.title}: {run.outcome}." for run in drawn)
    _add(root, "rect", x=0.5, y=0.5, width=WIDTH - 1, height=height - 1, rx=10, fill=_PAPER, stroke=_RULE)
    pattern = _add(_add(root, "defs"), "pattern", id="frozen", width=8, height=8, patternTransform="rotate(45)")
    pattern.set("patternUnits", "userSpaceOnUse")
    _add(pattern, "rect", width=8, height=8, fill=_PAPER, fill_opacity="0.35")
    _add(pattern, "line", x1=0, x2=0, y1=0, y2=8, stroke=_INK, stroke_opacity="0.45", stroke_width=3)
    top = 0.0
    for panel in panels:
        panel.draw(_add(root, "g", transform=f"translate(0 {top:g})"))
        top += panel.height
    _draw_legend(_add(root, "g", transform=f"translate(0 {bottom:g})"))
    ET.indent(root)
    return ET.tostring(root, encoding="unicode") + "\n"


class _Panel:
    """One run: its lanes from top to bottom, and the axis."""

    def __init__(self, run: _Run, scale: float) -> None:
        self._run = run
        self._scale = scale
        lanes = ["lock", *run.leases, "storage"]
        self._middle = {lane: _HEAD + number * _LANE + _LANE / 2 for number, lane in enumerate(lanes)}
        self._captions = self._arrange()
        rows = 1 + max(row for *_, row in self._captions)
        self._bottom = self._middle["storage"] + _LANE / 2 + _CAPTION * rows - 12
        self.height = self._bottom + _AXIS

    def _x(self, moment: float) -> float:
        return _LEFT + (moment - self._run.start) * self._scale

    def _arrange(self) -> list[tuple[str, tuple[str, str], float, int]]:
        """
        Return sign, words, middle and row of each caption.

        The late write is placed first; a caption without room is left out.
        """
        placed: list[tuple[str, tuple[str, str], float, int]] = []
        taken: list[list[tuple[float, float]]] = [[] for _ in range(_ROWS)]
        for sign, _, line in sorted(self._run.accesses, key=lambda access: access[0] not in {"refused", "stale"}):
            words = _words(sign, line)
            half = max(map(_width_of, words)) / 2 + 1
            middle = min(max(self._x(line["t"]), _LEFT - 52 + half), WIDTH - 14 - half)
            for row, spans in enumerate(taken):
                if all(middle + half <= left or middle - half >= right for left, right in spans):
                    spans.append((middle - half, middle + half))
                    placed.append((sign, words, middle, row))
                    break
        return placed

    def draw(self, panel: ET.Element) -> None:
        """Draw everything, the background first."""
        run = self._run
        self._draw_lanes(panel)
        for actor, since in run.waits.items():
            left, right, y = self._x(since), self._x(run.leases[actor].start), self._middle[actor]
            if right - left > _width_of("waits") + 8:
                line = _add(panel, "line", x1=left, x2=right, y1=y, y2=y, stroke=_FAINT, stroke_width=2)
                line.set("stroke-dasharray", "2 5")
                _text(panel, (left + right) / 2, y - 8, "waits", fill=_FAINT, anchor="middle")
        for lease, colour in zip(run.leases.values(), _TOKENS, strict=True):
            self._draw_lease(panel, lease, colour)
        self._draw_freeze(panel)
        self._draw_storage(panel)
        for lease in run.leases.values():
            if lease.lost < math.inf:
                x, y = self._x(lease.lost), self._middle[lease.actor]
                _add(panel, "line", x1=x, x2=x, y1=y - 19, y2=y + 19, stroke=_RED, stroke_width=3)
                _text(panel, x + 10, y + 4.5, f"LeaseLostError: {lease.reason}", fill=_RED, weight=600)

    def _draw_lanes(self, panel: ET.Element) -> None:
        _text(panel, 24, 36, self._run.title, size=19, weight=600)
        _text(panel, 24, 57, self._run.outcome, fill=_FAINT, size=15)
        for number, (lane, y) in enumerate(self._middle.items()):
            height = self._bottom - y + _LANE / 2 if lane == "storage" else _LANE
            fill = (_STRIPE, _PAPER)[number % 2]
            _add(panel, "rect", x=12, y=y - _LANE / 2, width=WIDTH - 24, height=height, fill=fill)
            _text(panel, 24, y + 5, lane, size=14, weight=600)
        for second in range(math.floor((WIDTH - _RIGHT - _LEFT) / self._scale) + 1):
            x = _LEFT + second * self._scale
            _add(panel, "line", x1=x, x2=x, y1=_HEAD, y2=self._bottom + 5, stroke=_RULE)
            _text(panel, x, self._bottom + 20, f"{second} s", fill=_FAINT, anchor="middle")

    def _draw_storage(self, panel: ET.Element) -> None:
        y = self._middle["storage"]
        for sign, actor, line in self._run.accesses:
            if sign != "fence":  # from the worker down to the storage
                x, top = self._x(line["t"]), self._middle[actor] + _BAR / 2
                arrow = _add(panel, "line", x1=x, x2=x, y1=top, y2=y, stroke=_COLOURS[sign], stroke_width=1.5)
                arrow.set("stroke-dasharray", "3 3" if sign == "read" else "none")
        _add(panel, "line", x1=_LEFT, x2=self._x(self._run.end), y1=y, y2=y, stroke=_FAINT, stroke_width=1.5)
        for sign, _, line in self._run.accesses:
            _draw_sign(panel, sign, self._x(line["t"]), y)
        for sign, words, middle, row in self._captions:
            top = y + 27 + row * _CAPTION
            _text(panel, middle, top, words[0], fill=_COLOURS[sign], weight=600, anchor="middle")
            _text(panel, middle, top + 15, words[1], anchor="middle")

    def _draw_lease(self, panel: ET.Element, lease: _Lease, colour: str) -> None:
        """Draw the grant as the store sees it, and the lease of its holder, which ends before the store hands on."""
        token = f"token {lease.token}"
        self._bar(panel, "lock", (lease.start, lease.expires), colour, token)
        self._bar(panel, lease.actor, (lease.start, lease.deadline), colour, f"holds, {token}")
        for renewal in lease.renewals:
            _draw_renewal(panel, self._x(renewal), self._middle[lease.actor] + _BAR / 2)
        if lease.lost < math.inf:
            self._bar(panel, lease.actor, (lease.deadline, lease.expires), _AMBER)

    def _bar(self, panel: ET.Element, lane: str, span: tuple[float, float], fill: str, words: str = "") -> None:
        left, top = self._x(span[0]), self._middle[lane] - _BAR / 2
        width = max(1.5, self._x(span[1]) - left)
        _add(panel, "rect", x=left, y=top, width=width, height=_BAR, rx=3, fill=fill)
        if words and 1.2 * _width_of(words) + 14 < width:  # bold digits are wide
            _text(panel, left + 8, self._middle[lane] + 3.5, words, fill=_PAPER, weight=600)

    def _draw_freeze(self, panel: ET.Element) -> None:
        actor, start, end = self._run.freeze
        left, width, y = self._x(start), (end - start) * self._scale, self._middle[actor]
        box = _add(panel, "rect", x=left, y=y - 17, width=width, height=34, rx=3, fill=_FROZEN, stroke=_INK)
        box.set("stroke-dasharray", "4 3")
        words = f"frozen for {end - start:.1f} s"
        half = _width_of(words) / 2 + 5
        x = left + max(half + 5, width / 4)
        _add(panel, "rect", x=x - half, y=y - 10, width=2 * half, height=20, rx=4, fill=_PAPER, stroke=_INK)
        _text(panel, x, y + 4.5, words, weight=600, anchor="middle")


def _words(sign: str, line: Line) -> tuple[str, str]:
    """Return two short lines about one access of the storage."""
    token, text = line["token"], line.get("text", "")
    return {
        "fence": ("fence raised", f"to {token}"),
        "read": ("read", text),
        "accepted": (f"token {token} writes", text),
        "stale": (f"token {token} is late: accepted", text),
        "refused": (f"token {token} < {line.get('fence')}: refused", f"not written: {text}"),
    }[sign]


def _draw_sign(parent: ET.Element, name: str, x: float, y: float) -> None:
    """Draw a tick, a cross, an exclamation mark, a ring, or a post."""
    sign = _add(parent, "g", transform=f"translate({x:.1f} {y:.1f})")
    if name == "fence":
        _add(sign, "path", d="M0 -11v22M-4 -11h8M-4 11h8", stroke=_INK, stroke_width=2.5, fill="none")
    elif name == "read":
        _add(sign, "circle", r=5, fill=_PAPER, stroke=_FAINT, stroke_width=2)
    else:
        _add(sign, "circle", r=10, fill=_COLOURS[name], stroke=_PAPER, stroke_width=1.5)
        _add(sign, "path", d=_SHAPES[name], stroke=_PAPER, stroke_width=2.4, fill="none", stroke_linecap="round")


def _draw_renewal(parent: ET.Element, x: float, bottom: float) -> None:
    """Draw a notch in the lower edge of a bar."""
    _add(parent, "line", x1=x, x2=x, y1=bottom - 5, y2=bottom, stroke=_PAPER, stroke_width=2.5)


def _draw_legend(parent: ET.Element) -> None:
    _add(parent, "line", x1=12, x2=WIDTH - 12, y1=0, y2=0, stroke=_RULE)
    fills = {"lease": _TOKENS[0], "renewal": _TOKENS[0], "safety": _AMBER, "frozen": _FROZEN}
    x, y = 24.0, 24.0
    for name, meaning in _MEANINGS.items():
        needed = 30 + _width_of(meaning)
        if x + needed > WIDTH - 20:
            x, y = 24.0, y + 28
        if name in fills:
            stroke = _INK if name == "frozen" else "none"
            _add(parent, "rect", x=x, y=y - 8, width=22, height=16, rx=3, fill=fills[name], stroke=stroke)
        else:
            _draw_sign(parent, name, x + 11, y)
        if name == "renewal":
            _draw_renewal(parent, x + 11, y + 8)
        _text(parent, x + 30, y + 4.5, meaning, fill=_FAINT)
        x += needed + 22


def _add(parent: ET.Element, tag: str, **attributes: float | str) -> ET.Element:
    """Append an element; underscores in the names of attributes stand for hyphens."""
    written = {key: value if isinstance(value, str) else f"{round(value, 1):g}" for key, value in attributes.items()}
    return ET.SubElement(parent, tag, {key.replace("_", "-"): value for key, value in written.items()})


def _text(
    parent: ET.Element,
    x: float,
    y: float,
    words: str,
    *,
    fill: str = _INK,
    size: int = 13,
    weight: int = 400,
    anchor: str = "start",
) -> None:
    node = _add(parent, "text", x=x, y=y, fill=fill, font_size=size, font_weight=weight, text_anchor=anchor)
    node.text = words


def _width_of(words: str) -> float:
    """Guess generously: fonts differ, and a gap looks better than an overlap."""
    return len(words) * 13 * 0.6
