"""
The master of a service: its Sentinels are asked at every dial, and the answer is not kept.

An answer may be out of date. So `ServerDialer` asks the server for its role as well, and refuses a replica.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from redis.asyncio.sentinel import MasterNotFoundError
from redis.exceptions import ResponseError

from fencing_sdk.backends.redis.connection.dial import (
    BACKEND,
    AddressSource,
    OpenConnection,
    ServerDialer,
    ServerSettings,
    is_unknown_to_server,
)
from fencing_sdk.backends.redis.connection.first_success import first_success
from fencing_sdk.errors import BackendRefusedError

_NO_SENTINEL = "the server is no Sentinel; the hosts of redis+sentinel:// are Sentinels, mostly on port 26379"
_FROM_SENTINELS = AddressSource(
    "where the Sentinels say that the master is",
    "set 'sentinel resolve-hostnames yes' and 'sentinel announce-hostnames yes', and let them monitor a host name",
)
_DOWN = {b"s_down", b"o_down"}


@dataclass(frozen=True, slots=True, repr=False)
class SentinelService:
    """A service, and the Sentinels that watch it."""

    name: str
    sentinels: Sequence[ServerSettings]

    peers: int = 0
    """Other Sentinels that a Sentinel must know. The answer of one that knows fewer does not count."""

    host: str | None = None
    """The host of its servers, if the one that the Sentinels name cannot be reached from here."""

    async def master(self) -> tuple[str, int]:
        """
        Ask for the address of the master.

        Raises:
            MasterNotFoundError: no Sentinel that was reached knows a master that is up.
            UnreachableError: no Sentinel was reached.
            redis.exceptions.RedisError: a Sentinel refused the login.
        """
        return await first_success([partial(self._ask, sentinel) for sentinel in self.sentinels])

    async def _ask(self, sentinel: ServerSettings) -> tuple[str, int]:
        try:
            masters = await sentinel.ask("SENTINEL", "MASTERS")
        except ResponseError as error:
            if not is_unknown_to_server(error):
                raise
            raise BackendRefusedError(BACKEND, "connect", _NO_SENTINEL) from error
        assert isinstance(masters, list)
        for fields in masters:
            state = dict(zip(fields[::2], fields[1::2], strict=True))
            if state[b"name"] == self.name.encode(errors="surrogateescape"):
                return self._address(state)
        msg = "The Sentinel does not watch this service"
        raise MasterNotFoundError(msg)

    def _address(self, state: dict[bytes, bytes]) -> tuple[str, int]:
        flags = set(state[b"flags"].split(b","))
        if b"master" not in flags or flags & _DOWN or int(state[b"num-other-sentinels"]) < self.peers:
            msg = "The Sentinel knows no master that is up"
            raise MasterNotFoundError(msg)
        return self.host or state[b"ip"].decode(), int(state[b"port"])


class SentinelDialer:
    """Opens connections to the master of a service."""

    def __init__(self, server: ServerSettings, service: SentinelService) -> None:
        self.server = server
        self.service = service

    async def dial(self, protocol: asyncio.Protocol) -> OpenConnection:
        """See `fencing_sdk.backends.redis.connection.dial.RedisDialer.dial`."""
        server = self.server.at(*await self.service.master())
        return await ServerDialer(server, source=_FROM_SENTINELS).dial(protocol)
