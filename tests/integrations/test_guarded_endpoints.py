"""
A request with a stale token is refused, and so is one whose token could be read in two ways.

Every promise is kept by five servers: aiohttp with its middleware, an ASGI application behind the pure middleware and
FastAPI with a dependency, both served by uvicorn, and WSGI and Django behind theirs, served by waitress.
"""

import contextlib
import re
import socket
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any

import pytest
from aiohttp import web
from blocking_servers import django_server, waitress_server
from django.http import HttpResponse
from django.urls import path
from fastapi import FastAPI
from litestar import Litestar
from litestar import Request as LitestarRequest
from litestar import Response as LitestarResponse
from litestar import put as litestar_put
from quart import Quart
from quart import request as quart_request
from sanic import HTTPResponse, Sanic
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from web_servers import aiohttp_server, page_answers, send, uvicorn_server

import fencing_sdk
from fencing_sdk import (
    AcquireTimeoutError,
    BackendRefusedError,
    BackendUnavailableError,
    ConfigurationError,
    DrainingError,
    FencingError,
    LeaseLostError,
    LockClient,
    LockHeldError,
    LossReason,
    StaleTokenError,
    Token,
)
from fencing_sdk._values.claim import template_of
from fencing_sdk.abc import Guard
from fencing_sdk.backends.memory import MemoryBackend
from fencing_sdk.guards.memory import MemoryGuard
from fencing_sdk.guards.sql import SqlGuard
from fencing_sdk.integrations import aiohttp as fenced_aiohttp
from fencing_sdk.integrations import asgi as fenced_asgi
from fencing_sdk.integrations import django as fenced_django
from fencing_sdk.integrations import fastapi as fenced_fastapi
from fencing_sdk.integrations import wsgi as fenced_wsgi
from fencing_sdk.sync import connect

Write = Callable[[str, Token | None], None]
"""What a handler does with the seat of its path and the token of its request; it may raise."""

WHATEVER = "seats/{seat}"
WITH_SLASHES = "seats/{seat:path}"


def aiohttp_app(
    guard: Guard | None, write: Write, *, template: str = WHATEVER, stale_status: int = 409, **options: Any
):
    async def handler(request):
        write(request.match_info["seat"], fenced_aiohttp.request_token(request, required=False))
        return web.Response(text="done")

    middleware = fenced_aiohttp.guard_middleware(guard, resource=template, stale_status=stale_status, **options)
    app = web.Application(middlewares=[middleware])
    app.router.add_route("*", f"/{template.replace(':path', ':.+')}", handler)
    app.router.add_route("*", "/health", handler_of_health)
    return aiohttp_server(app)


async def handler_of_health(request):
    return web.Response(text="well")


def asgi_app(guard: Guard | None, write: Write, *, template: str = WHATEVER, stale_status: int = 409, **options: Any):
    async def handler(request: Request):
        write(request.path_params["seat"], fenced_asgi.request_token(request.scope, required=False))
        return PlainTextResponse("done")

    async def health(request: Request):
        return PlainTextResponse("well")

    every = ["GET", "PUT", "POST", "DELETE", "PATCH"]
    app = Starlette(
        routes=[Route(f"/{template}", handler, methods=every), Route("/health", health, methods=every)],
    )
    app.add_middleware(
        fenced_asgi.FencingMiddleware, guard=guard, resource=template, stale_status=stale_status, **options
    )
    return uvicorn_server(app)


def fastapi_app(
    guard: Guard | None, write: Write, *, template: str = WHATEVER, stale_status: int = 409, **options: Any
):
    app = FastAPI()
    fenced_fastapi.answer_problems(app, stale_status=stale_status)
    if guard is None:
        token_of = fenced_fastapi.Presented(**options)
    else:
        token_of = fenced_fastapi.Fenced(guard, resource=template.replace(":path", ""), **options)

    @app.api_route(f"/{template}", methods=["PUT", "POST", "DELETE", "PATCH"])
    async def handler(seat: str, token: Annotated[Token | None, token_of]) -> str:
        write(seat, token)
        return "done"

    @app.get(f"/{template}")
    async def reader(seat: str) -> str:
        write(seat, None)
        return "done"

    @app.put("/health")
    async def health() -> str:
        return "well"

    return uvicorn_server(app)


