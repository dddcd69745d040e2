"""A recording of two holders in which everything that can be recorded is recorded, and ways to change it."""

from collections.abc import Callable
from typing import Any

Lines = list[dict[str, Any]]
Change = Callable[[Lines], object]


def line(t: float, kind: str, actor: str = "A", **fields: object) -> dict[str, Any]:
    return {"t": t, "kind": kind, "actor": actor, **fields}


def about(holder: str) -> dict[str, Any]:
    return {"name": "a", "token": {"h1": 1, "h2": 2}[holder], "holder": holder}


def held_once(actor: str, holder: str, at: float) -> Lines:
    """One holder's stay of three seconds, with everything that can be recorded about it."""
    mine = about(holder)
    call = {"name": "a", "holder": holder, "ttl": 10.0}
    return [
        line(at, "acquiring", actor, name="a", holder=holder),
        line(at, "asked", actor, call=f"{holder}.1", operation="acquire", **call),
        line(at + 0.01, "granted", "store", **mine, until=at + 10.01),
        line(at + 0.02, "answered", actor, call=f"{holder}.1", outcome="granted", token=mine["token"]),
        line(at + 0.02, "acquired", actor, **mine, ttl=10.0, waited=0.02, deadline=at + 7.9),
        line(at + 0.03, "fence_raised", actor, name="a", token=mine["token"], resource="r"),
        line(at + 0.03, "entered", actor, **mine, fences=["r"]),
        line(at + 1.0, "read", actor, resource="r", **mine),
        line(at + 1.1, "write_accepted", actor, resource="r", token=mine["token"], holder=holder, sent=at + 1.0),
        line(at + 2.0, "asked", actor, call=f"{holder}.2", operation="renew", **call),
        line(at + 2.01, "extended", "store", **mine, until=at + 12.01),
        line(at + 2.02, "answered", actor, call=f"{holder}.2", outcome="renewed"),
        line(at + 2.02, "renewed", actor, name="a", token=mine["token"], deadline=at + 9.9),
        line(at + 3.0, "body_ended", actor, **mine, how="clean"),
        line(at + 3.0, "asked", actor, call=f"{holder}.3", operation="release", **call),
        line(at + 3.01, "ended", "store", **mine, why="released", by=holder),
        line(at + 3.02, "answered", actor, call=f"{holder}.3", outcome="done"),
        line(at + 3.02, "released", actor, name="a", token=mine["token"], held_for=3.0, confirmed=True),
        line(at + 3.02, "left", actor, **mine, error=None),
    ]


def good() -> Lines:
    """Two holders one after the other; then a third asks when faults have ended."""
    return [
        line(0.0, "run", "test", title="two holders", declared=True),
        *held_once("A", "h1", 1.0),
        *held_once("B", "h2", 6.0),
        line(20.0, "healed", "test", within=5.0),
        line(20.0, "acquiring", "C", name="b", holder="h3"),
        line(21.0, "acquired", "C", name="b", token=3, holder="h3", waited=1.0, ttl=10.0, deadline=28.9),
        line(20.9, "granted", "store", name="b", token=3, holder="h3", until=30.9),
        line(22.0, "ended", "store", name="b", token=3, holder="h3", why="released", by="h3"),
        line(22.1, "released", "C", name="b", token=3, held_for=1.0, confirmed=True),
        line(40.0, "end", "test", held=[]),
    ]


def without_store(lines: Lines) -> Lines:
    return [one for one in lines if one["kind"] not in {"granted", "extended", "ended", "asked", "answered"}]


def find(lines: Lines, kind: str, **fields: object) -> dict[str, Any]:
    return next(one for one in lines if one["kind"] == kind and fields.items() <= one.items())


def drop(lines: Lines, kind: str, **fields: object) -> None:
    lines.remove(find(lines, kind, **fields))


def change(kind: str, where: dict[str, object] | None = None, **fields: object) -> Change:
    return lambda lines: find(lines, kind, **(where or {})).update(fields)


def add(*more: dict[str, Any]) -> Change:
    return lambda lines: lines.extend(more)


def both(*changes: Change) -> Change:
    return lambda lines: [one(lines) for one in changes]
