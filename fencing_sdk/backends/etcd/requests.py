"""
What the backend asks etcd about locks and leases, and how it reads the answers: one request for each method.

Two revisions matter. A key's *created* revision is its place in the line, and the token of its holder. Its *modified*
revision changes with every put, so a comparison with it proves that the key is still the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

from fencing_sdk._etcd.gateway import GRANT, KEEP_ALIVE, RANGE, TIME_TO_LIVE, TXN, Gateway, GatewayReply
from fencing_sdk._etcd.json_codec import (
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
from fencing_sdk._http.bodies import UnreadableAnswerError
from fencing_sdk._values.claim import READER, TOKEN_LIMIT, Claim
from fencing_sdk._values.shared_call import SharedBatches
from fencing_sdk.backends._shared.error_translation import ErrorTranslation
from fencing_sdk.backends.etcd.errors import BACKEND, unreadable
from fencing_sdk.backends.etcd.keys import EtcdKeys, KeyFacts, phase_token, value_of
from fencing_sdk.errors import BackendRefusedError, BackendUnavailableError

__all__ = ["BATCH", "EtcdRequests", "Standing", "first_entry"]

BATCH = 60
"""Keys in one transaction: etcd allows 128 operations, and a claim may need two."""
_TURNS = 40
"""Claims in one look: a claim may need three."""


class Standing(NamedTuple):
    """How one claim stands in the line of its lock: its own key, if there is one, and the key that is first."""

    own: Entry | None
    first: Entry | None
    earlier_unknown: bool = False
    """The outcome of an earlier try of this request is unknown: it may still be carried out."""
    phase: int = 0
    """The token of the readers that hold together, or did when the claim is no reader's, and then ends with a grant."""

    @property
    def holds(self) -> bool:
        """Whether the claim's own key is the first."""
        return self.own is not None and self.first is not None and self.own.key == self.first.key


