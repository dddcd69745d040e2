"""A primary and a streaming standby whose replication runs through a proxy, so that it can be cut and commits lost."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Self

from local_ports import HOST
from patience import wait_until
from postgresql_programs import USER, give, program, run
from postgresql_proxy import PostgresqlProxy
from postgresql_server import PostgresqlServer, Setting


class Standby(PostgresqlServer):
    """A copy of *origin* that follows it through *port*, and answers what only reads."""

    def __init__(self, origin: PostgresqlServer, port: int, **settings: Setting) -> None:
        source = f"host={HOST} port={port} user={USER} application_name=standby"
        super().__init__(**{"primary_conninfo": source, "wal_retrieve_retry_interval": "100ms", **settings})
        self.database = origin.database
        self._origin = origin

    def _make_data(self) -> None:
        source = ["--host", str(self._origin.folder), "--port", str(self._origin.port), "--username", USER]
        options = ["--pgdata", str(self.data), "--checkpoint", "fast", "--no-sync"]
        run([program("pg_basebackup"), *source, *options], folder=self.folder)
        signal = self.data / "standby.signal"
        signal.touch()
        give(signal)


class Replicated:
    """``async with Replicated() as group``: asynchronous unless the settings, which go to both, say otherwise."""

    def __init__(self, **settings: Setting) -> None:
        self._settings = settings
        self._stack = AsyncExitStack()
        self.primary = PostgresqlServer(**settings)
        self.standby: PostgresqlServer
        self.link: PostgresqlProxy
        """What the standby reaches the primary through."""

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            stack.enter_context(self.primary)
            self.link = await stack.enter_async_context(PostgresqlProxy(self.primary))
            self.standby = Standby(self.primary, self.link.port, **self._settings)
            await asyncio.to_thread(stack.enter_context, self.standby)
            await asyncio.to_thread(self._follows)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.standby.stop, immediate=True)
        await self._stack.aclose()

    @property
    def url(self) -> str:
        """Both servers, the primary first."""
        ports = f"{HOST}:{self.primary.port},{HOST}:{self.standby.port}"
        return f"postgresql://{USER}@{ports}/{self.primary.database}"

    async def synced(self) -> None:
        """Wait until the standby shows what the primary has committed now."""
        position = await self.primary.value("SELECT pg_current_wal_lsn()::text")
        statement = "SELECT pg_last_wal_replay_lsn() >= $1::text::pg_lsn"
        await asyncio.to_thread(wait_until, lambda: self.standby.ask(statement, position) == [(True,)], what="synced")

    def cut_replication(self) -> None:
        """Let the primary go on alone without knowing it: what it commits from now on reaches no standby."""
        self.link.blackhole()

    async def promote(self) -> PostgresqlServer:
        """Make the standby a primary. The old primary is not told: kill it, or watch two of them."""
        await asyncio.to_thread(self.standby.ask, "SELECT pg_promote(true, 60)")
        return self.standby

    def _follows(self) -> None:
        streams = "SELECT count(*) FROM pg_stat_replication WHERE state = 'streaming'"
        wait_until(lambda: self.primary.ask(streams) == [(1,)], what="the standby follows the primary")
