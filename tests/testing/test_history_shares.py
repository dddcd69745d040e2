"""The checker and shares: what permits, readers and writers may do together, and what it finds when they do more."""

from typing import Any

import pytest
from recordings import line

from fencing_sdk.testing.history import Verdict, check


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
