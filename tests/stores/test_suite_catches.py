"""The suite itself is under test: every broken backend is caught, and every promise catches one."""

import runpy
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from once import once_per_run

from fencing_sdk.testing import BackendSuite

HERE = Path(__file__).parent
BROKEN = HERE / "broken.py"
EXPECTED: dict[str, tuple[str, ...]] = runpy.run_path(str(BROKEN))["EXPECTED"]
CATCHES = [(broken, promise) for broken, promises in EXPECTED.items() for promise in promises]
OF_PROCESSES = {"test_processes_count_exactly"}
"""Broken backends live in one process; `test_many_tasks_count_exactly` is the same promise there."""
BUGS_OF_THE_BENCH = ("AttributeError", "NameError", "TypeError", "ImportError", "KeyError", "fixture")


def play_all(folder: Path) -> None:
    """Run the suite on all broken backends, with a report in *folder*."""
    tests = [f"{BROKEN}::Test{broken}::{promise}" for broken, promise in CATCHES]
    quiet = ["-q", "-n0", "--tb=line", "-p", "no:cacheprovider", "-p", "no:unraisableexception"]
    command = [sys.executable, "-m", "pytest", *quiet, f"--junitxml={folder / 'report.xml'}"]
    done = subprocess.run(
        [*command, f"{BROKEN}::TestSound", *tests], cwd=HERE.parent.parent, capture_output=True, text=True
    )
    assert done.returncode == 1, done.stdout + done.stderr


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], list[str]]:
    """What pytest says about each broken backend and promise: one text for each case, empty when it passed."""
    report = once_per_run(tmp_path_factory, "broken-backends", play_all) / "report.xml"
    found: dict[tuple[str, str], list[str]] = {}
    for case in ET.parse(report).iter("testcase"):
        broken = case.attrib["classname"].rpartition(".")[2].removeprefix("Test")
        failures = [failure.attrib["message"] for failure in case.findall("failure")]
        assert not case.findall("error"), f"{broken}: {case.findall('error')[0].attrib['message']}"
        assert not case.findall("skipped")
        found.setdefault((broken, case.attrib["name"].partition("[")[0]), []).append("".join(failures))
    return found


@pytest.mark.parametrize(("broken", "promise"), CATCHES, ids=lambda name: name.removeprefix("test_"))
def test_a_broken_backend_is_caught(verdicts, broken: str, promise: str):
    failures = [failure for failure in verdicts[broken, promise] if failure]
    assert failures, f"{promise} does not notice {broken}"
    assert not any(failure.startswith(BUGS_OF_THE_BENCH) for failure in failures), failures


def test_a_sound_backend_passes(verdicts):
    played = {promise: failures for (broken, promise), failures in verdicts.items() if broken == "Sound"}
    assert len(played) > 100
    assert not [promise for promise, failures in played.items() if any(failures)]


def test_every_promise_catches_a_broken_backend():
    promises = {name for name in dir(BackendSuite) if name.startswith("test_")}
    caught = {promise for _, promise in CATCHES}
    shown = {name for name in dir(runpy.run_path(str(BROKEN))["Bench"]) if name.startswith("test_")}
    assert promises | shown == caught | OF_PROCESSES