def wsgi_app(guard: Guard | None, write: Write, *, template: str = WHATEVER, stale_status: int = 409, **options: Any):
    def handler(environ, start_response):
        if environ["PATH_INFO"].startswith("/seats/"):
            seat = environ["PATH_INFO"].encode("latin-1").decode().removeprefix("/seats/")
            write(seat, fenced_wsgi.request_token(environ, required=False))
        start_response("200 OK", [("Content-Type", "text/plain")])
        return [b"done"]

    locks = None if guard is None else connect("memory://")
    options["stale_status"] = stale_status
    return waitress_server(fenced_wsgi.GuardedApplication(handler, guard, resource=template, locks=locks, **options))


def django_app(guard: Guard | None, write: Write, *, template: str = WHATEVER, stale_status: int = 409, **options: Any):
    def handler(request, seat):
        write(seat, fenced_django.request_token(request, required=False))
        return HttpResponse("done")

    def health(request):
        return HttpResponse("well")

    locks = None if guard is None else connect("memory://")
    options["stale_status"] = stale_status
    middleware = fenced_django.guard_middleware(guard, resource=template, locks=locks, **options)
    return django_server([path("seats/<path:seat>", handler), path("health", health)], middleware)


SERVERS = [aiohttp_app, asgi_app, fastapi_app, wsgi_app, django_app]


@pytest.fixture(params=SERVERS, ids=lambda serve: serve.__name__.removesuffix("_app"))
def serve(request):
    return request.param


# Frameworks that answer the errors of a handler before a middleware sees them


def litestar_app(guard: Guard | None, write: Write, **options: bool):
    @litestar_put("/seats/{seat:str}", sync_to_thread=False)
    def handler(request: LitestarRequest) -> str:
        write(request.path_params["seat"], fenced_asgi.request_token(request.scope, required=False))
        return "done"

    def answer(request: LitestarRequest, error: FencingError) -> LitestarResponse[bytes]:
        problem = fenced_asgi.problem_of(error, request.scope["headers"])
        return LitestarResponse(problem.body, status_code=problem.status, headers=problem.headers)

    app = Litestar([handler], exception_handlers={FencingError: answer})
    return uvicorn_server(fenced_asgi.FencingMiddleware(app, guard, resource=WHATEVER, **options))


def quart_app(guard: Guard | None, write: Write, **options: bool):
    app = Quart("seats")

    @app.put("/seats/<seat>")
    async def handler(seat: str) -> str:
        write(seat, fenced_asgi.request_token(quart_request.scope, required=False))
        return "done"

    @app.errorhandler(FencingError)
    async def answer(error: FencingError) -> tuple[bytes, int, dict[str, str]]:
        problem = fenced_asgi.problem_of(error, quart_request.headers)
        return problem.body, problem.status, problem.headers

    return uvicorn_server(fenced_asgi.FencingMiddleware(app, guard, resource=WHATEVER, **options))


@contextlib.asynccontextmanager
async def sanic_app(guard: Guard | None, write: Write, **options: bool):
    """Served by Sanic's own server, which has no middleware of ASGI."""
    Sanic._app_registry.clear()
    app = Sanic("tested")  # the page has an application of the name "seats"

    @app.put("/seats/<seat>", unquote=True)
    async def handler(request, seat):
        write(seat, fenced_asgi.request_token(request.headers.items(), required=False))
        return HTTPResponse("done")

    @app.exception(FencingError)
    def answer(request, error):
        problem = fenced_asgi.problem_of(error, request.headers.items())
        return HTTPResponse(problem.body, problem.status, problem.headers)

    listening = socket.create_server(("127.0.0.1", 0))
    server = await app.create_server(sock=listening, return_asyncio_server=True, access_log=False)
    await server.startup()
    await server.start_serving()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.close()
        await server.wait_closed()


@pytest.fixture(
    params=[*SERVERS, litestar_app, quart_app, sanic_app], ids=lambda serve: serve.__name__.removesuffix("_app")
)
def answering(request):
    """A server whose handler may raise."""
    return request.param


