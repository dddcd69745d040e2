"""Servers that are missing, and ports that are taken."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest
from local_ports import PORTS, REMEMBERED, Reservations, free_port
from required_program import require_program

# A machine without the servers says what to install, and in CI their absence is a failure.


def fixtures(of: str):
    """Their module, imported late: pytest wants to be the first who imports a plugin."""
    return importlib.import_module(f"{of}_fixtures")


@pytest.mark.parametrize("command", [["redis-server", "--version"], ["setpriv", "/usr/sbin/mariadbd"], ["openssl"]])
def test_a_test_that_starts_a_server_without_asking_for_it_fails(command, tmp_path):
    with pytest.raises(pytest.fail.Exception, match="ask for it by a fixture"):
        subprocess.run(command)
    with pytest.raises(pytest.fail.Exception, match="ask for it by a fixture"):
        importlib.import_module("child_processes").spawn([*command], folder=tmp_path, log=tmp_path / "log")


@pytest.mark.parametrize(
    ("ask", "packages"),
    [
        (lambda: fixtures("redis").require("no-such-server"), "redis-server redis-sentinel openssl"),
        (lambda: fixtures("postgresql").require_postgresql(), "postgresql pgbouncer openssl"),
        (lambda: fixtures("mysql").require_mysql("mariadb"), "mariadb-server-core mariadb-client-core openssl"),
        (lambda: fixtures("mysql").require_mysql("mysql"), "mysql-server-core openssl"),
        (lambda: fixtures("etcd").require_etcd("no-such-etcd"), "etcd-server openssl"),
        (
            lambda: importlib.import_module("zookeeper_server").require_zookeeper(Path("no-such.jar")),
            "zookeeper default-jre-headless",
        ),
        (lambda: require_program("no-such-program"), "no-such-program"),
        (lambda: require_program("no-such-cc", "gcc libc6-dev"), "gcc libc6-dev"),
    ],
    ids=["redis", "postgresql", "mariadb", "mysql", "etcd", "zookeeper", "program", "packages"],
)
@pytest.mark.parametrize(("ci", "outcome"), [("", pytest.skip.Exception), ("true", pytest.fail.Exception)])
def test_a_missing_program_is_a_skip_and_in_ci_a_failure_and_both_say_what_to_install(
    ask, packages, ci, outcome, monkeypatch, tmp_path
):
    monkeypatch.setenv("CI", ci)
    for server in ("POSTGRESQL", "MARIADB", "MYSQL"):
        monkeypatch.setenv(f"FENCING_TEST_{server}", str(tmp_path / "missing"))
    with pytest.raises(outcome, match=f" is missing: RUNLEVEL=1 apt-get install {packages}$"):
        ask()


# Ports: reserved against every other process that runs the tests.


TAKE = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from local_ports import Reservations
reservations = Reservations(Path(sys.argv[2]))
print([reservations.take(int(port)) for port in sys.argv[3:]])
"""


def taken_elsewhere(path: Path, *ports: int) -> str:
    """What another process is told that asks for these ports."""
    command = [sys.executable, "-c", TAKE, str(Path(__file__).parent), str(path), *map(str, ports)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_a_port_is_given_out_once_even_if_nothing_listens_on_it():
    assert len({free_port() for _ in range(100)}) == 100


def test_other_processes_cannot_take_a_reserved_port(tmp_path: Path, request: pytest.FixtureRequest):
    path = tmp_path / "ports"
    reservations = Reservations(path)
    request.addfinalizer(reservations.close)
    assert reservations.take(11_000)
    assert not reservations.take(11_000)
    assert taken_elsewhere(path, 11_000, 11_001) == "[False, True]"
    assert reservations.take(11_001), "a process that has ended keeps no port"


def test_the_oldest_ports_are_given_back(tmp_path: Path, request: pytest.FixtureRequest):
    path = tmp_path / "ports"
    reservations = Reservations(path)
    request.addfinalizer(reservations.close)
    assert all(reservations.take(port) for port in PORTS[: REMEMBERED + 1])
    assert taken_elsewhere(path, PORTS[0], PORTS[1]) == "[True, False]"
