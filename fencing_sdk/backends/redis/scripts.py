"""
The Lua scripts beside this file. The server runs each as one atomic step.

    lease.lua       grants of a name, their renewals, and their ends by their holders
    shares.lua      permits and readers, which hold a name together
    line.lua        the line of waiters, and who is granted or woken
    operating.lua   listings, revocations and their reasons, and grants that pass to another owner

A file has sections, each of which begins with a line such as ``-- [grant]``. A script is made of some of them. The
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
        """Put sections together, each named as in ``"lease.lua [grant]"``. *reads*: it writes nothing."""
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
    follow: tuple[str, ...] = ()
    """
    Keys that client tracking follows from then on: they are read behind the script, in the same write.

    A read inside the script would make a server before Redis 7.2 follow all the keys of the script, for ever.
    """

    untracked: bool = False
    """True if the script reads keys that client tracking must not follow, as described for `follow`."""

    def by_hash(self, *, read_only: bool = False) -> tuple[Argument, ...]:
        """The command for a server that has seen the script; *read_only* if it has commands for such scripts."""
        return (
            "EVALSHA_RO" if read_only and self.script.reads else "EVALSHA",
            self.script.sha,
            len(self.keys),
            *self.keys,
            *self.arguments,
        )

    def by_text(self, *, read_only: bool = False) -> tuple[Argument, ...]:
        """The command for a server without the script: after a restart, a failover or SCRIPT FLUSH."""
        return (
            "EVAL_RO" if read_only and self.script.reads else "EVAL",
            self.script.text,
            len(self.keys),
            *self.keys,
            *self.arguments,
        )


_NAME, _GRANT = "lease.lua [name]", "lease.lua [grant]"
_TIME, _SHARES, _SHARING = "line.lua [time]", "shares.lua [shares]", "shares.lua [sharing]"
_SERVE = ("line.lua [leave]", "line.lua [serve]")

ACQUIRE = RedisScript(
    *(_NAME, _GRANT, "lease.lua [acquire]"),
    *(_TIME, _SHARES, _SHARING, "shares.lua [share]", "lease.lua [acquire beside]"),
    *(*_SERVE, "lease.lua [acquire in line]"),
)
RENEW = RedisScript("lease.lua [renew]")
RENEW_SHARES = RedisScript(_NAME, _TIME, _SHARES, "lease.lua [renew shares]")
CHECK_SHARES = RedisScript(_NAME, _TIME, _SHARES, "lease.lua [check shares]")
RELEASE = RedisScript(
    *("lease.lua [release]", _NAME, _TIME, _SHARES, "lease.lua [release beside]"),
    *(_GRANT, *_SERVE, "lease.lua [release in line]"),
)
STAND = RedisScript(_NAME, _GRANT, _TIME, _SHARES, *_SERVE, "line.lua [stand]")

# Operators and the holders that they end. Nothing of it runs while names are acquired, renewed and released.
_DESCRIBE = (_NAME, _TIME, _SHARES, "operating.lua [describe]")
INSPECT = RedisScript("operating.lua [inspect]", reads=True)
HOLDERS = RedisScript(*_DESCRIBE, "operating.lua [holders]", reads=True)
LISTED = RedisScript(*_DESCRIBE, "operating.lua [listed]", reads=True)
WAITING = RedisScript(_TIME, "operating.lua [waiting]", reads=True)
_ENDING = (_NAME, _GRANT, _TIME, _SHARES, _SHARING, "operating.lua [note]")
REVOKE = RedisScript(*_ENDING, *_SERVE, "operating.lua [revoke]")
TRANSFER = RedisScript(*_ENDING, "shares.lua [share]", "operating.lua [transfer]")
REVOKED = RedisScript("operating.lua [revoked]")

PRELOADED = (RELEASE, STAND)
"""
The scripts that every new connection loads.

A script that the server does not know takes a second request. A caller that gives up may be gone before it, and a leave
could overtake its join.
"""
