"""What is particular to the middlewares for aiohttp, ASGI and WSGI: whose paths they guard, and when they answer."""

import contextlib
import io
from typing import Annotated

import blocking_servers  # noqa: F401  (it sets Django up)
import pytest
from aiohttp import ClientPayloadError, ClientSession, ServerDisconnectedError, WebSocketError, WSMsgType, web
from aiohttp.test_utils import make_mocked_request
from django.core.handlers.asgi import ASGIRequest
from django.http import HttpRequest, HttpResponse
from fastapi import FastAPI
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Mount, Route
from web_servers import aiohttp_server, send, uvicorn_server

from fencing_sdk import ConfigurationError, LockClient, StaleTokenError, Token, UsageError
from fencing_sdk.backends.memory import MemoryBackend
from fencing_sdk.guards.memory import MemoryGuard
from fencing_sdk.integrations import aiohttp as fenced_aiohttp
from fencing_sdk.integrations import django as fenced_django
from fencing_sdk.integrations import wsgi as fenced_wsgi
from fencing_sdk.integrations._incoming import RouteTemplate
from fencing_sdk.integrations._problem import RequestRefused
from fencing_sdk.integrations.aiohttp import cleanup_ctx, guard_middleware
from fencing_sdk.integrations.asgi import FencingMiddleware, lifespan, request_token
from fencing_sdk.integrations.fastapi import Fenced
from fencing_sdk.integrations.wsgi import GuardedApplication

TOKEN = b"Fencing-Token: 34"


@pytest.fixture
def guard():
    return MemoryGuard()


async def done(request):
    return web.Response(text="done")


def application(*middlewares, paths=("/seats/{seat}",), handler=done):
    app = web.Application(middlewares=middlewares)
    for path in paths:
        app.router.add_put(path, handler)
    return app


# aiohttp: the route that was found decides


async def test_an_escaped_slash_in_a_segment_does_not_get_around_the_guard(guard):
    async with aiohttp_server(application(guard_middleware(guard, resource="seats/{seat}"))) as url:
        assert (await send(url, path=b"/seats/a%2Fb")).status == 400
    assert await guard.highest("seats/a/b") is None


async def test_paths_below_a_resource_belong_to_it(guard):
    app = application(
        guard_middleware(guard, resource="seats/{seat}"), paths=("/seats/{seat}/booking", "/seatsets/{seat}")
    )
    async with aiohttp_server(app) as url:
        assert (await send(url, TOKEN, path=b"/seats/42/booking")).status == 200
        assert (await send(url, path=b"/seatsets/42")).status == 200
        assert (await send(url, path=b"/nowhere")).status == 404
    assert await guard.highest("seats/42") == 34


async def test_a_path_of_another_form_is_written_like_its_route(guard):
    middleware = guard_middleware(guard, resource="seats/{row}-{seat}", path="/api/rows/{row}/seats/{seat}")
    seats = application(paths=(r"/rows/{row}/seats/{seat:\d+}",))
    app = application(middleware, paths=())
    app.add_subapp("/api", seats)
    async with aiohttp_server(app) as url:
        assert (await send(url, TOKEN, path=b"/api/rows/7/seats/42")).status == 200
    assert await guard.highest("seats/7-42") == 34


@pytest.mark.filterwarnings("ignore")  # aiohttp logs the error
async def test_a_template_that_fits_no_route_is_an_error_and_not_an_open_door(guard):
    async with aiohttp_server(application(guard_middleware(guard, resource="seat/{seat}"))) as url:
        for _ in range(2):
            assert (await send(url, TOKEN)).status == 500


async def test_a_callable_names_the_resource_or_lets_the_request_pass(guard):
    def name(request):
        number = request.match_info["seat"].lstrip("0")
        return f"seats/{number}" if number else None

    async with aiohttp_server(application(guard_middleware(guard, resource=name))) as url:
        assert (await send(url, TOKEN, path=b"/seats/0042")).status == 200
        assert (await send(url, path=b"/seats/000")).status == 200
        assert (await send(url, path=b"/seats/1")).status == 428
    assert await guard.highest("seats/42") == 34


