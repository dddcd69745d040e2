"""
What others may know of a holder: where it runs, and until when its lock is kept. Written and read here alone.

A client stores these facts with each grant unless it is told other `metadata`: host, process id, and the name of the
program without its folder and its arguments, which may hold passwords. They are ASCII, so every database keeps them.

No store is asked to write at the end of a run. A job that keeps its lock says so from the grant on, and names its ttl:
a lock that has more time left than any renewal gives has been kept for good, so nothing runs under it.
"""

from __future__ import annotations

import functools
import json
import os
import re
import sys
from datetime import UTC, datetime, timedelta
from pathlib import PurePath
from typing import NamedTuple

from fencing_sdk._values import forks
from fencing_sdk._values.claim import Holder, Waiting
from fencing_sdk._values.clock import wall_seconds

METADATA_LIMIT = 1024
"""Characters of metadata a store keeps beside a grant."""

_SHOWN = 64
"""Characters of a name. Two of them, with every one escaped, stay below what a store keeps, also behind a note."""
_ALLOWANCE = 10.0
"""Seconds by which a store may show more than the ttl: it rounds up, has a least ttl, or another clock than ours."""
_NOTE = re.compile(
    r"when its run has ended, kept until ([0-9T:+-]{10,40}) \(ttl ([0-9]{1,9}(?:\.[0-9]{1,12})?) s\)(?:; (.*))?",
    re.DOTALL,
)


def metadata_of(*given: str | None) -> str:
    """Return the first text that was *given*, or else the facts about this process."""
    for text in given:
        if text is not None:
            return text
    return _facts_about(forks.here())


def facts_about_command(program: str) -> str:
    """Return the facts about a command that this process runs, which begins now."""
    return json.dumps(_facts(program) | {"start": _iso(wall_seconds())})


@functools.lru_cache(maxsize=1)
def _facts_about(_process: int) -> str:
    path = PurePath((getattr(sys, "argv", None) or [""])[0])  # an embedded interpreter may have none
    return json.dumps(_facts(path.parent.name if path.name == "__main__.py" else path.name))


def _facts(program: str) -> dict[str, object]:
    return {"host": harmless(os.uname().nodename), "pid": os.getpid(), "program": harmless(program or "python")}


def harmless(name: str) -> str:
    """A name that every store keeps and every terminal shows, cut; an argument may be any bytes."""
    return "".join(char if char.isprintable() and char <= "\uffff" else "?" for char in name[:_SHOWN])


def say_kept(metadata: str, at_least_for: float, ttl: float) -> str:
    """
    Return the *metadata* of a run that begins now, with a note until when its lock is kept after it.

    The time is that of this host's wall clock.
    """
    note = f"when its run has ended, kept until {_iso(wall_seconds() + at_least_for)} (ttl {ttl:.12g} s)"
    return f"{note}; {metadata}"[:METADATA_LIMIT] if metadata else note


class HolderFacts(NamedTuple):
    """What the metadata of a holder say. Others wrote them: all but *text* is made harmless."""

    kept_until: str | None
    """When the lock will be free, as the holder wrote it, if the lock is kept and nothing runs under it any more."""
    state: str
    """The same as a sentence, or that the lock will be kept when its run has ended; else empty."""
    who: str | None
    """Program, process id, host, and since when, if a client or a command stored them."""
    text: str
    """What the holder stored, without the note about keeping."""

    @property
    def summary(self) -> str:
        """Return all of it in one line, with the text as others wrote it."""
        return "; ".join(filter(None, (self.state, self.who or self.text)))


NOTHING_KNOWN = HolderFacts(None, "", None, "")


def read_facts(held: Holder | Waiting) -> HolderFacts:
    """Return what the metadata of a holder, or of a waiter, say."""
    text, kept_until, state = held.metadata or "", None, ""
    remaining, held_for = (held.remaining, held.held_for) if isinstance(held, Holder) else (0.0, None)
    if note := _NOTE.fullmatch(text):
        until, ttl, text = note[1], float(note[2]), note[3] or ""
        state = f"when its run has ended, kept until {until}"
        if remaining > ttl + max(_ALLOWANCE, ttl / 4):
            kept_until, state = until, f"kept until {until}, nothing runs"
    return HolderFacts(kept_until, state, _who(text, held_for), text)


def _who(text: str, held_for: float | None) -> str | None:
    try:
        facts = json.loads(text)
        host, pid, program = facts["host"], facts["pid"], facts["program"]
        since = facts.get("start", "") if held_for is None else _iso(wall_seconds() - held_for)
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        return None
    pid, program, host, since = (harmless(str(fact)) for fact in (pid, program, host, since))
    return f"{program} (pid {pid}) on {host}" + (f" since {since}" if since else "")


def _iso(seconds: float) -> str:
    return (datetime(1970, 1, 1, tzinfo=UTC) + timedelta(seconds=int(seconds))).isoformat()
