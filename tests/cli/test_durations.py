"""Times on the command line: 90s, 5m, 1h, and plain seconds."""

import re

import pytest

from fencing_sdk.cli._durations import parse_duration


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("15", 15.0),
        ("0", 0.0),
        ("0.5", 0.5),
        ("1e3", 1000.0),
        ("-1", -1.0),  # the lock refuses it, and says what it takes
        ("500ms", 0.5),
        ("90s", 90.0),
        ("5m", 300.0),
        ("1h", 3600.0),
        ("1d", 86_400.0),
        ("1.5h", 5400.0),
        ("1h30m", 5400.0),
        ("1m30s250ms", 90.25),
        (" 5m ", 300.0),
    ],
)
def test_a_duration_is_a_number_with_a_unit_or_seconds(text: str, seconds: float):
    assert parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize(
    "text",
    ["", "soon", "5 m", "m", "5min", "5M", "5m1h", "5m5m", "5m30", "-5m", "1:30", "\u0665m", "1,5h", "5mm", "nan"],
)
def test_what_has_two_readings_or_none_is_refused_with_an_example(text: str):
    with pytest.raises(ValueError, match=re.escape("expected a duration such as 90s, 5m or 1h")) as raised:
        parse_duration(text)
    assert len(str(raised.value).splitlines()) == 1


def test_a_text_of_any_length_is_judged_at_once():
    with pytest.raises(ValueError, match="expected a duration"):
        parse_duration("1" * 100_000 + "x")
