"""A Redis server of the benchmark's own, and what it says about the traffic."""

from __future__ import annotations

import random
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterable
from types import TracebackType
from typing import Any, Self

import redis

HOST = "127.0.0.1"
_PORTS = range(11_000, 21_000)
_PATIENCE = 10.0


def missing() -> str | None:
    """Say how to install the server, if there is none."""
    return None if shutil.which("redis-server") else "redis-server is not on PATH: apt-get install redis-server"


def _free_port() -> int:
    for port in random.sample(_PORTS, 100):
        with socket.socket() as probe:
            if probe.connect_ex((HOST, port)):
                return port
    raise RuntimeError("no free port")


class OwnServer:
    """One server without persistence. Everything here blocks, so call it before and after what is measured."""

    def __init__(self) -> None:
        self._folder = tempfile.mkdtemp(prefix="redis-benchmark-")
        self.port = _free_port()
        self._process: subprocess.Popen[bytes] | None = None
        self._control = redis.Redis(
            host=HOST,
            port=self.port,
            decode_responses=True,
            encoding_errors="surrogateescape",
            socket_timeout=_PATIENCE,
        )

    @property
    def url(self) -> str:
        return f"redis://{HOST}:{self.port}"

    def __enter__(self) -> Self:
        settings = {"bind": HOST, "port": str(self.port), "dir": self._folder, "save": "", "appendonly": "no"}
        options = [word for name, value in settings.items() for word in (f"--{name}", value)]
        self._process = subprocess.Popen(
            ["redis-server", *options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        end = time.monotonic() + _PATIENCE
        while True:
            try:
                self._control.ping()
            except redis.ConnectionError:
                if time.monotonic() > end or self._process.poll() is not None:
                    self.__exit__(None, None, None)
                    raise
                time.sleep(0.02)
            else:
                return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._control.close()
        if self._process is not None:
            self.resume()
            self._process.terminate()
            try:
                self._process.wait(_PATIENCE)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def pause(self) -> None:
        """Stop the process: connections stay open, and nobody answers."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)

    def version(self) -> str:
        return str(self._info("server")["redis_version"])

    def clear(self) -> None:
        """Forget every key, and keep the scripts."""
        self._control.flushall()

    def reads(self) -> int:
        """How often the server has read from a socket: one client that waits for each answer makes one read a trip."""
        return int(self._info("stats")["total_reads_processed"])

    def calls(self, names: Iterable[str] = ("evalsha", "eval")) -> int:
        """How often the server has run one of these commands."""
        stats = self._info("commandstats")
        return sum(int(stats.get(f"cmdstat_{name}", {}).get("calls", 0)) for name in names)

    def script_seconds(self) -> float:
        """Seconds that the server has spent in scripts."""
        stats = self._info("commandstats")
        return sum(float(stats.get(f"cmdstat_{name}", {}).get("usec", 0)) for name in ("evalsha", "evalsha_ro")) / 1e6

    def connections(self) -> int:
        """Clients in CLIENT LIST, without the one that asks."""
        return len(self._control.client_list()) - 1

    def seconds_left(self, key: str) -> float:
        """The time to live of the ticket that holds alone, in the line of this *key*."""
        text: Any = self._control.getrange(key, 0, 7)
        seconds, micros = self._control.time()
        dies = int.from_bytes(text.encode(errors="surrogateescape"), "big") / 1000
        return dies - float(seconds) - float(micros) / 1e6

    def waiting(self, key: str) -> int:
        """How many wait, by the hash of this *key*."""
        return sum(str(field).startswith("n") for field in self._control.hkeys(key))

    def memory(self) -> int:
        """Bytes in use."""
        return int(self._info("memory")["used_memory"])

    def _info(self, section: str) -> dict[str, Any]:
        answer: dict[str, Any] = self._control.info(section)
        return answer
