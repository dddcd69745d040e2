"""Where the programs of MariaDB and MySQL are, and a data folder of each that servers of tests copy."""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import getpass
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import IO

PACKAGES = {"mariadb": "mariadb-server-core mariadb-client-core openssl", "mysql": "mysql-server-core openssl"}
"""What Debian calls them; its stable release has no MySQL, and of the two only one can be installed."""

SIZES = ("--innodb-data-file-path=ibdata1:8M:autoextend", "--innodb-autoextend-increment=1")
"""A small data folder, with which every start has to agree."""


def program(flavour: str) -> str | None:
    """
    The server's program, or None.

    ``FENCING_TEST_MARIADB`` and ``FENCING_TEST_MYSQL`` name it; else it is looked for in the PATH, where Debian keeps
    it, and MySQL in /opt/mysql, too. MariaDB brings a link of MySQL's name, which is not taken for MySQL.
    """
    said = os.environ.get(f"FENCING_TEST_{flavour.upper()}")
    if said is not None:
        return said if os.access(said, os.X_OK) else None
    if flavour == "mariadb":
        return shutil.which("mariadbd") or shutil.which("mariadbd", path="/usr/sbin:/usr/local/sbin")
    found = shutil.which("mysqld", path=f"/opt/mysql/bin:{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")
    return found if found and Path(found).resolve().name != "mariadbd" else None


def flavours() -> list[str]:
    """
    Which of the two the tests run on: those that are there, and those whose absence must not go unnoticed.

    MySQL is one that few machines can have: where it is neither there nor named, no test asks for it.
    """
    return ["mariadb", *(["mysql"] if program("mysql") or "FENCING_TEST_MYSQL" in os.environ else [])]


def as_root() -> list[str]:
    """What lets root run a server, which is his own decision."""
    return ["--user=root"] if os.geteuid() == 0 else []


@functools.cache
def template(flavour: str) -> Path:
    """
    A data folder with the superuser `root`, who has no password and comes by the Unix socket.

    All processes that test at the same time share it, and the last one removes it: to make one for MySQL takes seconds.
    """
    server = program(flavour)
    assert server is not None, f"{flavour} is missing"
    path = Path(tempfile.gettempdir()) / f"fencing-sdk-test-{flavour}-{getpass.getuser()}"
    used = path.with_suffix(".lock").open("a")
    try:
        _use(used, path, lambda making: _make(flavour, server, making))
    except BaseException:
        used.close()
        raise
    atexit.register(_leave, used, path)
    return path


def _use(used: IO[str], path: Path, make: Callable[[Path], None]) -> None:
    """Let *path* be there, and stay there as long as the lock on *used* is held."""
    while True:
        fcntl.flock(used, fcntl.LOCK_SH)
        if path.exists():
            return
        fcntl.flock(used, fcntl.LOCK_EX)
        if not path.exists():  # another one may have made it while this one waited
            making = path.with_suffix(".new")
            shutil.rmtree(making, ignore_errors=True)
            make(making)
            making.rename(path)


def _make(flavour: str, server: str, folder: Path) -> None:
    command = [server, "--no-defaults", "--initialize-insecure", "--innodb-redo-log-capacity=16M"]
    if flavour == "mariadb":
        command = ["mariadb-install-db", "--no-defaults", "--auth-root-authentication-method=normal", "--skip-test-db"]
        command += ["--innodb-log-file-size=4M"]
    command += [f"--datadir={folder}", *SIZES, *as_root()]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"{command[0]} failed:\n{done.stdout}{done.stderr}"


def _leave(used: IO[str], path: Path) -> None:
    with contextlib.suppress(BlockingIOError):  # somebody else uses it still
        fcntl.flock(used, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(path, ignore_errors=True)
    used.close()