class Seats:
    """What the handlers write to."""

    def __init__(self):
        self.writes = []

    def __call__(self, seat, token):
        self.writes.append((seat, token))


@pytest.fixture
def seats():
    return Seats()


def failing(error: Exception) -> Write:
    def write(seat, token):
        raise error

    return write


# The four answers


async def test_a_token_is_admitted_and_handed_to_the_handler_with_its_holder(serve, seats):
    guard = MemoryGuard()
    async with serve(guard, seats) as url:
        answer = await send(url, b'Fencing-Token: 34;holder="9f8a01c2"')
    assert answer.status == 200
    ((seat, token),) = seats.writes
    assert (seat, token, token.holder) == ("42", 34, "9f8a01c2")
    assert await guard.highest("seats/42") == 34


@pytest.mark.parametrize("parameters", [b'; holder="aa"', b';ttl=5;holder="aa"', b';holder="aa"; note="x; y"'])
async def test_what_rfc_9651_allows_is_read(serve, seats, parameters):
    async with serve(MemoryGuard(), seats) as url:
        assert (await send(url, b"Fencing-Token: 34" + parameters)).status == 200
    assert [(int(token), token.holder) for _, token in seats.writes] == [(34, "aa")]


@pytest.mark.parametrize("name", [b"Fencing-Token", b"fencing-token", b"FENCING-TOKEN", b"X-Fencing-Token"])
async def test_both_names_are_read_however_they_are_written(serve, seats, name):
    async with serve(MemoryGuard(), seats) as url:
        assert (await send(url, name + b": 0")).status == 200
    assert seats.writes == [("42", 0)]


async def test_a_stale_token_is_409_with_both_numbers_and_changes_nothing(serve, seats):
    guard = MemoryGuard()
    async with serve(guard, seats) as url:
        await send(url, b"Fencing-Token: 35")
        answer = await send(url, b"Fencing-Token: 34")
        other = await send(url, b"Fencing-Token: 34", path=b"/seats/43")
    assert answer.status == 409
    assert answer.headers["cache-control"] == "no-store"
    assert int(answer.headers["content-length"]) == len(answer.body)
    assert answer.problem == {
        "type": "urn:fencing-sdk:problem:stale-token",
        "title": "Stale fencing token",
        "status": 409,
        "detail": "token 34 for 'seats/42' refused: the resource has seen 35; the lock has gone to a later holder",
        "resource": "seats/42",
        "token": 34,
        "fence": 35,
        "conflict": False,
    }
    assert other.status == 200
    assert seats.writes == [("42", 35), ("43", 34)]


async def test_one_number_of_two_holders_is_refused_as_a_conflict(serve, seats):
    async with serve(MemoryGuard(), seats) as url:
        await send(url, b'Fencing-Token: 34;holder="aa"')
        answer = await send(url, b'Fencing-Token: 34;holder="bb"')
    assert (answer.status, answer.problem["conflict"], answer.problem["fence"]) == (409, True, 34)
    assert len(seats.writes) == 1


async def test_412_can_be_chosen(serve, seats):
    async with serve(MemoryGuard(), seats, stale_status=412) as url:
        await send(url, b"Fencing-Token: 35")
        answer = await send(url, b"Fencing-Token: 34")
    assert (answer.status, answer.problem["status"]) == (412, 412)


async def test_a_missing_token_is_428_and_reported(serve, seats):
    events = []
    for required in (True, False):
        async with serve(MemoryGuard(), seats, required=required, observers=[events.append]) as url:
            answer = await send(url)
            assert answer.status == (428 if required else 200)
            assert answer.status == 200 or answer.problem["status"] == 428
    assert seats.writes == [("42", None)]
    assert [(event.name, event.kind, event.required) for event in events] == [
        ("seats/42", "token_missing", True),
        ("seats/42", "token_missing", False),
    ]
    assert template_of(events[0].name) == WHATEVER, "by which metrics count it"


