"""
A guard inside Redis or Valkey: one script checks the token, raises the fence and runs your commands.

    guard = RedisGuard("redis://localhost")
    row = guard.key("seats/42", "row")                                  # "{seats/42}:row"
    await guard.execute("seats/42", lease.token, ("HSET", row, "who", "Ada"), ("EXPIRE", row, 3600))

For Redis 6.2 or newer and Valkey: one server, Sentinel or Cluster. The server runs a script without
interruption, so no other client's command comes in between. But if a command of the script fails, the
server does not take back what the commands before it have written.

redis-py and valkey-py send a command again when its answer is lost. Raising a fence twice does no harm. But the
caller's commands must not run twice: an INCR would count twice. So a guarded write is sent once, on a connection of the
driver, and a lost answer is an error of the driver. This module imports a driver only for a URL.
"""

from __future__ import annotations

import importlib
import inspect
import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from traceback import walk_tb
from typing import TYPE_CHECKING, Any, TypeAlias, cast
from urllib.parse import parse_qsl

from fencing_sdk._http.tls import complaint_about
from fencing_sdk._values.claim import check_name
from fencing_sdk._values.drivers import missing
from fencing_sdk._values.timing import Seconds, seconds
from fencing_sdk._values.token import Token, format_token
from fencing_sdk._values.url import decoded, read_database, refuse_url, split_url
from fencing_sdk.errors import ConfigurationError, shown
from fencing_sdk.events import Observer
from fencing_sdk.guards import StoreGuard, check_token_of, check_tokens
from fencing_sdk.guards.redis._scripts import (
    EXECUTE,
    Argument,
    CheckedScript,
    Command,
    accepted,
    check_arguments,
    check_command,
    check_slots,
    fence_from,
    fence_key,
    keys_of,
    slot,
    tag,
)

if TYPE_CHECKING:
    from redis.asyncio import Redis, RedisCluster
    from valkey.asyncio import Valkey, ValkeyCluster

__all__ = ["Argument", "Command", "FencedScript", "RedisGuard"]

Client: TypeAlias = "Redis | RedisCluster | Valkey | ValkeyCluster"

_PATIENCE = 5.0
"""Seconds that a client for a URL waits for an answer, unless the URL sets another limit."""
_NO_RESP3 = (
    "fencing_sdk: the connection was refused before the first command; a server or proxy that does not speak RESP3 "
    "refuses HELLO, which redis-py 8 sends: then make the client with protocol=2"
)
_TLS_FILES = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")
_PORT = 6379
_SINGLE = {"redis": "redis", "rediss": "rediss", "unix": "unix", "valkey": "redis", "valkeys": "rediss"}
_CLUSTER = {f"{scheme}+cluster": plain for scheme, plain in _SINGLE.items() if scheme != "unix"}


