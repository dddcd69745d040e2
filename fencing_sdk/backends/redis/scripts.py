"""
The Lua scripts beside this file. The server runs each as one atomic step.

A file has sections, each of which begins with a line such as ``-- [draw]``. A script is made of some of them. The
functions of a line stand behind the part of a script that needs no line, because to define them costs time.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

from fencing_sdk._values.drivers import packed_text

Argument = str | bytes | int
"""One word of a command, as the driver packs it."""


@cache
def sections(file: str) -> dict[str, str]:
    """Return the sections of a file beside this one."""
    text = packed_text(__package__, file)
    _, *named = re.split(r"^-- \[([a-z ]+)\]\n", text, flags=re.MULTILINE)
    return dict(zip(named[::2], named[1::2], strict=True))


class RedisScript:
    """A script: its text, and the hash by which a server that has seen the text finds it."""

    __slots__ = ("reads", "sha", "text")

    def __init__(self, *parts: str, reads: bool = False) -> None:
        """Put sections together, each named as in ``"tickets.lua [draw]"``. *reads*: it writes nothing."""
        self.reads = reads
        named = [part.removesuffix("]").split(" [") for part in parts]
        self.text = "\n".join(sections(file)[section] for file, section in named)
        self.sha = hashlib.sha1(self.text.encode(), usedforsecurity=False).hexdigest()


class ScriptCall(NamedTuple):
    """One run of a script. Its keys, all in one slot, decide which server runs it."""

    script: RedisScript
    keys: Sequence[str]
    arguments: Sequence[Argument]
    replicas: int = 0
    """Replicas that must have what the script wrote before its answer counts."""
    follow: Sequence[str] = ()
    """
    Keys that client tracking follows from then on: they are read behind the script, in the same write.

    A read inside the script would make a server before Redis 7.2 follow all the keys of the script.
    """

    def by_hash(self, *, read_only: bool = False) -> tuple[Argument, ...]:
        """The command for a server that has seen the script; *read_only* if it has commands for such scripts."""
        command = "EVALSHA_RO" if read_only and self.script.reads else "EVALSHA"
        return (command, self.script.sha, len(self.keys), *self.keys, *self.arguments)

    def by_text(self, *, read_only: bool = False) -> tuple[Argument, ...]:
        """The command for a server without the script: after a restart, a failover or SCRIPT FLUSH."""
        command = "EVAL_RO" if read_only and self.script.reads else "EVAL"
        return (command, self.script.text, len(self.keys), *self.keys, *self.arguments)


def _verb(*named: str, reads: bool = False) -> RedisScript:
    return RedisScript(*(f"tickets.lua [{name}]" for name in named), reads=reads)


DRAW = _verb("now", "draw alone", "form", "name", "line", "draw")
KEEP = _verb("now", "form", "name", "keep while the slot moves", "line", "keep")
KEEP_MANY = _verb("keep many")
GIVE_BACK = _verb("now", "give back alone", "form", "name", "give back while the slot moves", "line", "give back")
END = _verb("now", "form", "name", "line", "end")
PASS_ON = _verb("now", "form", "name", "line", "pass on")
SETTLE = _verb("now", "form", "name", "line", "settle")
LOOK = _verb("form", "look", reads=True)

PRELOADED = (DRAW, GIVE_BACK)
"""
The scripts that every new connection loads.

A script that the server does not know takes a second request. A caller that gives up may be gone before it.
"""