async def test_a_token_that_is_not_required_may_be_missing_but_not_malformed_and_not_stale(serve, seats):
    async with serve(MemoryGuard(), seats, required=False) as url:
        assert (await send(url)).status == 200
        assert (await send(url, b"Fencing-Token: 5")).status == 200
        assert (await send(url, b"Fencing-Token: 4")).status == 409
        assert (await send(url, b"Fencing-Token: x")).status == 400
    assert seats.writes == [("42", None), ("42", 5)]


async def test_reading_and_other_routes_need_no_token(serve, seats):
    async with serve(MemoryGuard(), seats) as url:
        assert (await send(url, method=b"GET")).status == 200
        assert (await send(url, path=b"/health")).status == 200


async def test_a_method_in_lower_case_gets_no_stale_token_in(serve, seats):
    """Some servers refuse it themselves; some frameworks take it for the method in upper case."""
    async with serve(MemoryGuard(), seats) as url:
        await send(url, b"Fencing-Token: 35")
        for method in (b"put", b"Put", b"pUT"):
            assert (await send(url, b"Fencing-Token: 34", method=method)).status >= 400
    assert seats.writes == [("42", 35)]


# Smuggling

TWO_READINGS = {
    "two headers": (b"Fencing-Token: 34", b"Fencing-Token: 99"),
    "two headers, one value": (b"Fencing-Token: 34", b"Fencing-Token: 34"),
    "two headers in two cases": (b"Fencing-Token: 34", b"fencing-token: 34"),
    "two old headers": (b"X-Fencing-Token: 34", b"X-Fencing-Token: 99"),
    "a list": (b"Fencing-Token: 34, 99",),
    "a list of one value": (b"Fencing-Token: 34,34",),
    "both names disagree": (b"Fencing-Token: 34", b"X-Fencing-Token: 99"),
    "both names disagree on the holder": (b'Fencing-Token: 34;holder="aa"', b'X-Fencing-Token: 34;holder="bb"'),
    "the second name is not a token": (b"Fencing-Token: 34", b"X-Fencing-Token: x"),
    "negative": (b"Fencing-Token: -1",),
    "a sign": (b"Fencing-Token: +34",),
    "a fraction": (b"Fencing-Token: 34.0",),
    "an exponent": (b"Fencing-Token: 3e4",),
    "hexadecimal": (b"Fencing-Token: 0x22",),
    "a leading zero": (b"Fencing-Token: 034",),
    "an underscore": (b"Fencing-Token: 3_4",),
    "empty": (b"Fencing-Token:",),
    "2**53": (b"Fencing-Token: 9007199254740992",),
    "2**64": (b"Fencing-Token: 18446744073709551616",),
    "5,000 digits": (b"Fencing-Token: " + b"9" * 5_000,),
    "10,000 digits": (b"Fencing-Token: " + b"9" * 10_000,),
    "Arabic digits": ("Fencing-Token: \u0663\u0664".encode(),),
    "full-width digits": ("Fencing-Token: \uff13\uff14".encode(),),
    "latin-1": (b"Fencing-Token: \xb2",),
    "not UTF-8": (b"Fencing-Token: 34\xff",),
    "half a parameter": (b"Fencing-Token: 34;ttl=",),
    "two holders": (b'Fencing-Token: 34;holder="aa";holder="bb"',),
    "a space in front of a parameter": (b'Fencing-Token: 34 ;holder="aa"',),
    "an owner-like holder": (b'Fencing-Token: 34;holder="' + b"a" * 65 + b'"',),
    "quoted": (b'Fencing-Token: "34"',),
    "a folded line": (b"Fencing-Token: 34\r\n 5",),
}


@pytest.mark.parametrize("headers", TWO_READINGS.values(), ids=TWO_READINGS.keys())
async def test_what_is_not_exactly_one_token_is_400_and_raises_no_fence(serve, seats, headers):
    guard = MemoryGuard()
    async with serve(guard, seats) as url:
        answer = await send(url, *headers)
    assert answer.status == 400
    assert seats.writes == []
    assert await guard.highest("seats/42") is None


