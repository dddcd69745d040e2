"""
Whether this process is a fork of the one that made a thing.

A child inherits the objects of its parent but not its locks: the loop, the connection and the
leases belong to the parent. What must not be used by a child notes `count` when it is made.
"""

from __future__ import annotations

import os

count = 0
"""
How many forks lie between this process and the first one: another number in every forked child, cheaper than its pid.

Read it as ``forks.count``: a copy would not follow.
"""


def _after_fork() -> None:
    global count  # noqa: PLW0603  (a property of the process, like its pid)
    count += 1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
