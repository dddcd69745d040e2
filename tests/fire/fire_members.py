"""Stores of several servers, one of which leads, and what is done to them."""

from __future__ import annotations

import asyncio
import functools
import random
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from etcd_server import BINARY, EtcdCluster
from fire_ports import keep, kept
from fire_store import TTL, Harm, Store, call
from local_ports import HOST
from redis_quorum import Quorum
from redis_sentinels import Sentinels
from zookeeper_server import ZooKeeperEnsemble, ZooKeeperServer


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
        await call(member.kill)
        with kept(self.ports_of(member)):
            await asyncio.sleep(seconds)
            await call(self.heal)
        return bool(member.pid != before)

    async def _freeze_one(self, which: Callable[[], Any], seconds: float) -> bool:
        member = await asyncio.to_thread(which)
        member.pause()
        await asyncio.sleep(seconds)
        await call(self.heal)
        return True

    async def _freeze_majority(self, seconds: float) -> bool:
        for member in self.members[1:]:
            member.pause()
        await asyncio.sleep(seconds)
        await call(self.heal)
        return True

    async def _kill_all(self, _seconds: float) -> bool:
        before = [member.pid for member in self.members]
        for member in self.members:
            await call(member.kill)
        with kept(port for member in self.members for port in self.ports_of(member)):
            await call(self.heal)
        return not set(before) & {member.pid for member in self.members}


class RedisQuorum(Members):
    """Three independent masters: any of them may be the one that is harmed."""

    name = "redis-quorum"

    def __init__(self, folder: Path, chance: random.Random) -> None:
        super().__init__(folder, chance)
        self.quorum = Quorum(3, appendonly=True, appendfsync="everysec")  # a killed process loses nothing by it
        self.members = list(self.quorum.nodes)

    @property
    def harms(self) -> dict[str, Harm]:
        return {kind: harm for kind, harm in super().harms.items() if not kind.startswith("leader")}

    def leader(self) -> Any:
        return None

    def ports_of(self, member: Any) -> list[int]:
        return [member.port]

    def url(self, ports: Sequence[int] = ()) -> str:
        return self.quorum.url_at(list(ports or self.ports))

    def start(self) -> None:
        self.quorum.__enter__()
        asyncio.run(self.quorum.init())

    def heal(self) -> None:
        self.quorum.heal()

    def close(self) -> None:
        self.quorum.__exit__(None, None, None)

    def log(self) -> str:
        return "\n".join(member.log() for member in self.members)


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
        await call(lost.kill)
        with kept([lost.port]):
            new = await self.group.replaced(lost)
            await call(self.group.heal)
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
        await call(self.group.heal)
        return new is not master

    async def _kill_replica(self, seconds: float) -> bool:
        master = await asyncio.to_thread(lambda: self.group.master)
        replica = next(server for server in self.group.servers if server is not master)
        await call(replica.kill)
        with kept([replica.port]):
            await asyncio.sleep(min(seconds, 0.5))
            await call(self.group.heal)
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
