"""
Locks in ZooKeeper, over kazoo.

    connect("zk://zk1:2181,zk2:2181,zk3:2181/shop")
    connect("zk://user:password@zk1,zk2,zk3/shop?tls=true&ca=/etc/ssl/zookeeper.pem")

Tokens: the number of the transaction that created the holder's node. Clock: the leader's. Waiters:
first come, first served, each watching the one ahead. All locks of one ttl share a session.

    __init__.py   the backend, its options and errors, and what operators ask
    requests.py   the requests to ZooKeeper: the recipe
    nodes.py      how a lock is written down, and the nodes of this backend object
    waiters.py    what wakes a waiter, and the step by which a claim is granted
    ends.py       renewals, the ends of grants, and nodes that must go
    session.py    one session in the event loop
    driver.py     kazoo, in threads of its own

ZooKeeper sends the names of all folders in one answer, and in no order. So the first page of a listing asks for them
and sorts them, and each page looks at the next slice: the lines first, then the nodes of the holders, all of them in
two round trips. The names that remain are kept for the next page. If that comes to another backend object, or too late,
it asks for the names again and goes on behind the last one that was seen.

A revocation is one transaction. It deletes the node of the holder, by its path and version, and writes a note for it
into the folder; for readers the nodes of all who share the token, and their phase ends. A path belongs to one grant, so
a successor is never hit; the version of the folder lets no two operators write at the same time. The deletion reaches
the next waiter and the holder by the watches that both have anyway, and the holder then reads the note.
"""

from __future__ import annotations

import ssl
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from importlib.util import find_spec
from typing import Any, NamedTuple, cast

from fencing_sdk._http.tls import distrust, tls_context, wants_certificate
from fencing_sdk._values.claim import (
    READER,
    Busy,
    Claim,
    Grant,
    Holder,
    Listing,
    Renewal,
    Revoked,
    Waiting,
    safe_segment,
)
from fencing_sdk._values.clock import wall_seconds
from fencing_sdk._values.drivers import check_daemon_threads, imported_from
from fencing_sdk._values.loop_owner import Uncopied
from fencing_sdk._values.url import decoded, option_names, read_hosts, read_seconds, read_switch, refuse_url, split_url
from fencing_sdk.abc import LossNotice, WaiterNotice
from fencing_sdk.backends import take_options
from fencing_sdk.backends._shared.background_task import BackgroundTasks
from fencing_sdk.backends._shared.error_translation import (
    ErrorTranslation,
    NoConnectionError,
    Verdict,
    verdict_by_class,
)
from fencing_sdk.backends._shared.losses import with_reasons
from fencing_sdk.backends._shared.node_line import holding, refusal
from fencing_sdk.backends._shared.waiters import KeptPlace, KeptPlaces, Turn
from fencing_sdk.backends.zookeeper.driver import ALL_CLIENTS, BACKEND, CREATOR, ZooKeeperSettings
from fencing_sdk.backends.zookeeper.ends import CleanUp, ZooKeeperLossWatcher, ZooKeeperRenewals
from fencing_sdk.backends.zookeeper.nodes import (
    Line,
    LineNode,
    OwnNode,
    OwnNodes,
    key_of,
    mark_of,
    noted,
    phase_of,
    read_holder,
    read_notes,
    read_token,
    with_phase,
)
from fencing_sdk.backends.zookeeper.requests import Read, Recipe
from fencing_sdk.backends.zookeeper.session import ZooKeeperSession, ZooKeeperSessions
from fencing_sdk.backends.zookeeper.waiters import ZooKeeperWaitQueue
from fencing_sdk.errors import BackendError, BackendRefusedError, BackendUnavailableError, ConfigurationError, shown

with imported_from("zookeeper", "kazoo"):
    import kazoo.exceptions as kazoo_errors

__all__ = ["ZooKeeperBackend", "from_url"]


_KEPT = 4
"""Listings whose names are kept at the same time."""
_TRIES = 5
"""Times that a lock is looked at while it goes from hand to hand, or while other operators write notes."""
_STRETCH = 100
"""Nodes in one round of requests."""


