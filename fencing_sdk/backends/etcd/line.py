"""
The requests to etcd about leases and keys, and the line of a name: how a claim joins it, and how it is granted.

`fencing_sdk.backends._shared.node_line` decides whose turn it is. A claim that does not wait is granted by the request
that puts its key, or puts none. The turn of a claim in the line comes by a look. Then

    lock, writer   deletes the phase of readers, if there is one
    reader         puts the phase, with the revision of its own key, if there is none. The phase has no lease
    permit         writes its number into its key, and deletes the phase

in a transaction that compares that its key is still there.

A key's *created* revision is its place in the line, and the token of its holder. Its *modified* revision changes with
every put, so a comparison with it proves that the key is still the same.

An answer that cannot be read says nothing about what etcd has done, so it counts as lost: the outcome is unknown.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

from fencing_sdk._etcd import (
    GRANT,
    KEEP_ALIVE,
    RANGE,
    TIME_TO_LIVE,
    TXN,
    Entry,
    Gateway,
    GatewayReply,
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
from fencing_sdk._http.requests import UnreadableAnswerError
from fencing_sdk._values.claim import READER, Claim, Permit
from fencing_sdk._values.tasks import SharedBatches, ask_by_name
from fencing_sdk._values.token import TOKEN_LIMIT
from fencing_sdk.backends._shared.error_translation import ErrorTranslation
from fencing_sdk.backends._shared.node_line import holds, rival_of
from fencing_sdk.backends._shared.rules import free_permit
from fencing_sdk.backends.etcd.keys import EtcdKeys, LineKey, phase_token, phase_value, value_of
from fencing_sdk.errors import BackendRefusedError, BackendUnavailableError

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


_LOOKS = 40
"""Claims in one look: etcd allows 128 operations, and a claim may need three."""
_PHASES = 120
"""Readers that begin a phase together. Each is one of the operations."""
_TRIES = 30
"""Times that a permit is tried for while others come and go. Each failure is the arrival of another claim."""


class Standing(NamedTuple):
    """How one claim stands in the line of its name."""

    own: LineKey | None
    """Its own key, if there is one."""
    holds: bool = False
    phase: int = 0
    """The token of a reader that holds."""
    others: bool = False
    """Another key is first."""
    earlier_unknown: bool = False
    """The outcome of an earlier try of this request is unknown: it may still be carried out."""


class _Seen(NamedTuple):
    """The result of a look for one claim."""

    own: LineKey | None
    first: list[LineKey]
    """The first keys that it may wait for: as many as decide whether it waits."""
    phase: list[LineKey]
    """The phase of readers, if there is one."""

    @property
    def ahead(self) -> list[LineKey]:
        return [key for key in self.first if self.own is not None and key.created < self.own.created]


class EtcdLine:
    """The lines of all names, for one backend."""

    def __init__(self, requests: EtcdRequests) -> None:
        self._requests = requests
        self._keys = requests.keys
        self._looks: SharedBatches[Claim, _Seen] = SharedBatches(
            lambda claims: self._look_at("acquire", claims), _LOOKS, one_by_one=True
        )
        self._phases: SharedBatches[tuple[Claim, LineKey], Standing] = SharedBatches(self._begin_phases, _PHASES)
        self._rivals: SharedBatches[str, tuple[list[LineKey], int]] = SharedBatches(self._rivals_of, BATCH)

    # Into the line

    async def take(self, claim: Claim, lease: int) -> Standing:
        """
        Put the claim's key if that is granted at once; return how the claim stands.

        A permit puts its key with a number, if no key came since the look that found the number; the first time, if
        there is no key.
        """
        mode, key, phase = claim.mode, self._keys.own(claim), self._keys.phase(claim.name)
        begin, end = self._keys.rivals(claim)
        permit = free_permit(mode, ())
        own, seen, unknown = None, 0, False
        for _ in range(_TRIES):
            value = value_of(claim, permit=permit)
            fields, earlier_unknown = await self._write(
                "acquire",
                compare=[compared(begin, "CREATE", "LESS", seen + 1, end=end), compared(key, "CREATE", "EQUAL", 0)],
                success=[put(key, value, lease), _begin_phase(phase) if mode == READER else delete(phase)],
                failure=[ranged(key) if permit is None else ranged(begin, end=end)],
            )
            unknown = unknown or earlier_unknown
            with ErrorTranslation(unreadable, "acquire"):
                if fields.get("succeeded") is True:
                    own = _new_key(key, value, fields, lease)
                    begun = 0
                    if mode == READER:
                        phase_part = responses(fields, 2)[1]
                        begun = own.created
                        if phase_part.get("succeeded") is not True:  # another reader has begun it
                            begun = phase_token(entries(responses(phase_part, 1)[0], LineKey))
                    return Standing(own, holds=True, phase=begun, earlier_unknown=unknown)
                line, seen = entries(responses(fields, 1)[0], LineKey), number(fields["header"], "revision")
                own = next((each for each in line if each.key == key), None)
                if own is not None or permit is None or rival_of(mode, line) is not None:
                    break
                permit = free_permit(mode, {key.permit for key in line})
        if own is None:
            return Standing(None, earlier_unknown=unknown)
        # It was put by a request without an answer, or by another client.
        return (await self.turn(claim, lease))._replace(earlier_unknown=unknown)

    async def join(self, operation: str, claim: Claim, lease: int) -> Standing:
        """Put the claim's key at the end of the line, unless it is there. `turn` then looks at the line."""
        key, value = self._keys.own(claim), value_of(claim)
        fields, earlier_unknown = await self._write(
            operation,
            compare=[compared(key, "CREATE", "EQUAL", 0)],
            success=[put(key, value, lease)],
            failure=[ranged(key)],
        )
        with ErrorTranslation(unreadable, operation):
            if fields.get("succeeded") is True:
                return Standing(_new_key(key, value, fields, lease), earlier_unknown=earlier_unknown)
            found = entries(responses(fields, 1)[0], LineKey)
        return Standing(found[0] if found else None, earlier_unknown=earlier_unknown)

    async def _write(
        self, operation: str, *, compare: list[Json], success: list[Json], failure: list[Json] | None = None
    ) -> GatewayReply:
        body = txn(compare=compare, success=success, failure=failure)
        return await self._requests.ask(operation, TXN, body, hedged=False)

    # The turn of a claim

    async def turn(self, claim: Claim, lease: int) -> Standing:
        """Look at the line; if the turn of the claim's key has come, let it be granted."""
        mode, seen = claim.mode, await self._looks.ask(claim)
        own, ahead = seen.own, seen.ahead
        with ErrorTranslation(unreadable, "acquire"):
            if own is None or own.permit is not None:
                return Standing(own, holds=own is not None)
            if rival_of(mode, ahead) is not None:
                return Standing(own)
            permit, phase = free_permit(mode, {key.permit for key in ahead}), phase_token(seen.phase)
        if mode == READER:
            return Standing(own, holds=True, phase=phase) if phase else await self._phases.ask((claim, own))
        if permit is None and not phase:
            return Standing(own, holds=True)
        value = own.value if permit is None else value_of(claim, permit=permit)
        fields, _ = await self._write(
            "acquire",
            compare=[compared(own.key, "MOD", "EQUAL", own.modified)],
            success=[put(own.key, value, lease), delete(self._keys.phase(claim.name))],
        )
        if fields.get("succeeded") is not True:  # its key has gone, or an earlier try was carried out: look again
            return await self.turn(claim, lease)
        with ErrorTranslation(unreadable, "acquire"):
            written = LineKey(own.key, value, own.created, number(fields["header"], "revision"), lease)
        return Standing(written, holds=True)

    async def standings(self, operation: str, claims: Sequence[Claim]) -> list[Standing]:
        """How claims that were granted stand now."""
        standings = []
        for start in range(0, len(claims), _LOOKS):
            batch = claims[start : start + _LOOKS]
            for claim, seen in zip(batch, await self._look_at(operation, batch), strict=True):
                with ErrorTranslation(unreadable, operation):
                    may_hold = seen.own is not None and holds(claim.mode, seen.own, seen.ahead)
                standings.append(Standing(seen.own, holds=may_hold, others=seen.first[:1] not in ([], [seen.own])))
        return standings

    async def _look_at(self, operation: str, claims: Sequence[Claim]) -> list[_Seen]:
        """Claims for one name share a look: etcd sorts the whole line for it."""
        looks: dict[tuple[object, ...], Json] = {}
        parts = []
        for claim in claims:
            key, (begin, end), phase = self._keys.own(claim), self._keys.rivals(claim), self._keys.phase(claim.name)
            most = claim.mode.of if isinstance(claim.mode, Permit) else 1
            wanted: dict[tuple[object, ...], Json] = {
                (key,): ranged(key),
                (begin, end, most): ranged(begin, end=end, first=most),
                (phase,): ranged(phase),
            }
            looks |= wanted
            parts.append(list(wanted))
        fields, _ = await self._requests.ask(operation, TXN, txn(compare=[], success=list(looks.values())))
        with ErrorTranslation(unreadable, operation):
            answers = responses(fields, len(looks))
            found = {each: entries(answer, LineKey) for each, answer in zip(looks, answers, strict=True)}
            return [_Seen(next(iter(found[own]), None), found[first], found[phase]) for own, first, phase in parts]

    # The phase of readers

    async def _begin_phases(self, readers: Sequence[tuple[Claim, LineKey]]) -> list[Standing]:
        """Readers that are woken together begin the phase of a name together."""
        return await ask_by_name(
            readers,
            lambda reader: reader[0].name,
            lambda name, group: self._begin_phase_of(name, [own for _, own in group]),
        )

    async def _begin_phase_of(self, name: str, owns: Sequence[LineKey]) -> list[Standing]:
        """Put the phase, unless another reader has. All of these keys are granted, except those that have gone."""
        phase, first = self._keys.phase(name), min(owns, key=lambda own: own.created)
        fields, _ = await self._write(
            "acquire",
            compare=[
                *(compared(own.key, "CREATE", "EQUAL", own.created) for own in owns),
                compared(phase, "CREATE", "EQUAL", 0),
            ],
            success=[put(phase, phase_value(first))],
            failure=[*(ranged(own.key) for own in owns), ranged(phase)],
        )
        if fields.get("succeeded") is True:
            return [Standing(own, holds=True, phase=first.created) for own in owns]
        with ErrorTranslation(unreadable, "acquire"):
            *own_parts, phase_part = responses(fields, len(owns) + 1)
            found = [next(iter(entries(part, LineKey)), None) for part in own_parts]
            begun = phase_token(entries(phase_part, LineKey))
        there = [still for still, own in zip(found, owns, strict=True) if still and still.created == own.created]
        if not begun and len(there) < len(owns):  # a key that has gone stopped the others, too
            standings = await self._begin_phase_of(name, there) if there else []
        else:
            standings = [Standing(still, holds=bool(begun), phase=begun) for still in there]
        of_key = {still.key: standing for still, standing in zip(there, standings, strict=True)}
        return [of_key.get(own.key) or Standing(still) for still, own in zip(found, owns, strict=True)]

    # What a waiter watches

    async def ahead(self, claim: Claim, created: int) -> tuple[list[LineKey], int]:
        """
        Return the keys before revision *created* that decide what the claim waits for, and the revision of this view.

        A lock and a writer need the last one, and a permit all of them. Readers of one name ask together.
        """
        if claim.mode == READER:
            rivals, revision = await self._rivals.ask(claim.name)
            return [key for key in rivals if key.created < created], revision
        begin, end = self._keys.line(claim.name)
        alone = not isinstance(claim.mode, Permit)
        look = ranged(begin, end=end, last=int(alone), before=created, keys_only=alone)
        fields, _ = await self._requests.ask("queue", RANGE, look["request_range"])
        with ErrorTranslation(unreadable, "queue"):
            return in_line(entries(fields, LineKey)), number(fields["header"], "revision")

    async def _rivals_of(self, names: Sequence[str]) -> list[tuple[list[LineKey], int]]:
        """For each name, the keys that are not those of readers."""
        ranges = {name: self._keys.rivals(Claim(name, 1.0, "", mode=READER)) for name in names}
        look = [ranged(begin, end=end, keys_only=True) for begin, end in ranges.values()]
        fields, _ = await self._requests.ask("queue", TXN, txn(compare=[], success=look))
        with ErrorTranslation(unreadable, "queue"):
            revision, answers = number(fields["header"], "revision"), responses(fields, len(look))
            found = {name: in_line(entries(each, LineKey)) for name, each in zip(ranges, answers, strict=True)}
            return [(found[name], revision) for name in names]


def in_line(found: Sequence[LineKey]) -> list[LineKey]:
    """Sort keys by their places."""
    return sorted(found, key=lambda key: key.created)


def _begin_phase(phase: bytes) -> Json:
    """Begin the phase in the same step in which a reader's key is put, unless there is one."""
    return nested(compare=[compared(phase, "CREATE", "EQUAL", 0)], success=[put(phase, b"")], failure=[ranged(phase)])


def _new_key(key: bytes, value: bytes, fields: Json, lease: int) -> LineKey:
    revision = number(fields["header"], "revision")
    if revision >= TOKEN_LIMIT:
        raise BackendRefusedError(BACKEND, "acquire", "the revision does not fit into 53 bits")
    return LineKey(key, value, revision, revision, lease)
