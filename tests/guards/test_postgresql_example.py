"""The example that needs a server: two processes sell one seat, and the database refuses the one that was frozen."""

import os
import subprocess
import sys
from pathlib import Path

pytest_plugins = ["postgresql_fixtures"]

EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "seat_booking_postgresql.py"


def run(script, folder, *arguments, **environment):
    inherited = {name: value for name, value in os.environ.items() if name != "FENCING_URL"}
    return subprocess.run(
        [sys.executable, "-W", "error", str(script), *arguments],
        cwd=folder,
        env=inherited | environment,
        capture_output=True,
        text=True,
        timeout=50,
    )


def test_the_late_write_is_refused_by_the_database_and_compensated(postgresql_server, tmp_path):
    done = run(EXAMPLE, tmp_path, postgresql_server.url)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Ada is too late and gets the money back: token" in done.stdout
    assert done.stdout.endswith("the seat is Bob's, and Bob alone has paid\n")
    assert postgresql_server.ask("SELECT to_regclass('example_seats')") == [(None,)]


def test_without_the_guard_the_late_write_gets_through(postgresql_server, tmp_path):
    """So it is the guard that the example shows."""
    line, script = "            guard.admit_sync(", tmp_path / "unguarded.py"
    code = EXAMPLE.read_text()
    assert line in code
    script.write_text(code.replace(line, line.replace("guard.admit_sync(", "(lambda *_: None)(")))
    done = run(script, tmp_path, FENCING_URL=postgresql_server.url)
    assert done.returncode == 1
    assert "AssertionError: the late write got through" in done.stderr


def test_without_a_database_it_says_what_it_needs(tmp_path):
    done = run(EXAMPLE, tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("name a database: ")
