"""
Reads a URL, or clients: which servers are the nodes. Opens no connection, and reads no file.

    redis+quorum://[[user]:password@]host[:port],host[:port],host[:port][/db]      rediss+quorum:// with TLS
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from redis.asyncio.connection import Connection, SSLConnection

from fencing_sdk._values.store_url import refuse_url
from fencing_sdk.backends.redis.connection.client_settings import servers_of_client
from fencing_sdk.backends.redis.connection.dial import RedisDialer, ServerDialer
from fencing_sdk.backends.redis.options import DEFAULT_PORT, RedisUrlKind, read_url
from fencing_sdk.errors import ConfigurationError

FEWEST, MOST = 3, 7

SCHEMES: Mapping[str, RedisUrlKind] = {
    "redis+quorum": RedisUrlKind(Connection, ("ssl_", "sentinel_")),
    "rediss+quorum": RedisUrlKind(SSLConnection, ("sentinel_",)),
}
"""The schemes of this backend."""


@dataclass(frozen=True, slots=True, repr=False)
class QuorumTopology:
    """The nodes of a quorum."""

    dialers: Sequence[RedisDialer]

    def __post_init__(self) -> None:
        if not FEWEST <= len(self.dialers) <= MOST:
            msg = f"a quorum needs {FEWEST} to {MOST} independent servers, not {len(self.dialers)}; for one: redis://"
            raise ConfigurationError(msg)


def topology_from_url(url: str, options: Mapping[str, object]) -> QuorumTopology:
    """
    Read *url*.

    Raises:
        ConfigurationError: the URL or an option cannot be used.
    """
    parts = read_url(url, options, SCHEMES)
    if not parts.url.hosts:
        refuse_url("must look like redis+quorum://host:6379,host:6379,host:6379")
    addresses = parts.addresses(DEFAULT_PORT)
    parts.take_database(parts.url.path.strip("/"))
    if len(set(addresses)) < len(addresses):
        refuse_url("names one server twice: it would vote twice")
    return QuorumTopology([ServerDialer(parts.server().at(*address)) for address in addresses])


def topology_from_clients(clients: object) -> QuorumTopology:
    """
    Read how *clients* make their connections, each to one server. The clients themselves are not used.

    Raises:
        ConfigurationError: they are no asyncio clients of redis-py or valkey-py, or not each of one server.
    """
    if not isinstance(clients, Sequence) or isinstance(clients, str | bytes):
        msg = "clients must be a list of asyncio clients of redis-py or valkey-py, one for each node"
        raise ConfigurationError(msg)
    servers = [servers_of_client(client) for client in clients]
    dialers = [server for server in servers if isinstance(server, ServerDialer)]
    if len(dialers) < len(servers):
        msg = "clients must lead to one server each, not to a cluster, nor to a service of Sentinels: it may fail over"
        raise ConfigurationError(msg)
    return QuorumTopology(dialers)