async def test_what_is_no_token_comes_back_escaped_and_short(serve, seats):
    async with serve(MemoryGuard(), seats) as url:
        answer = await send(url, b"Fencing-Token: <script>" + b"a" * 500)
    assert answer.status == 400
    assert answer.body.isascii()
    assert len(answer.body) < 400


@pytest.mark.parametrize(
    "headers",
    [
        (b"Fencing-Token: 34", b"X-Fencing-Token: 34"),
        (b'Fencing-Token: 34;holder="aa"', b"X-Fencing-Token: 34"),
        (b"Fencing-Token: 34", b'X-Fencing-Token: 34;holder="aa"'),
    ],
)
async def test_both_names_may_agree(serve, seats, headers):
    async with serve(MemoryGuard(), seats) as url:
        assert (await send(url, *headers)).status == 200
    assert seats.writes == [("42", 34)]


@pytest.mark.parametrize("name", [b"Fencing_Token", b"Fencing-Tokens", b"Xfencing-Token", b"X-Fencing_Token"])
async def test_a_name_that_only_looks_like_ours_is_not_read(serve, seats, name):
    async with serve(MemoryGuard(), seats) as url:
        assert (await send(url, name + b": 34")).status == 428


@pytest.mark.parametrize("segment", [b"a%00b", b"a%0Ab", b"%C3%A9" * 300, b"x" * 600])
async def test_a_path_that_names_no_resource_is_400(serve, seats, segment):
    async with serve(MemoryGuard(), seats) as url:
        answer = await send(url, b"Fencing-Token: 34", path=b"/seats/" + segment)
    assert answer.status == 400
    assert answer.problem["type"] == "urn:fencing-sdk:problem:no-such-resource"
    assert seats.writes == []


TWO_RESOURCES = [b"/seats/4%2F2", b"/seats%2f42", b"/seats/%FF", b"/seats/4%C0%AF2", b"/seats/%ED%A0%80", b"/seats/42/"]
TWO_RESOURCES += [b"/seats//42", b"/seats/4//2", b"/seats/4/../42", b"/seats/./42", b"/seats/%2E%2E", b"/seats/42%2F"]
TWO_RESOURCES += [b"/seats/42#a", b"/seats/42#a?b"]


@pytest.mark.parametrize("path", TWO_RESOURCES)
async def test_a_path_that_two_services_may_read_differently_names_no_resource(serve, seats, path):
    """Two services with one database of fences would fence two names. A router may know no such path: that is 404."""
    events = []
    for template in (WHATEVER, WITH_SLASHES):
        async with serve(MemoryGuard(observers=[events.append]), seats, template=template) as url:
            answer = await send(url, b"Fencing-Token: 34", path=path)
        assert answer.status == 400 or (answer.status in {404, 307} and serve in {aiohttp_app, fastapi_app})
        if template is WITH_SLASHES and path != b"/seats%2f42":
            assert (answer.status, answer.problem["type"]) == (400, "urn:fencing-sdk:problem:no-such-resource")
    assert (events, seats.writes) == ([], [])


@pytest.mark.parametrize(
    ("path", "resource"),
    [
        (b"/seats/4/2", "seats/4/2"),
        (b"/seats/B%C3%A4r", "seats/B\u00e4r"),
        (b"/seats/a%252Fb", "seats/a%2Fb"),
        (b"/seats/a+b%20c%2B", "seats/a+b c+"),
        (b"/seats/a;b=c,d", "seats/a;b=c,d"),
        (b"/seats/.a..b", "seats/.a..b"),
        (b"/seats/a%3Fb%23?c=%2F//#/", "seats/a?b#"),
    ],
)
async def test_one_path_is_one_resource_to_all(serve, seats, path, resource):
    events = []
    async with serve(MemoryGuard(observers=[events.append]), seats, template=WITH_SLASHES) as url:
        assert (await send(url, b"Fencing-Token: 34", path=path)).status == 200
    assert [event.resource for event in events] == [resource]