CLASSES: tuple[tuple[type[Exception], Verdict], ...] = (
    (
        kazoo_errors.NoAuthError,
        (BackendRefusedError, "the login has no right to do this below the root; see 'acl' and its login"),
    ),
    (kazoo_errors.AuthFailedError, (BackendRefusedError, "the server refuses the login")),
    (
        kazoo_errors.SessionClosedRequireSaslError,
        (BackendRefusedError, "the server wants a login by SASL that it knows"),
    ),
    (kazoo_errors.SASLException, (BackendRefusedError, "the login by SASL failed")),
    (kazoo_errors.InvalidACLError, (BackendRefusedError, "the server cannot use the acl; creator needs a login")),
    (kazoo_errors.QuotaExceededError, (BackendRefusedError, "the quota of the root is used up")),
    (kazoo_errors.NoChildrenForEphemeralsError, (BackendRefusedError, "the root is a node that cannot have children")),
    (kazoo_errors.ConnectionClosedError, (BackendUnavailableError, "the connection broke")),
    (
        kazoo_errors.SessionExpiredError,
        (BackendUnavailableError, "the session expired; the next call opens another"),
    ),
    (kazoo_errors.ConnectionLoss, (BackendUnavailableError, "the connection broke")),
    (kazoo_errors.SessionMovedError, (BackendUnavailableError, "the session is on another connection")),
    (kazoo_errors.NotReadOnlyCallError, (BackendUnavailableError, "the server has no majority")),
    (kazoo_errors.ThrottledOpError, (BackendUnavailableError, "the server is overloaded")),
    (NoConnectionError, (BackendUnavailableError, "no connection to a server")),
    (OSError, (BackendUnavailableError, "no connection to a server")),
)

_UNTRUSTED: Verdict = (BackendRefusedError, "the server wants another certificate of the client; see cert=")
_UNKNOWN: Verdict = (BackendUnavailableError, "ZooKeeper failed")


def translated(operation: str, error: Exception) -> BackendError:
    if isinstance(error, BackendError):
        return error
    kind, hint = _verdict(error)
    cause = error.__cause__
    if isinstance(error, NoConnectionError) and isinstance(cause, Exception):
        refusal = _verdict(cause)
        if refusal[0] is BackendUnavailableError:
            return BackendUnavailableError(BACKEND, operation, str(error))
        kind, hint = refusal
        return kind(BACKEND, operation, f"{hint} ({type(cause).__name__})")
    return kind(BACKEND, operation, f"{hint} ({type(error).__name__})")


def _verdict(error: Exception) -> Verdict:
    if isinstance(error, ssl.SSLCertVerificationError):
        return BackendRefusedError, distrust(error, "ca")
    if wants_certificate(error):
        return _UNTRUSTED
    return verdict_by_class(error, CLASSES, _UNKNOWN)


our_errors = partial(ErrorTranslation, translated)
"""``with our_errors("acquire")``: the errors of the driver leave as errors of the contract."""


class _Held(NamedTuple):
    """The holders of a name."""

    nodes: list[tuple[LineNode, Read]]
    folder: Read | None
    phase: int | None
    """The token of readers, if they hold."""
    moved: bool
    """Every node of a holder has gone since the look at the line."""


