"""A real Redis or Valkey server on a port of its own, which a test may stop, kill, pause and start again."""

from __future__ import annotations

import asyncio
import functools
import shutil
import signal
import socket
import subprocess
from collections.abc import Sequence
from typing import Any, Self, TypeAlias

import hiredis
from child_processes import ServerProcess, end, spawn
from local_ports import HOST, free_port
from patience import wait_until
from quick_folder import quick_folder
from throwaway_certificates import Certificates

Setting: TypeAlias = str | int | bool | Sequence[str]


class ServerError(Exception):
    """A server that does not start, with its log."""


@functools.cache
def version_of(binary: str) -> tuple[int, ...]:
    """The version of the program, of Redis or of Valkey."""
    said = subprocess.run([binary, "--version"], check=True, capture_output=True, text=True).stdout
    return tuple(int(part) for part in said.split(" v=")[1].split()[0].split("."))


class RedisServer(ServerProcess):
    """
    One server; settings are keyword arguments in the words of ``redis.conf``, with underscores.

    ``RedisServer(appendonly=True, maxmemory="2mb", user=["app on >secret ~* &* +@all"])``: True and False become
    ``yes`` and ``no``, a list becomes one line per item. Settings that the server rewrites survive a restart.

    The methods that are not async take milliseconds; in a test whose loop must not be held up even for that,
    call them with ``asyncio.to_thread``.
    """

    mode = ""
    """What the binary is told to be, other than a server of data."""

    def __init__(self, *, binary: str = "redis-server", tls: Certificates | None = None, **settings: Setting) -> None:
        self.binary = binary
        self.certificates = tls
        self.settings: dict[str, Setting] = self.defaults() | settings
        self.folder = quick_folder("redis-")
        self.port = 0
        self.tls_port = 0

    def defaults(self) -> dict[str, Setting]:
        since_7: dict[str, Setting] = {"enable_debug_command": True, "shutdown_timeout": 0}
        return {"save": "", "repl_diskless_sync_delay": 0, **(since_7 if version_of(self.binary) >= (7,) else {})}

    # Addresses

    @property
    def url(self) -> str:
        return f"redis://{HOST}:{self.port}"

    @property
    def tls_url(self) -> str:
        """Trusted through ``certificates.authority``; certified for the IP address and for ``localhost``."""
        return f"rediss://{HOST}:{self.tls_port}"

    @property
    def socket_path(self) -> str:
        return str(self.folder / "socket")

    # Life and death

    def start(self) -> Self:
        """Start, or start again where it was, and return when it answers."""
        assert self._process is None or self._process.poll() is not None, "the server is running"
        for _ in range(10):
            self.configure()
            command = [self.binary, str(self.folder / "conf"), *([self.mode] if self.mode else [])]
            self._process = spawn(command, folder=self.folder, log=self.folder / "log")
            wait_until(lambda: not self.running or self._ready(), what=f"{self.binary} answers")
            if self.running:
                return self
            if "in use" not in self.log():
                break
            self.another_port()
        raise ServerError(f"{self.binary} does not start:\n{self.log()}")

    def stop(self) -> None:
        """Shut down as an administrator does; what appendonly promises is on the disk."""
        if self._process is not None:
            end(self._process)

    def kill(self) -> None:
        """Die without a word, as after ``kill -9`` or a power cut of the machine."""
        if self._process is not None:
            end(self._process, politely=False)

    def restart(self) -> None:
        """Stop and start on the same port and with the same data folder; for a crash: `kill`, then `start`."""
        self.stop()
        self.start()

    def pause(self) -> None:
        """Stop the process with SIGSTOP: the kernel still takes connections and bytes, and nobody answers."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def close(self) -> None:
        """End it and remove its folder."""
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    # Commands

    def ask(self, *command: str | bytes | float) -> Any:
        """Execute one command on a connection of its own and as a user who may do everything; blocks."""
        replies = self.ask_all(command)
        if isinstance(replies[0], hiredis.ReplyError):
            raise replies[0]
        return replies[0]

    def ask_all(self, *commands: Sequence[str | bytes | float], patience: float = 10.0) -> list[Any]:
        """The replies to *commands* on one connection; an error reply is an item of the list."""
        reader = hiredis.Reader(encoding="utf-8", errors="surrogateescape", notEnoughData=_INCOMPLETE)
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(patience)
            connection.connect(self.socket_path)
            connection.sendall(b"".join(hiredis.pack_command(tuple(command)) for command in [_BENCH, *commands]))
            replies: list[Any] = []
            while len(replies) <= len(commands):
                while (reply := reader.gets()) is _INCOMPLETE:
                    data = connection.recv(65536)
                    if not data:
                        raise ConnectionResetError("the server closed the connection")
                    reader.feed(data)
                replies.append(reply)
        return replies[1:]

    async def command(self, *command: str | bytes | float) -> Any:
        """`ask` without holding up the loop: ``await server.command("CLIENT", "PAUSE", 500)``."""
        return await asyncio.to_thread(self.ask, *command)

    # The inside

    def _ready(self) -> bool:
        try:
            return bool(self.ask("PING") == "PONG")
        except (OSError, hiredis.ReplyError):
            return False

    def another_port(self) -> None:
        """Move on after a start that failed: somebody else was quicker to take the port."""
        (self.folder / "conf").unlink()
        self.port = self.tls_port = 0

    def configure(self) -> None:
        """Write the configuration file, once: from then on it is the server's."""
        path = self.folder / "conf"
        if not path.exists():
            self.port = free_port()
            path.write_text("".join(f"{line}\n" for line in self._lines()))

    def _lines(self) -> list[str]:
        own: dict[str, Setting] = {
            "bind": HOST,
            "port": self.port,
            "unixsocket": self.socket_path,
            "dir": str(self.folder),
        }
        if self.certificates is not None:
            self.tls_port = free_port()
            own |= {"tls_port": self.tls_port, "tls_auth_clients": False, **self.certificates.settings()}
        lines = [_line(name, value) for name, values in (own | self.settings).items() for value in _each(values)]
        return [*lines, "user bench on >bench ~* &* +@all"]


_INCOMPLETE = object()
_BENCH = ("AUTH", "bench", "bench")


def _each(values: Setting) -> Sequence[str | int | bool]:
    return [values] if isinstance(values, str | int) else values


def _line(name: str, value: str | int | bool) -> str:
    text = {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)
    return " ".join([name.replace("_", "-"), text or '""'])
