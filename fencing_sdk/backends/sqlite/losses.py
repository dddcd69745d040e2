"""
How a client hears of revocations: on a socket of its own, whose name stands in the file while it listens.

The process that revokes a grant sends a datagram to every such socket, when it has committed. `RevocationWatcher`
decides when a client listens. Where there are no such sockets (see `wakeup_socket`), or the client is in another
network namespace, the next renewal notices the loss.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TypeVar

from fencing_sdk._values.claim import Claim
from fencing_sdk.backends._shared.revocation_watcher import RevocationWatcher, StopListening
from fencing_sdk.backends.sqlite.connection.thread import SqlThread
from fencing_sdk.backends.sqlite.operator_rows import OperatorRows
from fencing_sdk.backends.sqlite.wakeup_socket import WakeupSocket, open_wakeup_socket

T = TypeVar("T")


class SqliteLossWatcher(RevocationWatcher):
    """
    The grants of one backend, each until it ends.

    Args:
        sql: The thread of the backend.
    """

    def __init__(self, sql: SqlThread) -> None:
        super().__init__()
        self._sql = sql
        self._socket: WakeupSocket | None = None

    async def listen(self) -> StopListening | None:
        """See `RevocationWatcher.listen`."""
        if self._socket is not None:  # of an earlier loop, or of a call that has failed
            self._socket.close()
        self._socket = open_wakeup_socket(self.on_message)
        if self._socket is None:
            return None
        name = self._socket.name
        await self._ask(lambda rows: rows.listen(name))
        return self._stop

    async def reasons(self, claims: Sequence[Claim]) -> list[str | None]:
        """See `RevocationWatcher.reasons`."""
        return await self._ask(lambda rows: rows.reasons(claims))

    async def _stop(self) -> None:
        """Close the socket and delete its row. A forked child closes only its copy: the row is the parent's."""
        listened, self._socket = self._socket, None
        if listened is None:
            return
        listened.close()
        if listened.of_this_process and self._sql.started:
            await self._ask(lambda rows: rows.stop_listening(listened.name), surely=True)

    async def _ask(self, do: Callable[[OperatorRows], T], *, surely: bool = False) -> T:
        return await asyncio.wrap_future(self._sql.submit(do, urgent=True, surely=surely))

    async def aclose(self) -> None:
        """Watch nothing any more, before the file is closed."""
        await super().aclose()
        with suppress(Exception):  # the next revocation deletes a row without a socket
            await self._stop()
