"""The judge of histories: each rule has a recording that it accepts and a similar one that it rejects."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.simulation.check import main
from tests.simulation.judge import PROMISES, Report, Verdict, check

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
        line(at + 0.02, "acquired", actor, **mine, ttl=10.0, waited=0.02, deadline=at + 7.9),
        line(at + 0.03, "fence_raised", actor, name="a", token=mine["token"], resource="r"),
        line(at + 0.03, "entered", actor, **mine, fences=["r"]),
        line(at + 1.0, "read", actor, resource="r", **mine),
        line(at + 1.1, "write_accepted", actor, resource="r", token=mine["token"], holder=holder, sent=at + 1.0),
        line(at + 2.0, "asked", actor, call=f"{holder}.2", operation="renew", **call),
        line(at + 2.01, "extended", "store", **mine, until=at + 12.01),
        line(at + 2.02, "renewed", actor, name="a", token=mine["token"], deadline=at + 9.9),
        line(at + 3.0, "body_ended", actor, **mine, how="clean"),
        line(at + 3.0, "asked", actor, call=f"{holder}.3", operation="release", **call),
        line(at + 3.01, "ended", "store", **mine, why="released", by=holder),
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
    return [one for one in lines if one["kind"] not in {"granted", "extended", "ended", "asked"}]


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


A, B = {"actor": "A"}, {"actor": "B"}
LOST = line(8.9, "lost", "B", name="a", token=2, reason="expired")
RHYTHM = {"safety_buffer": 2.0, "heartbeat_interval": 2.0, "drift": 0.01}
"""By which a ttl of ten seconds rides out 3.26 s of swallowed requests, or 5.24 s of refused ones."""
STALE = {"resource": "r", "token": 1, "holder": "h1"}
ORPHAN = [
    line(10.0, "asked", "D", call="o1", operation="acquire", name="a", holder="h9", ttl=10.0),
    line(12.0, "granted", "store", name="a", token=9, holder="h9", until=22.0),
    line(10.5, "asked", "D", call="o2", operation="release", name="a", holder="h9", ttl=10.0),
]


def released(at: float) -> dict[str, Any]:
    return line(at, "ended", "store", name="a", token=9, holder="h9", why="released", by="h9")


REJECTED: dict[str, tuple[str, str, Change]] = {
    "a token was read after the grant": ("P2", "stale_read", change("read", A, t=4.5)),
    "the body ended after the grant": ("P1", "overrun", change("body_ended", A, t=4.5)),
    "a holder was never granted the lock": ("P1", "held_without_grant", lambda ls: drop(ls, "granted", token=1)),
    "the store granted twice": ("P1", "two_grants", both(
        change("granted", {"token": 2}, t=3.0), change("acquired", B, t=6.02))),
    "the store extended what was over": ("P1", "store_revived", add(
        line(5.0, "extended", "store", **about("h1"), until=15.0))),
    "a renewal counted after the deadline": ("P2", "revived", change("renewed", A, t=9.5)),
    "two holders got one token": ("P4", "shared_token", change("acquired", B, token=1)),
    "a later token was lower": ("P4", "token_fell", change("acquired", B, token=0)),
    "the store's token fell": ("P4", "store_token_fell", change("granted", {"token": 2}, token=0)),
    "a grant whose token was drawn too late": ("P4", "store_token_fell", add(
        line(12.0, "granted", "store", name="a", token=3, holder="h9", since=0.5, until=0.9))),
    "a stale write was accepted": ("P3", "stale_write_accepted", add(line(9.0, "write_accepted", "A", **STALE))),
    "a write came after a fence was raised": ("P3", "stale_write_accepted", add(
        line(6.5, "write_accepted", "A", **STALE))),
    "a write came after another had entered": ("P3", "fence_not_raised", both(
        lambda ls: drop(ls, "fence_raised", **B), add(line(6.5, "write_accepted", "A", **STALE)))),
    "a token of two holders passed": ("P3", "shared_token_accepted", add(
        line(8.0, "write_accepted", "D", resource="r", token=2, holder="h8"))),
    "the newest token was refused": ("P3", "newest_refused", add(
        line(8.0, "write_refused", "B", resource="r", token=2, holder="h2", fence=2))),
    "somebody else released": ("P5", "foreign_release", change("ended", {"token": 1}, by="h2")),
    "an operator meant another grant": ("P5", "foreign_revocation", change(
        "ended", {"token": 1}, why="revoked", meant=0)),
    "released and kept": ("P5", "kept_after_release", lambda ls: drop(ls, "ended", token=2)),
    "renewed after release": ("P5", "renewed_after_release", change("asked", {"call": "h1.2"}, t=4.5)),
    "an abandoned grant was kept": ("P5", "leaked_grant", add(*ORPHAN, released(18.0))),
    "an abandoned grant was not released": ("P5", "never_released", add(*ORPHAN[:2])),
    "a lock is held at the end": ("P5", "left_behind", change("end", held=["a"])),
    "lost without a cause": ("P6", "lost_without_cause", add(LOST)),
    "lost after a short silence": ("P6", "lost_without_cause", add(
        LOST, line(7.0, "trouble", "store", what="outage", until=8.0))),
    "lost although the rhythm rides it out": ("P6", "lost_without_cause", both(
        change("run", {}, **RHYTHM), add(LOST, line(3.8, "trouble", "store", what="outage", until=8.85)))),
    "lost although the store only refused": ("P6", "lost_without_cause", both(
        change("run", {}, **RHYTHM), add(LOST, line(3.3, "trouble", "store", what="refused", until=8.85)))),
    "lost although two short silences lay far apart": ("P6", "lost_without_cause", both(
        change("run", {}, **RHYTHM),
        add(LOST, *[line(at, "trouble", "store", what="outage", until=at + 1.0) for at in (2.0, 6.0)]))),
    "the loss was not reported": ("P7", "wrong_error", add(LOST)),
    "the body's error was replaced": ("P7", "wrong_error", both(
        change("body_ended", A, how="ValueError"), change("left", A, error="LeaseLostError"))),
    "the body's error was wrapped": ("P7", "wrong_error", both(
        change("body_ended", A, how="ValueError"), change("left", A, error="ExceptionGroup"))),
    "an error came from nowhere": ("P7", "wrong_error", change("left", A, error="RuntimeError")),
    "an outer cancellation was replaced": ("P7", "wrong_error", both(
        change("body_ended", A, how="cancelled"), change("left", A, error="LeaseLostError", outer=True))),
    "a loss left no note": ("P7", "loss_not_noted", both(
        add(LOST), change("body_ended", B, how="ValueError"), change("left", B, error="ValueError"))),
    "served too late": ("P8", "waited_too_long", change("acquired", {"actor": "C"}, t=26.0)),
    "served too late, after a grant that came too late": ("P8", "waited_too_long", both(
        add(line(23.0, "not_acquired", "C", name="b", holder="h3", reason="too_late", waited=3.0),
            line(23.0, "acquiring", "C", name="b", holder="h4")),
        change("acquired", {"actor": "C"}, t=26.0, holder="h4", waited=3.0))),
    "never served": ("P8", "waited_too_long", lambda ls: drop(ls, "acquired", actor="C")),
}  # fmt: skip

ACCEPTED: dict[str, Change] = {
    "nothing went wrong": lambda _: None,
    "work after the grant, by a frozen process": both(
        change("body_ended", A, t=4.5), add(line(3.5, "frozen", "A"), line(4.4, "resumed", "A"))),
    "a token read after a grant that the store forgot": both(
        change("ended", {"token": 1}, why="forgotten"), change("read", A, t=4.5)),
    "a token read after the store's clock was stepped": both(
        change("read", A, t=4.5), add(line(2.0, "trouble", "store", what="stepped"))),
    "a refusal that names no resource": add(line(3.0, "stale_rejected", "A")),
    "a lock that a job leaves taken": both(
        lambda ls: drop(ls, "ended", token=2), change("released", B, kept_for=60.0)),
    "a renewal that leaves a lock taken, and arrives after its end": both(
        change("asked", {"call": "h1.2"}, t=4.5), change("released", A, kept_for=60.0)),
    "two writes on their way at once": both(
        lambda ls: drop(ls, "fence_raised", **B), change("entered", B, fences=[]),
        add(line(7.2, "write_accepted", "A", **STALE, sent=7.05))),
    "the answer to a raised fence that came late": add(
        line(9.0, "fence_raised", "A", name="a", token=1, resource="r")),
    "a write that overtook another": add(
        line(9.0, "write_accepted", "A", **STALE, sent=5.0)),
    "a stale write was refused": add(line(9.0, "write_refused", "A", **STALE, fence=2)),
    "a refusal for a grant that nobody was told of": both(
        add(*ORPHAN, released(12.5)),
        add(line(12.2, "write_refused", "B", resource="r", token=2, holder="h2", fence=9))),
    "overlapping acquisitions in any order": both(
        change("acquired", A, token=3), change("acquired", B, waited=5.9),
        lambda ls: ls.remove(find(ls, "acquiring", **B)),
        lambda ls: [ls.remove(one) for one in list(ls) if one["kind"] in {
            "granted", "extended", "ended", "asked", "renewed", "read", "entered", "write_accepted",
            "body_ended", "released", "left", "fence_raised"}]),
    "a release that went astray for as long as the store was away": both(
        lambda ls: drop(ls, "ended", token=2), add(line(8.9, "trouble", "store", what="outage", until=10.0))),
    "an abandoned grant was released as soon as it was made": add(*ORPHAN, released(12.5)),
    "an abandoned grant, doubled by the network": add(
        *ORPHAN, released(18.0), line(12.0, "repeated", "D", call="o1")),
    "lost after a long silence": both(
        add(LOST, line(2.0, "trouble", "store", what="outage", until=8.8)), change("left", B, error="LeaseLostError")),
    "lost after a silence that the rhythm does not ride out": both(
        change("run", {}, **RHYTHM), change("left", B, error="LeaseLostError"),
        add(LOST, line(3.6, "trouble", "store", what="outage", until=8.85))),
    "lost after refusals for too long": both(
        change("run", {}, **RHYTHM), change("left", B, error="LeaseLostError"),
        add(LOST, line(3.1, "trouble", "store", what="refused", until=8.85))),
    "lost after refusals that were swallowed at last": both(
        change("run", {}, **RHYTHM), change("left", B, error="LeaseLostError"),
        add(LOST, line(3.3, "trouble", "store", what="refused", until=8.0),
            line(8.5, "trouble", "store", what="lost", who="B"))),
    "lost after silences too close for a renewal": both(
        change("run", {}, **RHYTHM), change("left", B, error="LeaseLostError"),
        add(LOST, *[line(at, "trouble", "store", what="lost", who="B") for at in (3.2, 5.9, 8.5)])),
    "a grant that was told late": add(
        line(12.0, "granted", "store", name="a", token=0, holder="h9", since=0.5, until=0.9)),
    "lost by a release that the network carried out twice": both(
        add(line(9.01, "lost", "B", name="a", token=2, reason="refused"), line(9.01, "repeated", "B", call="h2.3")),
        change("left", B, error="LeaseLostError")),
    "lost by max_hold": both(
        add(LOST), change("acquired", B, max_hold=2.9), change("left", B, error="LeaseLostError")),
    "the body's error left with a note": both(
        add(LOST, line(8.0, "frozen", "B"), line(8.5, "resumed", "B")),
        change("body_ended", B, how="ValueError"), change("left", B, error="ValueError", noted=True)),
    "an outer cancellation won": both(
        change("body_ended", A, how="cancelled"), change("left", A, error="CancelledError", outer=True)),
    "given up in time": both(
        lambda ls: [ls.remove(one) for one in list(ls) if one["actor"] == "C" and one["kind"] != "acquiring"],
        lambda ls: [ls.remove(one) for one in list(ls) if one.get("name") == "b" and one["actor"] == "store"],
        add(line(22.0, "not_acquired", "C", name="b", holder="h3", reason="timed_out", waited=2.0))),
    "given up after a wait that another of the same client goes on with": both(
        change("acquired", {"actor": "C"}, t=24.0, waited=4.0),
        add(line(20.1, "acquiring", "C", name="b", holder="h4"),
            line(20.2, "not_acquired", "C", name="b", holder="h4", reason="held", waited=0.1))),
    "who crashed is not served": both(
        lambda ls: drop(ls, "acquired", actor="C"), add(line(20.5, "frozen", "C"))),
    "events of unknown kinds": add(line(3.0, "weather", sun=True)),
}  # fmt: skip


@pytest.mark.parametrize("what", REJECTED)
def test_a_broken_promise_is_found(what: str):
    promise, rule, broken = REJECTED[what]
    lines = good()
    broken(lines)
    report = check(lines)
    assert rule in report.rules
    assert report.of(promise) is Verdict.VIOLATED
    assert report.verdict(least=1) is Verdict.VIOLATED


@pytest.mark.parametrize("what", ACCEPTED)
def test_what_is_allowed_is_not_accused(what: str):
    lines = good()
    ACCEPTED[what](lines)
    assert check(lines).rules == set()


def test_every_promise_has_a_rule_that_rejects():
    assert {promise for promise, _, _ in REJECTED.values()} == set(PROMISES)


def test_the_order_of_the_lines_does_not_matter():
    lines = good()
    find(lines, "read", actor="A")["t"] = 4.5
    assert [str(v) for v in check(lines).violations] == [str(v) for v in check(lines[::-1]).violations]


def test_violations_are_told_in_the_order_of_time():
    lines = good()
    change("read", A, t=4.5)(lines)
    change("end", held=["a"])(lines)
    change("acquired", {"actor": "C"}, t=26.0)(lines)
    moments = [violation.at for violation in check(lines).violations]
    assert len(moments) >= 3
    assert moments == sorted(moments)


# The checker and shares: what permits, readers and writers may do together, and what it finds when they do more.


def held(actor: str, holder: str, token: int, since: float, until: float, **fields: Any) -> list[dict[str, Any]]:
    """A lease from its acquisition to its release."""
    about = {"name": "a", "holder": holder, "token": token}
    return [
        line(since - 0.1, "acquiring", actor, name="a", holder=holder),
        line(since, "acquired", actor, **about, ttl=10.0, waited=0.1, deadline=until + 1, **fields),
        line(since + 0.1, "read", actor, **about),
        line(until, "body_ended", actor, **about, how="clean"),
        line(until, "released", actor, **about, held_for=until - since, confirmed=True),
    ]


def reader(actor: str, token: int, since: float, until: float) -> list[dict[str, Any]]:
    return held(actor, f"h-{actor}", token, since, until, mode="reader")


def writer(actor: str, token: int, since: float, until: float) -> list[dict[str, Any]]:
    return held(actor, f"h-{actor}", token, since, until, mode="writer")


def permit(actor: str, token: int, number: int, since: float, until: float, of: int = 2) -> list[dict[str, Any]]:
    return held(actor, f"h-{actor}", token, since, until, mode="permit", permit=number, permits=of)


def refused(actor: str, token: int, at: float, resource: str = "a", holder: str = "readers") -> dict[str, Any]:
    return line(at, "write_refused", actor, resource=resource, token=token, holder=holder, fence=token + 1)


FINE = {
    "readers that hold together share a token": [*reader("A", 1, 1, 9), *reader("B", 1, 2, 5), *writer("C", 2, 10, 11)],
    "two readers of one process": [*reader("A", 1, 1, 9), *held("A", "h2", 1, 2, 5, mode="reader")],
    "permits that are held together": [*permit("A", 1, 0, 1, 9), *permit("B", 2, 1, 2, 8), *permit("C", 3, 1, 8.5, 9)],
    "a zombie reader is refused": [*reader("A", 1, 1, 4), *writer("B", 2, 5, 9), refused("A", 1, 7)],
    "a fence is raised for every reader": [
        *reader("A", 1, 1, 9),
        *reader("B", 1, 2, 5),
        line(1.05, "fence_raised", "A", name="a", holder="h-A", token=1, resource="a"),
        line(2.05, "fence_raised", "B", name="a", holder="h-B", token=1, resource="a"),
        line(3, "write_accepted", "A", resource="a", token=1, holder="readers"),
    ],
}
BROKEN = {
    "a writer beside a reader": ("P1", "overrun", [*reader("A", 1, 1, 9), *writer("B", 2, 5, 7)]),
    "a permit number with two holders": ("P1", "overrun", [*permit("A", 1, 0, 1, 9), *permit("B", 2, 0, 5, 7)]),
    "a permit beyond the last": ("P1", "too_many_permits", [*permit("A", 1, 2, 1, 9)]),
    "a writer with the token of readers": ("P4", "shared_token", [*reader("A", 1, 1, 4), *writer("B", 1, 5, 9)]),
    "readers with a token from before a writer": ("P4", "token_fell", [*writer("A", 5, 1, 4), *reader("B", 3, 5, 9)]),
    "two permits with one token": ("P4", "shared_token", [*permit("A", 1, 0, 1, 9), *permit("B", 1, 1, 2, 8)]),
    "a reader that holds is refused": ("P3", "holder_refused", [*reader("A", 1, 1, 9), refused("A", 1, 5)]),
    "a permit that is held is refused": (
        "P3",
        "holder_refused",
        [*permit("A", 1, 0, 1, 9), *permit("B", 2, 1, 2, 8), refused("A", 1, 5, "a/0", "h-A")],
    ),
}


@pytest.mark.parametrize("what", FINE)
def test_what_shares_may_do_together_is_no_violation(what: str):
    assert not check(FINE[what]).violations


@pytest.mark.parametrize("what", BROKEN)
def test_what_they_may_not_is_found(what: str):
    promise, rule, lines = BROKEN[what]
    report = check(lines)
    assert rule in report.rules
    assert report.of(promise) is Verdict.VIOLATED


def test_grants_of_the_store_are_judged_by_their_modes():
    def granted(at: float, holder: str, token: int, **how: Any) -> dict[str, Any]:
        return line(at, "granted", "store", name="a", token=token, holder=holder, until=at + 5, **how)

    readers = [granted(1, "h1", 1, mode="reader"), granted(2, "h2", 1, mode="reader")]
    assert not check(readers).violations
    assert check([*readers, granted(3, "h3", 2, mode="writer")]).rules == {"two_grants"}
    permits = [granted(1, "h1", 1, mode="permit", permit=0), granted(2, "h2", 2, mode="permit", permit=1)]
    assert not check(permits).violations
    assert check([*permits, granted(3, "h3", 3, mode="permit", permit=1)]).rules == {"two_grants"}
    assert check([*permits, granted(3, "h3", 2, mode="permit", permit=2)]).rules == {"store_token_fell"}


# Without a store that can be looked into, the next holder is the measure.


def test_a_plain_recording_is_judged_by_the_next_holder():
    report = check(without_store(good()))
    assert report.rules == set()
    assert report.of("P1") is Verdict.OK
    assert report.of("P4") is Verdict.OK


@pytest.mark.parametrize(("kind", "rule"), [("read", "stale_read"), ("renewed", "overrun"), ("body_ended", "overrun")])
def test_going_on_after_the_next_holder_came_is_found_in_a_plain_recording(kind: str, rule: str):
    lines = without_store(good())
    find(lines, kind, actor="A")["t"] = 6.5
    assert rule in check(lines).rules


def test_a_frozen_holder_is_not_accused_of_work_in_a_plain_recording():
    lines = without_store(good())
    find(lines, "body_ended", actor="A")["t"] = 6.5
    lines += [line(3.5, "frozen", "A"), line(6.4, "resumed", "A")]
    assert check(lines).rules == set()


# Too little is never a pass.


def test_a_recording_that_shows_everything_passes_and_one_with_too_few_acquisitions_does_not():
    assert check(good()).verdict(least=3) is Verdict.OK
    assert check(good()).verdict(least=4) is Verdict.UNKNOWN


def test_an_empty_recording_is_unknown():
    report = check([])
    assert report.verdict(least=0, require=()) is Verdict.UNKNOWN
    assert {report.of(promise) for promise in PROMISES} == {Verdict.UNKNOWN}


def test_a_lock_that_was_never_handed_on_is_unknown():
    lines = [line(0.0, "run", "test", declared=True), *held_once("A", "h1", 1.0)]
    assert check(lines).verdict(least=1, require=()) is Verdict.UNKNOWN


def test_a_promise_that_was_not_put_to_the_test_is_unknown():
    lines = [one for one in good() if one["kind"] not in {"write_accepted", "write_refused"}]
    report = check(lines)
    assert report.of("P3") is Verdict.UNKNOWN
    assert report.verdict(least=1) is Verdict.UNKNOWN
    assert report.verdict(least=1, require=("P1", "P4")) is Verdict.OK


def test_reports_of_many_runs_add_up():
    whole = Report()
    for _ in range(2):
        whole.add(check(good()))
    assert whole.observed["acquisitions"] == 6
    whole.add(check([*held_once("A", "h1", 1.0)[:-2], line(9.0, "end", "test", held=["a"])]))
    assert whole.verdict(least=1) is Verdict.VIOLATED


def test_runs_in_one_recording_are_judged_apart():
    second = [{**one, "t": one["t"] + 100.0} for one in good()]
    for one in second:
        if "until" in one:
            one["until"] += 100.0
        if "deadline" in one:
            one["deadline"] += 100.0
        if "sent" in one:
            one["sent"] += 100.0
    report = check(good() + second)  # the tokens begin again with the second run
    assert report.rules == set()
    assert report.observed["runs"] == 2


@pytest.mark.parametrize(
    "incomplete",
    [
        line(1.0, "acquired", name="a", token="x", ttl=1.0, deadline=2.0),
        line(1.0, "acquired", name="a", token=1, ttl=1.0),
        line(1.0, "granted", name="a", holder="h1", token=1),
        line(1.0, "write_accepted", resource="r"),
        line(1.0, "healed"),
        line(1.0, "end"),
    ],
)
def test_an_incomplete_event_is_an_error_that_names_its_kind(incomplete: dict[str, Any]):
    with pytest.raises(ValueError, match=incomplete["kind"]):
        check([incomplete])


def without_writes(lines: Lines) -> None:
    lines[:] = [one for one in lines if one["kind"] != "write_accepted"]


def written(path: Path, lines: Lines) -> str:
    path.write_text("".join(json.dumps(one) + "\n" for one in lines))
    return str(path)


@pytest.mark.parametrize(
    ("spoil", "options", "code", "said"),
    [
        (lambda _: None, [], 3, "verdict: unknown: fewer than 25 acquisitions"),
        (lambda _: None, ["--least", "3"], 0, "verdict: ok"),
        (lambda ls: drop(ls, "write_accepted"), ["--least", "3", "--require", "P3"], 0, "verdict: ok"),
        (without_writes, ["--least", "3", "--require", "P3"], 3, "the recording has nothing about P3"),
        (change("acquired", B, token=1), [], 1, "P4 shared_token"),
        (change("acquired", B, token=1, name="\x1b[2J"), ["--least", "1"], 1, "\\x1b[2J"),
        (change("acquired", B, token="x"), [], 2, "of kind 'acquired' at 6.02 is incomplete"),
        (add({"kind": "run"}), [], 2, " is not an event: expected"),
    ],
)
def test_the_command_judges_files(
    spoil: Change, options: list[str], code: int, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    lines = good()
    spoil(lines)
    half = len(lines) // 2
    files = [written(tmp_path / "a.jsonl", lines[:half]), written(tmp_path / "b.jsonl", lines[half:])]
    assert main([*files, *options]) == code
    heard = "".join(capsys.readouterr())
    assert said in heard
    assert "\x1b" not in heard


def test_the_judge_shares_no_code_with_what_it_judges():
    for name in ("history", "judge"):
        text = Path(__file__).with_name(f"{name}.py").read_text()
        assert "fencing_sdk" not in re.findall(r"^(?:from|import) (\w+)", text, re.MULTILINE)
