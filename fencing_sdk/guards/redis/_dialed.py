"""
Connections of redis-py that try every address of a name, for a guard with a URL. This module imports the driver.

The driver connects with the arguments that a connection has for it, so they name the socket that is connected already.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Mapping
from typing import Any

from redis.asyncio import connection as driver
from redis.asyncio.connection import Connection, SSLConnection

from fencing_sdk._dialing import connected_socket
from fencing_sdk._values.drivers import KnownDriver

__all__ = ["REDIS_PY", "DialedConnection", "DialedTlsConnection", "option_kinds"]

REDIS_PY = KnownDriver("redis", user="RedisGuard")


def option_kinds() -> Mapping[str, Callable[[str], object]]:
    """
    Return how redis-py reads the options of a URL, by their names.

    Raises:
        BackendRefusedError: it has no such table, or not the methods that the connections below override.
    """
    REDIS_PY.check("connect", Connection, "_connect", "_connection_arguments")
    with REDIS_PY.known("connect"):
        return driver.URL_QUERY_ARGUMENT_PARSERS


class _Dialed(Connection):
    _link: socket.socket | None = None

    async def _connect(self) -> None:
        async with asyncio.timeout(self.socket_connect_timeout):
            self._link = link = await connected_socket(self.host, int(self.port))
        try:
            await super()._connect()  # type: ignore[no-untyped-call]
        except BaseException:
            if link is not None:
                link.close()
            raise
        finally:
            self._link = None

    def _connection_arguments(self) -> Any:
        arguments = dict(super()._connection_arguments())
        if self._link is None:
            return arguments
        host, _ = arguments.pop("host"), arguments.pop("port")
        name = {"server_hostname": host} if arguments.get("ssl") else {}
        return {**arguments, **name, "sock": self._link}


class DialedConnection(_Dialed):
    """A connection in the clear."""


class DialedTlsConnection(_Dialed, SSLConnection):
    """A connection with TLS, whose certificate is for the name."""
