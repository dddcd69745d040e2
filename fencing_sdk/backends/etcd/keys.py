"""
Keys in etcd: one for each claim that holds the lock or waits for it.

    fencing/invoices%2F42/9f8a01c2...       ->  {"label": "batch 7"}
    fencing/catalog/9f8a01c2...             ->  {"label": null, "mode": "writer"}
    fencing/catalog/reader-9f8a01c2...      ->  {"label": null}
    fencing/catalog                         ->  the phase of its readers
    fencing/gpu-pool/permit-9f8a01c2...     ->  {"label": null, "of": 4, "permit": 2}

The key ends with a digest of the owner id, so that the id itself never leaves the process. The keys of a lock are its
line, in the order in which they were created: `fencing_sdk.backends._shared.node_line` says who of it holds. The
revision that created a key is the token of its holder, except of readers, who share one.

An operator who takes a grant away leaves a note for its holder, which ends with the ttl that it had:

    fencing/invoices%2F42:revoked/9f8a01c2...    ->  {"reason": "host is gone"}
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple
from urllib.parse import unquote

from fencing_sdk._etcd import Entry
from fencing_sdk._http.requests import UnreadableAnswerError
from fencing_sdk._values.claim import LOCK, READER, WRITER, Claim, Holder, Mode, Permit, safe_segment
from fencing_sdk._values.token import TOKEN_LIMIT
from fencing_sdk.errors import ConfigurationError, shown

DEFAULT_PREFIX = "fencing/"
_PREFIX = re.compile(r"[!-~]{1,256}")
_DIGEST = 32
"""Hex digits of the SHA-256 of the owner id: as many bits as that has. The first eight are the public holder."""

_READER, _PERMIT = b"reader-", b"permit-"
_LAST = re.compile(rf"(?:reader-|permit-)?[0-9a-f]{{{_DIGEST}}}")
_WITHOUT_LABEL = b'{"label":null}'


class EtcdKeys:
    """The names of keys below one prefix."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix.encode()

    def line(self, name: str) -> tuple[bytes, bytes]:
        """The range of a lock's keys: its begin, and its end, which is not part of it."""
        return _line(self._prefix, name)

    def rivals(self, claim: Claim) -> tuple[bytes, bytes]:
        """The part of the line that a claim waits for: for a reader all but readers, whose keys sort last."""
        begin, end = self.line(claim.name)
        return begin, begin + _READER if claim.mode == READER else end

    def permits(self, name: str) -> tuple[bytes, bytes]:
        """The part of the line whose keys are those of permits."""
        begin, _ = self.line(name)
        return begin + _PERMIT, begin + _READER

    def readers(self, name: str) -> tuple[bytes, bytes]:
        """The part of the line whose keys are those of readers."""
        begin, end = self.line(name)
        return begin + _READER, end

    def own(self, claim: Claim) -> bytes:
        """The key of one claim."""
        begin = {READER.word: _READER, "permit": _PERMIT}.get(claim.mode.word, b"")
        return _line(self._prefix, claim.name)[0] + begin + _digest(claim.owner)

    def phase(self, name: str) -> bytes:
        """The key that has the token of the readers that hold together: see `phase_token`."""
        return _line(self._prefix, name)[0][:-1]

    def phase_of_reader(self, key: bytes) -> bytes | None:
        """The same, for the key of a reader; None for any other key."""
        folder, _, last = key.rpartition(b"/")
        return folder if last.startswith(_READER) else None

    def names(self, prefix: str) -> tuple[bytes, bytes]:
        """The range of the keys of all locks whose name begins with *prefix*."""
        begin = self._prefix + safe_segment(prefix).encode("ascii")
        return begin, begin[:-1] + bytes([begin[-1] + 1])  # the last byte is printable ASCII

    def name(self, key: bytes) -> str | None:
        """The lock of a key that is in such a range; None for a note, a phase, and a key of another program."""
        folder, _, last = key.removeprefix(self._prefix).decode(errors="replace").partition("/")
        name = unquote(folder)
        return name if _LAST.fullmatch(last) and safe_segment(name) == folder else None

    def note(self, name: str, key: bytes) -> bytes:
        """The key of the note for the holder whose own key is *key*."""
        return _line(self._prefix, name)[0][:-1] + b":revoked/" + key.rpartition(b"/")[2]


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


