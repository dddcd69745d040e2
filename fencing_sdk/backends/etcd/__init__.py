"""
Locks in etcd, through its JSON gateway: no gRPC.

    connect("etcd://etcd1:2379,etcd2:2379,etcd3:2379")
    connect("etcd+https://user:password@etcd1:2379?ca=/etc/ssl/etcd.pem")

Tokens: the revision of etcd that created the holder's key. Clock: that of etcd's leader. Waiters:
first come, first served; a watch on the key before its own wakes each of them.

    __init__.py   the backend: what the answers mean for a claim, and what operators ask
    line.py       the requests; the line of a name, and the step by which a claim is granted
    watches.py    what wakes a waiter, and notices of grants that end while their holder works
    leases.py     leases of etcd that many locks share, renewals, and keys that are to be deleted
    keys.py       the keys of a lock

The gateway itself, which the guard uses too, is `fencing_sdk._etcd`.

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
import os
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from contextvars import Context
from dataclasses import replace
from typing import NamedTuple

from fencing_sdk._etcd import (
    TXN,
    Entry,
    Json,
    compared,
    delete,
    entries,
    make_gateway,
    number,
    put,
    ranged,
    read_url,
    responses,
    txn,
)
from fencing_sdk._http.requests import UnreadableAnswerError
from fencing_sdk._values.claim import LOCK, READER, Busy, Claim, Grant, Holder, Listing, Renewal, Revoked, Waiting
from fencing_sdk._values.loop_owner import Uncopied
from fencing_sdk._values.tasks import move_on_after, retrieve, waiting_for
from fencing_sdk._values.url import option_names
from fencing_sdk.abc import LossNotice, WaiterNotice
from fencing_sdk.backends import take_options
from fencing_sdk.backends._shared.error_translation import ErrorTranslation
from fencing_sdk.backends._shared.losses import with_reasons
from fencing_sdk.backends._shared.node_line import holding, refusal
from fencing_sdk.backends._shared.waiters import LEAVING, FirstAsks, KeptPlace, KeptPlaces, Turn, UnansweredRequests
from fencing_sdk.backends.etcd.keys import DEFAULT_PREFIX, EtcdKeys, LineKey, check_prefix, phase_token
from fencing_sdk.backends.etcd.leases import EtcdRenewals, SharedLease, SharedLeases
from fencing_sdk.backends.etcd.line import BACKEND, BATCH, EtcdLine, EtcdRequests, Standing, in_line, unreadable
from fencing_sdk.backends.etcd.watches import EtcdLossWatcher, EtcdWaiter, EtcdWaiters
from fencing_sdk.errors import BackendError, BackendRefusedError, BackendUnavailableError, ConfigurationError

__all__ = ["EtcdBackend", "from_url"]

_JOINING = LEAVING / 2
"""Seconds for which a waiter that leaves the line waits for the answer to its joining, before it is cancelled again."""
_LEAVE_TRIES = 2
"""One over the connection that is open, and one over the next, if that was broken."""
_POLL_PART = 1 / 4
"""Part of a lease after which a waiter tries again, which also keeps its place in the line alive."""
_LONGEST_POLL = 5.0


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
    """The keys of a lock: of its holders, and of its waiters."""

    name: str
    held: list[LineKey]
    waiting: list[LineKey]
    phase: int = 0
    """The token of readers."""
    revision: int = 0
    """The revision of this view: a key that is not in it was created later."""

    def token(self, key: LineKey) -> int:
        """Return the token of a holder."""
        return self.phase if key.shared == READER.word else key.created


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
        self._requests = EtcdRequests(self._gateway, self._keys)
        self._line = EtcdLine(self._requests)
        self._leases = SharedLeases(self._requests)
        self._waiters = EtcdWaiters(self._gateway, self._keys, self._line, self._leases.owns)
        self._leases.on_deleted = self._waiters.deleted
        self._places = KeptPlaces()
        self._first_asks = FirstAsks()
        self._losses = EtcdLossWatcher(self._gateway, self._leases, self._reasons, self._waiters.deleted)
        self._unanswered = UnansweredRequests()

    async def open(self) -> None:
        """See `fencing_sdk.abc.SupportsOpen.open`."""
        await self._requests.first("open", "?")

    async def acquire(self, claim: Claim) -> Grant | Busy:
        """
        See `fencing_sdk.abc.Backend.acquire`.

        There are three cases for the answer:

        1. The claim's key is the first one, or that of a share whose turn has come: it is granted.
        2. Another key is first, but an earlier request may still be carried out: the outcome is unknown.
        3. Another key is first: the lock is held.
        """
        waiter = self._waiters.find(claim)
        if waiter is not None or claim.mode is not LOCK:
            return await self._acquire(claim, waiter)
        may_hold = self._unanswered.has(claim.owner) or self._leases.find(self._keys.own(claim)) is not None
        if not may_hold:  # refuse it without a request if a claim of this client is before it, or is being refused
            if (busy := await self._first_asks.refusal(claim)) is not None:
                return busy
            if self._waiters.any_for(claim.name):
                return Busy(None)
        with self._first_asks.asking(claim) as settle:
            outcome = await self._acquire(claim, None)
            settle(outcome)
        return outcome

    async def _acquire(self, claim: Claim, waiter: EtcdWaiter | None) -> Grant | Busy:
        started, key = self._leases.now(), self._keys.own(claim)
        self._unanswered.begin(claim.owner)
        self._leases.give_up_overdue(started, [key])
        await self._leases.finish_deleting("acquire", key)
        standing, lease = await self._try(claim, waiter, started)
        if standing.holds:
            return await self._granted(claim, waiter, standing, started)
        if standing.earlier_unknown:
            raise BackendUnavailableError(
                BACKEND, "acquire", "another key is first, and an earlier request may still be carried out"
            )
        if standing.own is not None and not self._leases.is_safe(key, standing.own.created):
            await self._leases.delete_pending("acquire", [key])  # the claim left the line while this call joined it
        self._unanswered.answered(claim.owner)
        return Busy(None if waiter is None else min(_LONGEST_POLL, lease.ttl * _POLL_PART))

    async def _try(self, claim: Claim, waiter: EtcdWaiter | None, started: float) -> tuple[Standing, SharedLease]:
        """
        Try to be first: without waiting, by a key of a lock that has none; in the line, by the key that is there.

        The waiter's key is gone if the process was paused for longer than a ttl, or an operator has deleted it.
        Then the waiter joins the line again, at its end, unless it has left the line meanwhile.
        """
        if waiter is None:
            return await self._leases.with_lease(
                "acquire", claim, started, lambda lease: self._line.take(claim, lease.number)
            )
        standing, lease = await self._turn(claim, started)
        if standing.own is None and self._waiters.find(claim) is waiter:
            joined, _ = await self._join_line("acquire", claim, started)
            standing, lease = await self._turn(claim, started)
            standing = standing._replace(earlier_unknown=joined.earlier_unknown)
        if standing.own is not None:
            waiter.move(standing.own.created)
        return standing, lease

    async def _turn(self, claim: Claim, started: float) -> tuple[Standing, SharedLease]:
        """Look whether the turn of a waiter has come. This also keeps its place alive."""
        return await self._leases.with_lease(
            "acquire", claim, started, lambda lease: self._line.turn(claim, lease.number)
        )

    async def _join_line(self, operation: str, claim: Claim, started: float) -> tuple[Standing, SharedLease]:
        return await self._leases.with_lease(
            operation, claim, started, lambda lease: self._line.join(operation, claim, lease.number)
        )

    async def _granted(self, claim: Claim, waiter: EtcdWaiter | None, standing: Standing, started: float) -> Grant:
        key = self._keys.own(claim)
        lease = await self._leases.hold("acquire", claim, standing, started)
        if lease is None or standing.own is None:
            raise BackendUnavailableError(BACKEND, "acquire", "the grant of an earlier try has ended meanwhile")
        if not self._leases.is_safe(key, standing.own.created):  # this claim left the line meanwhile
            raise BackendUnavailableError(BACKEND, "acquire", "the key is being deleted")
        if not standing.earlier_unknown:  # else a release must be repeated, because the key may be put again
            self._unanswered.answered(claim.owner)
        if waiter is not None:
            waiter.served = True
        self._losses.granted(key, claim)
        with ErrorTranslation(unreadable, "acquire"):
            permit = standing.own.permit
        return Grant(standing.phase or standing.own.created, ttl=float(lease.ttl), permit=permit)

    async def renew(self, claims: Sequence[Claim]) -> Sequence[Renewal | Revoked]:
        """See `fencing_sdk.abc.Backend.renew`."""
        started = self._leases.now()
        self._leases.give_up_overdue(started, {self._keys.own(claim) for claim in claims})
        renewals = EtcdRenewals(self._requests, self._line, self._leases, claims, started)
        await renewals.run()
        if renewals.failures and not renewals.outcomes:
            raise renewals.failures[0]
        outcomes = [renewals.outcomes.get(self._keys.own(claim), Renewal.UNKNOWN) for claim in claims]
        for claim, outcome in zip(claims, outcomes, strict=True):
            if outcome is Renewal.RENEWED and self._leases.find(key := self._keys.own(claim)) is not None:
                self._losses.granted(key, claim)
        return await with_reasons(claims, outcomes, self._reasons)

    async def release(self, claim: Claim) -> Renewal | Revoked | None:
        """See `fencing_sdk.abc.Backend.release`."""
        if not await self._delete("release", claim):
            return None
        others = False
        with suppress(BackendError):  # the loss is known, and an error would have the release repeated, which hides it
            (standing,) = await self._line.standings("release", [claim])
            others = standing.others
        return (await with_reasons([claim], [refusal(claim.mode, others=others)], self._reasons))[0]

    async def _delete(self, operation: str, claim: Claim) -> bool:
        """
        Delete the claim's key, now or later: it stays a pending delete until etcd confirms it.

        Return whether the key was gone before, for sure.
        """
        now, key = self._leases.now(), self._keys.own(claim)
        held = claim.mode is LOCK and self._leases.find(key) is not None
        self._leases.forget(key)
        self._losses.ended(key)
        may_return = self._unanswered.has(claim.owner)
        self._leases.pending_deletes.add(key, now, may_return=may_return, sending=True, held=held)
        return bool(await self._leases.delete_pending(operation, [key]))

    # Who holds and who waits

    async def inspect(self, name: str) -> Holder | None:
        """See `fencing_sdk.abc.Backend.inspect`; the waiters are not counted."""
        first = await self._requests.first("inspect", name)
        if first is None:
            return None
        if first.shared:
            return next(iter(await self.holders(name)), None)
        found = await self._describe("inspect", [_SeenLine(name, [first], [])])
        return replace(found[0], waiters=None) if found else None

    async def holders(self, name: str) -> Sequence[Holder]:
        """See `fencing_sdk.abc.SupportsShares.holders`: in the order of their permits, or of their tokens."""
        found = await self._describe("inspect", [await self._look_at("inspect", name)])
        return sorted(found, key=lambda holder: (holder.permit or 0, holder.token))

    async def _look_at(self, operation: str, name: str) -> _SeenLine:
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

    async def list_waiters(self, name: str) -> Sequence[Waiting]:
        """See `fencing_sdk.abc.SupportsListing.list_waiters`."""
        seen = await self._look_at("list", name)
        waiters: list[Waiting] = []
        for key in seen.waiting:
            with suppress(UnreadableAnswerError):  # another program has written the key
                holder = key.holder(name, 0.0)
                waiters.append(Waiting(holder.id, holder.mode, None, holder.label))  # when it came is not kept
        return waiters

    # All names

    async def list_holders(self, prefix: str, cursor: str | None, limit: int) -> Listing:
        """See `fencing_sdk.abc.SupportsListing.list_holders`."""
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
            return await self._look_at("list", name)
        except BackendError as error:
            if not isinstance(error.__cause__, UnreadableAnswerError):
                raise
            return _SeenLine(name, [], [])  # another program has written one of the keys

    # Revocations

    async def revoke(self, name: str, token: int, reason: str) -> bool:
        """See `fencing_sdk.abc.SupportsRevoking.revoke`."""
        ended, failures = False, 0
        while failures < _TRIES:
            seen = await self._look_at("revoke", name)
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
            begin, end = self._keys.readers(seen.name)  # no reader came since the look
            compare.append(compared(begin, "CREATE", "LESS", seen.revision + 1, end=end))
            steps.append(delete(self._keys.phase(seen.name)))
        return await self._requests.end("revoke", compare, [victim.key for victim in victims], steps)

    async def _reasons(self, claims: Sequence[Claim]) -> list[str | None]:
        """For claims whose grants have ended: why they were revoked; None for those that were not."""
        found: list[Entry | None] = []
        for start in range(0, len(claims), BATCH):
            found += await self._requests.notes("renew", claims[start : start + BATCH])
        return [None if note is None else _read_reason(note.value) for note in found]

    def comparison(self, name: str, owner: str, token: int) -> Json:
        """
        A comparison for a transaction of your own in the same etcd: *owner* still holds *name* with *token*.

        It is written as the JSON gateway takes it, in ``compare`` of ``/v3/kv/txn``. *name* is the name that
        the store knows: with a namespace, that comes first. No request is sent. For a lock, not for a share.
        """
        return compared(self._keys.own(Claim(name, 1.0, owner)), "CREATE", "EQUAL", token)

    def on_loss(self, notice: LossNotice) -> Callable[[], None]:
        """See `fencing_sdk.abc.SupportsLossNotice.on_loss`."""
        return self._losses.on_loss(notice)

    def stand(self, claim: Claim, notify: WaiterNotice, *, hand_over: bool) -> KeptPlace:  # noqa: ARG002  (etcd only wakes)
        """See `fencing_sdk.abc.SupportsLine.stand`."""
        return self._places.stand(self._in_line, claim, notify)

    @asynccontextmanager
    async def _in_line(self, claim: Claim) -> AsyncIterator[Turn]:
        loop, name = asyncio.get_running_loop(), waiting_for(claim.name)
        joining = loop.create_task(self._join(claim), context=Context(), name=name)
        joining.add_done_callback(retrieve, context=Context())
        try:
            await asyncio.wait((joining,))
            yield joining.result()
        finally:
            await self._leave(claim, joining)

    async def _join(self, claim: Claim) -> EtcdWaiter:
        started, key = self._leases.now(), self._keys.own(claim)
        self._unanswered.begin(claim.owner)
        async with self._waiters.joining(claim.name):
            await self._leases.finish_deleting("queue", key)
            standing, lease = await self._join_line("queue", claim, started)
        if standing.own is None or not self._leases.is_safe(key, standing.own.created):
            raise BackendUnavailableError(BACKEND, "queue", "the key in the line was deleted as soon as it was put")
        if standing.own.lease != lease.number:  # another backend object has put the key, with this claim
            await self._requests.adopt("queue", standing.own, lease.number)
        if not standing.earlier_unknown:
            self._unanswered.answered(claim.owner)
        return self._waiters.add(claim, standing.own.created)

    async def _leave(self, claim: Claim, joining: asyncio.Task[EtcdWaiter]) -> None:
        """
        Leave the line, unless the lock was granted.

        A wait that is cancelled leaves its request under way until the answer: etcd may carry out a request whose
        connection was closed after the deletion, and the key would stay in the line as long as its lease.

        A try may have been granted before the claim had a waiter, or since a deletion has failed, so this looks at the
        held keys, too. It raises no error, which would replace the cancellation that ends the wait.
        """
        try:
            if not joining.done():
                with move_on_after(_JOINING, shield=True):
                    await asyncio.wait((joining,))
        except BaseException:  # cancelled again, and the request may still put the key
            if self._leases.find(key := self._keys.own(claim)) is None:
                self._leases.pending_deletes.add(key, self._leases.now(), may_return=True)
            raise
        finally:
            joining.cancel()  # unless it was answered
        if joining.done() and not joining.cancelled() and not joining.exception():
            waiter = joining.result()
            await self._waiters.remove(waiter)
            if waiter.served:
                return
        with move_on_after(LEAVING, shield=True):  # a key that is left then is deleted with a later keep-alive
            for _ in range(_LEAVE_TRIES):
                if self._leases.find(self._keys.own(claim)) is not None:
                    return
                with suppress(BackendError):
                    await self._delete("queue", claim)
                    return

    async def aclose(self) -> None:
        """Close the connections. Grants stay until they are released or expire."""
        await self._losses.aclose()
        # No keep-alive will delete the places in a line that were left while etcd was slow, or by waiters whose loop
        # was closed. The claims behind them would wait for a whole ttl.
        now = self._leases.now()
        for claim in self._waiters.pop_orphans():
            self._leases.pending_deletes.add(self._keys.own(claim), now, may_return=True)
        with move_on_after(LEAVING), suppress(BackendError):
            await self._leases.delete_pending("queue", self._leases.pending_deletes.never_confirmed())
        await self._leases.aclose()
        await self._gateway.aclose()


def from_url(url: str, **options: object) -> EtcdBackend:
    """
    Make a backend for ``etcd://[user:password@]host:2379,host:2379`` or ``etcd+https://``; see `EtcdBackend`.

    Raises:
        ConfigurationError: the URL names no member, or an option is unknown or cannot work.
    """
    endpoints, chosen = read_url(url, take_options(url, options, option_names(EtcdBackend, besides={"tls"})))
    return EtcdBackend(endpoints, **chosen)


def _read_reason(value: bytes) -> str:
    try:
        reason = json.loads(value).get("reason")
    except (ValueError, AttributeError, RecursionError):
        reason = None
    return reason if isinstance(reason, str) else ""
