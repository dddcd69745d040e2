"""
A process is frozen in the middle of a write. When it thaws, its file is refused.

    uv run python examples/file_storage.py

The process that writes the report stops itself between reading its token and writing, as a long
garbage collection or a paused virtual machine would stop it. Its lock goes to the next process.
"""

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from fencing_sdk import StaleTokenError, connect
from fencing_sdk.guards.files import FileGuard

REPORT = "reports/today"


async def frozen_writer(folder: Path) -> None:
    """The process that will be too late."""
    reports = FileGuard(folder / "reports")
    async with connect(f"sqlite:///{folder}/locks.db") as locks:
        lease = await locks.lock(REPORT, ttl=3, fences=[reports]).acquire()
        token = lease.token  # valid at this moment, and this moment is what a frozen process believes in
        print(f"  first:  holds the lock with token {token}, and freezes", flush=True)
        signal.raise_signal(signal.SIGSTOP)
        try:
            reports.write_sync(REPORT, token, b"figures of a process that slept")
        except StaleTokenError as error:
            print(f"  first:  thaws, writes, and is refused: {error}", flush=True)
            sys.exit(3)


async def next_writer(folder: Path) -> None:
    reports = FileGuard(folder / "reports")
    async with (
        connect(f"sqlite:///{folder}/locks.db") as locks,
        locks.lock(REPORT, ttl=5, wait=20, fences=[reports]) as lease,
    ):
        print(f"  second: holds the lock with token {lease.token}; lower ones are refused from now on")
        assert await reports.read(REPORT) is None
        await reports.write(REPORT, lease.token, b"today's figures")
        print("  second: wrote the report")


def main(folder: Path) -> None:
    first = subprocess.Popen([sys.executable, __file__, str(folder)])
    try:
        os.waitpid(first.pid, os.WUNTRACED)  # until it is frozen
        asyncio.run(next_writer(folder))
        first.send_signal(signal.SIGCONT)
        assert first.wait(20) == 3, "the late write got through"
    finally:
        first.kill()

    reports = FileGuard(folder / "reports")
    assert reports.read_sync(REPORT) == b"today's figures"
    (path,) = (folder / "reports" / "reports%2Ftoday").glob("*[0-9a-f]")
    print(f"  on disk: {path.relative_to(folder)}")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        asyncio.run(frozen_writer(Path(sys.argv[1])))
    else:
        with tempfile.TemporaryDirectory() as folder:
            main(Path(folder))
