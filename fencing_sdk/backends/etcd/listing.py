"""
Lists what is held, and who waits.

A page is one range with a limit, in the order of the keys, so all keys of a lock stand together, and nothing is
remembered between pages. There are three cases for the last lock of a page that is not the last page:

1. Its line begins on the page, behind other keys: it may go on behind the page, so the next page begins with it.
2. Its line fills the page: the whole line is looked at, and the next page begins behind it.
3. The last key is another program's, or none that a claim has: the next page begins behind it.

The key of a lock that was created first is its holder's. Where it is the key of a share, the line is looked at
alone: who holds beside whom is told by more than this key. What is left of a grant is known to its lease alone;
many locks share one, so each is asked once for a page.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from fencing_sdk._etcd.json_codec import Entry
from fencing_sdk._http.bodies import UnreadableAnswerError
from fencing_sdk._values.claim import Holder, Listing, Waiting
from fencing_sdk.backends.etcd.keys import EtcdKeys, holder_of_key, is_share
from fencing_sdk.backends.etcd.requests import EtcdRequests
from fencing_sdk.backends.etcd.shares import LEAST_REMAINING, EtcdShares, SeenLine
from fencing_sdk.errors import BackendError, ConfigurationError

__all__ = ["EtcdListing"]

_OPERATION = "list"


class EtcdListing:
    """Lists for one backend."""

    def __init__(self, requests: EtcdRequests, shares: EtcdShares) -> None:
        self._requests = requests
        self._shares = shares
        self._keys: EtcdKeys = requests.keys

    async def page(self, prefix: str, cursor: str | None, limit: int) -> Listing:
        """See `fencing_sdk.abc.SupportsListing.list_held`."""
        begin, end = self._keys.names(prefix)
        begin = begin if cursor is None else _read_cursor(cursor, begin, end)
        found, more = await self._requests.stretch(_OPERATION, begin, end, limit)
        names = [self._keys.name(entry.key) for entry in found]
        lines: dict[str, list[Entry]] = {}
        for name, entry in zip(names, found, strict=True):
            if name is not None:
                lines.setdefault(name, []).append(entry)
        after, cut = found[-1].key + b"\0" if found else begin, False
        if more and (last := names[-1]) is not None:
            line_begin, after = self._keys.line(last)
            cut = len(lines[last]) == len(found)
            if not cut:
                after = line_begin
                del lines[last]
        holders = await self._holders([await self._seen(name, line, cut=cut) for name, line in lines.items()])
        return Listing(holders, after.hex() if more else None)

    async def _seen(self, name: str, keys: Sequence[Entry], *, cut: bool) -> SeenLine:
        """The line of a lock, of which *keys* are on the page; *cut*: there may be more of them."""
        first = min(keys, key=_created)
        if not cut and not is_share(first):
            return SeenLine(name, [first], [entry for entry in keys if entry is not first], 0, 0)
        try:
            return await self._shares.look(_OPERATION, name)
        except BackendError as error:
            if not isinstance(error.__cause__, UnreadableAnswerError):
                raise
            return SeenLine(name, [], [], 0, 0)  # another program has written one of the keys

    async def _holders(self, lines: Sequence[SeenLine]) -> list[Holder]:
        remaining = await self._shares.remaining(_OPERATION, [entry.lease for line in lines for entry in line.held])
        found = []
        for line in lines:
            for entry in line.held:
                if (left := remaining[entry.lease]) is None:
                    continue  # the lease has ended since
                with suppress(UnreadableAnswerError):  # another program has written the key
                    holder = holder_of_key(line.name, entry, max(LEAST_REMAINING, left), phase=line.phase)
                    found.append(replace(holder, waiters=len(line.waiting)))
        return found

    async def waiters(self, name: str) -> list[Waiting]:
        """See `fencing_sdk.abc.SupportsListing.list_waiters`."""
        seen = await self._shares.look(_OPERATION, name)
        waiters: list[Waiting] = []
        for entry in seen.waiting:
            with suppress(UnreadableAnswerError):  # another program has written the key
                holder = holder_of_key(name, entry, 0.0)
                waiters.append(Waiting(holder.holder, holder.mode, None, holder.metadata))  # when it came is not kept
        return waiters


def _created(entry: Entry) -> int:
    return entry.created


def _read_cursor(cursor: str, begin: bytes, end: bytes) -> bytes:
    try:
        key = bytes.fromhex(cursor)
    except ValueError:
        key = b""
    if begin <= key <= end:
        return key
    msg = "cursor must be one that a page of this listing had"
    raise ConfigurationError(msg)
