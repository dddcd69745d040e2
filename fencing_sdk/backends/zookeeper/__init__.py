"""
Locks in ZooKeeper, over kazoo.

    connect("zk://zk1:2181,zk2:2181,zk3:2181/shop")
    connect("zk://user:password@zk1,zk2,zk3/shop?tls=true&ca=/etc/ssl/zookeeper.pem")

Tokens: the number of the transaction that created the holder's node. Clock: the leader's. Waiters:
first come, first served, each watching the one ahead. All locks of one ttl share a session.

    __init__.py       the backend
    requests.py       the requests to ZooKeeper: the recipe
    nodes.py          how a lock is written down, and the nodes of this backend object
    waiters.py        what wakes a waiter, and the step by which a claim is granted
    renewals.py       many claims in one batch
    ends.py           the ends of grants, those behind their holder's back too, and nodes that must go
    operating.py      what operators ask: who holds, who waits, and that a grant ends
    errors.py         from kazoo's errors to those of the contract
    options.py        from a URL and options to the servers
    connection/       sessions, and kazoo in threads of its own
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from fencing_sdk._values.claim import Busy, Claim, Grant, Holder, Listing, Renewal, Revoked, Waiting
from fencing_sdk._values.loop_owner import Uncopied
from fencing_sdk._values.options import option_names
from fencing_sdk.abc import LossNotice, WaiterNotice
from fencing_sdk.backends import take_options
from fencing_sdk.backends._shared.background_task import BackgroundTasks
from fencing_sdk.backends._shared.losses import with_reasons
from fencing_sdk.backends._shared.node_line import refusal
from fencing_sdk.backends._shared.waiters import KeptPlace, KeptPlaces, Turn
from fencing_sdk.backends.zookeeper.connection.session import ZooKeeperSession, ZooKeeperSessions
from fencing_sdk.backends.zookeeper.ends import CleanUp, ZooKeeperLossWatcher
from fencing_sdk.backends.zookeeper.errors import BACKEND, our_errors
from fencing_sdk.backends.zookeeper.nodes import LineNode, OwnNode, OwnNodes, key_of, mark_of
from fencing_sdk.backends.zookeeper.operating import ZooKeeperOperating
from fencing_sdk.backends.zookeeper.options import read_settings, read_url
from fencing_sdk.backends.zookeeper.renewals import ZooKeeperRenewals
from fencing_sdk.backends.zookeeper.requests import Recipe
from fencing_sdk.backends.zookeeper.waiters import ZooKeeperWaitQueue
from fencing_sdk.errors import BackendUnavailableError

__all__ = ["ZooKeeperBackend", "from_url"]


class ZooKeeperBackend(Uncopied):
    """
    A ZooKeeper ensemble, 3.5 or later, as the lock service.

    Args:
        hosts: The servers, each as ``host:port``, or ``host`` for port 2181. Those that are down are passed over.

        root: The node below which the locks are. It is made when it is missing.

        user: With *password*, a login by the scheme ``digest``.

        password: See *user*.

        acl: The access to the nodes: ``"open"`` for all clients, ``"creator"`` for clients with the same login, or a
            list of ``kazoo.security.ACL``. The default is ``"creator"`` with a login, else ``"open"``.

        sasl: The ``sasl_options`` of kazoo, for a login by SASL.

        tls: Speak TLS. Certificates and host names are checked; there is no way to switch that off.

        ca: A file of the authorities that certificates are checked against, instead of the system's.

        cert: A file with the client's certificate, and its key if there is no *key*.

        key: A file with the client's key.

        connect_timeout: Seconds to wait for a server's answer before the driver tries the next one.

    Raises:
        ConfigurationError: an argument cannot work. Nothing is sent before the first call.
    """

    def __init__(
        self,
        hosts: Sequence[str],
        *,
        root: str = "/fencing",
        user: str | None = None,
        password: str | None = None,
        acl: object = None,
        sasl: Mapping[str, str] | None = None,
        tls: bool = False,
        ca: str | None = None,
        cert: str | None = None,
        key: str | None = None,
        connect_timeout: float = 1.0,
    ) -> None:
        settings = read_settings(
            hosts,
            root=root,
            login=(user, password),
            acl=acl,
            sasl=sasl,
            tls=tls,
            files={"ca": ca, "cert": cert, "key": key},
            connect_timeout=connect_timeout,
        )
        self._settings = settings
        self._recipe = Recipe(settings)
        self._own_nodes = OwnNodes()
        self._operating = ZooKeeperOperating(self._recipe, self._own_nodes)
        tasks = BackgroundTasks()
        self._losses = ZooKeeperLossWatcher(self._recipe, self._own_nodes, self._operating, tasks)
        self._clean_up = CleanUp(self._recipe, self._own_nodes, self._losses, tasks)
        self._sessions = ZooKeeperSessions(settings, on_resumed=self._clean_up.resumed, on_ended=self._clean_up.ended)
        self._places = KeptPlaces()
        self._wait_queue = ZooKeeperWaitQueue(self._recipe, self._sessions, self._own_nodes, self._clean_up)
        self._renewals = ZooKeeperRenewals(self._recipe, self._sessions, self._own_nodes, self._clean_up)

    async def open(self) -> None:
        """See `fencing_sdk.abc.SupportsOpen.open`."""
        self._notice_fork()
        with our_errors("open"):
            await self._sessions.any().ready()

    def _notice_fork(self) -> None:
        if self._sessions.forked():
            self._own_nodes.clear()
            self._clean_up.forget()

    async def acquire(self, claim: Claim) -> Grant | Busy:
        """See `fencing_sdk.abc.Backend.acquire`."""
        self._notice_fork()
        with our_errors("acquire"):
            return await self._wait_queue.acquire(claim)

    async def renew(self, claims: Sequence[Claim]) -> Sequence[Renewal | Revoked]:
        """See `fencing_sdk.abc.Backend.renew`."""
        self._notice_fork()
        with our_errors("renew"):
            renewals = await self._renewals.renew(claims)
        return await with_reasons(claims, renewals, self._reasons)

    async def _reasons(self, claims: Sequence[Claim]) -> Sequence[str | None]:
        return await self._operating.reasons(await self._any_session(), claims)

    async def release(self, claim: Claim) -> Renewal | Revoked | None:
        """See `fencing_sdk.abc.Backend.release`."""
        self._notice_fork()
        with our_errors("release"):
            own_node = self._own_nodes.get(key_of(claim))
            session = self._sessions.of(claim.ttl) if own_node is None else own_node.session
            expired = own_node is not None and not own_node.held
            if own_node is not None:
                own_node.finish()
                own_node.woken.set()
            try:
                there, line = await self._release(claim, session, own_node)
            except BaseException:
                self._clean_up.sweep_later(claim, session)
                raise
        if there and not expired:
            return None
        return (await with_reasons([claim], [refusal(claim.mode, others=bool(line))], self._reasons))[0]

    async def _release(
        self, claim: Claim, session: ZooKeeperSession, own_node: OwnNode | None
    ) -> tuple[bool, list[LineNode]]:
        """Delete the claim's node; return whether it was there, and, if it was not known, the other nodes."""
        if session.error is not None:  # its nodes went with it; another client may have one with this claim
            session = self._sessions.of(claim.ttl)
        await session.ready()
        there = own_node is not None and await self._recipe.remove(session, own_node.path)
        line: list[LineNode] = []
        try:
            line = [] if there else await self._recipe.look(session, claim.name)
        except Exception:
            if own_node is None:
                raise
            self._clean_up.sweep_later(claim, session)  # the loss is known: a release that is repeated would hide it
        for node in line:
            if node.mark == mark_of(claim.owner):
                there = await self._recipe.remove(session, self._recipe.paths.node(claim.name, node)) or there
        if own_node is not None:
            self._own_nodes.drop(own_node)
        return there, line

    async def inspect(self, name: str) -> Holder | None:
        """See `fencing_sdk.abc.Backend.inspect`."""
        return next(iter(await self.holders(name)), None)

    async def holders(self, name: str) -> Sequence[Holder]:
        """See `fencing_sdk.abc.SupportsShares.holders`."""
        with our_errors("inspect"):
            return await self._operating.holders(await self._any_session(), [name])

    async def list_holders(self, prefix: str, cursor: str | None, limit: int) -> Listing:
        """See `fencing_sdk.abc.SupportsListing.list_holders`."""
        with our_errors("list"):
            return await self._operating.page(await self._any_session(), prefix, cursor, limit)

    async def list_waiters(self, name: str) -> Sequence[Waiting]:
        """See `fencing_sdk.abc.SupportsListing.list_waiters`."""
        with our_errors("list"):
            return await self._operating.waiters(await self._any_session(), name)

    async def revoke(self, name: str, token: int, reason: str) -> bool:
        """See `fencing_sdk.abc.SupportsRevoking.revoke`."""
        with our_errors("revoke"):
            return await self._operating.revoke(await self._any_session(), name, token, reason)

    async def _any_session(self) -> ZooKeeperSession:
        self._notice_fork()
        session = self._sessions.any()
        await session.ready()
        return session

    async def aclose(self) -> None:
        """Close the sessions, except of those that still have grants: they last until their timeout."""
        self._notice_fork()
        await self._clean_up.aclose()
        await self._sessions.aclose(keep={own_node.session for own_node in self._own_nodes.all() if own_node.held})

    def on_loss(self, notice: LossNotice) -> Callable[[], None]:
        """See `fencing_sdk.abc.SupportsLossNotice.on_loss`."""
        return self._losses.on_loss(notice)

    def stand(self, claim: Claim, notify: WaiterNotice, *, hand_over: bool) -> KeptPlace:  # noqa: ARG002  (it only wakes)
        """See `fencing_sdk.abc.SupportsLine.stand`."""
        return self._places.stand(self._in_line, claim, notify)

    @asynccontextmanager
    async def _in_line(self, claim: Claim) -> AsyncIterator[Turn]:
        self._notice_fork()
        with our_errors("queue"):
            own_node = await self._wait_queue.join(claim)
        try:
            yield _NodeTurn(own_node)
        finally:
            if own_node.ends_at is None and not own_node.over:
                await self._clean_up.leave(own_node)


class _NodeTurn:
    """The turn of a waiter that has a node."""

    def __init__(self, own_node: OwnNode) -> None:
        self._own_node = own_node

    async def wait(self) -> None:
        """See `fencing_sdk.backends._shared.waiters.Turn.wait`."""
        await self._own_node.woken.wait()
        self._own_node.woken.clear()
        if self._own_node.over:
            raise BackendUnavailableError(BACKEND, "queue", "the place in the line is lost; join again")


def from_url(url: str, **options: object) -> ZooKeeperBackend:
    """
    Make a backend for ``zk://host:2181,host:2181/root``; `ZooKeeperBackend` explains the options.

    Raises:
        ConfigurationError: the URL or an option cannot be used.
    """
    ours = option_names(ZooKeeperBackend, besides={"root", "user", "password"})  # these stand in front of the query
    own: dict[str, Any] = take_options(url, options, ours)
    hosts, found = read_url(url)
    return ZooKeeperBackend(hosts, **(own | found))
