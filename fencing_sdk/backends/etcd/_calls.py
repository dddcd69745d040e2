"""What is asked of etcd, in the words of locks. One request each; only how far etcd has come is remembered."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

from fencing_sdk._etcd.gateway import GRANT, KEEP_ALIVE, RANGE, TIME_TO_LIVE, TXN, Gateway, Reply
from fencing_sdk._etcd.json_codec import (
    Entry,
    Json,
    UnreadableError,
    compared,
    delete,
    entries,
    number,
    put,
    ranged,
    responses,
    txn,
)
from fencing_sdk._values.claim import TOKEN_LIMIT, Claim
from fencing_sdk.backends.etcd._keys import Keys, value_of
from fencing_sdk.errors import BackendRefusedError, BackendUnavailableError

__all__ = ["BATCH", "Calls", "Standing"]

BATCH = 60
"""Keys in one transaction: etcd allows 128 operations, and a claim may need two."""


class Standing(NamedTuple):
    """How one claim stands: its own key, if it is there, and the key that is first."""

    own: Entry | None
    first: Entry | None
    after_loss: bool = False

    @property
    def holds(self) -> bool:
        return self.own is not None and self.first is not None and self.own.key == self.first.key


class Calls:
    """The requests of one backend."""

    def __init__(self, gateway: Gateway, keys: Keys) -> None:
        self._gateway = gateway
        self.keys = keys
        self.seen = 0
        """The highest revision of any answer: what is put later is created above it."""

    async def _ask(self, operation: str, path: str, body: Json) -> Reply:
        reply = await self._gateway.call(operation, path, body)
        header = reply.fields.get("header")
        with suppress(UnreadableError):
            revision = number(header, "revision") if isinstance(header, dict) else 0
            if revision < TOKEN_LIMIT:
                self.seen = max(self.seen, revision)
        return reply

    # Leases

    async def grant_lease(self, operation: str, seconds: int) -> tuple[int, int]:
        """Make a lease; return its id and the seconds it really has."""
        fields, _ = await self._ask(operation, GRANT, {"TTL": str(seconds)})
        with self._readable(operation):
            lease, ttl = number(fields, "ID"), number(fields, "TTL")
            if not lease or ttl <= 0:
                msg = "the answer has no lease"
                raise UnreadableError(msg)
            return lease, ttl

    async def keep_alive(self, operation: str, lease: int) -> int:
        """Restart a lease; return its seconds, or 0 when it has ended."""
        fields, _ = await self._ask(operation, KEEP_ALIVE, {"ID": str(lease)})
        with self._readable(operation):
            return number(fields, "TTL")

    async def remaining(self, operation: str, lease: int) -> float | None:
        """Whole seconds that a lease has left; None when it has ended."""
        fields, _ = await self._ask(operation, TIME_TO_LIVE, {"ID": str(lease)})
        with self._readable(operation):
            left = number(fields, "TTL")  # may be below zero for as long as etcd has not ended the lease
            return max(0.0, left) if number(fields, "grantedTTL") else None

    # Locks

    async def take(self, claim: Claim, lease: int) -> Standing:
        """Take the lock if it has no key at all, else see how it stands."""
        begin, end = self.keys.line(claim.name)
        return await self._put_unless("acquire", claim, lease, compared(begin, "CREATE", "EQUAL", 0, end=end))

    async def stand(self, operation: str, claim: Claim, lease: int) -> Standing:
        """Stand at the end of the line, unless in it already."""
        absent = compared(self.keys.own(claim), "CREATE", "EQUAL", 0)
        begin, end = self.keys.line(claim.name)
        return await self._put_unless(operation, claim, lease, absent, ranged(begin, end=end, first=1))

    async def _put_unless(self, operation: str, claim: Claim, lease: int, compare: Json, *look: Json) -> Standing:
        """Put the own key if a comparison holds, and see who is first; without a *look*, the own key is."""
        begin, end = self.keys.line(claim.name)
        own, value = self.keys.own(claim), value_of(claim)
        body = txn(
            compare=[compare],
            success=[put(own, value, lease), *look],
            failure=[ranged(own), ranged(begin, end=end, first=1)],
        )
        fields, after_loss = await self._ask(operation, TXN, body)
        with self._readable(operation):
            if fields.get("succeeded") is True:
                revision = number(fields["header"], "revision")
                mine: Entry | None = Entry(own, value, revision, revision, lease)
                found = entries(responses(fields, 2)[1]) if look else [mine]
                first = next(iter(found), None)
            else:
                mine, first = (next(iter(entries(part)), None) for part in responses(fields, 2))
        if mine is not None and mine.created >= TOKEN_LIMIT:
            raise BackendRefusedError(self._gateway.who, operation, "the revision does not fit into 53 bits")
        return Standing(mine, first, after_loss)

    async def adopt(self, operation: str, own: Entry, lease: int) -> int | None:
        """Move a key to *lease*, if nothing has happened to it; return its revision then."""
        body = txn(compare=[compared(own.key, "MOD", "EQUAL", own.modified)], success=[put(own.key, own.value, lease)])
        fields, after_loss = await self._ask(operation, TXN, body)
        if fields.get("succeeded") is True:
            with self._readable(operation):
                return number(fields["header"], "revision")
        if after_loss:
            raise BackendUnavailableError(self._gateway.who, operation, "an earlier request may have been carried out")
        return None

    async def standings(self, operation: str, claims: Sequence[Claim]) -> list[Standing]:
        """How each of a batch of claims stands."""
        look = []
        for claim in claims:
            begin, end = self.keys.line(claim.name)
            look += [ranged(self.keys.own(claim)), ranged(begin, end=end, first=1)]
        fields, _ = await self._ask(operation, TXN, txn(compare=[], success=look))
        with self._readable(operation):
            found = [next(iter(entries(part)), None) for part in responses(fields, len(look))]
        return [Standing(own, first) for own, first in zip(found[::2], found[1::2], strict=True)]

    async def unchanged(self, operation: str, revisions: dict[bytes, int]) -> int | dict[bytes, Entry | None]:
        """Whether every key has the revision it should have: the revision of this view, else what is there of each."""
        body = txn(
            compare=[compared(key, "MOD", "EQUAL", revision) for key, revision in revisions.items()],
            success=[],
            failure=[ranged(key) for key in revisions],  # and these make etcd ask the majority in both cases
        )
        fields, _ = await self._ask(operation, TXN, body)
        with self._readable(operation):
            if fields.get("succeeded") is True:
                return number(fields["header"], "revision")
            parts = responses(fields, len(revisions))
            return {key: next(iter(entries(part)), None) for key, part in zip(revisions, parts, strict=True)}

    async def predecessor(self, operation: str, claim: Claim, created: int) -> tuple[Entry | None, int]:
        """The key that was created last before revision *created*, and the revision of this view."""
        begin, end = self.keys.line(claim.name)
        body = ranged(begin, end=end, last=1, before=created, keys_only=True)["request_range"]
        fields, _ = await self._ask(operation, RANGE, body)
        with self._readable(operation):
            header = fields.get("header")
            return next(iter(entries(fields)), None), number(header if isinstance(header, dict) else {}, "revision")

    async def first(self, operation: str, name: str) -> Entry | None:
        """The key that holds the lock."""
        begin, end = self.keys.line(name)
        fields, _ = await self._ask(operation, RANGE, ranged(begin, end=end, first=1)["request_range"])
        with self._readable(operation):
            return next(iter(entries(fields)), None)

    async def delete(self, operation: str, keys: Sequence[bytes]) -> bool:
        """
        Delete keys that are nobody's but ours; False: one was created after all that was seen, and none is deleted.

        However late this is carried out, it spares a key that is put after it was sent.
        """
        compare = [compared(key, "CREATE", "LESS", self.seen + 1) for key in keys]
        fields, _ = await self._ask(operation, TXN, txn(compare=compare, success=[delete(key) for key in keys]))
        return fields.get("succeeded") is True

    async def delete_unchanged(self, operation: str, key: bytes, modified: int) -> None:
        """Delete a key if nothing has happened to it."""
        body = txn(compare=[compared(key, "MOD", "EQUAL", modified)], success=[delete(key)])
        await self._ask(operation, TXN, body)

    def _readable(self, operation: str) -> _Readable:
        return _Readable(self._gateway.who, operation)


class _Readable:
    """Turns an answer that cannot be read into one that was lost."""

    __slots__ = ("_operation", "_who")

    def __init__(self, who: str, operation: str) -> None:
        self._who = who
        self._operation = operation

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, UnreadableError | KeyError | AttributeError | TypeError):
            raise BackendUnavailableError(self._who, self._operation, str(error)) from error
