"""
Locks in ZooKeeper, by way of kazoo.

    connect("zk://zk1:2181,zk2:2181,zk3:2181/shop")
    connect("zk://user:password@zk1,zk2,zk3/shop?tls=true&ca=/etc/ssl/zookeeper.pem")

Tokens: the number of the transaction that created the holder's node. Clock: the leader's. Waiters:
first come, first served, each watching the one ahead. All locks of one ttl share a session.

    __init__.py       the face in the event loop
    _recipe.py        what is asked of ZooKeeper
    _renewals.py      many claims in one batch
    _upkeep.py        ends, nodes that must go, losses
    _stakes.py        what this backend has in each line
    _nodes.py         how a lock is written down
    _sessions.py      which session a lock is on
    _session.py       one session in the event loop
    _driver.py        kazoo, in a thread of its own
    _options.py       from a URL to the servers
    _translation.py   errors
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from fencing_sdk._claim import Claim, Grant, Held, Holder, Renewal
from fencing_sdk.abc import LossNotice, Turn
from fencing_sdk.backends.zookeeper._driver import NoNodeError
from fencing_sdk.backends.zookeeper._nodes import Node, is_of, mark_of, read_holder
from fencing_sdk.backends.zookeeper._options import read_settings, read_url
from fencing_sdk.backends.zookeeper._recipe import Found, Recipe
from fencing_sdk.backends.zookeeper._renewals import Renewals
from fencing_sdk.backends.zookeeper._session import Session
from fencing_sdk.backends.zookeeper._sessions import Sessions
from fencing_sdk.backends.zookeeper._stakes import Stake, Stakes, key_of
from fencing_sdk.backends.zookeeper._translation import BACKEND, OurErrors
from fencing_sdk.backends.zookeeper._upkeep import Upkeep
from fencing_sdk.errors import BackendUnavailableError

__all__ = ["ZooKeeperBackend", "from_url"]

_TRIES = 3


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
        self._renewals = Renewals(self._recipe, self._sessions, self._stakes, self._upkeep)

    async def open(self) -> None:
        """See `fencing_sdk.abc.SupportsOpen.open`."""
        self._notice_fork()
        with OurErrors("open"):
            await self._sessions.any().ready()

    def _notice_fork(self) -> None:
        if self._sessions.forked():
            self._stakes.clear()
            self._upkeep.forget()

    async def acquire(self, claim: Claim) -> Grant | Held:
        """See `fencing_sdk.abc.Backend.acquire`."""
        self._notice_fork()
        with OurErrors("acquire"):
            async with self._stakes.turn(key_of(claim)):
                return await self._acquire(claim)

    async def _acquire(self, claim: Claim) -> Grant | Held:
        stake = await self._current(claim)
        session = self._sessions.of(claim.ttl) if stake is None else stake.session
        await session.ready()
        try:
            if stake is not None:
                return await self._try(stake, await self._recipe.look(session, claim.name))
            found, line = await self._recipe.stand(session, claim)
            return await self._try(Stake(claim, session, *found), line)
        except BaseException:
            if stake is None:
                self._upkeep.sweep_later(claim, session)
            raise

    async def _current(self, claim: Claim) -> Stake | None:
        """What the claim has in the line and can go on with; what it has there besides is removed."""
        stake = self._stakes.get(key_of(claim))
        if stake is None or not (stake.over or (stake.ends_at is not None and not stake.held)):
            return stake
        stake.finish()
        if stake.session.error is None:
            await stake.session.ready()
            await self._recipe.remove(stake.session, stake.path)
        self._stakes.drop(stake)
        return None

    async def _try(self, stake: Stake, line: list[Node]) -> Grant | Held:
        """Grant if nobody is ahead; whoever has a place keeps it, and whoever has none leaves."""
        claim, session = stake.claim, stake.session
        in_place = self._stakes.get(key_of(claim)) is stake
        if not await self._ahead(stake, line):
            if stake.over:
                raise NoNodeError
            self._stakes.put(stake)
            self._upkeep.granted(stake)
            return Grant(stake.token, ttl=session.lease if session.lease < claim.ttl else None)
        if not in_place:
            await self._recipe.remove(session, stake.path)
        return Held()

    async def _ahead(self, stake: Stake, line: list[Node]) -> bool:
        """Whether somebody is ahead of *stake*; one that has a place then watches the next."""
        claim, session = stake.claim, stake.session
        for _ in range(_TRIES):
            position = await self._find(stake, line)
            if position == 0:
                return False
            if self._stakes.get(key_of(claim)) is not stake:
                return True
            path = self._recipe.paths.node(claim.name, line[position - 1])
            if stake.watched == path:
                return True
            stake.watched = path
            if await self._recipe.watch(session, path, session.watched(self._gone_ahead, stake, path)):
                return True
            stake.watched = ""
            line = await self._recipe.look(session, claim.name)
        stake.woken.set()  # the line moves faster than we look at it
        return True

    def _gone_ahead(self, stake: Stake, path: str, _: object) -> None:
        if stake.watched == path:
            stake.watched = ""
            stake.woken.set()

    async def _find(self, stake: Stake, line: list[Node]) -> int:
        """
        Return the position of our node in the line, and let *stake* be that node.

        Usually it is the one we know. A request whose answer was lost may have left another one
        ahead of it, and that one counts then; or another client has one, with the same claim.
        """
        claim, session = stake.claim, stake.session
        ours = [position for position, node in enumerate(line) if node.mark == mark_of(claim.owner)]
        if not ours:
            stake.finish()
            self._stakes.drop(stake)
            stake.woken.set()
            raise NoNodeError
        first = line[ours[0]]
        for position in ours[1:]:
            await self._recipe.remove(session, self._recipe.paths.node(claim.name, line[position]))
        path = self._recipe.paths.node(claim.name, first)
        if path != stake.path:
            known = is_of(first, session.id)
            found: Found = await (
                self._recipe.find(session, path) if known else self._recipe.adopt(session, claim, first)
            )
            stake.path, stake.token, stake.born = found
        return ours[0]

    async def renew(self, claims: Sequence[Claim]) -> Sequence[Renewal]:
        """See `fencing_sdk.abc.Backend.renew`."""
        self._notice_fork()
        with OurErrors("renew"):
            return await self._renewals.renew(claims)

    async def release(self, claim: Claim) -> None:
        """See `fencing_sdk.abc.Backend.release`."""
        self._notice_fork()
        with OurErrors("release"):
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
        with OurErrors("inspect"):
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
        with OurErrors("queue"):
            stake = await self._join(claim)
        try:
            yield _Place(stake)
        finally:
            if stake.ends_at is None and not stake.over:
                await self._upkeep.leave(stake)

    async def _join(self, claim: Claim) -> Stake:
        session = self._sessions.of(claim.ttl)
        await session.ready()
        try:
            async with self._stakes.turn(key_of(claim)):
                known = await self._current(claim)
                if known is not None:
                    known.woken.set()
                    return known
                found, line = await self._recipe.stand(session, claim)
                stake = Stake(claim, session, *found)
                self._stakes.put(stake)
                if not await self._ahead(stake, line):
                    stake.woken.set()
                return stake
        except BaseException:
            stray = self._stakes.get(key_of(claim))
            if stray is not None and stray.ends_at is None:
                self._stakes.drop(stray)
            await self._upkeep.leave_unknown(claim, session)
            raise


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
