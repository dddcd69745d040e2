"""
Locks in etcd, through its JSON gateway: no gRPC.

    connect("etcd://etcd1:2379,etcd2:2379,etcd3:2379")
    connect("etcd+https://user:password@etcd1:2379?ca=/etc/ssl/etcd.pem")

Tokens: the revision of etcd that created the ticket's key. Clock: that of etcd's leader. Waiters: first come, first
served; a watch on the key ahead wakes each of them.

    __init__.py   the backend: its verbs, and what it watches for its tickets
    line.py       the requests about lines
    keys.py       the keys of tickets, and the rules of a line
    leases.py     leases of etcd that many tickets share
    watches.py    the stream of watches

The gateway itself, which the guard uses too, is `fencing_sdk._etcd`.

What a ticket watches:

    lock or writer that waits    the key ahead, until it is deleted: then it looks whether it is the first
    reader or permit that waits  the same, and its own key, into which is written that it holds; a permit that is next
                                 behind permits watches the whole line for deletions
    ticket that holds            its own key, once it has held for a moment, so that a short hold costs nothing

A keep does not trust the watches. It compares that the tickets are there, and those ahead of them: for so many, one
transaction. Who finds a difference looks.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from fencing_sdk._etcd import (
    RANGE,
    TXN,
    Entry,
    Json,
    LeaseNotFoundError,
    compared,
    delete,
    entries,
    make_gateway,
    put,
    ranged,
    read_url,
    responses,
    revision_in,
    txn,
)
from fencing_sdk._values.claim import Busy, Claim, Gone, Permit, Place, Seen
from fencing_sdk._values.loop_owner import ForkDetector, Uncopied
from fencing_sdk._values.url import option_names
from fencing_sdk.abc import ALL_MODES, READER, WAITER_TTL, Bell, Kept, News
from fencing_sdk.abc.line import REASON_TTL
from fencing_sdk.backends import take_options
from fencing_sdk.backends._shared.background_task import BackgroundTask, BackgroundTasks
from fencing_sdk.backends._shared.error_translation import ErrorTranslation
from fencing_sdk.backends.etcd.keys import (
    DEFAULT_PREFIX,
    EtcdKeys,
    TicketKey,
    check_prefix,
    settled,
    stays_as,
)
from fencing_sdk.backends.etcd.leases import BACKEND, BATCH, SharedLease, SharedLeases
from fencing_sdk.backends.etcd.line import LOOK_AFTER, EtcdLines, TicketView, View
from fencing_sdk.backends.etcd.watches import Watches
from fencing_sdk.errors import BackendError, BackendUnavailableError, ConfigurationError

__all__ = ["EtcdBackend", "from_url"]

_TRIES = 10
"""Times that a step is tried while a lease ends, or others change what was read."""
_LEAST_REMAINING = 0.5
"""Seconds: etcd answers with whole seconds, rounded down, so a lease with 0 of them is still alive."""
_LEASES_AT_ONCE = 8
_MOMENT = 0.1
"""Seconds for which a name is held before its key is watched."""


def _translated(operation: str) -> ErrorTranslation:
    """Errors of reading an answer: it says nothing about what etcd has done, so it counts as lost."""
    return ErrorTranslation(lambda operation, error: BackendUnavailableError(BACKEND, operation, str(error)), operation)


@dataclass(slots=True, eq=False)
class _Own:
    """A ticket that this client has."""

    claim: Claim
    key: bytes
    created: int
    """The number of the ticket."""
    lease: SharedLease
    life: float
    """Seconds for which it lives after `kept_at`."""
    kept_at: float
    """When the last call that kept it began."""
    place: Place
    rival: TicketKey | None
    """The ticket ahead, while it waits; None if it is a permit that is next behind permits."""
    seen: int
    """A revision at which both were there."""
    own_watch: int = 0
    rival_watch: int = 0

    @property
    def waits(self) -> bool:
        return self.place.token is None

    def facts(self) -> list[tuple[bytes, str, int]]:
        """Facts that stay while the ticket stands: a key, which of its revisions, and that."""
        facts = [(self.key, "CREATE", self.created)]
        if self.waits and self.rival is not None:
            # A ticket of a shared mode may begin to hold together with the one ahead: then both are written.
            shared = self.claim.mode.shared
            revision = self.rival.modified if shared else self.rival.created
            facts.append((self.rival.key, "MOD" if shared else "CREATE", revision))
        return facts


class EtcdBackend(Uncopied):
    """
    An etcd cluster, 3.4 or later, as the lock service.

    Args:
        endpoints: The members, each as ``host:port`` of its client URL. Any of them will do.

        tls: Speak HTTPS.

        prefix: The beginning of every key, so that a role can be limited to it.

        user: The user to log in as, with *password*, where etcd asks for a login.

        ca: A file of the authorities that certificates are checked against, instead of the system's.

        cert: A file with a client certificate, and its key unless that is in *key*.

        connect_timeout: Seconds to wait for a member to accept the connection, before the next one gets the request.

    Raises:
        ConfigurationError: an argument cannot work. Nothing is sent before the first call.
    """

    modes = ALL_MODES
    rings = True

    def __init__(
        self,
        endpoints: Sequence[str],
        *,
        tls: bool = False,
        prefix: str = DEFAULT_PREFIX,
        user: str | None = None,
        password: str | None = None,
        ca: str | os.PathLike[str] | None = None,
        cert: str | os.PathLike[str] | None = None,
        key: str | os.PathLike[str] | None = None,
        connect_timeout: float = 1.0,
    ) -> None:
        self._keys = EtcdKeys(check_prefix(prefix))
        self._gateway = make_gateway(
            BACKEND,
            endpoints,
            tls=tls,
            user=user,
            password=password,
            ca=ca,
            cert=cert,
            key=key,
            connect_timeout=connect_timeout,
        )
        self._lines = EtcdLines(self._gateway, self._keys)
        self._leases = SharedLeases(self._lines.ask, self._unwanted, self._forget_overdue)
        self._own: dict[bytes, _Own] = {}
        self._busy: Counter[bytes] = Counter()
        self._noted: set[bytes] = set()
        """Tickets of this client about which there is an operator's note."""
        self._bells: dict[bytes, Bell] = {}
        self._watches: Watches[TicketKey] = Watches(self._gateway, TicketKey)
        self._looks = BackgroundTasks()
        self._young: dict[bytes, _Own] = {}
        """Tickets that hold since less than a moment."""
        self._growing = BackgroundTask()
        self._fork = ForkDetector()

    async def open(self) -> None:
        """See `fencing_sdk.abc.SupportsOpen.open`."""
        with _translated("open"):
            await self._lines.whole("open", "?")

    # The verbs

    async def draw(self, claim: Claim, *, only_if_it_holds: bool = False) -> Place | Busy:
        """See `fencing_sdk.abc.Backend.draw`."""
        key = self._keys.own(claim)
        with _translated("acquire"), self._busy_with(key):
            for _ in range(_TRIES):
                if (outcome := await self._draw(claim, key, only_if_it_holds)) is not None:
                    return outcome
        detail = "a ticket ends as soon as it is drawn, or an earlier one of its owner stays for a while"
        raise BackendUnavailableError(BACKEND, "acquire", detail)

    async def _draw(self, claim: Claim, key: bytes, only_if_it_holds: bool) -> Place | Busy | None:  # noqa: FBT001
        """Draw once; None: it has to be tried again."""
        started, waits = self._now(), min(claim.ttl, WAITER_TTL)
        noted = key in self._noted or key in self._own
        lease = await self._leases.lease_for("acquire", claim.ttl)
        short = lease if only_if_it_holds else await self._leases.lease_for("acquire", waits)
        try:
            asked: Coroutine[Any, Any, View | Busy | None] = (
                self._lines.put_if_it_holds(claim, lease, noted=noted)
                if only_if_it_holds
                else self._lines.put(claim, lease, short, noted=noted)
            )
            if self._leases.lives(lease, claim.ttl, started):  # as most often: no task is needed
                drawn, fresh = await asked, True
            else:
                drawn, fresh = await asyncio.gather(asked, self._leases.fresh("acquire", lease, claim.ttl, started))
        except LeaseNotFoundError:
            self._leases.not_found(lease, short)
            return None
        except BaseException:
            self._leases.suspect(lease, short)
            raise
        if isinstance(drawn, Busy):
            return drawn
        if drawn is not None:
            if drawn.earlier_unknown:
                self._leases.suspect(lease, short)
            self._noted.discard(key)
        at = drawn.find(key) if drawn is not None else None
        mine = drawn.stands[at] if drawn is not None and at is not None else None
        own_lease, life = (short, waits) if mine is not None and mine.token is None else (lease, claim.ttl)
        if drawn is None or mine is None or mine.key.lease != own_lease.number:  # the ticket was there, or has changed
            place = await self._look("acquire", claim)
            return place if isinstance(place, Place) else None
        if not fresh or not await self._leases.fresh("acquire", own_lease, life, started):
            return None
        return self._remember(claim, drawn, own_lease, life, started)

    async def keep(self, tickets: Sequence[Kept]) -> Sequence[Place | Gone | None]:
        """See `fencing_sdk.abc.Backend.keep`."""
        with _translated("renew"):
            return await self._keep(tickets)

    async def _keep(self, tickets: Sequence[Kept]) -> Sequence[Place | Gone | None]:
        now = self._now()
        keys = [self._keys.own(claim) for claim, _ in tickets]
        groups: dict[SharedLease, list[_Own]] = {}
        looks: list[bytes] = []
        dead = [own for key in keys if (own := self._own.get(key)) is not None and own.kept_at + own.life <= now]
        for own in dead:  # although its lease may live
            self._forget(own)
        await asyncio.gather(*map(self._leases.sweep, {own.lease for own in dead}))
        for key, (claim, number) in zip(keys, tickets, strict=True):
            own = self._own.get(key)
            if own is None or number not in {0, own.created} or own.lease.ended or self._has_to_look(own, claim):
                looks.append(key)
            else:
                groups.setdefault(own.lease, []).append(own)
        found: dict[bytes, Place | Gone] = {}
        errors = await self._gather([self._keep_group(lease, owns, now, found) for lease, owns in groups.items()])
        failed = {own.key for owns in groups.values() for own in owns} if errors else set()
        kept = dict(zip(keys, tickets, strict=True))
        looks += [key for key in kept if key not in found and key not in looks and key not in failed]

        together: dict[bytes | str, list[bytes]] = {}
        for key in dict.fromkeys(looks):
            claim, _ = kept[key]
            together.setdefault(claim.name if claim.mode == READER else key, []).append(key)

        async def look(keys: Sequence[bytes]) -> None:
            views: Sequence[TicketView | None] = [None]
            if len(keys) > 1:  # readers: a look at the whole line for each would read its square
                views = await self._look_for([kept[key] for key in keys])

            async def one(key: bytes, view: TicketView | None) -> None:
                found[key] = await self._look("renew", *kept[key], seen=None if view is None else (now, view))

            errors.extend(await self._gather([one(key, view) for key, view in zip(keys, views, strict=True)]))

        errors += await self._gather([look(group) for group in together.values()])
        if errors and not found:
            raise errors[0]
        return [found.get(key) for key in keys]

    async def _look_for(self, tickets: Sequence[Kept]) -> list[TicketView]:
        """Look for readers of one name; move those that hold to the leases of their ttls."""
        views = await self._lines.look_for("renew", [claim for claim, _ in tickets])
        line = {stand.key.key: stand for stand in views[0].view.stands}
        moves: dict[float, list[TicketKey]] = {}
        for claim, number in tickets:
            stand = line.get(self._keys.own(claim))
            if stand is None or stand.token is None or stand.key.stays is not None:
                continue
            if number in {0, stand.key.created}:
                moves.setdefault(claim.ttl, []).append(stand.key)
        for ttl, keys in moves.items():
            lease = await self._leases.lease_for("renew", ttl)
            moved = await self._lines.move_all(
                "renew", [key for key in keys if key.lease != lease.number], lease.number
            )
            line |= {key.key: line[key.key]._replace(key=replace(key, lease=lease.number)) for key in moved}
        view = views[0].view._replace(stands=list(line.values()))
        return [each._replace(view=view) for each in views]

    @staticmethod
    async def _gather(works: Sequence[Awaitable[None]]) -> list[BackendError]:
        """Do all; return the errors of etcd."""
        outcomes = await asyncio.gather(*works, return_exceptions=True)
        errors: list[BackendError] = []
        for outcome in outcomes:
            if isinstance(outcome, BackendError):
                errors.append(outcome)
            elif outcome is not None:
                raise outcome
        return errors

    @staticmethod
    def _has_to_look(own: _Own, claim: Claim) -> bool:
        if own.waits:
            return own.rival is None or min(claim.ttl, WAITER_TTL) > own.life
        return claim.ttl > own.life

    async def _keep_group(
        self, lease: SharedLease, owns: Sequence[_Own], now: float, found: dict[bytes, Place | Gone]
    ) -> None:
        """Keep the tickets of one lease: one keep-alive, and a comparison for each batch of them."""
        batches = [owns[start : start + BATCH] for start in range(0, len(owns), BATCH)]
        alive, answers = await asyncio.gather(
            self._leases.fresh("renew", lease, max(own.life for own in owns), now),
            asyncio.gather(*map(self._compare, batches)),
        )
        if not alive:
            return
        for revision, unchanged in answers:
            for own in unchanged:
                if not own.waits and own.claim.ttl > own.life:  # it has just begun to hold
                    continue
                own.kept_at, own.seen = max(own.kept_at, now), max(own.seen, revision)
                found[own.key] = own.place
                if self._own.get(own.key) is own:
                    self._watch(own)

    async def _compare(self, owns: Sequence[_Own]) -> tuple[int, list[_Own]]:
        """Return a revision, and those of these tickets for which nothing has changed."""
        facts = [(own, *fact) for own in owns for fact in own.facts()]
        looks = [ranged(key, keys_only=True) for _, key, _, _ in facts]
        compare = [compared(key, target, "EQUAL", revision) for _, key, target, revision in facts]
        body = txn(compare=compare, success=[], failure=looks)
        fields, _ = await self._lines.ask("renew", TXN, body, hedged=True)  # the ranges make etcd ask the majority
        if fields.get("succeeded") is True:
            return revision_in(fields), list(owns)
        changed: set[_Own] = set()
        for (own, _, target, revision), part in zip(facts, responses(fields, len(looks)), strict=True):
            found = [each.modified if target == "MOD" else each.created for each in entries(part, Entry)]
            if found != [revision]:
                changed.add(own)
        return 0, [own for own in owns if own not in changed]

    async def _look(
        self,
        operation: str,
        claim: Claim,
        number: int = 0,
        *,
        prolong: bool = True,
        seen: tuple[float, TicketView] | None = None,
    ) -> Place | Gone:
        """
        Look how a ticket stands, and let it live on, if necessary on another lease.

        *prolong*: False to look only. *seen*: a look that has just been made, and the moment before it.
        """
        with self._busy_with(self._keys.own(claim)):
            return await self._look_at(operation, claim, number, prolong=prolong, seen=seen)

    async def _look_at(
        self, operation: str, claim: Claim, number: int, *, prolong: bool, seen: tuple[float, TicketView] | None
    ) -> Place | Gone:
        key = self._keys.own(claim)
        for _ in range(_TRIES):
            known = self._own.get(key)
            of = number or (known.created if known is not None else 0)
            started, look = seen or (self._now(), await self._lines.look(operation, claim, of))
            seen = None
            view, at = look.view, look.view.find(key)
            if at is not None and view.stands[at].unwritten:
                view = await self._lines.settle(operation, claim.name, view, mode=claim.mode)
                at = view.find(key)
            mine = view.stands[at] if at is not None else None
            if mine is None or mine.key.stays is not None or number not in {0, mine.key.created}:
                return self._gone(key, known, look)
            if known is not None and known.created != mine.key.created:
                known = None
            if not prolong:
                if known is None:
                    return Gone()
                return self._remember(claim, view, known.lease, known.life, known.kept_at)
            life = min(claim.ttl, WAITER_TTL) if mine.token is None else claim.ttl
            life = life if known is None else max(life, known.life)
            lease = await self._leases.lease_for(operation, life)
            try:
                there = mine.key.lease == lease.number or await self._lines.move(operation, mine.key, lease.number)
            except LeaseNotFoundError:
                self._leases.not_found(lease)
                continue
            if there and await self._leases.fresh(operation, lease, life, started):
                place = self._remember(claim, view, lease, life, started)
                if place.token is None or life >= claim.ttl:  # else it has begun to hold since this look
                    return place
        raise BackendUnavailableError(BACKEND, operation, "a ticket changes whenever it is looked at")

    def _gone(self, key: bytes, known: _Own | None, look: TicketView) -> Gone:
        if known is not None:
            self._forget(known)
        if look.reason is not None:
            self._noted.add(key)
        return Gone(look.reason, look.taken)

    async def give_back(self, claim: Claim, *, after: float = 0.0) -> Gone | None:
        """See `fencing_sdk.abc.Backend.give_back`."""
        key = self._keys.own(claim)
        with _translated("release"), self._busy_with(key):
            own = self._own.get(key)
            if own is not None:
                self._forget(own)
            try:
                return await (self._park(claim, after) if after > 0 else self._end_own(claim, own))
            except BaseException:
                if own is not None:
                    self._leases.suspect(own.lease)
                raise

    async def _end_own(self, claim: Claim, own: _Own | None) -> Gone | None:
        lease, created, unknown = (-1, 1, False) if own is None else (own.lease.number, own.created, False)
        key = self._keys.own(claim)
        for _ in range(_TRIES):
            look = await self._lines.delete(claim, lease, created)
            if look is None:
                return None
            unknown = unknown or look.view.earlier_unknown
            if (at := look.view.find(key)) is None:
                return None if unknown else self._gone(key, None, look)
            found = look.view.stands[at].key
            if found.stays is not None:
                return None
            lease, created = found.lease, found.created
        raise BackendUnavailableError(BACKEND, "release", "a ticket changes whenever it is to be deleted")

    async def _park(self, claim: Claim, after: float) -> Gone | None:
        """Let a ticket that holds stay, on a lease of its own, with a mark."""
        key = self._keys.own(claim)
        for _ in range(_TRIES):
            look = await self._lines.look("release", claim, 0)
            view = await self._lines.settle("release", claim.name, look.view)
            mine = view.stands[at] if (at := view.find(key)) is not None else None
            if mine is None:
                return self._gone(key, None, look)
            if mine.key.stays is not None:
                return None
            if mine.token is None:
                return await self._end_own(claim, None)
            if view is look.view:  # else the key has just been written
                lease, _ = await self._leases.grant("release", after)
                value = mine._replace(key=replace(mine.key, stays=stays_as(claim))).value
                if await self._lines.move("release", mine.key, lease, value):
                    return None
        raise BackendUnavailableError(BACKEND, "release", "a ticket changes whenever it is looked at")

    async def end(self, name: str, token: int, reason: str) -> bool:
        """See `fencing_sdk.abc.Backend.end`."""
        with _translated("revoke"):
            self._now()
            ended, failures = False, 0
            while failures < _TRIES:
                over = [stand.key for stand in (await self._lines.whole("revoke", name)).stands if stand.token == token]
                if not over:
                    return ended
                if not await self._end_all(over[:BATCH], reason):
                    failures += 1
                    continue
                ended = True
                if len(over) <= BATCH:
                    with suppress(BackendError):  # if that fails, they find it themselves
                        await self._lines.settle("revoke", name)
                    return True
        raise BackendUnavailableError(BACKEND, "revoke", "the holders of the lock change whenever it is looked at")

    async def _end_all(self, over: Sequence[TicketKey], reason: str) -> bool:
        """End these tickets, if all of them are there."""
        left = await self._remaining("revoke", [key.lease for key in over])
        lease, _ = await self._leases.grant("revoke", REASON_TTL + max(each or 0.0 for each in left.values()))
        note = json.dumps({"reason": reason}).encode()
        notes = [put(self._keys.note(key.key), note, lease) for key in over if key.stays is None]
        compare = [compared(key.key, "CREATE", "EQUAL", key.created) for key in over]
        body = txn(compare=compare, success=[*(delete(key.key) for key in over), *notes])
        fields, earlier_unknown = await self._lines.ask("revoke", TXN, body)
        if fields.get("succeeded") is not True and earlier_unknown:
            raise BackendUnavailableError(BACKEND, "revoke", "an earlier request may have been carried out")
        return fields.get("succeeded") is True

    async def tickets(self, names: Sequence[str]) -> Sequence[Sequence[Seen]]:
        """See `fencing_sdk.abc.Backend.tickets`."""
        with _translated("inspect"):
            self._now()
            lines: list[list[TicketKey]] = []
            for start in range(0, len(names), BATCH):
                lines += await self._lines.look_at("inspect", names[start : start + BATCH])
            left = await self._remaining("inspect", [key.lease for line in lines for key in line])
        living = [[key for key in line if left[key.lease] is not None] for line in lines]
        return [
            [stand.seen(max(_LEAST_REMAINING, left[stand.key.lease] or 0.0)) for stand in settled(line)]
            for line in living
        ]

    async def _remaining(self, operation: str, leases: Sequence[int]) -> dict[int, float | None]:
        """The seconds that leases have left; None for those that have ended. Many tickets share one."""
        gate, asked = asyncio.Semaphore(_LEASES_AT_ONCE), list(dict.fromkeys(leases))

        async def ask(lease: int) -> float | None:
            async with gate:
                return await self._leases.remaining(operation, lease)

        return dict(zip(asked, await asyncio.gather(*map(ask, asked)), strict=True))

    async def names(self, prefix: str, cursor: str | None, limit: int) -> tuple[Sequence[str], str | None]:
        """See `fencing_sdk.abc.Backend.names`. A page has the names of *limit* keys."""
        begin, end = self._keys.names(prefix)
        if cursor is not None:
            try:
                start = bytes.fromhex(cursor)
            except ValueError:
                start = b""
            if not begin <= start <= end:
                msg = "cursor must come from a page of this listing"
                raise ConfigurationError(msg)
            begin = start
        with _translated("list"):
            look = ranged(begin, end=end, most=limit, keys_only=True)["request_range"]
            fields, _ = await self._lines.ask("list", RANGE, look, hedged=True)
            keys = [each.key for each in entries(fields, Entry)]
        found = [self._keys.name(key) for key in keys]
        page = list(dict.fromkeys(name for name in found if name is not None))
        if fields.get("more") is not True or not keys:
            return page, None
        after = keys[-1] + b"\0" if found[-1] is None else self._keys.line(found[-1])[1]
        return page, after.hex()

    def comparison(self, name: str, owner: str, token: int) -> Json:
        """
        A comparison for a transaction of your own in the same etcd: *owner* still holds *name* with *token*.

        It is written as the JSON gateway takes it, in ``compare`` of ``/v3/kv/txn``. *name* is the name that
        the store knows: with a namespace, that comes first. No request is sent. For a lock, not for a share.
        """
        return compared(self._keys.own(Claim(name, 1.0, owner)), "CREATE", "EQUAL", token)

    # The tickets of this client

    def _now(self) -> float:
        """
        The moment at which a call begins.

        A forked child forgets what it has inherited: if it kept its parent's leases alive, the locks of a parent
        that died would never become free.
        """
        if self._fork.forked():
            self._leases.clear()
            self._watches.clear()
            self._looks.forget()
            self._growing = BackgroundTask()
            for inherited in (self._own, self._busy, self._bells, self._young):
                inherited.clear()
        return self._leases.now()

    def _remember(self, claim: Claim, view: View, lease: SharedLease, life: float, kept_at: float) -> Place:
        """Take note of a ticket of this client, and watch what concerns it; return its place."""
        key = self._keys.own(claim)
        at = view.find(key)
        assert at is not None  # the callers have found it
        mine, rival = view.stands[at], None
        place = Place(mine.token, mine.permit, mine.key.created)
        if mine.token is None:
            ahead = view.stands[at - 1]
            next_to_hold = ahead.token is not None
            rival = None if next_to_hold and _both_permits(ahead.key, mine.key) else ahead.key
            place = Place(None, None, mine.key.created, None, LOOK_AFTER if next_to_hold else math.inf)
        own = self._own.get(key)
        if own is None or own.created != mine.key.created:
            if own is not None:
                self._forget(own)
            own = self._own[key] = _Own(claim, key, mine.key.created, lease, life, kept_at, place, rival, view.revision)
            if not own.waits:
                self._grow_up(own)
                return place
        elif not own.waits and place.token is None:
            return own.place  # this view is older
        elif own.waits and place.token is not None:
            self._grow_up(own)
        if own.rival_watch and (rival is None or own.rival is None or rival.created != own.rival.created):
            self._watches.remove(own.rival_watch)
            own.rival_watch = 0
        own.claim, own.lease, own.life, own.place, own.rival = claim, lease, life, place, rival
        own.kept_at, own.seen = max(own.kept_at, kept_at), max(own.seen, view.revision)
        if own.waits:
            self._watch(own)
        return place

    def _forget(self, own: _Own) -> None:
        """Keep this ticket no longer. Its key may still be there."""
        if self._own.get(own.key) is own:
            del self._own[own.key]
        self._unwatch(own)

    def _unwatch(self, own: _Own) -> None:
        for watch in (own.own_watch, own.rival_watch):
            if watch:
                self._watches.remove(watch)
        own.own_watch = own.rival_watch = 0

    @contextmanager
    def _busy_with(self, key: bytes) -> Iterator[None]:
        """Protect the key of a call from the sweep of keys without tickets, as long as the call lasts."""
        self._now()
        self._busy[key] += 1
        try:
            yield
        finally:
            self._busy[key] -= 1
            if self._busy[key] <= 0:
                del self._busy[key]

    def _unwanted(self, keys: Sequence[bytes]) -> Sequence[bytes]:
        """Return those *keys* of a lease of this client that no ticket of it has."""
        return [key for key in keys if key not in self._own and key not in self._busy]

    def _forget_overdue(self, lease: SharedLease) -> bool:
        now = self._leases.now()
        overdue = [own for own in self._own.values() if own.lease is lease and own.kept_at + own.life <= now]
        for own in overdue:
            self._forget(own)
        return bool(overdue)

    # Bells

    def listen(self, claim: Claim, bell: Bell) -> Callable[[], object]:
        """See `fencing_sdk.abc.Backend.listen`."""
        self._now()
        key = self._keys.own(claim)
        self._bells[key] = bell

        def stop() -> None:
            if self._bells.get(key) is bell:
                del self._bells[key]
                if (own := self._own.get(key)) is not None:
                    self._unwatch(own)

        return stop

    def _ring(self, own: _Own, news: News) -> None:
        if self._own.get(own.key) is own and (bell := self._bells.get(own.key)) is not None:
            bell(news)

    def _grow_up(self, own: _Own) -> None:
        """Watch the key of a ticket that holds, if it does so for a moment."""
        if own.key in self._bells:
            self._young[own.key] = own
            self._growing.start(self._grow)

    async def _grow(self) -> None:
        older: dict[bytes, _Own] = {}
        while older or self._young:
            younger, self._young = self._young, {}
            await asyncio.sleep(_MOMENT)
            for own in older.values():
                if self._own.get(own.key) is own:
                    self._watch(own)
            older = {key: own for key, own in younger.items() if self._own.get(key) is own}

    def _watch(self, own: _Own) -> None:
        """Watch what concerns a ticket: see the module."""
        if own.key not in self._bells:
            return
        if not own.own_watch and (not own.waits or own.claim.mode.shared):
            changed = partial(self._own_changed, own)
            own.own_watch = self._watches.add(own.key, own.seen, changed, puts=own.waits, at_once=own.waits)
        if own.waits and not own.rival_watch:
            (begin, end), rival = self._keys.line(own.claim.name), own.rival
            key, end_ = (begin, end) if rival is None else (rival.key, None)
            changed = partial(self._rival_changed, own)
            own.rival_watch = self._watches.add(key, own.seen, changed, end=end_, at_once=True)

    def _own_changed(self, own: _Own, puts: Sequence[TicketKey]) -> None:
        if not puts:
            self._watches.remove(own.own_watch)
            own.own_watch = 0
            self._ring(own, None)
            return
        latest = puts[-1]
        if own.waits and latest.written and latest.created == own.created:
            self._watches.remove(own.rival_watch)
            own.rival_watch, own.rival = 0, None
            own.place = Place(latest.token or latest.created, latest.permit, own.created)
            self._ring(own, own.place)

    def _rival_changed(self, own: _Own, _: Sequence[TicketKey]) -> None:
        self._watches.remove(own.rival_watch)
        own.rival_watch = 0
        self._looks.start(self._look_and_ring(own))

    async def _look_and_ring(self, own: _Own) -> None:
        if self._own.get(own.key) is not own or not own.waits:
            return
        try:
            with _translated("queue"):
                place = await self._look("queue", own.claim, own.created, prolong=False)
        except BackendError:
            place = Gone()
        if isinstance(place, Gone):
            if (bell := self._bells.get(own.key)) is not None:
                bell(None)
        elif place.token is not None:
            self._ring(own, place)

    async def aclose(self) -> None:
        """Close the connections. Tickets stay until they are given back or die."""
        await self._growing.aclose()
        await self._watches.aclose()
        await self._looks.aclose(patience=0.0)
        for own in self._own.values():
            own.own_watch = own.rival_watch = 0
        await self._leases.aclose()
        await self._gateway.aclose()


def _both_permits(one: TicketKey, other: TicketKey) -> bool:
    return isinstance(one.mode, Permit) and isinstance(other.mode, Permit)


def from_url(url: str, **options: object) -> EtcdBackend:
    """
    Make a backend for ``etcd://[user:password@]host:2379,host:2379`` or ``etcd+https://``; see `EtcdBackend`.

    Raises:
        ConfigurationError: the URL names no member, or an option is unknown or cannot work.
    """
    endpoints, chosen = read_url(url, take_options(url, options, option_names(EtcdBackend, besides={"tls"})))
    return EtcdBackend(endpoints, **chosen)