class RedisGuard(StoreGuard):
    """
    Keeps fences beside the data in Redis, and runs commands only for a current token.

    A resource has one fence, at the key ``PREFIX:{resource}``, a small key that stays. On a cluster, data that is
    written with it has to be in the same slot: name it with `key`, or put ``{resource}`` into its key.

    Each write is sent once. If its answer is lost, the guard raises the driver's error, and it is unknown whether the
    server has carried out the write. The same holder may try again; `raise_to` does so by
    itself. Errors of the server and of the driver are raised unchanged.

    Not promised: anything about writes that bypass the guard, and that a failover keeps an acknowledged
    write. A replica that lacks the latest fence also lacks the data that was written with it.

    Args:
        client_or_url: Your own client of ``redis.asyncio`` or ``valkey.asyncio``, also of a cluster
            or of ``sentinel.master_for(...)``; you close it yourself. redis-py 8 asks for RESP3 by default: give
            your client ``protocol=2`` behind a proxy that does not speak it. Or a URL such as
            ``redis://localhost`` or ``redis+cluster://localhost``: then close the guard, after its last call.

        prefix: The beginning of the keys of fences.

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
        observers: Sequence[Observer] = (),
    ) -> None:
        super().__init__(observers)
        self._prefix = check_name(prefix, parameter="prefix")
        if "{" in prefix or "}" in prefix:
            msg = f"prefix must not have braces, which would change the slot of every fence, got {shown(prefix)}"
            raise ConfigurationError(msg)
        self._is_own = isinstance(client_or_url, str)
        self._client: Any = _client_for(client_or_url) if isinstance(client_or_url, str) else client_or_url
        self._family = _family(self._client)
        errors = importlib.import_module(f"{self._family}.exceptions")
        self._no_script: type[Exception] = errors.NoScriptError
        self._refused: type[Exception] = errors.ResponseError
        self._is_cluster = hasattr(self._client, "get_node_from_key")
        self._execute = CheckedScript(EXECUTE)
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
        if not commands:
            msg = "there is no command to execute; raise_to() raises the fence without one"
            raise ConfigurationError(msg)
        checked = [check_command(command) for command in commands]
        touched = [key for command in checked for key in keys_of(command)] if keys is None else keys
        words = [word for command in checked for word in (len(command), *command)]  # as `EXECUTE` reads them
        replies = cast("list[object]", await self._write(self._execute, check_tokens(tokens), touched, words))
        failed = replies[-1]
        if isinstance(failed, Exception):
            position = f"command {len(replies)} of {len(checked)}, {checked[len(replies) - 1][0]!s}, failed"
            failed.add_note(f"fencing_sdk: {position}; the writes of those before it stay, those after it did not run")
            raise failed
        return replies

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
            one_step = slot(fence_key(self._prefix, resource)) if self._is_cluster else 0
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
        expiry = () if ttl is None else ("PX", math.ceil(seconds(ttl, "ttl", low=0.001, high=1e12) * 1000))
        await self.execute(resource, token, ("SET", key, value, *expiry))

    def script(self, body: str) -> FencedScript:
        """
        Put the check in front of a Lua *body*. The body has KEYS and ARGV of its own, and may return a value.

        Build *body* from constants, because it is code. Pass values to `FencedScript.run`.

        Raises:
            ConfigurationError: *body* is not a str, or begins with ``#!``.
        """
        given: object = body
        if not isinstance(given, str):
            msg = f"body must be Lua as a str, not {type(body).__name__}"
            raise ConfigurationError(msg)
        if body.lstrip().startswith("#!"):
            msg = "body must not begin with a '#!' line: the check stands in front of it"
            raise ConfigurationError(msg)
        try:
            return FencedScript(self, CheckedScript(body))
        except UnicodeEncodeError:
            msg = "body has a lone surrogate, which cannot be sent"
            raise ConfigurationError(msg) from None

    async def raise_to(self, resource: str, token: int) -> None:
        """See `fencing_sdk.abc.Guard.raise_to`. The data stays as it is."""
        await self.admit_all(check_token_of(resource, token))

    async def highest(self, resource: str) -> Token | None:
        """See `fencing_sdk.abc.Guard.highest`."""
        key = fence_key(self._prefix, check_name(resource, parameter="resource"))
        # A client may send GET to a replica, so a script reads it.
        stored = await self._send("EVAL", "return redis.call('GET', KEYS[1])", 1, key, once=False)
        return None if stored is None else fence_from(stored, key)

    async def aclose(self) -> None:
        """
        Close the connections that the guard has opened for a URL. A client of yours stays open.

        The next call opens new connections, as with the other guards: then close the guard again.
        """
        if self._is_own:
            await self._client.aclose()

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
        encoder = self._client.get_encoder()
        touched = list(dict.fromkeys(bytes(encoder.encode(key)) for key in check_arguments(keys, "keys")))
        for resource, fence in fences.items():
            if fence in touched:
                what = f"key {shown(fence)} is the fence of {shown(resource)}"
                msg = f"{what}, which no command may write; use raise_to()"
                raise ConfigurationError(msg)
        if self._is_cluster:
            check_slots(fences, touched)
        for token in tokens.values():
            format_token(token)  # refuses a holder that is not hex digits, which would make a fence ambiguous
        check = [word for token in tokens.values() for word in (f"{token:d}", token.holder or "")]
        words = [*arguments, *check, str(len(tokens))]
        with self._reports.of_verdict(tokens):
            keys = [*touched, *fences.values()]
            try:
                reply = await self._send("EVALSHA", script.sha, len(keys), *keys, *words, once=once)
            except self._no_script:  # the server has not run it
                reply = await self._send("EVAL", script.text, len(keys), *keys, *words, once=once)
            except Exception as error:  # the driver's names no file
                client = self._client
                given = client.get_connection_kwargs() if self._is_cluster else client.connection_pool.connection_kwargs
                files = [given.get(name) for name in _TLS_FILES]
                if self._is_own and any(files) and (complaint := complaint_about(*files, names=_TLS_FILES)):
                    raise ConfigurationError(complaint) from error
                names = [frame.f_code.co_name for frame, _ in walk_tb(error.__traceback__)]
                while_opening = any(name.startswith("on_connect") for name in names)
                if type(error) is self._refused and while_opening:
                    error.add_note(_NO_RESP3)
                raise
            return accepted(tokens, list(fences.values()), reply)

    async def _send(self, verb: str, script: str, number: int, *words: Argument, once: bool) -> object:
        """Send a command to the server with the last of its keys: *once*, or as often as the client is set to."""
        client = self._client
        if self._is_cluster:
            # Without a map of the cluster, redis-py sends commands to any node, and after five redirections it breaks
            # off all that are under way. With target_nodes it sends the command once: if the slot has moved, the server
            # has not run it.
            await client.initialize()
            options = {"target_nodes": client.get_node_from_key(words[number - 1])} if once else {}
            return await client.execute_command(verb, script, number, *words, **options)
        if not once:
            return await client.execute_command(verb, script, number, *words)
        pool = client.connection_pool
        # valkey-py requires the name of the command; redis-py warns about it.
        connection = await pool.get_connection(*([] if self._family == "redis" else [verb]))
        try:
            # A pool of redis-py 8 hands out a connection that the server has closed, while it listens for notices of
            # maintenance. Earlier pools and valkey-py's check it, and their connections have no `can_read`.
            if hasattr(connection, "can_read") and await connection.can_read():
                await connection.disconnect()
                await connection.connect()
            await connection.send_command(verb, script, number, *words)
            return await connection.read_response()
        finally:
            await pool.release(connection)


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


def _family(client: object) -> str:
    """
    Return the name of the driver that *client* belongs to.

    Raises:
        ConfigurationError: it is not a client of redis.asyncio or valkey.asyncio.
    """
    modules = {parent.__module__.partition(".")[0] for parent in type(client).__mro__}
    families = modules & {"redis", "valkey"}
    if not families or not inspect.iscoroutinefunction(getattr(client, "execute_command", None)):
        msg = (
            "client must be a Redis or RedisCluster of redis.asyncio (or valkey.asyncio) or a URL such as "
            f"'redis://localhost', not {type(client).__name__}; of a Sentinel pass sentinel.master_for(service)"
        )
        raise ConfigurationError(msg)
    return families.pop()


def _client_for(url: str) -> Redis | RedisCluster:
    """
    Make a client of redis-py for *url*, without I/O.

    Raises:
        ConfigurationError: the URL cannot be used, or redis-py is missing. The message never repeats the URL.
    """
    scheme, colon, _ = url.partition("://")
    if not colon or not (scheme in _SINGLE or scheme in _CLUSTER):
        msg = f"url must begin with one of {', '.join([*_SINGLE, *_CLUSTER])}; for Sentinel pass a client"
        raise ConfigurationError(msg)
    try:
        from redis.asyncio import Redis, RedisCluster  # noqa: PLC0415  (a client may be valkey-py's)
        from redis.asyncio.cluster import ClusterNode  # noqa: PLC0415
        from redis.asyncio.retry import Retry  # noqa: PLC0415
        from redis.backoff import ExponentialWithJitterBackoff  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise ConfigurationError(missing(error.name, "redis")) from error
    parts = split_url(url)
    database = None if scheme == "unix" else read_database(parts.path)
    given = {"username": parts.user, "password": parts.password, "db": database}
    if scheme == "unix":
        if parts.hosts or not parts.path.strip("/"):
            refuse_url("must look like unix:///path/to/socket?db=0, with three slashes, because a socket has no host")
        given["path"] = decoded(parts.path, "path")
    elif scheme in _CLUSTER:
        if not parts.hosts or database:
            refuse_url("must look like redis+cluster://host:6379,host:6379, without a database: a cluster has only one")
    else:
        if "," in parts.hosts:
            refuse_url("names several hosts; for a cluster write redis+cluster://")
        given["host"], given["port"] = parts.addresses()[0].at(_PORT) if parts.hosts else ("localhost", _PORT)
    place: dict[str, Any] = {name: value for name, value in given.items() if value not in {None, ""}}
    named = [name for name, _ in parse_qsl(parts.query, keep_blank_values=True)]
    if place.keys() & set(named) or len(set(named)) < len(named):
        refuse_url("gives the server, the login or an option twice")
    options = {"socket_timeout": _PATIENCE, "protocol": 2, **place}  # a proxy may refuse HELLO, which asks for RESP3
    with suppress(TypeError, ValueError, AttributeError):  # they may quote the url, so they must not become the cause
        if scheme in _CLUSTER:
            nodes = [ClusterNode(*address.at(_PORT)) for address in parts.addresses()]
            return RedisCluster.from_url(f"{_CLUSTER[scheme]}://?{parts.query}", startup_nodes=nodes, **options)
        retry = Retry(ExponentialWithJitterBackoff(base=0.05, cap=1), 3)  # from_url() sets none, and Redis() these
        client = Redis.from_url(f"{_SINGLE[scheme]}://?{parts.query}", retry=retry, **options)
        cast("Any", client.connection_pool).make_connection()  # checks the options, and does not connect
        return client
    msg = "url cannot be used: an option in its query is unknown or has a wrong value"
    raise ConfigurationError(msg)
