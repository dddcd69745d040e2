"""A reader that has gone, as after `| head`, ends a command quietly, and is never mistaken for its result."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import Fencing, alive, until
from terminal import Open, at_a_terminal

__all__ = ["at_a_terminal"]

GONE = 128 + signal.SIGPIPE

RECORDING = '{"t": 1.0, "actor": "a", "kind": "run", "title": "nothing happened"}\n'


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
    ("check", "run.jsonl"),
    ("demo",),
]
every_command_that_prints = pytest.mark.parametrize("arguments", PRINTING, ids=" ".join)


@every_command_that_prints
def test_a_command_whose_reader_has_gone_says_nothing_and_ends_as_by_the_signal(
    fencing: Fencing, arguments: tuple[str, ...]
):
    fencing.path("run.jsonl").write_text(RECORDING)
    done = without_reader(fencing, *arguments)
    assert (done.returncode, done.stderr) == (GONE, "")


@every_command_that_prints
def test_a_full_disk_is_one_line_and_74(fencing: Fencing, arguments: tuple[str, ...]):
    fencing.path("run.jsonl").write_text(RECORDING)
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
    done = fencing("run", NAME, "--verbose", "--pass-url", "--metadata", TOLD, "--", "sh", "-c", script, NAME)
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
    fencing.start("run", NAME, "--metadata", TOLD, "--", "sh", "-c", "echo $$ > holder.pid; exec sleep 60")
    fencing.appears("holder.pid")
    for command, keys in (("ls", ""), ("top", "q")):
        terminal = at_a_terminal(command)
        terminal.shows(r"job/\xe9\u2026")
        terminal.type(keys)
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


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


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
