"""
Permits, readers and writers: who holds beside whom, and with which token.

The keys of a name are one line, in the order in which they were created. A client puts its own key and looks:

    reader   only readers' keys are ahead     its token is in the phase key. The first reader puts that, with the
                                              revision of its own key. It has no lease
    writer   no key is ahead                  as a lock: `requests`
    permit   fewer keys than there are        it writes into its key the lowest number that none of those has
             permits are ahead, all of
             permits with their numbers

A key that is put later is behind. So a claim whose turn has come keeps its turn while its key is there, and the step
by which it is granted compares just that.

Tokens are places in the line, so they grow with every grant, of whatever mode. Readers that hold together share the
place of one of them: the others of the line are before or behind all of them. That lasts until another mode is granted.
So each such grant ends the phase, if there is one: a number that was drawn later would be above those in the line.

A claim that does not wait is granted by the request that puts its key, or puts none.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from fencing_sdk._etcd.gateway import TXN, GatewayReply
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
from fencing_sdk._values.claim import READER, Claim, Holder, Permit
from fencing_sdk._values.shared_call import SharedBatches, ask_by_name
from fencing_sdk.backends._shared.error_translation import ErrorTranslation
from fencing_sdk.backends.etcd.errors import unreadable
from fencing_sdk.backends.etcd.keys import KeyFacts, holder_of_key, phase_token, phase_value, value_of
from fencing_sdk.backends.etcd.requests import BATCH, EtcdRequests, Standing, first_entry

__all__ = ["LEAST_REMAINING", "EtcdShares", "SeenLine", "lowest_free"]

_LOOKS = 40
"""Claims in one look: etcd allows 128 operations, and a claim may need three."""
_PHASES = 120
"""Readers that begin a phase together. Each is one of the operations."""
_LEASES_AT_ONCE = 8
_TRIES = 30
"""Times that a permit is tried for while others come and go. Each failure is the arrival of another claim."""
LEAST_REMAINING = 0.5
"""Seconds: etcd answers with whole seconds, rounded down, so a lease with 0 of them is still alive."""


class _Seen(NamedTuple):
    """What a look tells about a claim."""

    own: Entry | None
    ahead: list[Entry]
    """Of the keys that it waits for, the first ones: as many as decide whether it waits."""
    phase: int | None

    @classmethod
    def of(cls, own: list[Entry], line: list[Entry], phase: list[Entry]) -> _Seen:
        ahead = [entry for entry in line if own and entry.created < own[0].created]
        return cls(own[0] if own else None, ahead, phase_token(phase[0]) if phase else None)


class SeenLine(NamedTuple):
    """All keys of a lock, those of its holders apart."""

    name: str
    held: list[Entry]
    waiting: list[Entry]
    phase: int
    """The token of readers."""
    revision: int
    """Of this view: a key that is not in it was created later."""

    def token(self, entry: Entry) -> int:
        """The token of one that holds."""
        return self.phase if KeyFacts.read(entry).mode == READER else entry.created


class EtcdShares:
    """What `EtcdRequests` does for locks and writers, for readers and permits."""

    def __init__(self, requests: EtcdRequests) -> None:
        self._requests = requests
        self._keys = requests.keys
        self._looks: SharedBatches[Claim, _Seen] = SharedBatches(self._look_at, _LOOKS)
        self._phases: SharedBatches[tuple[Claim, Entry], Standing] = SharedBatches(self._begin_phases, _PHASES)
        self._rivals: SharedBatches[str, tuple[list[Entry], int]] = SharedBatches(self._rivals_of, BATCH)

    # Without waiting

    async def take(self, claim: Claim, lease: int) -> Standing:
        """Put the claim's key if that is granted at once; return how the claim stands."""
        if isinstance(claim.mode, Permit):
            standing = await self._take_permit(claim, claim.mode, lease)
        else:
            standing = await self._take_reader(claim, lease)
        if standing.own is not None and not standing.holds:  # of a request without an answer, or of another client
            earlier_unknown = standing.earlier_unknown
            standing = (await self.turn(claim, lease))._replace(earlier_unknown=earlier_unknown)
        return standing

    async def _take_reader(self, claim: Claim, lease: int) -> Standing:
        begin, end = self._keys.rivals(claim)
        key, value = self._keys.own(claim), value_of(claim)
        phase = self._keys.phase(claim.name)
        fields, earlier_unknown = await self._put(
            compare=[compared(begin, "CREATE", "EQUAL", 0, end=end), compared(key, "CREATE", "EQUAL", 0)],
            success=[
                put(key, value, lease),
                nested(
                    compare=[compared(phase, "CREATE", "EQUAL", 0)], success=[put(phase, b"")], failure=[ranged(phase)]
                ),
            ],
            failure=[ranged(key)],
        )
        with ErrorTranslation(unreadable, "acquire"):
            if fields.get("succeeded") is not True:
                return Standing(first_entry(responses(fields, 1)[0]), None, earlier_unknown)
            own = _new_entry(key, value, fields, lease)
            inner = responses(fields, 2)[1]
            begun = None if inner.get("succeeded") is True else first_entry(responses(inner, 1)[0])
            return _granted(own, earlier_unknown, phase=phase_token(begun) if begun else own.created)

    async def _take_permit(self, claim: Claim, mode: Permit, lease: int) -> Standing:
        """Put the key with a number, if no key came since the look that found it; at first, if there is no key."""
        begin, end = self._keys.line(claim.name)
        key, seen, free, unknown = self._keys.own(claim), 0, 0, False
        for _ in range(_TRIES):
            value = value_of(claim, permit=free)
            fields, earlier_unknown = await self._put(
                compare=[compared(begin, "CREATE", "LESS", seen + 1, end=end)],
                success=[put(key, value, lease), delete(self._keys.phase(claim.name))],
                failure=[ranged(begin, end=end)],
            )
            unknown = unknown or earlier_unknown
            with ErrorTranslation(unreadable, "acquire"):
                if fields.get("succeeded") is True:
                    return _granted(_new_entry(key, value, fields, lease), unknown)
                line, seen = entries(responses(fields, 1)[0]), number(fields["header"], "revision")
                own = next((entry for entry in line if entry.key == key), None)
                number_now = None if own is not None else lowest_free(mode, line)
            if number_now is None:
                return Standing(own, None, unknown)
            free = number_now
        return Standing(None, None, unknown)

    async def _put(self, *, compare: list[Json], success: list[Json], failure: list[Json]) -> GatewayReply:
        body = txn(compare=compare, success=success, failure=failure)
        return await self._requests.ask("acquire", TXN, body, hedged=False)

    # In the line

    async def join_line(self, operation: str, claim: Claim, lease: int) -> Standing:
        """Put the claim's key at the end of the line, unless it is there. Whether its turn has come, `turn` tells."""
        key, value = self._keys.own(claim), value_of(claim)
        body = txn(
            compare=[compared(key, "CREATE", "EQUAL", 0)], success=[put(key, value, lease)], failure=[ranged(key)]
        )
        fields, earlier_unknown = await self._requests.ask(operation, TXN, body, hedged=False)
        with ErrorTranslation(unreadable, operation):
            if fields.get("succeeded") is True:
                own: Entry | None = _new_entry(key, value, fields, lease)
            else:
                own = first_entry(responses(fields, 1)[0])
        return Standing(own, None, earlier_unknown)

    async def turn(self, claim: Claim, lease: int) -> Standing:
        """Look at the line; if the turn of the claim's key has come, let it be granted."""
        mode, seen = claim.mode, await self._looks.ask(claim)
        if (own := seen.own) is None:
            return Standing(None, None)
        if not isinstance(mode, Permit):
            if seen.ahead:
                return Standing(own, None)
            return await self._phases.ask((claim, own)) if seen.phase is None else _granted(own, phase=seen.phase)
        with ErrorTranslation(unreadable, "acquire"):
            if not KeyFacts.read(own).waits:
                return _granted(own)
            permit = lowest_free(mode, seen.ahead)
        return Standing(own, None) if permit is None else await self._write_number(claim, own, permit, lease)

    async def _look_at(self, claims: Sequence[Claim]) -> list[_Seen]:
        """One request for many claims: readers that are woken together look at one name."""
        looks: dict[tuple[object, ...], Json] = {}
        parts = []
        for claim in claims:
            key, (begin, end), phase = self._keys.own(claim), self._keys.rivals(claim), self._keys.phase(claim.name)
            first = claim.mode.of if isinstance(claim.mode, Permit) else 1
            wanted: dict[tuple[object, ...], Json] = {
                (key,): ranged(key),
                (begin, end, first): ranged(begin, end=end, first=first),
                (phase,): ranged(phase),
            }
            looks |= wanted
            parts.append(list(wanted))
        fields, _ = await self._requests.ask("acquire", TXN, txn(compare=[], success=list(looks.values())))
        with ErrorTranslation(unreadable, "acquire"):
            answers = responses(fields, len(looks))
            found = {each: entries(answer) for each, answer in zip(looks, answers, strict=True)}
            return [_Seen.of(*(found[each] for each in three)) for three in parts]

    async def rivals(self, name: str) -> tuple[list[Entry], int]:
        """The keys that readers of *name* wait for, in the order of the line; and the revision of this view."""
        return await self._rivals.ask(name)

    async def _rivals_of(self, names: Sequence[str]) -> list[tuple[list[Entry], int]]:
        ranges = {name: self._keys.rivals(Claim(name, 1.0, "", mode=READER)) for name in names}
        look = [ranged(begin, end=end, keys_only=True) for begin, end in ranges.values()]
        fields, _ = await self._requests.ask("queue", TXN, txn(compare=[], success=look))
        with ErrorTranslation(unreadable, "queue"):
            revision, answers = number(fields["header"], "revision"), responses(fields, len(look))
            found = {name: _in_line(entries(answer)) for name, answer in zip(ranges, answers, strict=True)}
            return [(found[name], revision) for name in names]

    async def _begin_phases(self, readers: Sequence[tuple[Claim, Entry]]) -> list[Standing]:
        """Readers that are woken together begin the phase of a name together."""
        return await ask_by_name(
            readers,
            lambda reader: reader[0].name,
            lambda name, group: self._begin_phase(name, [own for _, own in group]),
        )

    async def _begin_phase(self, name: str, owns: Sequence[Entry]) -> list[Standing]:
        """Put the phase, unless another reader has. All of these keys are granted, except those that have gone."""
        phase, first = self._keys.phase(name), min(owns, key=lambda own: own.created)
        fields, _ = await self._put(
            compare=[
                *(compared(own.key, "CREATE", "EQUAL", own.created) for own in owns),
                compared(phase, "CREATE", "EQUAL", 0),
            ],
            success=[put(phase, phase_value(first))],
            failure=[*(ranged(own.key) for own in owns), ranged(phase)],
        )
        with ErrorTranslation(unreadable, "acquire"):
            if fields.get("succeeded") is True:
                return [_granted(own, phase=first.created) for own in owns]
            *own_parts, phase_part = responses(fields, len(owns) + 1)
            found = [first_entry(part) for part in own_parts]
            begun = phase_token(entry) if (entry := first_entry(phase_part)) else 0
        there = [still for still, own in zip(found, owns, strict=True) if still and still.created == own.created]
        if not begun and len(there) < len(owns):  # a key that has gone stopped the others, too
            standings = await self._begin_phase(name, there) if there else []
        else:
            standings = [_granted(still, phase=begun) if begun else Standing(still, None) for still in there]
        of_key = {still.key: standing for still, standing in zip(there, standings, strict=True)}
        return [of_key.get(own.key) or Standing(still, None) for still, own in zip(found, owns, strict=True)]

    async def _write_number(self, claim: Claim, own: Entry, permit: int, lease: int) -> Standing:
        """Write the number of a *permit* into its key, if that is unchanged."""
        value = value_of(claim, permit=permit)
        fields, _ = await self._put(
            compare=[compared(own.key, "MOD", "EQUAL", own.modified)],
            success=[put(own.key, value, lease), delete(self._keys.phase(claim.name))],
            failure=[ranged(own.key)],
        )
        with ErrorTranslation(unreadable, "acquire"):
            if fields.get("succeeded") is True:
                revision = number(fields["header"], "revision")
                return _granted(Entry(own.key, value, own.created, revision, lease))
            still = first_entry(responses(fields, 1)[0])
            # An earlier request was carried out, and its answer was lost; or the key is gone.
            done = still is not None and still.created == own.created and not KeyFacts.read(still).waits
            return Standing(still, still if done else None)

    # Who holds

    async def look(self, operation: str, name: str) -> SeenLine:
        """The whole line of *name*."""
        begin, end = self._keys.line(name)
        look = [ranged(begin, end=end), ranged(self._keys.phase(name))]
        fields, _ = await self._requests.ask(operation, TXN, txn(compare=[], success=look))
        with ErrorTranslation(unreadable, operation):
            line_part, phase_part = responses(fields, 2)
            line, phase = _in_line(entries(line_part)), first_entry(phase_part)
            held = _holding(line, phase)
            revision = number(fields["header"], "revision")
            return SeenLine(name, held, line[len(held) :], 0 if phase is None else phase_token(phase), revision)

    async def holders(self, name: str) -> list[Holder]:
        """Tell who holds *name*, in the order of their permits, or of their tokens."""
        seen = await self.look("inspect", name)
        remaining = await self.remaining("inspect", [entry.lease for entry in seen.held])
        found = [
            holder_of_key(name, entry, max(LEAST_REMAINING, seconds), phase=seen.phase)
            for entry in seen.held
            if (seconds := remaining[entry.lease]) is not None
        ]
        return sorted(found, key=lambda holder: (holder.permit or 0, holder.token))

    async def remaining(self, operation: str, leases: Iterable[int]) -> dict[int, float | None]:
        """The seconds that leases have left; None for those that have ended. Many locks share one."""
        gate, asked = asyncio.Semaphore(_LEASES_AT_ONCE), list(dict.fromkeys(leases))

        async def ask(lease: int) -> float | None:
            async with gate:
                return await self._requests.remaining(operation, lease)

        return dict(zip(asked, await asyncio.gather(*map(ask, asked)), strict=True))


