"""
Tickets in etcd: one key for each, and the rules of their line.

    fencing/invoices%2F42/9f8a01c2...    ->  {"label": "batch 7"}
    fencing/catalog/9f8a01c2...          ->  {"label": null, "mode": "reader", "token": 4711}
    fencing/gpu-pool/9f8a01c2...         ->  {"label": null, "mode": "permit", "of": 4, "permit": 2}

The key ends with a digest of the owner, which itself never leaves the process. The keys of a name are its line, in the
order in which they were created, and that revision is the number of the ticket. It is the token as well, except that
readers share the token of the first of them.

A lock and a writer hold as soon as they are first: no request has to write that. The token of a reader and the number
of a permit are written into the key, by the client that lets them hold or that notices it first.

A ticket that stays for a while after its owner has left has ``stays`` in its value. An operator who ends a ticket
leaves a note for its owner:

    fencing/invoices%2F42:revoked/9f8a01c2...    ->  {"reason": "host is gone"}
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, Self
from urllib.parse import unquote

from fencing_sdk._etcd import Entry, Json
from fencing_sdk._http.requests import UnreadableAnswerError
from fencing_sdk._values.claim import LOCK, READER, Claim, Mode, Permit, Seen, holder_of, mode_named, safe_segment
from fencing_sdk._values.token import TOKEN_LIMIT
from fencing_sdk.errors import ConfigurationError, shown

DEFAULT_PREFIX = "fencing/"
_PREFIX = re.compile(r"[!-~]{1,256}")
_DIGEST = 32
"""Hex digits of the SHA-256 of the owner: as many bits as that has. The first eight are the public holder."""
_LAST = re.compile(rf"[0-9a-f]{{{_DIGEST}}}")
_WITHOUT_LABEL = b'{"label":null}'


class EtcdKeys:
    """The names of keys below one prefix."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix.encode()

    def line(self, name: str) -> tuple[bytes, bytes]:
        """The range of a name's keys: its begin, and its end, which is not part of it."""
        return _line(self._prefix, name)

    def own(self, claim: Claim) -> bytes:
        """The key of one claim."""
        return _line(self._prefix, claim.name)[0] + _digest(claim.owner)

    def names(self, prefix: str) -> tuple[bytes, bytes]:
        """The range of the keys of all names that begin with *prefix*."""
        begin = self._prefix + safe_segment(prefix).encode("ascii")
        return begin, begin[:-1] + bytes([begin[-1] + 1])  # the last byte is printable ASCII

    def name(self, key: bytes) -> str | None:
        """The name of a key that is in such a range; None for a note, and for a key of another program."""
        folder, _, last = key.removeprefix(self._prefix).decode(errors="replace").partition("/")
        name = unquote(folder)
        return name if _LAST.fullmatch(last) and safe_segment(name) == folder else None

    def note(self, key: bytes) -> bytes:
        """The key of the note for the owner of the ticket whose key is *key*."""
        folder, _, last = key.rpartition(b"/")
        return folder + b":revoked/" + last


@lru_cache(maxsize=1024)  # an acquisition and its release need each several times
def _line(prefix: bytes, name: str) -> tuple[bytes, bytes]:
    folder = prefix + safe_segment(name).encode("ascii")
    return folder + b"/", folder + b"0"  # 0 is the character after the slash; a segment contains neither


@lru_cache(maxsize=1024)
def _digest(owner: str) -> bytes:
    return hashlib.sha256(owner.encode()).hexdigest()[:_DIGEST].encode()


def check_prefix(prefix: object) -> str:
    """Return *prefix* if keys can begin with it."""
    if isinstance(prefix, str) and _PREFIX.fullmatch(prefix):
        return prefix
    msg = f"prefix must be 1 to 256 printable ASCII characters without spaces, got {shown(prefix)}"
    raise ConfigurationError(msg)


