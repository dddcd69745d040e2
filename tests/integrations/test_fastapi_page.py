"""The page "FastAPI, end to end": its project, its tests, its process that ends at work, and when sessions commit."""

import asyncio
import os
import re
import signal
import sqlite3
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from typing import Annotated

import httpx
import pytest
from fastapi import Depends, FastAPI, Request
from inside import LAST_CALL
from page_project import run_pytest, write_from_page
from sqlalchemy import event, text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.util import await_only
from web_servers import send, uvicorn_server

from fencing_sdk import Lease, connect
from fencing_sdk.integrations.fastapi import Leased, answer_problems, lifespan

pytestmark = pytest.mark.slow

pytest_plugins = ["mysql_fixtures", "postgresql_fixtures"]

PAGE = "fastapi.md"
LIMIT = 200  # seconds, for a machine that does much else


def test_the_tests_of_the_page_pass(tmp_path):
    write_from_page(PAGE, tmp_path)
    code, output = run_pytest(tmp_path, "-c", "pytest.ini")
    assert code == pytest.ExitCode.OK, output
    assert "5 passed" in output


def test_a_guard_that_is_left_out_fails_a_test_of_the_page(tmp_path):
    write_from_page(PAGE, tmp_path)
    careful = "await guard.admit(session, seat_name(seat), token)"
    service = (tmp_path / "shop.py").read_text()
    assert careful in service
    (tmp_path / "shop.py").write_text(service.replace(careful, "pass"))
    code, output = run_pytest(tmp_path, "-c", "pytest.ini")
    assert code == pytest.ExitCode.TESTS_FAILED, output
    assert "1 failed, 4 passed" in output


def test_on_mysql_five_buyers_get_one_seat(tmp_path, mysql_url):
    """By a test of the page, with locks and seats in one database. The model needs a length there."""
    write_from_page(PAGE, tmp_path)
    page = (tmp_path / "test_shop.py").read_text()
    seats = mysql_url.replace("mysql://", "mysql+asyncmy://")
    for lite, served in (("memory://", mysql_url), ("sqlite+aiosqlite:///{tmp_path}/seats.db", seats)):
        assert lite in page
        page = page.replace(lite, served)
    (tmp_path / "test_shop.py").write_text(page)
    code, output = run_pytest(tmp_path, "-c", "pytest.ini", "-k", "five_buyers")
    assert code == pytest.ExitCode.OK, output
    assert "1 passed" in output


ANSWERS = """
from fastapi.testclient import TestClient
from test_shop import app, locks

def test_who_gets_which_answer(app):
    with TestClient(app, raise_server_exceptions=False) as client:
        assert client.post("/seats/7?passenger=Ada").json() == "Ada"
        sold = client.post("/seats/7?passenger=Bob")
        assert (sold.status_code, sold.headers["content-type"]) == (409, "application/json")
        assert client.put("/seats/7?passenger=Bob").status_code == 428
        assert client.put("/seats/7?passenger=Bob", headers={"Fencing-Token": "-1"}).status_code == 400
        assert client.put("/seats/7?passenger=Bob", headers={"Fencing-Token": "9007199254740991"}).status_code == 200
        stale = client.put("/seats/7?passenger=Ada", headers={"Fencing-Token": "34"})
        assert (stale.status_code, stale.headers["content-type"]) == (409, "application/problem+json")
        assert client.post("/seats/7?passenger=Cid").status_code == 500  # its own token is refused
"""


def test_the_answers_are_those_of_the_table(tmp_path):
    write_from_page(PAGE, tmp_path)
    (tmp_path / "test_answers.py").write_text(ANSWERS)
    code, output = run_pytest(tmp_path, "-c", "pytest.ini", "-k", "answer")
    assert code == pytest.ExitCode.OK, output
    assert "1 passed" in output


SLOW = """
import asyncio, shop, sys
from shop import production

async def charge(passenger):
    print("charging", flush=True)
    await asyncio.to_thread(sys.stdin.readline)

shop.charge = charge
"""


async def test_the_service_of_the_page_ends_at_work_in_order(tmp_path):
    """By the command of the page: the request that is under way is answered, and the lock is free afterwards."""
    write_from_page(PAGE, tmp_path, "shop.py")
    (tmp_path / "slow.py").write_text(SLOW)
    command = ["-m", "uvicorn", "--factory", "slow:production", "--port", "0", "--timeout-graceful-shutdown", "15"]
    served = await asyncio.create_subprocess_exec(
        *(sys.executable, *command),
        cwd=tmp_path,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={
            **os.environ,
            "FENCING_URL": "sqlite:///locks.db",
            "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path]),
        },
    )
    assert served.stdin is not None
    assert served.stdout is not None
    try:
        url = (await line_with(r"running on (http://\S+)", served.stdout))[1]
        async with httpx.AsyncClient(base_url=url, timeout=LIMIT, trust_env=False) as client:
            assert (await client.get("/ready")).status_code == 200
            sale = asyncio.create_task(client.post("/seats/42?passenger=Ada"))
            await line_with("charging", served.stdout)
            assert 'fencing_held{lock="seats",recipe="lock"} 1.0' in (await client.get("/metrics")).text
            served.send_signal(signal.SIGTERM)
            await line_with("Shutting down", served.stdout)
            served.stdin.write(b"paid\n")
            assert (await sale).status_code == 200
        rest = await asyncio.wait_for(served.stdout.read(), LIMIT)
        assert await asyncio.wait_for(served.wait(), LIMIT) in {0, -signal.SIGTERM}
        assert b"Traceback" not in rest
    finally:
        if served.returncode is None:
            served.kill()
    with closing(sqlite3.connect(tmp_path / "seats.db")) as database:
        assert database.execute("SELECT * FROM seats").fetchall() == [(42, "Ada")]
    async with connect(f"sqlite:///{tmp_path}/locks.db") as locks:
        assert await locks.inspect("seats/42") is None


