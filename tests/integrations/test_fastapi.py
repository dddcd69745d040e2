"""FastAPI's dependencies: which fence, which lease, in which order, and when each is over. Served by uvicorn."""

import asyncio
import sqlite3
import threading
from collections.abc import AsyncIterator
from contextlib import closing
from typing import Annotated

import pytest
from fastapi import APIRouter, BackgroundTasks, Depends, FastAPI, HTTPException, WebSocket
from fastapi.responses import StreamingResponse
from looking import holder
from web_servers import send, uvicorn_server

from fencing_sdk import ConfigurationError, Lease, LockClient, LockHeldError, StaleTokenError, Token, current_token
from fencing_sdk.backends.memory import MemoryBackend
from fencing_sdk.guards.memory import MemoryGuard
from fencing_sdk.integrations.fastapi import Fenced, Leased, Presented, answer_problems, lifespan

TOKEN = b"Fencing-Token: 34"


@pytest.fixture
def guard():
    return MemoryGuard()


@pytest.fixture
def store():
    return MemoryBackend(tokens="counter")


@pytest.fixture
def locks(store):
    return LockClient(store)


@pytest.fixture
def app(locks):
    app = FastAPI(lifespan=lifespan(locks))
    answer_problems(app)
    return app


# The token of a request


async def test_a_dependency_names_the_resource_so_that_two_spellings_are_one_fence(app, guard):
    def seat_name(seat: int) -> str:
        return f"seats/{seat}"

    @app.put("/seats/{seat}")
    async def book(seat: int, token: Annotated[Token, Fenced(guard, resource=seat_name)]) -> int:
        return seat

    async with uvicorn_server(app) as url:
        assert (await send(url, b"Fencing-Token: 35", path=b"/seats/42")).status == 200
        assert (await send(url, TOKEN, path=b"/seats/042")).status == 409
        assert (await send(url, TOKEN, path=b"/seats/x")).status == 422
    assert await guard.highest("seats/42") == 35


async def test_who_is_not_let_in_raises_no_fence(app, guard):
    async def nobody():
        raise HTTPException(401)

    router = APIRouter(dependencies=[Depends(nobody)])

    @router.put("/seats/{seat}")
    async def book(seat: str, token: Annotated[Token, Fenced(guard, resource="seats/{seat}")]):
        raise AssertionError

    app.include_router(router)
    async with uvicorn_server(app) as url:
        assert (await send(url, b"Fencing-Token: 9007199254740991")).status == 401
    assert await guard.highest("seats/42") is None


async def test_a_template_is_filled_in_from_the_path_whatever_its_form(app, guard):
    @app.put("/rows/{row}/seats/{seat}")
    async def book(token: Annotated[Token, Fenced(guard, resource="seat {row}-{seat}")]): ...

    async with uvicorn_server(app) as url:
        assert (await send(url, TOKEN, path=b"/rows/7/seats/42")).status == 200
    assert await guard.highest("seat 7-42") == 34


async def test_a_template_that_the_route_does_not_fill_is_an_error_and_not_an_open_door(app, guard):
    @app.put("/seats/{number}")
    async def book(number: str, token: Annotated[Token, Fenced(guard, resource="seats/{seat}")]):
        raise AssertionError

    async with uvicorn_server(app) as url:
        assert (await send(url, TOKEN)).status == 500


async def test_a_sync_handler_gets_the_token_too(app, guard):
    @app.put("/seats/{seat}")
    def book(seat: str, token: Annotated[Token, Fenced(guard, resource="seats/{seat}")]) -> int:
        if token == 35:
            raise StaleTokenError(f"seats/{seat}", token, 36)
        return token

    async with uvicorn_server(app) as url:
        assert (await send(url, TOKEN)).body == b"34"
        assert (await send(url, b"Fencing-Token: 35")).problem["fence"] == 36


# OpenAPI