@pytest.mark.filterwarnings("ignore")  # aiohttp logs the error
@pytest.mark.parametrize("name", [42, b"seats/42", ["seats/42"]])
async def test_a_callable_that_returns_no_text_is_an_error_of_the_server(guard, name):
    async with aiohttp_server(application(guard_middleware(guard, resource=lambda _: name))) as url:
        assert (await send(url, TOKEN)).status == 500


async def test_an_answer_that_has_begun_is_not_followed_by_another_one(guard):
    async def handler(request):
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"half an answer")
        raise StaleTokenError("seats/42", 34, 35)

    async with (
        aiohttp_server(application(guard_middleware(), handler=handler)) as url,
        ClientSession() as session,
    ):
        with pytest.raises((ClientPayloadError, ServerDisconnectedError)):
            async with session.put(f"{url}/seats/42", headers={"Fencing-Token": "34"}) as response:
                assert response.status == 200
                await response.read()


async def test_a_websocket_that_was_accepted_gets_no_second_answer(guard, caplog):
    async def handler(request):
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        raise StaleTokenError("seats/42", 34, 35)

    app = application(guard_middleware(required=False), paths=())
    app.router.add_get("/seats/{seat}", handler)
    async with aiohttp_server(app) as url, ClientSession() as session:
        async with session.ws_connect(f"{url}/seats/42", headers={"Fencing-Token": "34"}) as socket:
            message = await socket.receive()
    assert message.type in {WSMsgType.CLOSE, WSMsgType.CLOSED, WSMsgType.ERROR}
    assert not isinstance(message.data, WebSocketError), "bytes that are not a frame"
    assert [type(record.exc_info[1]) for record in caplog.records if record.exc_info] == [StaleTokenError]


async def test_a_middleware_may_stand_in_two_applications(guard):
    middleware = guard_middleware(guard, resource="seats/{seat}")
    async with aiohttp_server(application(middleware)) as one, aiohttp_server(application(middleware)) as two:
        assert [(await send(url)).status for url in (one, two, one)] == [428, 428, 428]


async def test_clients_are_open_while_an_aiohttp_application_runs():
    first, second = LockClient(MemoryBackend()), LockClient(MemoryBackend())

    async def handler(request):
        async with first.lock("a"), second.lock("a"):
            return web.Response(text="done")

    app = application(handler=handler)
    app.cleanup_ctx.append(cleanup_ctx(first, second))
    async with aiohttp_server(app) as url:
        assert (await send(url)).status == 200
    for locks in (first, second):
        with pytest.raises(UsageError):
            await locks.inspect("a")


# ASGI: the path decides


async def seat(request):
    return PlainTextResponse(request.path_params["seat"])


def starlette(guard, *, path="/seats/{seat}", **options):
    app = Starlette(routes=[Route(path, seat, methods=["PUT"])])
    app.add_middleware(FencingMiddleware, guard=guard, **options)
    return app


@pytest.mark.parametrize(
    ("template", "path", "resource"),
    [
        ("seats/{seat}", b"/seats/42", "seats/42"),
        ("/seats/{seat}", b"/seats/42", "/seats/42"),
        ("seats/{seat}", b"/seats/42/booking", "seats/42"),
        ("seats/{seat}", b"/seats/B%C3%A4r", "seats/Bär"),
        ("files/{file:path}", b"/files/a/b.txt", "files/a/b.txt"),
        ("halls/{hall}/seats/{seat}", b"/halls/1/seats/2", "halls/1/seats/2"),
        ("everything", b"/everything", "everything"),
        ("a.b/{x}", b"/a.b/c", "a.b/c"),
        ("50%/{x}", b"/50%25/%25s", "50%/%s"),
    ],
)
async def test_a_template_names_the_resource_of_a_path(guard, template, path, resource):
    async def app(scope, receive, send):
        await PlainTextResponse("done")(scope, receive, send)

    async with uvicorn_server(FencingMiddleware(app, guard, resource=template)) as url:
        assert (await send(url, TOKEN, path=path)).status == 200
    assert await guard.highest(resource) == 34