def value_of(claim: Claim, *, permit: int | None = None) -> bytes:
    """
    The value of the claim's key, for `inspect`, for operators, and for those behind it in the line.

    A permit has its number once it is granted.
    """
    mode = claim.mode
    if mode is LOCK and claim.label is None:
        return _WITHOUT_LABEL
    fields: dict[str, object] = {"label": claim.label}
    if mode == WRITER:
        fields["mode"] = mode.word
    elif isinstance(mode, Permit):
        fields |= {"of": mode.of} if permit is None else {"of": mode.of, "permit": permit}
    return json.dumps(fields, separators=(",", ":")).encode()


def phase_value(reader: LineKey) -> bytes:
    """The value of the phase that a *reader* begins which is there: a later revision may be above those in the line."""
    return str(reader.created).encode()


def phase_token(found: Sequence[Entry]) -> int:
    """
    The token of readers, of the phase that was *found*; 0: there is none.

    It is the revision that created the key of the reader that began the phase, perhaps in that same step.

    Raises:
        UnreadableAnswerError: another program wrote the phase.
    """
    if not found:
        return 0
    phase = found[0]
    if not phase.value:
        return phase.created
    if phase.value.isdigit() and 0 < (token := int(phase.value[:20])) < phase.created:
        return token
    msg = "the phase of readers has a value that it never has; another program writes below the prefix"
    raise UnreadableAnswerError(msg)


class LineKey(Entry):
    """The key of a holder or a waiter: see `fencing_sdk.backends._shared.node_line.Node`."""

    __slots__ = ()

    @property
    def shared(self) -> str:
        """``reader`` or ``permit``; nothing for a lock and a writer."""
        last = self.key.rpartition(b"/")[2]
        return READER.word if last.startswith(_READER) else "permit" if last.startswith(_PERMIT) else ""

    @property
    def permit(self) -> int | None:
        """
        The number of a permit that was granted.

        Raises:
            UnreadableAnswerError: another program wrote the key.
        """
        return self._facts.permit if self.shared == "permit" else None

    @property
    def _facts(self) -> _KeyFacts:
        try:
            return _KeyFacts.of(self.shared, json.loads(self.value))
        except (ValueError, TypeError, AttributeError, KeyError, RecursionError):
            msg = "a key of the lock has a value that no lock has; another program writes below the prefix"
            raise UnreadableAnswerError(msg) from None

    def holder(self, name: str, remaining: float, *, phase: int = 0, waiters: int | None = None) -> Holder:
        """
        Describe the holder of *name* whose key this is; *phase* is the token of readers.

        Raises:
            UnreadableAnswerError: another program wrote the key.
        """
        mode, label, permit = self._facts
        digest = self.key.rpartition(b"/")[2].rpartition(b"-")[2].decode(errors="replace")
        token = phase if mode == READER else self.created
        return Holder(name, token, digest[:8], remaining, label, mode, permit, waiters=waiters)


class _KeyFacts(NamedTuple):
    """The claim that a key in the line describes."""

    mode: Mode
    label: str | None
    permit: int | None

    @classmethod
    def of(cls, shared: str, fields: dict[str, object]) -> _KeyFacts:
        label = _text(fields.get("label"))
        if shared == "permit":
            permit = _number(fields["permit"]) if "permit" in fields else None
            return cls(Permit(_number(fields["of"])), label, permit)
        alone = WRITER if fields.get("mode") == WRITER.word else LOCK
        return cls(READER if shared else alone, label, None)


def _text(value: object) -> str | None:
    if value is None or isinstance(value, str):
        return value
    raise TypeError


def _number(value: object) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < TOKEN_LIMIT:
        return value
    raise TypeError
