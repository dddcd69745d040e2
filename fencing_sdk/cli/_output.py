"""Checks at the start that a file can be written at the end, so that no work is lost."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from fencing_sdk.errors import ConfigurationError, shown


def check_output(path: Path) -> None:
    """
    Refuse a *path* at which no file can be written. Nothing is created, so a later write may fail all the same.

    Raises:
        ConfigurationError: its folder does not exist, say, or it is a folder itself.
    """
    if problem := _problem(path):
        msg = f"cannot write {shown(str(path))}: {os.strerror(problem)}"
        raise ConfigurationError(msg)


def _problem(path: Path) -> int:
    """The error that writing would end with, 0 for none that can be foreseen."""
    try:
        if stat.S_ISDIR(path.stat().st_mode):
            return errno.EISDIR
        return 0 if os.access(path, os.W_OK) else errno.EACCES
    except FileNotFoundError:
        pass
    except OSError as error:
        return error.errno or errno.EIO
    try:
        path.parent.stat()
    except OSError as error:
        return error.errno or errno.EIO
    return 0 if os.access(path.parent, os.W_OK | os.X_OK) else errno.EACCES
