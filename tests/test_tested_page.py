"""
The table of docs/tested.md shows what runs of the tests recorded, and no more.

    uv run python tests/test_tested_page.py build/tested.jsonl     writes the table from the record of .ci/run
"""

import json
import os
import platform
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "tested.md"
RUNS = ROOT / "docs" / "tested.json"
BEGIN = '<!-- the runs, written by "uv run python tests/test_tested_page.py build/tested.jsonl" -->\n'
END = "<!-- the end of the runs -->\n"


def runs() -> list[dict]:
    return json.loads(RUNS.read_text())


def minor(run: dict) -> tuple[int, int]:
    """Of the Python that it ran on: (3, 15)."""
    return tuple(int(part) for part in run["python"].split(".")[:2])


def table() -> str:
    rows = ["| Python | system | servers, and the tests that passed on them | command | passed | date |"]
    rows.append("| --- | --- | --- | --- | --- | --- |")
    for run in runs():
        servers = ", ".join(f"{name} {seen['version']}: {seen['passed']:,}" for name, seen in run["servers"].items())
        failed = f", {run['failed'] + run['error']:,} failed" if run["failed"] + run["error"] else ""
        cells = [run["python"], run["system"], servers or "no server", f"`{run['command']}`"]
        rows.append(f"| {' | '.join(cells)} | {run['passed']:,}{failed} | {run['date']} |")
    return "\n".join([*rows, ""])


def test_the_table_shows_what_was_recorded():
    shown = PAGE.read_text().partition(BEGIN)[2].partition(END)[0]
    assert shown == table(), "run: uv run python tests/test_tested_page.py"


def test_each_python_that_the_package_names_was_tested():
    classifiers = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["classifiers"]
    named = [
        line.rpartition(" :: ")[2] for line in classifiers if line.startswith("Programming Language :: Python :: 3.")
    ]
    assert len(named) >= 5
    assert {tuple(map(int, version.split("."))) for version in named} <= {minor(run) for run in runs()}


def test_no_test_sees_the_name_of_the_record():
    """A test that runs pytest would add a line of its own."""
    assert "FENCING_TEST_RECORD" not in os.environ


def test_a_run_is_recorded_once_with_what_it_ran_on(tmp_path):
    record = tmp_path / "record"
    command = ["pytest", f"{Path(__file__).relative_to(ROOT)}::{test_no_test_sees_the_name_of_the_record.__name__}"]
    environment = dict(os.environ, FENCING_TEST_RECORD=str(record))
    done = subprocess.run(
        [sys.executable, "-m", *command, "-n0"], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout
    (run,) = map(json.loads, record.read_text().splitlines())
    assert (run["passed"], run["failed"], run["servers"], run["command"]) == (1, 0, {}, " ".join(command))
    assert run["python"].rstrip("t") == platform.python_version()


if __name__ == "__main__":
    lines = [json.loads(line) for path in sys.argv[1:] for line in Path(path).read_text().splitlines()]
    # The row of a command gives way to a later run of that command on the same Python and system.
    rows = {(*minor(run), run["system"], run["command"]): run for run in [*runs(), *lines]}
    RUNS.write_text("[\n" + ",\n".join(json.dumps(rows[key]) for key in sorted(rows)) + "\n]\n")
    before, begin, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(before + begin + table() + END + rest.partition(END)[2])
