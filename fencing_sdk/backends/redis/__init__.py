"""
Locks in Redis or Valkey: one server, a master that Sentinels watch, or a cluster.

    connect("redis://:password@localhost:6379/0")            # rediss:// for TLS, unix:///path
    connect("redis+sentinel://a:26379,b:26379,c:26379/mymaster")
    connect("redis+cluster://a:7000,b:7000")
    connect(RedisBackend(client))                            # the connection settings of a client you have

Tokens: hybrid by default, so they keep growing when the server loses its memory. Clock: the server's.
Waiters: first come, first served, woken by a message. The backend has one connection to each server.

    __init__.py         the backend, as the client calls it
    requests.py         the requests to the server and how its answers are read; the keys of a lock
    posted_requests.py  acquire and release without a task
    waiters.py          the waiters of one client, and the messages that wake them
    losses.py           notices grants that end behind their holder's back
    operating.py        lists what is held and who waits
    scripts.py          the Lua scripts beside it, each one atomic step at the server
    options.py          reads a URL with the options of redis-py, or the settings of a client of redis-py or valkey-py
    errors.py           translates errors of the driver to those of the contract
    connection/         finds the servers, and keeps one connection to each:
        router.py       which server runs a script, by the map of a cluster
        node.py         one server: its connection, and the next one when it breaks
        pipe.py         the protocol of a connection that all requests share
        dial.py         opens a connection to a server, or to the master that Sentinels name
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

from fencing_sdk._values.claim import LOCK, Busy, Claim, Grant, Holder, Listing, Renewal, Revoked, Waiting
from fencing_sdk._values.loop_owner import Uncopied
from fencing_sdk._values.tasks import retrieve
from fencing_sdk._values.url import option_names
from fencing_sdk.abc import LossNotice, WaiterNotice
from fencing_sdk.abc._powers import PendingPost, PostOutcome
from fencing_sdk.backends import take_options
from fencing_sdk.backends._shared.losses import why_not, with_reasons
from fencing_sdk.backends.redis.connection.dial import RedisDialer, SentinelDialer, ServerDialer
from fencing_sdk.backends.redis.connection.node import RedisNode, UnconfirmedError, outcome_of
from fencing_sdk.backends.redis.connection.pipe import Pipe, Reply, ReplyError
from fencing_sdk.backends.redis.connection.router import ClusterRouter, SingleMasterRouter, SlotMap
from fencing_sdk.backends.redis.errors import translating
from fencing_sdk.backends.redis.losses import RedisLossWatcher
from fencing_sdk.backends.redis.operating import RedisListing
from fencing_sdk.backends.redis.options import DRIVER_OPTIONS, servers_of_client, servers_of_url
from fencing_sdk.backends.redis.posted_requests import RedisPosts
from fencing_sdk.backends.redis.requests import (
    DEFAULT_PREFIX,
    NO_HOLDER,
    RedisKeys,
    RedisRequests,
    check_prefix,
    read_acquired,
    read_holder,
    read_holders,
    read_release,
    read_renewals,
    read_transfer,
)
from fencing_sdk.backends.redis.scripts import PRELOADED, ScriptCall
from fencing_sdk.backends.redis.waiters import RedisWaiter, RedisWaiters
from fencing_sdk.errors import BackendError, BackendRefusedError

__all__ = ["RedisBackend", "from_url"]

_BATCH = 200
"""Leases that one run of a script renews or looks at: it keeps the server busy for less than a millisecond."""


class RedisBackend(Uncopied):
    """
    A lock service in Redis or Valkey, from version 6.2 on.

    Args:
        client: A client of redis-py or valkey-py, for asyncio or threads: ``Redis``, ``RedisCluster``, or the one that
            a ``Sentinel`` makes. The backend copies its settings, and opens one connection of its own to
            each server; it does not use the client.

        prefix: The beginning of every key; an ACL rule can name them: ``~{fencing:*``.

        tokens: ``"hybrid"``, or ``"counter"`` for 1, 2, 3, which start again when the server loses its data.

        min_replicas: Replicas that must have a grant or a renewal before it counts. The backend undoes a
            grant that they do not confirm, and tries again.

    Raises:
        ConfigurationError: an argument has a wrong type or value. No I/O happens before the first call.
    """

    def __init__(
        self, client: object, *, prefix: str = DEFAULT_PREFIX, tokens: str = "hybrid", min_replicas: int = 0
    ) -> None:
        self._servers = (
            client if isinstance(client, ServerDialer | SentinelDialer | SlotMap) else servers_of_client(client)
        )
        keys = RedisKeys(check_prefix(prefix))
        sharded = isinstance(self._servers, SlotMap)
        self._requests = RedisRequests(keys, tokens=tokens, min_replicas=min_replicas, sharded=sharded)

        def make_node(dialer: RedisDialer) -> RedisNode:
            return RedisNode(dialer, on_push=self._on_push, on_connect=self._on_connect, in_cluster=sharded)

        self._router = (
            ClusterRouter(self._servers, make_node)
            if isinstance(self._servers, SlotMap)
            else SingleMasterRouter(make_node(self._servers))
        )
        self._batch = 1 if sharded else _BATCH  # on a cluster each lock has a slot of its own
        self._losses = RedisLossWatcher(self._look)
        self._listing = RedisListing(keys, self._requests, self._router, batch=self._batch)
        self._waiters = RedisWaiters(self._router, self._requests, keys, self._losses, sharded=sharded)
        posts = RedisPosts(keys, self._requests, self._router, self._losses, self._reasons)
        self._posts = None if self._requests.replicas else posts

    def _on_connect(self, node: RedisNode, pipe: Pipe) -> None:
        for script in PRELOADED:  # if the server does not permit it, the first use loads the script
            pipe.call("SCRIPT", "LOAD", script.text).add_done_callback(retrieve)
        self._losses.on_connect(pipe)
        self._waiters.on_connect(node, pipe)

    def _on_push(self, message: list[Reply]) -> None:
        self._losses.on_push(message)
        self._waiters.on_push(message)

    async def open(self) -> None:
        """See `fencing_sdk.abc.SupportsOpen.open`."""
        with translating("open"):
            await (await self._router.node(self._requests.lease("?"))).pipe()

    async def acquire(self, claim: Claim) -> Grant | Busy:
        """See `fencing_sdk.abc.Backend.acquire`."""
        call = self._requests.acquire(claim)
        with translating("acquire"):
            try:
                answer = read_acquired(await self._router.run(call))
            except UnconfirmedError as error:
                answer = read_acquired(error.reply)
                if isinstance(answer, Grant):  # too few replicas have it, so another server could grant it again
                    await self._run_release(self._requests.release(claim), claim)
                    raise
        if isinstance(answer, Grant):
            self._losses.granted(call.keys[0], claim, answer.token)
        return answer

    def post_acquire(
        self, claim: Claim, answer: Callable[[Grant | Busy | PostOutcome | BackendError], None]
    ) -> PendingPost | None:
        """See ``abc._powers.SupportsPosts.post_acquire``."""
        return None if self._posts is None or claim.mode is not LOCK else self._posts.acquire(claim, answer)

    def post_release(
        self, claim: Claim, answer: Callable[[PostOutcome | Renewal | Revoked | BackendError], None]
    ) -> PendingPost | None:
        """See ``abc._powers.SupportsPosts.post_release``."""
        return None if self._posts is None or claim.mode is not LOCK else self._posts.release(claim, answer)

    async def renew(self, claims: Sequence[Claim]) -> Sequence[Renewal | Revoked]:
        """See `fencing_sdk.abc.Backend.renew`."""
        with translating("renew"):
            shares = [claim for claim in claims if claim.mode is not LOCK and claim.mode.shared]
            if not shares:
                renewals = await self._renew(_batches(claims, self._batch))
            else:  # by a script of their own
                alone = [claim for claim in claims if not claim.mode.shared]
                found = await self._renew([*_batches(alone, self._batch), *_batches(shares, self._batch)])
                of_alone, of_shares = iter(found[: len(alone)]), iter(found[len(alone) :])
                renewals = [next(of_shares if claim.mode.shared else of_alone) for claim in claims]
        return await with_reasons(claims, renewals, self._reasons)

    async def _renew(self, batches: Sequence[Sequence[Claim]]) -> list[Renewal]:
        """Renew each batch by a call. Raise only if no call has an answer."""
        calls = [self._requests.renew(batch) for batch in batches]
        for call, batch in zip(calls, batches, strict=True):
            if not batch[0].mode.shared:
                self._losses.renewing(call.keys, batch)
        outcomes = await self._router.run_all(calls)
        for number, batch in enumerate(batches):
            if len(batch) == 1 and batch[0].mode.shared:
                for call in self._requests.renew_share_alone(batch[0]):
                    outcome = outcomes[number]
                    if not (isinstance(outcome, ReplyError) and outcome.code == "TRYAGAIN"):
                        break  # else its slot is moving, and the server has not all of its keys
                    outcomes[number] = await outcome_of(self._router.run(call))
        failures = [outcome for outcome in outcomes if isinstance(outcome, Exception)]
        if failures and len(failures) == len(outcomes):
            raise failures[0]
        answers = zip(batches, outcomes, strict=True)
        return [renewal for batch, outcome in answers for renewal in read_renewals(outcome, len(batch))]

    async def _look(self, claims: Sequence[Claim]) -> Sequence[Renewal | Revoked]:
        """Ask whether *claims* are still held, all of them shares or none. That renews what is not a share."""
        if not claims[0].mode.shared:
            return await self.renew(claims)
        of_name = [list(some) for _, some in groupby(claims, key=lambda claim: claim.name)]
        batches = [batch for some in of_name for batch in _batches(some, _BATCH)]
        outcomes = await self._router.run_all([self._requests.check_shares(batch) for batch in batches])
        answers = zip(batches, outcomes, strict=True)
        renewals = [renewal for batch, outcome in answers for renewal in read_renewals(outcome, len(batch))]
        return await with_reasons(claims, renewals, self._reasons)

    async def release(self, claim: Claim) -> Renewal | Revoked | None:
        """See `fencing_sdk.abc.Backend.release`."""
        key = self._requests.lease(claim.name)
        call = self._requests.release(claim, waits=not self._losses.holds(key, claim))
        if self._losses.ended(key, claim) and claim.mode.shared:
            call = call._replace(follow=(key,))  # the release ends the tracking of the lease, so it is read again
        with translating("release"):
            refusal = read_release(await self._run_release(call, claim))
        if refusal is None or self._losses.may_be_released(claim):
            return None
        return (await with_reasons([claim], [refusal], self._reasons))[0]

    async def transfer(self, of: Claim, to: Claim) -> Grant | Renewal | Revoked:
        """See `fencing_sdk.abc.SupportsTransfer.transfer`."""
        self._losses.ended(self._requests.lease(of.name), of)
        with translating("transfer"):
            try:
                outcome = read_transfer(await self._router.run(self._requests.transfer(of, to)))
            except ReplyError as error:
                if error.code != "TRYAGAIN":
                    raise
                detail = "the slot is moving, and its keys are on two servers"
                raise BackendRefusedError(type(self).__name__, "transfer", detail) from error
        return outcome if isinstance(outcome, Grant) else await why_not(of, to, outcome, self._reasons)

    async def _run_release(self, call: ScriptCall, claim: Claim) -> Reply:
        try:
            return await self._router.run(call)
        except ReplyError as error:
            if error.code != "TRYAGAIN":
                raise
            # The slot is moving, and its keys are on two servers. The waiters in the line try once a second.
            return await self._router.run(self._requests.release_alone(claim))

    async def inspect(self, name: str) -> Holder | None:
        """See `fencing_sdk.abc.Backend.inspect`."""
        with translating("inspect"):
            holder = read_holder(name, await self._router.run(self._requests.inspect(name)))
        if holder is None or holder.id != NO_HOLDER:
            return holder
        return max(await self.holders(name), key=lambda holder: holder.remaining, default=None)

    async def holders(self, name: str) -> Sequence[Holder]:
        """See `fencing_sdk.abc.SupportsShares.holders`."""
        with translating("inspect"):
            return read_holders(name, await self._router.run(self._requests.holders(name)))

    async def list_holders(self, prefix: str, cursor: str | None, limit: int) -> Listing:
        """See `fencing_sdk.abc.SupportsListing.list_holders`."""
        with translating("list"):
            return await self._listing.page(prefix, cursor, limit)

    async def list_waiters(self, name: str) -> Sequence[Waiting]:
        """See `fencing_sdk.abc.SupportsListing.list_waiters`."""
        with translating("list"):
            return await self._listing.waiters(name)

    async def revoke(self, name: str, token: int, reason: str) -> bool:
        """See `fencing_sdk.abc.SupportsRevoking.revoke`."""
        with translating("revoke"):
            revoked = await self._router.run(self._requests.revoke(name, token, reason))
        self._losses.changed(self._requests.lease(name))
        return revoked == 1

    async def _reasons(self, claims: Sequence[Claim]) -> list[str | None]:
        """Ask why the grants of *claims* were revoked. The server keeps that for as long as they would have lasted."""
        answers = await self._router.run_all([self._requests.revoked(claim) for claim in claims])
        return [answer.decode(errors="replace") if isinstance(answer, bytes) else None for answer in answers]

    async def aclose(self) -> None:
        """Close the connections. Grants stay until they are released or expire."""
        await self._waiters.aclose()
        await self._losses.aclose()
        if self._posts is not None:
            await self._posts.aclose()
        await self._router.aclose()

    def on_loss(self, notice: LossNotice) -> Callable[[], None]:
        """See `fencing_sdk.abc.SupportsLossNotice.on_loss`."""
        return self._losses.on_loss(notice)

    def stand(self, claim: Claim, notify: WaiterNotice, *, hand_over: bool) -> RedisWaiter:
        """See `fencing_sdk.abc.SupportsLine.stand`."""
        return self._waiters.stand(claim, notify, hand_over=hand_over)


def _batches(claims: Sequence[Claim], most: int) -> list[Sequence[Claim]]:
    return [claims[start : start + most] for start in range(0, len(claims), most)]


def from_url(url: str, **options: object) -> RedisBackend:
    """
    Make a backend for one of its URLs; `RedisBackend` explains the options.

    The driver's own options, such as ``ssl_ca_certs``, may stand in the URL's query too.

    Raises:
        ConfigurationError: the URL or an option cannot be used.
    """
    ours = option_names(RedisBackend)
    chosen = take_options(url, options, (*ours, *DRIVER_OPTIONS))
    own: dict[str, Any] = {name: chosen.pop(name) for name in ours if name in chosen}
    return RedisBackend(servers_of_url(url, chosen), **own)  # what remains are the driver's
