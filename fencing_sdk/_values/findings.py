"""What a diagnosis finds: one value for each thing that may break a promise."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, unique


@unique
class Severity(IntEnum):
    """How much a finding matters. Severities can be compared."""

    NOTE = 1
    """Worth knowing. Every promise holds."""
    WARNING = 2
    """A promise does not hold after an event that will come one day: a power failure, a failover, a long pause."""
    ERROR = 3
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
    """What was found, with its value."""
    reason: str
    """Why that matters."""
    mend: str
    """The command or the setting that mends it."""


def error(check: str, what: str, reason: str, mend: str) -> Finding:
    """A finding of severity `Severity.ERROR`."""
    return Finding(check, Severity.ERROR, what, reason, mend)


def warning(check: str, what: str, reason: str, mend: str) -> Finding:
    """A finding of severity `Severity.WARNING`."""
    return Finding(check, Severity.WARNING, what, reason, mend)


def note(check: str, what: str, reason: str, mend: str) -> Finding:
    """A finding of severity `Severity.NOTE`."""
    return Finding(check, Severity.NOTE, what, reason, mend)


def is_local(host: str) -> bool:
    """Whether *host* is this machine, so that no network carries what is sent."""
    host = host.strip("[]")
    return host in {"localhost", "::1", ""} or host.startswith(("127.", "/"))
