"""
The requests to etcd about lines.

A draw puts a key at the end of the line, or, if it must hold at once, puts it only where it does. A look reads as much
of a line as decides how one ticket stands: the key ahead, and of the first keys as many as may hold together; of
readers the line, once for all readers of a keep.

Tokens of readers and numbers of permits are written for all tickets that hold by now, in transactions which compare
that none of their keys has changed. So two clients that write for one line write the same, or one of them looks again.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

from fencing_sdk._etcd import (
    RANGE,
    TXN,
    Entry,
    Gateway,
    GatewayReply,
    Json,
    LeaseNotFoundError,
    compared,
    delete,
    entries,
    nested,
    number,
    put,
    put_on,
    ranged,
    responses,
    revision_in,
    txn,
)
from fencing_sdk._values.claim import READER, Busy, Claim, Mode, Permit
from fencing_sdk._values.token import TOKEN_LIMIT
from fencing_sdk.backends.etcd.keys import EtcdKeys, Stand, TicketKey, settled, value_of
from fencing_sdk.backends.etcd.leases import BACKEND, BATCH, SharedLease
from fencing_sdk.errors import BackendError, BackendRefusedError, BackendUnavailableError

LOOK_AFTER = 2.5
"""Seconds: what a lease has left is not read; a watch rings when it ends."""
_TRIES = 30
"""Times that a line is looked at while others come and go."""


class View(NamedTuple):
    """A line, or as much of it as was asked for."""

    stands: list[Stand]
    revision: int
    """The revision of this view."""
    earlier_unknown: bool = False
    """An earlier try of this request may still be carried out."""

    def find(self, key: bytes) -> int | None:
        """The place of a key in it."""
        return next((at for at, stand in enumerate(self.stands) if stand.key.key == key), None)


class TicketView(NamedTuple):
    """View of a line for one ticket, with what an operator has left for its owner."""

    view: View
    reason: str | None
    """An operator's, if one has ended a ticket of this owner."""

    @property
    def taken(self) -> bool:
        """Return whether another ticket holds the name alone."""
        return bool(self.view.stands) and not self.view.stands[0].key.mode.shared


