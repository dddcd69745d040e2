"""Real supervisors in real processes, each test with a state folder of its own."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from command_line import Fencing


@pytest.fixture(autouse=True, scope="session")
def ctrl_c_is_heard() -> None:
    """Tests that were started in the background ignore SIGINT, and so would every process they start."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def fencing(tmp_path: Path) -> Iterator[Fencing]:
    command = Fencing(tmp_path)
    yield command
    command.clean_up()
