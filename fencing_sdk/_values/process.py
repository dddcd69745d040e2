"""
Whether this process is a fork of the one that made a thing.

A child inherits the objects of its parent but not its locks: the loop, the connection and the
leases belong to the parent. What must not be used by a child notes the generation it was made in.
"""

from __future__ import annotations

import os

forks = 0
"""How many forks lie between this process and the first one. Read it as ``process.forks``: a copy would not follow."""


def generation() -> int:
    """A number that is another one in every forked child, at a fraction of the cost of the pid."""
    return forks


def _after_fork() -> None:
    global forks  # noqa: PLW0603  (a property of the process, like its pid)
    forks += 1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
