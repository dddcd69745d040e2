"""From a URL, or from arguments, to the servers; read strictly, so that a typing error turns nothing off."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec

from fencing_sdk._http.tls import tls_context
from fencing_sdk._values.options import read_seconds, read_switch
from fencing_sdk._values.url import decoded, read_hosts, refuse_url, split_url
from fencing_sdk.backends.zookeeper.connection.driver import ZooKeeperSettings
from fencing_sdk.backends.zookeeper.connection.kazoo_requests import ALL_CLIENTS, CREATOR, is_acl
from fencing_sdk.errors import ConfigurationError, shown

__all__ = ["read_settings", "read_url"]

PORT = 2181
_ROOT_LIMIT = 512
_ACLS: Mapping[str, Sequence[object]] = {"open": ALL_CLIENTS, "creator": CREATOR}


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


def read_settings(
    hosts: object,
    *,
    root: object,
    login: tuple[object, object],
    acl: object,
    sasl: object,
    tls: object,
    files: Mapping[str, object],
    connect_timeout: object,
) -> ZooKeeperSettings:
    """
    Check every argument of the backend.

    Raises:
        ConfigurationError: naming the argument that cannot work, never with what is secret.
    """
    auth = _login(*login)
    return ZooKeeperSettings(
        hosts=_hosts(hosts),
        root=_root(root),
        connect_timeout=read_seconds("connect_timeout", connect_timeout),
        acl=_acl(acl, logged_in=bool(auth or sasl is not None)),
        auth=auth,
        sasl=_sasl(sasl),
        tls=tls_context(tls=read_switch("tls", tls), scheme=None, **files),
    )


def _hosts(hosts: object) -> Sequence[tuple[str, int]]:
    if isinstance(hosts, str) or not isinstance(hosts, Sequence) or not hosts:
        msg = "hosts must be a list of 'host:port'; write zk://host:2181,host:2181"
        raise ConfigurationError(msg)
    return tuple(address.at(PORT) for address in read_hosts(hosts, "hosts"))


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


def _acl(acl: object, *, logged_in: bool) -> Sequence[object]:
    if acl is None:
        return CREATOR if logged_in else ALL_CLIENTS
    if isinstance(acl, str) and acl in _ACLS:
        if acl == "creator" and not logged_in:
            msg = "acl='creator' needs a login: pass user and password, or sasl"
            raise ConfigurationError(msg)
        return _ACLS[acl]
    if isinstance(acl, Sequence) and not isinstance(acl, str) and acl and all(is_acl(entry) for entry in acl):
        return tuple(acl)
    msg = f"acl must be 'open', 'creator' or a list of kazoo.security.ACL, not {shown(acl)}"
    raise ConfigurationError(msg)


def _sasl(sasl: object) -> Mapping[str, str] | None:
    if sasl is None:
        return None
    if not isinstance(sasl, Mapping) or "mechanism" not in sasl:
        msg = "sasl must be the sasl_options of kazoo, a mapping with a 'mechanism'; no url can hold it"
        raise ConfigurationError(msg)
    if find_spec("puresasl") is None:
        msg = "sasl needs the package pure-sasl; install it with pip install 'kazoo[sasl]'"
        raise ConfigurationError(msg)
    return dict(sasl)
