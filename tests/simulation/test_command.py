"""What the command prints: verdicts, rates, and for a failing seed the way to see it again."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.simulation.__main__ import main
from tests.simulation.campaign import Campaign, Progress, Writer
from tests.simulation.control import Control
from tests.simulation.controls import all_controls
from tests.simulation.play import play
from tests.simulation.script import Script

ROOT = Path(__file__).parents[2]


def control(name: str) -> Control:
    return next(one for one in all_controls() if one.name == name)


def test_a_clean_seed_says_so(capsys: pytest.CaptureFixture[str]):
    assert main(["--seed", "3"]) == 0
    assert "seed 3: nothing was broken" in capsys.readouterr().out


def test_a_failing_seed_is_printed_with_a_small_script_that_repeats_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    broken = control("raising a fence does nothing")
    with broken.broken():
        seed = next(script.seed for script in broken.scripts() if play(script).report.rules & broken.rules)
        assert main(["--seed", str(seed), "--record", str(tmp_path / "run.jsonl")]) == 1
    said = capsys.readouterr().out
    assert f"seed {seed}" in said
    assert "P3 fence_not_raised at" in said
    assert "the smallest script that still does" in said
    assert f"--seed {seed} --record" in said
    script = re.search(r"--script '(.*)'", said)
    assert script is not None
    assert (tmp_path / "run.jsonl").read_text().count("\n") > 20

    small = tmp_path / "small.json"
    small.write_text(script[1])
    with broken.broken():
        assert main(["--script", script[1]]) == 1
        assert main(["--script", f"@{small}"]) == 1
    assert main(["--script", script[1]]) == 0  # mended
    assert len(Script.from_json(script[1]).visits) <= 3


def test_a_seed_that_fails_is_named_at_once(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    """A million histories take hours."""
    said: list[str] = []

    def run(_first: int, _histories: int, _jobs: int, progress: Progress, _write: Writer) -> Campaign:
        campaign = Campaign(histories=100, seconds=1.0)
        for seed in (7, 9):
            campaign.failed[seed] = ["overrun", "stale_read"]
            progress(campaign)
            said.append(capsys.readouterr().out)
        return Campaign(histories=200, seconds=2.0)

    monkeypatch.setattr("tests.simulation.__main__.run_campaign", run)
    main([])
    assert "seed 7 broke overrun, stale_read\n" in said[0]
    assert said[1] == "seed 9 broke overrun, stale_read\n"


def test_one_history_alone_shows_too_little(capsys: pytest.CaptureFixture[str]):
    assert main(["--histories", "1", "--jobs", "1"]) == 3
    said = capsys.readouterr().out
    assert "verdict: unknown" in said
    assert "histories per second" in said


IN_SMALL_PARTS = """
import sys
from tests.simulation import __main__, campaign
campaign._PART = 10
sys.exit(__main__.main(sys.argv[1:]))
"""


def interrupted(histories: int, on_interrupt: signal.Handlers) -> tuple[int, str]:
    """The exit code and the words of a campaign that gets Ctrl-C once something was played: all its processes do."""
    command = [sys.executable, "-c", IN_SMALL_PARTS, "--histories", str(histories), "--jobs", "2"]
    running = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=ROOT,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, on_interrupt),  # noqa: PLW1509  (no other thread runs here)
    )
    assert running.stdout is not None
    first = running.stdout.readline()
    os.killpg(running.pid, signal.SIGINT)
    said, complaints = running.communicate(timeout=300)
    assert "histories" in first
    assert complaints == ""
    return running.returncode, said


def test_an_interrupt_ends_every_process_and_tells_what_is_known():
    code, said = interrupted(1_000_000, signal.SIG_DFL)
    assert code == 130, said
    assert re.search(r"^interrupted: \d+ of 1000000 histories were played$", said, re.MULTILINE)
    assert "verdict: ok" in said


@pytest.mark.slow
def test_where_interrupts_are_ignored_no_history_is_left_out():
    """So a shell starts what it runs in the background. A pass with histories missing would be a lie."""
    code, said = interrupted(90, signal.SIG_IGN)
    assert code == 0, said
    (acquisitions,) = re.findall(r"^90 histories in .*\n(\d+) acquisitions", said, re.MULTILINE)
    assert int(acquisitions) > 5 * 90


@pytest.mark.parametrize("arguments", [["--jobs", "0"], ["--histories", "0"], ["--histories", "many"]])
def test_numbers_that_are_none_are_wrong_usage(arguments: list[str]):
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2


@pytest.mark.parametrize("arguments", [["--script", "{}"], ["--script", "@/nowhere/script.json"]])
def test_a_script_that_cannot_be_read_is_wrong_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]):
    assert main(arguments) == 2
    assert capsys.readouterr().out.strip()


def test_the_controls_are_shown(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    shown = [control("no guard"), control("the heartbeat never renews")]
    monkeypatch.setattr("tests.simulation.__main__.all_controls", lambda: shown)
    assert main(["--controls"]) == 0
    assert "2 of 2 broken variants were caught" in capsys.readouterr().out


def test_a_control_that_is_missed_is_a_failure(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    missed = Control("nothing at all", "P1", frozenset({"overrun"}), Control.nothing, within=2)
    monkeypatch.setattr("tests.simulation.__main__.all_controls", lambda: [missed])
    assert main(["--controls"]) == 1
    assert "MISSED" in capsys.readouterr().out
