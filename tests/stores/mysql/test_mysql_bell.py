"""The bell of MySQL and MariaDB: who waits is woken at once where that is possible, and is served all the same else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import pytest
from mysql_between import MysqlBetween
from mysql_server import MysqlServer
from mysql_stage import asleep, kill, nothing_left, running, sessions, sleepers, user, waiting
from patience import until
from stays import PATIENCE, Stay, eventually, opened, staying

from fencing_sdk.abc import Claim, Gone
from fencing_sdk.backends._shared.bells import bell_key
from fencing_sdk.backends.mysql import MysqlBackend, bell, from_url
from fencing_sdk.backends.mysql.connection import MysqlSession

pytest_plugins = ["mysql_fixtures"]


@pytest.fixture
def no_polling(monkeypatch):
    """No waiter looks unless its bell rings, and none dies because of that."""
    for module in ("abc.line", "abc", "backends.mysql", "_engine.ticket"):
        monkeypatch.setattr(f"fencing_sdk.{module}.WAITER_TTL", 900.0)


@pytest.fixture
def long_sleep(monkeypatch):
    """Nothing but a ring ends a sleep."""
    monkeypatch.setattr(bell, "_SLEEP", 600)


async def kills(server: MysqlServer) -> int:
    """Count how often a connection, or its statement, was ended so far."""
    ((_, number),) = await server.fetch("SHOW GLOBAL STATUS LIKE 'Com_kill'")
    return int(number)


async def served_after_release(server: MysqlServer, url: str, rival_url: str, **options: Any) -> None:
    """A waiter of one client gets the lock that another one releases."""
    async with opened(url, **options) as (locks, _), opened(rival_url, **options) as (others, _):
        async with staying(others.lock("a", ttl=60)) as stay:
            waiter = Stay(locks.lock("a", ttl=60), work=0)
            await waiting(server, 1)
            await asyncio.sleep(0)
            await stay.end()
        await waiter.over()
        assert waiter.error is None
    await nothing_left(server)


# Where others can ring.


@pytest.mark.parametrize("ended", [False, True], ids=["", "after its connection was ended"])
async def test_a_release_wakes_the_first_in_line_without_polling(ended, mysql_server, no_polling, long_sleep):
    async with opened(mysql_server.url) as (locks, _), opened(mysql_server.url, bell=False) as (others, _):
        async with staying(others.lock("a", ttl=600)) as stay:
            waiter = Stay(locks.lock("a", ttl=600), work=0)
            await waiting(mysql_server, 1)
            sleeping = await asleep(mysql_server)
            await locks.inspect("other")  # now the try that was made while the bell was opened is answered
            if ended:
                await kill(mysql_server, *sleeping)

                async def sleeps_again() -> bool:
                    return bool({*await sleepers(mysql_server)} - {*sleeping})

                await eventually(sleeps_again, what="its bell is opened again")
            await stay.end()
        await waiter.over()
        assert waiter.error is None
    await nothing_left(mysql_server)


async def test_sleepers_are_found_where_the_performance_schema_is_off(
    start_mysql, no_polling, long_sleep, monkeypatch, caplog
):
    """MariaDB's has no list of processes, as that of MySQL before 8.0.22."""
    monkeypatch.setattr(MysqlSession, "is_mariadb", False)
    server = await asyncio.to_thread(start_mysql, performance_schema=False)
    async with opened(server.url) as (locks, _), opened(server.url, bell=False) as (others, _):
        async with staying(others.lock("a", ttl=600)) as stay:
            waiter = Stay(locks.lock("a", ttl=600), work=0)
            await waiting(server, 1)
            await asleep(server)
            caplog.clear()
            await stay.end()
        assert await kills(server) == 1
        await waiter.over()
        assert waiter.error is None
    assert [record.message for record in caplog.records if record.name == "asyncmy"] == []


CLAIM = Claim("a", 60.0)


@pytest.fixture
async def heard(mysql_server: MysqlServer) -> AsyncIterator[Any]:
    """A backend whose bell sleeps, and the reasons that it heard."""
    async with aclosing(from_url(mysql_server.url)) as backend:
        await backend.open()
        messages: list[str] = []
        stop = listening(backend, messages)
        await asleep(mysql_server)
        yield backend, messages
        stop()


def listening(backend: MysqlBackend, messages: list[str]) -> Any:
    def noted(news: object) -> None:
        if isinstance(news, Gone) and news.reason is not None:
            messages.append(news.reason)

    stop = backend.listen(CLAIM, noted)
    backend._listen()
    return stop


