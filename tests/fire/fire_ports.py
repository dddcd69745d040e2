"""Ports that stay ours while nobody listens on them: other tests of this machine look for free ones all the time."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterable, Iterator

from local_ports import HOST


def keep(port: int) -> socket.socket:
    """Bind *port* and do not listen: connecting is refused, and whoever binds with SO_REUSEADDR may listen there."""
    keeper = socket.socket()
    keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    with contextlib.suppress(OSError):
        keeper.bind((HOST, port))
    return keeper


@contextlib.contextmanager
def kept(ports: Iterable[int]) -> Iterator[None]:
    """Keep the *ports* of servers that have just been killed until they listen again."""
    with contextlib.ExitStack() as stack:
        for port in ports:
            stack.enter_context(keep(port))
        yield
