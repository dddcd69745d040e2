"""Real etcd members on ports of their own, which a test may stop, kill, pause and start again."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import tempfile
import time
import urllib.error
import urllib.request
from base64 import b64decode, b64encode
from collections.abc import Sequence
from http import HTTPStatus
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from child_processes import ServerProcess, end, spawn
from etcd_network import PeerNetwork
from local_ports import HOST, free_port
from patience import wait_until
from throwaway_certificates import Certificates

BINARY = "etcd"


class EtcdError(Exception):
    """What a member answered instead of what was asked for."""

    status = 0
    """The HTTP code."""


def b64(text: str | bytes) -> str:
    return b64encode(text.encode() if isinstance(text, str) else text).decode()


class EtcdMember(ServerProcess):
    """
    One member; settings are keyword arguments in the words of its flags, with underscores.

    The methods that are not async take milliseconds; call them with ``asyncio.to_thread`` where the loop must not wait.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        *,
        tls: Certificates | None = None,
        network: PeerNetwork | None = None,
        **settings: str | int,
    ) -> None:
        self.folder = folder / name
        self.folder.mkdir(parents=True)
        self.name = name
        self.certificates = tls
        self.settings = settings
        self.token = ""
        self.port, self.peer_port = free_port(), free_port()
        self.network = network
        self.address = "" if network is None else network.admit(self.peer_port)
        """By which the other members know it, where their network can be cut."""
        self.cluster: Sequence[EtcdMember] = (self,)

    @property
    def origin(self) -> str:
        """Where this test asks it: never TLS, which is on another port."""
        return f"http://{HOST}:{self.port}"

    @property
    def peer(self) -> str:
        return f"http://{self.address or HOST}:{self.peer_port}"

    def spawn(self) -> None:
        """Start it, or start it again where it was; it need not answer yet."""
        assert not self.running, "the member is running"
        clients = self.origin
        flags = {
            "name": self.name,
            "data_dir": self.folder / "data",
            "advertise_client_urls": clients,
            "listen_peer_urls": f"http://{HOST}:{self.peer_port}",
            "initial_advertise_peer_urls": self.peer,
            "initial_cluster": ",".join(f"{member.name}={member.peer}" for member in self.cluster),
            "log_level": "warn",
            **self.settings,
        }
        if self.certificates is not None:
            self.tls_port = getattr(self, "tls_port", 0) or free_port()
            clients += f",https://{HOST}:{self.tls_port}"
            flags |= {
                "cert_file": self.certificates.certificate,
                "key_file": self.certificates.key,
                "trusted_ca_file": self.certificates.authority,
            }
        flags["listen_client_urls"] = clients
        command = [BINARY, *(f"--{name.replace('_', '-')}={value}" for name, value in flags.items())]
        if self.network is not None:
            command = [
                "env",
                "-u",
                "NO_PROXY",
                "-u",
                "no_proxy",
                f"HTTP_PROXY={self.network.door(self.address)}",
                *command,
            ]
        if self.certificates is not None and self.settings.get("client_cert_auth") is None:
            command.append("--client-cert-auth")
        self._process = spawn(command, folder=self.folder, log=self.folder / "log")

    def stop(self) -> None:
        if self._process is not None:
            end(self._process)

    def kill(self) -> None:
        """Die without a word, as after ``kill -9``."""
        if self._process is not None:
            end(self._process, politely=False)

    def pause(self) -> None:
        """Stop the process with SIGSTOP: the kernel still takes connections and bytes, and no answer comes."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        if self.running:
            assert self._process is not None
            self._process.send_signal(signal.SIGCONT)

    def ask(self, path: str, body: dict[str, Any] | None = None, *, within: float = 10.0) -> dict[str, Any]:
        """POST to ``/v3/`` + *path*; blocks."""
        data = json.dumps(body or {}).encode()
        headers = {"Authorization": self.token} if self.token else {}
        request = urllib.request.Request(f"{self.origin}/v3/{path}", data, headers)
        try:
            with urllib.request.urlopen(request, timeout=within) as response:
                answer = json.loads(response.read().splitlines()[0])
        except urllib.error.HTTPError as error:
            with error:
                heard = EtcdError(f"HTTP {error.code} {error.read().decode(errors='replace')}")
            heard.status = error.code
            raise heard from None
        return dict(answer.get("result", answer))

    def ready(self) -> bool:
        """Whether it answers for the majority."""
        try:
            self.ask("kv/range", {"key": b64("?")}, within=1.0)
        except EtcdError as error:
            return "user name is empty" in str(error) or "invalid auth token" in str(error)
        except (OSError, ValueError, IndexError):
            return False
        return True

    def leads(self) -> bool:
        try:
            status = self.ask("maintenance/status", within=1.0)
        except (OSError, EtcdError, ValueError, IndexError):
            return False
        return bool(status.get("leader")) and status["leader"] == status["header"]["member_id"]


class EtcdCluster:
    """
    So many members. ``EtcdCluster(1)`` is a single server with a fast clock: its shortest lease is one second.

    ``EtcdCluster(1, tls=certificates)`` speaks TLS on a second port, and wants certificates of clients there.
    ``EtcdCluster(3, network=network)`` has members whose connections to each other can be cut.
    """

    def __init__(
        self,
        members: int = 1,
        *,
        tls: Certificates | None = None,
        network: PeerNetwork | None = None,
        **settings: str | int,
    ) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="etcd-"))
        self.network = network
        pace = {"heartbeat_interval": 50 if members > 1 else 20, "election_timeout": 500 if members > 1 else 100}
        fast = {"unsafe_no_fsync": "true", "initial_cluster_token": self.folder.name}
        self._make = lambda: [
            EtcdMember(
                self.folder, f"m{number}-{free_port()}", tls=tls, network=network, **{**pace, **fast, **settings}
            )
            for number in range(members)
        ]
        self.members = self._make()
        for member in self.members:
            member.cluster = self.members

    @property
    def url(self) -> str:
        return "etcd://" + self.hosts

    @property
    def hosts(self) -> str:
        return ",".join(f"{HOST}:{member.port}" for member in self.members)

    @property
    def running(self) -> list[EtcdMember]:
        return [member for member in self.members if member.running]

    def start(self) -> Self:
        """Start every member that is not running; return when each of them answers."""
        for attempt in range(5):
            for member in self.members:
                if not member.running:
                    member.spawn()
            wait_until(self._settled, what="etcd answers", within=40.0)
            if len(self.running) == len(self.members):
                return self
            taken = any("in use" in member.log() for member in self.members)
            for member in self.members:
                member.kill()
            if not taken or attempt == 4:
                break
            self.members = self._make()
            for member in self.members:
                member.cluster = self.members
        raise EtcdError("etcd does not start:\n" + "\n".join(member.log() for member in self.members))

    def _settled(self) -> bool:
        return any(not member.running for member in self.members) or all(member.ready() for member in self.members)

    def kill(self) -> None:
        for member in self.members:
            member.kill()

    def heal(self) -> None:
        """All members run, reach each other, and answer."""
        if self.network is not None:
            self.network.heal()
        for member in self.members:
            member.resume()
        self.start()

    def close(self) -> None:
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # What an operator does

    def ask(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """Ask the members one after the other until one answers; again while they elect a leader."""
        members = self.running
        for member in [*members * 3][:-1]:
            try:
                return member.ask(path, body, within=3.0)
            except OSError:
                continue
            except EtcdError as error:
                if error.status != HTTPStatus.SERVICE_UNAVAILABLE:
                    raise
                time.sleep(0.2)
        return members[-1].ask(path, body)

    async def command(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """`ask` without holding up the loop."""
        return await asyncio.to_thread(self.ask, path, body)

    def clear(self) -> None:
        """Delete every key, and end every lease."""
        self.ask("kv/deleterange", {"key": b64("\0"), "range_end": b64("\0")})
        for lease in self.ask("lease/leases").get("leases", []):
            try:
                self.ask("lease/revoke", {"ID": lease["ID"]})
            except EtcdError as error:  # it has just ended by itself
                if "lease not found" not in str(error):
                    raise

    def keys(self, prefix: str = "fencing/") -> dict[str, dict[str, Any]]:
        """All keys below *prefix*, each with what etcd knows of it."""
        end_of = prefix[:-1] + chr(ord(prefix[-1]) + 1)
        found = self.ask("kv/range", {"key": b64(prefix), "range_end": b64(end_of)}).get("kvs", [])
        return {b64decode(kv["key"]).decode(): kv for kv in found}

    def delete(self, prefix: str) -> None:
        """Delete all keys below *prefix*."""
        end_of = prefix[:-1] + chr(ord(prefix[-1]) + 1)
        self.ask("kv/deleterange", {"key": b64(prefix), "range_end": b64(end_of)})

    def leases(self) -> list[str]:
        return [lease["ID"] for lease in self.ask("lease/leases").get("leases", [])]

    def revision(self) -> int:
        return int(self.ask("kv/range", {"key": b64("?")})["header"]["revision"])

    def compact(self) -> None:
        """Forget all that was before now."""
        self.ask("kv/compaction", {"revision": str(self.revision()), "physical": True})

    def leader(self) -> EtcdMember:
        found: list[EtcdMember] = []

        def look() -> bool:
            found[:] = [member for member in self.running if member.leads()]
            return bool(found)

        wait_until(look, what="there is a leader")
        return found[0]

    async def await_leader(self) -> EtcdMember:
        """`leader`, while the loop turns."""
        return await asyncio.to_thread(self.leader)

    def metric(self, name: str) -> float:
        """The sum of a counter over the members and its labels."""
        total = 0.0
        for member in self.running:
            with urllib.request.urlopen(f"{member.origin}/metrics", timeout=10) as response:
                for line in response.read().decode().splitlines():
                    if line.startswith(name):
                        total += float(line.rpartition(" ")[2])
        return total

    def calls(self, method: str) -> int:
        """How often this gRPC method, such as ``LeaseKeepAlive``, has begun."""
        total = 0.0
        for member in self.running:
            with urllib.request.urlopen(f"{member.origin}/metrics", timeout=10) as response:
                for line in response.read().decode().splitlines():
                    if line.startswith("grpc_server_started_total") and f'grpc_method="{method}"' in line:
                        total += float(line.rpartition(" ")[2])
        return int(total)

    def enable_auth(self, *, user: str, password: str, prefix: str = "fencing/", ttl: str = "") -> None:
        """From now on only *user*, limited to *prefix*, and root are served."""
        root = {"name": "root", "password": "root"}
        self.ask("auth/user/add", root)
        self.ask("auth/role/add", {"name": "root"})
        self.ask("auth/user/grant", {"user": "root", "role": "root"})
        self.ask("auth/user/add", {"name": user, "password": password})
        self.ask("auth/role/add", {"name": "locks"})
        end_of = prefix[:-1] + chr(ord(prefix[-1]) + 1)
        permission = {"permType": "READWRITE", "key": b64(prefix), "range_end": b64(end_of)}
        self.ask("auth/role/grant", {"name": "locks", "perm": permission})
        self.ask("auth/user/grant", {"user": user, "role": "locks"})
        self.ask("auth/enable")
        self.login_as_root()

    def login_as_root(self) -> None:
        for member in self.members:
            member.token = ""  # one that has expired would be refused, even beside a password
        token = self.ask("auth/authenticate", {"name": "root", "password": "root"})["token"]
        for member in self.members:
            member.token = token


class StartEtcd(Protocol):
    def __call__(self, members: int = 1, *, tls: Certificates | None = None, **settings: str | int) -> EtcdCluster: ...


async def gone(cluster: EtcdCluster, prefix: str, *, within: float = 20.0) -> None:
    """Wait until no key is left below *prefix*."""
    stop = asyncio.get_running_loop().time() + within
    while left := await asyncio.to_thread(cluster.keys, prefix):
        assert asyncio.get_running_loop().time() < stop, f"still there after {within} s: {sorted(left)}"
        await asyncio.sleep(0.05)