class EtcdLines:
    """The lines of one etcd."""

    def __init__(self, gateway: Gateway, keys: EtcdKeys) -> None:
        self._gateway = gateway
        self._keys = keys

    async def ask(self, operation: str, path: str, body: Json, *, hedged: bool = False) -> GatewayReply:
        """Ask etcd. *hedged*: also the next member, if there is no answer soon."""
        return await self._gateway.call(operation, path, body, hedged=hedged)

    # Into the line

    async def put(self, claim: Claim, holds: SharedLease, waits: SharedLease, *, noted: bool) -> View | None:
        """
        Put the claim's key at the end of the line, on the lease for those who hold or that for those who wait.

        *noted*: delete the note about an earlier ticket of the owner. None: the owner has a ticket.
        """
        mode, key, (begin, end) = claim.mode, self._keys.own(claim), self._keys.line(claim.name)
        forget = [delete(self._keys.note(key))] if noted else []
        waiting = [put(key, value_of(mode, claim.label), waits.number), *forget]
        looks = [
            ranged(begin, end=end, last=mode.of + 1 if isinstance(mode, Permit) else 2),
            ranged(begin, end=end, first=1),
        ]
        first = _behind(mode, [])
        behind = nested(compare=[compared(key, "CREATE", "EQUAL", 0)], success=[*waiting, *looks])
        fields, earlier_unknown = await self.ask(
            "acquire",
            TXN,
            txn(
                compare=[compared(begin, "CREATE", "EQUAL", 0, end=end)],
                success=[put(key, value_of(mode, claim.label, token=first[0], permit=first[1]), holds.number), *forget],
                failure=[behind],
            ),
        )
        revision = _revision(fields)
        if fields.get("succeeded") is True:
            mine = _new_key(key, claim, revision, holds.number, token=first[0], permit=first[1])
            return View(settled([mine]), revision, earlier_unknown)
        (answer,) = responses(fields, 1)
        if answer.get("succeeded") is not True:
            return None
        found, head = responses(answer, len(waiting) + 2)[-2:]
        line = _in_line(entries(found, TicketKey))
        ahead, mine = line[-2], line[-1]
        view = View(settled(line), revision, earlier_unknown)
        if number(found, "count") > len(line):  # there are more, ahead of these
            if mode == READER == ahead.mode:
                behind_others = entries(head, TicketKey)[0].mode != READER
                if not ahead.written and not behind_others:
                    return await self.settle("acquire", claim.name, own=(key, holds.number))
                stands = [Stand(ahead, None), Stand(mine, None)] if behind_others else settled([ahead, mine])
                view = View(stands, revision, earlier_unknown)
            else:
                before = Stand(ahead, ahead.created if ahead.written else None)
                view = View([before, Stand(mine, None)], revision, earlier_unknown)
        if not view.stands[-1].unwritten:
            return view
        return await self.settle("acquire", claim.name, view, own=(key, holds.number), mode=mode)

    async def put_if_it_holds(self, claim: Claim, lease: SharedLease, *, noted: bool) -> View | Busy | None:
        """Put the claim's key if it holds at once. None: the owner has a ticket."""
        mode, key, (begin, end) = claim.mode, self._keys.own(claim), self._keys.line(claim.name)
        look = [ranged(key)]
        if mode.shared:
            look.append(ranged(begin, end=end, last=mode.of if isinstance(mode, Permit) else 1))
        forget = [delete(self._keys.note(key))] if noted else []
        line: list[TicketKey] = []
        unknown = False
        for _ in range(_TRIES):
            token, permit = _behind(mode, line)
            value = value_of(mode, claim.label, token=token, permit=permit)
            compare = [compared(begin, "CREATE", "LESS", line[-1].created + 1 if line else 1, end=end)]
            compare += [compared(each.key, "CREATE", "EQUAL", each.created) for each in line[-1:]]
            body = txn(compare=compare, success=[put(key, value, lease.number), *forget], failure=look + forget)
            fields, earlier_unknown = await self.ask("acquire", TXN, body)
            unknown = unknown or earlier_unknown
            if fields.get("succeeded") is True:
                revision = _revision(fields)
                mine = _new_key(key, claim, revision, lease.number, token=token, permit=permit)
                return View([Stand(mine, mine.token or revision, permit)], revision, unknown)
            own, *shared = responses(fields, len(look + forget))[: len(look)]
            if entries(own, Entry):
                return None
            line = [each for part in shared for each in _in_line(entries(part, TicketKey))]
            if not shared or _waits(mode, line, number(shared[0], "count")):
                break
            if not all(each.written for each in line):
                stands = (await self.settle("acquire", claim.name)).stands
                if stands and stands[-1].token is None:
                    break
                line = []
        if unknown:
            detail = "another ticket is first, and an earlier request may still be carried out"
            raise BackendUnavailableError(BACKEND, "acquire", detail)
        return Busy(LOOK_AFTER)

    # Looks

    async def whole(self, operation: str, name: str, most: int | None = None) -> View:
        """Read the line of *name*, or at *most* so many of its first tickets."""
        begin, end = self._keys.line(name)
        look = ranged(begin, end=end) if most is None else ranged(begin, end=end, first=most)
        fields, _ = await self.ask(operation, RANGE, look["request_range"], hedged=True)
        return View(settled(_in_line(entries(fields, TicketKey))), _revision(fields))

    async def look(self, operation: str, claim: Claim, created: int) -> TicketView:
        """Look how the claim's ticket stands: that of number *created*, or 0 for whichever there is."""
        key, (begin, end) = self._keys.own(claim), self._keys.line(claim.name)
        parts = [ranged(begin, end=end)]
        if created and claim.mode != READER:
            width = claim.mode.width
            parts = [ranged(key), ranged(begin, end=end, last=1, before=created), ranged(begin, end=end, first=width)]
        body = txn(compare=[], success=[*parts, ranged(self._keys.note(key))])
        fields, _ = await self.ask(operation, TXN, body, hedged=True)
        *found, note = responses(fields, len(parts) + 1)
        line = {each.key: each for part in found for each in entries(part, TicketKey)}
        return TicketView(View(settled(_in_line(line.values())), _revision(fields)), _reason_in(note))

    async def look_for(self, operation: str, claims: Sequence[Claim]) -> list[TicketView]:
        """Look how readers of one name stand, with all that hold by now written."""
        view = await self.whole(operation, claims[0].name)
        if any(stand.unwritten for stand in view.stands):
            view = await self.settle(operation, claims[0].name, view)
        there, keys = {stand.key.key for stand in view.stands}, list(map(self._keys.own, claims))
        gone = [key for key in keys if key not in there]
        reasons: dict[bytes, str | None] = {}
        for start in range(0, len(gone), BATCH):  # read after the line: who ends a ticket writes why in the same step
            part = gone[start : start + BATCH]
            body = txn(compare=[], success=[ranged(self._keys.note(key)) for key in part])
            fields, _ = await self.ask(operation, TXN, body, hedged=True)
            reasons |= zip(part, map(_reason_in, responses(fields, len(part))), strict=True)
        return [TicketView(view, reasons.get(key)) for key in keys]

    async def look_at(self, operation: str, names: Sequence[str]) -> list[list[TicketKey]]:
        """Read the lines of some names, without what another program has written there."""
        look = [ranged(begin, end=end) for begin, end in map(self._keys.line, names)]
        fields, _ = await self.ask(operation, TXN, txn(compare=[], success=look), hedged=True)
        return [_in_line(_readable(part)) for part in responses(fields, len(look))]

    async def settle(
        self,
        operation: str,
        name: str,
        view: View | None = None,
        *,
        own: tuple[bytes, int] = (b"", 0),
        mode: Mode = READER,
    ) -> View:
        """
        Write all that the tickets hold which hold by now.

        *view*: a look that has just been made. *own*: a key that is moved to another lease if it is written.
        *mode*: of permits, only as many as there are can hold.
        """
        failures, most = 0, mode.of if isinstance(mode, Permit) else None
        while failures < _TRIES:
            view = await self.whole(operation, name, most) if view is None else view
            if most is not None and any(stand.key.mode.word != mode.word for stand in view.stands):
                most, view = None, await self.whole(operation, name)
            part = [stand for stand in view.stands if stand.unwritten][:BATCH]
            if not part:
                return view
            leases = {stand.key.key: stand.key.lease for stand in part}
            if own[0] in leases:
                leases[own[0]] = own[1]
            body = txn(
                compare=[compared(stand.key.key, "MOD", "EQUAL", stand.key.modified) for stand in part],
                success=[put(stand.key.key, stand.value, leases[stand.key.key]) for stand in part],
            )
            try:
                fields, _ = await self.ask(operation, TXN, body)
            except LeaseNotFoundError:  # one of them has just died
                fields = {}
            if fields.get("succeeded") is True:
                view = _with_written(view, leases, _revision(fields))
            else:
                failures, view = failures + 1, None
        raise BackendUnavailableError(BACKEND, operation, "others come and go whenever the line is looked at")

    # Out of the line

    async def delete(self, claim: Claim, lease: int, created: int) -> TicketView | None:
        """
        Delete the claim's key if it is on this *lease*, and let those hold who do by that; else look.

        If that fails, they find it themselves.
        """
        key, (begin, end) = self._keys.own(claim), self._keys.line(claim.name)
        may_hold = claim.mode.of if isinstance(claim.mode, Permit) else 1
        first, before = ranged(begin, end=end, first=may_hold), ranged(begin, end=end, last=1, before=created)
        fields, earlier_unknown = await self.ask(
            "release",
            TXN,
            txn(
                compare=[compared(key, "LEASE", "EQUAL", lease)],
                success=[delete(key), first, before],
                failure=[ranged(key), ranged(begin, end=end, first=1), ranged(self._keys.note(key))],
            ),
            hedged=True,
        )
        one, two, three = responses(fields, 3)
        if fields.get("succeeded") is True:
            view = View(settled(_in_line(_readable(two))), revision_in(fields))
            word = claim.mode.word
            between = any(each.mode.shared and each.mode.word != word for each in _readable(three))
            if between or any(stand.unwritten for stand in view.stands):
                with suppress(BackendError):
                    known = view if isinstance(claim.mode, Permit) and not between else None
                    await self.settle("release", claim.name, known, mode=claim.mode)
            return None
        line = {each.key: each for part in (two, one) for each in _readable(part)}
        view = View(settled(_in_line(line.values())), _revision(fields), earlier_unknown)
        return TicketView(view, _reason_in(three))

    async def move(self, operation: str, own: TicketKey, lease: int, value: bytes | None = None) -> bool:
        """Move a ticket to another lease; False: it has gone. With a *value* it must be unchanged."""
        compare, step = compared(own.key, "CREATE", "EQUAL", own.created), put_on(own.key, lease)
        if value is not None:
            compare, step = compared(own.key, "MOD", "EQUAL", own.modified), put(own.key, value, lease)
        fields, _ = await self.ask(operation, TXN, txn(compare=[compare], success=[step]))
        return fields.get("succeeded") is True

    async def move_all(self, operation: str, tickets: Sequence[TicketKey], lease: int) -> list[TicketKey]:
        """Move tickets to another lease; return those that were there, or none if the lease has ended."""
        moved: list[TicketKey] = []
        for start in range(0, len(tickets), BATCH):
            part = tickets[start : start + BATCH]
            steps = [
                nested(compare=[compared(each.key, "CREATE", "EQUAL", each.created)], success=[put_on(each.key, lease)])
                for each in part
            ]
            try:
                fields, _ = await self.ask(operation, TXN, txn(compare=[], success=steps))
            except LeaseNotFoundError:
                break
            answers = responses(fields, len(part))
            moved += [each for each, answer in zip(part, answers, strict=True) if answer.get("succeeded") is True]
        return moved