def test_openapi_shows_the_header_and_our_answers(app, guard):
    @app.put("/seats/{seat}")
    async def book(seat: str, token: Annotated[Token, Fenced(guard, resource="seats/{seat}")]): ...

    @app.post("/seats/{seat}", responses={409: {"description": "my own words"}})
    async def rebook(seat: str, token: Annotated[Token, Presented()]): ...

    @app.get("/seats/{seat}")
    async def read(seat: str): ...

    schema = app.openapi()
    assert app.openapi() == schema
    operations = schema["paths"]["/seats/{seat}"]
    for method in ("put", "post"):
        headers = [one for one in operations[method]["parameters"] if one["in"] == "header"]
        assert [one["name"] for one in headers] == ["Fencing-Token"]
        assert {"400", "409", "428"} <= operations[method]["responses"].keys()
        assert list(operations[method]["responses"]["428"]["content"]) == ["application/problem+json"]
    assert "stale" in operations["put"]["responses"]["409"]["description"]
    assert operations["post"]["responses"]["409"]["description"] == "my own words"
    assert not {"400", "409", "428"} & operations["get"]["responses"].keys()
    assert len(operations["get"]["parameters"]) == 1


# The lease of a handler


async def test_a_handler_runs_under_its_lease_and_the_lock_is_free_before_the_answer_is_there(app, locks, store):
    @app.put("/seats/{seat}")
    async def book(seat: str, lease: Annotated[Lease, Leased(locks, "seats/{seat}", wait=5)]) -> bool:
        return (await holder(store, "seats/42")).token == lease.token == current_token("seats/42")

    async with uvicorn_server(app) as url:
        assert (await send(url)).body == b"true"
        assert await holder(store, "seats/42") is None


async def test_a_sync_handler_sees_the_token_of_its_lease_in_its_thread(app, locks):
    @app.put("/seats/{seat}")
    def book(seat: str, lease: Annotated[Lease, Leased(locks, "seats/{seat}", wait=5)]) -> bool:
        return threading.current_thread() is not threading.main_thread() and current_token() == lease.token

    async with uvicorn_server(app) as url:
        assert (await send(url)).body == b"true"


async def test_a_lock_that_is_taken_is_423(app, locks):
    @app.put("/seats/{seat}")
    async def book(seat: str, lease: Annotated[Lease, Leased(locks, "seats/{seat}", wait=0)]):
        raise AssertionError

    async with uvicorn_server(app) as url:
        holder = await locks.lock("seats/42", ttl=5).acquire()
        answer = await send(url)
        await holder.release()
    assert (answer.status, answer.problem["title"]) == (423, "Locked")
    assert 1 <= int(answer.headers["retry-after"]) <= 5


@pytest.mark.parametrize("notices", [True, False])
async def test_a_lease_that_is_lost_is_503_whether_the_handler_notices_or_not(app, locks, store, notices):
    @app.put("/seats/{seat}")
    async def book(seat: str, lease: Annotated[Lease, Leased(locks, "seats/{seat}", wait=5)]):
        store.take_away("seats/42")
        if notices:
            await asyncio.sleep(30)

    async with uvicorn_server(app) as url:
        answer = await send(url)
    assert (answer.status, answer.headers["retry-after"]) == (503, "1")


async def test_a_lease_that_is_lost_under_a_sync_handler_is_503_after_it(app, locks, store):
    ended = []

    @app.put("/seats/{seat}")
    def book(seat: str, lease: Annotated[Lease, Leased(locks, "seats/{seat}", wait=5)]):
        asyncio.run_coroutine_threadsafe(_revoke(store), loop).result(20)
        ended.append(lease.held)

    loop = asyncio.get_running_loop()
    async with uvicorn_server(app) as url:
        assert (await send(url)).status == 503
    assert ended == [False]


async def _revoke(store):
    store.take_away("seats/42")