def written(backend: MysqlBackend, text: str) -> str:
    message = f"{bell_key(CLAIM.owner)} !{text}"
    return f"INSERT INTO fencing_bell (client, message, sent) VALUES ('{backend._client}', '{message}', 1)"


async def test_a_message_that_comes_just_before_a_sleep_is_heard(mysql_server, long_sleep, heard, monkeypatch):
    backend, messages = heard
    monkeypatch.setattr(bell, "_PAUSES", (0.0, *[0.05] * 100))
    ask, look, looked, rings = bell._unless_interrupted, bell._sleepers, asyncio.Event(), list[Any]()

    async def looking(session: MysqlSession) -> Any:
        found = await look(session)
        looked.set()
        return found

    async def ring_before_the_sleep(session: Any, *statements: str) -> Any:
        if statements[0].startswith("SELECT SLEEP") and not rings:
            await mysql_server.execute(written(backend, "late"))
            client = backend._client
            rings.append(asyncio.ensure_future(backend._mysql.connection.run(lambda one: bell.ring(one, [client]))))
            await looked.wait()
        return await ask(session, *statements)

    monkeypatch.setattr(bell, "_sleepers", looking)
    monkeypatch.setattr(bell, "_unless_interrupted", ring_before_the_sleep)
    await kill(mysql_server, *await asleep(mysql_server), what="QUERY")
    await until(lambda: messages == ["late"])
    await asyncio.gather(*rings)


@pytest.mark.parametrize("statement", ["SELECT id, message", "DELETE FROM fencing_bell"])
async def test_an_interruption_that_comes_late_ends_nothing(statement, mysql_server, patient_mysql, long_sleep, heard):
    backend, messages = heard
    (number,) = await asleep(mysql_server)
    await mysql_server.execute(written(backend, "one"))
    locking = (
        "LOCK TABLES fencing_bell WRITE" if statement.startswith("SELECT") else "SELECT * FROM fencing_bell FOR UPDATE"
    )
    async with mysql_server.connected(user="root", unix_socket=mysql_server.socket) as operator:
        cursor = operator.cursor()
        await cursor.execute("START TRANSACTION")
        locks = asyncio.create_task(cursor.execute(locking))  # MariaDB's is free as soon as the sleep ends
        if statement.startswith("SELECT") and mysql_server.flavour == "mariadb":
            await running(mysql_server, locking)
        else:
            await locks
        await kill(mysql_server, number, what="QUERY")
        await locks
        if statement.startswith("SELECT"):  # or what comes after it, if it was quicker than the lock
            await eventually(lambda: _waits_for_a_table(mysql_server, number), what="the listener waits")
        else:
            assert number in await running(mysql_server, statement)
        await kill(mysql_server, number, what="QUERY")
        await cursor.execute("UNLOCK TABLES")
        await cursor.execute("ROLLBACK")
    await until(lambda: "one" in messages)
    assert await asleep(mysql_server) == [number]
    await eventually(lambda: _no_message(mysql_server), what="what was heard is deleted")


async def _waits_for_a_table(server: MysqlServer, number: int) -> bool:
    state = await server.value("SELECT state FROM information_schema.processlist WHERE id = %s", number)
    return str(state).startswith("Waiting for table metadata lock")


async def _no_message(server: MysqlServer) -> bool:
    return await server.fetch("SELECT id FROM fencing_bell") == []


async def test_closing_leaves_no_connection_that_sleeps(mysql_server, long_sleep, heard, monkeypatch):
    monkeypatch.setattr("fencing_sdk.backends.mysql._END_PATIENCE", PATIENCE)
    backend, _ = heard
    await kill(mysql_server, *await asleep(mysql_server), what="QUERY")
    await asleep(mysql_server)
    await backend.aclose()
    await eventually(
        lambda: _no_session(mysql_server), what="the server has ended it", within=4.0
    )  # by itself it looks every 5


async def _no_session(server: MysqlServer) -> bool:
    return await sessions(server) == []


async def test_closing_does_not_wait_for_a_server_that_is_gone(start_mysql):
    """The server stands still until the closing has ended; a new connection might be waited for, too."""
    server = await asyncio.to_thread(start_mysql)
    backend = from_url(server.url, connect_timeout=10 * PATIENCE)
    await backend.open()
    listening(backend, [])
    await asleep(server)
    await kill(server, *[number for number in await sessions(server) if number not in await sleepers(server)])
    server.pause()
    async with asyncio.timeout(PATIENCE):
        await backend.aclose()
    server.resume()


