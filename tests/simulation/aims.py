"""Scripts that go for one weakness: what a broken variant breaks seldom comes up by chance."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from tests.simulation.script import Fault, Script


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
