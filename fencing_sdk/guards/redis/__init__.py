"""
A guard inside Redis or Valkey: fence, check and your commands in one script, so in one step.

    guard = RedisGuard("redis://localhost")
    row = guard.key("seats/42", "row")                                  # "{seats/42}:row"
    await guard.execute("seats/42", lease.token, ("HSET", row, "who", "Ada"), ("EXPIRE", row, 3600))

For Redis 6.2 or newer and Valkey, one server, Sentinel or Cluster. The server runs a script without
interruption, so nobody comes in between; but it does not take back what a script has written before
a command of it failed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypeAlias, cast

from fencing_sdk._values.claim import Token
from fencing_sdk._values.names import check_name
from fencing_sdk._values.timing import Seconds, seconds
from fencing_sdk._values.wire import check_token, format_token
from fencing_sdk.errors import ConfigurationError, shown
from fencing_sdk.events import Observer
from fencing_sdk.guards._verdict import Reports
from fencing_sdk.guards.redis._answers import accepted, fence_from, unless_failed
from fencing_sdk.guards.redis._commands import Argument, Command, check_arguments, check_commands, keys_of, packed
from fencing_sdk.guards.redis._keys import check_prefix, check_slots, fence_key, tag
from fencing_sdk.guards.redis._link import link_to
from fencing_sdk.guards.redis._script import Script, check_body, own_script

if TYPE_CHECKING:
    from redis.asyncio import Redis, RedisCluster
    from valkey.asyncio import Valkey, ValkeyCluster

__all__ = ["Argument", "Command", "FencedScript", "RedisGuard"]

Client: TypeAlias = "Redis | RedisCluster | Valkey | ValkeyCluster"

_MIN_RETENTION = 1.0


class RedisGuard:
    """
    Keeps fences beside the data in Redis, and runs commands that only a current token gets in.

    A resource has one fence, at the key ``PREFIX:{resource}``. On a cluster, data that is written
    with it has to be in the same slot: name it with `key`, or let it carry ``{resource}``.

    Each write is sent once. When its answer is lost, the driver's error leaves and nobody knows
    whether it happened; the same holder may try again, which `raise_to` does by itself. Errors of
    the server and of the driver leave as they are.

    Not promised: anything about writes that go around the guard; that a failover keeps what was
    acknowledged. With the fence the replica then has lost the data that was written under it.

    Args:
        client_or_url: Your own client of ``redis.asyncio`` or ``valkey.asyncio``, also of a cluster
            or of ``sentinel.master_for(...)``; it stays yours to close. Or a URL such as
            ``redis://localhost`` or ``redis+cluster://localhost``: then close the guard.

        prefix: What the keys of fences begin with.

        retention: Seconds after the last accepted token for which a fence is kept. None keeps it
            for ever, a small key for each resource: a fence that is forgotten lets an old token in.

        observers: Callables that receive `StaleRejected` for every refusal and `FenceRaised` for
            every successful `raise_to`.

    Raises:
        ConfigurationError: an argument cannot work, or redis-py is missing. Nothing is sent yet.
    """

    def __init__(
        self,
        client_or_url: Client | str,
        *,
        prefix: str = "fence",
        retention: Seconds | None = None,
        observers: Sequence[Observer] = (),
    ) -> None:
        self._prefix = check_prefix(prefix)
        self._retention = _milliseconds(retention)
        self._reports = Reports(observers)
        self._link = link_to(client_or_url)
        self._execute = own_script("execute")
        self._check = Script("")

    def key(self, resource: str, name: str) -> str:
        """
        A key for data of *resource*, ``{resource}:name``: in the slot of its fence.

        Raises:
            ConfigurationError: *resource* or *name* is not one.
        """
        return f"{tag(check_name(resource, parameter='resource'))}:{check_name(name)}"

    async def execute(
        self, resource: str, token: int, *commands: Command, keys: Iterable[Argument] | None = None
    ) -> list[object]:
        """
        Check *token* and run *commands*, as one step; return their replies as the server sends them.

        They run in order up to the first that fails. What ran before it stays, and so does the
        fence: Redis takes nothing back. A note on the error tells which one it was.

        Args:
            resource: Whose fence is asked.

            token: As ``lease.token``.

            commands: The words of each, such as ``("SET", key, value)``. Nothing of them can become
                part of the script.

            keys: All keys that they touch, where that is not what the commands' names say.

        Raises:
            StaleTokenError: the resource has seen a later token; nothing was written.
            ConfigurationError: an argument is not one, or a key is in another slot of the cluster.
        """
        checked = check_commands(commands)
        touched = keys_of(checked) if keys is None else keys
        replies = await self._write(self._execute, resource, token, touched, packed(checked))
        return unless_failed(cast("list[object]", replies), checked)

    async def set(
        self, resource: str, token: int, key: Argument, value: Argument, *, ttl: Seconds | None = None
    ) -> None:
        """
        Check *token* and set *key*, as one step; with *ttl* it vanishes after so many seconds.

        Raises:
            StaleTokenError, ConfigurationError: as `execute`.
        """
        expiry = () if ttl is None else ("PX", _milliseconds(ttl, "ttl", low=0.001))
        await self.execute(resource, token, ("SET", key, value, *expiry))

    async def hset(self, resource: str, token: int, key: Argument, fields: Mapping[str, Argument]) -> int:
        """
        Check *token* and set *fields* of the hash at *key*, as one step; return how many are new.

        Raises:
            StaleTokenError, ConfigurationError: as `execute`.
        """
        words = [word for field in fields.items() for word in field]
        return cast("int", (await self.execute(resource, token, ("HSET", key, *words)))[0])

    async def getdel(self, resource: str, token: int, key: Argument) -> str | bytes | None:
        """
        Check *token*, and return and delete the value at *key*, as one step; None when there is none.

        Raises:
            StaleTokenError, ConfigurationError: as `execute`.
        """
        return cast("str | bytes | None", (await self.execute(resource, token, ("GETDEL", key)))[0])

    def script(self, body: str) -> FencedScript:
        """
        Put the check in front of a Lua *body*, which finds its own KEYS and ARGV and may return a value.

        Build *body* from constants: it is code. What varies is passed to `FencedScript.run`.

        Raises:
            ConfigurationError: *body* is not a str, or begins with ``#!``.
        """
        return FencedScript(self, Script(check_body(body)))

    async def raise_to(self, resource: str, token: int) -> None:
        """See `fencing_sdk.abc.Guard.raise_to`. The data stays as it is."""
        await self._write(self._check, resource, token, (), (), once=False)
        self._reports.raised(resource, check_token(token))

    async def highest(self, resource: str) -> Token | None:
        """See `fencing_sdk.abc.Guard.highest`."""
        key = fence_key(self._prefix, check_name(resource, parameter="resource"))
        stored = await self._link.get(key)
        return None if stored is None else fence_from(stored, key)

    async def aclose(self) -> None:
        """Close the connections of a guard that was given a URL. A client of yours stays open."""
        await self._link.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def _write(
        self,
        script: Script,
        resource: str,
        token: int,
        keys: Iterable[Argument],
        arguments: Sequence[Argument],
        *,
        once: bool = True,
    ) -> object:
        resource, checked = check_name(resource, parameter="resource"), _check_holder(check_token(token))
        fence = fence_key(self._prefix, resource)
        touched = self._touched(resource, fence, keys)
        check = (f"{checked:d}", checked.holder or "", self._retention)
        with self._reports.of_refusals(checked):
            reply = await self._link.evaluate(script, [*touched, fence], [*arguments, *check], once=once)
            return accepted(resource, checked, fence, reply)

    def _touched(self, resource: str, fence: bytes, keys: Iterable[Argument]) -> list[bytes]:
        """Each of *keys* once, as bytes."""
        touched = list(dict.fromkeys(self._link.encode(key) for key in check_arguments(keys, "keys")))
        if fence in touched:
            msg = (
                f"key {shown(fence)} is the fence of {shown(resource)}; raise_to() raises it, nothing else may write it"
            )
            raise ConfigurationError(msg)
        if self._link.is_cluster:
            check_slots(resource, fence, touched)
        return touched


class FencedScript:
    """Lua that runs only for a current token. Made by `RedisGuard.script`, and sent to the server once."""

    __slots__ = ("_guard", "_script")

    def __init__(self, guard: RedisGuard, script: Script) -> None:
        self._guard = guard
        self._script = script

    async def run(
        self, resource: str, token: int, *, keys: Iterable[Argument] = (), args: Iterable[Argument] = ()
    ) -> object:
        """
        Check *token* and run the body with *keys* as KEYS and *args* as ARGV, as one step; return its value.

        What the body wrote before an error of its own stays, and so does the fence. The lines in
        the server's message are those of the body.

        Raises:
            StaleTokenError, ConfigurationError: as `RedisGuard.execute`.
        """
        arguments = check_arguments(args, "args")
        value = await self._guard._write(self._script, resource, token, keys, arguments)  # noqa: SLF001  (its other half)
        if isinstance(value, Exception):
            raise value
        return value


def _milliseconds(duration: Seconds | None, parameter: str = "retention", *, low: float = _MIN_RETENTION) -> str:
    return "0" if duration is None else str(math.ceil(seconds(duration, parameter, low=low, high=1e12) * 1000))


def _check_holder(token: Token) -> Token:
    format_token(token)  # as in a header: hex digits, or the text of a fence could be read in two ways
    return token
