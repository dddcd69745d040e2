"""
Every exception of the SDK, and the reasons for which a lease ends or does not begin.

    FencingError
      ConfigurationError (ValueError)      raised when built: ttl, name, url, option
        InvalidNameError                   no name of a lock or resource; a request may have made it
      UnsupportedError                     raised when built: the backend lacks this power
      UsageError (RuntimeError)            the call cannot work here: client closed, wrong task or loop
        NoLeaseError (LookupError)         no lease in this context
      AcquireError                         .name .waited
        LockHeldError                      asked once, someone else holds it; .retry_after
        AcquireTimeoutError (TimeoutError)
        AcquireCancelledError              the event that may end the wait of a thread was set
        DrainingError                      the client drains: nothing new begins
        TicketRefusedError                 a ticket no longer stands for a lease; .reason .detail
      LeaseLostError                       .name .token .reason
      StaleTokenError                      .resource .token .fence .conflict   (the resource's side)
      BackendError                         .backend .operation, cause kept
        BackendUnavailableError            another try may help; the outcome is unknown
        BackendRefusedError                it will not: credentials, malformed reply, version

Rule of this file: it imports nothing of the package, and an error carries plain values only, so
that it survives pickling and can be logged. Owner ids and URLs never appear in one.
"""

from __future__ import annotations

from enum import StrEnum, unique
from typing import Self

__all__ = [
    "AcquireCancelledError",
    "AcquireError",
    "AcquireTimeoutError",
    "BackendError",
    "BackendRefusedError",
    "BackendUnavailableError",
    "ConfigurationError",
    "DrainingError",
    "FencingError",
    "InvalidNameError",
    "LeaseLostError",
    "LockHeldError",
    "LossReason",
    "NoLeaseError",
    "NotAcquiredReason",
    "StaleTokenError",
    "TicketRefusedError",
    "UnsupportedError",
    "UsageError",
    "shown",
]

_SHOWN_LIMIT = 80


def shown(text: object) -> str:
    """Quote an untrusted *text* for a message: escaped, on one line, at most 80 characters of it."""
    try:
        quoted = ascii(text)
    except Exception:  # noqa: BLE001  (any object's repr may raise; that of an int of 5,000 digits does)
        quoted = f"<{type(text).__name__}>"
    if not quoted.isprintable():  # the repr of an object that is not a str, with a line break of its own
        quoted = ascii(quoted)
    return quoted if len(quoted) <= _SHOWN_LIMIT else f"{quoted[:_SHOWN_LIMIT]}...{quoted[-1]}"


def _rounded(seconds: float) -> str:
    return f"{seconds:.3g}" if seconds < 100 else f"{seconds:.0f}"  # noqa: PLR2004  (no reader takes 3.6e+03 s for an hour)


@unique
class LossReason(StrEnum):
    """Why a lease ended against our will. The value is the word used in logs and metrics."""

    EXPIRED = "expired"
    """The deadline passed before a renewal was confirmed, or ``max_hold`` was over."""

    REFUSED = "refused"
    """The store answered that the grant is no longer ours."""

    TAKEN_OVER = "taken_over"
    """The store answered that another holder has the lock."""

    REVOKED = "revoked"
    """
    The store notified the client that the grant has gone: an operator took it away, or its record was deleted or
    expired.

    If a renewal is the first to find that, and no operator took it away, the reason is `REFUSED`.
    """

    STALLED = "stalled"
    """
    The deadline passed while the event loop stood still: blocked, not run, or in a process or machine that was paused.
    """

    CLOSED = "closed"
    """The client was closed, its engine failed, the process is a fork of the holder, or the lease was released."""

    DRAINED = "drained"
    """The client was drained, and the body had not ended when the bound was over."""

    HANDED_OVER = "handed_over"
    """The lease was detached: what has its ticket goes on with it, under a higher token."""


@unique
class NotAcquiredReason(StrEnum):
    """Why an acquisition ended without a lease. The value is the word used in recordings and metrics."""

    HELD = "held"
    """Asked once (``wait=0``, `Lock.try_acquire`), and the lock was held."""

    TIMED_OUT = "timed_out"
    """The lock was still held when ``wait`` was over."""

    CANCELLED = "cancelled"
    """The task that waited was cancelled."""

    UNAVAILABLE = "unavailable"
    """The store did not answer."""

    REFUSED = "refused"
    """The store will not grant this, whatever is tried: a ticket stands for no lease, for one."""

    TOO_LATE = "too_late"
    """The grant came after its own deadline and was released. The caller goes on in another acquisition."""

    DRAINING = "draining"
    """The client began to drain meanwhile."""

    CLOSED = "closed"
    """The client was closed meanwhile."""

    FAILED = "failed"
    """Another error, such as one of a ``backoff`` of your own."""


