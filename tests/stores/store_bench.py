"""
One real store under a scenario: where it is, how it and the network before it fail, and what it still holds.

A scenario asks only what every store can be asked. What it asks blocks the event loop where the very moment counts.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import math
import sqlite3
import time
from base64 import b64decode
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import mysql_stage
import postgresql_stage
import redis_stage
from etcd_server import EtcdCluster
from fault_proxy import FaultProxy
from inside import BootClock
from kahuna_server import KahunaServer
from kazoo.client import KazooClient
from kazoo.exceptions import NoNodeError
from local_ports import HOST
from mysql_proxy import MysqlProxy
from mysql_server import MysqlServer
from patience import wait_until
from postgresql_proxy import PostgresqlProxy
from postgresql_server import PostgresqlServer
from redis_quorum import Quorum, QuorumNetwork
from redis_server import RedisServer
from stays import PATIENCE, eventually, none_left
from zookeeper_server import ZooKeeperServer

from fencing_sdk._values.claim import Mode, mode_named
from fencing_sdk.backends.kahuna.cluster import GET_INFO, AnswerType, body_of
from fencing_sdk.backends.redis import scripts
from fencing_sdk.backends.zookeeper.nodes import in_line


class WaitersBench(Protocol):
    """What a scenario needs of a store with a line. The lock of a scenario has a plain name, such as ``a``."""

    url: str

    async def in_line(self, name: str) -> int:
        """How many wait for the lock now; -1 while the nodes of a store differ."""
        ...

    async def waiting(self, name: str, count: int) -> None:
        """Return when the store knows of *count* waiters of the lock."""
        ...

    async def leavings(self) -> list[object]:
        """What the store still has of clients that are closed: leases, waiters, connections."""
        ...


class StoreBench(WaitersBench, Protocol):
    """What a scenario needs of a store that is a server, behind a network."""

    by_proxy: str
    """The same store, by way of the network with faults."""
    proxy: FaultProxy | QuorumNetwork
    connections: int
    """How many connections one client keeps open at most."""

    def pause(self) -> None:
        """Stop the server in the middle of what it does."""
        ...

    def resume(self) -> None: ...

    def seconds_left(self, name: str) -> float:
        """For how long the server will not hand the lock on, at least; 0 when it is free. Blocks the loop."""
        ...


class AnsweringBench(StoreBench, Protocol):
    """What a scenario needs of a store whose single answers can be lost."""

    calls: Mapping[str, str]
    """A text that a call has in its request; ``first acquire``: on a server that is fresh."""
    leaves: int
    """How often a waiter asks to leave the line."""


async def nothing_left(bench: WaitersBench, *, within: float = PATIENCE) -> None:
    """See that no lease, no waiter and no connection remains."""
    await none_left(bench.leavings, within=within)


BUSY = 300.0
"""Seconds until a crowd of waiters is in line: on a busy machine 200 of them took more than 20 on PostgreSQL."""


async def _counted(ask: Callable[[], Awaitable[int]], count: int) -> None:
    async def reached() -> bool:
        return await ask() == count

    await eventually(reached, what=f"{count} wait", within=BUSY)


def _waiting(modes: Sequence[Mode]) -> int:
    """How many of a line do not hold, by the rules."""
    holds = 0
    while holds < len(modes) and (not holds or (modes[holds].word == modes[0].word and holds < modes[holds].width)):
        holds += 1
    return len(modes) - holds


class Line:
    """A bench of a store that knows who waits."""

    async def in_line(self, name: str) -> int:
        raise NotImplementedError

    async def waiting(self, name: str, count: int) -> None:
        await _counted(lambda: self.in_line(name), count)


class MemoryBench:
    """The store that lives in the process of a client: there is nothing to ask beside it."""

    url = "memory://"


class SqliteBench(Line):
    def __init__(self, path: Path) -> None:
        self.url, self._path = f"sqlite:///{path}", path

    def ask(self, statement: str, *arguments: object) -> list[Any]:
        if not self._path.exists() or not self._path.stat().st_size:
            return []
        with contextlib.closing(sqlite3.connect(self._path, timeout=PATIENCE)) as connection:
            with connection:
                return connection.execute(statement, arguments).fetchall()

    def lines(self) -> dict[str, list[Any]]:
        """The living tickets of each name, as `LineFile` writes them: the moment of death is the sixth value."""
        now = BootClock().now()
        rows = self.ask("SELECT name, line FROM fencing_line")
        return {name: [ticket for ticket in json.loads(line)[1] if ticket[5] > now] for name, line in rows}

    async def in_line(self, name: str) -> int:
        tickets = (await asyncio.to_thread(self.lines)).get(name, [])
        return sum(token is None for *_, token, _permit, _address in tickets)

    async def leavings(self) -> list[object]:
        return [ticket for tickets in (await asyncio.to_thread(self.lines)).values() for ticket in tickets]


class RedisBench(Line):
    connections = 1
    calls: Mapping[str, str] = MappingProxyType(
        {
            **dict.fromkeys(("first acquire", "acquire"), scripts.DRAW.sha),
            "renew": scripts.KEEP_MANY.sha,
            "release": scripts.GIVE_BACK.sha,
            "join": scripts.DRAW.sha,
            "leave": scripts.GIVE_BACK.sha,
        }
    )
    leaves = 2

    def __init__(self, server: RedisServer, proxy: FaultProxy) -> None:
        self.server, self.proxy = server, proxy
        self.url, self.by_proxy = server.url, proxy.url
        self.pause, self.resume = server.pause, server.resume

    def seconds_left(self, name: str) -> float:
        return redis_stage.seconds_left(self.server, name)

    async def in_line(self, name: str) -> int:
        return await redis_stage.waiting(self.server, name)

    async def leavings(self) -> list[object]:
        return [*await redis_stage.keys(self.server), *await redis_stage.connections(self.server)]


class QuorumBench:
    """Three nodes. A fault of the server is one of a majority, a fault of the network one before every node."""

    connections = 1

    def __init__(self, quorum: Quorum, network: QuorumNetwork) -> None:
        self.quorum, self.proxy = quorum, network
        self.url, self.by_proxy = quorum.url, network.url

    def pause(self) -> None:
        for node in self.quorum.nodes[: self.quorum.majority]:
            node.pause()

    def resume(self) -> None:
        for node in self.quorum.nodes:
            node.resume()

    def seconds_left(self, name: str) -> float:
        """Until a majority of the nodes is free."""
        left = sorted(max(0, int(node.ask("PTTL", redis_stage.key(name, "h")))) for node in self.quorum.nodes)
        return left[self.quorum.majority - 1] / 1000

    async def waiting(self, name: str, count: int) -> None:
        """A quorum knows of no waiters; they ask now and then."""
        node = self.quorum.nodes[0]
        before = await redis_stage.calls_of(node, "evalsha")

        async def asked() -> bool:
            return await redis_stage.calls_of(node, "evalsha") >= before + count

        await eventually(asked, what=f"{count} ask")

    async def leavings(self) -> list[object]:
        left: list[object] = []
        for node in self.quorum.nodes:
            keys = await redis_stage.keys(node)
            left += [*(key for key in keys if not key.startswith("{fencing:}:")), *await redis_stage.connections(node)]
        return left


class PostgresqlBench(Line):
    connections = 2  # one for the requests, and one that listens
    calls: Mapping[str, str] = MappingProxyType(
        {
            "first acquire": '"fencing".fencing_draw($1',
            **dict.fromkeys(("acquire", "join"), "fencing_draw"),
            "renew": "fencing_keep",
            **dict.fromkeys(("release", "leave"), "fencing_give_back"),
        }
    )
    leaves = 2

    def __init__(self, server: PostgresqlServer, proxy: PostgresqlProxy) -> None:
        self.server, self.proxy = server, proxy
        self.url, self.by_proxy = server.url, proxy.url
        self.pause, self.resume = server.pause, server.resume

    def seconds_left(self, name: str) -> float:
        return max(0.0, *(left for (left,) in self.server.ask(postgresql_stage.LEFT, name)), 0.0)

    async def in_line(self, name: str) -> int:
        return await postgresql_stage.line(self.server, name)

    async def leavings(self) -> list[object]:
        return await postgresql_stage.leavings(self.server)


class MysqlBench(Line):
    connections = 3  # one for the requests, one that sleeps, and one for renewals of rows that are locked
    calls: Mapping[str, str] = MappingProxyType(  # of the texts that commit
        {
            **dict.fromkeys(("first acquire", "acquire"), "LAST_INSERT_ID"),
            "renew": "UPDATE fencing_line SET dies = LEAST",
            "release": "UPDATE fencing_line SET owner = ''",
            "join": "INSERT INTO fencing_ticket",
            "leave": "DELETE FROM fencing_ticket",
        }
    )
    leaves = 3

    def __init__(self, server: MysqlServer, proxy: MysqlProxy) -> None:
        self.server, self.proxy = server, proxy
        self.url, self.by_proxy = server.url, proxy.url
        self.pause, self.resume = server.pause, server.resume

    def seconds_left(self, name: str) -> float:
        left = "SELECT (dies - UNIX_TIMESTAMP(NOW(6)) * 1000000) / 1000000 FROM {} WHERE name = %s AND token > 0"
        found = [row for table in ("line", "ticket") for row in self.server.ask(left.format(f"fencing_{table}"), name)]
        return max(0.0, *(float(seconds) for (seconds,) in found), 0.0)

    async def in_line(self, name: str) -> int:
        return await mysql_stage.line(self.server, name)

    async def leavings(self) -> list[object]:
        return await mysql_stage.leavings(self.server)


class EtcdBench(Line):
    connections = 100  # the limit of the pool

    def __init__(self, cluster: EtcdCluster, proxy: FaultProxy) -> None:
        self.cluster, self.proxy = cluster, proxy
        self.url = f"{cluster.url}?connect_timeout=20"  # a machine may stand still
        self.by_proxy = f"etcd://{HOST}:{proxy.port}"
        self.pause, self.resume = cluster.members[0].pause, cluster.members[0].resume

    def _keys(self, name: str) -> dict[str, Any]:
        return self.cluster.keys(f"fencing/{name}/")

    def seconds_left(self, name: str) -> float:
        """In whole seconds, rounded down; a moment in the last second, for which etcd leaves the TTL out."""
        heard = [self.cluster.ask("lease/timetolive", {"ID": kv["lease"]}) for kv in self._keys(name).values()]
        left = [int(lease.get("TTL", 0)) for lease in heard]  # -1: the lease is gone
        return max([0.0, *(max(0.001, seconds) for seconds in left if seconds >= 0)])

    async def in_line(self, name: str) -> int:
        found = await asyncio.to_thread(self._keys, name)
        line = sorted(found.values(), key=lambda kv: int(kv["create_revision"]))
        values = [json.loads(b64decode(kv["value"])) for kv in line]
        return _waiting([mode_named(value.get("mode", "lock"), value.get("of")) for value in values])

    async def leavings(self) -> list[object]:
        return list(await asyncio.to_thread(self.cluster.keys))


class ZooKeeperBench(Line):
    connections = 2  # a session for each ttl, and the one with which the client was opened

    def __init__(self, server: ZooKeeperServer, url: str, proxy: FaultProxy, operator: KazooClient) -> None:
        self.server, self.proxy, self._operator = server, proxy, operator
        self._root = url.rsplit("/", 1)[1]
        self.url, self.by_proxy = url, f"zk://{HOST}:{proxy.port}/{self._root}"
        self.pause, self.resume = server.pause, server.resume

    def _line(self, name: str) -> list[Any]:
        try:
            return in_line(self._operator.get_children(f"/{self._root}/{name}"))
        except NoNodeError:
            return []

    def seconds_left(self, name: str) -> float:
        """Infinite while the node is there: ZooKeeper does not tell when a session will end."""
        return math.inf if self._line(name) else 0.0

    async def in_line(self, name: str) -> int:
        return _waiting([node.mode for node in await asyncio.to_thread(self._line, name)])

    async def leavings(self) -> list[object]:
        return [node for name in "ab" for node in await asyncio.to_thread(self._line, name)]


class KahunaBench:
    connections = 100

    def __init__(self, server: KahunaServer, proxy: FaultProxy) -> None:
        self.server, self.proxy = server, proxy
        self.url, self.by_proxy = server.url, f"kahuna://{HOST}:{proxy.port}"
        self.pause, self.resume = server.pause, server.resume

    def seconds_left(self, name: str) -> float:
        answer: dict[str, Any] = {}

        def heard() -> bool:
            """While a renewal is replicated, the server does not say who the owner is."""
            answer.update(self._info(name))
            return answer["type"] != AnswerType.WAITING_FOR_REPLICATION

        wait_until(heard, what=f"the server tells of {name!r}", within=PATIENCE)
        return answer["expires"]["l"] / 1000 - time.time() if answer["owner"] else 0.0

    def _info(self, name: str) -> dict[str, Any]:
        connection = http.client.HTTPConnection(HOST, self.server.ports[0], timeout=PATIENCE)
        with contextlib.closing(connection):
            headers = {"Content-Type": "application/json"}
            connection.request("POST", GET_INFO, body_of(name), headers)
            answer: dict[str, Any] = json.loads(connection.getresponse().read())
        return answer

    async def waiting(self, name: str, count: int) -> None:
        """Kahuna knows of no waiters; they try now and then."""

        async def asked() -> bool:
            requests = await asyncio.to_thread(self.server.seen, "try-lock")
            resources = {request["resource"] for request in requests}
            return any(
                len({request["owner"] for request in requests if request["resource"] == resource}) > count
                for resource in resources
                if resource.endswith(name)
            )

        await eventually(asked, what=f"{count} ask")

    async def leavings(self) -> list[object]:
        return [name for name in "ab" if await asyncio.to_thread(self.seconds_left, name) > 0]