@pytest.mark.parametrize(
    ("template", "path"),
    [
        ("seats/{seat}", b"/seats/"),
        ("seats/{seat}", b"/seats"),
        ("seats/{seat}", b"/SEATS/42"),
        ("seats/{seat}", b"/api/seats/42"),
        ("a.b/{x}", b"/axb/c"),
    ],
)
async def test_other_paths_pass(guard, template, path):
    async def app(scope, receive, send):
        await PlainTextResponse("done")(scope, receive, send)

    async with uvicorn_server(FencingMiddleware(app, guard, resource=template)) as url:
        assert (await send(url, path=path)).status == 200


@pytest.mark.parametrize("path", ["/seats/42", "/seats/42/", "/seats/42/booking/"])
def test_a_path_that_ends_with_a_slash_says_so_of_all_below_it(path):
    """As the routes of Django do."""
    template = RouteTemplate("seats/{seat}", path="/seats/{seat}/")
    assert template.match(path, path.encode()) == template.match(path) == "seats/42"
    for twice in (f"{path}//", path.replace("42", "/42")):
        with pytest.raises(RequestRefused):
            template.match(twice, twice.encode())


@pytest.mark.parametrize("target", [b"http://a.example:80/seats/42?b=%2F//", b"/seats/42?#%2F/", b"/seats/4%32", None])
def test_the_path_alone_of_a_target_is_looked_at(target):
    assert RouteTemplate("seats/{seat}").match("/seats/42", target) == "seats/42"


@pytest.mark.parametrize("name", ["REQUEST_URI", "RAW_URI"])
@pytest.mark.parametrize(("target", "status"), [("/seats/4%2F2", "400 Bad Request"), ("/seats/4/2?a=%2F", "200 OK")])
def test_wsgi_servers_hand_over_the_target_by_two_names(name, target, status):
    statuses = []

    def app(environ, start_response):
        start_response("200 OK", [])
        return [b"done"]

    guarded = GuardedApplication(app, resource="seats/{seat:path}")
    guarded({**environ(), "PATH_INFO": "/seats/4/2", name: target}, lambda status, headers: statuses.append(status))
    assert statuses == [status]


@pytest.mark.parametrize(("target", "status"), [(b"/seats/4%2F2", 400), (b"/seats/4/2", 200)])
def test_django_behind_an_asgi_server_sees_the_target_too(target, status):
    middleware = fenced_django.guard_middleware(resource="seats/{seat:path}")(lambda request: HttpResponse("done"))
    scope = {"type": "http", "method": "PUT", "path": "/seats/4/2", "raw_path": target, "query_string": b""}
    headers = [(b"fencing-token", b"34"), (b"host", b"localhost")]
    assert middleware(ASGIRequest({**scope, "headers": headers}, io.BytesIO())).status_code == status


async def test_a_route_that_ends_with_a_slash_names_what_the_other_one_names(guard):
    api = FastAPI()

    @api.put("/seats/{seat}/")
    async def book(seat: str, token: Annotated[Token, Fenced(guard, resource="seats/{seat}")]) -> str:
        return seat

    async with uvicorn_server(api) as url:
        assert (await send(url, TOKEN, path=b"/seats/42/")).status == 200
    app = application(guard_middleware(guard, resource="seats/{seat}"), paths=("/seats/{seat}/",))
    async with aiohttp_server(app) as url:
        assert (await send(url, b"Fencing-Token: 33", path=b"/seats/42/")).status == 409


async def test_a_mounted_application_is_guarded_by_its_own_paths(guard):
    inner = starlette(guard, resource="seats/{seat}")
    async with uvicorn_server(Starlette(routes=[Mount("/api", app=inner)])) as url:
        assert (await send(url, path=b"/api/seats/42")).status == 428
        assert (await send(url, TOKEN, path=b"/api/seats/42")).status == 200
    assert await guard.highest("seats/42") == 34


async def test_a_callable_gets_the_scope(guard):
    def name(scope):
        return None if scope["path"] == "/seats/free" else "all seats"

    async with uvicorn_server(starlette(guard, resource=name)) as url:
        assert (await send(url, path=b"/seats/free")).status == 200
        assert (await send(url, TOKEN)).status == 200
    assert await guard.highest("all seats") == 34


