"""
The Lua scripts beside this file. The server runs each as one atomic step.

    acquire.lua, renew.lua, release.lua, inspect.lua     what `fencing_sdk.abc.Backend` promises
    stand.lua                                            waiters join the lines of their locks, and stay there
    grant.lua                                            a function: grants a lock
    acquire_refuse.lua, acquire_in_line.lua,
    release_to_line.lua                                  the parts of acquire.lua and release.lua that are seldom run
    share_*.lua, writer_acquire.lua                      the same for permits, readers and writers
    share.lua                                            functions: who holds beside whom
    revoke.lua, revoked.lua                              end a grant that has a token, and tell its holder why
    listed.lua, waiting.lua                              describe locks, and the waiters of one of them

A line is made of functions for the scripts that use it. They stand behind the part of a script that needs no line,
because to define them costs time.

    line_time.lua                                        when a waiter has left
    line_count.lua                                       how many wait
    line.lua                                             the line of plain locks, which hands the lock on
    waking_line.lua                                      the lines of shares, and of a quorum: they wake their head
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from importlib.resources import files
from typing import NamedTuple

Argument = str | bytes | int
"""One word of a command, as the driver packs it."""


class RedisScript:
    """A script: its text, and the hash by which a server that has seen the text finds it."""

    __slots__ = ("sha", "text")

    def __init__(self, *parts: str) -> None:
        folder = files(__package__)
        self.text = "\n".join(folder.joinpath(f"{part}.lua").read_text(encoding="utf-8") for part in parts)
        self.sha = hashlib.sha1(self.text.encode(), usedforsecurity=False).hexdigest()


class ScriptCall(NamedTuple):
    """One run of a script. Its keys, all in one slot, decide which server runs it."""

    script: RedisScript
    keys: Sequence[str]
    arguments: Sequence[Argument]
    replicas: int = 0
    """Replicas that must have what the script wrote before its answer counts."""
    follow: tuple[str, ...] = ()
    """
    Keys that client tracking follows from then on: they are read behind the script, in the same write.

    A read inside the script would make a server before Redis 7.2 follow all the keys of the script, for ever.
    """

    untracked: bool = False
    """Whether the script reads keys that client tracking must not follow, as described for `follow`."""

    def by_hash(self) -> tuple[Argument, ...]:
        """The command for a server that has seen the script."""
        return ("EVALSHA", self.script.sha, len(self.keys), *self.keys, *self.arguments)

    def by_text(self) -> tuple[Argument, ...]:
        """The command for a server that has not: after a restart, a failover or SCRIPT FLUSH."""
        return ("EVAL", self.script.text, len(self.keys), *self.keys, *self.arguments)


ACQUIRE = RedisScript("grant", "acquire", "acquire_refuse", "line_time", "line", "acquire_in_line")
RENEW = RedisScript("renew")
RELEASE = RedisScript("release", "grant", "line_time", "line", "release_to_line")
INSPECT = RedisScript("inspect")
STAND = RedisScript("grant", "line_time", "line", "stand")

WAKING_LINE = ("line_time", "waking_line")
"""A line whose head is woken, and asks."""
_SHARES = (*WAKING_LINE, "share")
ACQUIRE_SHARE = RedisScript("grant", "share_acquire", *_SHARES, "share_acquire_beside")
ACQUIRE_WRITER = RedisScript("grant", "acquire", *WAKING_LINE, "writer_acquire")
RENEW_SHARES = RedisScript(*_SHARES, "share_renew")
RELEASE_SHARE = RedisScript("share_release", *_SHARES, "share_release_beside")
CHECK_SHARES = RedisScript(*_SHARES, "share_check")
JOIN_SHARE_LINE = RedisScript(*WAKING_LINE, "share_join")
LEAVE_SHARE_LINE = RedisScript(*_SHARES, "share_leave")
HOLDERS = RedisScript(*_SHARES, "line_count", "share_holders")

# Operators and the holders that they end. Nothing of it runs while locks are acquired, renewed and released.
REVOKE = RedisScript("grant", "line_time", "line", "waking_line", "share", "revoke")
REVOKED = RedisScript("revoked")
LISTED = RedisScript(*_SHARES, "line_count", "listed")
WAITING = RedisScript("line_time", "waiting")

PRELOADED = (RELEASE, STAND, JOIN_SHARE_LINE, LEAVE_SHARE_LINE, RELEASE_SHARE)
"""
The scripts that every new connection loads.

A script that the server does not know takes a second request. A caller that gives up may be gone before it, and a leave
could overtake its join.
"""
