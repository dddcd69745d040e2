"""
From a URL and options to a gateway.

An option that cannot work is refused here. No message repeats a secret.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import aiohttp

from fencing_sdk._etcd.gateway import RULES, Gateway
from fencing_sdk._etcd.login import Credentials
from fencing_sdk._http.endpoints import read_endpoints
from fencing_sdk._http.options import check_connections
from fencing_sdk._http.pool import HttpPool
from fencing_sdk._http.tls import tls_context
from fencing_sdk._values.store_url import refuse_url, split_url
from fencing_sdk._values.timing import seconds
from fencing_sdk.errors import ConfigurationError

__all__ = ["make_gateway", "read_url"]

ANSWER_LIMIT = 30.0
"""Seconds that a request may take, if its caller does not give up earlier. The engine's limits are far shorter."""


def make_gateway(
    component: str,
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
    Make a gateway to an etcd cluster, for the backend or guard *component*. Nothing is sent.

    Raises:
        ConfigurationError: an option cannot work.
    """
    context = tls_context(tls=tls, scheme="etcd+https", ca=ca, cert=cert, key=key, context=ssl_context)
    limit = seconds(connect_timeout, "connect_timeout", above=True)
    answer_limit = aiohttp.ClientTimeout(total=ANSWER_LIMIT, sock_connect=limit)
    endless = aiohttp.ClientTimeout(total=None, sock_connect=limit)
    most = check_connections(connections)
    requests = HttpPool(tls=context, connections=most, limits=answer_limit)
    streams = HttpPool(tls=context, connections=most, limits=endless)
    credentials = _credentials(user, password)
    members = read_endpoints(endpoints, RULES, tls=bool(tls))
    return Gateway(component, members, requests=requests, streams=streams, credentials=credentials)


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


def read_url(url: str, options: dict[str, Any]) -> tuple[Sequence[str], dict[str, Any]]:
    """
    Split a URL into its endpoints and the options for `make_gateway`: *options*, the login and ``tls``.

    Raises:
        ConfigurationError: the URL has a path, or a login that can be misread.
    """
    parts = split_url(url)
    if parts.path not in {"", "/"}:
        refuse_url(
            "has a path, which etcd does not have; write etcd://host:port,host:port, and prefix= for a place in it"
        )
    chosen = {**options, "tls": parts.scheme == "etcd+https"}
    if parts.user is not None:
        if not (parts.user and parts.password):
            refuse_url("must have both user and password before the '@'; write etcd://user:password@host:port")
        if {"user", "password"} & options.keys():
            refuse_url("has a login that is given as an option too; pass user and password once")
        chosen |= {"user": parts.user, "password": parts.password}
    return parts.host_texts(), chosen
