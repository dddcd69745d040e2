"""
Becomes the command that runs under a lock; started as a script, so it may import nothing of the package.

    python -I -S _exec.py SUPERVISOR DEATH_SIGNAL COMMAND [ARGUMENT ...]

Between fork and exec no Python may run in a process with threads. So the supervisor starts this
file instead of the command, and this file asks the kernel for a signal when the supervisor dies
and then turns into the command. The process id stays the same.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
NOT_FOUND, NOT_EXECUTABLE = 127, 126
"""What shells return for a command that does not exist, and for one that cannot be executed."""


def die_with(supervisor: int, death_signal: int) -> None:
    """Have the kernel send *death_signal* (0: none) to this process when the supervisor dies. Linux only."""
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, death_signal, 0, 0, 0)
    if os.getppid() != supervisor:  # it died before the kernel was asked
        sys.exit(128 + signal.SIGKILL)


def become(command: list[str]) -> int:
    """Turn into *command*; return an exit code only if that is impossible."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it, and exec would pass that on
    if hasattr(signal, "SIGXFSZ"):
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    try:
        os.execvp(command[0], command)  # noqa: S606  (running what it was given is its purpose)
    except (FileNotFoundError, NotADirectoryError):
        sys.stderr.write(f"fencing: {command[0]!a}: command not found\n")
        return NOT_FOUND
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        sys.stderr.write(f"fencing: {command[0]!a}: cannot be executed: {reason}\n")
        return NOT_EXECUTABLE


if __name__ == "__main__":
    die_with(int(sys.argv[1]), int(sys.argv[2]))
    sys.exit(become(sys.argv[3:]))
