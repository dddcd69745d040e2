"""
Locks in ZooKeeper, over kazoo.

    connect("zk://zk1:2181,zk2:2181,zk3:2181/shop")
    connect("zk://user:password@zk1,zk2,zk3/shop?tls=true&ca=/etc/ssl/zookeeper.pem")

Tokens: the number of the transaction that created the ticket's node. Clock: the leader's. Waiters:
first come, first served, each watching the one ahead. All tickets of one ttl share a session.

    __init__.py   the backend, its options and its errors
    lines.py      the tickets of this backend object: verbs, watches, bells
    nodes.py      how a line is written down, and who of it holds
    requests.py   the requests to ZooKeeper: the recipe
    session.py    one session in the event loop
    driver.py     kazoo, in threads of its own, and the ends of nodes
"""

from __future__ import annotations

import ssl
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any, cast

from fencing_sdk._http.tls import distrust, tls_context, wants_certificate
from fencing_sdk._values.claim import Busy, Claim, Gone, Place, Seen, safe_segment
from fencing_sdk._values.drivers import check_daemon_threads, imported_from
from fencing_sdk._values.loop_owner import Uncopied
from fencing_sdk._values.url import decoded, option_names, read_hosts, read_seconds, read_switch, refuse_url, split_url
from fencing_sdk.abc import ALL_MODES, Bell, Kept
from fencing_sdk.backends import take_options
from fencing_sdk.backends._shared.error_translation import (
    ErrorTranslation,
    NoConnectionError,
    Verdict,
    verdict_by_class,
)
from fencing_sdk.backends.zookeeper.driver import ALL_CLIENTS, BACKEND, CREATOR, ZooKeeperSettings
from fencing_sdk.backends.zookeeper.lines import ZooKeeperTickets
from fencing_sdk.errors import BackendError, BackendRefusedError, BackendUnavailableError, ConfigurationError, shown

with imported_from("zookeeper", "kazoo"):
    import kazoo.exceptions as kazoo_errors

__all__ = ["ZooKeeperBackend", "from_url"]


_KEPT = 4
"""Listings whose names are kept at the same time."""


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

    modes = ALL_MODES
    rings = True
    ends_with_session = True
    """True: a ticket ends with the session of its process, so that no lease is detached."""

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
        self._tickets = ZooKeeperTickets(settings)
        self._recipe, self._sessions = self._tickets.recipe, self._tickets.sessions
        self._rest: OrderedDict[tuple[str, str], list[str]] = OrderedDict()  # names of listings, by prefix and cursor

    async def open(self) -> None:
        """See `fencing_sdk.abc.SupportsOpen.open`."""
        self._notice_fork()
        with our_errors("open"):
            await self._sessions.any().ready()

    def _notice_fork(self) -> None:
        if self._sessions.forked():
            self._tickets.forget()

    async def draw(self, claim: Claim, *, only_if_it_holds: bool = False) -> Place | Busy:
        """See `fencing_sdk.abc.Backend.draw`."""
        self._notice_fork()
        with our_errors("acquire"):
            return await self._tickets.draw(claim, only_if_it_holds=only_if_it_holds)

    async def keep(self, tickets: Sequence[Kept]) -> Sequence[Place | Gone | None]:
        """See `fencing_sdk.abc.Backend.keep`."""
        self._notice_fork()
        with our_errors("renew"):
            return await self._tickets.keep(tickets)

    async def give_back(self, claim: Claim, *, after: float = 0.0) -> Gone | None:
        """See `fencing_sdk.abc.Backend.give_back`."""
        self._notice_fork()
        with our_errors("release"):
            return await self._tickets.give_back(claim, after=after)

    async def end(self, name: str, token: int, reason: str) -> bool:
        """See `fencing_sdk.abc.Backend.end`."""
        self._notice_fork()
        with our_errors("revoke"):
            return await self._tickets.end(name, token, reason)

    async def tickets(self, names: Sequence[str]) -> Sequence[Sequence[Seen]]:
        """See `fencing_sdk.abc.Backend.tickets`."""
        self._notice_fork()
        with our_errors("inspect"):
            return await self._tickets.seen(names)

    async def names(self, prefix: str, cursor: str | None, limit: int) -> tuple[Sequence[str], str | None]:
        """
        See `fencing_sdk.abc.Backend.names`.

        ZooKeeper sends all names in one answer, and in no order. Those that remain are kept for the next page. If that
        comes to another backend object, or too late, it asks again and goes on behind the last name of the page before.
        """
        self._notice_fork()
        begin = safe_segment(prefix)
        folders = None if cursor is None else self._rest.pop((begin, cursor), None)
        if folders is None:
            with our_errors("list"):
                session = self._sessions.any()
                await session.ready()
                folders = [folder for folder in await self._recipe.names(session) if folder.startswith(begin)]
            folders = folders if cursor is None else folders[bisect_right(folders, cursor) :]
        names = [name for folder in folders[:limit] if (name := self._recipe.paths.name(folder)) is not None]
        if len(folders) <= limit:
            return names, None
        after = folders[limit - 1]
        self._rest[begin, after] = folders[limit:]
        while len(self._rest) > _KEPT:
            self._rest.popitem(last=False)
        return names, after

    def listen(self, claim: Claim, bell: Bell) -> Callable[[], object]:
        """See `fencing_sdk.abc.Backend.listen`."""
        return self._tickets.listen(claim, bell)

    async def aclose(self) -> None:
        """Close the sessions, except of those with tickets that hold: they last until their timeout."""
        self._notice_fork()
        await self._tickets.aclose()


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
