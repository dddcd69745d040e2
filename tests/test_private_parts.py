"""
Lists what the package uses of others without a promise, and tests what happens without each entry.

A use that is not listed fails here. What has no underscore, or is inherited, is found by readers alone. To take an
entry away, its module is run again under another name for it, as a later version may have.
"""

from __future__ import annotations

import ast
import asyncio
import functools
import importlib
import inspect
import platform
import re
import signal
import threading
from collections.abc import Awaitable, Callable, Iterable, Iterator
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import redis.asyncio
import valkey.asyncio
from serving import serving

import fencing_sdk
from fencing_sdk import BackendRefusedError, ConfigurationError
from fencing_sdk._values.drivers import WORKS
from fencing_sdk._values.token import token_of_lease
from fencing_sdk.backends.redis.connection import dial as redis_dial
from fencing_sdk.backends.redis.options import servers_of_client
from fencing_sdk.backends.sqlite import SqliteBackend
from fencing_sdk.backends.zookeeper import ZooKeeperBackend
from fencing_sdk.backends.zookeeper import driver as zookeeper_driver
from fencing_sdk.guards.sql import _transaction
from fencing_sdk.integrations import django as our_django
from fencing_sdk.recipes import drain_signals
from fencing_sdk.testing.world import World

PACKAGE = Path(fencing_sdk.__file__).parent
OF_NAMED_TUPLES = {"_asdict", "_fields", "_make", "_replace"}


@functools.cache
def modules() -> dict[str, list[ast.AST]]:
    """What is written in each module."""
    found = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        tree = ast.parse(path.read_text())
        found[".".join(part for part in parts if part != "__init__")] = list(ast.walk(tree))
    return found


def is_private(name: object) -> bool:
    return isinstance(name, str) and name[:1] == "_" and name[:2] != "__" and name not in OF_NAMED_TUPLES


def is_own(node: ast.expr) -> bool:
    """Whether *node* is ``self``, ``cls`` or ``super()``."""
    called = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "super"
    return called or (isinstance(node, ast.Name) and node.id in {"self", "cls"})


def names_in(nodes: Iterable[ast.AST], *, own: bool) -> Iterator[str]:
    """Private names that are read or set of an object: of ``self`` and the like, or of another one."""
    for node in nodes:
        if isinstance(node, ast.Attribute) and is_own(node.value) == own and is_private(node.attr):
            yield node.attr
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and len(node.args) > 1:
            owner, name = node.args[0], getattr(node.args[1], "value", None)
            if node.func.id in {"delattr", "getattr", "hasattr", "setattr"} and is_own(owner) == own:
                yield from filter(is_private, [name])


