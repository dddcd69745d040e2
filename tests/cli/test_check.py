"""``fencing check``: a verdict and an exit code, never a pass for a recording that shows too little."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from operations import operations
from terminal import Open, at_a_terminal

from fencing_sdk import LockClient
from fencing_sdk._recording import Recorder
from fencing_sdk.backends.memory import MemoryBackend
from fencing_sdk.cli._app import run_app
from fencing_sdk.cli._picture import draw
from fencing_sdk.cli._story import tell
from fencing_sdk.errors import shown
from fencing_sdk.testing import history
from tests.simulation.play import play
from tests.simulation.script import write_script

__all__ = ["at_a_terminal"]


def recorded(folder: Path, *, holders: int = 30) -> Path:
    """What two real clients of one store record in real time."""
    path = folder / "run.jsonl"

    async def worker(backend: MemoryBackend, actor: str) -> None:
        async with LockClient(backend, observers=[Recorder(path, actor=actor)]) as locks:
            for _ in range(holders // 2):
                async with locks.lock("seats/42"):
                    await asyncio.sleep(0)

    async def main() -> None:
        backend = MemoryBackend()
        await asyncio.gather(worker(backend, "A"), worker(backend, "B"))

    asyncio.run(main())
    return path


def with_lines(path: Path, *lines: dict[str, object]) -> Path:
    with path.open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
    return path


def last(path: Path, kind: str) -> dict[str, object]:
    return [line for line in map(json.loads, path.read_text().splitlines()) if line["kind"] == kind][-1]


def test_a_recording_of_real_clients_passes(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert run_app(["check", str(recorded(tmp_path))]) == 0
    said = capsys.readouterr().out
    assert "30 acquisitions" in said
    assert "verdict: ok" in said
    assert "P3 unknown" in said


def test_contention_is_no_broken_promise(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = recorded(tmp_path)

    async def contend() -> None:
        async with LockClient(MemoryBackend(), observers=[Recorder(path, actor="C")]) as locks:
            async with locks.lock("seats/43"):
                assert await locks.lock("seats/43").try_acquire() is None

    asyncio.run(contend())
    assert last(path, "not_acquired")["reason"] == "held"
    assert run_app(["check", str(path)]) == 0
    assert "31 acquisitions" in capsys.readouterr().out
    assert run_app(["timeline", str(path), "--svg", str(tmp_path / "run.svg")]) == 0


def test_a_broken_promise_is_told_and_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = recorded(tmp_path)
    again = last(path, "acquired")
    with_lines(path, {**again, "t": float(str(again["t"])) + 1.0, "holder": "00000000", "waited": 0.0})
    assert run_app(["check", str(path)]) == 1
    said = capsys.readouterr().out
    assert "P4 shared_token" in said
    assert "verdict: violated" in said


def test_a_stale_write_is_found_among_recordings_of_several_processes(tmp_path: Path):
    path = recorded(tmp_path)
    end = float(str(last(path, "released")["t"]))
    write = {"kind": "write_accepted", "resource": "seats/42", "actor": "store"}
    other = with_lines(
        tmp_path / "store.jsonl", {**write, "t": end + 2, "token": 5}, {**write, "t": end + 3, "token": 4}
    )
    assert run_app(["check", str(path)]) == 0
    assert run_app(["check", str(path), str(other)]) == 1


def test_too_few_acquisitions_are_unknown(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = recorded(tmp_path, holders=10)
    assert run_app(["check", str(path)]) == 3
    assert "verdict: unknown: fewer than 25 acquisitions" in capsys.readouterr().out
    assert run_app(["check", str(path), "--least", "10"]) == 0


def test_a_promise_that_has_to_be_shown_and_is_not_makes_it_unknown(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert run_app(["check", str(recorded(tmp_path)), "--require", "P3"]) == 3
    assert "nothing was recorded about P3" in capsys.readouterr().out


def test_one_holder_alone_shows_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    line = {"kind": "acquired", "actor": "A", "name": "a", "ttl": 5, "deadline": 9, "holder": "1", "token": 1, "t": 1}
    path = with_lines(tmp_path / "run.jsonl", line)
    assert run_app(["check", str(path), "--least", "1"]) == 3
    assert "no lock was ever handed on" in capsys.readouterr().out


def test_a_simulated_history_can_be_checked_again(tmp_path: Path):
    path = tmp_path / "seed.jsonl"
    path.write_text(play(write_script(33)).text)
    assert run_app(["check", str(path), "--least", "3"]) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--least", "0"], "--least must be at least 1"),
        (["--require", "P9"], "--require takes promises from P1 to P8"),
        (["/nowhere/run.jsonl"], "cannot read"),
    ],
)
def test_wrong_usage(arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert run_app(["check", str(recorded(tmp_path, holders=2)), *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("fields", "wrong"),
    [
        ({}, "'name' is missing"),
        ({"name": "a"}, "'token' is missing"),
        ({"name": "a", "token": "x"}, "invalid literal for int() with base 10: 'x'"),
        ({"name": "a", "token": 1e999}, "cannot convert float infinity to integer"),
        ({"name": "a", "token": 1, "deadline": 10**400}, "int too large to convert to float"),
    ],
)
def test_a_line_that_lacks_a_field_is_wrong_usage_and_told_with_its_place(
    fields: dict[str, object], wrong: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path = with_lines(tmp_path / "miss.jsonl", {"t": 0, "kind": "run"}, {"t": 1, "kind": "acquired", **fields})
    assert run_app(["check", str(path)]) == 2
    place = f"line 2 of {shown(str(path))}"
    assert capsys.readouterr().err == f"fencing: {place}: a recorded event of kind 'acquired' is incomplete: {wrong}\n"


def test_names_in_a_recording_cannot_reach_the_terminal_as_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    grant = {"kind": "acquired", "name": "\x1b[2Jmine", "ttl": 5, "deadline": 9, "token": 1}
    lines = [{**grant, "t": t, "actor": f"[red]{t}", "holder": f"h{t}"} for t in (1, 2)]
    assert run_app(["check", str(with_lines(tmp_path / "run.jsonl", *lines))]) == 1
    said = capsys.readouterr().out
    assert "\x1b" not in said
    assert "\\x1b[2Jmine" in said
    assert "[red]" in said


def test_checking_needs_no_pytest(tmp_path: Path):
    code = "import sys; import fencing_sdk.cli.check; sys.exit('pytest' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def eventful(count: int) -> list[dict[str, object]]:
    """A recording of so many acquisitions by eight processes, with everything in it that grows with it."""
    lines: list[dict[str, object]] = []
    for number in range(count):
        actor, name = f"worker {number % 8}", f"seats/{number % (count // 4)}"
        lease = {"actor": actor, "name": name, "holder": f"h{number}", "token": number}
        write = {"actor": actor, "resource": name, "holder": f"h{number}"}
        kinds: list[dict[str, object]] = [
            {"kind": "acquiring", **lease},
            {"kind": "acquired", **lease, "ttl": 10, "deadline": number + 8, **({"permit": 0} if number % 2 else {})},
            {"kind": "entered", **lease, "fences": [name]},
            {"kind": "read", "actor": actor, "token": number, "resource": name},
            {"kind": "write_accepted", **write, "token": number},
            {"kind": "write_refused", **write, "token": number // 2, "fence": number},
            {"kind": "frozen", "actor": f"frozen {number}"},
            {"kind": "resumed", "actor": f"frozen {number}"},
            {"kind": "released", **lease},
        ]
        lines += [{"t": number + place / 10, **line} for place, line in enumerate(kinds)]
    return lines


@pytest.mark.parametrize(
    "use", [history.check, tell, lambda lines: draw(tell(lines))], ids=["check", "story", "picture"]
)
def test_twice_the_recording_is_twice_the_work(use: Callable[[list[dict[str, object]]], object]):
    once, twice = (operations(partial(use, eventful(count))) for count in (80, 160))
    assert twice < 2.3 * once


def test_a_terminal_shows_how_far_the_reading_is_from_the_first_line_on(tmp_path: Path, at_a_terminal: Open):
    path = with_lines(tmp_path / "run.jsonl", *eventful(400))
    terminal = at_a_terminal("check", str(path), "--least", "1")
    terminal.shows("reading")
    terminal.shows("verdict")
