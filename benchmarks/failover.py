"""
What the loss of one node costs: leases lost, and the least time that a lease had left.

    sudo -E env PATH=$PATH uv run python -m benchmarks.failover [etcd] [zookeeper] [sentinel] [--seconds=8]

Three real nodes of each store run in network namespaces. Each node in turn is stopped (SIGSTOP), cut off from the
other two, and killed, for eight seconds. Meanwhile 20 leases of each ttl are held by three clients, each of which
has another node first in its URL. The least time is that until a lease's deadline, which is 0.79 of the ttl after its
last renewal. It needs root, for the namespaces, and the programs of the stores, as docs/CONTRIBUTING.md lists them.
It takes three minutes for each store, and prints the table of docs/choosing-a-ttl.md.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

from benchmarks.namespaces import Fault, Machines, Node, NoNamespacesError, faults
from fencing_sdk import FencingError, Lease, LockClient, connect

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "servers"))

from zookeeper_server import _JVM, _NEEDED, JARS

TTLS = (6.0, 10.0, 15.0)
LEASES = 20
SETTLING = 15.0
"""Seconds after the start: Sentinels find each other, and the replicas, by messages that are seconds apart."""
AFTER = 4.0
"""Seconds that a fault is followed by: a lease whose renewals do not recover is lost by then."""

# The stores: each starts its nodes, and returns the URLs of three clients, each with another node first.


def rotated(scheme: str, nodes: Sequence[Node], port: int, path: str = "") -> list[str]:
    """A URL for each node, with that node first."""
    hosts = [f"{node.address}:{port}" for node in nodes]
    return [f"{scheme}://{','.join([*hosts[first:], *hosts[:first]])}{path}" for first in range(len(hosts))]


def etcd(nodes: Sequence[Node]) -> list[str]:
    """At etcd's own times: an election timeout of 1 s."""
    cluster = ",".join(f"{node.namespace}=http://{node.address}:2380" for node in nodes)
    for node in nodes:
        clients, peers = f"http://{node.address}:2379", f"http://{node.address}:2380"
        flags = {
            "name": node.namespace,
            "data-dir": node.folder / "data",
            "listen-client-urls": clients,
            "advertise-client-urls": clients,
            "listen-peer-urls": peers,
            "initial-advertise-peer-urls": peers,
            "initial-cluster": cluster,
            "log-level": "error",
        }
        node.run(["etcd", *(f"--{flag}={value}" for flag, value in flags.items())])
    return rotated("etcd", nodes, 2379)


def zookeeper(nodes: Sequence[Node]) -> list[str]:
    """With tickTime 500 and syncLimit 5: a member that is silent for 2.5 s has failed."""
    members = [f"server.{number}={node.address}:2888:3888" for number, node in enumerate(nodes, 1)]
    for number, node in enumerate(nodes, 1):
        times = ["tickTime=500", "initLimit=10", "syncLimit=5", "maxSessionTimeout=60000"]
        own = [f"dataDir={node.folder / 'data'}", "clientPort=2181", "admin.enableServer=false", "maxClientCnxns=0"]
        (node.folder / "data").mkdir()
        (node.folder / "data" / "myid").write_text(f"{number}\n")
        (node.folder / "conf").write_text("\n".join([*times, *own, *members, ""]))
        jars = ":".join(str(JARS / f"{name}.jar") for name in _NEEDED)
        main = "org.apache.zookeeper.server.quorum.QuorumPeerMain"
        node.run(["java", *_JVM, "-cp", jars, main, node.folder / "conf"])
    return rotated("zk", nodes, 2181)


def sentinel(nodes: Sequence[Node]) -> list[str]:
    """A master and two replicas, which are lost in turn, and three Sentinels on machines of their own."""
    servers, sentinels = nodes[:3], nodes[3:]
    master = servers[0].address
    safe = "min-replicas-to-write 1\nmin-replicas-max-lag 2\nrepl-ping-replica-period 1\nrepl-diskless-sync-delay 0\n"
    for node in servers:
        follows = "" if node.address == master else f"replicaof {master} 6379\n"
        (node.folder / "conf").write_text(f'{_bound(node)}port 6379\nsave ""\n{safe}{follows}')
        node.run(["redis-server", node.folder / "conf"])
    for down_after, node in zip((1500, 2000, 2500), sentinels, strict=True):  # else they split their votes
        lines = f"monitor locks {master} 6379 2", f"down-after-milliseconds locks {down_after}"
        watch = "".join(f"sentinel {line}\n" for line in (*lines, "failover-timeout locks 3000"))
        (node.folder / "conf").write_text(f"{_bound(node)}port 26379\n{watch}")
        node.run(["redis-server", node.folder / "conf", "--sentinel"])
    return rotated("redis+sentinel", sentinels, 26379, "/locks")


