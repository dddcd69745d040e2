"""
A link that takes its time: it forwards to a port of this machine, and delivers each chunk later.

Threads that sleep are on time within some 0.1 ms. The timers of an event loop round up to whole milliseconds, twice for
every trip, and would make a link of 1 ms one of 2.5.
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from queue import SimpleQueue

HOST = "127.0.0.1"


@contextlib.contextmanager
def slow_link(port: int, distance: float = 0.001) -> Iterator[int]:
    """
    The port of a link to *port*, at a *distance* of so many seconds there and back.

    It runs in a process of its own, so that it costs the measured one nothing.
    """
    command = [sys.executable, __file__, str(port), str(distance / 2)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield int(process.stdout.readline())
        finally:
            process.terminate()


def _forward(source: socket.socket, target: socket.socket, delay: float) -> None:
    on_the_way: SimpleQueue[tuple[float, bytes]] = SimpleQueue()
    threading.Thread(target=_deliver, args=(on_the_way, target), daemon=True).start()
    chunk = b"a first one"
    while chunk:
        try:
            chunk = source.recv(65536)
        except OSError:
            chunk = b""
        on_the_way.put((time.perf_counter() + delay, chunk))


def _deliver(on_the_way: SimpleQueue[tuple[float, bytes]], target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while True:
            due, chunk = on_the_way.get()
            time.sleep(max(due - time.perf_counter(), 0.0))
            if not chunk:
                target.shutdown(socket.SHUT_WR)
                return
            target.sendall(chunk)


def _serve(port: int, delay: float) -> None:
    with socket.create_server((HOST, 0)) as server:
        print(server.getsockname()[1], flush=True)
        while True:
            near, _ = server.accept()
            far = socket.create_connection((HOST, port))
            for source, target in ((near, far), (far, near)):
                target.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                threading.Thread(target=_forward, args=(source, target, delay), daemon=True).start()


if __name__ == "__main__":
    _serve(int(sys.argv[1]), float(sys.argv[2]))
