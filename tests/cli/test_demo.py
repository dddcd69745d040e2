"""`fencing demo` shows what it says, or says that it did not."""

import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import threading
import time
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from child_processes import children
from command_line import Fencing, alive, state, until
from once import once_per_run

from fencing_sdk.cli._demo_picture import Line
from fencing_sdk.cli._demo_run import BANK, LOCKS, DemoRun, TooBusyError
from fencing_sdk.cli.demo import Evidence, _leaving_on_signals, open_account


@pytest.fixture(scope="module")
def performed(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], Path]:
    """The demo, once, with everything it can leave behind."""
    home = once_per_run(tmp_path_factory, "performed-demo", perform)
    code, out, err = json.loads((home / "done.json").read_text())
    return subprocess.CompletedProcess([], code, out, err), home / "demo"


def perform(home: Path) -> None:
    (home / "demo").mkdir()
    fencing = Fencing(home / "demo")
    fencing.environment |= {"FENCING_RECORD": "run.jsonl", "TMPDIR": str(fencing.folder)}
    process = fencing.start("demo", "--svg", "demo.svg")
    out, err = process.communicate(timeout=150)
    (home / "done.json").write_text(json.dumps([process.returncode, out, err]))


def recorded(folder: Path) -> list[list[Line]]:
    """The lines of each run."""
    runs: list[list[Line]] = []
    for raw in (folder / "run.jsonl").read_text().splitlines():
        line = json.loads(raw)
        if line["kind"] == "run":
            runs.append([])
        runs[-1].append(line)
    return runs


def test_the_demo_ends_well_and_leaves_only_what_was_asked_for(performed):
    done, folder = performed
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert {path.name for path in folder.iterdir()} == {"run.jsonl", "demo.svg"}


def test_the_sdk_in_the_frozen_worker_noticed_too(performed):
    _, folder = performed
    for lines in recorded(folder):
        (raised,) = [line for line in lines if line["kind"] == "raised"]
        assert (raised["actor"], raised["error"]) == ("worker A", "LeaseLostError")


def test_the_demo_tells_the_story_in_plain_text(performed):
    done, _ = performed
    for part in (
        "Without a guard",
        "worker A  is FROZEN by SIGSTOP",
        "worker B  holds the lock: token 2",
        "worker A  LeaseLostError: ",
        "worker A  writes with token 1: balance 110. Accepted",
        "worker A  writes with token 1: balance 110. REFUSED, the guard has seen 2",
        "110: B's 5 are lost",
        "105: B's 5 are safe",
        "Shown: ",
    ):
        assert part in done.stdout
    assert "\x1b" not in done.stdout


def test_the_picture_shows_both_runs_and_loads_nothing(performed):
    _, folder = performed
    picture = (folder / "demo.svg").read_text()
    texts = [node.text for node in ET.fromstring(picture).iter("{http://www.w3.org/2000/svg}text")]
    for words in ("lock", "worker A", "worker B", "storage", "token 1"):
        assert texts.count(words) == 2, words
    assert {"Without a guard", "With a guard", "LeaseLostError: stalled", "waits"} <= {*texts}
    assert {"token 1 is late: accepted", "token 1 < 2: refused", "not written: balance 110"} <= {*texts}
    assert "href" not in picture


def test_the_evidence_of_a_real_run_is_complete(performed):
    _, folder = performed
    without, guarded = recorded(folder)
    assert Evidence(guarded=False, lines=without, balance=110).missing == []
    assert Evidence(guarded=True, lines=guarded, balance=105).missing == []


TAKEN = "B took over with a higher token while A was frozen"
HONEST = "A wrote with a token that it had read before it was frozen"
NOTICED = "LeaseLostError reached A"
LOST, REFUSED = "A's late write destroyed B's", "A's late write was refused"


@pytest.mark.parametrize(
    ("guarded", "kind", "balance", "missing"),
    [
        (False, None, 115, [LOST]),
        (False, None, 105, [LOST]),
        (True, None, 110, [REFUSED]),
        (True, "write_refused", 105, [HONEST, REFUSED]),
        (False, "write_accepted", 110, [TAKEN, HONEST, LOST]),
        (True, "raised", 105, [NOTICED]),
        (True, "frozen", 105, [TAKEN, HONEST]),
        (True, "resumed", 105, [TAKEN, HONEST, NOTICED]),
        (True, "acquired", 105, [TAKEN, HONEST]),
        (True, "read", 105, [HONEST]),
    ],
)
def test_a_run_that_shows_less_does_not_count(
    performed, guarded: bool, kind: str | None, balance: int, missing: list[str]
):
    _, folder = performed
    lines = [line for line in recorded(folder)[guarded] if line["kind"] != kind]
    assert Evidence(guarded, lines, balance).missing == missing


