"""
Locks in etcd, through its JSON gateway: no gRPC.

    connect("etcd://etcd1:2379,etcd2:2379,etcd3:2379")
    connect("etcd+https://user:password@etcd1:2379?ca=/etc/ssl/etcd.pem")

Tokens: the revision of etcd that created the holder's key. Clock: that of etcd's leader. Waiters:
first come, first served; a watch on the key before its own wakes each of them.

    __init__.py         the backend: what the answers mean for a claim
    line.py             the line of a name: joining it, looking at it, the step by which a claim is granted
    renewals.py         many renewals in a few requests
    waiters.py          what wakes a waiter
    losses.py           notices of grants that end while their holder works
    operating.py        what operators ask: who holds, who waits, and that a grant ends
    leases.py           leases of etcd that many locks share, and keys that are to be deleted
    requests.py         the requests to etcd about leases and keys
    keys.py             the keys of a lock

The gateway itself, which the guard uses too, is `fencing_sdk._etcd`.
"""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from contextvars import Context

from fencing_sdk._etcd.gateway import make_gateway, read_url
from fencing_sdk._etcd.messages import Json, compared
from fencing_sdk._values.claim import LOCK, Busy, Claim, Grant, Holder, Listing, Renewal, Revoked, Waiting
from fencing_sdk._values.loop_owner import Uncopied
from fencing_sdk._values.options import option_names
from fencing_sdk._values.tasks import move_on_after, retrieve
from fencing_sdk.abc import LossNotice, WaiterNotice
from fencing_sdk.backends import take_options
from fencing_sdk.backends._shared.error_translation import ErrorTranslation
from fencing_sdk.backends._shared.losses import with_reasons
from fencing_sdk.backends._shared.node_line import refusal
from fencing_sdk.backends._shared.waiters import LEAVING, FirstAsks, KeptPlace, KeptPlaces, Turn, UnansweredRequests
from fencing_sdk.backends.etcd.keys import DEFAULT_PREFIX, EtcdKeys, check_prefix
from fencing_sdk.backends.etcd.leases import SharedLease, SharedLeases
from fencing_sdk.backends.etcd.line import EtcdLine, Standing
from fencing_sdk.backends.etcd.losses import EtcdLossWatcher
from fencing_sdk.backends.etcd.operating import EtcdOperating
from fencing_sdk.backends.etcd.renewals import EtcdRenewals
from fencing_sdk.backends.etcd.requests import BACKEND, EtcdRequests, unreadable
from fencing_sdk.backends.etcd.waiters import EtcdWaiter, EtcdWaiters
from fencing_sdk.errors import BackendError, BackendUnavailableError

__all__ = ["EtcdBackend", "from_url"]

