"""Recordings are read: checked for broken promises, and drawn as a timeline."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from command_line import run_app
from inside import Recorder
from operations import operations
from terminal import Open, at_a_terminal

from fencing_sdk import ConfigurationError, LockClient
from fencing_sdk.backends.memory import MemoryBackend
from fencing_sdk.cli.recordings import Line, read_recording, stories_of
from fencing_sdk.cli.timeline import WIDTH, draw, draw_recordings
from fencing_sdk.errors import shown
from fencing_sdk.testing import history
from tests.simulation.play import play
from tests.simulation.script import write_script

# ``fencing check``: a verdict and an exit code, never a pass for a recording that shows too little.


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


def test_of_too_few_acquisitions_the_command_says_unknown(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = recorded(tmp_path, holders=10)
    assert run_app(["check", str(path)]) == 3
    assert "verdict: unknown: fewer than 25 acquisitions" in capsys.readouterr().out
    assert run_app(["check", str(path), "--least", "10"]) == 0


def test_a_promise_that_has_to_be_shown_and_is_not_makes_it_unknown(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert run_app(["check", str(recorded(tmp_path)), "--require", "P3"]) == 3
    assert "the recording has nothing about P3" in capsys.readouterr().out


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
        ({"name": "a", "token": "x"}, "'token' is not such a number"),
        ({"name": "a", "token": 1e999}, "'token' is not such a number"),
        ({"name": "a", "token": 1, "deadline": 10**400}, "'deadline' is not such a number"),
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
    code = "import sys; import fencing_sdk.cli.recordings; sys.exit('pytest' in sys.modules)"
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
    "use", [history.check, stories_of, lambda lines: draw(stories_of(lines))], ids=["check", "story", "picture"]
)
def test_twice_the_recording_is_twice_the_work(use: Callable[[list[dict[str, object]]], object]):
    once, twice = (operations(partial(use, eventful(count))) for count in (80, 160))
    assert twice < 2.3 * once


def test_a_terminal_shows_how_far_the_reading_is_from_the_first_line_on(tmp_path: Path, at_a_terminal: Open):
    path = with_lines(tmp_path / "run.jsonl", *eventful(400))
    terminal = at_a_terminal("check", str(path), "--least", "1")
    terminal.shows("reading")
    terminal.shows("verdict")


# The picture of a recording: everything that was recorded is in it, and nothing in it can become markup.


SVG = "{http://www.w3.org/2000/svg}"
A, B = "worker A", "worker B"


def event(t: float, kind: str, actor: str = A, **fields: object) -> Line:
    return {"t": 5000 + t, "kind": kind, "actor": actor, **fields}


def late_write(*, guarded: bool = True, name: str = "account/7") -> list[Line]:
    """A is frozen, B takes over, A writes too late."""
    last = (
        event(4.2, "write_refused", resource=name, token=1, fence=2, text="balance 110")
        if guarded
        else event(4.2, "write_accepted", resource=name, token=1, text="balance 110")
    )
    return [
        event(-0.5, "run", "demo", title="With a guard" if guarded else "Without a guard"),
        event(0.0, "acquiring", name=name),
        event(0.01, "acquired", name=name, token=1, ttl=2.0, deadline=5001.58),
        event(0.02, "read", resource=name, token=1, text="balance 100"),
        event(0.2, "acquiring", B, name=name),
        event(0.4, "renewed", name=name, token=1, deadline=5001.98),
        event(0.8, "renewed", name=name, token=1, deadline=5002.38),
        event(0.9, "frozen", "demo", lane=A),
        event(2.8, "acquired", B, name=name, token=2, ttl=2.0, deadline=5004.38),
        event(2.81, "fence_raised", B, name=name, token=2, resource=name),
        event(3.2, "renewed", B, name=name, token=2, deadline=5004.78),
        event(3.6, "write_accepted", B, resource=name, token=2, text="balance 105"),
        event(4.1, "resumed", "demo", lane=A),
        event(4.15, "lost", name=name, token=1, reason="stalled"),
        last,
        event(4.3, "released", B, name=name, token=2, held_for=1.5, confirmed=True),
        event(4.4, "outcome", "demo", text="the balance is what it is"),
    ]


def picture(lines: list[Line]) -> ET.Element:
    return ET.fromstring(draw(stories_of(lines)))


def texts(root: ET.Element) -> list[str]:
    return [node.text or "" for node in root.iter(f"{SVG}text")]


def tips(root: ET.Element) -> list[str]:
    return [node.text or "" for node in root.iter(f"{SVG}title")]


def test_every_lock_holder_and_storage_has_a_lane():
    shown = texts(picture(late_write()))
    assert shown[:2] == ["With a guard", "the balance is what it is"]
    assert [text for text in shown if text in {"lock", A, B, "storage"}] == ["lock", A, B, "storage"]
    assert shown.count("account/7") == 2


def test_a_refused_write_says_which_token_was_too_low():
    root = picture(late_write(guarded=True))
    assert "token 1 < 2: refused" in texts(root)
    assert "late write refused" in texts(root)  # and the legend explains the sign
    assert "late write accepted" not in texts(root)
    assert "not written: balance 110" in texts(root)
    assert "balance 110" not in texts(root)  # which it never was


def test_a_late_write_that_was_accepted_does_not_look_like_the_others():
    root = picture(late_write(guarded=False))
    assert "token 1 < 2: accepted" in texts(root)
    assert "late write accepted" in texts(root)
    assert "token 2 writes" in texts(root)
    assert "balance 110" in texts(root)


def test_both_runs_are_in_one_picture():
    second = [{**line, "t": line["t"] + 10} for line in late_write(guarded=True)]
    shown = texts(picture([*second, *late_write(guarded=False)]))
    assert shown.index("Without a guard") < shown.index("With a guard")


def test_the_freeze_the_loss_and_the_safety_band_are_shown_where_they_were():
    (story,) = stories_of(late_write())
    first, second = story.leases
    assert story.safety_of(first) == (pytest.approx(5002.38), pytest.approx(5002.8))  # own deadline, handed on
    assert story.safety_of(second) is None
    root = picture(late_write())
    assert "frozen for 3.2 s" in texts(root)
    assert "LeaseLostError: stalled" in texts(root)
    assert "safety: the holder stops at 2.38 s, the store hands on at 2.80 s" in tips(root)
    assert f"{B} waits for account/7 for 2.60 s" in tips(root)
    assert sum(tip.startswith("renewed at") for tip in tips(root)) == 3


def test_a_lease_that_was_taken_away_ends_where_the_holder_learnt_it():
    lines = [
        event(0, "acquired", name="a", token=1, ttl=2.0, deadline=5001.6),
        event(1, "lost", name="a", token=1, reason="taken_over"),
        event(3, "acquiring", name="a"),
    ]
    (story,) = stories_of(lines)
    assert story.used_until(story.leases[0]) == story.handed_on(story.leases[0]) == 5001
    assert story.safety_of(story.leases[0]) is None


def test_each_permit_has_a_lane_and_readers_share_one():
    lines = [event(1.0, "run", title="t", declared=True)]
    for number, token in ((0, 7), (1, 8)):
        about = {"actor": f"worker {number}", "name": "gpu-pool", "holder": f"{number}" * 8}
        lines.append(event(1.0, "acquiring", **about))
        acquired = {"token": token, "ttl": 5.0, "waited": 0.0, "deadline": 5.0, "mode": "permit"}
        lines.append(event(1.1, "acquired", **about, **acquired, permit=number, permits=2))
    for number in (2, 3):
        about = {"actor": f"worker {number}", "name": "catalog", "holder": f"{number}" * 8}
        acquired = {"token": 9, "ttl": 5.0, "waited": 0.0, "deadline": 6.0, "mode": "reader", "permit": None}
        lines.append(event(1.0 + number / 10, "acquired", **about, **acquired))
    lines.append(event(4.0, "released", actor="worker 2", name="catalog", holder="2" * 8, token=9, held_for=2.8))
    (story,) = stories_of(lines)
    assert story.locks == ["gpu-pool #0", "gpu-pool #1", "catalog"]
    first, second = (lease for lease in story.leases if lease.name == "catalog")
    assert story.handed_on(first) > second.acquired
    assert {"gpu-pool #0", "gpu-pool #1"} <= set(texts(picture(lines)))


def test_the_safety_band_of_the_last_lease_is_not_cut_off():
    lines = [
        event(0, "acquired", name="a", token=1, ttl=2.0, deadline=5001.6),
        event(1.6, "lost", name="a", token=1, reason="expired"),
    ]
    (story,) = stories_of(lines)
    assert story.safety_of(story.leases[0]) == (5001.6, 5002)
    assert story.end == 5002


def test_a_lease_that_is_still_held_reaches_the_end_of_the_recording():
    lines = [event(0, "acquired", name="a", token=1, ttl=9.0, deadline=5007), event(1, "acquiring", B, name="a")]
    (story,) = stories_of(lines)
    assert story.used_until(story.leases[0]) == 5001
    assert story.handed_on(story.leases[0]) == 5001


def test_each_wait_ends_with_its_own_acquisition():
    """Two waits of one worker for one lock: the later one gives up first, and the first is served at last."""
    lines = [
        event(0, "acquiring", name="a", holder="h1"),
        event(1, "acquiring", name="a", holder="h2"),
        event(3, "not_acquired", name="a", holder="h2", reason="timed_out", waited=2.0, unanswered=0),
        event(7, "acquired", name="a", holder="h1", token=1, ttl=9.0, deadline=5014),
        event(8, "released", name="a", holder="h1", token=1, held_for=1.0, confirmed=True),
    ]
    (story,) = stories_of(lines)
    assert [(wait.start - 5000, wait.end - 5000) for wait in story.waits] == [(0, 7), (1, 3)]


@pytest.mark.parametrize("name", ["<script>alert(1)</script>", '"&quot;]]>', "\x00\x1b[31m\ud800", "é" * 500])
def test_a_name_cannot_break_the_picture(name: str):
    root = picture(late_write(name=name))
    allowed = {"svg", "g", "rect", "line", "path", "circle", "text", "title", "defs", "pattern"}
    assert {node.tag.removeprefix(SVG) for node in root.iter()} == allowed
    assert any(name[:8].replace("\x00", "\N{REPLACEMENT CHARACTER}")[:1] in text for text in texts(root))


def boxes(root: ET.Element) -> list[tuple[str, float, float, float]]:
    """Text, left, right and baseline of every caption below a storage line, as wide as the widest usual font."""
    found = []
    for node in root.iter(f"{SVG}text"):
        if node.get("text-anchor") == "middle" and not (node.text or "").endswith(" s"):
            half = len(node.text or "") * 13 * 0.6 / 2
            x, y = float(node.get("x", "0")), float(node.get("y", "0"))
            found.append((node.text or "", x - half, x + half, y))
    return found


def test_captions_neither_overlap_nor_leave_the_picture():
    lines = late_write() + [
        event(4.0 + n / 50, "write_accepted", B, resource="account/7", token=2, text=f"balance {n}") for n in range(40)
    ]
    captions = boxes(picture(sorted(lines, key=lambda line: line["t"])))
    assert "token 1 < 2: refused" in {text for text, *_ in captions}  # what must not be missing is not crowded out
    for text, left, right, y in captions:
        assert 0 < left < right < WIDTH, text
        for other, start, end, level in captions:
            assert (text, left, y) == (other, start, level) or abs(y - level) > 10 or right < start or end < left


def test_a_recording_without_the_beginning_can_be_drawn():
    root = picture(late_write()[6:])
    assert "token 2" in texts(root)
    assert "token 1" not in texts(root)


def test_recordings_of_several_processes_are_put_on_one_axis(tmp_path: Path):
    one, two = tmp_path / "one.jsonl", tmp_path / "two.jsonl"
    lines = late_write()
    one.write_text("".join(json.dumps(line) + "\n" for line in lines if line["actor"] == A))
    two.write_text("".join(json.dumps(line) + "\n" for line in lines if line["actor"] != A) + "\n")
    assert read_recording([two, one]) == lines
    draw_recordings([two, one], tmp_path / "out.svg")
    assert (tmp_path / "out.svg").read_text() == draw(stories_of(lines))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nonsense\n", "line 1 of"),
        ('{"t": 1, "kind": "x"}\n[]\n', "line 2 of"),
        ('{"t": "1", "kind": "x"}\n', "line 1 of"),
        ('{"t": NaN, "kind": "x"}\n', "line 1 of"),
        ('{"t": 1, "kind": "acquired"}\n', r"line 1 of '.*run.jsonl': .* 'acquired' is incomplete: 'name' is missing$"),
        (
            '\n{"t": 1, "kind": "lost", "name": "a", "token": "one"}\n',
            r"line 2 of '.*run.jsonl': .* 'lost' is incomplete: 'token' is not such a number$",
        ),
        ("", "nothing to draw"),
        ('{"t": 1, "kind": "something of its own"}\n', "nothing to draw"),
        ('{"t": 1, "kind": "end", "actor": "A"}\n{"t": 2, "kind": "left", "actor": "A"}\n', "nothing to draw"),
    ],
)
def test_what_is_no_recording_is_refused_with_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, message: str
):
    monkeypatch.chdir(tmp_path)  # errors cut long paths
    recording, svg = Path("run.jsonl"), Path("out.svg")
    recording.write_text(text)
    with pytest.raises(ConfigurationError, match=message):
        draw_recordings([recording], svg)
    assert not svg.exists()


@pytest.mark.parametrize(
    ("svg", "problem"),
    [("no/such/o.svg", "No such file or directory"), (".", "Is a directory"), ("file/o.svg", "Not a directory")],
)
def test_a_picture_that_cannot_be_written_is_told_before_anything_is_read(tmp_path: Path, svg: str, problem: str):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match=rf"^cannot write .*: {problem}$"):
        draw_recordings([tmp_path / "missing.jsonl"], tmp_path / svg)


@pytest.mark.parametrize("locked", ["o.svg", "."], ids=["file", "folder"])
def test_a_picture_that_may_not_be_written_is_told_before_anything_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, locked: str
):
    svg = tmp_path / "o.svg"
    if locked != ".":
        svg.write_text("mine")
    monkeypatch.setattr("os.access", lambda path, mode: Path(path) != tmp_path / locked)  # root may write anywhere
    with pytest.raises(ConfigurationError, match=r"^cannot write .*: Permission denied$"):
        draw_recordings([tmp_path / "missing.jsonl"], svg)


def test_files_that_cannot_be_used_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)  # errors cut long paths
    with pytest.raises(ConfigurationError, match=r"cannot read 'missing.jsonl'"):
        draw_recordings([Path("missing.jsonl")], Path("out.svg"))
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigurationError, match="not UTF-8"):
        draw_recordings([tmp_path / "binary.jsonl"], tmp_path / "out.svg")
    recording = tmp_path / "run.jsonl"
    recording.write_text("".join(json.dumps(line) + "\n" for line in late_write()))
    with pytest.raises(ConfigurationError, match="cannot write"):
        draw_recordings([recording], tmp_path / "no" / "folder.svg")
