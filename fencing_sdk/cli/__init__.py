"""The command line: run a command under a lock, and watch a zombie being refused."""

from __future__ import annotations

import contextlib
import importlib
import signal
import sys

from fencing_sdk._values.extras import install
from fencing_sdk._values.observers import keep_off_console

_USAGE = 2


def main() -> int:
    """Run ``fencing`` with the arguments of this process; return its exit code."""
    try:
        return _run()
    except KeyboardInterrupt:  # while modules are imported, or outside of what a command catches
        return 128 + signal.SIGINT


def _run() -> int:
    try:
        app = importlib.import_module("fencing_sdk.cli._app")
    except ModuleNotFoundError as error:
        missing = str(error.name).partition(".")[0]
        if missing == "fencing_sdk":
            raise
        with contextlib.suppress(OSError, AttributeError):  # a disk is full; there is no standard error
            sys.stderr.write(f"fencing: {missing} is not installed; run: {install('cli')}\n")
        return _USAGE
    keep_off_console()
    code: int = app.run_app(sys.argv[1:])
    return code
