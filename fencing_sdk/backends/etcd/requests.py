"""
What the backend asks etcd about leases and keys, and how it reads the answers: one request for each method.

Failures of requests are translated by `fencing_sdk._etcd.messages`. An answer that cannot be read says nothing about
what etcd has done, so it counts as lost: the outcome is unknown.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from fencing_sdk._etcd.gateway import GRANT, KEEP_ALIVE, RANGE, TIME_TO_LIVE, TXN, Gateway, GatewayReply
from fencing_sdk._etcd.messages import (
    Entry,
    Json,
    compared,
    delete,
    entries,
    nested,
    number,
    put,
    ranged,
    responses,
    txn,
)
from fencing_sdk._http.outcomes import UnreadableAnswerError
from fencing_sdk._values.claim import Claim
from fencing_sdk._values.token import TOKEN_LIMIT
from fencing_sdk.backends._shared.error_translation import ErrorTranslation
from fencing_sdk.backends.etcd.keys import EtcdKeys, LineKey
from fencing_sdk.errors import BackendUnavailableError

__all__ = ["BACKEND", "BATCH", "EtcdRequests", "unreadable"]

BACKEND = "EtcdBackend"


def unreadable(operation: str, error: Exception) -> BackendUnavailableError:
    """Translate the error of reading an answer, for `ErrorTranslation`."""
    return BackendUnavailableError(BACKEND, operation, str(error))


BATCH = 60
"""Keys in one transaction: etcd allows 128 operations, and a claim may need two."""


class EtcdRequests:
    """The requests of one backend."""

    def __init__(self, gateway: Gateway, keys: EtcdKeys) -> None:
        self._gateway = gateway
        self.keys = keys
        self.highest_revision = 0
        """The highest revision of any answer: a key that is put later is created above it."""

    async def ask(self, operation: str, path: str, body: Json, *, hedged: bool = True) -> GatewayReply:
        """Ask etcd, and take note of the revision of the answer."""
        reply = await self._gateway.call(operation, path, body, hedged=hedged)
        header = reply.fields.get("header")
        with suppress(UnreadableAnswerError):
            revision = number(header, "revision") if isinstance(header, dict) else 0
            if revision < TOKEN_LIMIT:
                self.highest_revision = max(self.highest_revision, revision)
        return reply

    # Leases

    async def grant_lease(self, operation: str, seconds: int) -> tuple[int, int]:
        """Make a lease; return its id, and the seconds that etcd has granted."""
        fields, _ = await self.ask(operation, GRANT, {"TTL": str(seconds)}, hedged=False)
        with ErrorTranslation(unreadable, operation):
            lease, ttl = number(fields, "ID"), number(fields, "TTL")
            if not lease or ttl <= 0:
                msg = "the answer has no lease"
                raise UnreadableAnswerError(msg)
            return lease, ttl

    async def keep_alive(self, operation: str, lease: int) -> int:
        """Restart a lease; return its seconds, or 0 if it has ended."""
        fields, _ = await self.ask(operation, KEEP_ALIVE, {"ID": str(lease)})
        with ErrorTranslation(unreadable, operation):
            return number(fields, "TTL")

    async def remaining(self, operation: str, lease: int) -> float | None:
        """The whole seconds that a lease has left; None if it has ended."""
        fields, _ = await self.ask(operation, TIME_TO_LIVE, {"ID": str(lease)})
        with ErrorTranslation(unreadable, operation):
            left = number(fields, "TTL")  # below zero between the expiry and the moment when etcd ends the lease
            return max(0.0, left) if number(fields, "grantedTTL") else None

    # Keys

    async def adopt(self, operation: str, own: Entry, lease: int) -> int | None:
        """Move a key to *lease*, if it is unchanged; return its new revision, or None."""
        body = txn(compare=[compared(own.key, "MOD", "EQUAL", own.modified)], success=[put(own.key, own.value, lease)])
        fields, earlier_unknown = await self.ask(operation, TXN, body, hedged=False)
        if fields.get("succeeded") is True:
            with ErrorTranslation(unreadable, operation):
                return number(fields["header"], "revision")
        if earlier_unknown:
            raise BackendUnavailableError(BACKEND, operation, "an earlier request may have been carried out")
        return None

    async def unchanged(self, operation: str, modified: dict[bytes, int]) -> int | dict[bytes, Entry | None]:
        """If every key is at its *modified* revision: the revision of this view. Else: what is there of each key."""
        body = txn(
            compare=[compared(key, "MOD", "EQUAL", revision) for key, revision in modified.items()],
            success=[],
            failure=[ranged(key) for key in modified],  # these make etcd ask the majority in both cases
        )
        fields, _ = await self.ask(operation, TXN, body)
        with ErrorTranslation(unreadable, operation):
            if fields.get("succeeded") is True:
                return number(fields["header"], "revision")
            parts = responses(fields, len(modified))
            return {key: next(iter(entries(part, Entry)), None) for key, part in zip(modified, parts, strict=True)}

    async def first(self, operation: str, name: str) -> LineKey | None:
        """The first key of a line."""
        begin, end = self.keys.line(name)
        fields, _ = await self.ask(operation, RANGE, ranged(begin, end=end, first=1)["request_range"])
        with ErrorTranslation(unreadable, operation):
            return next(iter(entries(fields, LineKey)), None)

    async def stretch(self, operation: str, begin: bytes, end: bytes, most: int) -> tuple[list[LineKey], bool]:
        """So many keys, in their order, and whether there are more."""
        fields, _ = await self.ask(operation, RANGE, ranged(begin, end=end, most=most)["request_range"])
        with ErrorTranslation(unreadable, operation):
            return entries(fields, LineKey), fields.get("more") is True

    async def end(self, operation: str, compare: list[Json], victims: Sequence[bytes], notes: list[Json]) -> bool:
        """Delete keys of holders and put *notes*, if all is as *compare* says; False: nothing is changed."""
        body = txn(compare=compare, success=[*map(delete, victims), *notes])
        fields, earlier_unknown = await self.ask(operation, TXN, body, hedged=False)
        succeeded = fields.get("succeeded") is True
        if earlier_unknown and not succeeded:
            raise BackendUnavailableError(BACKEND, operation, "an earlier request may have been carried out")
        return succeeded

    async def notes(self, operation: str, claims: Sequence[Claim]) -> list[Entry | None]:
        """The notes for a batch of claims whose keys have gone."""
        look = [ranged(self.keys.note(claim.name, self.keys.own(claim))) for claim in claims]
        fields, _ = await self.ask(operation, TXN, txn(compare=[], success=look))
        with ErrorTranslation(unreadable, operation):
            return [next(iter(entries(part, Entry)), None) for part in responses(fields, len(look))]

    async def delete(self, operation: str, keys: Sequence[bytes]) -> list[bytes] | None:
        """
        Delete keys of this client; None: one was created above `highest_revision`, so no key is deleted.

        It returns the keys that were not there. If an earlier request of this call may have deleted them, it returns
        no key.

        However late this request arrives, it spares a key that is put after the request was sent.
        """
        compare = [compared(key, "CREATE", "LESS", self.highest_revision + 1) for key in keys]
        phases = [_end_phase(key, phase) for key in keys if (phase := self.keys.phase_of_reader(key))]
        body = txn(compare=compare, success=[*map(delete, keys), *phases])
        fields, earlier_unknown = await self.ask(operation, TXN, body)
        if fields.get("succeeded") is not True:
            return None
        if earlier_unknown:
            return []
        with ErrorTranslation(unreadable, operation):
            answers = responses(fields, len(keys) + len(phases))
            return [key for key, answer in zip(keys, answers, strict=False) if not number(answer, "deleted")]

    async def delete_unchanged(self, operation: str, key: bytes, modified: int) -> None:
        """Delete a key if it is still at its *modified* revision."""
        body = txn(compare=[compared(key, "MOD", "EQUAL", modified)], success=[delete(key)])
        await self.ask(operation, TXN, body)


def _end_phase(reader: bytes, phase: bytes) -> Json:
    """Delete the phase with the key of a *reader* that is alone in the line: no key stays behind."""
    folder = phase + b"/"
    return nested(
        compare=[
            compared(folder, "CREATE", "EQUAL", 0, end=reader),
            compared(reader + b"\0", "CREATE", "EQUAL", 0, end=phase + b"0"),
        ],
        success=[delete(phase)],
    )