async def test_two_leases_and_a_name_from_a_dependency(app, locks):
    def row_name(seat: int) -> str:
        return f"rows/{seat // 10}"

    @app.put("/seats/{seat}")
    async def book(
        seat: int,
        row: Annotated[Lease, Leased(locks, row_name, wait=5)],
        lease: Annotated[Lease, Leased(locks, "seats/{seat}", wait=5)],
    ) -> list[str]:
        return [row.name, lease.name]

    async with uvicorn_server(app) as url:
        answers = await asyncio.gather(*[send(url) for _ in range(5)])
    assert {answer.body for answer in answers} == {b'["rows/4","seats/42"]'}


async def test_what_is_sent_after_the_handler_is_sent_without_the_lock(app, locks, store):
    """The limit that the documentation names: streams and background tasks come after the lease."""
    held = []

    async def look():
        held.append(await holder(store, "seats/42"))

    async def stream():
        await look()
        yield b"body"

    @app.put("/seats/{seat}")
    async def book(
        seat: str, lease: Annotated[Lease, Leased(locks, "seats/{seat}", wait=5)], background: BackgroundTasks
    ):
        background.add_task(look)
        return StreamingResponse(stream(), background=background)

    async with uvicorn_server(app) as url:
        await send(url)
    assert held == [None, None]


async def spoken(app, *, denies=True):
    """Speak ASGI to a websocket as a server does; return the kinds of what the application sent, and its error."""
    sent = []

    async def receive():
        return {"type": "websocket.connect"}

    async def send(message):
        sent.append(message)

    scope = {"type": "websocket", "path": "/seats/42", "headers": [(b"fencing-token", b"34")], "query_string": b""}
    scope["extensions"] = {"websocket.http.response": {}} if denies else {}
    try:
        await app(scope, receive, send)
    except StaleTokenError as error:
        return [message["type"] for message in sent], error
    return [(message["type"], message.get("status")) for message in sent][:1], None


@pytest.mark.parametrize("begin", ["accept", "close"])
@pytest.mark.parametrize("mounted", [False, True])
async def test_a_websocket_that_was_answered_gets_no_second_answer(app, begin, mounted):
    inner = FastAPI() if mounted else app

    @inner.websocket("/seats/{seat}")
    async def watch(socket: WebSocket, seat: str):
        await getattr(socket, begin)()
        raise StaleTokenError("seats/42", 34, 35)

    if mounted:
        app.mount("", inner)
    kinds, error = await spoken(app)
    assert (kinds, error.fence) == ([f"websocket.{begin}"], 35)


async def test_a_websocket_that_was_not_accepted_gets_an_answer_if_its_server_can_send_one(app):
    @app.websocket("/seats/{seat}")
    async def watch(socket: WebSocket, seat: str):
        raise StaleTokenError("seats/42", 34, 35)

    assert await spoken(app) == ([("websocket.http.response.start", 409)], None)
    kinds, error = await spoken(app, denies=False)
    assert (kinds, error.fence) == ([], 35)


async def test_a_websocket_depends_on_tokens_and_leases_as_a_request_does(app, guard, locks, store):
    seen = []

    @app.websocket("/seats/{seat}")
    async def watch(
        socket: WebSocket,
        token: Annotated[Token, Fenced(guard, resource="seats/{seat}")],
        carried: Annotated[Token, Presented()],
        lease: Annotated[Lease, Leased(locks, "seats/{seat}", wait=5)],
    ):
        seen.extend([token, carried, lease.name, lease.held])
        await socket.close()

    async with locks:
        assert await spoken(app) == ([("websocket.close", None)], None)
        assert (seen, await holder(store, "seats/42")) == ([34, 34, "seats/42", True], None)
        await guard.raise_to("seats/42", 35)
        assert await spoken(app) == ([("websocket.http.response.start", 409)], None)


