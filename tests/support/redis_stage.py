"""What scenarios on Redis share: keys as an operator writes them, and questions to the server."""

from __future__ import annotations

import re

from patience import until
from redis_quorum import Quorum
from redis_server import RedisServer
from stays import PATIENCE, none_left


def key(name: str, part: str = "l", prefix: str = "fencing") -> str:
    """The key of a lock, as an operator writes it."""
    return f"{{{prefix}:{name}}}:{part}"


async def connections(server: RedisServer) -> list[dict[str, str]]:
    """The connections of the SDK that the server knows, each as what CLIENT LIST says of it."""
    lines = str(await server.command("CLIENT", "LIST")).splitlines()
    clients = [dict(re.findall(r"([a-z-]+)=(\S*)", line)) for line in lines]
    return [client for client in clients if client["name"] == "fencing-sdk"]


async def keys(server: RedisServer) -> set[str]:
    """The keys that are not the last token of a lock."""
    return {found for found in await server.command("KEYS", "*") if not found.endswith(":t")}


async def nothing_left(server: RedisServer, *, within: float = PATIENCE) -> None:
    """See that no lease, no line and no connection remains."""

    async def leavings() -> list[object]:
        return [*await keys(server), *await connections(server)]

    await none_left(leavings, within=within)


async def held_by_all(quorum: Quorum, name: str) -> None:
    """Wait until every node has the hold: a grant waits for a majority alone."""
    hold = key(name, "h")
    await until(lambda: all(node.ask("EXISTS", hold) for node in quorum.nodes), what="every node has the hold")


async def milliseconds_left(server: RedisServer, name: str) -> int:
    """For how long the server will not hand the lock on; negative when it might do so at once."""
    return int(await server.command("PTTL", key(name)))


async def calls_of(server: RedisServer, *commands: str) -> int:
    """How often the server has run these commands."""
    text = str(await server.command("INFO", "commandstats"))
    found = dict(re.findall(r"cmdstat_(\S+):calls=(\d+)", text))
    return sum(int(found.get(command, 0)) for command in commands)
