"""What scenarios on etcd share: what an operator sees of a lock, and clients that wait for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

from etcd_server import EtcdCluster
from event_log import CLOCK, Log
from stays import PATIENCE, Stay

from fencing_sdk import LockClient
from fencing_sdk._etcd import Gateway
from fencing_sdk.abc import Backend, Claim, Place
from fencing_sdk.backends.etcd import EtcdBackend, from_url
from fencing_sdk.errors import BackendUnavailableError
from fencing_sdk.events import Renewed

SHORT_IN_LINE = {"ttl": 6.0, "safety_buffer": 2.4, "heartbeat_interval": 0.4}
"""`SHORT` for a lease that is to be lost after another claim has joined the line: it is valid for 3.5 s, not 1.6 s."""


async def keys(cluster: EtcdCluster, name: str = "") -> list[str]:
    """The keys of a lock, or of all locks, the oldest first."""
    found = await asyncio.to_thread(cluster.keys, f"fencing/{name}/" if name else "fencing/")
    return sorted(found, key=lambda key: int(found[key]["create_revision"]))


async def count_of_keys(cluster: EtcdCluster, name: str, count: int) -> None:
    """Wait until so many hold or wait."""
    stop = asyncio.get_running_loop().time() + 5 * PATIENCE
    while len(found := await keys(cluster, name)) != count:
        assert asyncio.get_running_loop().time() < stop, f"{len(found)} keys, and not {count}"
        await asyncio.sleep(0.02)


def ask_first(gateway: Gateway, port: int) -> None:
    """Let the member at *port* be the first that is asked: clients begin anywhere."""
    endpoints = gateway._endpoints
    while not endpoints.in_turn()[0].origin.endswith(f":{port}"):
        endpoints.mark_failed(endpoints.in_turn()[0])


def keep_no_lease_alive_first(backend: EtcdBackend) -> None:
    """Let the next request go first: half a second after the last keep-alive, another keep-alive goes before it."""
    for lease in backend._leases._leases.values():
        lease.renewed_at = backend._leases.now()


async def granted(backend: Backend, claim: Claim) -> int:
    place = await backend.draw(claim, only_if_it_holds=True)
    assert isinstance(place, Place), place
    assert place.token is not None
    return place.token


async def kept(backend: Backend, *claims: Claim) -> list[bool]:
    """Keep tickets; return which of them are there."""
    return [isinstance(answer, Place) for answer in await backend.keep([(claim, 0) for claim in claims])]


class Late:
    """The requests of a backend; those that `late` picks are carried out when `deliver` is called."""

    def __init__(self, backend: EtcdBackend, late: Callable[[dict[str, Any]], bool]) -> None:
        self._call = backend._gateway.call
        self._late = late
        self._delivered = asyncio.Event()
        self.tasks: list[asyncio.Task[Any]] = []
        backend._gateway.call = self._pass  # type: ignore[method-assign]

    async def _pass(self, operation: str, path: str, body: dict[str, Any], **options: bool) -> Any:
        if not self._late(body):
            return await self._call(operation, path, body, **options)
        self.tasks.append(asyncio.create_task(self._deliver(operation, path, body, **options)))
        return await asyncio.shield(self.tasks[-1])  # a caller that is cancelled does not take the request back

    async def _deliver(self, *request: Any, **options: bool) -> Any:
        await self._delivered.wait()
        return await self._call(*request, **options)

    async def deliver(self) -> None:
        """See all that was held back carried out."""
        self._delivered.set()
        await asyncio.wait(self.tasks)


@asynccontextmanager
async def backend_on(url: str, **options: Any) -> AsyncIterator[EtcdBackend]:
    backend = from_url(url, **{"connect_timeout": 20.0} | options)  # a machine may stand still
    try:
        yield backend
    finally:
        await backend.aclose()


async def held_for(seconds: float, log: Log, rival: LockClient, name: str) -> None:
    """Renewals go on for so long, and no other claim gets the lock."""
    started = CLOCK.now()
    while CLOCK.now() < started + seconds:
        renewed = len(log.of(Renewed))
        await log.seen(Renewed, renewed + 1)
        with suppress(BackendUnavailableError):
            assert await rival.lock(name, ttl=20).try_acquire() is None


async def six_in_line(cluster: EtcdCluster, name: str, *clients: LockClient) -> list[Stay]:
    """Wait behind the holder, by the clients in turn, each in line before the next one comes."""
    stays = []
    for number in range(6):
        stays.append(Stay(clients[number % len(clients)].lock(name, ttl=20)))
        await count_of_keys(cluster, name, number + 2)
    return stays


async def in_order(stays: Sequence[Stay]) -> None:
    """See those who wait served one after the other, each with a higher token."""
    tokens = []
    for number, stay in enumerate(stays):
        await stay.begun()
        assert not any(later.entered.is_set() for later in stays[number + 1 :])
        tokens.append(stay.token)
        await stay.end()
    assert tokens == sorted(set(tokens))
