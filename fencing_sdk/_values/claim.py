"""
The values between the engine and a store: names, claims, and the places of tickets.

Values only: no clock, no task, no store is known here. A `Claim` exists before anything is sent,
so that an acquisition whose answer never came can still be released.
"""

from __future__ import annotations

import functools
import math
import os
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import NamedTuple, Self

from fencing_sdk._values.token import TOKEN_LIMIT
from fencing_sdk.errors import ConfigurationError, InvalidNameError, shown

NAME_LIMIT = 512
"""Bytes of UTF-8. Every store takes keys of this size after escaping."""
_EMPTY_HINTS = {
    "name": "; name what it protects, such as 'invoices/42'",
    "resource": "; name what the guard protects, such as 'invoices/42'",
    "pattern": "; '*' matches every name",
}


PLAIN = "lock"
"""The recipe of a plain lock, whose name remembers none."""


class LockName(str):
    """A lock name that remembers how it was made, by which metrics are kept: by a template, or for a recipe."""

    __slots__ = ("recipe", "template")

    recipe: str
    """Kind of thing: ``lock``, ``semaphore``, ``reader``, ``writer``, ``multilock``, ``election``, ``job`` or
    ``row``."""
    template: str | None
    """The template that was filled in; None for a name without one."""

    def __new__(cls, name: str, template: str | None = None, recipe: str = PLAIN) -> Self:
        made = super().__new__(cls, name)
        made.template = template
        made.recipe = recipe
        return made

    def __reduce__(self) -> tuple[type[Self], tuple[str, str | None, str]]:
        return type(self), (str(self), self.template, self.recipe)


def name_for(recipe: str, name: object) -> LockName:
    """Return *name*, if it is valid, as one that remembers its *recipe*."""
    checked = check_name(name)
    return LockName(checked, template_of(checked), recipe)


def template_of(name: str) -> str | None:
    """Return the template that made *name*, such as ``report/{report_id}``, or None."""
    return name.template if isinstance(name, LockName) else None


def recipe_of(name: str) -> str:
    """Return what *name* was made for: ``lock`` where it does not remember anything else."""
    return name.recipe if isinstance(name, LockName) else PLAIN


def check_name(name: object, *, parameter: str = "name") -> str:
    """
    Return *name* if it can name a lock or a resource.

    Names are untrusted input, so what could break a log line, a header or a key is refused here
    once: the empty name, control characters (NUL, CR, LF), lone surrogates, more than 512 bytes.
    Everything else is allowed and kept as it is: two spellings of an accent are two names.

    Raises:
        InvalidNameError: *name* is not such a string.
        ConfigurationError: it is not a string at all, which is not the sender's fault.
    """
    if not isinstance(name, str):
        msg = f"{parameter} must be a str, not {type(name).__name__}"
        raise ConfigurationError(msg)
    if type(name) is not LockName:
        name = str.__str__(name)  # the text itself: a member of an enum may print as something else
    if not name:
        hint = _EMPTY_HINTS.get(parameter, "")
        msg = f"{parameter} must not be empty{hint}"
        raise InvalidNameError(msg)
    if len(name) > NAME_LIMIT or (not name.isascii() and len(name.encode("utf-8", "surrogatepass")) > NAME_LIMIT):
        msg = f"{parameter} {shown(name)} is longer than {NAME_LIMIT} bytes; use a hash of it"
        raise InvalidNameError(msg)
    if not name.isprintable() and any(unicodedata.category(char) in {"Cc", "Cs"} for char in name):
        msg = f"{parameter} {shown(name)} has a control character or a lone surrogate; escape it"
        raise InvalidNameError(msg)
    return name


def check_namespace(namespace: object) -> str:
    """Return *namespace* if it can prefix names; the empty one means no prefix."""
    if isinstance(namespace, str) and not namespace:
        return ""
    try:
        return check_name(namespace, parameter="namespace")
    except InvalidNameError as error:  # which no request can have made
        raise ConfigurationError(str(error)) from None


def in_namespace(namespace: str, name: str) -> str:
    """Return the name as the store knows it: a *namespace* is nothing but a prefix."""
    name = check_name(name)
    return check_name(f"{namespace}:{name}", parameter="namespace:name") if namespace else name


def safe_segment(name: str) -> str:
    """Percent-encode *name* into one path segment: no slash, no leading dot, ASCII only."""
    from urllib.parse import quote  # noqa: PLC0415  (stores with paths ask, others do not load it)

    segment = quote(name, safe="-_~")
    return segment.replace(".", "%2E")