class ZooKeeperBackend(Uncopied):
    """
    A ZooKeeper ensemble, 3.5 or later, as the lock service.

    Args:
        hosts: The servers, each as ``host:port``, or ``host`` for port 2181. Those that are down are passed over.

        root: The node below which the locks are. It is made when it is missing.

        user: With *password*, a login by the scheme ``digest``.

        password: See *user*.

        acl: The access to the nodes: ``"open"`` for all clients, or ``"creator"`` for clients with the same login.
            The default is ``"creator"`` with a login, else ``"open"``.

        sasl: The ``sasl_options`` of kazoo, for a login by SASL; needs ``pip install 'kazoo[sasl]'``.

        tls: Speak TLS. Certificates and host names are checked; there is no way to switch that off.

        ca: A file of the authorities that certificates are checked against, instead of the system's.

        cert: A file with the client's certificate, and its key if there is no *key*.

        key: A file with the client's key.

        connect_timeout: Seconds to wait for a server's answer before the driver tries the next one.

    Raises:
        ConfigurationError: an argument cannot work. Nothing is sent before the first call.
        UnsupportedError: this is a subinterpreter, in which the driver cannot start its threads.
    """

    def __init__(
        self,
        hosts: Sequence[str],
        *,
        root: str = "/fencing",
        user: str | None = None,
        password: str | None = None,
        acl: str | None = None,
        sasl: Mapping[str, Any] | None = None,
        tls: bool = False,
        ca: str | None = None,
        cert: str | None = None,
        key: str | None = None,
        connect_timeout: float = 1.0,
    ) -> None:
        check_daemon_threads(BACKEND)
        if isinstance(hosts, str) or not isinstance(hosts, list | tuple) or not hosts:
            msg = "hosts must be a list of 'host:port'; write zk://host:2181,host:2181"
            raise ConfigurationError(msg)
        auth, options = _login(user, password), _sasl(sasl)
        logged_in = bool(auth or options)
        if acl not in (None, "open", "creator"):
            msg = f"acl must be 'open' or 'creator', not {shown(acl)}"
            raise ConfigurationError(msg)
        if acl == "creator" and not logged_in:
            msg = "acl='creator' needs a login: pass user and password, or sasl"
            raise ConfigurationError(msg)
        settings = self._settings = ZooKeeperSettings(
            hosts=tuple(address.at(_PORT) for address in read_hosts(hosts, "hosts")),
            root=_root(root),
            connect_timeout=read_seconds("connect_timeout", connect_timeout),
            acl=CREATOR if logged_in and acl != "open" else ALL_CLIENTS,
            auth=auth,
            sasl=options,
            tls=tls_context(tls=read_switch("tls", tls), scheme=None, ca=ca, cert=cert, key=key),
        )
        self._recipe = Recipe(settings)
        self._own_nodes = OwnNodes()
        self._rest: OrderedDict[tuple[str, str], list[str]] = OrderedDict()  # names of listings, by prefix and cursor
        tasks = BackgroundTasks()
        self._losses = ZooKeeperLossWatcher(self._recipe, self._own_nodes, self._reasons, tasks)
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
        session = await self._any_session()
        folders = await self._recipe.read_all(session, [self._recipe.paths.folder(claim.name) for claim in claims])
        return [
            None if folder is None else read_notes(folder.data).get(mark_of(claim.owner))
            for claim, folder in zip(claims, folders, strict=True)
        ]

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
            return await self._holders_of(await self._any_session(), [name])

    async def _holders_of(self, session: ZooKeeperSession, names: Sequence[str]) -> list[Holder]:
        """
        Describe who holds the *names*: name by name, in the order of their permits, or of their tokens.

        What is left of a grant is known here if this object has it; of others, the whole ttl is shown.
        """
        found: dict[str, list[Holder]] = {name: [] for name in names}
        left = {own_node.path: max(0.0, own_node.left) for own_node in self._own_nodes.all() if own_node.held}
        for _ in range(_TRIES):
            lines = dict(zip(names, await self._recipe.look_at_all(session, names), strict=True))
            held = await self._read_held(session, lines)
            for name, each in held.items():
                waiters = len(lines[name]) - len(each.nodes)
                holders = [
                    read_holder(
                        name, node, read.data, read.stat, left.get(read.path), phase=each.phase, waiters=waiters
                    )
                    for node, read in each.nodes
                ]
                found[name] = sorted(holders, key=lambda holder: (holder.permit or 0, holder.token))
            if not (names := [name for name, each in held.items() if each.moved]):
                break
        return [holder for holders in found.values() for holder in holders]

    async def _read_held(
        self, session: ZooKeeperSession, lines: Mapping[str, Line], *, folders: bool = False
    ) -> dict[str, _Held]:
        """Read the nodes of all holders, and the folders where these have data, or all *folders*."""
        paths = {}
        for name, line in lines.items():
            folder = [self._recipe.paths.folder(name)] if line.noted or folders else []
            paths[name] = [self._recipe.paths.node(name, node) for node in holding(line, phase=True)] + folder
        every = [path for each in paths.values() for path in each]
        read = dict(zip(every, await self._recipe.read_all(session, every), strict=True))
        return {name: _held(line, [read[path] for path in paths[name]]) for name, line in lines.items()}

    async def list_waiters(self, name: str) -> Sequence[Waiting]:
        """See `fencing_sdk.abc.SupportsListing.list_waiters`."""
        waiters: list[Waiting] = []
        with our_errors("list"):
            session = await self._any_session()
            line = await self._recipe.look(session, name)
            folders = [self._recipe.paths.folder(name)] if line.noted else []
            phase = any(folder and phase_of(folder.data) for folder in await self._recipe.read_all(session, folders))
            waiting = line[len(holding(line, phase=phase)) :]
            paths = [self._recipe.paths.node(name, node) for node in waiting]
            for start in range(0, len(waiting), _STRETCH):
                reads = await self._recipe.read_all(session, paths[start : start + _STRETCH])
                for node, read in zip(waiting[start:], reads, strict=False):
                    if read is not None:
                        holder = read_holder(name, node, read.data, read.stat, None)
                        waiting_for = max(0.0, wall_seconds() - read.stat.ctime / 1000)
                        waiters.append(Waiting(holder.id, holder.mode, waiting_for, holder.label))
        return waiters

    async def list_holders(self, prefix: str, cursor: str | None, limit: int) -> Listing:
        """See `fencing_sdk.abc.SupportsListing.list_holders`."""
        begin = safe_segment(prefix)
        with our_errors("list"):
            session = await self._any_session()
            folders = None if cursor is None else self._rest.pop((begin, cursor), None)
            if folders is None:
                folders = [folder for folder in await self._recipe.names(session) if folder.startswith(begin)]
                folders = folders if cursor is None else folders[bisect_right(folders, cursor) :]
            names = [name for folder in folders[:limit] if (name := self._recipe.paths.name(folder)) is not None]
            holders = await self._holders_of(session, names)
        if len(folders) <= limit:
            return Listing(holders, None)
        after = folders[limit - 1]
        self._rest[begin, after] = folders[limit:]
        while len(self._rest) > _KEPT:
            self._rest.popitem(last=False)
        return Listing(holders, after)

    async def revoke(self, name: str, token: int, reason: str) -> bool:
        """See `fencing_sdk.abc.SupportsRevoking.revoke`."""
        with our_errors("revoke"):
            session = await self._any_session()
            for _ in range(_TRIES):
                line = await self._recipe.look(session, name)
                held = (await self._read_held(session, {name: line}, folders=True))[name]
                if held.moved or (line and held.folder is None):
                    continue
                tokens = {node.mark: held.phase or read_token(read.data, read.stat) for node, read in held.nodes}
                victims = {node.mark: read for node, read in held.nodes if tokens[node.mark] == token}
                if not victims or held.folder is None:
                    return False
                note = noted(held.folder.data, victims, reason)
                if held.phase is not None:
                    note = with_phase(note, None)
                if await self._recipe.end(session, list(victims.values()), held.folder, note):
                    return True
        raise BackendUnavailableError(BACKEND, "revoke", "the lock changes whenever it is looked at")

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


