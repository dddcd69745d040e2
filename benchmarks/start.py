"""
What a program and a command wait for before anything happens: imports, and `fencing ls` and `fencing run` on SQLite.

    uv run python -m benchmarks start

Each is a process of its own. What Python itself takes to start is measured in the same rounds, and taken off.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.table import Result, Row, compared, run

PYTHON = "python -c pass"
BELOW = "import asyncio, anyio, tenacity"
OURS = "import fencing_sdk"
FENCING = ("-m", "fencing_sdk")
CONTESTANTS = {
    PYTHON: ("-c", "pass"),
    BELOW: ("-c", BELOW),
    OURS: ("-c", OURS),
    "fencing ls": (*FENCING, "ls"),
    "fencing run x -- true": (*FENCING, "run", "x", "--", "true"),
}
REACH = {OURS: 1.5}


def taken(arguments: tuple[str, ...], environment: dict[str, str]) -> tuple[float, float]:
    """Microseconds of one process, wall and CPU."""
    began = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, *arguments], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, arguments
    return (time.perf_counter() - began) * 1e6, (usage.ru_utime + usage.ru_stime) * 1e6


async def measure(*, quick: bool) -> list[Row]:
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in CONTESTANTS}
    with TemporaryDirectory() as folder:
        environment = os.environ | {"FENCING_URL": f"sqlite:///{Path(folder) / 'locks.db'}"}
        for number in range((5 if quick else 20) + 1):
            for name, arguments in CONTESTANTS.items():
                sample = taken(arguments, environment)
                if number:  # the first one compiles, and makes the file
                    samples[name].append(sample)
    least = {name: tuple(map(min, zip(*values, strict=True))) for name, values in samples.items()}
    wall, cpu = least.pop(PYTHON)
    return compared(
        {name: Result(one - wall, other - cpu) for name, (one, other) in least.items()}, reach=REACH, by="cpu"
    )


if __name__ == "__main__":
    run(measure)
