"""
Locks in etcd, through its JSON gateway: no gRPC.

    connect("etcd://etcd1:2379,etcd2:2379,etcd3:2379")
    connect("etcd+https://user:password@etcd1:2379?ca=/etc/ssl/etcd.pem")

Tokens: the revision of etcd that created the holder's key. Clock: that of etcd's leader. Waiters:
first come, first served, each woken by a watch on the one before it.

    __init__.py     the face: what the answers mean for a claim
    _renewals.py    many renewals in a few requests
    _line.py        who waits, and how it is woken
    _losses.py      grants that end behind their holder's back
    _watches.py     what a watch tells
    _leases.py      leases of etcd that many locks share
    _debts.py       keys that are to be deleted
    _calls.py       what is asked of etcd
    _keys.py        what a lock's keys are called
"""

from __future__ import annotations

import os
import ssl
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress

import anyio

from fencing_sdk._etcd.json_codec import Json, UnreadableError, compared
from fencing_sdk._etcd.opening import make_gateway, parts_of
from fencing_sdk._http.options import read_numbers
from fencing_sdk._values.claim import Claim, Grant, Held, Holder, Renewal
from fencing_sdk.abc import LossNotice, Turn
from fencing_sdk.backends import take_options
from fencing_sdk.backends._shared.unanswered_requests import UnansweredRequests
from fencing_sdk.backends.etcd._calls import Calls, Standing
from fencing_sdk.backends.etcd._keys import DEFAULT_PREFIX, Keys, check_prefix, holder
from fencing_sdk.backends.etcd._leases import BACKEND, Leases, SharedLease
from fencing_sdk.backends.etcd._line import Line, Place
from fencing_sdk.backends.etcd._losses import Losses
from fencing_sdk.backends.etcd._renewals import Renewals
from fencing_sdk.errors import BackendError, BackendRefusedError, BackendUnavailableError

__all__ = ["EtcdBackend", "from_url"]

OPTIONS = ("prefix", "user", "password", "ca", "cert", "key", "ssl_context", "connect_timeout", "connections")
_LEAVING = 2.0
"""Seconds that leaving the line may take; what is left then is deleted with a later keep-alive."""
_LEAVE_TRIES = 2
"""One for the connection that is open, and one for the next if that was broken."""
_POLL_PART = 1 / 4
"""Part of a lease after which one who stands in line tries again, which also keeps its place alive."""
_LONGEST_POLL = 5.0
_LEAST_REMAINING = 0.5
"""Seconds: etcd tells whole ones, cut, and 0 is still alive."""


