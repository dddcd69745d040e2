"""Where the programs of PostgreSQL are, and how they are run: never as root, and none of them outlives the tests."""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

USER = "postgres"
"""Who runs the servers where the tests run as root, which PostgreSQL refuses; also the superuser inside them."""


def programs() -> Path | None:
    """
    The folder with ``initdb`` and ``postgres``, or None.

    ``FENCING_TEST_POSTGRESQL`` names it; else it is looked for in the PATH and where Debian keeps it, newest first.
    """
    said = os.environ.get("FENCING_TEST_POSTGRESQL")
    if said:
        return Path(said) if (Path(said) / "postgres").exists() else None
    on_path = shutil.which("postgres")
    if on_path and shutil.which("initdb"):
        return Path(on_path).resolve().parent
    found = [path.parent for path in Path("/usr/lib/postgresql").glob("*/bin/postgres")]
    return max(found, key=lambda folder: float(folder.parent.name), default=None)


def program(name: str) -> str:
    """The path of one program; AssertionError when PostgreSQL is missing, which the fixtures find out earlier."""
    folder = programs()
    assert folder is not None, "PostgreSQL is missing"
    return str(folder / name)


def as_user(command: list[str]) -> list[str]:
    """*command*, run by `USER` when the tests run as root. Linux forgets who dies with whom when the user changes."""
    if os.geteuid() != 0:
        return command
    return ["setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups", "--pdeathsig", "KILL", *command]


def new_folder(prefix: str) -> Path:
    """An empty folder that the user of the servers owns and reaches: pytest's own folders are root's alone."""
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir="/tmp" if os.geteuid() == 0 else None))
    give(folder)
    return folder


def give(path: Path) -> None:
    """Let the user of the servers own *path*."""
    if os.geteuid() == 0:
        shutil.chown(path, USER, USER)


def run(command: list[str], *, folder: Path) -> None:
    """Run one of the programs to its end; AssertionError with what it said when it fails."""
    done = subprocess.run(as_user(command), cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, f"{command[0]} failed:\n{done.stdout}{done.stderr}"


@functools.cache
def template() -> Path:
    """A data folder as ``initdb`` makes it, made once; copying it takes a fraction of the time."""
    folder = new_folder("postgresql-template-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    options = ["--username", USER, "--auth", "trust", "--encoding", "UTF8", "--locale", "C", "--no-sync"]
    options += ["--wal-segsize", "1"]  # a third less to copy
    run([program("initdb"), "--pgdata", str(folder / "data"), *options], folder=folder)
    return folder / "data"
