"""Who asks a store that wakes no waiter, and how often."""

from __future__ import annotations

import asyncio

import pytest

from fencing_sdk.abc import Claim
from fencing_sdk.backends._shared.polling_line import Pace, PlaceToPoll, PollingLine

LONGEST = 0.55


class Stage:
    """A line for the lock "a", and what its waiters were told."""

    def __init__(self) -> None:
        self.left = 0.0
        self.line = PollingLine(lambda _: self.left)
        self.woken: list[str] = []

    def join(self, owner: str) -> PlaceToPoll:
        return self.line.line_up(Claim("a", 10.0, owner=owner), lambda *_: self.woken.append(owner))

    def refused(self, owner: str) -> bool:
        return self.line.refusal(Claim("a", 10.0, owner=owner)) is not None


async def test_only_the_head_may_ask():
    stage = Stage()
    assert not stage.refused("newcomer")
    first, _ = stage.join("1"), stage.join("2")
    assert [stage.refused(owner) for owner in ("1", "2", "newcomer")] == [False, True, True]
    first.leave()
    assert stage.woken == ["2"]
    assert [stage.refused(owner) for owner in ("2", "newcomer")] == [False, True]


async def test_a_waiter_that_leaves_from_the_middle_wakes_no_other():
    stage = Stage()
    stage.join("1")
    second = stage.join("2")
    stage.join("3")
    second.leave()
    second.leave()
    assert not stage.woken


async def test_while_a_grant_of_this_client_lasts_the_head_asks_for_nothing_and_its_release_wakes_it():
    stage = Stage()
    holder = Claim("a", 10.0)
    stage.line.granted(holder, 7)
    stage.left = 9.0
    place = stage.join("1")
    assert stage.line.refusal(place.claim) == 9.0
    assert place.nap(5.0) == 5.0
    stage.line.ended(Claim("a", 10.0))
    assert not stage.woken, "another claim was given back"
    stage.line.ended(holder)
    assert stage.woken == ["1"]
    assert not stage.refused("1")


async def test_a_grant_that_has_run_out_refuses_no_waiter():
    stage = Stage()
    stage.line.granted(Claim("a", 10.0), 7)
    stage.left = -1.0
    stage.join("1")
    assert not stage.refused("1")


async def test_a_head_looks_first_unless_it_was_woken():
    stage = Stage()
    first, second = stage.join("1"), stage.join("2")
    assert stage.line.looks_first(first.claim)
    assert not stage.line.looks_first(second.claim)
    first.leave()
    assert [stage.line.looks_first(second.claim) for _ in range(2)] == [False, True]


async def test_a_nap_is_no_longer_than_the_store_advises():
    stage = Stage()
    assert stage.join("1").nap(0.2) == 0.2
    assert stage.join("2").nap(5.0) == 5.0, "those behind the head have nothing to ask"


def test_waiters_of_a_loop_that_has_ended_stand_in_no_line():
    stage = Stage()

    async def join(owner: str) -> None:
        stage.join(owner)

    asyncio.run(join("1"))
    asyncio.run(join("2"))
    assert not stage.refused("2")
    assert stage.refused("1")


async def test_the_memory_of_locks_is_bounded_but_keeps_lines(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(PollingLine, "NAMES", 3)
    stage = Stage()
    place = stage.join("1")
    for number in range(10):
        stage.line.see(f"other/{number}", 0)
    assert len(stage.line._names) == 3
    assert stage.line.waits(place.claim)


# How often


def paced(*seen: tuple[float, int]) -> Pace:
    pace = Pace()
    for now, token in seen:
        pace.see(token, now)
    return pace


def test_a_lock_of_unknown_pace_is_asked_as_a_slow_one():
    """Else a waiter that just came would ask more often than one that knows that the lock is slow."""
    assert paced((0.0, 5)).pause(0.0, 0) == paced((0.0, 5), (60.0, 6)).pause(60.0, 0) == LONGEST


@pytest.mark.parametrize(("between", "pause"), [(0.02, 0.01), (0.1, 0.025), (0.4, 0.1), (2.0, 0.5), (60.0, LONGEST)])
def test_pauses_follow_how_fast_the_lock_changes_hands(between: float, pause: float):
    pace = paced(*((number * between, 10 + number) for number in range(10)))
    assert pace.pause(9 * between, 0) == pytest.approx(pause)


def test_tokens_that_were_not_seen_count_too():
    assert paced((0.0, 10), (4.0, 20)).pause(4.0, 0) == pytest.approx(0.1)


def test_a_lock_that_stays_with_its_holder_is_asked_less_and_less():
    pace = paced((0.0, 1), (0.1, 2))
    pauses = [pace.pause(0.1 + age, 0) for age in (0.0, 0.4, 1.0, 10.0, 600.0)]
    assert pauses == sorted(pauses)
    assert pauses[-1] == LONGEST


@pytest.mark.parametrize("age", [0.0, 0.5, 1.5, 60.0])
def test_a_waiter_that_has_waited_longer_never_asks_less_often(age: float):
    pace = paced((0.0, 1), (0.1, 2))
    pauses = [pace.pause(0.1 + age, passed_over) for passed_over in range(50)]
    assert pauses == sorted(pauses, reverse=True)
    assert pauses[-1] >= 0.01


def test_a_token_that_comes_late_changes_nothing():
    assert paced((0.0, 5), (1.0, 6), (1.1, 5)) == paced((0.0, 5), (1.0, 6))
