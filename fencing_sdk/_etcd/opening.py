"""From a URL and options to a gateway. What cannot work is refused here, and no secret is repeated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from urllib.parse import unquote, urlsplit

from fencing_sdk._etcd.gateway import SITE, Gateway, pools
from fencing_sdk._etcd.login import Credentials
from fencing_sdk._http.endpoints import read_endpoints
from fencing_sdk._http.options import check_connections
from fencing_sdk._http.tls import tls_context
from fencing_sdk._values.timing import seconds
from fencing_sdk.errors import ConfigurationError

__all__ = ["make_gateway", "parts_of"]


def make_gateway(
    who: str,
    endpoints: object,
    *,
    tls: object = False,
    user: object = None,
    password: object = None,
    ca: object = None,
    cert: object = None,
    key: object = None,
    ssl_context: object = None,
    connect_timeout: object = 1.0,
    connections: object = 32,
) -> Gateway:
    """
    Make a gateway to a cluster of etcd. Nothing is sent.

    Raises:
        ConfigurationError: an option cannot work.
    """
    context = tls_context(tls=tls, scheme="etcd+https", ca=ca, cert=cert, key=key, context=ssl_context)
    limit = seconds(connect_timeout, "connect_timeout", above=True)
    requests, streams = pools(context, connect_timeout=limit, connections=check_connections(connections))
    credentials = _credentials(user, password)
    members = read_endpoints(endpoints, SITE, tls=bool(tls))
    return Gateway(who, members, pools=requests, streams=streams, credentials=credentials)


def _credentials(user: object, password: object) -> Credentials | None:
    for name, text in (("user", user), ("password", password)):
        if text is not None and (not isinstance(text, str) or not text):
            msg = f"{name} must be a str that is not empty, or None"
            raise ConfigurationError(msg)
    if (user is None) != (password is None):
        given, missing = ("user", "password") if password is None else ("password", "user")
        msg = f"{given} is nothing without the other; pass {missing} too"
        raise ConfigurationError(msg)
    return None if user is None else Credentials(str(user), str(password))


def parts_of(url: str, options: dict[str, Any]) -> tuple[Sequence[str], dict[str, Any]]:
    """
    The endpoints of a URL, and *options* with what else it says.

    Raises:
        ConfigurationError: it has a path, or says who logs in in a way that can be misread.
    """
    parts = urlsplit(url)
    if parts.path not in {"", "/"}:
        msg = "url has a path, which etcd does not have; write etcd://host:port,host:port and prefix= for a place in it"
        raise ConfigurationError(msg)
    login, at, hosts = parts.netloc.rpartition("@")
    user, _, password = login.partition(":")
    if at and not (user and password and not {"@", ","} & set(login)):
        msg = "url must have user:password@ once, before all hosts; in a password, write %40 for @ and %2C for a comma"
        raise ConfigurationError(msg)
    if at and {"user", "password"} & options.keys():
        msg = "user and password are given twice; pass them in the url or as options"
        raise ConfigurationError(msg)
    said = {"user": unquote(user), "password": unquote(password)} if at else {}
    return hosts.split(","), {**options, **said, "tls": parts.scheme == "etcd+https"}
