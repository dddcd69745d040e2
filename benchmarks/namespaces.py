"""
Three machines in one: each node of a cluster in a network namespace of its own, joined by a bridge.

A node can be stopped (SIGSTOP), killed (SIGKILL) and cut off. A node that is cut off reaches no other node and is
reached by none: what is sent vanishes, without an error. The clients, which are outside, still reach it.

It needs Linux, root (or CAP_NET_ADMIN and CAP_SYS_ADMIN) and the program ``ip`` of iproute2.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "servers"))

from child_processes import end, spawn

Command = Sequence[str | Path]


class NoNamespacesError(Exception):
    """This machine cannot make network namespaces for this user."""


class Node:
    """One machine: an address, a folder, and the programs that run on it."""

    def __init__(self, namespace: str, address: str, folder: Path) -> None:
        self.namespace = namespace
        self.address = address
        self.folder = folder
        self.folder.mkdir()
        self._commands: list[Command] = []
        self._processes: list[subprocess.Popen[bytes]] = []

    def run(self, *commands: Command) -> None:
        """Start the programs of this node."""
        self._commands = list(commands)
        self.start()

    def start(self) -> None:
        """Start the programs, or start them again after `kill`, with the data that they had."""
        inside = ["ip", "netns", "exec", self.namespace]
        self._processes = [
            spawn([*inside, *map(str, command)], folder=self.folder, log=self.folder / f"log{number}")
            for number, command in enumerate(self._commands)
        ]

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to every program."""
        for process in self._processes:
            process.send_signal(number)

    def kill(self) -> None:
        """End every program at once."""
        for process in self._processes:
            end(process, politely=False)


class Machines:
    """So many nodes on one bridge. They are removed when the block ends."""

    def __init__(self, count: int = 3) -> None:
        self._name = f"fo{os.getpid()}"
        net = f"198.18.{os.getpid() % 250}"  # set aside for benchmarks
        self._host = f"{net}.254"
        self.folder = Path(tempfile.mkdtemp(prefix="failover-"))
        self.nodes = [Node(f"{self._name}n{n}", f"{net}.{n}", self.folder / f"n{n}") for n in range(1, count + 1)]

    def __enter__(self) -> Self:
        try:
            _ip("link", "add", self._name, "type", "bridge")
            _ip("address", "add", f"{self._host}/24", "dev", self._name)
            _ip("link", "set", self._name, "up")
            for node in self.nodes:
                self._join(node)
        except (OSError, subprocess.CalledProcessError) as error:
            self.__exit__(None, None, None)
            msg = "network namespaces need Linux, root and the program ip of iproute2; try: sudo -E env PATH=$PATH ..."
            raise NoNamespacesError(msg) from error
        return self

    def _join(self, node: Node) -> None:
        inside = ("-n", node.namespace)
        _ip("netns", "add", node.namespace)
        _ip("link", "add", node.namespace, "type", "veth", "peer", "name", "eth0", "netns", node.namespace)
        _ip("link", "set", node.namespace, "master", self._name, "up")
        _ip(*inside, "link", "add", "void", "arp", "off", "type", "veth", "peer", "name", "nowhere")
        for device in ("lo", "eth0", "void", "nowhere"):  # what is sent to void vanishes
            _ip(*inside, "link", "set", device, "up")
        _ip(*inside, "address", "add", f"{node.address}/24", "dev", "eth0")

    def cut(self, node: Node) -> None:
        """Let nothing pass between *node* and the other nodes."""
        self._routes("add", node)

    def heal(self, node: Node) -> None:
        """Undo `cut`."""
        self._routes("del", node)

    def _routes(self, action: str, node: Node) -> None:
        for other in self.nodes:
            for one, far in ((node, other), (other, node)):
                if one is not far:
                    _ip("-n", one.namespace, "route", action, f"{far.address}/32", "dev", "void", "src", one.address)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for node in self.nodes:
            node.kill()
            _ip("netns", "del", node.namespace, check=False)
        _ip("link", "del", self._name, check=False)
        shutil.rmtree(self.folder, ignore_errors=True)


def _ip(*words: str, check: bool = True) -> None:
    subprocess.run(["ip", *words], check=check, capture_output=True)


Fault = tuple[str, Callable[[Node], None], Callable[[Node], None]]
"""Its name, how it begins and how it ends."""


def faults(machines: Machines) -> list[Fault]:
    """What may happen to a node."""
    return [
        ("stopped", lambda node: node.signal(signal.SIGSTOP), lambda node: node.signal(signal.SIGCONT)),
        ("cut off", machines.cut, machines.heal),
        ("killed", Node.kill, Node.start),
    ]