@pytest.mark.parametrize("segment", [b"%0A", b"a%00b", b"x" * 600])
async def test_a_path_that_names_no_resource_is_400_where_the_handler_admits_the_token(serve, tmp_path, segment):
    for guard in (MemoryGuard(), SqlGuard(tmp_path / "seats.db")):

        def write(seat, token, guard=guard):
            if isinstance(guard, MemoryGuard):
                guard.write(f"seats/{seat}", token, lambda: None)
            with closing(sqlite3.connect(tmp_path / "seats.db")) as connection, connection:
                guard.admit_sync(connection, f"seats/{seat}", token)

        async with serve(None, write) as url:
            answer = await send(url, b"Fencing-Token: 5", path=b"/seats/" + segment)
        assert (answer.status, answer.problem["status"]) == (400, 400)
        assert answer.problem["type"] == "urn:fencing-sdk:problem:no-such-resource"
        assert answer.problem["detail"].isascii()
        assert answer.problem["detail"].isprintable()


# What stays an error, and what leaks


class BrokenGuard(MemoryGuard):
    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    async def raise_to(self, resource, token):
        raise self.error


@pytest.mark.parametrize("error", [RuntimeError("secret"), sqlite3.OperationalError("database is locked")])
@pytest.mark.filterwarnings("ignore")  # the frameworks log it
async def test_a_guard_that_fails_is_500_and_nothing_is_written(serve, seats, error):
    async with serve(BrokenGuard(error), seats) as url:
        answer = await send(url, b"Fencing-Token: 34")
    assert answer.status == 500
    assert b"secret" not in answer.body
    assert seats.writes == []


async def test_an_answer_never_shows_an_owner_or_a_holder(serve, seats):
    async with LockClient(MemoryBackend()) as locks, serve(MemoryGuard(), seats) as url:
        first = await locks.lock("seats/42").acquire()
        old = first.headers()
        await first.release()
        second = await locks.lock("seats/42").acquire()
        admitted = await send(url, *_lines(second.headers()))
        refused = await send(url, *_lines(old))
        secrets = {first.owner, second.owner, first.holder, second.holder}
        await second.release()
    assert (admitted.status, refused.status) == (200, 409)
    for answer in (admitted, refused):
        shown = answer.body.decode() + str(answer.headers)
        assert not [secret for secret in secrets if secret in shown]


def _lines(headers):
    return [f"{name}: {value}".encode() for name, value in headers.items()]


# Errors of ours that leave the handler


async def test_a_stale_token_error_of_the_handler_is_409_with_and_without_a_guard(answering):
    for guard in (None, MemoryGuard()):
        async with answering(guard, failing(StaleTokenError("seats/42", 34, 35))) as url:
            answer = await send(url, b"Fencing-Token: 34")
        assert (answer.status, answer.problem["token"], answer.problem["fence"]) == (409, 34, 35)


@pytest.mark.parametrize("headers", [(b"Fencing-Token: 34",), ()], ids=["another token", "no token"])
async def test_the_caller_is_not_blamed_for_a_token_that_it_did_not_send(answering, headers):
    async with answering(None, failing(StaleTokenError("elsewhere", 7, 9)), required=False) as url:
        answer = await send(url, *headers)
        assert answer.status == 500
        assert b"elsewhere" not in answer.body


@pytest.mark.parametrize(
    ("error", "status", "retry_after"),
    [
        (LockHeldError("tenants/9", 0.0, 2.1), 423, "3"),
        (LockHeldError("tenants/9", 0.0, 0.0), 423, "1"),
        (LockHeldError("tenants/9", 0.0, float("inf")), 423, "3600"),
        (LockHeldError("tenants/9", 0.0), 423, "1"),
        (AcquireTimeoutError("tenants/9", 5.0), 423, "1"),
        (DrainingError("tenants/9", 5.0), 503, "1"),
        (LeaseLostError("tenants/9", 3, LossReason.REVOKED), 503, "1"),
    ],
)
async def test_a_lock_that_is_taken_is_423_and_a_lost_lease_503_and_neither_is_named(
    answering, error, status, retry_after
):
    async with answering(None, failing(error)) as url:
        answer = await send(url, b"Fencing-Token: 34")
    assert (answer.status, answer.headers["retry-after"], answer.problem["status"]) == (status, retry_after, status)
    assert b"tenants" not in answer.body


