"""The command line: run a command under a lock, and watch a zombie being refused."""

from __future__ import annotations

import contextlib
import gc
import signal
import sys

from fencing_sdk._values.drivers import missing
from fencing_sdk._values.observers import keep_off_console

_USAGE = 2


def main() -> int:
    """Run ``fencing`` with the arguments of this process; return its exit code."""
    try:
        return _run()
    except KeyboardInterrupt:  # while modules are imported, or outside of what a command catches
        return 128 + signal.SIGINT
    finally:
        gc.freeze()  # or Python looks for cycles in all that was loaded before it ends, a sixth of a short command


def _run() -> int:
    from fencing_sdk.cli._app import run_app  # noqa: PLC0415  (an interrupt meanwhile is caught)

    keep_off_console()
    try:
        return run_app(sys.argv[1:])
    except ModuleNotFoundError as error:
        if str(error.name).partition(".")[0] != "rich":
            raise
        with contextlib.suppress(OSError, AttributeError):  # a disk is full; there is no standard error
            sys.stderr.write(f"fencing: {missing('rich', 'cli')}\n")
        return _USAGE
