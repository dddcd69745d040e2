"""Programs that are installed apart from the tests' environment."""

from __future__ import annotations

import os
import shutil

import pytest


def require_program(name: str, packages: str | None = None) -> str:
    """
    Return the path of a program, or skip the test; its absence must not go unnoticed in CI.

    *packages* are those of Debian that bring it: one of the same name where none is given.
    """
    found = shutil.which(name) or shutil.which(name, path="/usr/sbin:/usr/local/sbin")
    if found:
        return found
    why = f"{name} is missing: apt-get install {packages or name}"
    if os.environ.get("CI"):
        pytest.fail(why, pytrace=False)
    pytest.skip(why)