async def call(app, *headers, method="PUT"):
    """Speak ASGI by hand, as a server that is less careful than uvicorn; return what the application sent."""
    sent = []

    async def receive():
        return {"type": "http.request", "body": b""}

    async def collect(message):
        sent.append(message)

    scope = {"type": "http", "method": method, "path": "/seats/42", "headers": list(headers)}
    with contextlib.suppress(StaleTokenError):
        await app(scope, receive, collect)
    return sent


async def test_no_second_answer_is_sent_to_a_server_that_would_take_it(guard):
    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        raise StaleTokenError("seats/42", 34, 35)

    sent = await call(FencingMiddleware(app, guard, resource="seats/{seat}"), (b"fencing-token", b"34"))
    assert [message["type"] for message in sent] == ["http.response.start"]
    assert sent[0]["status"] == 200


async def test_headers_that_a_server_did_not_write_in_lower_case_are_read_all_the_same(guard):
    async def app(scope, receive, send):
        await PlainTextResponse(str(request_token(scope)))(scope, receive, send)

    guarded = FencingMiddleware(app, guard, resource="seats/{seat}")
    one, two = (b"Fencing-Token", b"34"), (b"fencing-token", b"35")
    assert [(await call(guarded, *headers))[0]["status"] for headers in [(one,), (one, two)]] == [200, 400]


READERS = {
    "aiohttp": (fenced_aiohttp.request_token, make_mocked_request("PUT", "/seats/42")),
    "asgi": (request_token, {"headers": []}),
    "django": (fenced_django.request_token, HttpRequest()),
    "wsgi": (fenced_wsgi.request_token, {}),
}


@pytest.mark.parametrize(("read", "request_without"), READERS.values(), ids=READERS)
def test_a_handler_that_needs_a_token_refuses_a_request_without_one(read, request_without):
    assert read(request_without, required=False) is None
    with pytest.raises(RequestRefused, match="428"):
        read(request_without)


async def test_that_refusal_is_answered_where_the_middleware_lets_requests_without_a_token_pass():
    async def handler(request):
        return web.Response(text=str(fenced_aiohttp.request_token(request)))

    async with aiohttp_server(application(guard_middleware(required=False), handler=handler)) as url:
        assert [(await send(url, *headers)).status for headers in [(), (TOKEN,)]] == [428, 200]


@pytest.mark.parametrize("method", ["put", "Put"])
async def test_a_method_in_lower_case_does_not_get_around_a_middleware(guard, method):
    """h11 hands it over as it came, and Django takes it for the method in upper case."""

    async def app(scope, receive, send):
        await PlainTextResponse("done", 200 if scope["method"].upper() == "PUT" else 405)(scope, receive, send)

    guarded = FencingMiddleware(app, guard, resource="seats/{seat}")
    guard.admit("seats/42", 35)
    answers = [await call(guarded, (b"fencing-token", token), method=method) for token in (b"34", b"35")]
    assert [answer[0]["status"] for answer in answers] == [409, 200]


@pytest.mark.parametrize("kind", ["websocket", "lifespan", "unheard-of"])
async def test_what_is_no_http_request_passes_untouched(guard, kind):
    passed = []

    async def app(scope, receive, send):
        passed.append((scope, receive, send))

    async def receive():
        return {}

    async def answer(message):
        raise AssertionError(message)

    scope = {"type": kind, "path": "/seats/42", "headers": [(b"fencing-token", b"x")]}
    await FencingMiddleware(app, guard, resource="seats/{seat}")(scope, receive, answer)
    assert passed == [(scope, receive, answer)]
    assert set(scope) == {"type", "path", "headers"}


async def test_clients_are_open_while_an_asgi_application_runs():
    locks = LockClient(MemoryBackend())

    async def handler(request):
        async with locks.lock("a"):
            return PlainTextResponse("done")

    app = Starlette(routes=[Route("/seats/42", handler, methods=["PUT"])], lifespan=lifespan(locks))
    app.add_middleware(FencingMiddleware)
    async with uvicorn_server(app) as url:
        assert (await send(url, TOKEN)).status == 200
    with pytest.raises(UsageError):
        await locks.inspect("a")