@pytest.mark.parametrize("segment", [b"%0A", b"x" * 506])
async def test_a_path_that_names_no_lock_of_the_handler_is_400_and_the_namespace_is_not_told(answering, segment):
    locks = LockClient(MemoryBackend(), namespace="tenants")

    async with answering(None, lambda seat, _: locks.lock(f"seat/{seat}")) as url:
        answer = await send(url, b"Fencing-Token: 34", path=b"/seats/" + segment)
    assert (answer.status, answer.problem["title"]) == (400, "Not a resource")
    assert b"tenants" not in answer.body


@pytest.mark.parametrize("error", [ValueError("secret"), ConfigurationError("ttl secret")])
async def test_other_errors_of_the_handler_stay_errors(answering, error):
    async with answering(None, failing(error)) as url:
        answer = await send(url, b"Fencing-Token: 34")
    assert answer.status == 500
    assert b"secret" not in answer.body


async def test_a_check_within_the_transaction_of_the_write_needs_no_guard_in_front(serve, tmp_path):
    database = tmp_path / "seats.db"
    guard = SqlGuard(database)
    with closing(sqlite3.connect(database)) as connection, connection:
        connection.execute("CREATE TABLE seats (seat TEXT PRIMARY KEY, token INTEGER)")

    def write(seat, token):
        with closing(sqlite3.connect(database)) as connection, connection:
            guard.admit_sync(connection, f"seats/{seat}", token)
            connection.execute("INSERT OR REPLACE INTO seats VALUES (?, ?)", (seat, token))

    async with serve(None, write) as url:
        answers = [await send(url, b"Fencing-Token: %d" % token) for token in (34, 35, 34, 35)]
    assert [answer.status for answer in answers] == [200, 200, 409, 200]
    assert answers[2].problem["fence"] == 35
    with closing(sqlite3.connect(database)) as connection:
        assert connection.execute("SELECT * FROM seats").fetchall() == [("42", 35)]


# The page for other languages

ON_THE_PAGE = page_answers()
HANDLERS_ERRORS = {
    "locked": LockHeldError("tenants/9", 0.0, 2.1),
    "lease-lost": LeaseLostError("tenants/9", 3, LossReason.REVOKED),
    "draining": DrainingError("tenants/9", 5.0),
    "lock-store-unavailable": BackendUnavailableError("redis", "acquire", "secret"),
}


@pytest.mark.parametrize(
    "heard", ON_THE_PAGE, ids=lambda heard: f"{heard.problem['type'].rpartition(':')[2]}-{heard.status}"
)
async def test_every_answer_of_the_page_is_what_every_server_answers(serve, seats, heard):
    kind = heard.problem["type"].rpartition(":")[2]
    guard, write, header, path = MemoryGuard(), seats, b'Fencing-Token: 34;holder="aa"', b"/seats/42"
    if kind == "stale-token":
        await guard.raise_to("seats/42", Token(heard.problem["fence"], "bb"))
    elif kind == "no-such-resource":
        path = b"/seats/4%2F2"
    elif kind in HANDLERS_ERRORS:
        refuses = kind == "lock-store-unavailable" and "retry-after" not in heard.headers
        write = failing(BackendRefusedError("redis", "acquire", "secret") if refuses else HANDLERS_ERRORS[kind])
    else:
        header = {"token-required": b"Other: 34", "malformed-token": b"Fencing-Token: 34.0"}[kind]
    async with serve(guard, write, template=WITH_SLASHES) as url:
        answer = await send(url, header, path=path)
    assert (answer.status, answer.problem) == (heard.status, heard.problem)
    assert {name: answer.headers.get(name) for name in heard.headers} == heard.headers
    assert ("retry-after" in answer.headers) == ("retry-after" in heard.headers)


def test_the_page_has_an_answer_of_every_type():
    source = (Path(fencing_sdk.__file__).parent / "integrations" / "_problem.py").read_text()
    assert {heard.problem["type"] for heard in ON_THE_PAGE} == set(
        re.findall(r'"(urn:fencing-sdk:problem:[a-z-]+)"', source)
    )