def lowest_free(mode: Permit, line: Sequence[Entry]) -> int | None:
    """
    The lowest number that a permit may have behind *line*; None if it has to wait.

    Raises:
        UnreadableAnswerError: another program wrote a key.
    """
    if len(line) >= mode.of:
        return None
    taken = set()
    for entry in line:
        facts = KeyFacts.read(entry)
        if facts.permit is None:
            return None
        taken.add(facts.permit)
    return next(free for free in range(mode.of) if free not in taken)


def _in_line(found: list[Entry]) -> list[Entry]:
    return sorted(found, key=lambda entry: entry.created)


def _holding(line: Sequence[Entry], phase: Entry | None) -> list[Entry]:
    """Of a line in its order, the keys of holders: those from the first on that are of one kind and were granted."""
    held: list[Entry] = []
    for entry in line:
        first = KeyFacts.read(held[0] if held else entry)
        if held and first.mode.word in {"lock", "writer"}:
            break
        facts = KeyFacts.read(entry)
        if facts.waits or facts.mode.word != first.mode.word or (facts.mode == READER and not phase):
            break
        held.append(entry)
    return held


def _granted(own: Entry, earlier_unknown: bool = False, *, phase: int = 0) -> Standing:  # noqa: FBT001, FBT002
    return Standing(own, own, earlier_unknown, phase)


def _new_entry(key: bytes, value: bytes, fields: Json, lease: int) -> Entry:
    revision = number(fields["header"], "revision")
    return Entry(key, value, revision, revision, lease)