def test_a_token_from_after_the_freeze_is_no_evidence(performed):
    _, folder = performed
    lines = [line | {"token": 3} if line["kind"] == "write_refused" else line for line in recorded(folder)[True]]
    assert Evidence(guarded=True, lines=lines, balance=105).missing == [HONEST]


def test_an_interrupted_demo_leaves_no_process_and_no_folder(fencing: Fencing):
    fencing.environment["TMPDIR"] = str(fencing.folder)
    for number in (signal.SIGINT, signal.SIGTERM):
        demo = fencing.start("demo")
        while "FROZEN" not in (line := demo.stdout.readline()):
            assert line
        workers = children(demo.pid)
        assert len(workers) == 2
        demo.send_signal(number)
        demo.communicate()
        assert demo.returncode == 128 + number
        until(lambda pids=workers: not any(alive(pid) for pid in pids), "the end of the workers")
    assert not list(fencing.folder.glob("fencing-demo-*"))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_demo_between_two_steps_and_not_inside_one(number: signal.Signals):
    before, steps = signal.getsignal(number), []
    with pytest.raises(SystemExit) as left, _leaving_on_signals() as go_on:
        signal.raise_signal(number)
        steps.append("ended")
        go_on()
        steps.append("begun")
    assert left.value.code == 128 + number
    assert steps == ["ended"]
    with pytest.raises(SystemExit), _leaving_on_signals():
        signal.raise_signal(number)
    assert signal.getsignal(number) == before


@pytest.fixture
def run(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[DemoRun]:
    """Worker A holds the lock, for 4 s at a time unless a test asks for more."""
    open_account(tmp_path / BANK)
    with DemoRun(
        tmp_path, ttl=getattr(request, "param", 4), guarded=False, show=lambda _: None, go_on=lambda: None
    ) as opened:
        opened.start("worker A", amount=10)
        opened.prompt("worker A")
        opened.wait_for("worker A", "read")
        yield opened


@pytest.mark.parametrize("run", [8], indirect=True, ids=["a lease that a busy machine renews"])
def test_a_worker_is_frozen_between_two_renewals_and_not_in_one(
    run: DemoRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    worker, renewed, answers = run._workers["worker A"].pid, run.count("worker A", "renewed"), run._service_answers
    answered: list[bool] = []

    def ask() -> bool:
        answered.append(answers())
        return answered[-1]

    monkeypatch.setattr(run, "_service_answers", ask)
    freezer = threading.Thread(target=run.freeze, args=("worker A",))
    with closing(sqlite3.connect(tmp_path / LOCKS, isolation_level=None, timeout=5)) as another:
        another.execute("BEGIN IMMEDIATE")
        freezer.start()
        until(lambda: answered, "the first try")
        assert not answered[0]
        until(lambda: state(worker) != "T", "the worker to go on")
        another.execute("ROLLBACK")
    freezer.join()
    assert state(worker) == "T"
    assert answered[-1]
    assert run.count("worker A", "renewed") > renewed


def test_a_machine_too_busy_to_renew_is_no_evidence(run: DemoRun):
    worker = run._workers["worker A"].pid
    os.kill(worker, signal.SIGSTOP)  # by another process, for longer than the lease
    time.sleep(4)
    os.kill(worker, signal.SIGCONT)
    with pytest.raises(TooBusyError, match="worker A lost its lease without being frozen"):
        run.wait_for("worker A", "renewed", count=99)


@pytest.mark.parametrize(
    ("arguments", "recording"), [(["--svg", "no/such/o.svg"], ""), ([], "no/such/run.jsonl")], ids=["svg", "recording"]
)
def test_a_file_that_cannot_be_written_is_told_before_the_demo(fencing: Fencing, arguments: list[str], recording: str):
    fencing.environment["FENCING_RECORD"] = recording
    done = fencing("demo", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(r"fencing: cannot write 'no/such/.*': No such file or directory\n", done.stderr)


def test_a_demo_whose_workers_die_says_so(fencing: Fencing):
    code = "import sys; sys.executable = '/bin/false'; from fencing_sdk.cli import main; sys.exit(main())"
    done = subprocess.run([sys.executable, "-c", code, "demo"], env=fencing.environment, capture_output=True, text=True)
    assert done.returncode == 1
    assert re.search("The demo failed: worker [AB] failed with exit code 1", done.stdout)  # whoever is looked at first
    assert "Traceback" not in done.stderr