def counted(path):
    """A database with one counter, and how it stands."""
    with closing(sqlite3.connect(path)) as database, database:
        database.execute("CREATE TABLE IF NOT EXISTS counter AS SELECT 0 AS n")
        return database.execute("SELECT n FROM counter").fetchone()[0]


@pytest.mark.parametrize("order", ["of its own scope", "of the lease"])
async def test_a_session_that_commits_after_yield_commits_under_the_lock_if_it_depends_on_the_lease(
    app, locks, tmp_path, order
):
    """The order that the page shows; and the one of FastAPI's own page, in which the lock is free before the commit."""
    held = Annotated[Lease, Leased(locks, "counter", wait=60)]
    free_at_commit = []

    async def session(lease: held) -> AsyncIterator[dict[str, int]]:
        staged = {"n": counted(tmp_path / "app.db")}
        yield staged
        await asyncio.sleep(0)  # as a driver does
        free_at_commit.append(await locks.inspect("counter") is None)
        with closing(sqlite3.connect(tmp_path / "app.db")) as database, database:
            database.execute("UPDATE counter SET n = ?", (staged["n"],))

    async def session_alone() -> AsyncIterator[dict[str, int]]:
        yield {"n": 0}
        free_at_commit.append(await locks.inspect("counter") is None)

    if order == "of the lease":

        @app.post("/count")
        async def count(staged: Annotated[dict[str, int], Depends(session, scope="function")]) -> None:
            staged["n"] += 1
    else:

        @app.post("/count")
        async def count_late(lease: held, staged: Annotated[dict[str, int], Depends(session_alone)]) -> None: ...

    async with uvicorn_server(app) as url:
        answers = await asyncio.gather(*(send(url, method=b"POST", path=b"/count") for _ in range(25)))
    assert [answer.status for answer in answers] == [200] * 25
    if order == "of the lease":
        assert (counted(tmp_path / "app.db"), free_at_commit) == (25, [False] * 25)
    else:
        assert any(free_at_commit)


async def test_a_name_that_is_no_name_is_400(app, locks):
    @app.put("/seats/{seat}")
    async def book(seat: str, lease: Annotated[Lease, Leased(locks, "seats/{seat}", wait=5)]):
        raise AssertionError

    async with uvicorn_server(app) as url:
        assert (await send(url, path=b"/seats/a%00b")).status == 400


# What cannot work is said when it is built


@pytest.mark.parametrize(
    ("parameter", "make"),
    [
        ("guard", lambda locks: Fenced(None, resource="a")),
        ("guard", lambda locks: Fenced(object(), resource="a")),
        ("resource", lambda locks: Fenced(MemoryGuard(), resource=None)),
        ("resource", lambda locks: Fenced(MemoryGuard(), resource=42)),
        ("resource", lambda locks: Fenced(MemoryGuard(), resource="a/{")),
        ("name", lambda locks: Leased(locks, 42)),
        ("name", lambda locks: Leased(locks, "")),
        ("name", lambda locks: Leased(locks, "a/{b!r}")),
        ("ttl", lambda locks: Leased(locks, "a", ttl=-1)),
        ("stale_status", lambda locks: answer_problems(FastAPI(), stale_status=500)),
    ],
)
def test_an_argument_that_cannot_work_is_refused(locks, parameter, make):
    with pytest.raises(ConfigurationError, match=rf"^{parameter} "):
        make(locks)


@pytest.mark.parametrize(("mounted_too", "status"), [(False, 500), (True, 423)])
async def test_an_application_that_is_mounted_answers_the_errors_of_its_own_handlers(mounted_too, status):
    office, mounted = FastAPI(), FastAPI()

    @mounted.put("/42")
    async def sell() -> None:
        raise LockHeldError("seats/42", 0.0)

    for app in (office, mounted) if mounted_too else (office,):
        answer_problems(app)
    office.mount("/seats", mounted)
    async with uvicorn_server(office) as url:
        assert (await send(url)).status == status
