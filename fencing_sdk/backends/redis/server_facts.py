"""What one Redis server tells of itself: the answers to INFO, CONFIG GET and ACL WHOAMI, without any judgement."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from redis.asyncio.connection import SSLConnection, UnixDomainSocketConnection
from redis.exceptions import RedisError

from fencing_sdk._values.findings import is_local
from fencing_sdk.backends.redis.connection.dial import ServerSettings

_COMMANDS = (("INFO",), ("CONFIG", "GET", "*"), ("ACL", "WHOAMI"), ("CLUSTER", "INFO"))


@dataclass(frozen=True, slots=True)
class RedisFacts:
    """One server. What it may not tell, or does not know, is empty."""

    address: str
    info: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict)
    cluster: Mapping[str, str] = field(default_factory=dict)
    user: str = ""
    password: bool = True
    """Whether the client logged in with a password."""
    exposed: bool = False
    """Whether a network carries what is sent, without TLS."""

    def number(self, name: str) -> int:
        """A number of INFO; 0 where it is missing."""
        digits = self.info.get(name, "")
        return int(digits) if digits.isdigit() else 0

    @property
    def good_replicas(self) -> int:
        """The replicas that are connected and in step."""
        lines = [text for name, text in self.info.items() if name.startswith("slave") and "state=" in text]
        return sum("state=online" in line for line in lines)


async def read_facts(server: ServerSettings) -> RedisFacts:
    """
    Ask *server*.

    Raises:
        Exception: the driver's error when it cannot connect.
    """
    replies = await server.ask_all(*_COMMANDS)
    info, settings, user, cluster = (None if isinstance(reply, RedisError) else reply for reply in replies)
    local = issubclass(server.kind, UnixDomainSocketConnection) or is_local(str(server.arguments.get("host", "")))
    login = any(server.arguments.get(name) for name in ("password", "credential_provider"))
    return RedisFacts(
        server.address,
        _lines(info),
        _pairs(settings),
        _lines(cluster),
        user.decode() if isinstance(user, bytes) else "",
        password=login,
        exposed=not local and not issubclass(server.kind, SSLConnection),
    )


def _lines(reply: object) -> dict[str, str]:
    """The lines of INFO: ``name:value``."""
    if not isinstance(reply, bytes):
        return {}
    split = (line.partition(":") for line in reply.decode(errors="replace").splitlines())
    return {name: value.strip() for name, colon, value in split if colon}


def _pairs(reply: object) -> dict[str, str]:
    """The settings, as a list in which names and values alternate."""
    if not isinstance(reply, list):
        return {}
    words = [str(word, errors="replace") if isinstance(word, bytes) else str(word) for word in reply]
    return dict(zip(words[::2], words[1::2], strict=False))
