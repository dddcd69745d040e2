"""The picture of a recording: everything that was recorded is in it, and nothing in it can become markup."""

import json
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from fencing_sdk import ConfigurationError
from fencing_sdk.cli._picture import WIDTH, draw
from fencing_sdk.cli._recording_lines import Line, read_recording
from fencing_sdk.cli._story import tell
from fencing_sdk.cli.timeline import draw_recordings

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
    return ET.fromstring(draw(tell(lines)))


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
    shown = texts(picture(late_write(guarded=False) + late_write(guarded=True)))
    assert shown.index("Without a guard") < shown.index("With a guard")


def test_the_freeze_the_loss_and_the_safety_band_are_shown_where_they_were():
    (story,) = tell(late_write())
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
    (story,) = tell(lines)
    assert story.leases[0].used_until == story.handed_on(story.leases[0]) == 5001
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
    (story,) = tell(lines)
    assert story.locks == ["gpu-pool #0", "gpu-pool #1", "catalog"]
    first, second = (lease for lease in story.leases if lease.lock == "catalog")
    assert story.handed_on(first) > second.start
    assert {"gpu-pool #0", "gpu-pool #1"} <= set(texts(picture(lines)))


def test_the_safety_band_of_the_last_lease_is_not_cut_off():
    lines = [
        event(0, "acquired", name="a", token=1, ttl=2.0, deadline=5001.6),
        event(1.6, "lost", name="a", token=1, reason="expired"),
    ]
    (story,) = tell(lines)
    assert story.safety_of(story.leases[0]) == (5001.6, 5002)
    assert story.end == 5002


def test_a_lease_that_is_still_held_reaches_the_end_of_the_recording():
    lines = [event(0, "acquired", name="a", token=1, ttl=9.0, deadline=5007), event(1, "acquiring", B, name="a")]
    (story,) = tell(lines)
    assert story.leases[0].used_until == 5001
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
    (story,) = tell(lines)
    assert [(wait.start - 5000, wait.until - 5000) for wait in story.waits] == [(0, 7), (1, 3)]


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
    assert (tmp_path / "out.svg").read_text() == draw(tell(lines))


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
            r"line 2 of '.*run.jsonl': .* 'lost' is incomplete: 'token' is no such number$",
        ),
        ("", "nothing to draw"),
        ('{"t": 1, "kind": "something of its own"}\n', "nothing to draw"),
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
