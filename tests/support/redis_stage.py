"""What scenarios on Redis share: keys as an operator writes them, and questions to the server."""

from __future__ import annotations

import hashlib
import re
from types import ModuleType

import pytest
from patience import until
from redis_quorum import Quorum
from redis_server import RedisServer
from stays import PATIENCE, none_left

from fencing_sdk.backends.redis.scripts import RedisScript


def key(name: str, part: str = "s", prefix: str = "fencing") -> str:
    """The key of a lock, as an operator writes it."""
    return f"{{{prefix}:{name}}}:{part}"


def change_scripts(monkeypatch: pytest.MonkeyPatch, scripts: ModuleType, old: str, new: str) -> None:
    """Replace a text in each script that has it; fail if none has."""
    having = [each for each in vars(scripts).values() if isinstance(each, RedisScript) and old in each.text]
    assert having, f"no script has {old!r}"
    for script in having:
        text = script.text.replace(old, new)
        monkeypatch.setattr(script, "text", text)
        monkeypatch.setattr(script, "sha", hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())


async def connections(server: RedisServer) -> list[dict[str, str]]:
    """The connections of the SDK that the server knows, each as what CLIENT LIST says of it."""
    lines = str(await server.command("CLIENT", "LIST")).splitlines()
    clients = [dict(re.findall(r"([a-z-]+)=(\S*)", line)) for line in lines]
    return [client for client in clients if client["name"] == "fencing-sdk"]


IDLE = "\0I"
"""What stands at 24 in the line of a name that nobody holds, and waits for."""


async def keys(server: RedisServer) -> set[str]:
    """The keys that are not the line of a name that nobody holds, and waits for."""
    found = await server.command("KEYS", "*")
    return {
        each for each in found if not (each.endswith(":s") and await server.command("GETRANGE", each, 24, 25) == IDLE)
    }


async def nothing_left(server: RedisServer, *, within: float = PATIENCE) -> None:
    """See that no lease, no line and no connection remains."""

    async def leavings() -> list[object]:
        return [*await keys(server), *await connections(server)]

    await none_left(leavings, within=within)


async def held_by_all(quorum: Quorum, name: str) -> None:
    """Wait until every node has the hold: a grant waits for a majority alone."""
    hold = key(name, "h")
    await until(lambda: all(node.ask("EXISTS", hold) for node in quorum.nodes), what="every node has the hold")


def seconds_left(server: RedisServer, name: str) -> float:
    """For how long the server will not hand on a lock that is held alone; 0 when it might do so at once."""
    line, (seconds, micros) = server.ask_all(["GETRANGE", key(name), 0, 25], ["TIME"])
    stored = line.encode(errors="surrogateescape")
    if stored[24:] in {b"", IDLE.encode()}:
        return 0.0
    dies = int.from_bytes(stored[:8], "big") / 1000
    return max(0.0, dies - int(seconds) - int(micros) / 1e6)


async def waiting(server: RedisServer, name: str = "a") -> int:
    """How many wait for a name."""
    found = await server.command("HKEYS", key(name, "w"))
    return sum(field.startswith("n") for field in found)


async def calls_of(server: RedisServer, *commands: str) -> int:
    """How often the server has run these commands."""
    text = str(await server.command("INFO", "commandstats"))
    found = dict(re.findall(r"cmdstat_(\S+):calls=(\d+)", text))
    return sum(int(found.get(command, 0)) for command in commands)
