"""
What operators ask: who holds and who waits, one name or all of them, and that a grant ends, with the reason.

A page of a list is one range with a limit, in the order of the keys, so all keys of a lock stand together, and nothing
is remembered between pages. There are three cases for the last lock of a page that is not the last page:

1. Its line begins on the page, behind other keys: it may go on behind the page, so the next page begins with it.
2. Its line fills the page: the whole line is looked at, and the next page begins behind it.
3. The last key is another program's, or one that no claim has: the next page begins behind it.

The key that was created first is the holder's, unless it is that of a share: then the whole line is looked at, and the
phase. What is left of a grant is known to its lease alone; many locks share one, so a page asks each lease once.

A revocation looks at the line. One transaction compares that the keys of those who hold with the token are still there,
deletes them, and leaves a note for each holder. The deletion wakes the next waiter and reaches the holders by the
watches that both have anyway. The notes live on a lease of their own, as long as the grants would have lived. Readers
who hold together may be more than one transaction can delete. The last one compares that no reader came since the look,
and deletes the phase too. Until then the rest holds, and the next look finds who is left.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

from fencing_sdk._etcd.gateway import TXN
from fencing_sdk._etcd.messages import Entry, Json, compared, delete, entries, number, put, ranged, responses, txn
from fencing_sdk._http.outcomes import UnreadableAnswerError
from fencing_sdk._values.claim import READER, Claim, Holder, Listing, Waiting
from fencing_sdk.backends._shared.error_translation import ErrorTranslation
from fencing_sdk.backends._shared.node_line import holding
from fencing_sdk.backends.etcd.keys import LineKey, phase_token
from fencing_sdk.backends.etcd.line import in_line
from fencing_sdk.backends.etcd.requests import BACKEND, BATCH, EtcdRequests, unreadable
from fencing_sdk.errors import BackendError, BackendRefusedError, BackendUnavailableError, ConfigurationError

__all__ = ["EtcdOperating"]

_LEAST_REMAINING = 0.5
"""Seconds: etcd answers with whole seconds, rounded down, so a lease with 0 of them is still alive."""
_LEASES_AT_ONCE = 8
_LONGER = 5
"""Seconds for which a note is kept longer than the grant would have lasted."""
_AT_ONCE = 50
"""Holders in one transaction: etcd allows 128 operations, and a holder needs two."""
_TRIES = 10
"""Times that a lock is looked at while its holders come and go."""


class _SeenLine(NamedTuple):
    """The keys of a lock, those of its holders apart."""

    name: str
    held: list[LineKey]
    waiting: list[LineKey]
    phase: int = 0
    """The token of readers."""
    revision: int = 0
    """Of this view: a key that is not in it was created later."""

    def token(self, key: LineKey) -> int:
        """The token of one that holds."""
        return self.phase if key.shared == READER.word else key.created


class EtcdOperating:
    """The answers of one backend."""

    def __init__(self, requests: EtcdRequests) -> None:
        self._requests = requests
        self._keys = requests.keys

    # Who holds, and who waits

    async def inspect(self, name: str) -> Holder | None:
        """See `fencing_sdk.abc.Backend.inspect`; the waiters are not counted."""
        first = await self._requests.first("inspect", name)
        if first is None:
            return None
        if first.shared:
            return next(iter(await self.holders(name)), None)
        found = await self._describe("inspect", [_SeenLine(name, [first], [])])
        return replace(found[0], waiters=None) if found else None

    async def holders(self, name: str) -> list[Holder]:
        """See `fencing_sdk.abc.SupportsShares.holders`: in the order of their permits, or of their tokens."""
        found = await self._describe("inspect", [await self._look("inspect", name)])
        return sorted(found, key=lambda holder: (holder.permit or 0, holder.token))

    async def _look(self, operation: str, name: str) -> _SeenLine:
        """The whole line of *name*."""
        begin, end = self._keys.line(name)
        look = [ranged(begin, end=end), ranged(self._keys.phase(name))]
        fields, _ = await self._requests.ask(operation, TXN, txn(compare=[], success=look))
        with ErrorTranslation(unreadable, operation):
            line_part, phase_part = responses(fields, 2)
            line, phase = in_line(entries(line_part, LineKey)), phase_token(entries(phase_part, Entry))
            held = holding(line, phase=bool(phase))
            return _SeenLine(name, held, line[len(held) :], phase, number(fields["header"], "revision"))

    async def _describe(self, operation: str, lines: Sequence[_SeenLine]) -> list[Holder]:
        """Describe the holders of *lines*, except of those whose lease has ended since."""
        remaining = await self._remaining(operation, [key.lease for line in lines for key in line.held])
        found = []
        for line in lines:
            for key in line.held:
                if (left := remaining[key.lease]) is None:
                    continue
                try:
                    waiters = len(line.waiting)
                    found.append(key.holder(line.name, max(_LEAST_REMAINING, left), phase=line.phase, waiters=waiters))
                except UnreadableAnswerError as error:
                    if operation != "list":  # a list leaves out what another program has written
                        raise BackendRefusedError(BACKEND, operation, str(error)) from error
        return found

    async def _remaining(self, operation: str, leases: Iterable[int]) -> dict[int, float | None]:
        """The seconds that leases have left; None for those that have ended. Many locks share one."""
        gate, asked = asyncio.Semaphore(_LEASES_AT_ONCE), list(dict.fromkeys(leases))

        async def ask(lease: int) -> float | None:
            async with gate:
                return await self._requests.remaining(operation, lease)

        return dict(zip(asked, await asyncio.gather(*map(ask, asked)), strict=True))

    async def waiters(self, name: str) -> list[Waiting]:
        """See `fencing_sdk.abc.SupportsListing.list_waiters`."""
        seen = await self._look("list", name)
        waiters: list[Waiting] = []
        for key in seen.waiting:
            with suppress(UnreadableAnswerError):  # another program has written the key
                holder = key.holder(name, 0.0)
                waiters.append(Waiting(holder.id, holder.mode, None, holder.label))  # when it came is not kept
        return waiters

    # All names

    async def page(self, prefix: str, cursor: str | None, limit: int) -> Listing:
        """See `fencing_sdk.abc.SupportsListing.list_holders`."""
        begin, end = self._keys.names(prefix)
        begin = begin if cursor is None else _read_cursor(cursor, begin, end)
        found, more = await self._requests.stretch("list", begin, end, limit)
        names = [self._keys.name(key.key) for key in found]
        lines: dict[str, list[LineKey]] = {}
        for name, key in zip(names, found, strict=True):
            if name is not None:
                lines.setdefault(name, []).append(key)
        after, cut = found[-1].key + b"\0" if found else begin, False
        if more and (last := names[-1]) is not None:
            line_begin, after = self._keys.line(last)
            cut = len(lines[last]) == len(found)
            if not cut:
                after = line_begin
                del lines[last]
        seen = [await self._seen(name, in_line(keys), cut=cut) for name, keys in lines.items()]
        return Listing(await self._describe("list", seen), after.hex() if more else None)

    async def _seen(self, name: str, keys: list[LineKey], *, cut: bool) -> _SeenLine:
        """The line of a lock, of which *keys* are on the page; *cut*: there may be more of them."""
        if not cut and not keys[0].shared:
            return _SeenLine(name, keys[:1], keys[1:])
        try:
            return await self._look("list", name)
        except BackendError as error:
            if not isinstance(error.__cause__, UnreadableAnswerError):
                raise
            return _SeenLine(name, [], [])  # another program has written one of the keys

    # Revocations

    async def revoke(self, name: str, token: int, reason: str) -> bool:
        """See `fencing_sdk.abc.SupportsRevoking.revoke`."""
        ended, failures = False, 0
        while failures < _TRIES:
            seen = await self._look("revoke", name)
            victims = [key for key in seen.held if seen.token(key) == token]
            if not victims:
                return ended
            succeeded = await self._end(seen, victims[:_AT_ONCE], reason, last=len(victims) <= _AT_ONCE)
            if succeeded and len(victims) <= _AT_ONCE:
                return True
            ended, failures = ended or succeeded, failures + (not succeeded)
        raise BackendUnavailableError(BACKEND, "revoke", "the holders of the lock change whenever it is looked at")

    async def _end(self, seen: _SeenLine, victims: Sequence[LineKey], reason: str, *, last: bool) -> bool:
        """End the grants of *victims*, if all of them still hold; with the *last* readers also their phase."""
        remaining = await self._remaining("revoke", [victim.lease for victim in victims])
        longest = max((left or 0.0 for left in remaining.values()), default=0.0)
        lease, _ = await self._requests.grant_lease("revoke", math.ceil(longest) + _LONGER)
        value = json.dumps({"reason": reason}).encode()
        steps = [put(self._keys.note(seen.name, victim.key), value, lease) for victim in victims]
        compare = [compared(victim.key, "CREATE", "EQUAL", victim.created) for victim in victims]
        if last and victims[0].shared == READER.word:
            compare += self._no_reader_since(seen)
            steps.append(delete(self._keys.phase(seen.name)))
        return await self._requests.end("revoke", compare, [victim.key for victim in victims], steps)

    def _no_reader_since(self, seen: _SeenLine) -> list[Json]:
        begin, end = self._keys.readers(seen.name)
        return [compared(begin, "CREATE", "LESS", seen.revision + 1, end=end)]

    async def reasons(self, claims: Sequence[Claim]) -> list[str | None]:
        """For claims whose grants have ended: why they were revoked; None for those that were not."""
        found: list[Entry | None] = []
        for start in range(0, len(claims), BATCH):
            found += await self._requests.notes("renew", claims[start : start + BATCH])
        return [None if note is None else _read_reason(note.value) for note in found]


def _read_cursor(cursor: str, begin: bytes, end: bytes) -> bytes:
    try:
        key = bytes.fromhex(cursor)
    except ValueError:
        key = b""
    if begin <= key <= end:
        return key
    msg = "cursor must come from a page of this listing"
    raise ConfigurationError(msg)


def _read_reason(value: bytes) -> str:
    try:
        reason = json.loads(value).get("reason")
    except (ValueError, AttributeError, RecursionError):
        reason = None
    return reason if isinstance(reason, str) else ""
