"""
What a run of the tests saw, as a line of JSON for the page of tested versions.

``FENCING_TEST_RECORD`` names the file that gets the line. No test sees the variable: a test that runs pytest would add
a line of its own.
"""

from __future__ import annotations

import datetime as dt
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest

_RECORD = os.environ.pop("FENCING_TEST_RECORD", None)


def _version(server: str) -> str | None:
    """What the server's own program answers when it is asked for its version; None where it is missing."""
    from mysql_programs import program  # later than conftest.py, which imports this module
    from postgresql_programs import programs
    from zookeeper_server import CLASSES

    command = {
        "Redis": ["redis-server", "--version"],
        "PostgreSQL": [str((programs() or Path()) / "postgres"), "--version"],
        "MariaDB": [program("mariadb") or "mariadbd", "--version"],
        "MySQL": [program("mysql") or "mysqld", "--no-defaults", "--version"],
        "etcd": ["etcd", "--version"],
        "ZooKeeper": ["java", "-cp", CLASSES, "org.apache.zookeeper.Version"],
    }[server]
    if not shutil.which(command[0]):
        return None
    answer = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    if server == "MySQL" and "MariaDB" in answer:  # which Debian installs under both names
        return None
    found = re.search(r"\d+(\.\d+)+", answer)
    return found and found[0]


def record(reporter: pytest.TerminalReporter) -> None:
    """Add the run that *reporter* sums up to the file that the environment named; otherwise do nothing."""
    if _RECORD is None:
        return
    outcomes = {name: len(reporter.stats.get(name, [])) for name in ("passed", "failed", "error", "skipped")}
    asked = [report.nodeid.lower() for report in reporter.getreports("passed") if "server" in report.keywords]
    servers = {}
    for server in ("Redis", "PostgreSQL", "MariaDB", "MySQL", "etcd", "ZooKeeper"):
        # The tests of MariaDB and of MySQL stand in the same files, and the parameter tells which it was.
        name = rf"\[.*\b{server.lower()}\b" if server in {"MariaDB", "MySQL"} else server.lower()
        tests = sum(bool(re.search(name, test)) for test in asked)
        if tests and (version := _version(server)):
            servers[server] = {"version": version, "passed": tests}
    free_threaded = "t" if sysconfig.get_config_var("Py_GIL_DISABLED") else ""
    words = [word for word in reporter.config.invocation_params.args if not re.fullmatch(r"-q|-n\d+", word)]
    run = {
        "date": dt.datetime.now(dt.UTC).date().isoformat(),
        "python": platform.python_version() + free_threaded,
        "system": platform.freedesktop_os_release()["PRETTY_NAME"],
        "command": shlex.join(["pytest", *words]),
        "servers": servers,
        **outcomes,
    }
    with Path(_RECORD).open("a") as file:
        file.write(json.dumps(run) + "\n")
