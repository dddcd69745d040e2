"""
Locks in Redis or Valkey: one server, a master that Sentinels watch, or a cluster.

    connect("redis://:password@localhost:6379/0")            # rediss:// for TLS, unix:///path
    connect("redis+sentinel://a:26379,b:26379,c:26379/mymaster")
    connect("redis+cluster://a:7000,b:7000")
    connect(RedisBackend(client))                            # the connection settings of a client you have

Tokens: hybrid by default, so they grow even when the server loses its memory. Clock: the server's.
Waiters: first come, first served, woken by a message. Every server is reached by one connection.

    __init__.py      the face in the event loop
    _script.py       the Lua scripts, each one atomic step
    _keys.py         what a lock's keys are called
    _line.py         who waits, and how it is woken
    _losses.py       grants that end behind their holder's back
    _router.py       which server runs a script
    _node.py         one server: its connection, and a new one when it breaks
    _pipe.py         the protocol of a connection that everybody shares
    _settings.py     from a URL or a client to the servers
    _dial.py         from an address to an open connection
    _cluster.py      which server of a cluster has which slot
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

from fencing_sdk._values.claim import Claim, Grant, Held, Holder, Renewal
from fencing_sdk.abc import LossNotice, Turn
from fencing_sdk.backends import take_options
from fencing_sdk.backends._shared.lock_table import LINE_POLL
from fencing_sdk.backends.redis._calls import DEFAULT_RETENTION, Calls, holder, renewals, seconds_left, token_of
from fencing_sdk.backends.redis._cluster import SlotMap
from fencing_sdk.backends.redis._dial import Dialer
from fencing_sdk.backends.redis._keys import DEFAULT_PREFIX, Keys, check_prefix
from fencing_sdk.backends.redis._line import Line, Place
from fencing_sdk.backends.redis._losses import Losses
from fencing_sdk.backends.redis._node import Node, UnconfirmedError, ignore
from fencing_sdk.backends.redis._pipe import Pipe, Reply, ReplyError
from fencing_sdk.backends.redis._router import ManyMasters, OneMaster, Router
from fencing_sdk.backends.redis._script import GIVING_UP, Call
from fencing_sdk.backends.redis._settings import DRIVER_OPTIONS, Settings, settings_from_client, settings_from_url
from fencing_sdk.backends.redis._translation import our_errors

__all__ = ["RedisBackend", "from_url"]

OPTIONS = ("prefix", "tokens", "fair", "min_replicas", "retention")
_BATCH = 200
"""Leases that one run of a script renews: it keeps the server busy for less than a millisecond."""


class RedisBackend:
    """
    A lock service in Redis or Valkey, from version 6.2 on.

    Args:
        client: An asyncio client of redis-py or valkey-py: ``Redis``, ``RedisCluster``, or the one that
            a ``Sentinel`` makes. Only its settings are used: the backend has one connection of its own
            for each server, and leaves the client as it is.

        prefix: The beginning of every key, so that an ACL rule can name them: ``~{fencing:*``.

        tokens: ``"hybrid"``, or ``"counter"`` for 1, 2, 3, which start again when the server loses its data.

        fair: Whether waiters are served in the order of their arrival. If not, a free lock goes to
            whoever asks first; waiters are still woken one at a time.

        min_replicas: Replicas that must have a grant or a renewal before it counts. A grant that they
            do not confirm is undone, and tried again.

        retention: Seconds that the last token of a lock is kept after its last grant. Hybrid tokens
            keep growing afterwards, unless the server's clock was set back by more than that.

    Raises:
        ConfigurationError: an argument cannot work. No I/O happens before the first call.
    """

    def __init__(
        self,
        client: object,
        *,
        prefix: str = DEFAULT_PREFIX,
        tokens: str = "hybrid",
        fair: bool = True,
        min_replicas: int = 0,
        retention: float = DEFAULT_RETENTION,
    ) -> None:
        settings = client if isinstance(client, Settings) else settings_from_client(client)
        keys = Keys(check_prefix(prefix))
        self._calls = Calls(keys, tokens=tokens, fair=fair, retention=retention, min_replicas=min_replicas)
        self._router = self._route(settings)
        sharded = isinstance(self._router, ManyMasters)
        self._batch = 1 if sharded else _BATCH  # each lock of a cluster has a slot of its own
        self._line = Line(self._router, self._calls, keys, sharded=sharded)
        self._losses = Losses(self.renew)

    def _route(self, settings: Settings) -> Router:
        place = settings.place

        def make_node(dialer: Dialer) -> Node:
            return Node(dialer, on_push=self._hear, greet=self._greet, alone=not isinstance(place, SlotMap))

        return ManyMasters(place, make_node) if isinstance(place, SlotMap) else OneMaster(place, make_node)

    def _greet(self, node: Node, pipe: Pipe) -> None:
        for script in GIVING_UP:
            pipe.call("SCRIPT", "LOAD", script.text).add_done_callback(ignore)  # not permitted: it is told when it asks
        self._losses.greet(pipe)
        self._line.greet(node, pipe)

    def _hear(self, _: Node, message: list[Reply]) -> None:
        self._losses.hear(message)
        self._line.hear(message)

    async def open(self) -> None:
        """See `fencing_sdk.abc.SupportsOpen.open`."""
        with our_errors("open"):
            await (await self._router.node(self._calls.lease("?"))).pipe()

    async def acquire(self, claim: Claim) -> Grant | Held:
        """See `fencing_sdk.abc.Backend.acquire`."""
        place, call = self._line.place(claim), self._calls.acquire(claim)
        with our_errors("acquire"):
            reply = await self._grant(call, claim)
            if not isinstance(reply, bytes):
                return await self._refused(reply, place)
            number = token_of(reply)
        self._losses.granted(call.keys[0], claim)
        if place is not None:
            place.served = True
        return Grant(number)

    async def _grant(self, call: Call, claim: Claim) -> Reply:
        try:
            return await self._router.run(call)
        except UnconfirmedError as error:
            if not isinstance(error.reply, bytes):
                return error.reply
            await self._give_back(claim)  # another server could grant the lock again
            raise

    async def _refused(self, reply: Reply, place: Place | None) -> Held:
        left, in_line = seconds_left(reply)
        if place is None:
            return Held(left)
        if not (in_line and self._line.hears(place)):
            await self._line.stay(place)  # passed over after a silence, or its server has left the cluster
        return Held(LINE_POLL if left is None else min(left, LINE_POLL))

    async def renew(self, claims: Sequence[Claim]) -> Sequence[Renewal]:
        """See `fencing_sdk.abc.Backend.renew`."""
        batches = [claims[start : start + self._batch] for start in range(0, len(claims), self._batch)]
        outcomes = await self._router.run_all([self._calls.renew(batch) for batch in batches])
        failures = [outcome for outcome in outcomes if isinstance(outcome, Exception)]
        if failures and len(failures) == len(outcomes):
            with our_errors("renew"):
                raise failures[0]
        answers = zip(batches, outcomes, strict=True)
        return [renewal for batch, outcome in answers for renewal in renewals(outcome, len(batch))]

    async def release(self, claim: Claim) -> None:
        """See `fencing_sdk.abc.Backend.release`."""
        self._losses.ended(self._calls.lease(claim.name), claim)
        with our_errors("release"):
            await self._give_back(claim)

    async def _give_back(self, claim: Claim) -> None:
        try:
            await self._router.run(self._calls.release(claim))
        except ReplyError as error:
            if error.code != "TRYAGAIN":
                raise
            # The slot is on the move and its keys are on two servers. Whoever stands in line asks once a second.
            await self._router.run(self._calls.release_alone(claim))

    async def inspect(self, name: str) -> Holder | None:
        """See `fencing_sdk.abc.Backend.inspect`."""
        with our_errors("inspect"):
            return holder(name, await self._router.run(self._calls.inspect(name)))

    async def aclose(self) -> None:
        """Close the connections. Grants stay until they are released or expire."""
        await self._losses.aclose()
        await self._router.aclose()

    def on_loss(self, notice: LossNotice) -> Callable[[], None]:
        """See `fencing_sdk.abc.SupportsLossNotice.on_loss`."""
        return self._losses.on_loss(notice)

    def queue(self, claim: Claim) -> AbstractAsyncContextManager[Turn]:
        """See `fencing_sdk.abc.SupportsQueue.queue`."""
        return self._stand(claim)

    @asynccontextmanager
    async def _stand(self, claim: Claim) -> AsyncIterator[Turn]:
        with our_errors("queue"):
            place = await self._line.stand(claim)
        try:
            yield place
        finally:
            await self._line.leave(place)


def from_url(url: str, **options: object) -> RedisBackend:
    """
    Make a backend for any of the URLs of this backend; `RedisBackend` explains the options.

    The driver's own options, such as ``ssl_ca_certs``, may stand in the URL's query too.

    Raises:
        ConfigurationError: the URL or an option cannot be used.
    """
    chosen = take_options(url, options, (*OPTIONS, *DRIVER_OPTIONS))
    ours: dict[str, Any] = {name: chosen.pop(name) for name in OPTIONS if name in chosen}
    return RedisBackend(settings_from_url(url, chosen), **ours)  # what is wrong with one is found there
