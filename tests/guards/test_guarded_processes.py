"""Real processes that compete for one resource, some of them killed."""

import contextlib
import random
import subprocess
import sys
from pathlib import Path

import pytest
from guard_rival import DESKS, RESOURCE

pytest_plugins = ["postgresql_fixtures"]

RIVAL = Path(__file__).with_name("guard_rival.py")


@contextlib.contextmanager
def rivals(kind: str, place: Path | str, *, number: int, turns: int):
    """Processes that are ready and wait for the word to start. None is left behind."""
    DESKS[kind](place)
    processes = [
        subprocess.Popen(
            [sys.executable, str(RIVAL), kind, str(place), str(seed), str(turns)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in range(number)
    ]
    try:
        for process in processes:
            assert process.stdout.readline() == "ready\n"
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def start(processes: list[subprocess.Popen]) -> None:
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()


@pytest.fixture(params=["sql", "files", "postgresql"])
def kind(request):
    return request.param


@pytest.fixture
def place(kind, request, tmp_path):
    """Where the counter is: a path, or a server."""
    if kind != "postgresql":
        return tmp_path / "data"
    url = request.getfixturevalue("postgresql_server").url
    DESKS[kind](url).prepare()
    return url


def test_no_update_is_lost_and_no_number_is_shared_among_processes(kind, place):
    turns = 10 if kind == "postgresql" else 40  # it connects anew for everything
    with rivals(kind, place, number=4, turns=turns) as processes:
        start(processes)
        outputs = [process.communicate(timeout=50)[0].split() for process in processes]
    assert [output[-1] for output in outputs] == ["end"] * 4
    accepted = [int(token) for output in outputs for token in output[:-1]]
    assert accepted, "nobody got in"
    assert len(accepted) < 4 * turns, "nobody was refused: there was no race"
    assert len(set(accepted)) == len(accepted), "two processes wrote with one number"
    assert DESKS[kind](place).read(RESOURCE) == str(len(accepted)), "updates were lost"


async def test_killed_processes_leave_a_state_that_others_go_on_with(kind, place):
    """A kill between a write and its report makes it one more than was reported, and that is all it does."""
    chance, kills, reported = random.Random(1), 0, 0
    for _ in range(2):
        with rivals(kind, place, number=3, turns=100_000) as processes:
            start(processes)
            for process in processes:
                lines = [process.stdout.readline() for _ in range(chance.randrange(3, 10))]
                process.kill()
                lines += process.stdout.readlines()
                reported += sum(line.endswith("\n") for line in lines)
                kills += 1
    desk = DESKS[kind](place)
    value = int(desk.read(RESOURCE))
    assert reported <= value <= reported + kills
    desk.write(RESOURCE, await desk.guard.highest(RESOURCE) + 1, str(value + 1))
    assert desk.read(RESOURCE) == str(value + 1)
    if kind == "files":
        names = [path.name for path in (place / RESOURCE).iterdir()]
        assert len(names) == 3, f"drafts of killed writers are left: {names}"
