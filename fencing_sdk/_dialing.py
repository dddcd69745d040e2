"""
Several ways to one connection: one that swallows packets must not hide the others.

Many names have an IPv6 and an IPv4 address, or one for each data centre. The addresses are tried in the order of the
resolver, the families in turn, and the next one when the last has failed or after `DELAY` seconds ("happy eyeballs").
The first that takes the connection is used. The driver of Redis would wait at the first one for
ever, for the store and for the guard.
"""

from __future__ import annotations

import asyncio
import ipaddress
import math
import socket
from collections.abc import Callable, Coroutine, Iterable, Sequence
from functools import partial
from itertools import chain, zip_longest
from typing import Any, TypeVar

__all__ = ["DELAY", "by_turns", "connected_socket", "first_success"]

T = TypeVar("T")

DELAY = 0.25
"""Seconds that an address has for itself, as RFC 8305 recommends."""

_Address = tuple[int, int, int, str, tuple[str, int] | tuple[str, int, int, int] | tuple[int, bytes]]
"""As `socket.getaddrinfo` returns it: family, type, protocol, name, address."""


async def first_success(
    attempts: Iterable[Callable[[], Coroutine[Any, Any, T]]],
    blame: Callable[[Sequence[Exception]], Exception],
    *,
    at_once: float = math.inf,
    delay: float = 0.0,
    final: type[Exception] | tuple[()] = (),
    discard: Callable[[T], object] | None = None,
    patience: float | None = None,
) -> T:
    """
    Make *attempts* side by side, *at_once* at most, and return what the first one returns that does not fail.

    With a *delay*, each has so many seconds for itself before the next one begins, unless it fails. The others are
    cancelled, and end within *patience* seconds. If one of them returns all the same, *discard* gets its result.

    Raises:
        Exception: one that is *final*; else what *blame* makes of the errors of all attempts, in their order.
    """
    left, begun = list(attempts), list[asyncio.Task[T]]()
    pending: set[asyncio.Task[T]] = set()
    chosen: asyncio.Task[T] | None = None
    try:
        while left or pending:
            while left and len(pending) < at_once:
                begun.append(asyncio.ensure_future(left.pop(0)()))
                pending.add(begun[-1])
                if delay:
                    break
            alone = delay if left and len(pending) < at_once else None
            done, pending = await asyncio.wait(pending, timeout=alone, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                if (error := task.exception()) is None:
                    chosen = task
                    return task.result()
                if isinstance(error, final) or not isinstance(error, Exception):
                    raise error
        raise blame([error for task in begun if isinstance(error := task.exception(), Exception)])
    finally:
        await _end(begun, chosen, discard, patience)


async def _end(
    begun: Sequence[asyncio.Task[T]],
    chosen: asyncio.Task[T] | None,
    discard: Callable[[T], object] | None,
    patience: float | None,
) -> None:
    def drop(task: asyncio.Task[T]) -> None:
        if task is not chosen and not task.cancelled() and task.exception() is None and discard is not None:
            discard(task.result())

    for task in begun:
        task.cancel()
        task.add_done_callback(drop)
    try:
        if begun and patience != 0:
            await asyncio.wait(begun, timeout=patience)
    except asyncio.CancelledError:
        if chosen is not None and discard is not None:  # the caller will not get it
            discard(chosen.result())
        raise


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
    attempts = [partial(_connect, address) for address in by_turns(found)]
    return await first_success(attempts, _blame, delay=DELAY, discard=socket.socket.close, patience=0.0)


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


def _blame(errors: Sequence[Exception]) -> Exception:
    if len(set(map(type, errors))) == 1:
        return errors[0]
    return OSError(f"Multiple exceptions: {', '.join(map(str, errors))}")  # as asyncio words it


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