def imported_in(nodes: Iterable[ast.AST]) -> Iterator[tuple[str, str]]:
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            yield from ((node.module or "", alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)


@functools.cache
def defined_in(module: str) -> set[str]:
    """Names that the classes and functions of *module* have."""
    nodes = modules()[module]
    found = set(names_in(nodes, own=True))
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
        elif isinstance(node, ast.Assign):
            found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return found


def of_other_objects() -> Iterator[tuple[str, str]]:
    """Modules, and the private names that they use of objects whose class is not in sight."""
    for module, nodes in modules().items():
        ours = {module} | {name for part in imported_in(nodes) for name in (part[0], ".".join(part))} & modules().keys()
        known = set().union(*map(defined_in, ours)) - {part.name for part in PARTS}
        yield from ((module, name) for name in names_in(nodes, own=False) if name not in known)
        for source, name in imported_in(nodes):
            if not source.startswith("fencing_sdk") and any(map(is_private, [*source.split("."), name])):
                yield module, name


# What is taken away, and what is seen then.


def renamed(module: str, name: str, kind: str, after: str = "") -> Any:
    """Return a class or a function of *module* as it would be if *name* were another one in there (after *after*)."""
    source = inspect.getsource(importlib.import_module(module))
    known = {"__name__": module, "__package__": module.rpartition(".")[0], "__file__": __file__}
    exec(re.sub(rf"{after}\b{name}\b", f"{name}_of_tomorrow", source), known)
    return known[kind]


Use = Callable[[pytest.MonkeyPatch, str], Awaitable[object]]


async def as_a_server(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer a connection that is opened as Redis does."""
    while line := await reader.readline():
        words = []
        for _ in range(int(line[1:])):
            await reader.readline()
            words.append((await reader.readline()).strip())
        facts = (b"$7\r\nversion", b"$5\r\n7.4.0", b"$5\r\nproto", b":3", b"$4\r\nmode", b"$10\r\nstandalone")
        writer.write(b"+OK\r\n" if words[0] != b"HELLO" else b"%3\r\n" + b"\r\n".join(facts) + b"\r\n")


async def open_redis(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    parser = renamed("redis._parsers.hiredis", name, "_AsyncHiredisParser", r"(?<=connection\.)")
    await open_with(monkeypatch, renamed(CONNECTION, name, "Connection"), parser_class=parser)


async def open_redis_parser(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    parser = renamed("redis._parsers.hiredis", name, "_AsyncHiredisParser", r"(?<=self\.)")
    await open_with(monkeypatch, redis.asyncio.Connection, parser_class=parser)


async def open_redis_streams(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(asyncio, "open_connection", renamed(STREAMS, name, "open_connection"))
    await open_with(monkeypatch, redis.asyncio.Connection)


async def open_with(monkeypatch: pytest.MonkeyPatch, kind: Any, **options: object) -> None:
    monkeypatch.setattr(redis_dial, "Connection", kind)
    async with serving(as_a_server) as port:
        settings = redis_dial.ServerSettings(kind, {"host": "127.0.0.1", "port": port, **options})
        await redis_dial.ServerDialer(settings).dial(asyncio.Protocol())


async def read_sentinels(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    sentinel = renamed("redis.asyncio.sentinel", name, "Sentinel")([("s1", 1)])
    servers_of_client(sentinel.master_for("service"))


async def read_cluster(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    client = redis.asyncio.RedisCluster(host="h")
    client.nodes_manager = renamed("redis.asyncio.cluster", name, "NodesManager")
    servers_of_client(client)


async def read_client(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    client = redis.asyncio.Redis() if name == "connection_pool" else redis.asyncio.RedisCluster(host="h")
    monkeypatch.delattr(client, name)
    servers_of_client(client)


async def read_valkey(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    client = valkey.asyncio.Valkey()
    monkeypatch.delattr(client, name)
    servers_of_client(client)


async def open_zookeeper(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    parents, set_hosts = (renamed("kazoo.client", name, "KazooClient"),), zookeeper_driver._Client.set_hosts
    monkeypatch.setattr(zookeeper_driver, "_Client", type("_Client", parents, {"set_hosts": set_hosts}))
    await ZooKeeperBackend(["127.0.0.1:1"]).open()


async def open_zookeeper_connection(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    kind = renamed("kazoo.protocol.connection", name, "ConnectionHandler")
    monkeypatch.setattr("kazoo.client.ConnectionHandler", kind)
    await ZooKeeperBackend(["127.0.0.1:1"]).open()


async def admit_on_a_pool(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    connection = SimpleNamespace(_set_proxy=lambda proxy: None)
    _transaction._without_proxy(renamed("asyncpg.pool", name, "PoolConnectionProxy")(None, connection))


async def write_by_django(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    block = renamed("django.db.transaction", name, "Atomic")(None, savepoint=True, durable=False)
    parts = {"atomic_blocks": [block], "in_atomic_block": True, "commit_on_exit": True, "connection": object()}
    parts.pop(name, None)
    connection = SimpleNamespace(get_autocommit=lambda: False, **parts)
    our_django._refuse_older(connection, token_of_lease(1, None, ()), "seats/42")


async def open_sqlite_in_a_subinterpreter(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.delattr(threading, name)
    monkeypatch.setattr("fencing_sdk.backends.sqlite.thread.daemon_threads_allowed", lambda: False)
    await SqliteBackend("nowhere.db").open()


async def make_a_world(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    if name in vars(asyncio):
        monkeypatch.delattr(asyncio, name)
    else:
        monkeypatch.setattr(asyncio, "Task" if hasattr(asyncio.Task, name) else "Handle", object)
    World()


class Part(NamedTuple):
    """One part that is used without a promise."""

    of: str
    """Whose it is: the name of a package, or Python."""
    name: str
    home: str
    """The module that defines it."""
    users: set[str]
    """Modules of ours."""
    seen: Use | str
    """Uses the part once it is taken away: an error names the version. Or the test of what is done without it."""


DIAL, SETTINGS = "backends.redis.connection.dial", "backends.redis.options"
KAZOO, SCOPE = "backends.zookeeper.driver", "_engine.lease_scope"
LOOP = "testing._loop"
CONNECTION, STREAMS, CLUSTER = "redis.asyncio.connection", "asyncio.streams", "redis.asyncio.cluster"
HANDLER, TRANSACTION = "kazoo.protocol.connection", "django.db.transaction"
PACE = "unit/test_lease_scope.py::test_a_private_name_of_anyio_that_is_gone_costs_the_pace_alone"
PARTS = [
    Part("redis", "_reader", CONNECTION, {DIAL}, open_redis),
    Part("redis", "_writer", CONNECTION, {DIAL}, open_redis),
    Part("redis", "_parser", CONNECTION, {DIAL}, open_redis),
    Part("redis", "_reader", "redis._parsers.hiredis", {DIAL}, open_redis_parser),
    Part("redis", "_force_master_ip", "redis.asyncio.sentinel", {SETTINGS}, read_sentinels),
    Part("redis", "sentinel_manager", "redis.asyncio.sentinel", {SETTINGS}, read_sentinels),
    Part("redis", "min_other_sentinels", "redis.asyncio.sentinel", {SETTINGS}, read_sentinels),
    Part("redis", "connection_pool", "redis.asyncio.client", {SETTINGS}, read_client),
    Part("redis", "nodes_manager", CLUSTER, {SETTINGS}, read_client),
    Part("valkey", "connection_pool", "valkey.asyncio.client", {SETTINGS}, read_valkey),
    Part("redis", "connection_kwargs", CLUSTER, {SETTINGS}, read_cluster),
    Part("redis", "startup_nodes", CLUSTER, {SETTINGS}, read_cluster),
    Part("redis", "address_remap", CLUSTER, {SETTINGS}, read_cluster),
    Part("Python", "_transport", STREAMS, {DIAL}, open_redis_streams),
    Part("Python", "_buffer", STREAMS, {DIAL}, open_redis_streams),
    Part("kazoo", "_connection", "kazoo.client", {KAZOO}, open_zookeeper),
    Part("kazoo", "_call", "kazoo.client", {KAZOO}, open_zookeeper),
    Part("kazoo", "_queue", "kazoo.client", {KAZOO}, open_zookeeper),
    Part("kazoo", "_connect", HANDLER, {KAZOO}, open_zookeeper_connection),
    Part("kazoo", "_expand_client_hosts", HANDLER, {KAZOO}, open_zookeeper_connection),
    Part("kazoo", "_read_response", HANDLER, {KAZOO}, open_zookeeper_connection),
    Part("asyncpg", "_con", "asyncpg.pool", {"guards.sql._transaction"}, admit_on_a_pool),
    Part(
        "aiohttp",
        "_get_ssl_context",
        "aiohttp.connector",
        {"_http.requests"},
        "stores/kahuna/test_kahuna_faults.py::test_an_aiohttp_that_connects_otherwise_keeps_the_certificates_it_read_first",
    ),
    Part("django", "_from_testcase", TRANSACTION, {"integrations.django"}, write_by_django),
    Part("django", "atomic_blocks", TRANSACTION, {"integrations.django"}, write_by_django),
    Part("django", "in_atomic_block", TRANSACTION, {"integrations.django"}, write_by_django),
    Part("django", "commit_on_exit", TRANSACTION, {"integrations.django"}, write_by_django),
    Part("anyio", "_cancel_called", "anyio._backends._asyncio", {SCOPE}, PACE),
    Part("anyio", "_cancel_handle", "anyio._backends._asyncio", {SCOPE}, PACE),
    Part("anyio", "_deliver_cancellation", "anyio._backends._asyncio", {SCOPE}, PACE),
    Part("anyio", "_host_task", "anyio._backends._asyncio", {SCOPE}, PACE),
    Part("anyio", "_pending_uncancellations", "anyio._backends._asyncio", {SCOPE}, PACE),
    Part(
        "Python",
        "SIGINT",
        "asyncio.runners",
        {"recipes.drain_signals"},
        "test_private_parts.py::test_the_handler_of_asyncio_run_is_known_whatever_it_is_made_of",
    ),
    Part("Python", "_register_atexit", "threading", {"backends.sqlite.thread"}, open_sqlite_in_a_subinterpreter),
    Part("Python", "_set_running_loop", "asyncio.events", {LOOP}, make_a_world),
    Part("Python", "_run", "asyncio.events", {LOOP}, make_a_world),
    Part("Python", "_exception", "asyncio.futures", {"testing._loop"}, make_a_world),
    Part("Python", "_log_traceback", "asyncio.futures", {"testing._loop"}, make_a_world),
]

PROMISED = {
    ("_engine.timers", "_current_frames"),  # of sys
    ("integrations.django", "_meta"),
    ("rows.django", "_meta"),
    ("diagnosis.postgresql", "_connection"),  # of a backend of ours
    (LOOP, "_enter_task"),  # the page "Extending" of asyncio
    (LOOP, "_leave_task"),
    ("testing._plugin_worlds", "_engine"),  # of a client of ours
    ("testing._plugin_worlds", "_spawned"),
}
"""Private by name alone: documented, or ours."""


def test_each_use_without_a_promise_is_listed():
    used = {(module.removeprefix("fencing_sdk."), name) for module, name in of_other_objects()}
    listed = {(user, part.name) for part in PARTS for user in part.users}
    assert used - listed == PROMISED


def id_of(part: object) -> str | None:
    return f"{part.home}: {part.name}" if isinstance(part, Part) else None


@pytest.mark.parametrize("part", [part for part in PARTS if callable(part.seen)], ids=id_of)
async def test_without_it_an_error_names_the_version(part, monkeypatch):
    with pytest.raises((BackendRefusedError, ConfigurationError)) as refused:
        await part.seen(monkeypatch, part.name)
    installed = platform.python_version() if part.of == "Python" else version(part.of)
    assert f"{part.of} {installed} has changed inside (" in str(refused.value)
    assert f"works with {part.of}{WORKS[part.of]}" in str(refused.value)


@pytest.mark.parametrize("part", [part for part in PARTS if isinstance(part.seen, str)], ids=id_of)
def test_what_is_done_without_it_has_a_test(part):
    path, _, name = part.seen.partition("::")
    assert f"def {name}(" in (Path(__file__).parent / path).read_text()


def test_the_handler_of_asyncio_run_is_known_whatever_it_is_made_of():
    """Else the block of a drain would be cancelled by the first signal."""

    async def handler() -> object:
        return signal.getsignal(signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        kinds = [asyncio.run(handler()), eval("lambda number, frame: None", {"__name__": "asyncio.runners"})]
    finally:
        signal.signal(signal.SIGINT, before)
    assert kinds[0] is not signal.default_int_handler
    assert not any(map(drain_signals._is_of_a_program, kinds))
    assert drain_signals._is_of_a_program(lambda number, frame: None)