def _revision(fields: Json) -> int:
    revision = revision_in(fields)
    if revision >= TOKEN_LIMIT:
        raise BackendRefusedError(BACKEND, "acquire", "the revision does not fit into 53 bits")
    return revision


def _with_written(view: View, leases: Mapping[bytes, int], revision: int) -> View:
    """Return a view in which these keys were written: who holds goes on to hold, so the rest of it stands."""
    stands = [
        stand._replace(unwritten=False, key=replace(stand.key, modified=revision, lease=leases[stand.key.key]))
        if stand.key.key in leases
        else stand
        for stand in view.stands
    ]
    return view._replace(stands=stands, revision=revision)


def _in_line(found: Iterable[TicketKey]) -> list[TicketKey]:
    return sorted(found, key=lambda key: key.created)


def _readable(fields: Json) -> list[TicketKey]:
    found = fields.get("kvs", [])
    keys: list[TicketKey] = []
    for each in found if isinstance(found, list) else ():
        try:
            keys += entries({"kvs": [each]}, TicketKey)
        except ValueError:  # another program has written the key
            continue
    return keys


def _behind(mode: Mode, line: Sequence[TicketKey]) -> tuple[int | None, int | None]:
    """Return the token of a reader, and the number of a permit, that are written if it holds behind these."""
    token = (line[-1].token if line else 0) if mode == READER else None
    taken = {each.permit for each in line}
    return token, next(free for free in range(mode.of) if free not in taken) if isinstance(mode, Permit) else None


def _waits(mode: Mode, line: Sequence[TicketKey], count: int) -> bool:
    """Return whether a ticket of a shared *mode* would wait behind these, the last of so many."""
    other = bool(line) and line[-1].mode.word != mode.word
    return other or (isinstance(mode, Permit) and count >= mode.of)


def _new_key(
    key: bytes, claim: Claim, revision: int, lease: int, *, token: int | None, permit: int | None
) -> TicketKey:
    """A key that was just put, and holds."""
    token = (token or revision) if claim.mode == READER else None
    return TicketKey(key, b"", revision, revision, lease, claim.mode, claim.label, token, permit, None)


def _reason_in(note: Json) -> str | None:
    found = entries(note, Entry)
    if not found:
        return None
    try:
        reason = json.loads(found[0].value).get("reason")
    except (ValueError, AttributeError, RecursionError):
        reason = None
    return reason if isinstance(reason, str) else ""
