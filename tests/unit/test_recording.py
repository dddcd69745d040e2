"""A recording is JSON lines: whole ones, however many write, and whatever the names are."""

import gc
import json
import os
import stat
import subprocess
import sys
import threading
import uuid
import warnings
from pathlib import Path

import pytest
from inside import Recorder

from fencing_sdk import LossReason, connect
from fencing_sdk.abc import Claim
from fencing_sdk.errors import ConfigurationError
from fencing_sdk.events import Acquiring, Lost

ODD_NAMES = ["a\u2028b", "\u00e8", "🔒" * 100, 'quote " and \\ back', "</script>", "a" * 512, "\u202e", "{}", "'"]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run.jsonl"


def lines(path: Path) -> list[dict[str, object]]:
    raw = path.read_bytes()
    assert raw.endswith(b"\n")
    assert raw.isascii()
    return [json.loads(line) for line in raw.decode().splitlines()]


def test_an_event_becomes_one_line_with_time_kind_and_actor_first(path):
    recorder = Recorder(path, actor="worker-1")
    recorder(Lost(name="seats/42", at=7.25, holder="9f8a01c2", token=34, reason=LossReason.EXPIRED))
    (line,) = lines(path)
    assert list(line)[:3] == ["t", "kind", "actor"]
    about = {"t": 7.25, "kind": "lost", "actor": "worker-1", "name": "seats/42", "holder": "9f8a01c2"}
    assert line == {**about, "token": 34, "reason": "expired", "detail": ""}


@pytest.mark.parametrize("name", ODD_NAMES, ids=lambda name: ascii(name)[:20])
def test_odd_names_stay_on_one_line_and_come_back_as_they_were(path, name):
    recorder = Recorder(path)
    recorder(Acquiring(name=name, at=1.0, holder="9f8a01c2"))
    recorder.record("write", resource=name)
    first, second = lines(path)
    assert first["name"] == second["resource"] == name


def test_what_json_does_not_know_is_written_as_text(path):
    recorder = Recorder(path)
    number = uuid.uuid4()
    recorder.record("write", id=number, path=path, error=ValueError("a\nb"))
    (line,) = lines(path)
    assert (line["id"], line["path"], line["error"]) == (str(number), str(path), "a\nb")


def test_a_recorded_claim_does_not_show_its_owner(path):
    claim = Claim("seats/42", 15.0)
    Recorder(path).record("asked", claim=claim)
    assert claim.owner not in path.read_text()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), [float("nan")]], ids=repr)
def test_a_line_is_json_or_is_not_written(path, value):
    """``NaN`` is no JSON: one such line would make the whole recording unreadable to other tools."""
    recorder = Recorder(path)
    with pytest.raises(ValueError, match=r"JSON"):
        recorder.record("write", value=value)
    assert path.read_bytes() == b""


def test_recordings_are_appended_to(path):
    for number in range(3):
        Recorder(path).record("run", number=number)
    assert [line["number"] for line in lines(path)] == [0, 1, 2]


WRITER = """
import sys
from fencing_sdk._recording import Recorder
from fencing_sdk.events import Acquiring
recorder = Recorder(sys.argv[1])
print("ready", flush=True)
sys.stdin.readline()
for number in range(300):
    recorder.record("write", number=number, padding="x" * (number * 37 % 5000))
    recorder(Acquiring(name="seats/42", at=float(number), holder="9f8a01c2"))
"""


def test_several_processes_append_whole_lines_to_one_file(path):
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for _ in range(3)
    ]
    for writer in writers:
        assert writer.stdout.readline() == b"ready\n"
    for writer in writers:
        writer.stdin.write(b"\n")
        writer.stdin.flush()
    for writer in writers:
        writer.communicate(timeout=300)
        assert writer.returncode == 0
    recorded = lines(path)
    assert len(recorded) == 3 * 600
    for writer in writers:
        own = [line for line in recorded if line["actor"] == str(writer.pid)]
        assert [line["number"] for line in own if line["kind"] == "write"] == list(range(300))


def test_several_threads_share_a_recorder(path):
    recorder = Recorder(path)
    threads = [
        threading.Thread(target=lambda: [recorder.record("write", padding="x" * 3000) for _ in range(100)])
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(lines(path)) == 400


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_forked_child_records_in_its_own_lane(path):
    script = (
        "import os, sys\n"
        "from fencing_sdk._recording import Recorder\n"
        "recorder = Recorder(sys.argv[1])\n"
        "child = os.fork()\n"
        "recorder.record('run')\n"
        "if child:\n"
        "    os.waitpid(child, 0)\n"
        "    print(os.getpid(), child)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, path], capture_output=True, text=True, check=True)
    assert {line["actor"] for line in lines(path)} == set(done.stdout.split())


@pytest.mark.skipif(os.name != "posix", reason="file modes are of POSIX")
def test_a_new_recording_is_readable_by_its_owner_alone(path):
    before = os.umask(0)
    try:
        Recorder(path)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize(
    "bad",
    ["", "/nonexistent/run.jsonl", "/", "a\0b", None, 5, 1, True, 3.5, [], object()],
    ids=lambda bad: f"{type(bad).__name__}-{ascii(bad)[:8]}",
)
def test_a_file_that_cannot_be_opened_is_a_configuration_error(bad):
    """The numbers 1 and True would be standard output."""
    with pytest.raises(ConfigurationError, match=r"^cannot record to ") as caught:
        Recorder(bad)
    assert str(caught.value).isprintable()


def test_the_recorder_of_a_client_closes_with_it(path, monkeypatch):
    """The user does not have that recorder in hand, and could not close it: no ResourceWarning may blame them."""
    monkeypatch.setenv("FENCING_RECORD", str(path))
    client = connect("memory://")
    assert path.exists()
    descriptors = Path("/proc/self/fd")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        del client
        gc.collect()
    if descriptors.exists():
        assert str(path) not in {str(link.resolve()) for link in descriptors.iterdir()}


def test_after_closing_nothing_is_written_anywhere(path, tmp_path):
    """The number of the file may belong to another one by now."""
    recorder = Recorder(path)
    recorder.close()
    recorder.close()
    with (tmp_path / "other").open("wb") as other:
        with pytest.raises(ValueError, match=r"closed"):
            recorder.record("write")
        other.flush()
    assert (tmp_path / "other").read_bytes() == path.read_bytes() == b""


def test_a_child_program_does_not_inherit_the_file(path):
    recorder = Recorder(path)
    listing = subprocess.run(["ls", "-l", "/proc/self/fd"], close_fds=False, capture_output=True, text=True, check=True)
    assert str(path) not in listing.stdout
    recorder.close()
