"""Ports: reserved against every other process that runs the tests."""

import subprocess
import sys
from pathlib import Path

import pytest
from local_ports import PORTS, REMEMBERED, Reservations, free_port

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