# WSGI: an application may work when its first chunk is asked for


class Chunks:
    """
    The iterable of an application that has begun nothing yet; *fails* in place of the chunk with that number.

    With *at_close* its close() fails, too.
    """

    def __init__(self, start_response, begin_at=0, fails=None, error=None, at_close=None):
        self.start_response, self.begin_at, self.fails, self.error = start_response, begin_at, fails, error
        self.at_close = at_close
        self.asked = self.closed = 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.asked == self.begin_at:
            self.start_response("200 OK", [])
        if self.asked == self.fails:
            raise self.error
        self.asked += 1
        if self.asked > 3:
            raise StopIteration
        return b"%d" % self.asked

    def close(self):
        self.closed += 1
        if self.at_close is not None:
            raise self.at_close


def environ(token="34"):
    return {"REQUEST_METHOD": "PUT", "PATH_INFO": "/seats/42", "HTTP_FENCING_TOKEN": token}


def guarded_chunks(**options):
    """An application that returns such chunks, them, and the statuses that the server was told."""
    made, statuses = [], []

    def app(environ, start_response):
        made.append(Chunks(start_response, **options))
        return made[0]

    return GuardedApplication(app), made, statuses, lambda status, headers, *_: statuses.append(status)


def test_an_application_that_is_a_generator_is_answered_for_too(guard):
    guard.admit("seats/42", 35)
    statuses = []

    def app(environ, start_response):
        guard.admit("seats/42", fenced_wsgi.request_token(environ))
        start_response("200 OK", [])
        yield b"do"
        yield b"ne"

    def answer(token):
        return b"".join(GuardedApplication(app)(environ(token), lambda status, headers: statuses.append(status)))

    assert b"stale-token" in answer("34")
    assert answer("35") == b"done"
    assert statuses == ["409 Conflict", "200 OK"]


def test_one_chunk_is_asked_for_before_the_server_asks_and_the_server_closes():
    app, made, statuses, start_response = guarded_chunks()
    chunks = app(environ(), start_response)
    assert (made[0].asked, statuses) == (1, ["200 OK"])
    assert list(chunks) == [b"1", b"2", b"3"]
    assert made[0].closed == 0
    chunks.close()
    assert made[0].closed == 1


STALE = StaleTokenError("seats/42", 34, 35)


def test_an_application_that_fails_with_its_first_chunk_is_closed_before_it_is_answered_for():
    app, made, statuses, start_response = guarded_chunks(begin_at=None, fails=0, error=STALE)
    assert b"stale-token" in b"".join(app(environ(), start_response))
    assert (made[0].closed, statuses) == (1, ["409 Conflict"])


def test_a_close_that_fails_after_the_error_is_logged_and_does_not_take_its_place(caplog):
    app, made, statuses, start_response = guarded_chunks(begin_at=None, fails=0, error=STALE, at_close=OSError("full"))
    assert b"stale-token" in b"".join(app(environ(), start_response))
    assert (made[0].closed, statuses) == (1, ["409 Conflict"])
    assert [str(record.exc_info[1]) for record in caplog.records if record.exc_info] == ["full"]


@pytest.mark.parametrize(
    ("begin_at", "error"),
    [(None, ZeroDivisionError("mine")), (None, SystemExit()), (0, STALE), (None, StaleTokenError("seats/1", 1, 2))],
    ids=["another error", "the end of the thread", "an answer that has begun", "the error of another token"],
)
def test_an_error_that_has_no_answer_leaves_and_the_application_is_closed(begin_at, error):
    app, made, statuses, start_response = guarded_chunks(begin_at=begin_at, fails=0, error=error)
    with pytest.raises(type(error)):
        app(environ(), start_response)
    assert (made[0].closed, statuses) == (1, ["200 OK"] if begin_at == 0 else [])


def test_an_error_after_the_first_chunk_leaves_and_the_server_closes():
    app, made, statuses, start_response = guarded_chunks(fails=1, error=STALE)
    chunks = app(environ(), start_response)
    with pytest.raises(StaleTokenError):
        list(chunks)
    chunks.close()
    assert (made[0].closed, statuses) == (1, ["200 OK"])


