"""The Lua scripts beside this file, each one atomic step at the server."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from importlib.resources import files
from typing import NamedTuple

Word = str | bytes | int


class Script:
    """A script, by its text and by the hash under which a server remembers it."""

    __slots__ = ("sha", "text")

    def __init__(self, *parts: str) -> None:
        folder = files(__package__)
        self.text = "\n".join(folder.joinpath(f"{part}.lua").read_text(encoding="utf-8") for part in parts)
        self.sha = hashlib.sha1(self.text.encode(), usedforsecurity=False).hexdigest()


class Call(NamedTuple):
    """One run of a script. Its keys, all in one slot, decide which server runs it."""

    script: Script
    keys: Sequence[str]
    arguments: Sequence[Word]
    replicas: int = 0
    """Replicas that must have what the script wrote before its answer counts."""
    follow: str = ""
    """
    A key that client tracking follows from then on: it is read behind the script, in the same write.

    Inside of the script the read would make a server before Redis 7.2 remember all the script's keys, for ever.
    """

    def by_hash(self) -> tuple[Word, ...]:
        """The command for a server that remembers the script."""
        return ("EVALSHA", self.script.sha, len(self.keys), *self.keys, *self.arguments)

    def by_text(self) -> tuple[Word, ...]:
        """The command for a server that does not: after a restart, a failover or SCRIPT FLUSH."""
        return ("EVAL", self.script.text, len(self.keys), *self.keys, *self.arguments)


ACQUIRE = Script("line", "acquire")
RENEW = Script("renew")
RELEASE = Script("line", "release")
INSPECT = Script("inspect")
JOIN = Script("line", "join")
LEAVE = Script("line", "leave")

GIVING_UP = (LEAVE, RELEASE)
"""
What is told to a server when a connection opens, so that it knows them at the end.

A caller that gives up may not be there for the second request that a forgotten script needs.
"""
