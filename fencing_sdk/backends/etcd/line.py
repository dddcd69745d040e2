"""
The line of a name in etcd: how a claim joins it, how it stands, and the step by which it is granted.

`fencing_sdk.backends._shared.node_line` decides whose turn it is. A claim that does not wait is granted by the request
that puts its key, or puts none. The turn of a claim in the line comes by a look. Then

    lock, writer   deletes the phase of readers, if there is one
    reader         puts the phase, with the revision of its own key, if there is none. The phase has no lease
    permit         writes its number into its key, and deletes the phase

in a transaction that compares that its key is still there.

A key's *created* revision is its place in the line, and the token of its holder. Its *modified* revision changes with
every put, so a comparison with it proves that the key is still the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from fencing_sdk._etcd.gateway import RANGE, TXN, GatewayReply
from fencing_sdk._etcd.messages import Json, compared, delete, entries, nested, number, put, ranged, responses, txn
from fencing_sdk._values.claim import READER, Claim, Permit
from fencing_sdk._values.tasks import SharedBatches, ask_by_name
from fencing_sdk._values.token import TOKEN_LIMIT
from fencing_sdk.backends._shared.error_translation import ErrorTranslation
from fencing_sdk.backends._shared.node_line import holds, rival_of
from fencing_sdk.backends._shared.rules import free_permit
from fencing_sdk.backends.etcd.keys import LineKey, phase_token, phase_value, value_of
from fencing_sdk.backends.etcd.requests import BACKEND, BATCH, EtcdRequests, unreadable
from fencing_sdk.errors import BackendRefusedError

__all__ = ["EtcdLine", "Standing"]

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
    """What a look finds for a claim."""

    own: LineKey | None
    first: list[LineKey]
    """Of the keys that it waits for, the first ones: as many as decide whether it waits."""
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
                    begun = _begun_by(own, responses(fields, 2)[1]) if mode == READER else 0
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
        Of the keys before revision *created*, which decide what the claim waits for; and the revision of this view.

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


def _begun_by(own: LineKey, fields: Json) -> int:
    """The token of readers, after `_begin_phase`."""
    return own.created if fields.get("succeeded") is True else phase_token(entries(responses(fields, 1)[0], LineKey))


def _new_key(key: bytes, value: bytes, fields: Json, lease: int) -> LineKey:
    revision = number(fields["header"], "revision")
    if revision >= TOKEN_LIMIT:
        raise BackendRefusedError(BACKEND, "acquire", "the revision does not fit into 53 bits")
    return LineKey(key, value, revision, revision, lease)
