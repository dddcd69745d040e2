"""What the fire has to know of a backend's servers, and how it does harm to them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

Harm = Callable[[float], Awaitable[bool]]
"""Does something to a server for so many seconds and makes it good again; tells whether it really happened."""

TTL = 2.0


class Store:
    """
    A backend's servers. The bench holds them directly; workers reach `ports` through proxies of their own.

    Attributes:
        ttl: What workers ask for.

        gone: Seconds after which the store has handed on what a dead client held, if all is well.

        served: Seconds after faults have ended within which everybody gets a turn.
    """

    name = ""
    ttl = TTL
    gone = TTL

    def __init__(self, folder: Path, chance: random.Random) -> None:
        self.folder = folder
        self.random = chance

    @property
    def served(self) -> float:
        return 2 * self.gone + 6.0

    @property
    def ports(self) -> list[int]:
        return []

    @property
    def harms(self) -> dict[str, Harm]:
        raise NotImplementedError

    def url(self, ports: Sequence[int] = ()) -> str:
        """Where the store is: its own address, or through proxies on *ports*."""
        raise NotImplementedError

    def start(self) -> None:
        raise NotImplementedError

    def heal(self) -> None:
        """Let every server run and answer."""

    def close(self) -> None:
        raise NotImplementedError

    def log(self) -> str:
        return ""


async def call(function: Callable[..., object], *arguments: object) -> None:
    """Do to a server what takes a while, in a thread."""
    await asyncio.to_thread(function, *arguments)
