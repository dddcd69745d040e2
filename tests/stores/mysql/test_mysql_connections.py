"""Connections to MySQL and MariaDB that break, wait, freeze or are too many: what a client rides out, and how."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import asyncmy
import asyncmy.errors
import pytest
from child_processes import state
from fault_proxy import FaultProxy
from local_ports import HOST, free_port
from mysql_between import MysqlBetween
from mysql_server import USER, MysqlServer
from mysql_stage import in_transaction, kill, nothing_left, running, sessions, user, waiting
from patience import until
from serving import serving
from stays import LONG, PATIENCE, Stay, answered, eventually, opened, staying, use_in_turn
from worker_processes import worker_processes

from fencing_sdk import BackendUnavailableError, connect
from fencing_sdk.abc import Claim, Place
from fencing_sdk.backends._shared.request_queue import ConnectionAbandonedError
from fencing_sdk.backends.mysql import MysqlBackend, from_url, lines
from fencing_sdk.events import Lost, RenewalFailed, Renewed

pytest_plugins = ["mysql_fixtures"]

SHORT = {"ttl": 6.0, "safety_buffer": 1.0, "heartbeat_interval": 1.0}
"""For a lease that is lost soon without renewals, and outlives a call that waits for a row before them."""
ALL = "ALL PRIVILEGES"
LOCKED = "SELECT name FROM fencing_line WHERE name = '{}' FOR UPDATE"


@pytest.fixture
async def backend(mysql_server: MysqlServer) -> AsyncIterator[MysqlBackend]:
    async with aclosing(from_url(mysql_server.url)) as made:
        await made.open()
        yield made


@pytest.fixture
async def rival(mysql_server: MysqlServer) -> AsyncIterator[MysqlBackend]:
    async with aclosing(from_url(mysql_server.url)) as made:
        await made.open()
        yield made


# Limits.


@pytest.fixture
def kept_connections(monkeypatch):
    """On a machine that stands still, no connection is closed whose place another client could take."""
    monkeypatch.setattr("fencing_sdk.backends._shared.request_queue.SILENCE", PATIENCE)


async def test_a_connection_limit_that_is_reached_is_waited_for(mysql_server, kept_connections):
    url = user(mysql_server, rights=ALL, limit=1)
    async with opened(url) as (locks, log), staying(locks.lock("a", **LONG)) as stay:
        with pytest.raises(BackendUnavailableError, match="'max_user_connections' resource"):
            async with connect(url):
                pytest.fail("it opened")
        async with aclosing(from_url(url)) as patient:
            claim = Claim("b", 60.0)
            with pytest.raises(BackendUnavailableError):
                await patient.draw(claim)
            await stay.end()
            await locks.aclose()
            assert isinstance(await eventually(lambda: _drawn(patient, claim), what="it is drawn"), Place)
    assert log.of(Lost) == []


async def _drawn(backend: MysqlBackend, claim: Claim) -> object:
    with contextlib.suppress(BackendUnavailableError):
        return await backend.draw(claim)


async def test_a_client_that_lost_its_connection_at_the_limit_comes_back(mysql_server):
    user(mysql_server, rights=ALL, limit=1)
    async with (
        opened(mysql_server.url_as("peter", bell="false")) as (locks, log),
        staying(locks.lock("a", ttl=20, heartbeat_interval=0.3)) as stay,
    ):
        await log.seen(Renewed)
        async with AsyncExitStack() as place:

            async def taken() -> bool:
                mysql_server.end_connections()
                with contextlib.suppress(asyncmy.errors.OperationalError):
                    await place.enter_async_context(mysql_server.connected(user="peter"))
                    return True
                return False

            await eventually(taken, what="its place is taken")
            await log.seen(RenewalFailed, 2)
        await log.seen(Renewed, len(log.of(Renewed)) + 1)
        await stay.end()
    assert log.of(Lost) == []


async def test_waiters_get_their_turn_without_a_connection_to_sleep_on(mysql_server, kept_connections):
    url = user(mysql_server, rights=ALL, limit=2)
    async with opened(url) as (locks, log), opened(url) as (others, _):
        async with staying(locks.lock("a", **LONG)) as stay:
            waiters = [Stay(others.lock("a", ttl=20, wait=PATIENCE), work=0) for _ in range(3)]
            await waiting(mysql_server, 3)
            await log.seen(Renewed, 3)
            await stay.end()
            for waiter in waiters:
                await waiter.over()
                assert waiter.error is None
        assert log.of(Lost) == []
    await nothing_left(mysql_server)


# Servers that go away, and hosts.


@pytest.mark.parametrize("how", ["restart", "kill"])
async def test_a_server_that_starts_again_costs_no_lease(how, start_mysql):
    server = await asyncio.to_thread(start_mysql)
    async with opened(server.url) as (locks, log), opened(server.url) as (others, _):
        async with staying(locks.lock("a", ttl=60, heartbeat_interval=0.3)) as stay:
            waiter = Stay(others.lock("a", wait=PATIENCE), work=0)
            await waiting(server, 1)
            await asyncio.to_thread(server.kill if how == "kill" else server.stop)
            await log.seen(RenewalFailed)
            await asyncio.to_thread(server.start)
            renewed = len(log.of(Renewed))
            await log.seen(Renewed, renewed + 1)
            assert log.of(Lost) == []
            await stay.end()
        await waiter.over()
        assert waiter.error is None
        assert waiter.token > stay.token
        await asyncio.to_thread(server.restart)  # between two calls
        async with others.lock("a", wait=PATIENCE) as lease:
            assert lease.token > waiter.token
    await nothing_left(server)


async def test_a_server_that_becomes_read_only_is_left_and_taken_again(start_mysql):
    server = await asyncio.to_thread(start_mysql)
    async with aclosing(from_url(server.url)) as backend:
        held = Claim("a", 60.0)
        number = (await backend.draw(held)).number
        server.ask("SET GLOBAL read_only = ON")
        for said in ("the server is read-only; a client looks for", "the server is read-only: read_only is on"):
            with pytest.raises(BackendUnavailableError, match=said):
                await backend.keep([(held, number)])
        server.ask("SET GLOBAL read_only = OFF")
        assert await holds(backend, held)


async def test_a_server_whose_tables_are_read_only_is_left(start_mysql, monkeypatch):
    """As where the roles change under an open connection: only the statement that writes meets it."""
    server = await asyncio.to_thread(start_mysql)
    async with aclosing(from_url(server.url)) as first:
        await first.open()
    await asyncio.to_thread(server.restart_as_reader)
    async with aclosing(from_url(server.url)) as backend:
        with monkeypatch.context() as patched:
            patched.setattr("fencing_sdk.backends.mysql.connection._check_writable", lambda *_, **__: None)
            await backend.open()
        for said in ("the server is read-only; a client looks for", "the server is read-only: innodb_read_only is on"):
            with pytest.raises(BackendUnavailableError, match=said):
                await backend.draw(Claim("a", 60.0))


async def silent(reader, _writer):
    await reader.read(-1)


READERS: dict[str, Callable[[MysqlServer], object]] = {
    "read_only": lambda server: server.ask("SET GLOBAL read_only = ON"),
    "transaction_read_only": lambda server: server.ask("SET GLOBAL TRANSACTION READ ONLY"),
    "innodb_read_only": MysqlServer.restart_as_reader,
}
"""How a server becomes one that takes no writes."""


@asynccontextmanager
async def first_host(kind: str, start_mysql: Any, database: str) -> AsyncIterator[int]:
    """The port of a host that cannot be used."""
    if kind in READERS:
        replica = await asyncio.to_thread(start_mysql)
        replica.ask(f"CREATE DATABASE {database}")
        await asyncio.to_thread(READERS[kind], replica)
        yield replica.port
    elif kind == "silent":
        async with serving(silent) as port:
            yield port
    else:
        yield free_port()


@pytest.mark.parametrize("kind", [*READERS, "silent", "away"])
async def test_the_first_host_that_takes_writes_is_used(kind, start_mysql, mysql_server):
    async with first_host(kind, start_mysql, mysql_server.database) as port:
        url = f"mysql://{USER}@{HOST}:{port},{HOST}:{mysql_server.port}/{mysql_server.database}"
        async with opened(url) as (locks, log), staying(locks.lock("a", wait=PATIENCE, **LONG)) as stay:
            await log.seen(Renewed)
            mysql_server.end_connections()
            await log.seen(Renewed, len(log.of(Renewed)) + 2)
            await stay.end()
            assert log.of(Lost) == []


async def test_of_several_hosts_each_is_named_with_what_it_said(start_mysql):
    server = await asyncio.to_thread(start_mysql, read_only=True)
    down = free_port()
    async with aclosing(from_url(f"mysql://{USER}@{HOST}:{down},{HOST}:{server.port}/test")) as backend:
        with pytest.raises(BackendUnavailableError) as caught:
            await backend.open()
    assert f"no connection to {HOST}:{down} (Connection refused); {HOST}:{server.port}: the server is read-only" in str(
        caught.value
    )


# Connections that end, idle or at work.


async def test_with_tls_a_silent_connection_is_given_up_at_once(start_mysql, mysql_certificates):
    """TLS says good-bye before it closes, and waits half a minute for the answer of a peer that is gone."""
    server = await asyncio.to_thread(start_mysql, tls=mysql_certificates)
    async with FaultProxy(server.port) as proxy:
        url = server.url_as(USER, port=proxy.port, tls="true", ca=str(mysql_certificates.authority))
        async with aclosing(from_url(url)) as backend:
            await backend.draw(Claim("a", 60.0))
            proxy.forget()  # the connection carries nothing from now on; a new one works
            waiting = asyncio.create_task(backend.tickets(["a"]))
            await asyncio.sleep(0.6)
            waiting.cancel()
            await asyncio.wait([waiting])
            async with asyncio.timeout(PATIENCE / 2):
                assert [len(seen) for seen in await backend.tickets(["a"])] == [1]
            proxy.cut_forgotten()


async def test_a_silent_connection_with_half_a_text_is_given_up_at_once(mysql_server, backend):
    """To close a connection is to send the rest of the text first, for which a peer that is gone makes no room."""
    session = await backend._mysql.dialer.dial()
    mysql_server.pause()
    reading = asyncio.create_task(session.ask(f"DO '{'x' * 12_000_000}'"))
    await asyncio.sleep(0.1)
    session.drop()
    done, _ = await asyncio.wait((reading,), timeout=PATIENCE / 4)
    mysql_server.resume()
    assert done
    assert isinstance(reading.exception(), ConnectionAbandonedError)
    there = f"SELECT 1 FROM information_schema.processlist WHERE id = {session.number}"
    while await mysql_server.fetch(there):  # noqa: ASYNC110  (the socket closes once the rest of the text is sent)
        await asyncio.sleep(0.01)


async def test_settings_of_the_server_leave_no_statement_uncommitted(start_mysql):
    """With ``CHAIN``, each commit begins the next transaction."""
    server = await asyncio.to_thread(start_mysql, completion_type="CHAIN")
    async with aclosing(from_url(server.url)) as backend:
        first, second = Claim("a", 60.0), Claim("a", 60.0)
        await backend.draw(first)
        await backend.draw(second)
        await backend.give_back(first)
        await backend.draw(Claim("b", 60.0))
        assert await server.fetch("SELECT owner FROM fencing_line WHERE name = 'b' AND dies > 0") != []


async def holds(backend: MysqlBackend, claim: Claim) -> bool:
    """Keep a ticket; return whether it holds."""
    (place,) = await backend.keep([(claim, 0)])
    return isinstance(place, Place) and place.token is not None


@pytest.mark.usefixtures("patient_mysql")
async def test_a_row_that_is_busy_for_a_moment_is_kept(mysql_server, backend):
    """A keep stands among those that want the row: else it would meet one of them each time that it looks."""
    held = Claim("a", 900.0)  # the row is waited for during a part of that
    place = await backend.draw(held)
    async with in_transaction(mysql_server, LOCKED.format("a")) as session:
        keeping = asyncio.create_task(backend.keep([(held, place.number)]))
        await mysql_server.has_a_waiter()
        await session.execute("ROLLBACK")
        assert await keeping == [place]


@pytest.mark.parametrize("what", ["", "QUERY"])
async def test_a_connection_that_is_ended_while_idle_costs_no_call(what, mysql_server, backend):
    held = Claim("a", 60.0)
    for call in (
        lambda: backend.draw(held),
        lambda: backend.keep([(held, 0)]),
        lambda: backend.tickets(["a"]),
        lambda: backend.names("", None, 10),
        lambda: backend.draw(Claim("a", 60.0)),
        lambda: backend.give_back(held),
        lambda: backend.draw(Claim("b", 60.0)),
    ):
        await kill(mysql_server, *await sessions(mysql_server), what=what)
        await call()


@pytest.mark.parametrize("what", ["", "QUERY"])
@pytest.mark.usefixtures("patient_mysql")
async def test_a_connection_that_is_ended_during_a_call_costs_no_call(what, mysql_server, backend, rival):
    held, text = Claim("b", 60.0), "INSERT INTO fencing_line"
    await rival.draw(held)
    await rival.give_back(held)
    async with in_transaction(mysql_server, LOCKED.format("b")):
        drawing = asyncio.create_task(backend.draw(held))
        await kill(mysql_server, *await running(mysql_server, text), what=what)
        await running(mysql_server, text)
    assert (await drawing).token is not None


# Rows and tables that someone locks.


LONG_LINE = """
INSERT INTO fencing_ticket (name, number, owner, mode, width, client, dies, longest, since, label)
WITH RECURSIVE some AS (SELECT 1 AS number UNION ALL SELECT number + 1 FROM some WHERE number < 300)
SELECT 'a', 2 * number + 1, number, 'lock', 1, '', 1, 1, 1, REPEAT('x', 65536) FROM some"""
"""Waiters that are gone, and answers of 20 MB, which no buffer between two processes takes whole."""
UNKNOWN = "BackendUnavailableError"


@pytest.mark.parametrize(
    ("where", "outcome"), [("between", UNKNOWN), ("sending", UNKNOWN), ("reading", "Place")], ids=str.lower
)
async def test_a_process_that_freezes_within_a_transaction_frees_the_row_soon(where, outcome, mysql_server, rival):
    claim = Claim("a", 60.0)
    await rival.draw(claim)
    if where == "reading":
        await mysql_server.execute(LONG_LINE)
        await mysql_server.execute("UPDATE fencing_line SET others = 1, drawn = 1000")
    async with worker_processes() as start:
        worker = await start(Path(__file__).with_name("mysql_frozen.py"), mysql_server.url, "a", where)
        await worker.says("ready")
        await worker.go_on()
        await until(lambda: state(worker.process.pid) == "T", what="it stands still")
        assert await answered(lambda: rival.give_back(claim), within=10.0) is None
        claim = Claim("a", 60.0)
        assert (await rival.draw(claim)).token is not None
        worker.cont()
        assert await worker.says("answered") == [outcome]
        await worker.ended()
    await rival.give_back(claim)


async def test_a_row_that_an_operator_locks_is_waited_for_and_holds_up_no_lease(mysql_server, backend):
    await backend.draw(Claim("a", 60.0))
    async with opened(mysql_server.url) as (locks, log), staying(locks.lock("b", **SHORT)) as free:
        await log.seen(Renewed)
        async with in_transaction(mysql_server, LOCKED.format("a")):
            waiter = Stay(locks.lock("a", wait=PATIENCE), work=0)
            await running(mysql_server, "INSERT INTO fencing_line")
            await log.seen(Renewed, len(log.of(Renewed)) + 6)
        assert free.lost is None
        await free.end()
        await waiter.abandon()


@pytest.mark.parametrize("statement", [LOCKED.format("a"), "LOCK TABLES fencing_line WRITE"], ids=["row", "table"])
async def test_what_an_operator_locks_is_a_clear_error_and_then_goes_on(statement, mysql_server, backend):
    held = Claim("a", 60.0)
    await backend.draw(held)
    async with in_transaction(mysql_server, statement):
        with pytest.raises(BackendUnavailableError, match=r"another transaction keeps the row of the lock.* locked"):
            await backend.draw(Claim("a", 60.0))
    assert await holds(backend, held)
    assert (await backend.draw(Claim("a", 60.0))).token is None


async def test_a_wait_that_ends_in_the_middle_of_a_transaction_undoes_all_of_it(mysql_server, backend):
    """The server itself would undo the last statement alone, and a later COMMIT would keep the rest."""
    raised = [f"UPDATE fencing_line SET last = 1 WHERE name = '{name}'" for name in "ab"]
    claims = [Claim(name, 60.0) for name in "ab"]
    tokens = [place.token for place in [await backend.draw(claim) for claim in claims]]

    async def work(_answers: object) -> tuple[list[str], None]:
        return raised, None

    async with in_transaction(mysql_server, LOCKED.format("b")):
        with pytest.raises(Exception, match="1205"):
            await backend._mysql.connection.run(lambda session: session.transact([lines.wait_for("a")], work))
    await backend.draw(claims[0])
    found = await mysql_server.fetch("SELECT last FROM fencing_line ORDER BY name")
    assert [token for (token,) in found] == tokens


# Services between.


@pytest.mark.parametrize("between", [{"one_by_one": True}, {"renumber": True}, {"one_by_one": True, "renumber": True}])
async def test_everything_works_through_a_service_that_takes_less(between, mysql_server):
    async with MysqlBetween(mysql_server, **between) as proxy:
        async with opened(proxy.url) as (locks, log), opened(proxy.url) as (others, _):
            async with staying(locks.lock("a", **LONG)) as stay:
                waiter = Stay(others.lock("a", ttl=10, wait=PATIENCE))
                leaving = Stay(others.lock("a", ttl=10, wait=PATIENCE))
                await waiting(mysql_server, 2)
                await log.seen(Renewed, 2)
                await leaving.abandon()
                assert (await answered(lambda: others.inspect("a"))).token == stay.token
                assert [holder.name async for holder in others.all_holders()] == ["a"]
                await stay.end()
            await waiter.begun()
            assert await locks.revoke("a", token=waiter.token, reason="because")
            await waiter.over()
            assert waiter.lost is not None
            await use_in_turn([locks, others], tasks=2, times=2)
        assert log.of(Lost) == []
    await nothing_left(mysql_server)
