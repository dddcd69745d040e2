"""A primary and a replica whose replication runs through a proxy, so that it can be cut and commits lost."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Self

from fault_proxy import FaultProxy
from local_ports import HOST
from mysql_server import USER, MysqlServer, Setting
from patience import wait_until

_MARIADB = (
    "CHANGE MASTER TO MASTER_HOST='{}', MASTER_PORT={}, MASTER_USER='{}', MASTER_USE_GTID=slave_pos, MASTER_SSL=0"
)
_MYSQL = (
    "CHANGE REPLICATION SOURCE TO SOURCE_HOST='{}', SOURCE_PORT={}, SOURCE_USER='{}', SOURCE_AUTO_POSITION=1,"
    " GET_SOURCE_PUBLIC_KEY=1"
)
_WORDS = {"mariadb": (_MARIADB, "SLAVE"), "mysql": (_MYSQL, "REPLICA")}
"""How each calls the other server, and the one that follows."""


class Replicated:
    """``async with Replicated("mariadb") as group``: asynchronous; until it is promoted, the replica is read-only."""

    def __init__(self, flavour: str) -> None:
        change, self._follower = _WORDS[flavour]
        self._change = change
        settings: dict[str, Setting] = {"skip_log_bin": False, "log_bin": "binlog", "binlog_format": "ROW"}
        if flavour == "mysql":
            settings |= {"gtid_mode": True, "enforce_gtid_consistency": True}
        self.primary = _Logging(flavour, server_id=1, **settings)
        self.replica = _Logging(flavour, server_id=2, read_only=True, **settings)
        self.link: FaultProxy
        """What the replica reaches the primary through."""
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            await asyncio.to_thread(stack.enter_context, self.primary)
            await asyncio.to_thread(stack.enter_context, self.replica)
            self.primary.ask(f"GRANT REPLICATION SLAVE ON *.* TO '{USER}'@'{HOST}'")
            self.link = await stack.enter_async_context(FaultProxy(self.primary.port))
            await self.replica.fetch(self._change.format(HOST, self.link.port, USER))
            await self.replica.fetch(f"START {self._follower}")
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    @property
    def url(self) -> str:
        """Both servers, the primary first."""
        return self.primary.url.replace(f":{self.primary.port}", f":{self.primary.port},{HOST}:{self.replica.port}")

    async def synced(self) -> None:
        """Wait until the replica shows what the primary has committed now."""
        await self.primary.execute("CREATE TABLE synced (n INT)")
        await asyncio.to_thread(
            wait_until, lambda: bool(self.replica.ask("SHOW TABLES LIKE 'synced'")), what="the replica follows"
        )

    def cut_replication(self) -> None:
        """Let the primary go on alone without knowing it: what it commits from now on reaches no replica."""
        self.link.blackhole()

    async def promote(self) -> MysqlServer:
        """Make the replica a primary. The old primary is not stopped: kill it, or watch two of them."""
        await self.replica.fetch(f"STOP {self._follower}")
        await self.replica.fetch("SET GLOBAL read_only = OFF")
        return self.replica


class _Logging(MysqlServer):
    """A server with a log for replicas, and with a number of its own: its data are a copy."""

    def _command(self) -> list[str]:
        (self.data / "auto.cnf").unlink(missing_ok=True)
        return [part for part in super()._command() if not part.startswith("--skip_log_bin")]
