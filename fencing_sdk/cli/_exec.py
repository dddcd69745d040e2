"""
Becomes the command that runs under a lock; its text is started, so it may import nothing of the package.

    python -I -S -c "$(cat _exec.py)" SUPERVISOR DEATH_SIGNAL COMMAND [ARGUMENT ...]

Between fork and exec no Python may run in a process with threads. So the supervisor starts this
text instead of the command, and this text asks the kernel for a signal when the supervisor dies
and then turns into the command. The process id stays the same.
"""

import contextlib
import ctypes
import errno
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
NOT_FOUND, NOT_EXECUTABLE = 127, 126
"""Exit codes of shells: the command does not exist, or cannot be executed."""


def die_with(supervisor: int, death_signal: int) -> None:
    """Have the kernel send *death_signal* (0: none) to this process when the supervisor dies. Linux only."""
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, death_signal, 0, 0, 0)
    if os.getppid() != supervisor:  # it died before this call
        sys.exit(128 + signal.SIGKILL)


def become(command: list[str]) -> int:
    """Turn into *command*; return an exit code only if that is impossible."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it, and exec would pass that on
    if hasattr(signal, "SIGXFSZ"):
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    program, problem = command[0], None
    folders = [""] if os.path.dirname(program) else os.get_exec_path()  # noqa: PTH120  (this file loads little)
    for path in (os.path.join(folder, program) for folder in folders):  # noqa: PTH118  (as above)
        try:
            _execute(path, command)
        except (FileNotFoundError, NotADirectoryError):
            line = _first_line(path)
            if problem is None and line.startswith(b"#!"):  # the file is there, and what it asks for is not
                interpreter = os.fsdecode(line[2:].split(maxsplit=1)[0]) if line[2:].split() else ""
                problem = f"there is no interpreter {interpreter!a}"
        except (OSError, ValueError) as error:
            problem = problem or str(getattr(error, "strerror", None) or error)
    _say(f"{program!a}: " + ("command not found" if problem is None else f"cannot be executed: {problem}"))
    return NOT_FOUND if problem is None else NOT_EXECUTABLE


def _execute(path: str, command: list[str]) -> None:
    """Turn into the program at *path*, or into a shell that runs it: what has no ``#!`` is a script, as to shells."""
    try:
        os.execv(path, command)  # noqa: S606  (to run the command is its purpose)
    except OSError as error:
        if error.errno != errno.ENOEXEC or b"\0" in _first_line(path):
            raise
    os.execv("/bin/sh", ["/bin/sh", "--", path, *command[1:]])  # noqa: S606  (likewise)


def _first_line(path: str) -> bytes:
    try:
        with open(path, "rb") as script:  # noqa: PTH123  (as above)
            return script.read(256).partition(b"\n")[0]
    except OSError:
        return b""


def _say(message: str) -> None:
    """Print a line on standard error, which may be closed or full."""
    with contextlib.suppress(OSError):
        os.write(2, f"fencing: {message}\n".encode("utf-8", "backslashreplace"))


if __name__ == "__main__":
    die_with(int(sys.argv[1]), int(sys.argv[2]))
    sys.exit(become(sys.argv[3:]))
