"""
Who is the master of a service now: asked of its Sentinels at every dial, and remembered by nobody.

An answer may be out of date, so the server itself is asked for its role as well: `ServerDialer`
refuses one that has been demoted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from redis.asyncio.sentinel import MasterNotFoundError
from redis.exceptions import ResponseError

from fencing_sdk.backends.redis._dial import BACKEND, Link, Server, ServerDialer, is_unknown_to_server
from fencing_sdk.backends.redis._race import first
from fencing_sdk.errors import BackendRefusedError

__all__ = ["SentinelDialer", "Service"]

_NO_SENTINEL = "the server is no Sentinel; the hosts of redis+sentinel:// are Sentinels, mostly on port 26379"
_BY_SENTINELS = "where the Sentinels say that the master is"
_DOWN = {b"s_down", b"o_down"}


@dataclass(frozen=True, slots=True, repr=False)
class Service:
    """A service, and the Sentinels that watch it."""

    name: str
    sentinels: Sequence[Server]

    peers: int = 0
    """How many other Sentinels one must know for its answer to count."""

    host: str | None = None
    """Where its servers are reached, if not where the Sentinels say."""

    async def master(self) -> tuple[str, int]:
        """
        Ask for the address of the master.

        Raises:
            MasterNotFoundError: no Sentinel that was reached knows a master that is up.
            UnreachableError: no Sentinel was reached.
            redis.exceptions.RedisError: a Sentinel refused the login.
        """
        return await first([_Question(self, sentinel) for sentinel in self.sentinels])


@dataclass(frozen=True, slots=True, repr=False)
class _Question:
    """Asks one Sentinel."""

    service: Service
    sentinel: Server

    async def __call__(self) -> tuple[str, int]:
        try:
            masters = await self.sentinel.ask("SENTINEL", "MASTERS")
        except ResponseError as error:
            if not is_unknown_to_server(error):
                raise
            raise BackendRefusedError(BACKEND, "connect", _NO_SENTINEL) from error
        assert isinstance(masters, list)
        for fields in masters:
            state = dict(zip(fields[::2], fields[1::2], strict=True))
            if state[b"name"] == self.service.name.encode(errors="surrogateescape"):
                return self._address(state)
        msg = "The Sentinel does not watch this service"
        raise MasterNotFoundError(msg)

    def _address(self, state: dict[bytes, bytes]) -> tuple[str, int]:
        flags = set(state[b"flags"].split(b","))
        if b"master" not in flags or flags & _DOWN or int(state[b"num-other-sentinels"]) < self.service.peers:
            msg = "The Sentinel knows no master that is up"
            raise MasterNotFoundError(msg)
        return self.service.host or state[b"ip"].decode(), int(state[b"port"])


class SentinelDialer:
    """Dials the master of a service."""

    def __init__(self, server: Server, service: Service) -> None:
        self._server = server
        self._service = service

    async def dial(self, protocol: asyncio.Protocol) -> Link:
        """See `fencing_sdk.backends.redis._dial.Dialer.dial`."""
        server = self._server.at(*await self._service.master())
        return await ServerDialer(server, source=_BY_SENTINELS).dial(protocol)