_PORT = 2181
_ROOT_LIMIT = 512


def read_url(url: str) -> tuple[list[str], dict[str, object]]:
    """
    Read the servers from *url*, and the arguments of the backend that stand before and behind them.

    Raises:
        ConfigurationError: one of them cannot be read. The URL is never repeated.
    """
    parts, found = split_url(url), dict[str, object]()
    if parts.user is not None:
        if not (parts.user and parts.password):
            refuse_url("must have both user and password before the '@'; write zk://user:password@host,host")
        found |= {"user": parts.user, "password": parts.password}
    if parts.path not in {"", "/"}:
        found["root"] = decoded(parts.path, "path")
    return parts.host_texts(), found


def _root(root: object) -> str:
    text = root.rstrip("/") if isinstance(root, str) else ""
    parts = text.split("/")[1:]
    if (
        not text.startswith("/")
        or len(text) > _ROOT_LIMIT
        or not text.isprintable()
        or any(part in {"", ".", ".."} for part in parts)
        or parts[0] == "zookeeper"
    ):
        msg = "root must be the path of a node, such as '/shop/locks'; '/zookeeper' belongs to the server"
        raise ConfigurationError(msg)
    return text


def _login(user: object, password: object) -> Sequence[tuple[str, str]]:
    if user is None and password is None:
        return ()
    if not (isinstance(user, str) and user and isinstance(password, str) and password):
        msg = "user and password must be texts, and both are needed for a login"
        raise ConfigurationError(msg)
    if ":" in user:
        msg = "user must not contain ':', by which ZooKeeper separates it from the password"
        raise ConfigurationError(msg)
    return (("digest", f"{user}:{password}"),)


def _sasl(sasl: object) -> Mapping[str, Any] | None:
    if sasl is None:
        return None
    mechanism = isinstance(sasl, Mapping) and all(isinstance(name, str) for name in sasl) and sasl.get("mechanism")
    if not (isinstance(mechanism, str) and mechanism):
        msg = "sasl must be the sasl_options of kazoo, a mapping with a 'mechanism'; no url can hold it"
        raise ConfigurationError(msg)
    if find_spec("puresasl") is None:
        msg = "sasl needs the package pure-sasl; install it with pip install 'kazoo[sasl]'"
        raise ConfigurationError(msg)
    return dict(cast("Mapping[str, Any]", sasl))


def _held(line: Line, read: Sequence[Read | None]) -> _Held:
    """Take what was *read*: the nodes of the holders, or of readers who have not begun, and perhaps the folder."""
    nodes = holding(line, phase=True)
    folder = read[len(nodes)] if len(read) > len(nodes) else None
    phase = phase_of(folder.data) if folder is not None and nodes and nodes[0].shared == READER.word else None
    held = holding(line, phase=phase is not None)
    there = [(node, one) for node, one in zip(held, read, strict=False) if one is not None]
    return _Held(there, folder, phase, moved=bool(held) and not there)
