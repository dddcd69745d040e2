"""
Connects to a name that has several addresses: one that swallows packets must not hide the others.

Many names have an IPv6 and an IPv4 address, or one for each data centre. The addresses are tried in the order of the
resolver, the families in turn, and the next one when the last has failed or after `DELAY` seconds ("happy eyeballs").
The first that takes the connection is used. The drivers of Redis and PostgreSQL would wait at the first one for ever,
for stores and for guards.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Sequence
from itertools import chain, zip_longest
from typing import Any

__all__ = ["DELAY", "DialingLoop", "by_turns", "connected_socket"]

DELAY = 0.25
"""Seconds that an address has for itself, as RFC 8305 recommends."""

_Address = tuple[int, int, int, str, tuple[str, int] | tuple[str, int, int, int] | tuple[int, bytes]]
"""As `socket.getaddrinfo` tells it: family, type, protocol, name, address."""


async def connected_socket(host: str, port: int) -> socket.socket | None:
    """
    Return a socket that is connected to *port* of *host*; None if *host* is an address: there is nothing to choose.

    Raises:
        OSError: the name cannot be resolved, or none of its addresses takes the connection.
    """
    if _is_address(host):
        return None
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    if len(found) == 1:
        return await _connect(found[0])
    return await _first_of(by_turns(found))


class DialingLoop:
    """The running loop for asyncpg, which would wait for ever at the first address of a name."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loop, name)

    async def create_connection(self, protocol_factory: Any, host: str, port: int, **options: Any) -> Any:
        """Connect as the loop does, by the first address that takes the connection."""
        link = await connected_socket(host, port)
        if link is None:
            return await self._loop.create_connection(protocol_factory, host, port, **options)
        try:
            if options.get("ssl") is not None:
                options.setdefault("server_hostname", host)
            return await self._loop.create_connection(protocol_factory, sock=link, **options)
        except BaseException:
            link.close()
            raise


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True


def by_turns(found: Sequence[_Address]) -> list[_Address]:
    """Let the families alternate: the resolver may list all addresses of one that does not work here first."""
    families = dict.fromkeys(address[0] for address in found)
    columns = [[address for address in found if address[0] == family] for family in families]
    return [address for address in chain(*zip_longest(*columns)) if address is not None]


async def _first_of(left: list[_Address]) -> socket.socket:
    attempts: set[asyncio.Task[socket.socket]] = set()
    errors: list[BaseException] = []
    try:
        while left or attempts:
            if left:
                attempts.add(asyncio.ensure_future(_connect(left.pop(0))))
            await asyncio.wait(attempts, timeout=DELAY if left else None, return_when=asyncio.FIRST_COMPLETED)
            for attempt in [each for each in attempts if each.done()]:
                attempts.discard(attempt)
                error = attempt.exception()
                if error is None:
                    return attempt.result()
                errors.append(error)
    finally:
        for attempt in attempts:
            attempt.cancel()
            attempt.add_done_callback(_close)
    if len(set(map(type, errors))) == 1:
        raise errors[0]
    msg = f"Multiple exceptions: {', '.join(map(str, errors))}"  # as asyncio words it
    raise OSError(msg)


async def _connect(address: _Address) -> socket.socket:
    family, kind, protocol, _, where = address
    link = socket.socket(family, kind, protocol)
    try:
        link.settimeout(0.0)
        await asyncio.get_running_loop().sock_connect(link, where)
    except BaseException:
        link.close()
        raise
    return link


def _close(attempt: asyncio.Task[socket.socket]) -> None:
    if not attempt.cancelled() and attempt.exception() is None:
        attempt.result().close()
