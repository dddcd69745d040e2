"""
Locks in ZooKeeper, by way of kazoo.

    connect("zk://zk1:2181,zk2:2181,zk3:2181/shop")
    connect("zk://user:password@zk1,zk2,zk3/shop?tls=true&ca=/etc/ssl/zookeeper.pem")

Tokens: the number of the transaction that created the holder's node. Clock: the leader's. Waiters:
first come, first served, each watching the one ahead. All locks of one ttl share a session.

    __init__.py       the face in the event loop
    _line.py          a claim, from the end of its line to the front
    _recipe.py        what is asked of ZooKeeper
    _renewals.py      many claims in one batch
    _upkeep.py        ends, nodes that must go, losses
    _stakes.py        what this backend has in each line
    _nodes.py         how a lock is written down
    _sessions.py      which session a lock is on
    _session.py       one session in the event loop
    _driver.py        kazoo, in a thread of its own
    _dial.py          how it reaches a server
    _requests.py      what it can be asked
    _options.py       from a URL to the servers
    _translation.py   errors
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from fencing_sdk._values.claim import Claim, Grant, Held, Holder, Renewal
from fencing_sdk.abc import LossNotice, Turn
from fencing_sdk.backends.zookeeper._line import Line
from fencing_sdk.backends.zookeeper._nodes import Node, mark_of, read_holder
from fencing_sdk.backends.zookeeper._options import read_settings, read_url
from fencing_sdk.backends.zookeeper._recipe import Recipe
from fencing_sdk.backends.zookeeper._renewals import Renewals
from fencing_sdk.backends.zookeeper._requests import NoNodeError
from fencing_sdk.backends.zookeeper._session import Session
from fencing_sdk.backends.zookeeper._sessions import Sessions
from fencing_sdk.backends.zookeeper._stakes import Stake, Stakes, key_of
from fencing_sdk.backends.zookeeper._translation import BACKEND, our_errors
from fencing_sdk.backends.zookeeper._upkeep import Upkeep
from fencing_sdk.errors import BackendUnavailableError

__all__ = ["ZooKeeperBackend", "from_url"]


class ZooKeeperBackend:
    """
    A ZooKeeper ensemble, 3.5 or later, as the lock service.

    Args:
        hosts: The servers, each as ``host:port``, or ``host`` for port 2181. Those that are down are passed over.

        root: The node below which the locks are. It is made when it is missing.

        user: With *password*, a login by the scheme ``digest``.

        password: See *user*.

        acl: Who may do what with the nodes: ``"anybody"``, ``"creator"`` for whoever has the same login, or a
            list of ``kazoo.security.ACL``. The default is ``"creator"`` with a login, else ``"anybody"``.

        sasl: The ``sasl_options`` of kazoo, for a login by SASL.

        tls: Speak TLS. Certificates and host names are checked; there is no way to switch that off.

        ca: A file of the authorities that certificates are checked against, besides the system's.

        certfile: A file with the client's certificate.

        keyfile: A file with its key.

        keyfile_password: What that is encrypted with.

        connect_timeout: Seconds after which a server that does not answer is given up for the next.

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
        certfile: str | None = None,
        keyfile: str | None = None,
        keyfile_password: str | None = None,
        connect_timeout: float = 1.0,
    ) -> None:
        settings = read_settings(
            hosts,
            root=root,
            login=(user, password),
            acl=acl,
            sasl=sasl,
            tls=tls,
            files={"ca": ca, "certfile": certfile, "keyfile": keyfile, "keyfile_password": keyfile_password},
            connect_timeout=connect_timeout,
        )
        self._recipe = Recipe(settings)
        self._stakes = Stakes()
        self._upkeep = Upkeep(self._recipe, self._stakes)
        self._sessions = Sessions(settings, on_resumed=self._upkeep.resumed, on_ended=self._upkeep.ended)
        self._line = Line(self._recipe, self._sessions, self._stakes, self._upkeep)
        self._renewals = Renewals(self._recipe, self._sessions, self._stakes, self._upkeep)

    async def open(self) -> None:
        """See `fencing_sdk.abc.SupportsOpen.open`."""
        self._notice_fork()
        with our_errors("open"):
            await self._sessions.any().ready()

    def _notice_fork(self) -> None:
        if self._sessions.forked():
            self._stakes.clear()
            self._upkeep.forget()

    async def acquire(self, claim: Claim) -> Grant | Held:
        """See `fencing_sdk.abc.Backend.acquire`."""
        self._notice_fork()
        with our_errors("acquire"):
            return await self._line.acquire(claim)

    async def renew(self, claims: Sequence[Claim]) -> Sequence[Renewal]:
        """See `fencing_sdk.abc.Backend.renew`."""
        self._notice_fork()
        with our_errors("renew"):
            return await self._renewals.renew(claims)

    async def release(self, claim: Claim) -> None:
        """See `fencing_sdk.abc.Backend.release`."""
        self._notice_fork()
        with our_errors("release"):
            stake = self._stakes.get(key_of(claim))
            session = self._sessions.of(claim.ttl) if stake is None else stake.session
            if stake is not None:
                stake.finish()
                stake.woken.set()
            try:
                await self._release(claim, session, stake)
            except BaseException:
                self._upkeep.sweep_later(claim, session)
                raise

    async def _release(self, claim: Claim, session: Session, stake: Stake | None) -> None:
        if session.error is not None:  # its nodes went with it; another client may have one with this claim
            session = self._sessions.of(claim.ttl)
        await session.ready()
        known = stake is not None and await self._recipe.remove(session, stake.path)
        if not known:
            for node in await self._recipe.look(session, claim.name):
                if node.mark == mark_of(claim.owner):
                    await self._recipe.remove(session, self._recipe.paths.node(claim.name, node))
        if stake is not None:
            self._stakes.drop(stake)

    async def inspect(self, name: str) -> Holder | None:
        """See `fencing_sdk.abc.Backend.inspect`."""
        self._notice_fork()
        with our_errors("inspect"):
            session = self._sessions.any()
            await session.ready()
            while line := await self._recipe.look(session, name):
                try:
                    data, stat = await self._recipe.read(session, self._recipe.paths.node(name, line[0]))
                except NoNodeError:
                    continue
                return read_holder(name, line[0], data, stat, self._left(name, line[0]))
        return None

    def _left(self, name: str, node: Node) -> float | None:
        """Seconds that a grant of ours has left; how long another client's lasts, nobody can tell."""
        path = self._recipe.paths.node(name, node)
        return next((max(0.0, stake.left) for stake in self._stakes.all() if stake.path == path and stake.held), None)

    async def aclose(self) -> None:
        """Close the sessions, except of those that still have grants: they last until their timeout."""
        self._notice_fork()
        await self._upkeep.aclose()
        await self._sessions.aclose(keep={stake.session for stake in self._stakes.all() if stake.held})

    def on_loss(self, notice: LossNotice) -> Callable[[], None]:
        """See `fencing_sdk.abc.SupportsLossNotice.on_loss`."""
        return self._upkeep.on_loss(notice)

    def queue(self, claim: Claim) -> AbstractAsyncContextManager[Turn]:
        """See `fencing_sdk.abc.SupportsQueue.queue`."""
        return self._stand(claim)

    @asynccontextmanager
    async def _stand(self, claim: Claim) -> AsyncIterator[Turn]:
        self._notice_fork()
        with our_errors("queue"):
            stake = await self._line.join(claim)
        try:
            yield _Place(stake)
        finally:
            if stake.ends_at is None and not stake.over:
                await self._upkeep.leave(stake)


class _Place:
    """A place in the line."""

    def __init__(self, stake: Stake) -> None:
        self._stake = stake

    async def wait(self) -> None:
        """See `fencing_sdk.abc.Turn.wait`."""
        await self._stake.woken.wait()
        self._stake.woken.clear()
        if self._stake.over:
            raise BackendUnavailableError(BACKEND, "queue", "the place in the line is lost; stand in line again")


def from_url(url: str, **options: object) -> ZooKeeperBackend:
    """
    Make a backend for ``zk://host:2181,host:2181/root``; `ZooKeeperBackend` explains the options.

    Raises:
        ConfigurationError: the URL or an option cannot be used.
    """
    hosts, chosen = read_url(url, options)
    return ZooKeeperBackend(hosts, **chosen)  # type: ignore[arg-type]