class EtcdBackend:
    """
    An etcd cluster, 3.4 or later, as the lock service.

    Args:
        endpoints: The members, each as ``host:port`` of its client URL. Any of them may be asked.

        tls: Speak HTTPS.

        prefix: The beginning of every key, so that a role can be limited to it.

        user: Who to log in as, where etcd asks for that, with *password*.

        ca: A file of the authorities that certificates are checked against, instead of the system's.

        cert: A file with a client certificate, and its key unless that is in *key*.

        ssl_context: Instead of *ca*, *cert* and *key*.

        connect_timeout: Seconds after which a member that accepts no connection is given up for the next.

        connections: The most that are open at once for requests. Each waiter has one more, for its watch, and all
            holders together have one.

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
        self._keys = Keys(check_prefix(prefix))
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
        self._calls = Calls(self._gateway, self._keys)
        self._leases = Leases(self._calls)
        self._line = Line(self._gateway, self._calls)
        self._losses = Losses(self._gateway, self._leases)
        self._doubts = UnansweredRequests()

    async def open(self) -> None:
        """See `fencing_sdk.abc.SupportsOpen.open`."""
        await self._calls.first("open", "?")

    async def acquire(self, claim: Claim) -> Grant | Held:
        """See `fencing_sdk.abc.Backend.acquire`."""
        started, key = self._leases.now(), self._keys.own(claim)
        self._doubts.begin(claim.owner)
        self._leases.give_up_overdue(started, [key])
        await self._leases.settle("acquire", key)
        place = self._line.place(claim)
        standing, lease = await self._try(claim, place, started)
        if standing.holds:
            taken = await self._leases.take_over("acquire", claim, standing, started)
            if taken is None or standing.own is None:
                raise BackendUnavailableError(BACKEND, "acquire", "the grant of an earlier try has ended meanwhile")
            if not self._leases.usable(key, standing.own.created):  # this claim left the line meanwhile
                raise BackendUnavailableError(BACKEND, "acquire", "the key is being deleted")
            if not standing.after_loss:  # or its release must be repeated
                self._doubts.answered(claim.owner)
            if place is not None:
                place.served = True
            self._losses.granted(key, claim)
            return Grant(standing.own.created, ttl=float(taken.ttl))
        if standing.after_loss:
            detail = "another key is first, and an earlier request may still be carried out"
            raise BackendUnavailableError(BACKEND, "acquire", detail)
        self._doubts.answered(claim.owner)
        return Held(None if place is None else min(_LONGEST_POLL, lease.ttl * _POLL_PART))

    async def _try(self, claim: Claim, place: Place | None, started: float) -> tuple[Standing, SharedLease]:
        if place is None:
            return await self._leases.on_lease(
                "acquire", claim, started, lambda lease: self._calls.take(claim, lease.number)
            )
        lease = await self._leases.fresh("acquire", claim.ttl, started)  # which keeps the place, too
        (standing,) = await self._calls.standings("acquire", [claim])
        if standing.own is None:  # this process stood still for longer than a ttl, or an operator removed it
            standing, lease = await self._stand("acquire", claim, started)
        if standing.own is not None:
            place.move(standing.own.created)
        return standing, lease

    async def _stand(self, operation: str, claim: Claim, started: float) -> tuple[Standing, SharedLease]:
        return await self._leases.on_lease(
            operation, claim, started, lambda lease: self._calls.stand(operation, claim, lease.number)
        )

    async def renew(self, claims: Sequence[Claim]) -> Sequence[Renewal]:
        """See `fencing_sdk.abc.Backend.renew`."""
        started = self._leases.now()
        self._leases.give_up_overdue(started, {self._keys.own(claim) for claim in claims})
        call = Renewals(self._calls, self._leases, claims, started)
        await call.run()
        if call.failures and not call.outcomes:
            raise call.failures[0]
        return [call.outcomes.get(self._keys.own(claim), Renewal.UNKNOWN) for claim in claims]

    async def release(self, claim: Claim) -> None:
        """See `fencing_sdk.abc.Backend.release`."""
        await self._delete("release", claim)

    async def _delete(self, operation: str, claim: Claim) -> None:
        """What is not confirmed stays owed, because the lease goes on with the other locks."""
        now, key = self._leases.now(), self._keys.own(claim)
        self._leases.forget(key)
        self._losses.ended(key)
        self._leases.debts.owe(key, now, stray=self._doubts.has(claim.owner))
        await self._leases.pay(operation, [key])

    async def inspect(self, name: str) -> Holder | None:
        """See `fencing_sdk.abc.Backend.inspect`."""
        first = await self._calls.first("inspect", name)
        remaining = None if first is None else await self._calls.remaining("inspect", first.lease)
        if first is None or remaining is None:
            return None
        try:
            return holder(name, first, max(_LEAST_REMAINING, remaining))
        except UnreadableError as error:
            raise BackendRefusedError(BACKEND, "inspect", str(error)) from error

    def comparison(self, name: str, owner: str, token: int) -> Json:
        """
        A comparison for a transaction of your own in the same etcd: *owner* still holds *name* with *token*.

        As the JSON gateway takes it, in ``compare`` of ``/v3/kv/txn``. *name* is the one that the
        store knows: with a namespace, that comes first. No request is sent.
        """
        return compared(self._keys.own(Claim(name, 1.0, owner)), "CREATE", "EQUAL", token)

    def on_loss(self, notice: LossNotice) -> Callable[[], None]:
        """See `fencing_sdk.abc.SupportsLossNotice.on_loss`."""
        return self._losses.on_loss(notice)

    def queue(self, claim: Claim) -> AbstractAsyncContextManager[Turn]:
        """See `fencing_sdk.abc.SupportsQueue.queue`."""
        return self._queue(claim)

    @asynccontextmanager
    async def _queue(self, claim: Claim) -> AsyncIterator[Turn]:
        place = None
        try:
            place = await self._join(claim)
            yield place
        finally:
            await self._leave(claim, place)

    async def _join(self, claim: Claim) -> Place:
        started, key = self._leases.now(), self._keys.own(claim)
        self._doubts.begin(claim.owner)
        await self._leases.settle("queue", key)
        standing, lease = await self._stand("queue", claim, started)
        if standing.own is None or not self._leases.usable(key, standing.own.created):
            raise BackendUnavailableError(BACKEND, "queue", "the place has gone as soon as it was made")
        if standing.own.lease != lease.number:  # made by another object with this claim
            await self._calls.adopt("queue", standing.own, lease.number)
        if not standing.after_loss:
            self._doubts.answered(claim.owner)
        return self._line.add(claim, standing.own.created)

    async def _leave(self, claim: Claim, place: Place | None) -> None:
        """
        Raises no error, which would replace the cancellation that ends the wait.

        A key that was granted stays, also where the try that was granted did not know of the place yet.
        """
        if place is not None:
            await self._line.remove(place)
            if place.served:
                return
        if self._leases.find(self._keys.own(claim)) is not None:
            return
        with anyio.move_on_after(_LEAVING, shield=True):
            for _ in range(_LEAVE_TRIES):
                with suppress(BackendError):
                    await self._delete("queue", claim)
                    return

    async def _leave_for(self, claims: Sequence[Claim]) -> None:
        """Take waiters out of line that cannot leave: a lease that is kept alive for others would keep them there."""
        now, keys = self._leases.now(), [self._keys.own(claim) for claim in claims]
        for key in keys:
            self._leases.debts.owe(key, now, stray=True)
        await self._leases.pay("queue", keys)

    async def aclose(self) -> None:
        """Close the connections. Grants stay until they are released or expire."""
        await self._losses.aclose()
        with suppress(BackendError):  # else they are owed, and deleted with a later keep-alive
            await self._leave_for(self._line.orphans())
        await self._leases.aclose()
        await self._gateway.aclose()


def from_url(url: str, **options: object) -> EtcdBackend:
    """
    Make a backend for ``etcd://[user:password@]host:2379,host:2379`` or ``etcd+https://``.

    Options: ``prefix``, ``user``, ``password``, ``ca``, ``cert``, ``key``, ``ssl_context``,
    ``connect_timeout``, ``connections``.

    Raises:
        ConfigurationError: the URL names no member, or an option is unknown or cannot work.
    """
    endpoints, chosen = parts_of(url, read_numbers(take_options(url, options, OPTIONS)))
    return EtcdBackend(endpoints, **chosen)
