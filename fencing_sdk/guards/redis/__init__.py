"""
A guard inside Redis or Valkey: one script checks the token, raises the fence and runs your commands.

    guard = RedisGuard("redis://localhost")
    row = guard.key("seats/42", "row")                                  # "{seats/42}:row"
    await guard.execute("seats/42", lease.token, ("HSET", row, "who", "Ada"), ("EXPIRE", row, 3600))

For Redis 6.2 or newer and Valkey: one server, Sentinel or Cluster. The server runs a script without
interruption, so no other client's command comes in between. But if a command of the script fails, the
server does not take back what the commands before it have written.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias, cast

from fencing_sdk._values.claim import check_name
from fencing_sdk._values.timing import Seconds, seconds
from fencing_sdk._values.token import Token, format_token
from fencing_sdk.errors import ConfigurationError, shown
from fencing_sdk.events import Observer
from fencing_sdk.guards._verdict import StoreGuard, check_token_of, check_tokens
from fencing_sdk.guards.redis._connection import connection_to
from fencing_sdk.guards.redis._scripts import (
    Argument,
    CheckedScript,
    Command,
    accepted,
    check_arguments,
    check_commands,
    check_one_slot,
    check_prefix,
    check_slots,
    checked_body,
    fence_from,
    fence_key,
    keys_of,
    packed,
    script_of_file,
    slot,
    tag,
    unless_failed,
)

if TYPE_CHECKING:
    from redis.asyncio import Redis, RedisCluster
    from valkey.asyncio import Valkey, ValkeyCluster

__all__ = ["Argument", "Command", "FencedScript", "RedisGuard"]

Client: TypeAlias = "Redis | RedisCluster | Valkey | ValkeyCluster"

_MIN_RETENTION = 1.0


class RedisGuard(StoreGuard):
    """
    Keeps fences beside the data in Redis, and runs commands only for a current token.

    A resource has one fence, at the key ``PREFIX:{resource}``. On a cluster, data that is written
    with it has to be in the same slot: name it with `key`, or put ``{resource}`` into its key.

    Each write is sent once. If its answer is lost, the guard raises the driver's error, and it is unknown whether the
    server has carried out the write. The same holder may try again; `raise_to` does so by
    itself. Errors of the server and of the driver are raised unchanged.

    Not promised: anything about writes that bypass the guard, and that a failover keeps an acknowledged
    write. A replica that lacks the latest fence also lacks the data that was written with it.

    Args:
        client_or_url: Your own client of ``redis.asyncio`` or ``valkey.asyncio``, also of a cluster
            or of ``sentinel.master_for(...)``; you close it yourself. Or a URL such as
            ``redis://localhost`` or ``redis+cluster://localhost``: then close the guard, after its last call.

        prefix: The beginning of the keys of fences.

        retention: Seconds for which the server keeps a fence after the last accepted token. None keeps
            it for ever, a small key for each resource: without its fence, a resource accepts an old token.

        observers: Callables that receive `StaleRejected` for every refusal and `FenceRaised` for
            every successful `raise_to`.

    Raises:
        ConfigurationError: an argument has a wrong type or value, or redis-py is missing. No I/O happens yet.
    """

    def __init__(
        self,
        client_or_url: Client | str,
        *,
        prefix: str = "fence",
        retention: Seconds | None = None,
        observers: Sequence[Observer] = (),
    ) -> None:
        super().__init__(observers)
        self._prefix = check_prefix(prefix)
        self._retention = _milliseconds(retention)
        self._connection = connection_to(client_or_url)
        self._execute = script_of_file("execute")
        self._check = CheckedScript("")

    def key(self, resource: str, name: str) -> str:
        """
        A key for data of *resource*, ``{resource}:name``, in the slot of its fence.

        Raises:
            ConfigurationError: *resource* or *name* cannot be a name.
        """
        return f"{tag(check_name(resource, parameter='resource'))}:{check_name(name)}"

    async def execute(
        self, resource: str, token: int, *commands: Command, keys: Iterable[Argument] | None = None
    ) -> list[object]:
        """
        Check *token* and run *commands*, as one step; return their replies as the server sends them.

        The commands run in order, up to the first that fails. Redis takes nothing back: the writes of the
        commands before it stay, and so does the fence. A note on the error names the command that failed.

        Args:
            resource: The resource with the fence.

            token: As ``lease.token``.

            commands: The words of each command, such as ``("SET", key, value)``. No word can become part
                of the script.

            keys: All keys that the commands touch, if the guard does not know them by the commands' names.

        Raises:
            StaleTokenError: the resource has seen a later token; no command ran.
            ConfigurationError: an argument has a wrong type or value, or a key is in another slot of the cluster.
        """
        return await self.execute_all(check_token_of(resource, token), *commands, keys=keys)

    async def execute_all(
        self, tokens: Mapping[str, int], *commands: Command, keys: Iterable[Argument] | None = None
    ) -> list[object]:
        """
        Check the token of each resource and run *commands*, as one step, as `execute` does for one resource.

        On a cluster the fences of all resources have to be in one slot, which those of different resources seldom
        are. There call `admit_all`, and then `execute` for each resource.

        Args:
            tokens: The token of each resource, such as ``held.tokens`` of a `MultiLock`.

            commands: As for `execute`.

            keys: As for `execute`.

        Raises:
            StaleTokenError: one of the resources has seen a later token, and the error names it; no command ran,
                and no fence was raised.
            ConfigurationError: as `execute`; or the fences are in several slots of the cluster.
        """
        checked = check_commands(commands)
        touched = keys_of(checked) if keys is None else keys
        replies = await self._write(self._execute, check_tokens(tokens), touched, packed(checked))
        return unless_failed(cast("list[object]", replies), checked)

    async def admit_all(self, tokens: Mapping[str, int]) -> None:
        """
        Check the token of each resource and raise all their fences: all of them or none.

        The writes come later, each with its own check: `execute` or `set`. What is gained is that none of them begins
        if one of the tokens is stale already.

        On a cluster it is one step for each slot, one after the other. If a later one is refused, the fences of those
        before it stay raised, to tokens that are yours.

        Raises:
            StaleTokenError: one of the resources has seen a later token, and the error names it.
            ConfigurationError: *tokens* is not a mapping of resources to tokens.
        """
        checked = check_tokens(tokens)
        steps: dict[int, dict[str, Token]] = {}
        for resource, token in checked.items():
            one_step = slot(fence_key(self._prefix, resource)) if self._connection.is_cluster else 0
            steps.setdefault(one_step, {})[resource] = token
        for step in steps.values():
            await self._write(self._check, step, (), (), once=False)
        self._reports.raised(checked)

    async def set(
        self, resource: str, token: int, key: Argument, value: Argument, *, ttl: Seconds | None = None
    ) -> None:
        """
        Check *token* and set *key*, as one step; with *ttl* the key expires after so many seconds.

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
        Put the check in front of a Lua *body*. The body has KEYS and ARGV of its own, and may return a value.

        Build *body* from constants, because it is code. Pass values to `FencedScript.run`.

        Raises:
            ConfigurationError: *body* is not a str, or begins with ``#!``.
        """
        return FencedScript(self, CheckedScript(checked_body(body)))

    async def raise_to(self, resource: str, token: int) -> None:
        """See `fencing_sdk.abc.Guard.raise_to`. The data stays as it is."""
        await self.admit_all(check_token_of(resource, token))

    async def highest(self, resource: str) -> Token | None:
        """See `fencing_sdk.abc.Guard.highest`."""
        key = fence_key(self._prefix, check_name(resource, parameter="resource"))
        stored = await self._connection.get(key)
        return None if stored is None else fence_from(stored, key)

    async def aclose(self) -> None:
        """
        Close the connections that the guard has opened for a URL. A client of yours stays open.

        The next call opens new connections, as with the other guards: then close the guard again.
        """
        await self._connection.aclose()

    async def _write(
        self,
        script: CheckedScript,
        tokens: Mapping[str, Token],
        keys: Iterable[Argument],
        arguments: Sequence[Argument],
        *,
        once: bool = True,
    ) -> object:
        fences = {resource: fence_key(self._prefix, resource) for resource in tokens}
        touched = self._touched(fences, keys)
        for token in tokens.values():
            format_token(token)  # refuses a holder that is not hex digits, which would make a fence ambiguous
        check = [word for token in tokens.values() for word in (f"{token:d}", token.holder or "")]
        words = [*arguments, *check, self._retention, str(len(tokens))]
        with self._reports.of_refusals(tokens):
            reply = await self._connection.evaluate(script, [*touched, *fences.values()], words, once=once)
            return accepted(tokens, list(fences.values()), reply)

    def _touched(self, fences: Mapping[str, bytes], keys: Iterable[Argument]) -> list[bytes]:
        """Return each of *keys* once, as bytes. Refuse the fences, and what is in several slots of a cluster."""
        touched = list(dict.fromkeys(self._connection.encode(key) for key in check_arguments(keys, "keys")))
        for resource, fence in fences.items():
            if fence in touched:
                what = f"key {shown(fence)} is the fence of {shown(resource)}"
                msg = f"{what}, which no command may write; use raise_to()"
                raise ConfigurationError(msg)
        if self._connection.is_cluster:
            check_one_slot(fences)
            for resource, fence in fences.items():
                check_slots(resource, fence, touched)
        return touched


class FencedScript:
    """A Lua script that runs only for a current token. `RedisGuard.script` makes it; a server gets its text once."""

    __slots__ = ("_guard", "_script")

    def __init__(self, guard: RedisGuard, script: CheckedScript) -> None:
        self._guard = guard
        self._script = script

    async def run(
        self, resource: str, token: int, *, keys: Iterable[Argument] = (), args: Iterable[Argument] = ()
    ) -> object:
        """
        Check *token* and run the body with *keys* as KEYS and *args* as ARGV, as one step; return its value.

        If the body fails, its writes before the error stay, and so does the fence. The line numbers in the
        server's message are those of the body.

        Raises:
            StaleTokenError, ConfigurationError: as `RedisGuard.execute`.
        """
        arguments = check_arguments(args, "args")
        value = await self._guard._write(self._script, check_token_of(resource, token), keys, arguments)  # noqa: SLF001  (both are of one module)
        if isinstance(value, Exception):
            raise value
        return value


def _milliseconds(duration: Seconds | None, parameter: str = "retention", *, low: float = _MIN_RETENTION) -> str:
    return "0" if duration is None else str(math.ceil(seconds(duration, parameter, low=low, high=1e12) * 1000))
