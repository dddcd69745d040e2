"""Wall clocks of servers that a test may set, each process having its own."""

from __future__ import annotations

import struct
import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_name("zookeeper_clock.c")


class WallClock:
    """The wall clock of one process, which is to be started with `prefix` before its command."""

    def __init__(self, folder: Path) -> None:
        shim, self._file = folder / "wall_clock.so", folder / "shift"
        subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", str(shim), str(SOURCE)], check=True)
        self._file.write_bytes(struct.pack("q", 0))
        self.prefix = ["env", f"LD_PRELOAD={shim}", f"WALL_CLOCK_SHIFT={self._file}"]

    def shift(self, seconds: int) -> None:
        """Let the clock be so far ahead of this machine's from now on; or behind, if it is negative."""
        with self._file.open("r+b") as file:
            file.write(struct.pack("q", seconds))