@functools.lru_cache(maxsize=1024)  # each event of an acquisition asks
def holder_of(owner: str) -> str:
    """
    Digest an *owner* id into the public ``holder``.

    The owner id may renew and release the lock, so it stays secret; 32 bits of its SHA-256 are
    enough to notice that two holders got one token.
    """
    import hashlib  # noqa: PLC0415  (it loads OpenSSL, which takes longer than this module)

    return hashlib.sha256(owner.encode()).hexdigest()[:8]


def new_owner() -> str:
    """Draw 128 random bits from the system, as 32 hex digits. Drawn ahead, they would be the same in a forked child."""
    return os.urandom(16).hex()


@dataclass(frozen=True, slots=True)
class Mode:
    """Kind of hold that a claim wants: alone, or together with others. `LOCK`, `WRITER`, `READER`, or a `Permit`."""

    word: str
    """The mode as one word: ``lock``, ``writer``, ``reader`` or ``permit``."""

    @property
    def shared(self) -> bool:
        """True if several claims of this mode may hold one name at the same time."""
        return self.width > 1

    @property
    def width(self) -> int:
        """A claim of this mode holds beside fewer than so many others, which stand ahead of it: 1 means alone."""
        return _ENDLESS if self.word == "reader" else 1


_ENDLESS = 2**31 - 1

LOCK = Mode("lock")
"""Alone. The default."""

WRITER = Mode("writer")
"""Alone, in one line with readers."""

READER = Mode("reader")
"""Together with every other reader. They share one token."""


@dataclass(frozen=True, slots=True)
class Permit(Mode):
    """A numbered permit. Each has a token of its own."""

    of: int
    """Number of permits that may be held at the same time. A claim gets the lowest free number from 0 to below this."""
    word: str = field(default="permit", init=False, repr=False)

    @property
    def shared(self) -> bool:
        """True, also for a single permit: it has a number."""
        return True

    @property
    def width(self) -> int:
        """Number of permits."""
        return self.of


_MODES = {mode.word: mode for mode in (LOCK, WRITER, READER)}


def mode_named(word: str, permits: int | None) -> Mode:
    """Return the mode that a store has written as a word, and for a permit as the number of permits."""
    return Permit(of=permits or 1) if word == "permit" else _MODES[word]


def permits_of(mode: Mode) -> int | None:
    """Return the number of permits; None for other modes."""
    return mode.of if isinstance(mode, Permit) else None


@dataclass(frozen=True, slots=True, init=False)
class Claim:
    """
    One acquisition, asked for: a name and the owner id made for it before anything is sent.

    Retries of one acquisition use one claim; a new acquisition makes a new one, with an owner of its own by default.
    """

    name: str
    ttl: float
    owner: str = field(repr=False)
    """128 random bits, never shown: they are enough to release the lock."""
    label: str | None
    """Shown by `LockClient.inspect` to other clients."""
    mode: Mode
    """Mode in which it holds the name. A store gets claims of its `fencing_sdk.abc.Backend.modes` alone."""

    def __init__(
        self, name: str, ttl: float, owner: str | None = None, label: str | None = None, mode: Mode = LOCK
    ) -> None:
        # Every acquisition makes one: the slots are set directly, at half of what a frozen dataclass takes.
        _set_name(self, name)
        _set_ttl(self, ttl)
        _set_owner(self, new_owner() if owner is None else owner)
        _set_label(self, label)
        _set_mode(self, mode)

    @property
    def holder(self) -> str:
        """The public digest of the owner id."""
        return holder_of(self.owner)

    def token_holder(self, token: int) -> str:
        """
        The ``holder`` of the *token* that was granted to this claim, by which a guard knows two writers apart.

        Readers that hold together share it, as they share the token.
        """
        return holder_of(f"readers\0{self.name}\0{token:d}") if self.mode == READER else self.holder


_set_name, _set_ttl, _set_owner, _set_label, _set_mode = (vars(Claim)[part.name].__set__ for part in fields(Claim))


