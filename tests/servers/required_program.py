"""Programs that are installed apart from the tests' environment."""

from __future__ import annotations

import os
import shutil
from typing import NoReturn

import pytest


def require_program(name: str, packages: str | None = None) -> str:
    """
    Return the path of a program, or skip the test.

    *packages* are those of Debian that bring it: one of the same name where none is given.
    """
    return shutil.which(name) or shutil.which(name, path="/usr/sbin:/usr/local/sbin") or missing(name, packages or name)


def missing(what: str, packages: str) -> NoReturn:
    """Skip the test and say what to install; with CI set, where its absence must not go unnoticed, fail."""
    # Debian starts the servers that it installs, unless RUNLEVEL is 1.
    why = f"{what} is missing: RUNLEVEL=1 apt-get install {packages}"
    if os.environ.get("CI"):
        pytest.fail(why, pytrace=False)
    pytest.skip(why)
