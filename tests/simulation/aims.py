"""Scripts that go for one weakness: what a broken variant breaks seldom comes up by chance."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from tests.simulation.script import Fault, Script, Visit


def slow_then_cut(operation: str, late: float) -> Callable[[Script], Script]:
    """Answers of *operation* come late by a part of the ttl, and then the link is gone for the rest of the lease."""

    def aim(script: Script) -> Script:
        slow = [Fault(0.0, "late", who, late * script.ttl, operation, "reply", 1) for who in range(script.clients)]
        cuts = [Fault(visit.at + 0.4 * script.ttl, "cut", visit.client, 2 * script.ttl) for visit in script.visits[:3]]
        long = tuple(replace(visit, lasts=2 * script.ttl, wait=None) for visit in script.visits)
        return replace(script, buffer=0.05, visits=long, faults=(*slow, *cuts))

    return aim


def cut_off(script: Script) -> Script:
    """Bodies that go on for longer than a ttl without a store."""
    long = tuple(replace(visit, lasts=2 * script.ttl) for visit in script.visits)
    cuts = tuple(Fault(visit.at + 0.1, "cut", visit.client, 2 * script.ttl) for visit in script.visits[:3])
    rates = (*(0.9955 for _ in script.rates[:-1]), 1.0045)
    return replace(script, rates=rates, visits=long, faults=cuts)


def failing_bodies(script: Script) -> Script:
    return replace(script, visits=tuple(replace(visit, body="raise") for visit in script.visits))


def frozen_over_a_renewal(script: Script) -> Script:
    """The answer of a renewal waits in front of a process that is frozen past its deadline."""
    slow = [Fault(0.0, "late", who, 0.1 * script.ttl, "renew", "reply") for who in range(script.clients)]
    stops = [Fault(visit.at + 0.3 * script.ttl, "freeze", visit.client, 0.8 * script.ttl) for visit in script.visits]
    long = tuple(replace(visit, lasts=2 * script.ttl, wait=None) for visit in script.visits)
    return replace(script, visits=long, faults=(*slow, *stops))


def refused_for_long(script: Script) -> Script:
    """Long bodies, and a store that refuses for nearly as long as may cost nothing."""
    return _away_for_long(script, "refuse")


def silent_for_long(script: Script) -> Script:
    """Long bodies, and a store that swallows requests for nearly as long as may cost nothing."""
    return _away_for_long(script, "down")


def _away_for_long(script: Script, how: str) -> Script:
    times = [(0.1 + 0.3 * number) * script.horizon for number in range(3)]
    away = tuple(Fault(at, how, lasts=0.5 * script.ttl) for at in times)
    long = tuple(replace(visit, body="sleep", lasts=2 * script.ttl, wait=None) for visit in script.visits)
    rates = tuple(1.0 for _ in script.rates)
    return replace(script, ttl=1.0, buffer=None, rates=rates, visits=long, faults=away)


def slow_cancelled(script: Script) -> Script:
    """Acquisitions that are cancelled while their request is held up."""
    slow = tuple(Fault(0.0, "late", who, 1.5, "acquire", "request", 2) for who in range(script.clients))
    cancels = tuple(Fault(0.0, "cancel", number, turn=2) for number in range(len(script.visits)))
    return replace(script, ttl=20.0, faults=(*slow, *cancels))


def crowded(script: Script) -> Script:
    """Several tasks that want one lock for long, and a store whose bells ring."""
    visits = tuple(
        replace(visit, name="a", at=0.05 * number, body="sleep", lasts=4.0, wait=None)
        for number, visit in enumerate(script.visits)
    )
    return replace(script, ttl=3.0, polls=False, visits=visits, faults=())


def unheard(ttl: float, first: float) -> Callable[[Script], Script]:
    """Waiters that are served by a bell, and whose tickets cannot be kept from then on."""

    def aim(script: Script) -> Script:
        visits = tuple(
            Visit(n % script.clients, 0.05 * n, "a", "write", ttl if n else first, 3 * ttl, fenced=False)
            for n in range(3)
        )
        lost = tuple(Fault(0.0, "lose", who, operation="renew", way="request") for who in range(script.clients))
        return replace(script, ttl=ttl, buffer=0.05, polls=False, horizon=2 * ttl, visits=visits, faults=lost)

    return aim


def late_bells(script: Script) -> Script:
    """A ticket that dies although it holds, because its client is cut off, and whose bell comes when another holds."""
    visits = (
        Visit(0, 0.1, "a", "write", 0.6, 9.0, fenced=False),
        Visit(1, 0.2, "a", "write", 0.6, 9.0, fenced=False),
        Visit(0, 0.3, "a", "write", 2.5, 9.0, fenced=False),
    )
    faults = (
        Fault(0.0, "late", 1, 1.1 + 0.1 * (script.seed % 8), "bell", "reply", 1),
        Fault(0.4, "lose", 1, operation="renew", way="request", times=4 + script.seed % 3),
    )
    return replace(script, ttl=1.0, buffer=0.05, polls=False, visits=visits, faults=faults)


def short_lives(script: Script) -> Script:
    """A life that is shorter than the last bodies."""
    visits = tuple(
        replace(visit, name="a", mode="lock", at=script.horizon - 0.3, body="sleep", lasts=4.0, wait=None)
        for visit in script.visits[:2]
    )
    return replace(script, ttl=0.3, buffer=None, polls=False, visits=visits, faults=())