class Place(NamedTuple):
    """Place of a living ticket in its line. Once it holds, it does so until it is gone."""

    token: int | None
    """None: it waits. Higher than each earlier token of the name; a reader behind one that holds has that one's."""
    permit: int | None = None
    """The lowest number that was free when it began to hold, where its mode is a `Permit`."""
    number: int = 0
    """
    Number of the ticket: another one than that of any earlier ticket of its owner. By it a bell is known to be about
    the ticket of the latest answer, and not about one that died before. 0: the store has no numbers, so that a bell
    only says "look", and the answer of a ``keep`` is the grant.
    """
    ttl: float | None = None
    """Seconds for which the ticket lives, where the store grants less than was asked for."""
    look_after: float = math.inf
    """
    Seconds after which a ``keep`` may find that a waiting ticket holds although no bell rang: for the first that waits,
    when those that hold would have died. The others look when they are kept anyway, so that a death wakes one client.
    """
    name: str | None = None
    """Name of the lease, where the store has chosen what it granted."""


HELD = Place(-1)
"""Answer of a ``keep`` that reads no token: the ticket holds, as it did before."""


class Gone(NamedTuple):
    """There is no such ticket: it died, was given back or ended, or was lost with the store. It never comes back."""

    reason: str | None = None
    """Reason of the operator who ended it, for at least a minute after it would have died; None: none did."""
    taken: bool = False
    """True if another holds the name alone now, as far as the store knows."""


class Busy(NamedTuple):
    """The store drew no ticket, because it would have had to wait."""

    look_after: float | None = None
    """Seconds after which another try may succeed; None: not known."""


UNKNOWN = "-"
"""Stands for the digest of an owner that the store does not know, and so cannot notify of a reason."""


class Seen(NamedTuple):
    """A living ticket, as the store shows it to those who look."""

    holder: str
    """The public digest of its owner; ``-`` where the store does not know it."""
    mode: Mode
    token: int | None
    permit: int | None
    remaining: float
    """Seconds until it dies without a sign of life."""
    since: float | None
    """Seconds since it began to hold, or, while it waits, since it was drawn; None: not known."""
    label: str | None


def mistake_in(place: Place, mode: Mode) -> str | None:
    """Return what a backend has filled in wrongly in the *place* of a holding claim of this *mode*, or None."""
    if not _is_int_below(TOKEN_LIMIT, place.token):
        return "a token must be an int from 0 to below 2**53"
    if isinstance(mode, Permit):
        if not _is_int_below(mode.of, place.permit):
            return f"the number of a permit must be an int from 0 to below {mode.of:d}"
    elif place.permit is not None:
        return f"the place of a {mode.word} has no number of a permit"
    if place.ttl is not None and (not _is_number(place.ttl) or math.isnan(place.ttl)):
        return "the ttl of a place must be a number of seconds, or None"
    return None


def _is_int_below(limit: int, number: object) -> bool:
    return (type(number) is int or (isinstance(number, int) and not isinstance(number, bool))) and 0 <= number < limit


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


@dataclass(frozen=True, slots=True)
class Holder:
    """Holder of a lock, as `LockClient.inspect` and `LockClient.all_holders` show it."""

    name: str
    token: int
    id: str
    """The public digest of its owner id, as in `Lease.holder`."""
    remaining: float
    """Seconds until the store would hand the lock on without a renewal."""
    label: str | None = None
    mode: Mode = LOCK
    permit: int | None = None
    """The number of the permit, where the mode is a `Permit`."""
    held_for: float | None = None
    """Seconds since the grant; None where the store does not know."""
    waiters: int | None = None
    """Number of tickets that wait; None where there is no line, or it was not counted."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """Waiter for a lock, as `LockClient.waiters` shows it."""

    id: str
    """The public digest of its owner id: the ``holder`` of the grant that it will get."""
    mode: Mode = LOCK
    """Mode in which it wants to hold the name."""
    waiting_for: float | None = None
    """Seconds since it joined the line; None where the store does not know."""
    label: str | None = None


def holders_in(name: str, seen: Sequence[Seen], *, lines: bool = True) -> list[Holder]:
    """
    Return the holders of *name* among the tickets *seen*, in the order of their permits, or of their tokens.

    *lines*: the store has lines, so that those who wait can be counted.
    """
    waiters = sum(ticket.token is None for ticket in seen) if lines else None
    holders = [
        Holder(
            name,
            ticket.token,
            ticket.holder,
            ticket.remaining,
            ticket.label,
            ticket.mode,
            ticket.permit,
            ticket.since,
            waiters,
        )
        for ticket in seen
        if ticket.token is not None
    ]
    return sorted(holders, key=lambda holder: (holder.permit or 0, holder.token))
