"""Three Sentinels that watch a master and a replica, and replace the master when it is gone."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from types import TracebackType
from typing import Self

import hiredis
from local_ports import HOST
from patience import wait_until
from redis_replicas import info, is_following
from redis_server import RedisServer, Setting, version_of


class _Sentinel(RedisServer):
    mode = "--sentinel"

    def defaults(self) -> dict[str, Setting]:
        return {}

    def start(self) -> Self:
        """Start, and make it look more often than once a second: else it takes every new master for dead at first."""
        super().start()
        if version_of(self.binary) >= (7,):
            periods = {"ping-period": 300, "info-period": 500, "ask-period": 200, "publish-period": 300}
            self.ask("SENTINEL", "DEBUG", *(word for period in periods.items() for word in period))
        return self


class Sentinels:
    """
    A master that is replaced some 2 s after it stopped answering.

    Starting takes some seconds and `failover` too, so share one group: `heal` makes it whole again.
    """

    name = "fencing"
    """What the master is called."""

    def __init__(self, *, replicas: int = 1, binary: str = "redis-server", **settings: Setting) -> None:
        options: dict[str, Setting] = {"repl_ping_replica_period": 1, **settings}
        self.servers = [RedisServer(binary=binary, tls=None, **options) for _ in range(1 + replicas)]
        self.sentinels: list[RedisServer] = []
        self._binary = binary
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            for server in self.servers:
                stack.enter_context(server)
            wait_until(lambda: self._follow(self.servers[0]), what="the replicas follow the master")
            for down_after in self._patience():
                self.sentinels.append(stack.enter_context(self._sentinel(down_after)))
            self._wait_until_whole()
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    @property
    def addresses(self) -> list[tuple[str, int]]:
        """Where the Sentinels listen, as drivers want it."""
        return [(HOST, sentinel.port) for sentinel in self.sentinels]

    @property
    def master(self) -> RedisServer:
        """The server that the Sentinels take for the master."""
        port = self._views()[0][1]
        return next(server for server in self.servers if server.port == port)

    async def failover(self, *, within: float = 60.0) -> RedisServer:
        """Kill the master and wait until all Sentinels agree on another one, which is returned."""
        lost = self.master
        lost.kill()
        return await self.replaced(lost, within=within)

    async def replaced(self, lost: RedisServer, *, within: float = 60.0) -> RedisServer:
        """Wait until all Sentinels agree on a master other than *lost*, such as one that the test has paused."""
        await asyncio.to_thread(
            wait_until, lambda: self.master is not lost and self._agreed(), what="a new master", within=within
        )
        return self.master

    def heal(self) -> None:
        """Bring everybody back, let the replicas follow the master of today, and wait until all know one another."""
        for server in (*self.servers, *self.sentinels):
            if server.running:
                server.resume()
            else:
                server.start()
        self._wait_until_whole()

    # The inside

    def _patience(self) -> tuple[int, int, int]:
        """Milliseconds; each Sentinel has its own, since those that miss the master together split the vote."""
        return (700, 1000, 1700) if version_of(self._binary) >= (7,) else (1300, 1600, 2400)

    def _sentinel(self, down_after: int) -> RedisServer:
        watch = [
            f"monitor {self.name} {HOST} {self.servers[0].port} 2",
            f"down-after-milliseconds {self.name} {down_after}",
            f"failover-timeout {self.name} 2000",
            f"parallel-syncs {self.name} 1",
        ]
        if password := self.servers[0].settings.get("requirepass"):
            watch.append(f"auth-pass {self.name} {password}")
        return _Sentinel(binary=self._binary, sentinel=watch)

    def _follow(self, master: RedisServer) -> bool:
        """Tell the other servers who is the master; True when they all have its data."""
        replicas = [server for server in self.servers if server is not master]
        for replica in replicas:
            if info(replica, "replication").get("master_port") != str(master.port):
                replica.ask("REPLICAOF", HOST, master.port)
        return all(map(is_following, replicas))

    def _views(self) -> list[tuple[str, int]]:
        """What each living Sentinel says is the master's address."""
        living = [sentinel for sentinel in self.sentinels if sentinel.running]
        said = [sentinel.ask("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self.name) for sentinel in living]
        return [(host, int(port)) for host, port in said]

    def _agreed(self) -> bool:
        """Whether all Sentinels name one master, and it says the same of itself."""
        try:
            return len(set(self._views())) == 1 and self.master.running and self.master.ask("ROLE")[0] == "master"
        except (OSError, hiredis.ReplyError):
            return False

    def _wait_until_whole(self) -> None:
        wait_until(self._whole, what="the Sentinels know everybody")

    def _whole(self) -> bool:
        """Whether all is quiet: one master, which everybody follows and no Sentinel doubts."""
        calm = self._agreed() and all(self._master_as_seen(each)["flags"] == "master" for each in self.sentinels)
        return calm and self._follow(self.master) and all(map(self._sees_all, self.sentinels))

    def _master_as_seen(self, sentinel: RedisServer) -> dict[str, str]:
        said: list[str] = sentinel.ask("SENTINEL", "MASTER", self.name)
        return dict(zip(said[::2], said[1::2], strict=True))

    def _sees_all(self, sentinel: RedisServer) -> bool:
        replicas: list[list[str]] = sentinel.ask("SENTINEL", "REPLICAS", self.name)
        healthy = [each for each in replicas if each[each.index("flags") + 1] == "slave"]
        others = int(self._master_as_seen(sentinel)["num-other-sentinels"])
        return others == 2 and len(healthy) == len(self.servers) - 1