class FencingError(Exception):
    """The base of every exception this package raises by itself."""


class ConfigurationError(FencingError, ValueError):
    """A parameter cannot work. Raised when the object is built; the message says what to change."""


class InvalidNameError(ConfigurationError):
    """
    A text cannot name a lock or a resource: it is empty, too long, or has control characters.

    Names are often made of what others sent, so this is the one `ConfigurationError` that may be
    the fault of a request. The message shows the text escaped and cut.
    """


class UnsupportedError(FencingError):
    """The chosen backend or guard does not have the requested power."""


class UsageError(FencingError, RuntimeError):
    """A correct call at a place where it cannot work; the message names the alternative."""


class NoLeaseError(UsageError, LookupError):
    """
    There is no lease in the current context.

    ``shared`` is the name of a permit or a reader that the context has, if the caller did not pass a name.
    """

    def __init__(self, name: str | None = None, shared: str | None = None) -> None:
        super().__init__(*(known for known in (name, shared) if known is not None))
        self.name = name
        self.shared = shared

    def __reduce__(self) -> tuple[type[Self], tuple[str | None, str | None], dict[str, object]]:
        return type(self), (self.name, self.shared), vars(self)

    def __str__(self) -> str:
        if self.shared is not None:
            return (
                f"no lease in this context that is held alone; ask for the permit or reader of {shown(self.shared)} by "
                f"its name, such as current_token({self.shared!r})"
            )
        what = "no lease" if self.name is None else f"no lease on {shown(self.name)}"
        return (
            f"{what} in this context; call from inside the block of the lock, or pass the lease along: "
            "asyncio.to_thread carries it, but a new thread and loop.run_in_executor do not"
        )


class AcquireError(FencingError):
    """The lock was not acquired. ``waited`` is in seconds."""

    def __init__(self, name: str, waited: float) -> None:
        Exception.__init__(self, name, waited)  # not super(): as an OSError, a timeout would take the name for an errno
        self.name = name
        self.waited = waited

    def __str__(self) -> str:
        return f"lock {shown(self.name)} not acquired after {_rounded(self.waited)} s"


class LockHeldError(AcquireError):
    """
    Asked once (``wait=0``), and the lock is held: by another client, or by another lease of this program.

    ``retry_after`` is the number of seconds the holder has left without a renewal, or None where the store does not
    report it.
    """

    def __init__(self, name: str, waited: float, retry_after: float | None = None) -> None:
        super().__init__(name, waited)
        self.args = (name, waited, retry_after)
        self.retry_after = retry_after

    def __str__(self) -> str:
        hint = "" if self.retry_after is None else f" (its lease has {_rounded(self.retry_after)} s left)"
        return f"lock {shown(self.name)} is held already{hint}; pass wait= to wait for it"


class AcquireTimeoutError(AcquireError, TimeoutError):
    """The patience given by ``wait=`` is over and the lock is still held."""

    def __str__(self) -> str:
        return f"lock {shown(self.name)} not acquired within {_rounded(self.waited)} s; it is still held"


class AcquireCancelledError(AcquireError):
    """The event given to ``fencing_sdk.sync`` by ``cancel=`` was set before the lock was free."""

    def __str__(self) -> str:
        return f"lock {shown(self.name)} not acquired: the wait was cancelled after {_rounded(self.waited)} s"


class DrainingError(AcquireError):
    """
    The client drains, so no acquisition begins and those that wait have left the line.

    It is how a worker loop ends in order: see `LockClient.draining_on`.
    """

    def __str__(self) -> str:
        return f"lock {shown(self.name)} not acquired: this client is draining, so nothing new begins"


class TicketRefusedError(AcquireError):
    """
    A ticket no longer stands for a lease, so there is nothing to resume or to renew.

    Another try with it will not help. Take the lock anew, and look first at what was done since. ``reason``: it was
    used or released, and another holder has the lock (`LossReason.HANDED_OVER`) or none (``REFUSED``); it ran out, by
    the clock of this machine (``TAKEN_OVER``, ``EXPIRED``); or ``REVOKED``. ``detail``: that holder, or the operator's
    reason.
    """

    def __init__(self, name: str, token: int | None, reason: LossReason, detail: str = "") -> None:
        super().__init__(name, 0.0)
        self.args = (name, token, reason, detail)
        self.token = token
        self.reason = reason
        self.detail = detail

    def __str__(self) -> str:
        token = "" if self.token is None else f" (token {self.token:d})"
        why, detail = _VOID_TEXT[self.reason], self.detail if self.detail.isprintable() else shown(self.detail)
        if self.reason is LossReason.REVOKED:
            why += f": {detail}" if detail else ""
        elif self.reason in {LossReason.HANDED_OVER, LossReason.TAKEN_OVER}:
            why += f", and {detail or 'another holder'} has the lock now"
        return f"the ticket for {shown(self.name)}{token} is void: {why}"