async def line_with(pattern: str, stream: asyncio.StreamReader) -> re.Match[str]:
    """Read up to the line with *pattern*."""
    read = b""
    while line := await asyncio.wait_for(stream.readline(), LIMIT):
        read += line
        if found := re.search(pattern, line.decode()):
            return found
    raise AssertionError(read.decode())


# Four arrangements of a lock and a session. In each a ticket is sold if none was sold before.


async def sell(session, who):
    if not await session.scalar(text("SELECT count(*) FROM tickets")):
        await session.execute(text("INSERT INTO tickets VALUES (:who)"), {"who": who})


def committed_after_yield(app, locks, engine, tickets):
    async def new_session() -> AsyncIterator[AsyncSession]:
        async with AsyncSession(engine) as session:
            yield session
            await session.commit()

    @app.post("/tickets")
    async def buy(who: str, lease: tickets, session: Annotated[AsyncSession, Depends(new_session)]) -> None:
        await sell(session, who)


def committed_by_a_middleware(app, locks, engine, tickets):
    @app.middleware("http")
    async def session_of_the_request(request: Request, call_next):
        async with AsyncSession(engine) as session, session.begin():
            request.state.session = session
            return await call_next(request)

    @app.post("/tickets")
    async def buy(who: str, lease: tickets, request: Request) -> None:
        await sell(request.state.session, who)


def begun_around_the_lock(app, locks, engine, tickets):
    @app.post("/tickets")
    async def buy(who: str) -> None:
        async with AsyncSession(engine) as session, session.begin(), locks.lock("tickets", wait=0.2):
            await sell(session, who)


def depending_on_the_lease(app, locks, engine, tickets):
    async def under_the_lock(lease: tickets) -> AsyncIterator[AsyncSession]:
        async with AsyncSession(engine) as session, session.begin():
            yield session

    @app.post("/tickets")
    async def buy(who: str, session: Annotated[AsyncSession, Depends(under_the_lock, scope="function")]) -> None:
        await sell(session, who)


@pytest.mark.parametrize(
    ("arrange", "bob", "sold"),
    [
        (committed_after_yield, 200, ["Ada", "Bob"]),
        (committed_by_a_middleware, 200, ["Ada", "Bob"]),
        (begun_around_the_lock, 200, ["Ada", "Bob"]),
        (depending_on_the_lease, 423, ["Ada"]),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
async def test_bob_asks_for_the_ticket_while_adas_sale_commits(arrange, bob, sold, postgresql_server, monkeypatch):
    """Three arrangements sell the ticket twice, with two answers 200; in that of the page the lock is still held."""
    monkeypatch.setattr(LAST_CALL, 10.0)  # a machine may stand still, and the store is not down then
    async with arranged(arrange, postgresql_server.url) as (url, engine):
        answered = asyncio.get_running_loop().create_future()

        @event.listens_for(engine.sync_engine, "commit", once=True)
        def bob_asks(_) -> None:
            answered.set_result(await_only(send(url, method=b"POST", path=b"/tickets?who=Bob")))

        ada = await send(url, method=b"POST", path=b"/tickets?who=Ada")
        assert (ada.status, (await asyncio.wait_for(answered, LIMIT)).status) == (200, bob)
    engine = create_async_engine(of_sqlalchemy(postgresql_server.url))
    async with engine.connect() as connection:
        assert sorted(await connection.scalars(text("SELECT who FROM tickets"))) == sold
    await engine.dispose()


def of_sqlalchemy(url):
    return url.replace("postgresql://", "postgresql+asyncpg://")


@asynccontextmanager
async def arranged(arrange, url):
    """Serve the application of *arrange*, with locks and tickets in one PostgreSQL."""
    engine, locks = create_async_engine(of_sqlalchemy(url)), connect(url)
    async with engine.begin() as connection:
        await connection.execute(text("CREATE TABLE tickets (who TEXT)"))
    app = FastAPI(lifespan=lifespan(locks))
    answer_problems(app)
    arrange(app, locks, engine, Annotated[Lease, Leased(locks, "tickets", wait=0.2)])
    async with uvicorn_server(app) as served:
        yield served, engine
    await engine.dispose()
