"""
Lease ticket: what stands for a lease that no process carries, and travels as one word.

It bears the secret owner id, so that who has it may renew the lease, take it over or release it. In a text for people
it shows the public holder id alone.
"""

# ruff: noqa: PLC0415  (an import of the package needs neither JSON nor OpenSSL, both of which take longer than it)

from __future__ import annotations

import math
from dataclasses import dataclass, field

from fencing_sdk._values.claim import LOCK, Claim, Mode, check_name, holder_of, in_namespace, mode_named, permits_of
from fencing_sdk._values.reports import say_detached
from fencing_sdk._values.timing import Timing, check_ttl
from fencing_sdk._values.token import Token, check_token
from fencing_sdk.errors import ConfigurationError, shown

_PREFIX = "fencing1."
"""Begins each ticket: the package and the version of the format."""
_SUM_BYTES = 6
_OWNER_DIGITS = 32
_LONGEST_BUFFER = 5.0
"""Seconds: no work has to be cancelled in the buffer of a ticket, so that it need not grow with a ttl of hours."""


@dataclass(frozen=True, slots=True, repr=False)
class LeaseTicket:
    """
    What stands for a detached lease. Made by `Lease.detach` and `LockClient.detached`.

    It is a bearer credential: keep it out of arguments, variables and logs. Its ``repr`` shows no secret.
    """

    name: str
    """Name of the lock, without the namespace."""
    ttl: float
    """Seconds for which the store keeps the lock after each renewal of the ticket."""
    owner: str = field(repr=False)
    """The secret id under which the store keeps the lock."""
    token: Token | None = None
    """The fencing token of the ticket; None until the store has answered that it holds the lock."""
    until: float = 0.0
    """
    Seconds since 1970 until which the lock is held without a renewal. Advice: the clock of another machine may differ,
    and an operator may end it before.
    """
    mode: Mode = LOCK
    """Mode in which it holds the name."""
    permit: int | None = None
    """The number of the permit, where the mode is a `Permit`."""
    label: str | None = None
    """The text that others see beside the lock, behind a note that it is detached."""
    namespace: str = ""
    """Namespace of the client that made it."""

    def __repr__(self) -> str:
        token = "not taken" if self.token is None else f"token={self.token:d}"
        return f"<LeaseTicket {shown(self.name)} {token}, holder {self.holder}>"

    @property
    def holder(self) -> str:
        """The public digest of the owner id, safe to send and log."""
        return holder_of(self.owner)

    def dump(self) -> str:
        """Return the ticket as one word of letters, digits, ``.``, ``-`` and ``_``. It is a secret."""
        import base64
        import json

        mode = [self.mode.word, permits_of(self.mode), self.permit]
        fields = [self.name, self.namespace, self.ttl, self.owner, self.token, self.until, mode, self.label]
        content = json.dumps(fields, separators=(",", ":")).encode()
        return _PREFIX + base64.urlsafe_b64encode(content + _sum_of(content)).decode().rstrip("=")

    @classmethod
    def load(cls, text: str) -> LeaseTicket:
        """
        Read what `dump` has returned. Space around it is passed over.

        Raises:
            ConfigurationError: it is no ticket, was cut or changed, or another version wrote it. The message never
                shows the text.
        """
        import base64

        given: object = text
        if not isinstance(given, str) or not given.strip().startswith(_PREFIX):
            kind = "this text" if isinstance(given, str) else f"a value of type {type(given).__name__}"
            msg = f"{kind} is no lease ticket, which is a word that begins with {_PREFIX!r}; pass what dump() returned"
            raise ConfigurationError(msg)
        word = given.strip().removeprefix(_PREFIX)
        try:
            raw = base64.b64decode(word.encode("ascii") + b"=" * (-len(word) % 4), altchars=b"-_", validate=True)
            content, checked = raw[:-_SUM_BYTES], raw[-_SUM_BYTES:]
        except ValueError:
            content, checked = b"", b""
        if not content or checked != _sum_of(content):
            msg = "this lease ticket was cut or changed: its check sum is wrong; copy the whole word"
            raise ConfigurationError(msg)
        try:
            return _read(content)
        except (ValueError, TypeError, KeyError, OverflowError):
            msg = "this lease ticket was written by another version; detach and resume with the same one"
            raise ConfigurationError(msg) from None


def _read(content: bytes) -> LeaseTicket:
    import json

    name, namespace, ttl, owner, token, until, (word, permits, permit), label = json.loads(content)
    ticket = LeaseTicket(
        check_name(name), check_ttl(ttl), owner, None, float(until), mode_named(word, permits), permit, label, namespace
    )
    in_namespace(namespace, name)
    if len(owner) != _OWNER_DIGITS or not int(owner, 16) >= 0 or not math.isfinite(until):
        raise ValueError
    if not isinstance(label, str | None) or not isinstance(permit, int | None):
        raise TypeError
    return ticket if token is None else with_token(ticket, int(check_token(token)), ticket.until)


def _sum_of(content: bytes) -> bytes:
    import hashlib

    return hashlib.sha256(_PREFIX.encode() + content).digest()[:_SUM_BYTES]


# What the package does with a ticket, and users need not.


def claim_of(ticket: LeaseTicket) -> Claim:
    """Return the claim under which the store keeps what *ticket* stands for."""
    name = in_namespace(ticket.namespace, ticket.name)
    return Claim(name, ticket.ttl, ticket.owner, say_detached(ticket.label), ticket.mode)


def timing_of(ticket: LeaseTicket) -> Timing:
    """Return the timing of a lease that no process renews."""
    return Timing.build(ttl=ticket.ttl, safety_buffer=min(ticket.ttl / 5, _LONGEST_BUFFER))


def with_token(ticket: LeaseTicket, number: int, until: float) -> LeaseTicket:
    """Return *ticket* with the token that its owner has."""
    token = Token(number, claim_of(ticket).token_holder(number))
    return LeaseTicket(
        ticket.name, ticket.ttl, ticket.owner, token, until, ticket.mode, ticket.permit, ticket.label, ticket.namespace
    )
