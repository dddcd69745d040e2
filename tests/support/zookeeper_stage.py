"""What scenarios on ZooKeeper share: an operator with a session of its own, and looks at what is in a line."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any, Self

from kazoo.protocol.serialization import Create2, Delete, Exists
from stays import PATIENCE, eventually

from fencing_sdk import LockClient
from fencing_sdk.abc import Claim, Gone, Place
from fencing_sdk.backends.zookeeper import ZooKeeperBackend, from_url
from fencing_sdk.backends.zookeeper.driver import (
    ALL_CLIENTS,
    ConnectionNews,
    KazooDriver,
    NodeEnds,
)
from fencing_sdk.backends.zookeeper.lines import OwnTicket
from fencing_sdk.backends.zookeeper.session import ZooKeeperSession
from fencing_sdk.errors import BackendUnavailableError


class Operator:
    """Somebody with a ZooKeeper shell: looks at nodes and deletes them."""

    def __init__(self, backend: ZooKeeperBackend) -> None:
        self._backend = backend
        self._paths = backend._recipe.paths

    async def session(self) -> ZooKeeperSession:
        session = self._backend._sessions.any()
        assert await session.settled()
        return session

    async def line(self, name: str) -> list[str]:
        """The nodes of those who hold or wait."""
        look = await self._backend._recipe.look(await self.session(), name)
        return [node.name for node in look.line]

    async def delete(self, name: str, *nodes: str) -> None:
        """Delete *nodes*; without any, the whole folder of a lock."""
        session = await self.session()
        for node in nodes or await self.line(name):
            await session.call(Delete(f"{self._paths.folder(name)}/{node}", -1))
        if not nodes:
            await session.call(Delete(self._paths.folder(name), -1))

    async def keep_folder(self, name: str) -> None:
        """Let the folder of a lock be there, and not be removed because nobody uses the lock."""
        session = await self.session()
        await self._backend._recipe._make_folder(session, name)
        await session.call(Create2(f"{self._paths.folder(name)}/not-ours", b"", ALL_CLIENTS, 0))

    async def has_folder(self, name: str) -> bool:
        return await (await self.session()).call(Exists(self._paths.folder(name), None)) is not None

    async def stands(self, name: str, number: int) -> None:
        """Wait until so many hold or wait."""

        async def look() -> bool:
            return len(await self.line(name)) == number

        await eventually(look, what=f"{number} in line")


def tickets_of(backend: ZooKeeperBackend) -> list[OwnTicket]:
    """The tickets that a backend object knows as its own."""
    return backend._tickets._all()


async def in_place(locks: LockClient, number: int = 1) -> None:
    """Wait until so many of a client have a place in a line and watch whoever is ahead."""
    backend = locks._backend
    assert isinstance(backend, ZooKeeperBackend)

    async def look() -> bool:
        lines = backend._tickets._lines
        waiting = [own for own in tickets_of(backend) if not own.holds]
        return sum(own not in lines[own.claim.name].unwatched for own in waiting) == number

    await eventually(look, what=f"{number} wait")


async def granted(backend: ZooKeeperBackend, claim: Claim) -> Place:
    """Draw until the ticket holds: a connection may break, or take its time."""
    async with asyncio.timeout(PATIENCE):
        while True:
            with suppress(BackendUnavailableError):
                outcome = await backend.draw(claim)
                if isinstance(outcome, Place) and outcome.token is not None:
                    return outcome
            await asyncio.sleep(0.01)


async def kept(backend: ZooKeeperBackend, *claims: Claim) -> list[Place | Gone | None]:
    """Keep tickets, whatever their numbers are."""
    return list(await backend.keep([(claim, 0) for claim in claims]))


async def held_by(backend: ZooKeeperBackend, name: str) -> list[str]:
    """The digests of those who hold a name."""
    (seen,) = await backend.tickets([name])
    return [each.holder for each in seen if each.token is not None]


@asynccontextmanager
async def operating(url: str) -> AsyncIterator[Operator]:
    backend = from_url(url)
    try:
        yield Operator(backend)
    finally:
        await backend.aclose()


async def kill_session(session: ZooKeeperSession) -> None:
    """End *session* as its server would: a second connection goes on with it, and closes it."""
    while not await _close_by_another(session):
        pass  # its own client may have taken it back before it was closed


async def _close_by_another(session: ZooKeeperSession) -> bool:
    """Try to close *session*; whether it was closed already."""
    heard: list[object] = []
    thief = KazooDriver(session._settings, 10.0, session._identity, NodeEnds())
    thief.start(heard.append)

    async def answered() -> bool:
        return bool(heard)

    await eventually(answered, what="the session is taken over")
    gone = isinstance(heard[0], ConnectionNews) and heard[0].ended
    thief.end(close_session=not gone, done=lambda: heard.append("ended"))

    async def ended() -> bool:
        return "ended" in heard

    await eventually(ended, what="the session is closed")
    return gone


class Answers:
    """The turns that a backend writes: carried out, and then not answered (`lost`), or answered when told (`slow`)."""

    def __init__(self, backend: ZooKeeperBackend) -> None:
        self.lost = 0
        self.slow = asyncio.Event()
        self.slow.set()
        self.carried_out = 0
        self._recipe: Any = backend._recipe
        self._write = backend._recipe.write

    def __enter__(self) -> Self:
        self._recipe.write = self._pass
        return self

    def __exit__(self, *_: object) -> None:
        self._recipe.write = self._write

    async def _pass(self, *args: Any, **kwargs: Any) -> Any:
        answer = await asyncio.shield(asyncio.ensure_future(self._write(*args, **kwargs)))
        self.carried_out += 1
        await self.slow.wait()
        if self.lost:
            self.lost -= 1
            raise BackendUnavailableError("ZooKeeperBackend", "acquire", "the answer is lost")
        return answer