class EtcdRequests:
    """The requests of one backend."""

    def __init__(self, gateway: Gateway, keys: EtcdKeys) -> None:
        self._gateway = gateway
        self.keys = keys
        self.highest_revision = 0
        """The highest revision of any answer: a key that is put later is created above it."""
        self._turns: SharedBatches[Claim, Standing] = SharedBatches(
            lambda claims: self.standings("acquire", claims, phases=True), _TURNS, one_by_one=True
        )

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

    # Locks and writers: who is first in the line

    async def take(self, claim: Claim, lease: int) -> Standing:
        """Put the claim's key if the lock has no key at all; return how the claim stands."""
        begin, end = self.keys.line(claim.name)
        empty = compared(begin, "CREATE", "EQUAL", 0, end=end)
        return await self._put_if("acquire", claim, lease, empty, delete(self.keys.phase(claim.name)))

    async def join_line(self, operation: str, claim: Claim, lease: int) -> Standing:
        """Put the claim's key at the end of the line, unless it is there; return how the claim stands."""
        absent = compared(self.keys.own(claim), "CREATE", "EQUAL", 0)
        return await self._put_if(operation, claim, lease, absent, *self._first_and_phase(claim))

    async def turn(self, claim: Claim, _lease: int) -> Standing:
        """How the claim of a waiter stands. Those who ask while one request is under way share the next one."""
        return await self._without_phase("acquire", claim, await self._turns.ask(claim))

    def _first_and_phase(self, claim: Claim) -> list[Json]:
        begin, end = self.keys.line(claim.name)
        return [ranged(begin, end=end, first=1), ranged(self.keys.phase(claim.name))]

    async def _put_if(self, operation: str, claim: Claim, lease: int, compare: Json, *also: Json) -> Standing:
        """
        Put the claim's key if a comparison holds, and read which key is first.

        There are three cases:

        1. The comparison fails. The answer holds the claim's own key, if there is one, the first key, and the phase.
        2. It holds, and *also* reads the first key and the phase.
        3. It holds, and *also* deletes the phase: the line was empty, so the claim's key is the first.
        """
        key, value = self.keys.own(claim), value_of(claim)
        body = txn(
            compare=[compare],
            success=[put(key, value, lease), *also],
            failure=[ranged(key), *self._first_and_phase(claim)],
        )
        fields, earlier_unknown = await self.ask(operation, TXN, body, hedged=False)
        with ErrorTranslation(unreadable, operation):
            if fields.get("succeeded") is True:
                revision = number(fields["header"], "revision")
                own: Entry | None = Entry(key, value, revision, revision, lease)
                first, phase = map(first_entry, responses(fields, 3)[1:]) if len(also) > 1 else (own, None)
            else:
                own, first, phase = map(first_entry, responses(fields, 3))
            standing = Standing(own, first, earlier_unknown, phase_token(phase) if phase else 0)
        if own is not None and own.created >= TOKEN_LIMIT:
            raise BackendRefusedError(BACKEND, operation, "the revision does not fit into 53 bits")
        return await self._without_phase(operation, claim, standing)

    async def _without_phase(self, operation: str, claim: Claim, standing: Standing) -> Standing:
        """
        End the phase that readers have left, before the claim is granted: readers that come later have a later token.

        No reader begins one while the claim's key is there, because it would have to be ahead.
        """
        own = standing.own
        if own is None or not (standing.phase and standing.holds):
            return standing
        still = compared(own.key, "CREATE", "EQUAL", own.created)
        fields, _ = await self.ask(operation, TXN, txn(compare=[still], success=[delete(self.keys.phase(claim.name))]))
        if fields.get("succeeded") is True:
            return standing._replace(phase=0)
        return Standing(None, None, standing.earlier_unknown)

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

    async def standings(self, operation: str, claims: Sequence[Claim], *, phases: bool = False) -> list[Standing]:
        """
        How each of a batch of claims stands; with *phases*, they are those of locks and writers.

        Claims for one lock share a look: etcd sorts the whole line for it.
        """
        lines = list(dict.fromkeys(self.keys.rivals(claim) for claim in claims))
        names = list(dict.fromkeys(self.keys.phase(claim.name) for claim in claims)) if phases else []
        look = [ranged(self.keys.own(claim)) for claim in claims]
        look += [ranged(begin, end=end, first=1) for begin, end in lines]
        look += map(ranged, names)
        fields, _ = await self.ask(operation, TXN, txn(compare=[], success=look))
        with ErrorTranslation(unreadable, operation):
            found = [first_entry(part) for part in responses(fields, len(look))]
            firsts = dict(zip(lines, found[len(claims) :], strict=False))
            begun = {phase.key: phase_token(phase) for phase in found[len(claims) + len(lines) :] if phase}
            standings = zip(claims, found, strict=False)
            return [
                _standing(claim, own, firsts[self.keys.rivals(claim)], begun.get(self.keys.phase(claim.name), 0))
                for claim, own in standings
            ]

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
            return {key: first_entry(part) for key, part in zip(modified, parts, strict=True)}

    async def predecessor(self, operation: str, claim: Claim, created: int) -> tuple[Entry | None, int]:
        """Of the keys that the claim waits for, the last before revision *created*; and the revision of this view."""
        begin, end = self.keys.rivals(claim)
        body = ranged(begin, end=end, last=1, before=created, keys_only=True)["request_range"]
        fields, _ = await self.ask(operation, RANGE, body)
        with ErrorTranslation(unreadable, operation):
            header = fields.get("header")
            return first_entry(fields), number(header if isinstance(header, dict) else {}, "revision")

    async def before(self, operation: str, claim: Claim, created: int) -> tuple[list[Entry], int]:
        """All keys before revision *created*, in the order of the line; and the revision of this view."""
        begin, end = self.keys.line(claim.name)
        fields, _ = await self.ask(operation, RANGE, ranged(begin, end=end, before=created)["request_range"])
        with ErrorTranslation(unreadable, operation):
            found = sorted(entries(fields), key=lambda entry: entry.created)
            return found, number(fields["header"], "revision")

    async def first(self, operation: str, name: str) -> Entry | None:
        """The key that holds the lock."""
        begin, end = self.keys.line(name)
        fields, _ = await self.ask(operation, RANGE, ranged(begin, end=end, first=1)["request_range"])
        with ErrorTranslation(unreadable, operation):
            return first_entry(fields)

    async def stretch(self, operation: str, begin: bytes, end: bytes, most: int) -> tuple[list[Entry], bool]:
        """So many keys, in their order, and whether there are more."""
        fields, _ = await self.ask(operation, RANGE, ranged(begin, end=end, most=most)["request_range"])
        with ErrorTranslation(unreadable, operation):
            return entries(fields), fields.get("more") is True

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
            return [first_entry(part) for part in responses(fields, len(look))]

    async def delete(self, operation: str, keys: Sequence[bytes]) -> list[bytes] | None:
        """
        Delete keys of this client; None: one was created above `highest_revision`, and none is deleted.

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


def _standing(claim: Claim, own: Entry | None, first: Entry | None, phase: int) -> Standing:
    """How a claim stands by the first key that it may have to wait for. A share that was granted counts as first."""
    if own is None or not claim.mode.shared:
        return Standing(own, first, phase=phase)
    facts = KeyFacts.read(own)
    waits = facts.waits or (facts.mode == READER and first is not None and first.created < own.created)
    return Standing(own, None if waits else own)


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


def first_entry(fields: Json) -> Entry | None:
    """The key that a range found, if it found one."""
    return next(iter(entries(fields)), None)