_JOINING = LEAVING / 2
"""Seconds for which a waiter that leaves the line waits for the answer to its joining, before it is cancelled again."""
_LEAVE_TRIES = 2
"""One over the connection that is open, and one over the next, if that was broken."""
_POLL_PART = 1 / 4
"""Part of a lease after which a waiter tries again, which also keeps its place in the line alive."""
_LONGEST_POLL = 5.0


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

        ssl_context: Instead of *ca*, *cert* and *key*.

        connect_timeout: Seconds to wait for a member to accept the connection, before the next one gets the request.

        connections: The most calls that are under way at once, renewals and releases first. A waiter behind another
            client's key has a connection of its own, for its watch, and all holders together have one.

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
        ssl_context: ssl.SSLContext | None = None,
        connect_timeout: float = 1.0,
        connections: int = 32,
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
            ssl_context=ssl_context,
            connect_timeout=connect_timeout,
            connections=connections,
        )
        self._requests = EtcdRequests(self._gateway, self._keys)
        self._line = EtcdLine(self._requests)
        self._operating = EtcdOperating(self._requests)
        self._leases = SharedLeases(self._requests)
        self._waiters = EtcdWaiters(self._gateway, self._keys, self._line, self._leases.owns)
        self._leases.on_deleted = self._waiters.deleted
        self._places = KeptPlaces()
        self._first_asks = FirstAsks()
        self._losses = EtcdLossWatcher(self._gateway, self._leases, self._operating, self._waiters.deleted)
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
        if (busy := await self._refusal(claim)) is not None:
            return busy
        with self._first_asks.asking(claim) as settle:
            outcome = await self._acquire(claim, None)
            settle(outcome)
        return outcome

    async def _refusal(self, claim: Claim) -> Busy | None:
        """Refuse a claim without a request if another claim of this client is before it, or is just being refused."""
        if self._unanswered.has(claim.owner) or self._leases.find(self._keys.own(claim)) is not None:
            return None  # it may hold the lock
        busy = await self._first_asks.refusal(claim)
        return Busy(None) if busy is None and self._waiters.any_for(claim.name) else busy

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
        return await with_reasons(claims, outcomes, self._operating.reasons)

    async def release(self, claim: Claim) -> Renewal | Revoked | None:
        """See `fencing_sdk.abc.Backend.release`."""
        if not await self._delete("release", claim):
            return None
        others = False
        with suppress(BackendError):  # the loss is known, and an error would have the release repeated, which hides it
            (standing,) = await self._line.standings("release", [claim])
            others = standing.others
        return (await with_reasons([claim], [refusal(claim.mode, others=others)], self._operating.reasons))[0]

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

    async def inspect(self, name: str) -> Holder | None:
        """See `fencing_sdk.abc.Backend.inspect`."""
        return await self._operating.inspect(name)

    async def holders(self, name: str) -> Sequence[Holder]:
        """See `fencing_sdk.abc.SupportsShares.holders`."""
        return await self._operating.holders(name)

    async def list_holders(self, prefix: str, cursor: str | None, limit: int) -> Listing:
        """See `fencing_sdk.abc.SupportsListing.list_holders`."""
        return await self._operating.page(prefix, cursor, limit)

    async def list_waiters(self, name: str) -> Sequence[Waiting]:
        """See `fencing_sdk.abc.SupportsListing.list_waiters`."""
        return await self._operating.waiters(name)

    async def revoke(self, name: str, token: int, reason: str) -> bool:
        """See `fencing_sdk.abc.SupportsRevoking.revoke`."""
        return await self._operating.revoke(name, token, reason)

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
        joining = asyncio.get_running_loop().create_task(self._join(claim), context=Context())
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

        A try may have been granted before the claim had a waiter, or since a deletion has failed, so this looks at the
        held keys, too. It raises no error, which would replace the cancellation that ends the wait.
        """
        try:
            waiter = await self._joined(joining)
        except BaseException:  # cancelled again, and the request may still put the key
            if self._leases.find(key := self._keys.own(claim)) is None:
                self._leases.pending_deletes.add(key, self._leases.now(), may_return=True)
            raise
        if waiter is not None:
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

    async def _joined(self, joining: asyncio.Task[EtcdWaiter]) -> EtcdWaiter | None:
        """
        The waiter, if it has joined the line.

        A wait that is cancelled leaves its request under way until the answer: etcd may carry out a request whose
        connection was closed after the deletion, and the key would stay in the line as long as its lease.
        """
        try:
            if not joining.done():
                with move_on_after(_JOINING, shield=True):
                    await asyncio.wait((joining,))
        finally:
            joining.cancel()  # unless it was answered
        failed = not joining.done() or joining.cancelled() or joining.exception()
        return None if failed else joining.result()

    async def aclose(self) -> None:
        """Close the connections. Grants stay until they are released or expire."""
        await self._losses.aclose()
        await self._delete_the_rest()
        await self._leases.aclose()
        await self._gateway.aclose()

    async def _delete_the_rest(self) -> None:
        """
        Delete once more what is not confirmed as deleted: no keep-alive of this client will.

        Such are places in a line that were left while etcd was slow, and those of waiters whose loop was closed. As
        long as the lease of such a key lasts, and that is a whole ttl, the claims behind it would wait.
        """
        now = self._leases.now()
        for claim in self._waiters.pop_orphans():
            self._leases.pending_deletes.add(self._keys.own(claim), now, may_return=True)
        with move_on_after(LEAVING), suppress(BackendError):
            await self._leases.delete_pending("queue", self._leases.pending_deletes.never_confirmed())


def from_url(url: str, **options: object) -> EtcdBackend:
    """
    Make a backend for ``etcd://[user:password@]host:2379,host:2379`` or ``etcd+https://``; see `EtcdBackend`.

    Raises:
        ConfigurationError: the URL names no member, or an option is unknown or cannot work.
    """
    endpoints, chosen = read_url(url, take_options(url, options, option_names(EtcdBackend, besides={"tls"})))
    return EtcdBackend(endpoints, **chosen)
