"""
Reports on clients, stores and holders: to health endpoints, by a diagnosis, and to other clients.

A client stores facts about its holder with each grant unless it has a `label` of its own: host, process id, and the
name of the program without its folder and its arguments, which may hold passwords. They are ASCII, so every database
keeps them.

A job that keeps its lock writes that into the label of its grant, with its ttl. Where the grant passes on at the
end of the run, the note is changed to one of a run that has ended. Elsewhere a lock that has more time left than any
renewal gives has been kept for good, so nothing runs under it.
"""
# ruff: noqa: PLC0415  (an import of the package needs neither JSON nor paths, both of which take longer than it)

from __future__ import annotations

import functools
import os
import re
import sys
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import IntEnum, unique
from typing import NamedTuple

from fencing_sdk._values.claim import Holder, Waiting
from fencing_sdk._values.clock import wall_seconds


@dataclass(frozen=True, slots=True)
class Status:
    """The state of a client at one moment, from `LockClient.status`, which does not ask the store."""

    open: bool
    """
    True if the client was entered, is not being closed, and its heartbeat runs.

    A client for threads is entered by its first call. Before that it is open, too: it takes work.
    """
    draining: bool = False
    """True if `LockClient.drain` has begun: what is held may end, and no acquisition begins."""
    leases: int = 0
    """Number of leases that are held."""
    least_remaining: float | None = None
    """Seconds until the first of them is lost, if no renewal is confirmed meanwhile. None without leases."""
    since_answer: float | None = None
    """
    Seconds since the store last granted, renewed, or answered another call. None if it has not yet. A client that
    holds nothing asks nothing: the number grows although the store is well.
    """
    leader_of: tuple[str, ...] = ()
    """The elections that this process leads, by name. A process that leads none may be just as ready."""


@unique
class Severity(IntEnum):
    """Weight of a finding. Severities can be compared."""

    WARNING = 1
    """
    A promise does not hold after an event that will come one day, such as a power failure, a failover or a long pause;
    or it could not be checked.
    """
    ERROR = 2
    """Locks do not work, or a promise does not hold."""

    def __str__(self) -> str:
        return self.name.lower()


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is not as it should be. It never holds a password."""

    check: str
    """The name of the check, such as ``"redis.eviction"``. It does not change between versions."""
    severity: Severity
    what: str
    """The finding, with its value."""
    reason: str
    """Why that matters."""
    fix: str
    """The command or the setting that fixes it."""


LABEL_LIMIT = 1024
"""Characters of a label, which a store keeps beside a grant."""

_SHOWN = 64
"""Characters of a name. Two of them, with every one escaped, stay below what a store keeps, also behind a note."""
_ALLOWANCE = 10.0
"""Seconds by which a store may show more than the ttl: it rounds up, has a least ttl, or another clock than ours."""
_SECONDS = r"([0-9]{1,9}(?:\.[0-9]{1,12})?) s"
_NOTE = re.compile(
    rf"when its run has ended, kept for {_SECONDS} from its start \(ttl {_SECONDS}\)(?:; (.*))?", re.DOTALL
)
_LONGEST = 1e9
"""Seconds: so many fit into a date."""


def label_of(*given: str | None) -> str:
    """Return the first text that was *given*, or else the facts about this process."""
    for text in given:
        if text is not None:
            return text
    return _facts_about(os.getpid())


def facts_about_command(program: str) -> str:
    """Return the facts about a command that this process runs, which begins now."""
    import json

    return json.dumps(_facts(program) | {"start": _iso(wall_seconds())})


@functools.lru_cache(maxsize=1)
def _facts_about(_process: int) -> str:
    import json
    from pathlib import PurePath

    path = PurePath((getattr(sys, "argv", None) or [""])[0])  # an embedded interpreter may have none
    return json.dumps(_facts(path.parent.name if path.name == "__main__.py" else path.name))


def _facts(program: str) -> dict[str, object]:
    return {"host": harmless(os.uname().nodename), "pid": os.getpid(), "program": harmless(program or "python")}


def harmless(name: str) -> str:
    """A name that every store keeps and every terminal shows, cut; an argument may be any bytes."""
    return "".join(char if char.isprintable() and char <= "\uffff" else "?" for char in name[:_SHOWN])


def say_kept(label: str, at_least_for: float, ttl: float) -> str:
    """
    Return the *label* of a run that begins now, with a note for how long its lock is kept.

    It names no moment, because the wall clock of this host may be wrong: see `read_facts`.
    """
    note = f"when its run has ended, kept for {at_least_for:.12g} s from its start (ttl {ttl:.12g} s)"
    return f"{note}; {label}"[:LABEL_LIMIT] if label else note


_DETACHED = "detached: a ticket holds it"


def say_detached(label: str | None) -> str:
    """Return the *label* of a lease that no process carries, with a note that says so."""
    return f"{_DETACHED}; {label}"[:LABEL_LIMIT] if label else _DETACHED


class HolderFacts(NamedTuple):
    """Facts in the label of a holder. Another client wrote it, so all but *text* is made harmless."""

    kept_until: str | None
    """When the lock will be free, by the clock of the reader, if the lock is kept after its run has ended."""
    state: str
    """The same as a sentence, or that the lock will be kept when its run has ended; else empty."""
    who: str | None
    """Program, process id, host, and since when by the reader's clock, if a client or a command stored them."""
    text: str
    """The holder's own text, without the note about keeping or detaching."""
    detached_until: str | None = None
    """When the lock will be free, by the clock of the reader, if no process carries the lease but a ticket."""

    @property
    def summary(self) -> str:
        """Return all of it in one line, with the text as others wrote it."""
        return "; ".join(filter(None, (self.state, self.who or self.text)))


NOTHING_KNOWN = HolderFacts(None, "", None, "")


def read_facts(one: Holder | Waiting) -> HolderFacts:
    """
    Return what the label of a holder, or of a waiter, says.

    Moments are reckoned from the wall clock of this process and the seconds that the store counts.
    """
    text, kept_until, detached_until, state, now = one.label or "", None, None, "", wall_seconds()
    began = None if isinstance(one, Waiting) or one.held_for is None else now - one.held_for
    if note := _NOTE.fullmatch(text):
        kept_for, ttl, text = float(note[1]), float(note[2]), note[3] or ""
        state = f"when its run has ended, kept for {note[1]} s from its start"
        if began is not None:
            state = f"when its run has ended, kept until {_iso(began + kept_for)}"
        if isinstance(one, Holder) and one.remaining > ttl + max(_ALLOWANCE, ttl / 4):
            kept_until = _iso(now + min(one.remaining, _LONGEST))
            state = f"kept until {kept_until}, nothing runs"
    elif isinstance(one, Holder) and text.startswith(_DETACHED):
        text = text.removeprefix(_DETACHED).removeprefix("; ")
        detached_until = _iso(now + min(one.remaining, _LONGEST))
        state = f"detached until {detached_until}, nothing runs"
    return HolderFacts(kept_until, state, _who(text, began), text, detached_until)


def _who(text: str, began: float | None) -> str | None:
    import json

    try:
        facts = json.loads(text)
        host, pid, program = facts["host"], facts["pid"], facts["program"]
        since = f"{start} by its clock" if (start := facts.get("start", "")) else ""
        if began is not None:
            since = _iso(began)
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        return None
    pid, program, host, since = (harmless(str(fact)) for fact in (pid, program, host, since))
    return f"{program} (pid {pid}) on {host}" + (f" since {since}" if since else "")


def _iso(seconds: float) -> str:
    return (datetime(1970, 1, 1, tzinfo=UTC) + timedelta(seconds=int(seconds))).isoformat()
