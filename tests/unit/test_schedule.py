"""A heap of moments against the plainest model there is: a dict that is sorted when asked."""

import random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from fencing_sdk._engine.schedule import Schedule

keys = st.integers(0, 40).map("owner-{}".format)
moments = st.floats(0, 100).map(lambda moment: round(moment, 1))


class ScheduleAgainstADict(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.schedule: Schedule[str] = Schedule()
        self.model: dict[str, tuple[float, int]] = {}
        self.order = 0

    @rule(key=keys, when=moments)
    def put(self, key: str, when: float) -> None:
        self.order += 1
        self.schedule.put(key, when)
        self.model[key] = (when, self.order)

    @rule(key=keys, moments=st.lists(moments, min_size=50, max_size=150))
    def move_often(self, key: str, moments: list[float]) -> None:
        for when in moments:
            self.put(key, when)

    @rule(key=keys)
    def drop(self, key: str) -> None:
        self.schedule.drop(key)
        self.model.pop(key, None)

    @rule(now=moments)
    def take_what_is_due(self, now: float) -> None:
        in_order = sorted(self.model.items(), key=lambda item: item[1])
        expected = [(key, when) for key, (when, _) in in_order if when <= now]
        assert self.schedule.due(now) == expected
        for key, _ in expected:
            del self.model[key]

    @invariant()
    def agrees_with_the_model(self) -> None:
        assert len(self.schedule) == len(self.model)
        assert all(key in self.schedule for key in self.model)
        assert self.schedule.next() == min((when for when, _ in self.model.values()), default=None)


TestScheduleAgainstADict = ScheduleAgainstADict.TestCase
TestScheduleAgainstADict.settings = settings(deadline=None, max_examples=60, stateful_step_count=40)


def heap_size(schedule: Schedule[int]) -> int:
    return len(schedule._heap)


def test_moving_beats_for_ever_keeps_the_heap_within_twice_the_living():
    schedule: Schedule[int] = Schedule()
    for beat in range(20_000):
        schedule.put(beat % 100, float(beat))
        assert heap_size(schedule) <= 64 + 2 * len(schedule)


def test_leases_that_come_and_go_leave_no_heap_behind():
    schedule: Schedule[int] = Schedule()
    schedule.put(-1, 0.0)  # the earliest is alive, so that no dead entry surfaces
    for key in range(10_000):
        schedule.put(key, 1000.0 + key)
    for key in range(10_000):
        schedule.drop(key)
        assert heap_size(schedule) <= 64 + 2 * len(schedule)
    assert schedule.next() == 0.0


def test_sweeping_keeps_moments_and_their_order():
    schedule: Schedule[int] = Schedule()
    order = list(range(300))
    random.Random(1).shuffle(order)
    for key in order:
        schedule.put(key, float(key % 7))
    for _ in range(3):
        for key in order:
            schedule.put(key, float(key % 7))
    expected = sorted(order, key=lambda key: (key % 7, order.index(key)))
    assert [key for key, _ in schedule.due(10.0)] == expected


def test_what_is_due_comes_out_and_the_rest_stays():
    schedule: Schedule[str] = Schedule()
    schedule.put("c", 1.6)
    schedule.put("b", 1.4)
    schedule.put("a", 1.0)
    assert schedule.due(0.9) == []
    assert schedule.due(1.4) == [("a", 1.0), ("b", 1.4)]
    assert schedule.next() == 1.6


def test_moving_a_key_later_and_earlier_counts_the_last_time():
    schedule: Schedule[str] = Schedule()
    schedule.put("a", 1.0)
    schedule.put("a", 3.0)
    assert schedule.due(2.0) == []
    schedule.put("a", 0.5)
    assert schedule.due(2.0) == [("a", 0.5)]
    assert schedule.due(9.0) == []
    assert schedule.next() is None


def test_a_key_that_is_put_back_at_its_old_moment_comes_out_once():
    schedule: Schedule[str] = Schedule()
    schedule.put("a", 1.0)
    schedule.drop("a")
    schedule.put("a", 1.0)
    assert schedule.due(1.0) == [("a", 1.0)]


def test_keys_need_no_order_among_themselves():
    schedule: Schedule[object] = Schedule()
    keys = [object(), (1, "a"), "text"]
    for key in keys:
        schedule.put(key, 1.0)
    assert [key for key, _ in schedule.due(1.0)] == keys


def test_dropping_what_was_never_known_does_nothing():
    schedule: Schedule[str] = Schedule()
    schedule.drop("nobody")
    assert len(schedule) == 0
    assert schedule.due(1.0) == []
