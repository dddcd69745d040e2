"""What a terminal shows and a pipe gets, and how times are written."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from argparse import ArgumentTypeError
from pathlib import Path

import pytest
from child_processes import children
from command_line import Fencing, alive, parse_duration, until
from terminal import Open, at_a_terminal

# `fencing run` at a terminal: one Ctrl-C is one signal, and the command may read what is typed.


__all__ = ["at_a_terminal"]

COUNT_INTERRUPTS = """
import signal, sys, time
seen = []
signal.signal(signal.SIGINT, lambda *_: seen.append(1))
if "ask" in sys.argv: input("name? ")
print("ready", flush=True)
while not seen: time.sleep(0.01)
time.sleep(0.3)
print(len(seen), "interrupt", flush=True)
"""


@pytest.mark.parametrize("ask", [False, True], ids=["before", "after"])
def test_ctrl_c_reaches_the_command_once_before_and_after_it_has_the_terminal(at_a_terminal: Open, ask: bool):
    terminal = at_a_terminal("run", "job", "--", sys.executable, "-c", COUNT_INTERRUPTS, *(["ask"] if ask else []))
    if ask:
        terminal.shows("name? ")
        terminal.type("Ada\n")
    terminal.shows("ready")
    terminal.type("\x03")
    terminal.shows("1 interrupt")
    assert terminal.ends() == 0


def test_a_command_may_read_from_the_terminal(at_a_terminal: Open):
    terminal = at_a_terminal("run", "job", "--", "sh", "-c", 'echo ask; read name; echo "hello $name"; exit 4')
    terminal.shows("ask")
    terminal.type("Ada\n")
    terminal.shows("hello Ada")
    assert terminal.ends() == 4


STOP_AND_GO_ON = """
import pathlib, os, sys, time
pathlib.Path("command.pid").write_text(f"{os.getpid()}\\n")
if "ask" in sys.argv: input("name? ")
print("ready", flush=True)
while not pathlib.Path("may.go.on").exists(): time.sleep(0.01)
pathlib.Path("went.on").touch()
input("over")
"""


@pytest.mark.parametrize("ask", [False, True], ids=["before", "after"])
def test_ctrl_z_stops_both_and_the_command_goes_on_with_its_supervisor(
    fencing: Fencing, at_a_terminal: Open, ask: bool
):
    terminal = at_a_terminal("run", "job", "--", sys.executable, "-c", STOP_AND_GO_ON, *(["ask"] if ask else []))
    if ask:
        terminal.shows("name? ")
        terminal.type("Ada\n")
    terminal.shows("ready")
    terminal.type("\x1a")
    terminal.is_stopped()
    fencing.path("may.go.on").touch()
    assert "over" not in terminal.seen
    terminal.go_on()
    terminal.shows("over")
    terminal.type("\n")
    assert terminal.ends() == 0


def test_a_command_does_not_go_on_after_a_stop_that_outlived_its_lease(fencing: Fencing, at_a_terminal: Open):
    terminal = at_a_terminal("run", "job", "--ttl", "4", "--", sys.executable, "-c", STOP_AND_GO_ON)
    terminal.shows("ready")
    terminal.type("\x1a")
    terminal.is_stopped()
    fencing.path("may.go.on").touch()
    assert fencing("run", "job", "--wait", "60", "--", "true").returncode == 0
    terminal.go_on()
    assert terminal.ends() == 76
    until(lambda: not alive(fencing.pid("command.pid")), "the end of the command")
    assert not fencing.path("went.on").exists()


# A reader that has gone, as after `| head`, ends a command quietly, and is never mistaken for its result.


GONE = 128 + signal.SIGPIPE


def without_reader(fencing: Fencing, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run with a standard output whose other end is closed already."""
    reading, writing = os.pipe()
    os.close(reading)
    try:
        return fencing(*arguments, stdout=writing)
    finally:
        os.close(writing)


PRINTING = [
    ("--help",),
    ("--version",),
    ("run", "--help"),
    ("init", "--sql", "--url", "postgresql://localhost/app"),
    ("show", "job"),
    ("demo",),
]
every_command_that_prints = pytest.mark.parametrize("arguments", PRINTING, ids=" ".join)


@every_command_that_prints
def test_a_command_whose_reader_has_gone_says_nothing_and_ends_as_by_the_signal(
    fencing: Fencing, arguments: tuple[str, ...]
):
    done = without_reader(fencing, *arguments)
    assert (done.returncode, done.stderr) == (GONE, "")


