"""A recording is untrusted input: it is drawn, or one error names the line; templates of names likewise."""

import json
import re
from pathlib import Path

import hypothesis.strategies as st
import pytest
from fuzzing import SEED_SIZE, checked, lines_run, little_work, pieces
from hypothesis import example, given

from fencing_sdk._name_template import NameTemplate
from fencing_sdk.cli._picture import draw
from fencing_sdk.cli._recording_lines import parse_line
from fencing_sdk.cli._story import tell
from fencing_sdk.cli.timeline import draw_recordings
from fencing_sdk.errors import ConfigurationError

NUMBERS = st.one_of(
    st.integers(-5, 100),
    st.integers(),
    st.sampled_from([10**400, -(10**400), 2**53]),
    st.floats(),
    st.floats(0, 1e4, allow_nan=False),
)
ANYTHING = st.one_of(NUMBERS, st.none(), st.booleans(), st.text(max_size=5), st.lists(st.integers(), max_size=2))
KINDS = st.sampled_from(
    [
        *("run", "outcome", "acquiring", "acquired", "renewed", "renewal_late", "renewal_failed", "lost", "released"),
        *("not_acquired", "fence_raised", "stale_rejected", "frozen", "resumed", "read", "write_accepted"),
        *("write_refused", "", "nonsense", "_access", "\ud800"),
    ]
)
EVENTS = st.fixed_dictionaries(
    {"t": st.one_of(st.floats(0, 1e4, allow_nan=False), NUMBERS), "kind": KINDS},
    optional={
        "actor": st.one_of(st.sampled_from("AB"), ANYTHING),
        "lane": st.one_of(st.sampled_from("AB"), ANYTHING),
        "name": st.one_of(st.sampled_from(["a", "b"]), ANYTHING),
        "token": st.one_of(st.integers(0, 3), ANYTHING),
        "ttl": st.one_of(st.just(10.0), ANYTHING),
        "deadline": st.one_of(st.just(8.0), ANYTHING),
        "resource": ANYTHING,
        "fence": ANYTHING,
        "reason": st.one_of(st.sampled_from(["expired", "stalled", "revoked"]), ANYTHING),
        "text": ANYTHING,
        "title": ANYTHING,
    },
)
LIKELY = st.fixed_dictionaries(
    {
        "t": st.floats(0, 100, allow_nan=False),
        "kind": KINDS,
        "actor": st.sampled_from("AB"),
        "name": st.sampled_from(["a", "<b>"]),
        "token": st.integers(0, 4),
        "ttl": st.floats(0, 20),
        "deadline": st.floats(0, 200),
        "resource": st.just("r"),
        "fence": st.integers(0, 4),
        "reason": st.sampled_from(["expired", "stalled", "revoked"]),
        "text": st.text(max_size=5),
    }
)
DEEP = "[" * SEED_SIZE


def drawn(lines: list[str]) -> str:
    """Draw *lines*, as ``fencing timeline`` does; the empty text is an error that was told."""
    try:
        read = [parse_line(line, f"line {number}") for number, line in enumerate(lines, start=1)]
        return draw(tell(sorted(read, key=lambda line: float(line["t"]))))
    except ConfigurationError:
        return ""


@checked(200)
@given(
    raw=st.one_of(st.text(max_size=60), st.binary(max_size=60), EVENTS.map(json.dumps), pieces('{"t":', "1e999", "}"))
)
@example(raw=DEEP)
@example(raw='{"t": 1, "kind": "run", "x": ' + DEEP)
@example(raw='{"t": ' + "1" * 5000 + ', "kind": "run"}')
@example(raw='{"t": ' + "1" * 400 + ', "kind": "run"}')
@example(raw='{"t": Infinity, "kind": "run"}')
@example(raw=b"\xff")
def test_a_line_is_an_event_or_an_error_with_its_number(raw: str | bytes):
    try:
        line = parse_line(raw, "line 7")
        told = ""
    except ConfigurationError as error:
        line, told = {"kind": "", "t": 0}, f"{error}"
    assert isinstance(line["kind"], str)
    assert abs(float(line["t"])) < float("inf")
    assert not told or (told.startswith("line 7 ") and told.isprintable())