def _bound(node: Node) -> str:
    return f"bind {node.address}\nprotected-mode no\ndir {node.folder}\n"


STORES = {store.__name__: store for store in (etcd, zookeeper, sentinel)}
MACHINES = {"sentinel": 6}


# The measurement.


class Watched:
    """The leases of one ttl, the clients that hold them, and what became of them."""

    def __init__(self, ttl: float) -> None:
        self.ttl = ttl
        self.clients: list[LockClient] = []
        self.leases: list[Lease] = []
        self.lost: Counter[str] = Counter()
        self.least = math.inf

    async def take(self, label: str) -> None:
        """Hold `LEASES` leases, or wait until the store grants them."""
        names = [f"{label}/{self.ttl:g}/{number}" for number in range(LEASES)]
        owners = [self.clients[number % len(self.clients)] for number in range(LEASES)]
        taking = [
            _patiently(owner.lock(name, ttl=self.ttl, wait=20).acquire)
            for owner, name in zip(owners, names, strict=True)
        ]
        self.leases = await asyncio.gather(*taking)
        self.least = math.inf

    def look(self) -> None:
        """Note the least time that a held lease has left."""
        self.least = min([self.least, *(lease.remaining for lease in self.leases if lease.held)])

    async def release(self) -> None:
        self.lost = Counter(str(lease.lost_reason) for lease in self.leases if not lease.held)
        await asyncio.gather(*(lease.release() for lease in self.leases), return_exceptions=True)

    def __str__(self) -> str:
        how = ", ".join(f"{count} {reason}" for reason, count in self.lost.items()) or "0 lost"
        return f"{how}; {self.least:.1f} s"


async def _patiently(acquire: Callable[[], Awaitable[Lease]]) -> Lease:
    """Acquire while a cluster may still start or recover."""
    for _ in range(60):
        try:
            return await acquire()
        except FencingError:
            await asyncio.sleep(0.5)
    return await acquire()


async def watch(groups: Sequence[Watched], seconds: float) -> None:
    """Look at the leases for so long."""
    end = asyncio.get_running_loop().time() + seconds
    while asyncio.get_running_loop().time() < end:
        await asyncio.sleep(0.02)
        for group in groups:
            group.look()


async def one_fault(groups: Sequence[Watched], fault: Fault, node: Node, seconds: float) -> None:
    """Hold leases while the fault lasts."""
    _, begin, end = fault
    for group in groups:
        await group.take(f"{fault[0]}/{node.namespace}")
    await asyncio.sleep(2)
    await asyncio.to_thread(begin, node)
    await watch(groups, seconds)
    await asyncio.to_thread(end, node)
    await watch(groups, AFTER)
    for group in groups:
        await group.release()


async def measure(name: str, seconds: float, kinds: Sequence[str]) -> None:
    """Print the rows of one store."""
    with Machines(MACHINES.get(name, 3)) as machines:
        urls = STORES[name](machines.nodes)
        async with AsyncExitStack() as stack:
            groups = [Watched(ttl) for ttl in TTLS]
            for group in groups:
                group.clients = [await _opened(stack, url) for url in urls]
            await asyncio.sleep(SETTLING)
            for fault in [fault for fault in faults(machines) if fault[0] in kinds]:
                for number, node in enumerate(machines.nodes[:3], 1):
                    await one_fault(groups, fault, node, seconds)
                    print(f"| {name}, node {number} {fault[0]} | " + " | ".join(map(str, groups)) + " |", flush=True)
                    await asyncio.sleep(AFTER)


async def _opened(stack: AsyncExitStack, url: str) -> LockClient:
    client = connect(url)
    for _ in range(60):
        try:
            return await stack.enter_async_context(client)
        except FencingError:  # the cluster starts
            await asyncio.sleep(0.5)
    return await stack.enter_async_context(client)


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("stores", nargs="*", choices=[*STORES, []], default=list(STORES))
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--faults", nargs="*", default=["stopped", "cut off", "killed"])
    chosen = parser.parse_args()
    print(
        f"{LEASES} leases of each ttl, a node lost for {chosen.seconds:g} s: how many were lost; the least time left\n"
    )
    print("| | " + " | ".join(f"ttl {ttl:g} s" for ttl in TTLS) + " |\n| --- |" + " --- |" * len(TTLS))
    for name in chosen.stores or STORES:
        try:
            await measure(name, chosen.seconds, chosen.faults)
        except NoNamespacesError as error:
            raise SystemExit(str(error)) from error


if __name__ == "__main__":
    asyncio.run(main())
