"""Real supervisors in real processes, each test with a state folder of its own."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from command_line import Fencing


@pytest.fixture
def fencing(tmp_path: Path) -> Iterator[Fencing]:
    command = Fencing(tmp_path)
    yield command
    command.clean_up()
