"""A master and replicas whose replication runs through a proxy, so that it can be cut and writes can be lost."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Any, Self

from fault_proxy import FaultProxy
from local_ports import HOST
from patience import until
from redis_server import RedisServer, Setting


class Replicated:
    """``async with Replicated(replicas=2, min_replicas_to_write=1) as group``: settings go to every server."""

    def __init__(self, *, replicas: int = 1, binary: str = "redis-server", **settings: Setting) -> None:
        self._settings: dict[str, Setting] = {"repl_ping_replica_period": 1, **settings}
        self._binary = binary
        self._number = replicas
        self._stack = AsyncExitStack()
        self.master = RedisServer(binary=binary, tls=None, **self._settings)
        self.replicas: list[RedisServer] = []
        self.links: list[FaultProxy] = []
        """What each replica reaches its master through, in the order of `replicas`."""

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            stack.enter_context(self.master)
            for _ in range(self._number):
                link = await stack.enter_async_context(FaultProxy(self.master.port))
                origin = f"{HOST} {link.port}"
                replica = RedisServer(binary=self._binary, tls=None, **(self._settings | {"replicaof": origin}))
                self.links.append(link)
                self.replicas.append(replica)
                await asyncio.to_thread(stack.enter_context, replica)
            await until(self._all_follow, what="the replicas follow the master")
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    @property
    def primary(self) -> RedisServer:
        return self.master

    def _all_follow(self) -> bool:
        """Whether each replica follows, and the master knows it: a replica says so before the master does."""
        known = sum("state=online" in line for line in info(self.master, "replication").values())
        return known == len(self.replicas) and all(map(is_following, self.replicas))

    async def synced(self) -> None:
        """Wait until every replica has what the master has now."""
        position = info(self.master, "replication")["master_repl_offset"]
        await until(
            lambda: all(int(info(each, "replication")["slave_repl_offset"]) >= int(position) for each in self.replicas),
            what="the replicas have caught up",
        )

    def cut_replication(self) -> None:
        """Let the master go on alone without knowing it: what it writes from now on reaches no replica."""
        for link in self.links:
            link.blackhole()

    async def promote(self, replica: RedisServer | None = None) -> RedisServer:
        """Make a replica (the first) a master. The old master is not told: kill it, or watch two masters."""
        chosen = self.replicas[0] if replica is None else replica
        await chosen.command("REPLICAOF", "NO", "ONE")
        return chosen


def info(server: RedisServer, section: str) -> dict[str, str]:
    """What ``INFO section`` says."""
    text: Any = server.ask("INFO", section)
    return dict(line.split(":", 1) for line in text.splitlines() if ":" in line)


def is_following(replica: RedisServer) -> bool:
    return info(replica, "replication").get("master_link_status") == "up"
