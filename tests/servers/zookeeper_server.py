"""A real ZooKeeper server, and an ensemble of three, which a test may kill, pause and start again."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shutil
import signal
import socket
import tempfile
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from child_processes import ServerProcess, end, spawn
from local_ports import HOST, free_port
from patience import wait_until
from redis_server import ServerError
from required_program import missing

JARS = Path("/usr/share/java")
JAR = JARS / "zookeeper.jar"
_NEEDED = (
    "zookeeper",
    "zookeeper-jute",
    "slf4j-api",
    "slf4j-simple",
    "metrics-core",
    "snappy-java",
    *(f"netty-{part}" for part in ("buffer", "codec", "common", "handler", "resolver", "transport")),
    *(f"netty-transport-native-{part}" for part in ("epoll", "unix-common")),
)
CLASSES = ":".join(str(JARS / f"{name}.jar") for name in _NEEDED)
_JVM = (
    "-XX:+UseSerialGC",
    "-XX:TieredStopAtLevel=1",
    "-Xshare:auto",
    "-Xmx64m",
    "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn",
    "-Dzookeeper.forceSync=no",  # a killed process loses nothing that it wrote, only a killed machine does
    "-Dznode.container.checkIntervalMs=86400000",  # see `CLEARING`
    "-Dzookeeper.admin.enableServer=false",
    "-Dzookeeper.fips-mode=false",  # 3.9 refuses DIGEST-MD5 otherwise
    "-Dzookeeper.fastleader.maxNotificationInterval=500",  # who found nobody to elect tries again, not in a minute
    "-Dzookeeper.cnxTimeout=1000",
)

CLEARING = "-Dznode.container.checkIntervalMs=200"
"""For `jvm`: a server that removes folders soon after their last child, not once a minute as it is shipped."""

TICK_MS = 200
"""Sessions of twice this are possible, and end within one of these after their timeout."""


SYNC_TICKS = 10
"""Ticks for which members of an ensemble may be silent before they part."""

_roots = itertools.count(1)


def require_zookeeper(jar: Path = JAR) -> None:
    """Let the test run only where ZooKeeper is."""
    if not jar.exists() or not shutil.which("java"):
        missing(f"{jar.name} or java", "zookeeper default-jre-headless")


def fresh_root() -> str:
    """The path of a folder that no test has used: a store of its own on a shared server."""
    return f"/test-{next(_roots)}"


class ZooKeeperServer(ServerProcess):
    """
    One server, alone or as a member of an ensemble; *settings* are lines of its configuration.

    The methods block for as long as a JVM needs to start; in a test whose loop must go on, call them with
    ``asyncio.to_thread``.
    """

    def __init__(
        self, *, settings: Sequence[str] = (), jvm: Sequence[str] = (), member: int = 0, tick_ms: int = TICK_MS
    ) -> None:
        self.settings = list(settings)
        self.jvm = list(jvm)
        self.member = member
        self.tick_ms = tick_ms
        self.sync_ticks = SYNC_TICKS
        self.folder = Path(tempfile.mkdtemp(prefix="zookeeper-"))
        self.port = free_port()

    @property
    def address(self) -> str:
        return f"{HOST}:{self.port}"

    @property
    def url(self) -> str:
        return f"zk://{self.address}"

    # Life and death

    def launch(self) -> None:
        """Start the process, and do not wait until it answers: a member needs others for that."""
        assert not self.running, "the server is running"
        (self.folder / "conf").write_text("".join(f"{line}\n" for line in self._lines()))
        (self.folder / "data").mkdir(exist_ok=True)
        (self.folder / "data" / "myid").write_text(f"{self.member}\n")
        main = "org.apache.zookeeper.server.quorum.QuorumPeerMain"
        command = ["java", *_JVM, *self.jvm, "-cp", CLASSES, main, str(self.folder / "conf")]
        self._process = spawn(command, folder=self.folder, log=self.folder / "log")

    def await_ready(self) -> Self:
        """Return when it serves clients."""
        wait_until(lambda: not self.running or self.role(), what=f"ZooKeeper on {self.port} answers", within=60)
        if not self.running:
            raise ServerError(f"ZooKeeper does not start:\n{self.log()}")
        return self

    def start(self) -> Self:
        """Start, or start again with the same port and data."""
        self.launch()
        return self.await_ready()

    def kill(self) -> None:
        """Die without a word."""
        if self._process is not None:
            end(self._process, politely=False)

    def pause(self) -> None:
        """Stop the process with SIGSTOP: the kernel still takes connections and bytes, and nobody answers."""
        self._signal(signal.SIGSTOP)
        # On a busy machine other threads run on until the one that has the signal does.
        os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def set_counter(self, path: str, created: int) -> None:
        """Restart it as if so many nodes had been created in the folder *path*: the next has that number."""
        self.kill()
        self.start()  # which writes a snapshot of all that is in its log
        self.kill()
        snapshots = (self.folder / "data" / "version-2").glob("snapshot.*")
        newest = max(snapshots, key=lambda file: int(file.suffix[1:], 16))
        newest.write_bytes(_with_counter(newest.read_bytes(), path.encode(), created))
        self.start()

    def close(self) -> None:
        """End it and remove its folder."""
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    # Questions

    def say(self, word: str, *, patience: float = 2.0) -> str:
        """The answer to a four-letter word; empty when there is none."""
        with contextlib.suppress(OSError), socket.create_connection((HOST, self.port), patience) as connection:
            connection.settimeout(patience)
            connection.sendall(word.encode())
            answer = b""
            while data := connection.recv(65536):
                answer += data
            return answer.decode(errors="replace")
        return ""

    def role(self, *, patience: float = 0.5) -> str:
        """``standalone``, ``leader`` or ``follower``; empty while it serves nobody."""
        lines = [line for line in self.say("srvr", patience=patience).splitlines() if line.startswith("Mode: ")]
        return lines[0].removeprefix("Mode: ") if lines else ""

    # The inside

    def _lines(self) -> list[str]:
        return [
            f"tickTime={self.tick_ms}",
            f"minSessionTimeout={2 * self.tick_ms}",
            "maxSessionTimeout=20000000",
            "initLimit=50",
            f"syncLimit={self.sync_ticks}",
            f"dataDir={self.folder / 'data'}",
            f"clientPort={self.port}",
            f"clientPortAddress={HOST}",
            "maxClientCnxns=0",
            "admin.enableServer=false",
            "4lw.commands.whitelist=*",
            *self.settings,
        ]


_SEAL = b"\0\0\0\1/"
"""What follows each checksum in a snapshot."""


def _with_counter(snapshot: bytes, path: bytes, created: int) -> bytes:
    """Change the counter of one node in a snapshot, and the checksums, each of which is that of all before it."""
    seals = [match.start() - 8 for match in re.finditer(re.escape(_SEAL), snapshot)]
    seals = [at for at in seals if at > 0 and zlib.adler32(snapshot[:at]) == int.from_bytes(snapshot[at : at + 8])]
    changed = bytearray(snapshot)
    data_at = snapshot.index(len(path).to_bytes(4) + path) + 4 + len(path)
    length = max(0, int.from_bytes(snapshot[data_at : data_at + 4], signed=True))
    counter_at = data_at + 4 + length + 8 + 4 * 8 + 4  # after the data, the ACL, four moments and the version
    changed[counter_at : counter_at + 4] = created.to_bytes(4)
    assert seals, "no checksum is known"
    for at in seals:
        changed[at : at + 8] = zlib.adler32(changed[:at]).to_bytes(8)
    return bytes(changed)


class ZooKeeperEnsemble:
    """Three members that elect a leader."""

    def __init__(
        self,
        *,
        size: int = 3,
        tick_ms: int = TICK_MS,
        sync_ticks: int = SYNC_TICKS,
    ) -> None:
        self.members = [ZooKeeperServer(member=number, tick_ms=tick_ms) for number in range(1, size + 1)]
        for member in self.members:
            member.sync_ticks = sync_ticks
        lines = [f"server.{member.member}={HOST}:{free_port()}:{free_port()}" for member in self.members]
        for member in self.members:
            member.settings += lines

    @property
    def addresses(self) -> list[str]:
        return [member.address for member in self.members]

    @property
    def url(self) -> str:
        return f"zk://{','.join(self.addresses)}"

    @property
    def leader(self) -> ZooKeeperServer:
        """The member that leads now."""
        found: list[ZooKeeperServer] = []

        def look() -> bool:
            found[:] = [member for member in self.members if member.running and member.role() == "leader"]
            return bool(found)

        wait_until(look, what="there is a leader", within=60)
        return found[0]

    @property
    def followers(self) -> list[ZooKeeperServer]:
        leader = self.leader
        return [member for member in self.members if member is not leader]

    def heal(self) -> None:
        """Let every member run and serve."""
        for member in self.members:
            if member.running:
                member.resume()
            else:
                member.launch()
        for member in self.members:
            member.await_ready()

    def log(self) -> str:
        return "".join(f"--- member {member.member}\n{member.log()}" for member in self.members)

    def __enter__(self) -> Self:
        _each(self.members, ZooKeeperServer.launch)
        _each(self.members, ZooKeeperServer.await_ready)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _each(self.members, ZooKeeperServer.close)


def _each(members: Sequence[ZooKeeperServer], do: Callable[[ZooKeeperServer], object]) -> None:
    for member in members:
        do(member)