@checked(150)
@given(events=st.lists(st.one_of(EVENTS, LIKELY), max_size=10))
def test_any_events_are_drawn_or_a_configuration_error(events: list[dict[str, object]]):
    drawn([json.dumps(event) for event in events])


@checked(100)
@given(events=st.lists(LIKELY, min_size=1, max_size=12))
def test_events_as_they_are_recorded_in_any_order_are_drawn(events: list[dict[str, object]]):
    picture = drawn([json.dumps(event) for event in events])
    if picture:
        assert picture.startswith("<svg")
        assert "<b>" not in picture
        assert not re.search(r"[=\"' ](nan|-?inf)[\"' ,]", picture)


def acquired(**fields: object) -> str:
    event = {"t": 1.0, "kind": "acquired", "actor": "A", "name": "a", "token": 1, "ttl": 10.0, "deadline": 9.0}
    return json.dumps(event | fields)


@pytest.mark.parametrize("field", ["ttl", "deadline", "token"])
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan"), 1e308, -1e308, 10**400])
def test_a_number_that_is_none_for_a_picture_is_told(field: str, value: float):
    picture = drawn([acquired(**{field: value}), acquired(t=2.0, token=2)])
    assert not re.search(r"[=\"' ](nan|-?inf)[\"' ,]", picture)


@pytest.mark.parametrize("token", [-1, 2**53, 1.0, "1", True, None])
def test_what_is_no_token_is_told(token: object):
    with pytest.raises(ConfigurationError, match="'acquired' is incomplete: 'token'"):
        tell([parse_line(acquired(token=token), "line 1")])


def test_a_moment_beside_a_year_is_little_work():
    runs = ["run", "acquiring", "not_acquired", "run", "acquiring"]
    times = [0, 0, 1e-6, 2, 3e7]
    lines = [{"t": at, "kind": kind, "actor": "A", "name": "a"} for at, kind in zip(times, runs, strict=True)]
    with little_work():
        drawn([json.dumps(line) for line in [*lines, {"t": 6e7, "kind": "not_acquired", "actor": "A", "name": "a"}]])


def record(times: int, recording: Path) -> None:
    """Write a recording of a lock that was held so many *times*."""
    lines = []
    for number in range(times):
        lines += [acquired(t=number, token=number, deadline=number + 0.8, ttl=1.0)]
        lines += [json.dumps({"t": number + 0.5, "kind": "released", "actor": "A", "name": "a", "token": number})]
        lines += [json.dumps({"t": number, "kind": "write_accepted", "actor": "A", "resource": "r", "token": number})]
    recording.write_text("\n".join(lines))


def test_many_events_are_little_work(tmp_path: Path):
    work = []
    for times in (40, 320):
        record(times, recording := tmp_path / f"{times}.jsonl")
        work.append(lines_run(lambda read=recording: draw_recordings([read], read.with_suffix(".svg"))))
    few, many = work
    assert many < 1.2 * (320 / 40) * few, "the work grows with the recording, not with its square"


# Templates of lock names.


class Anything:
    def __init__(self, value: object) -> None:
        self.value = value


async def function(a: object, b: object = 2) -> None: ...


TEMPLATES = pieces(
    "{a}", "{b}", "{", "}", "{{", "}}", "a", "[0]", ".value", "!r", "!x", ":", ":>9", ":{b}", "{0}", "{}", "/", "x"
)


@checked(200)
@given(template=TEMPLATES, a=ANYTHING, b=ANYTHING)
@example(template="{a:{b}}", a="x", b="999999999")
@example(template="{a:{b}}", a=1.5, b=".999999999f")
@example(template="{a:>999999999}", a="x", b=1)
@example(template="{a.value}", a=1, b=1)
@example(template="{a:d}", a=10**5000, b=1)
def test_a_template_makes_a_name_or_a_configuration_error(template: str, a: object, b: object):
    with little_work():
        try:
            name = NameTemplate(template, function).fill((a, b), {})
        except ConfigurationError:
            return
    assert isinstance(name, str)
    assert len(name) < SEED_SIZE
