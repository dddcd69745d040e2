"""What others read of a holder: from any text, which a client of another version or a stranger may have written."""

import json
import os
import sys

import pytest

from fencing_sdk._values import holder_facts
from fencing_sdk._values.claim import Holder, Waiting
from fencing_sdk._values.holder_facts import facts_about_command, metadata_of, read_facts, say_kept

FACTS = '{"host": "web-1", "pid": 812, "program": "backup.sh", "start": "2026-03-01T03:00:00+00:00"}'


def holder(metadata, remaining=10.0, held_for=None):
    return Holder("a", 1, "9f8a01c2", remaining, metadata, held_for=held_for)


@pytest.mark.parametrize(
    "text",
    [
        *("", "worker 3", "null", "[]", "7", '"host"', "{}", '{"host": "web-1"}', "[" * 1000, "\x1b[2J"),
        *("when its run has ended", "when its run has ended, kept until soon (ttl 1 s)"),
        *(
            "when its run has ended, kept until 2026-03-01 (ttl . s)",
            "when its run has ended, kept until \x1b[2J (ttl 1 s)",
        ),
    ],
)
def test_metadata_that_no_client_wrote_are_shown_as_they_are(text):
    assert read_facts(holder(text, 1e9)) == (None, "", None, text)


def test_the_facts_are_a_sentence_whose_words_cannot_move_a_cursor():
    assert read_facts(holder(FACTS)).summary == "backup.sh (pid 812) on web-1 since 2026-03-01T03:00:00+00:00"
    assert read_facts(Waiting("9f8a01c2", metadata=FACTS)).who == read_facts(holder(FACTS)).who
    assert "T" in read_facts(holder(FACTS, held_for=5.0)).who.partition(" since ")[2]
    odd = json.dumps({"host": "\x1b[2J" * 90, "pid": ["\n"], "program": None, "start": "\r"})
    assert read_facts(holder(odd)).who.isprintable()
    assert len(read_facts(holder(odd)).who) < 300


@pytest.mark.parametrize(
    ("ttl", "remaining", "sure"),
    [(15, 15.0, False), (15, 25.0, False), (15, 25.1, True), (400, 490, False), (1, 12, True)],
)
def test_nothing_runs_for_sure_only_if_more_time_is_left_than_any_renewal_gives(ttl, remaining, sure):
    """Stores round up, and their clocks differ from ours."""
    facts = read_facts(holder(say_kept("worker 3", 3600, ttl), remaining))
    assert (facts.kept_until is not None, facts.state.endswith(", nothing runs")) == (sure, sure)
    assert facts.text == "worker 3"


@pytest.mark.parametrize(
    ("argv", "program"),
    [
        (["/srv/app/worker.py", "--password=secret"], "worker.py"),
        (["/srv/app/reports/__main__.py"], "reports"),
        (["-c"], "-c"),
        ([""], "python"),
        ([], "python"),
        (None, "python"),
        (["/srv/" + "\U0001f600\udcff\x1b" * 90], "?" * 64),
        (["/srv/täglich"], "täglich"),
    ],
)
def test_a_program_is_named_without_its_folder_and_its_arguments(monkeypatch, argv, program):
    monkeypatch.setattr(sys, "argv", argv)
    holder_facts._facts_about.cache_clear()
    try:
        text = metadata_of()
    finally:
        holder_facts._facts_about.cache_clear()
    assert json.loads(text) == {"host": os.uname().nodename, "pid": os.getpid(), "program": program}
    assert text.isascii(), "so that a database in any encoding keeps it"
    assert "secret" not in text


def test_the_longest_names_stay_readable_behind_a_note(monkeypatch):
    longest = "é" * 5000
    monkeypatch.setattr(os, "uname", lambda: os.uname_result(("Linux", longest, "", "", "")))
    kept = say_kept(facts_about_command(longest), 86_400, 0.123456789012)
    assert len(kept) < holder_facts.METADATA_LIMIT
    assert read_facts(holder(kept)).who