def test_an_answer_without_a_body_and_one_that_cannot_be_closed_pass():
    def without_a_body(environ, start_response):
        start_response("204 No Content", [])
        yield from ()

    def without_close(environ, start_response):
        def begun(chunk):
            start_response("200 OK", [])
            return chunk

        return map(begun, [b"done"])

    for app, body in ((without_a_body, []), (without_close, [b"done"])):
        chunks = GuardedApplication(app)(environ(), lambda *_: None)
        assert list(chunks) == body
        chunks.close()


def test_an_answer_that_has_begun_is_handed_on_as_it_is():
    """A server may know it by its type, such as a file that the kernel sends."""
    whole = [b"done"]

    def app(environ, start_response):
        start_response("200 OK", [])
        return whole

    assert GuardedApplication(app)(environ(), lambda *_: None) is whole


# What cannot work is said when it is built


async def nothing(scope, receive, send):
    raise AssertionError


MAKERS = [
    pytest.param(guard_middleware, id="aiohttp"),
    pytest.param(lambda guard=None, **options: FencingMiddleware(nothing, guard, **options), id="asgi"),
]

WRONG = [
    ("guard", {"guard": object(), "resource": "a"}),
    ("guard", {"guard": "seats", "resource": "a"}),
    ("resource", {"guard": MemoryGuard()}),
    ("resource", {"guard": MemoryGuard(), "resource": ""}),
    ("resource", {"guard": MemoryGuard(), "resource": "a/{"}),
    ("resource", {"guard": MemoryGuard(), "resource": "a/{}"}),
    ("resource", {"guard": MemoryGuard(), "resource": "a/{0}"}),
    ("resource", {"guard": MemoryGuard(), "resource": "a/{b.c}"}),
    ("resource", {"guard": MemoryGuard(), "resource": "a/{b[0]}"}),
    ("resource", {"guard": MemoryGuard(), "resource": "a/{b!r}"}),
    ("resource", {"guard": MemoryGuard(), "resource": "a/{b:>9}"}),
    ("resource", {"guard": MemoryGuard(), "resource": "a/{{b}}"}),
    ("resource", {"guard": MemoryGuard(), "resource": "a/{b}", "path": "/a/{c}"}),
    ("path", {"guard": MemoryGuard(), "resource": "a", "path": "a"}),
    ("path", {"guard": MemoryGuard(), "resource": "a", "path": ""}),
    ("path", {"guard": MemoryGuard(), "resource": "a", "path": "/{b}{c}"}),
    ("path", {"guard": MemoryGuard(), "resource": "a", "path": "/{b}-{c}"}),
    ("path", {"guard": MemoryGuard(), "resource": "a", "path": "/{b}/{b}"}),
    ("path", {"guard": MemoryGuard(), "resource": "a", "path": "/{b:path}/{c}"}),
    ("path", {"guard": MemoryGuard(), "resource": "a", "path": "/{b:path}/c"}),
    ("path", {"guard": MemoryGuard(), "resource": lambda _: "a", "path": "/a"}),
    ("path", {"path": "/a"}),
    ("methods", {"methods": "PUT"}),
    ("methods", {"methods": []}),
    ("methods", {"methods": ["put"]}),
    ("methods", {"methods": [b"PUT"]}),
    ("stale_status", {"stale_status": 410}),
    ("stale_status", {"stale_status": "409"}),
    ("stale_status", {"stale_status": None}),
]


def _called(options: dict[str, object]) -> str:
    """A name that is the same in every process: it has no object's address."""
    values = {name: repr(value) if isinstance(value, str) else type(value).__name__ for name, value in options.items()}
    return " ".join(f"{name}={value}" for name, value in values.items())


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize(("parameter", "options"), WRONG, ids=[_called(options) for _, options in WRONG])
def test_an_argument_that_cannot_work_is_refused(make, parameter, options):
    with pytest.raises(ConfigurationError, match=rf"^{parameter} "):
        make(**options)
