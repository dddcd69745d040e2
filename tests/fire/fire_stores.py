"""The real servers behind each backend, and what is done to them."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import random
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from child_processes import end, spawn
from etcd_server import BINARY, EtcdCluster
from fire_ports import keep, kept
from kahuna_server import KahunaServer
from patience import wait_until
from postgresql_programs import USER
from postgresql_server import PostgresqlServer
from redis_sentinels import Sentinels
from redis_server import HOST, RedisServer
from zookeeper_server import ZooKeeperEnsemble, ZooKeeperServer

Harm = Callable[[float], Awaitable[bool]]
"""Does something to a server for so many seconds and makes it good again; tells whether it really happened."""

TTL = 2.0


class Store:
    """
    A backend's servers. The bench holds them directly; workers reach `ports` through proxies of their own.

    Attributes:
        ttl: What workers ask for.

        gone: Seconds after which the store has handed on what a dead client held, if all is well.

        served: Seconds after faults have ended within which everybody gets a turn.
    """

    name = ""
    ttl = TTL
    gone = TTL

    def __init__(self, folder: Path, chance: random.Random) -> None:
        self.folder = folder
        self.random = chance

    @property
    def served(self) -> float:
        return 2 * self.gone + 6.0

    @property
    def ports(self) -> list[int]:
        return []

    @property
    def harms(self) -> dict[str, Harm]:
        raise NotImplementedError

    def url(self, ports: Sequence[int] = ()) -> str:
        """Where the store is: its own address, or through proxies on *ports*."""
        raise NotImplementedError

    def start(self) -> None:
        raise NotImplementedError

    def heal(self) -> None:
        """Let every server run and answer."""

    def close(self) -> None:
        raise NotImplementedError

    def log(self) -> str:
        return ""


async def _call(function: Callable[..., object], *arguments: object) -> None:
    await asyncio.to_thread(function, *arguments)


class Alone(Store):
    """One server."""

    server: Any

    @property
    def harms(self) -> dict[str, Harm]:
        return {"server frozen": self._freeze, "server killed": self._kill}

    async def _freeze(self, seconds: float) -> bool:
        await _call(self.server.pause)
        await asyncio.sleep(seconds)
        await _call(self.server.resume)
        return True

    async def _kill(self, seconds: float) -> bool:
        """``kill -9``, and started again on its data."""
        before = getattr(self.server, "pid", None)
        await _call(self.server.kill)
        with kept(self.ports):
            await asyncio.sleep(min(seconds, 0.5))
            await _call(self.server.start)
        return before is None or self.server.pid != before

    def start(self) -> None:
        self.server.start()

    def heal(self) -> None:
        if not self.server.running:
            self.server.start()
        self.server.resume()

    def close(self) -> None:
        self.server.close()

    def log(self) -> str:
        return str(self.server.log())


class Redis(Alone):
    name = "redis"

    def __init__(self, folder: Path, chance: random.Random) -> None:
        super().__init__(folder, chance)
        self.server = RedisServer(appendonly=True, appendfsync="everysec")  # a killed process loses nothing by it

    @property
    def ports(self) -> list[int]:
        return [self.server.port]

    def url(self, ports: Sequence[int] = ()) -> str:
        return f"redis://{HOST}:{(ports or self.ports)[0]}"


class RedisSentinel(Store):
    """
    A master and a replica that must have every grant, and three Sentinels.

    Clients are told the address of the master itself, so there is no network of their own between.
    """

    name = "redis-sentinel"

    def __init__(self, folder: Path, chance: random.Random) -> None:
        super().__init__(folder, chance)
        self.group = Sentinels(appendonly=True, appendfsync="everysec")

    @property
    def served(self) -> float:
        return super().served + 10.0

    @property
    def harms(self) -> dict[str, Harm]:
        return {
            "master killed": self._kill_master,
            "master frozen": self._freeze_master,
            "master frozen until replaced": self._replace_frozen,
            "replica killed": self._kill_replica,
        }

    async def _kill_master(self, _seconds: float) -> bool:
        lost = await asyncio.to_thread(lambda: self.group.master)
        await _call(lost.kill)
        with kept([lost.port]):
            new = await self.group.replaced(lost)
            await _call(self.group.heal)
        return new is not lost

    async def _freeze_master(self, seconds: float) -> bool:
        master = await asyncio.to_thread(lambda: self.group.master)
        master.pause()
        await asyncio.sleep(min(seconds, 0.6))  # shorter than any Sentinel's patience
        master.resume()
        return True

    async def _replace_frozen(self, _seconds: float) -> bool:
        master = await asyncio.to_thread(lambda: self.group.master)
        master.pause()
        try:
            new = await self.group.replaced(master)
        finally:
            master.resume()
        await _call(self.group.heal)
        return new is not master

    async def _kill_replica(self, seconds: float) -> bool:
        master = await asyncio.to_thread(lambda: self.group.master)
        replica = next(server for server in self.group.servers if server is not master)
        await _call(replica.kill)
        with kept([replica.port]):
            await asyncio.sleep(min(seconds, 0.5))
            await _call(self.group.heal)
        return True

    def url(self, ports: Sequence[int] = ()) -> str:
        hosts = ",".join(f"{host}:{port}" for host, port in self.group.addresses)
        return f"redis+sentinel://{hosts}/{self.group.name}?min_replicas=1"

    def start(self) -> None:
        self.group.__enter__()

    def heal(self) -> None:
        self.group.heal()

    def close(self) -> None:
        self.group.__exit__(None, None, None)

    def log(self) -> str:
        return "\n".join(server.log()[-5000:] for server in (*self.group.servers, *self.group.sentinels))


class Postgresql(Alone):
    name = "postgresql"

    def __init__(self, folder: Path, chance: random.Random) -> None:
        super().__init__(folder, chance)
        self.server = PostgresqlServer()

    @property
    def harms(self) -> dict[str, Harm]:
        return {**super().harms, "sessions terminated": self._terminate}

    async def _terminate(self, _seconds: float) -> bool:
        """What ``pg_terminate_backend`` does to all clients."""
        statement = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid()"
        statement += " AND backend_type = 'client backend'"
        return bool(await asyncio.to_thread(self.server.ask, statement))

    @property
    def ports(self) -> list[int]:
        return [self.server.port]

    def url(self, ports: Sequence[int] = ()) -> str:
        return str(self.server.url_as(USER, port=(ports or self.ports)[0]))


class Members(Store):
    """Three members, one of which leads."""

    members: list[Any]

    @property
    def ports(self) -> list[int]:
        return [member.port for member in self.members]

    @property
    def harms(self) -> dict[str, Harm]:
        return {
            "leader killed": lambda seconds: self._kill_one(self.leader, seconds),
            "leader frozen": lambda seconds: self._freeze_one(self.leader, seconds),
            "member killed": lambda seconds: self._kill_one(self.follower, seconds),
            "member frozen": lambda seconds: self._freeze_one(self.follower, seconds),
            "majority frozen": self._freeze_majority,
            "all servers killed": self._kill_all,
        }

    def leader(self) -> Any:
        raise NotImplementedError

    def ports_of(self, member: Any) -> list[int]:
        """Everything that a member listens on, or may have to."""
        raise NotImplementedError

    def follower(self) -> Any:
        leader = self.leader()
        return self.random.choice([member for member in self.members if member is not leader])

    async def _kill_one(self, which: Callable[[], Any], seconds: float) -> bool:
        member = await asyncio.to_thread(which)
        before = member.pid
        await _call(member.kill)
        with kept(self.ports_of(member)):
            await asyncio.sleep(seconds)
            await _call(self.heal)
        return bool(member.pid != before)

    async def _freeze_one(self, which: Callable[[], Any], seconds: float) -> bool:
        member = await asyncio.to_thread(which)
        member.pause()
        await asyncio.sleep(seconds)
        await _call(self.heal)
        return True

    async def _freeze_majority(self, seconds: float) -> bool:
        for member in self.members[1:]:
            member.pause()
        await asyncio.sleep(seconds)
        await _call(self.heal)
        return True

    async def _kill_all(self, _seconds: float) -> bool:
        before = [member.pid for member in self.members]
        for member in self.members:
            await _call(member.kill)
        with kept(port for member in self.members for port in self.ports_of(member)):
            await _call(self.heal)
        return not set(before) & {member.pid for member in self.members}


class Etcd(Members):
    name = "etcd"
    gone = 5.0  # a lease of three seconds, up to one until etcd looks, and one for the leader's clock

    @property
    def harms(self) -> dict[str, Harm]:
        """
        Where etcd has the defect, a leader is killed and not frozen.

        Before 3.4.31 and 3.5.13 a leader that has stood still ends leases that were kept alive with its successor
        meanwhile (etcd-io/etcd 15247), and then the lock is handed on under a holder who has done nothing wrong.
        """
        spared = () if _revokes_rightly() else ("leader frozen", "majority frozen")
        return {kind: harm for kind, harm in super().harms.items() if kind not in spared}

    def __init__(self, folder: Path, chance: random.Random) -> None:
        super().__init__(folder, chance)
        self.cluster = EtcdCluster(3)

    @property
    def members(self) -> list[Any]:  # type: ignore[override]
        return list(self.cluster.members)

    def leader(self) -> Any:
        return self.cluster.leader()

    def ports_of(self, member: Any) -> list[int]:
        return [member.port, member.peer_port]

    def url(self, ports: Sequence[int] = ()) -> str:
        return "etcd://" + ",".join(f"{HOST}:{port}" for port in ports or self.ports)

    def start(self) -> None:
        self.cluster.start()

    def heal(self) -> None:
        self.cluster.heal()

    def close(self) -> None:
        self.cluster.close()

    def log(self) -> str:
        return "\n".join(member.log()[-5000:] for member in self.members)


@functools.cache
def _revokes_rightly() -> bool:
    said = subprocess.run([BINARY, "--version"], capture_output=True, text=True, check=True).stdout
    version = tuple(int(part) for part in said.split("etcd Version: ")[1].split()[0].split("-")[0].split("."))
    return version >= ((3, 5, 13) if version >= (3, 5) else (3, 4, 31))


class ZooKeeper(Members):
    name = "zookeeper"
    gone = 1.5 * TTL + 1.0

    def __init__(self, folder: Path, chance: random.Random) -> None:
        super().__init__(folder, chance)
        self.ensemble = ZooKeeperEnsemble()

    @property
    def served(self) -> float:
        return super().served + 10.0

    @property
    def members(self) -> list[ZooKeeperServer]:  # type: ignore[override]
        return self.ensemble.members

    def leader(self) -> Any:
        return self.ensemble.leader

    def ports_of(self, member: Any) -> list[int]:
        among = next(line for line in member.settings if line.startswith(f"server.{member.member}="))
        return [member.port, *map(int, among.split(":")[1:])]

    def url(self, ports: Sequence[int] = ()) -> str:
        return "zk://" + ",".join(f"{HOST}:{port}" for port in ports or self.ports) + "/fire"

    def start(self) -> None:
        self.keepers = [keep(port) for member in self.members for port in self.ports_of(member)[1:]]  # for who leads
        self.ensemble.__enter__()

    def heal(self) -> None:
        self.ensemble.heal()

    def close(self) -> None:
        self.ensemble.__exit__(None, None, None)
        for keeper in self.keepers:
            keeper.close()

    def log(self) -> str:
        return self.ensemble.log()[-20_000:]


class Kahuna(Alone):
    """Three nodes of the stand-in, which are one process on one table."""

    name = "kahuna"

    def __init__(self, folder: Path, chance: random.Random) -> None:
        super().__init__(folder, chance)
        self.server = KahunaServer(folder, nodes=3)

    @property
    def ports(self) -> list[int]:
        return list(self.server.ports)

    @property
    def harms(self) -> dict[str, Harm]:
        return {**super().harms, "node down": self._down, "answers spoilt": self._chaos}

    async def _down(self, seconds: float) -> bool:
        node = self.random.randrange(3)
        await _call(self.server.down, node)
        await asyncio.sleep(seconds)
        await _call(self.server.up, node)
        return True

    async def _chaos(self, seconds: float) -> bool:
        """A part of the requests is answered wrongly, in pieces, or not at all; half of these are carried out."""
        before = len(await asyncio.to_thread(self.server.seen))
        await _call(self.server.chaos, 0.3)
        await asyncio.sleep(seconds)
        await _call(self.server.heal)
        return len(await asyncio.to_thread(self.server.seen)) > before

    def url(self, ports: Sequence[int] = ()) -> str:
        return "kahuna://" + ",".join(f"{HOST}:{port}" for port in ports or self.ports)

    def close(self) -> None:
        self.server.kill()

    def log(self) -> str:
        return ""


class Sqlite(Store):
    """A file; its servers are the workers themselves, so it is harmed by other processes that have it open."""

    name = "sqlite"

    @property
    def path(self) -> Path:
        return self.folder / "locks.db"

    @property
    def harms(self) -> dict[str, Harm]:
        return {"file locked": self._lock, "writer frozen": self._freeze_writer, "writer killed": self._kill_writer}

    async def _lock(self, seconds: float) -> bool:
        """Somebody has a transaction open for too long."""
        with contextlib.closing(
            sqlite3.connect(self.path, timeout=20.0, isolation_level=None, check_same_thread=False)
        ) as database:
            await _call(database.execute, "BEGIN IMMEDIATE")
            await asyncio.sleep(seconds)
            database.execute("ROLLBACK")
        return True

    async def _freeze_writer(self, seconds: float) -> bool:
        """A process is stopped in the middle of a transaction, which it never ends."""
        writer = await asyncio.to_thread(self._writer)
        writer.send_signal(signal.SIGSTOP)
        await asyncio.sleep(seconds)
        await _call(_kill, writer)
        return True

    async def _kill_writer(self, _seconds: float) -> bool:
        """A process is killed in the middle of a transaction that frees all locks; it must never have happened."""
        await _call(_kill, await asyncio.to_thread(self._writer))
        return True

    def _writer(self) -> subprocess.Popen[bytes]:
        ready = self.folder / "ready"
        ready.unlink(missing_ok=True)
        command = [sys.executable, "-c", _WRITER, str(self.path), str(ready)]
        writer = spawn(command, folder=self.folder, log=self.folder / "log")
        wait_until(ready.exists, what="a process is in the middle of a transaction")
        return writer

    def url(self, ports: Sequence[int] = ()) -> str:
        return f"sqlite:///{self.path}"

    def start(self) -> None:
        pass

    def close(self) -> None:
        pass


def _kill(process: subprocess.Popen[bytes]) -> None:
    end(process, politely=False)


_WRITER = """
import pathlib, sqlite3, sys, time
database = sqlite3.connect(sys.argv[1], timeout=20, isolation_level=None)
database.execute("BEGIN IMMEDIATE")
database.execute("DELETE FROM fencing_lock")
pathlib.Path(sys.argv[2]).touch()
time.sleep(60)
"""

STORES: dict[str, type[Store]] = {
    store.name: store for store in (Sqlite, Redis, RedisSentinel, Postgresql, Etcd, ZooKeeper, Kahuna)
}