_VOID_TEXT = {
    LossReason.HANDED_OVER: "it was used or released before",
    LossReason.REFUSED: "it was used or released before, or it is of another store",
    LossReason.TAKEN_OVER: "it ran out",
    LossReason.EXPIRED: "it ran out",
    LossReason.REVOKED: "an operator took the lock away",
}


_LOSS_TEXT = {
    LossReason.EXPIRED: "its deadline passed",
    LossReason.REFUSED: "the store says the grant is no longer ours",
    LossReason.TAKEN_OVER: "another holder has the lock now",
    LossReason.REVOKED: "it was taken away by an operator",
    LossReason.STALLED: "the event loop stood still past the lease's deadline",
    LossReason.CLOSED: "its client was closed",
    LossReason.DRAINED: "its client was drained, and the body had not ended within the bound",
    LossReason.HANDED_OVER: "it was handed over by its ticket",
}
_UNTOLD = {LossReason.REVOKED: "an operator took it away, or the store lost its record"}
"""Without a detail. A store that is flushed, and a key that is deleted, end a lease too."""


class LeaseLostError(FencingError):
    """
    The lease is over, so work under it must not go on.

    Leaves the ``async with lock`` after the body was cancelled, and every use of ``lease.token``
    after the deadline. ``token`` is the number the lease had: a guard refuses it once a later
    holder came, so it is safe to log and useless to send. ``detail`` says more about the reason where
    more is known: what became of the last renewal, or that ``max_hold`` was over.
    """

    def __init__(self, name: str, token: int, reason: LossReason, detail: str = "") -> None:
        super().__init__(name, token, reason, *filter(None, (detail,)))
        self.name = name
        self.token = token
        self.reason = reason
        self.detail = detail

    def __str__(self) -> str:
        detail = self.detail if self.detail.isprintable() else shown(self.detail)
        why = f"{_LOSS_TEXT[self.reason]}: {detail}" if detail else _UNTOLD.get(self.reason, _LOSS_TEXT[self.reason])
        why = detail if detail and self.reason is LossReason.CLOSED else why
        return f"lease on {shown(self.name)} (token {self.token:d}) is over: {why}"


class StaleTokenError(FencingError):
    """
    A guard refused a write. Raised on the resource's side.

    ``fence`` is the highest token the resource accepted. With ``conflict`` the number is equal but
    it came from another holder: two grants shared a token, so the token source is broken.
    Never retry it: the lock has gone to another holder.
    """

    def __init__(self, resource: str, token: int, fence: int, *, conflict: bool = False) -> None:
        super().__init__(resource, token, fence)
        self.resource = resource
        self.token = token
        self.fence = fence
        self.conflict = conflict

    def __str__(self) -> str:
        what = f"token {self.token:d} for {shown(self.resource)} refused"
        if self.conflict:
            return (
                f"{what}: another holder already used this very number; "
                "two grants shared a token, check the lock service's durability"
            )
        return f"{what}: the resource has seen {self.fence:d}; the lock has gone to a later holder"


class BackendError(FencingError):
    """The store failed. ``backend`` names it, ``operation`` is the call; the driver's error is the cause."""

    def __init__(self, backend: str, operation: str, detail: str = "") -> None:
        super().__init__(backend, operation, detail)
        self.backend = backend
        self.operation = operation
        self.detail = detail

    def __str__(self) -> str:
        detail = self.detail if self.detail.isprintable() else shown(self.detail)
        return f"{self.backend}: {self.operation} failed" + (f": {detail}" if detail else "")


class BackendUnavailableError(BackendError):
    """
    The store did not answer. The outcome of the call is unknown and another try may help.

    ``waited`` is the number of seconds that the caller waited for the store, or None if it asked once.
    """

    def __init__(self, backend: str, operation: str, detail: str = "") -> None:
        super().__init__(backend, operation, detail)
        self.waited: float | None = None

    def __str__(self) -> str:
        return super().__str__() + ("" if self.waited is None else f"; waited {_rounded(self.waited)} s")


class BackendRefusedError(BackendError):
    """The store answered in a way that another try will not change."""
