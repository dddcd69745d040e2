"""Lease ticket: stands for a lease that no process carries, and travels as one word with the secret owner id."""
# ruff: noqa: PLC0415  (an import of the package needs neither JSON nor OpenSSL, both of which take longer than it)

from __future__ import annotations

import base64
import math
from dataclasses import dataclass, replace

from fencing_sdk._values.claim import LOCK, Claim, Mode, holder_of, in_namespace, mode_named, permits_of
from fencing_sdk._values.reports import say_detached
from fencing_sdk._values.timing import Timing, check_ttl
from fencing_sdk._values.token import Token, check_token
from fencing_sdk.errors import ConfigurationError, shown

PREFIX = "fencing1."
"""Begins each ticket: the package and the version of the format."""
_SUM_BYTES = 6
_LONGEST_BUFFER = 5.0
"""Seconds: no work has to be cancelled in the buffer of a ticket, so that it need not grow with a ttl of hours."""


@dataclass(frozen=True, slots=True, repr=False)
class LeaseTicket:
    """
    Credential of a detached lease: who bears it may renew, resume or release the lease. Its ``repr`` shows no secret.

    Made by `Lease.detach` and `LockClient.detached`.
    """

    name: str
    """Name of the lock, without the namespace."""
    ttl: float
    """Seconds for which the store keeps the lock after each renewal of the ticket."""
    owner: str
    """The secret id under which the store keeps the lock."""
    token: Token | None = None
    """The fencing token; None until the store has answered that the ticket holds."""
    until: float = 0.0
    """Seconds since 1970 until which it holds without a renewal. Advice: clocks differ, and an operator may end it."""
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
        import json

        mode = [self.mode.word, permits_of(self.mode), self.permit]
        fields = [self.name, self.namespace, self.ttl, self.owner, self.token, self.until, mode, self.label]
        content = json.dumps(fields, separators=(",", ":")).encode()
        return PREFIX + base64.urlsafe_b64encode(content + _sum_of(content)).decode().rstrip("=")

    @classmethod
    def load(cls, text: str) -> LeaseTicket:
        """
        Read what `dump` has returned.

        Raises:
            ConfigurationError: it is no ticket, was cut or changed, or another version wrote it. The message never
                shows the text.
        """
        given: object = text
        word = given.strip() if isinstance(given, str) else ""
        if not word.startswith(PREFIX):
            msg = f"this is no lease ticket, which is a word that begins with {PREFIX!r}; pass what dump() returned"
            raise ConfigurationError(msg)
        try:
            word = word.removeprefix(PREFIX)
            raw = base64.b64decode(word.encode() + b"=" * (-len(word) % 4), altchars=b"-_", validate=True)
        except ValueError:
            raw = b""
        content = raw[:-_SUM_BYTES]
        if not content or raw[-_SUM_BYTES:] != _sum_of(content):
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
    in_namespace(namespace, name)
    mode = mode_named(word, permits)
    ticket = LeaseTicket(name, check_ttl(ttl), f"{int(owner, 16):032x}", None, until, mode, permit, label, namespace)
    if not math.isfinite(until) or not isinstance(label, str | None) or not isinstance(permit, int | None):
        raise TypeError
    return ticket if token is None else with_token(ticket, check_token(token), until)


def _sum_of(content: bytes) -> bytes:
    import hashlib

    return hashlib.sha256(PREFIX.encode() + content).digest()[:_SUM_BYTES]


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
    return replace(ticket, token=Token(number, claim_of(ticket).token_holder(number)), until=until)