def value_of(
    mode: Mode, label: str | None, *, token: int | None = None, permit: int | None = None, stays: str | None = None
) -> bytes:
    """
    The value of a ticket's key. *token* of a reader and *permit* are None while it waits; token 0: that of its own key.

    *stays*: what it shows as its holder, once its owner has left it.
    """
    if mode is LOCK and label is None and stays is None:
        return _WITHOUT_LABEL
    fields: Json = {"label": label}
    if mode.word != LOCK.word:
        fields["mode"] = mode.word
    if isinstance(mode, Permit):
        fields["of"] = mode.of
    given = {"token": token, "permit": permit, "stays": stays}
    fields |= {field: value for field, value in given.items() if value is not None}
    return json.dumps(fields, separators=(",", ":")).encode()


@dataclass(frozen=True, slots=True)
class TicketKey(Entry):
    """The key of one ticket."""

    mode: Mode
    label: str | None
    token: int | None
    """The token of a reader that holds; None of every other ticket."""
    permit: int | None
    stays: str | None

    @classmethod
    def read(cls, fields: Json) -> Self:
        """
        Read a key that a range found.

        Raises:
            UnreadableAnswerError: another program wrote it.
        """
        entry = Entry.read(fields)
        try:
            facts = json.loads(entry.value)
            mode = mode_named(facts.get("mode", LOCK.word), _number(facts.get("of"), 1))
            token, permit = _number(facts.get("token")), _number(facts.get("permit"))
            texts = facts.get("label"), facts.get("stays")
            if not all(text is None or isinstance(text, str) for text in texts):
                raise TypeError  # noqa: TRY301  (as _number does)
        except (ValueError, TypeError, AttributeError, KeyError, RecursionError):
            msg = "a key of the lock has a value that no lock has; another program writes below the prefix"
            raise UnreadableAnswerError(msg) from None
        token = None if token is None or mode != READER else token or entry.created
        label, stays = texts
        return cls(
            entry.key, entry.value, entry.created, entry.modified, entry.lease, mode, label, token, permit, stays
        )

    @property
    def written(self) -> bool:
        """True if it is written in the key that it holds."""
        return self.token is not None or self.permit is not None

    @property
    def holder(self) -> str:
        """The public digest of the owner."""
        return self.stays or self.key.rpartition(b"/")[2][:8].decode(errors="replace")


def _number(value: object, least: int = 0) -> int | None:
    if value is None:
        return None
    if isinstance(value, int) and not isinstance(value, bool) and least <= value < TOKEN_LIMIT:
        return value
    raise TypeError


class Stand(NamedTuple):
    """Standing of a ticket in its line."""

    key: TicketKey
    token: int | None
    """None: it waits."""
    permit: int | None = None
    unwritten: bool = False
    """True if it holds, and its token or its number has to be written."""

    @property
    def value(self) -> bytes:
        """Return the text to write."""
        key = self.key
        token = self.token if key.mode == READER else None
        return value_of(key.mode, key.label, token=token, permit=self.permit, stays=key.stays)

    def seen(self, remaining: float) -> Seen:
        """Describe the ticket. When it was granted is not kept."""
        key = self.key
        return Seen(key.holder, key.mode, self.token, self.permit, remaining, None, key.label)


def settled(line: Sequence[TicketKey]) -> list[Stand]:
    """
    The rules of `fencing_sdk.abc.line`, over the keys of a line in their order: how each stands once all is written.

    The beginning of a line is enough for those who are in it.
    """
    stands: list[Stand] = []
    fits = True
    for key in line:
        mode = key.mode
        fits = fits and (not stands or (mode.word == line[0].mode.word and len(stands) < mode.width))
        if not fits:
            stands.append(Stand(key, None))
        elif mode == READER:
            token = key.token or (stands[0].token if stands else key.created)
            stands.append(Stand(key, token, unwritten=key.token is None))
        elif isinstance(mode, Permit):
            taken = {stand.permit for stand in stands}
            permit = (
                next(number for number in range(mode.of) if number not in taken) if key.permit is None else key.permit
            )
            stands.append(Stand(key, key.created, permit, key.permit is None))
        else:
            stands.append(Stand(key, key.created))
    return stands


def stays_as(claim: Claim) -> str:
    """Return the holder that a ticket shows once the owner of *claim* has left it."""
    return holder_of(f"-{claim.owner}")
