"""What a recording shows: plain ones by the next holder, several runs one by one, and too little never passes."""

from typing import Any

import pytest
from recordings import find, good, held_once, line, without_store

from fencing_sdk import ConfigurationError
from fencing_sdk.testing.history import PROMISES, Report, Verdict, check

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


def test_a_recording_that_shows_everything_passes():
    assert check(good()).verdict(least=3) is Verdict.OK


def test_too_few_acquisitions_are_unknown():
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
    with pytest.raises(ConfigurationError, match=incomplete["kind"]):
        check([incomplete])