@every_command_that_prints
def test_a_full_disk_is_one_line_and_74(fencing: Fencing, arguments: tuple[str, ...]):
    with Path("/dev/full").open("w") as full:
        done = fencing(*arguments, stdout=full)
        assert (done.returncode, done.stderr.splitlines()[-1:]) == (
            74,
            ["fencing: standard output cannot be written: No space left on device"],
        )
        assert "Traceback" not in done.stderr
        assert fencing(*arguments, stdout=full, stderr=full).returncode == 74


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("run", "job", "--verbose", "--", "sh", "-c", "exit 3"), 3),
        (("run", "job", "--", "no-such-command"), 127),
        (("run", "job", "--url", "sqlite:////no/such/folder/locks.db", "--", "true"), 69),
        (("nonsense",), 2),
    ],
)
def test_a_full_disk_under_the_messages_changes_no_exit_code(fencing: Fencing, arguments: tuple[str, ...], code: int):
    with Path("/dev/full").open("w") as full:
        assert fencing(*arguments, stderr=full).returncode == code
    fencing.environment["FENCING_RECORD"] = "/dev/full"
    assert fencing(*arguments).returncode == code


NAME, TOLD = "job/\u00e9\u2026", "\u00e9\u2192"


def test_an_output_of_ascii_gets_escapes(fencing: Fencing):
    fencing.environment |= {"LC_ALL": "C", "PYTHONIOENCODING": "ascii"}
    inner = f"{sys.executable} -m fencing_sdk"
    script = f'{inner} ls; {inner} show "$0"; {inner} ls --json; {inner} run "$0" -- true; {inner} run --help'
    done = fencing("run", NAME, "--verbose", "--pass-url", "--label", TOLD, "--", "sh", "-c", script, NAME)
    assert done.returncode == 0
    assert "Traceback" not in done.stderr
    assert done.stdout.isascii()
    assert done.stderr.isascii()
    assert done.stdout.count(r"job/\xe9\u2026") == 2
    assert done.stdout.count(r"\xe9\u2192") == 2
    assert r'"job/\u00e9\u2026"' in done.stdout
    assert r"lock 'job/\xe9\u2026' is held" in done.stderr


def test_a_terminal_of_ascii_gets_escapes(fencing: Fencing, at_a_terminal: Open):
    fencing.environment |= {"LC_ALL": "C", "PYTHONIOENCODING": "ascii"}
    fencing.start("run", NAME, "--label", TOLD, "--", "sh", "-c", "echo $$ > holder.pid; exec sleep 60")
    fencing.appears("holder.pid")
    terminal = at_a_terminal("ls")
    terminal.shows(r"job/\xe9\u2026")
    assert (terminal.ends(), "Traceback" in terminal.rest()) == (0, False)


def test_the_demo_leaves_no_frozen_worker_when_its_reader_goes(fencing: Fencing):
    fencing.environment["TMPDIR"] = str(fencing.folder)
    demo = fencing.start("demo")
    while "FROZEN" not in demo.stdout.readline():
        assert demo.poll() is None
    workers = children(demo.pid)
    assert len(workers) == 2
    demo.stdout.close()
    assert (demo.wait(), demo.stderr.read()) == (GONE, "")
    until(lambda: not any(map(alive, workers)), "the end of the workers")
    assert list(fencing.folder.iterdir()) == []


def test_a_command_under_a_lock_has_its_own_output_and_its_own_exit_code(fencing: Fencing):
    done = without_reader(fencing, "run", "job", "--verbose", "--", "sh", "-c", "exit 3")
    assert done.returncode == 3
    assert len(done.stderr.splitlines()) == 2


@pytest.mark.parametrize("arguments", [("--help",), ("init", "--sql", "--url", "postgresql://localhost/app")])
def test_a_command_without_any_output_says_nothing(fencing: Fencing, arguments: tuple[str, ...]):
    script = 'exec "$@" >&-'
    command = [sys.executable, "-m", "fencing_sdk", *arguments]
    done = subprocess.run(
        ["sh", "-c", script, "sh", *command],
        env=fencing.environment,
        cwd=fencing.folder,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")


# Times on the command line: 90s, 5m, 1h, and plain seconds.


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
    with pytest.raises(ArgumentTypeError, match=re.escape("expected a duration such as 90s, 5m or 1h")) as raised:
        parse_duration(text)
    assert len(str(raised.value).splitlines()) == 1


def test_a_text_of_any_length_is_judged_at_once():
    with pytest.raises(ArgumentTypeError, match="expected a duration"):
        parse_duration("1" * 100_000 + "x")