@pytest.mark.parametrize("names", [1, 100])
async def test_a_hundred_waiters_of_a_client_send_few_statements(names, mysql_server):
    claims = [Claim(f"lock {number % names}", 600.0) for number in range(100)]
    async with aclosing(from_url(mysql_server.url)) as backend, aclosing(from_url(mysql_server.url)) as rival:
        for number in range(names):
            await rival.draw(Claim(f"lock {number}", 600.0))
        kept = [(claim, (await backend.draw(claim)).number) for claim in claims]
        before = await questions(mysql_server)
        assert [place.token for place in await backend.keep(kept)] == [None] * 100
        assert await questions(mysql_server) - before <= 15


async def questions(server: MysqlServer) -> int:
    ((_, number),) = await server.fetch("SHOW GLOBAL STATUS LIKE 'Questions'")
    return int(number)


# Where no client can ring, waiters look once a second.


async def test_users_that_may_not_see_each_other_serve_each_other(mysql_server):
    async with opened(mysql_server.url) as (locks, _), locks.lock("first"):
        pass
    before = await kills(mysql_server)
    await served_after_release(mysql_server, user(mysql_server), user(mysql_server, name="paul"))
    assert await kills(mysql_server) <= before + 2  # each ends its own bell when it closes


async def test_without_a_bell_no_connection_sleeps_and_waiters_are_served(mysql_server):
    async with opened(mysql_server.url, bell=False) as (locks, _), opened(mysql_server.url, bell=False) as (others, _):
        async with staying(others.lock("a", ttl=60)) as stay:
            waiter = Stay(locks.lock("a", ttl=60), work=0)
            await waiting(mysql_server, 1)
            assert len(await sessions(mysql_server)) == 2
            await stay.end()
        await waiter.over()
        assert waiter.error is None


async def test_no_connection_is_ended_through_a_proxy_that_renumbers_them(mysql_server):
    async with MysqlBetween(mysql_server, renumber=True) as proxy:
        before = await kills(mysql_server)
        await served_after_release(mysql_server, proxy.url, proxy.url)
        await served_after_release(mysql_server, proxy.url, mysql_server.url)
        assert await kills(mysql_server) <= before + 1  # the client without a proxy ended its own bell


async def test_closing_ends_no_connection_of_another_client(mysql_server):
    """On another server the number of a sleeping connection is that of a stranger."""
    async with aclosing(from_url(mysql_server.url)) as backend, mysql_server.connected() as stranger:
        number = stranger.thread_id()
        await backend._mysql.connection.run(lambda session: bell.end(session, number, "0" * 32))
        cursor = stranger.cursor()
        await cursor.execute("SELECT CONNECTION_ID()")
        assert await cursor.fetchall() == ((number,),)


@pytest.mark.parametrize("setting", ["read_only = ON", "TRANSACTION READ ONLY"])
async def test_a_bell_leaves_a_server_that_became_read_only(setting, start_mysql, monkeypatch):
    monkeypatch.setattr(bell, "_SLEEP", 0.2)
    server = await asyncio.to_thread(start_mysql)
    async with opened(server.url) as (locks, _), staying(locks.lock("a", ttl=60)):
        waiter = Stay(locks.lock("a", ttl=60), work=0)
        (sleeping,) = await asleep(server)
        server.ask(f"SET GLOBAL {setting}")

        async def left() -> bool:
            return sleeping not in await sessions(server)

        await eventually(left, what="the bell has left")
        server.ask("SET GLOBAL read_only = OFF")
        server.ask("SET GLOBAL TRANSACTION READ WRITE")
        await waiter.abandon()


async def test_a_sleep_is_no_slow_query(start_mysql, monkeypatch):
    monkeypatch.setattr(bell, "_SLEEP", 0.2)
    slept, ask = asyncio.Event(), bell._unless_interrupted

    async def asking(session: Any, *statements: str) -> Any:
        answer = await ask(session, *statements)
        if statements[0].startswith("SELECT SLEEP"):
            slept.set()
        return answer

    monkeypatch.setattr(bell, "_unless_interrupted", asking)
    server = await asyncio.to_thread(start_mysql, slow_query_log=True, log_output="TABLE", long_query_time=0.1)
    async with aclosing(from_url(server.url)) as backend:
        await backend.open()
        listening(backend, [])
        await slept.wait()
        assert await server.fetch("SELECT sql_text FROM mysql.slow_log WHERE sql_text LIKE 'SELECT SLEEP%'") == []
