"""
The token of the current lease goes with a request: to the origins it is meant for, and to nobody else.

Every promise is kept by aiohttp's session, by requests, and by the sync and the async client of httpx (and of
httpx2, where it is installed). All servers are real.
"""

import asyncio
import contextlib
import importlib
import importlib.util

import aiohttp
import pytest
import requests
from aiohttp import ClientSession, web
from web_servers import aiohttp_server, page_answers

from fencing_sdk import ConfigurationError, LeaseLostError, LockClient, StaleTokenError
from fencing_sdk.backends.memory import MemoryBackend
from fencing_sdk.errors import NoLeaseError
from fencing_sdk.guards.memory import MemoryGuard
from fencing_sdk.integrations.aiohttp import fencing_middleware, guard_middleware, raise_for_stale
from fencing_sdk.integrations.clients import FencingAdapter, fencing_hook
from fencing_sdk.integrations.clients import raise_for_stale as raise_if_refused

HTTPX = [name for name in ("httpx", "httpx2") if importlib.util.find_spec(name)]


class Server:
    """Notes the tokens that arrive, and answers or redirects as it is told."""

    def __init__(self):
        self.seen = []
        self.url = ""
        self.redirects = {}
        self.before_answer = lambda: None
        self.answer = lambda: web.Response(text="ok")

    async def handle(self, request):
        names = ("Fencing-Token", "X-Fencing-Token")
        self.seen.append([value for name in names for value in request.headers.getall(name, ())])
        await request.read()
        result = self.before_answer()
        if result is not None:
            await result
        if request.path in self.redirects:
            return web.Response(status=307, headers={"Location": self.redirects[request.path]})
        return self.answer()

    @contextlib.asynccontextmanager
    async def running(self):
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self.handle)
        async with aiohttp_server(app) as self.url:
            yield self

    @property
    def numbers(self):
        """The tokens that arrived, as numbers; None for a request without one."""
        return [int(values[0].partition(";")[0]) if values else None for values in self.seen]


@pytest.fixture
async def server():
    async with Server().running() as server:
        yield server


@pytest.fixture
async def stranger():
    async with Server().running() as server:
        yield server


class AiohttpClient:
    """One request at a time, as a user of aiohttp would send it."""

    errors = aiohttp.ClientError

    async def put(self, url, *, headers=None, **options):
        async with (
            ClientSession(middlewares=[fencing_middleware(**options)]) as session,
            session.put(url, headers=headers, data=b"body", allow_redirects=True) as response,
        ):
            return response.status


PLAIN = {"follow_redirects": True, "trust_env": False, "verify": False}
"""Without TLS: to read the certificates of the system takes longer than the rest of a test."""


class HttpxAsyncClient:
    def __init__(self, module):
        self.module = importlib.import_module(module)
        self.errors = self.module.HTTPError

    async def put(self, url, *, headers=None, **options):
        hooks = {"request": [fencing_hook(**options)]}
        async with self.module.AsyncClient(event_hooks=hooks, **PLAIN) as client:
            response = await client.put(url, headers=headers, content=b"body")
        raise_if_refused(response)
        return response.status_code


class HttpxClient(HttpxAsyncClient):
    async def put(self, url, *, headers=None, **options):
        def send():
            hooks = {"request": [fencing_hook(**options)]}
            with self.module.Client(event_hooks=hooks, **PLAIN) as client:
                response = client.put(url, headers=headers, content=b"body")
            raise_if_refused(response)
            return response.status_code

        return await asyncio.to_thread(send)


class RequestsClient:
    errors = requests.RequestException

    async def put(self, url, *, headers=None, **options):
        def send():
            with requests.Session() as session:
                session.trust_env = False
                session.mount("http://", FencingAdapter(**options))
                response = session.put(url, headers=headers, data=b"body")
            raise_if_refused(response)
            return response.status_code

        return await asyncio.to_thread(send)


CLIENTS = {"aiohttp": AiohttpClient, "requests": RequestsClient}
for module in HTTPX:
    CLIENTS[f"{module} async"] = lambda module=module: HttpxAsyncClient(module)
    CLIENTS[f"{module} sync"] = lambda module=module: HttpxClient(module)


@pytest.fixture(params=CLIENTS)
def client(request):
    return CLIENTS[request.param]()


@pytest.fixture
async def locks():
    async with LockClient(MemoryBackend(tokens="counter")) as locks:
        yield locks


# Whose token


async def test_the_token_of_the_lease_goes_along_with_its_holder(client, locks, server):
    async with locks.lock("seats/42") as lease:
        assert await client.put(f"{server.url}/seats/42", origins=[server.url]) == 200
        assert server.seen == [[f'{lease.token};holder="{lease.holder}"']]


async def test_a_request_outside_of_a_lease_goes_as_it_is(client, server):
    assert await client.put(server.url, origins=[server.url]) == 200
    assert server.seen == [[]]


async def test_a_required_token_that_is_not_there_stops_the_request(client, locks, server):
    async with locks.lock("other"):
        with pytest.raises(NoLeaseError):
            await client.put(server.url, origins=[server.url], name="seats/42", required=True)
    assert server.seen == []


async def test_of_several_leases_the_innermost_or_the_named_one_is_sent(client, locks, server):
    async with locks.lock("outer") as outer, locks.lock("inner") as inner:
        await client.put(server.url, origins=[server.url])
        await client.put(server.url, origins=[server.url], name="outer")
        await client.put(server.url, origins=[server.url], name="neither")
        assert server.numbers == [inner.token, outer.token, None]
        assert inner.token != outer.token


@pytest.mark.parametrize("kind", ["permit", "reader"])
async def test_permits_and_readers_are_sent_on_request_only(client, locks, server, kind):
    share = locks.semaphore("pool", permits=4) if kind == "permit" else locks.rwlock("pool").reader
    origins = [server.url]
    async with share as lease:
        await client.put(f"{server.url}/seats/42", origins=origins)
        with pytest.raises(NoLeaseError, match="pool"):
            await client.put(f"{server.url}/seats/42", origins=origins, required=True)
        await client.put(f"{server.url}/pool", origins=origins, name="pool", required=True)
        assert server.numbers == [None, lease.token]
    async with locks.lock("seats/42") as lock, locks.lock("more"), share as lease:
        await client.put(f"{server.url}/seats/42", origins=origins, name="seats/42")
        await client.put(f"{server.url}/pool", origins=origins, name="pool")
        assert server.numbers[2:] == [lock.token, lease.token]
    async with locks.lock("seats/42") as lock, share:
        await client.put(f"{server.url}/seats/42", origins=origins, required=True)
        assert server.numbers[4:] == [lock.token]


async def test_a_lease_that_is_over_stops_the_request(client, locks, server):
    async with locks.lock("seats/42") as lease:
        await lease.release()
        with pytest.raises(LeaseLostError):
            await client.put(server.url, origins=[server.url])
    assert server.seen == []


async def test_a_lease_that_is_over_stops_the_request_also_with_a_header_of_ones_own(client, locks, server):
    async with locks.lock("seats/42") as lease:
        headers = lease.headers()
        await lease.release()
        with pytest.raises(LeaseLostError):
            await client.put(server.url, headers=headers, origins=[server.url])
    assert server.seen == []


async def test_the_header_of_a_plain_handle_stays_within_another_lease(client, locks, server):
    handle = await locks.lock("seats/42").acquire()
    async with locks.lock("inner"):
        await client.put(server.url, headers=handle.headers(), origins=[server.url])
        await client.put(server.url, headers={"X-Fencing-Token": "7"}, origins=[server.url])
    await client.put(server.url, headers=handle.headers(), origins=[server.url], required=True)
    assert server.numbers == [handle.token, 7, handle.token]
    await handle.release()


# To whom


async def test_another_origin_gets_no_token_neither_ours_nor_one_set_by_hand(client, locks, server, stranger):
    async with locks.lock("seats/42") as lease:
        await client.put(stranger.url, origins=[server.url])
        await client.put(stranger.url, origins=[server.url], headers=lease.headers())
        await client.put(stranger.url, origins=[server.url], headers={"x-fencing-token": "34"})
        await client.put(stranger.url, origins=[server.url], required=True)
    await client.put(stranger.url, origins=[server.url], headers={"Fencing-Token": "34"})
    assert stranger.seen == [[], [], [], [], []]


async def test_another_name_of_the_same_host_is_another_origin(client, locks, server):
    async with locks.lock("seats/42"):
        await client.put(server.url.replace("127.0.0.1", "localhost"), origins=[server.url])
        await client.put(server.url, origins=[server.url.replace("http:", "https:")])
    assert server.seen == [[], []]


async def test_a_redirect_to_another_port_loses_the_token(client, locks, server, stranger):
    server.redirects["/seats/42"] = f"{stranger.url}/seats/42"
    async with locks.lock("seats/42") as lease:
        await client.put(f"{server.url}/seats/42", origins=[server.url])
        await client.put(f"{server.url}/seats/42", origins=[server.url], headers=lease.headers())
    assert server.numbers == [1, 1]
    assert stranger.seen == [[], []]


async def test_a_redirect_to_another_host_loses_the_token(client, locks, server):
    server.redirects["/seats/42"] = server.url.replace("127.0.0.1", "localhost") + "/there"
    async with locks.lock("seats/42"):
        await client.put(f"{server.url}/seats/42", origins=[server.url])
    assert server.numbers == [1, None]


@pytest.mark.parametrize("by_hand", [False, True])
async def test_a_redirect_away_from_the_adapter_of_requests_takes_no_token_of_the_lease_along(locks, server, by_hand):
    """As from https:// to http:// where the adapter is mounted for one alone."""
    server.redirects["/seats/42"] = server.url.replace("127.0.0.1", "localhost") + "/there"

    def send(headers):
        with requests.Session() as session:
            session.trust_env = False
            session.mount("http://127.0.0.1", FencingAdapter([server.url]))
            if by_hand:
                session.mount("http://", FencingAdapter([server.url]))
            return session.put(f"{server.url}/seats/42", headers=headers, data=b"body").status_code

    async with locks.lock("seats/42") as lease:
        assert await asyncio.to_thread(send, lease.headers() if by_hand else {}) == 200
    assert server.numbers == [1, None]


async def test_a_redirect_within_the_list_keeps_the_token_and_one_back_into_it_gets_it_again(
    client, locks, server, stranger
):
    server.redirects["/one"] = "/two"
    server.redirects["/two"] = f"{stranger.url}/three"
    stranger.redirects["/three"] = f"{server.url}/four"
    async with locks.lock("seats/42"):
        await client.put(f"{server.url}/one", origins=[server.url])
        assert server.numbers == [1, 1, 1]
        assert stranger.numbers == [None]
        await client.put(f"{server.url}/two", origins=[server.url, stranger.url])
    assert stranger.numbers == [None, 1]


async def test_a_lease_that_ends_on_the_way_stops_the_redirect(client, locks, server):
    server.redirects["/one"] = "/two"
    async with locks.lock("seats/42") as lease:
        server.before_answer = lease.release
        with pytest.raises(LeaseLostError):
            await client.put(f"{server.url}/one", origins=[server.url])
    assert server.numbers == [1]


# What comes back


REFUSAL = {
    "type": "urn:fencing-sdk:problem:stale-token",
    "title": "Stale fencing token",
    "status": 409,
    "detail": "",
    "resource": "seats/42",
    "token": 1,
    "fence": 2,
    "conflict": False,
}


def refusal(*, content_type="application/problem+json", status=409, **members):
    document = REFUSAL | {"status": status} | members
    document = {name: value for name, value in document.items() if value is not ...}
    return lambda: web.json_response(document, status=status, content_type=content_type)


async def test_a_refusal_of_a_guarded_service_is_a_stale_token_error_here(client, locks):
    guard = MemoryGuard()
    app = web.Application(middlewares=[guard_middleware(guard, resource="seats/{seat}")])
    app.router.add_put("/seats/{seat}", _done)
    await guard.raise_to("seats/42", 100)
    async with aiohttp_server(app) as url, locks.lock("seats/42"):
        with pytest.raises(StaleTokenError) as caught:
            await client.put(f"{url}/seats/42", origins=[url])
        assert (caught.value.resource, caught.value.token, caught.value.fence) == ("seats/42", 1, 100)
        assert not isinstance(caught.value, client.errors | OSError)
        assert await client.put(f"{url}/seats/43", origins=[url]) == 200


async def _done(request):
    return web.Response(text="done")


TYPE = {"type": REFUSAL["type"]}
OTHERS = {
    "412": (refusal(status=412), (1, 2, False)),
    "a conflict": (refusal(fence=1, conflict=True), (1, 1, True)),
    "a member that we do not know": (refusal(other=[1]), (1, 2, False)),
    "no status, which RFC 9457 allows": (lambda: _document({**REFUSAL, "status": ...}), (1, 2, False)),
    "no token": (refusal(token=...), (1, 2, False)),
    "no conflict": (refusal(conflict=...), (1, 2, False)),
    "a higher fence": (refusal(fence=100, conflict=...), (1, 100, False)),
    "equal numbers": (refusal(fence=1, conflict=...), (1, 1, True)),
    "a conflict without numbers": (refusal(token=..., fence=..., conflict=True), (1, 1, True)),
    "its type alone": (lambda: _document(TYPE), (1, 2, False)),
}
"""Refusals of services in any language: each with the token, the fence and the conflict that it tells of."""


def _document(members):
    document = {name: value for name, value in members.items() if value is not ...}
    return web.json_response(document, status=409, content_type="application/problem+json")


@pytest.mark.parametrize(("answer", "heard"), OTHERS.values(), ids=OTHERS.keys())
async def test_every_form_of_a_refusal_is_understood(client, locks, server, answer, heard):
    server.answer = answer
    async with locks.lock("seats/42"):
        with pytest.raises(StaleTokenError) as caught:
            await client.put(f"{server.url}/a%20row/42?secret=1", origins=[server.url])
    assert (caught.value.token, caught.value.fence, caught.value.conflict) == heard
    named = b"resource" in answer().body
    assert caught.value.resource == ("seats/42" if named else "/a%20row/42")


@pytest.mark.parametrize("heard", page_answers(), ids=lambda heard: heard.problem["type"].rpartition(":")[2])
async def test_the_refusals_of_the_page_are_refusals_and_its_other_answers_are_none(client, locks, server, heard):
    server.answer = lambda: web.Response(status=heard.status, headers=heard.headers, body=heard.body)
    headers = {"Fencing-Token": "34"}
    if "token" not in heard.problem:
        assert await client.put(server.url, origins=[server.url], headers=headers) == heard.status
        return
    with pytest.raises(StaleTokenError) as caught:
        await client.put(server.url, origins=[server.url], headers=headers)
    assert (caught.value.fence, caught.value.conflict) == (heard.problem["fence"], heard.problem["conflict"])


async def test_a_refusal_that_names_no_token_is_none_where_no_token_was_sent(client, server):
    server.answer = lambda: _document(TYPE)
    assert await client.put(server.url, origins=[server.url]) == 409


def _differing(members):
    return web.json_response(REFUSAL | members, status=409, content_type="application/problem+json")


FORGED = {
    "another content type": refusal(content_type="application/json"),
    "another status": refusal(status=403),
    "a success": refusal(status=200),
    "another type": refusal(type="about:blank"),
    "no type": refusal(type=...),
    "null for a status": lambda: _differing({"status": None}),
    "null for a token": refusal(token=None),
    "a conflict without numbers, of which one differs": refusal(resource=..., token=..., fence=2, conflict=True),
    "a status that differs from the document's": lambda: _differing({"status": 412}),
    "an empty resource": refusal(resource=""),
    "a resource with a line break": refusal(resource="a\nb"),
    "a token in quotes": refusal(token="1"),
    "a token that is a fraction": refusal(token=1.0),
    "true for a token": refusal(token=True),
    "somebody else's token": refusal(token=0),
    "a fence beyond all tokens": refusal(fence=2**53),
    "a negative token": refusal(token=-1),
    "a fence below the token": refusal(fence=0),
    "a fence at the token without a conflict": refusal(fence=1),
    "a conflict with a higher fence": refusal(conflict=True),
    "a conflict in words": refusal(conflict="false"),
    "a list": lambda: web.json_response([REFUSAL], status=409, content_type="application/problem+json"),
    "an empty body": lambda: web.Response(status=409, content_type="application/problem+json"),
    "half a document": lambda: web.Response(status=409, body=b'{"type":', content_type="application/problem+json"),
    "no text": lambda: web.Response(status=409, body=b"\xff\xfe\xff", content_type="application/problem+json"),
    "a number of 10,000 digits": lambda: web.Response(
        status=409, body=b'{"token":' + b"9" * 10_000 + b"}", content_type="application/problem+json"
    ),
    "a deep document": lambda: web.Response(status=409, body=b"[" * 10_000, content_type="application/problem+json"),
    "a large document": refusal(detail="x" * 20_000),
}


@pytest.mark.parametrize("answer", FORGED.values(), ids=FORGED.keys())
async def test_what_is_not_exactly_a_refusal_is_an_answer_like_any_other(client, locks, server, answer):
    server.answer = answer
    async with locks.lock("seats/42"):
        assert await client.put(server.url, origins=[server.url]) == answer().status


async def test_a_refusal_of_what_was_no_token_is_an_answer_like_any_other(client, server):
    server.answer = refusal()
    assert await client.put(server.url, origins=[server.url], headers={"Fencing-Token": "x"}) == 409


async def test_an_answer_that_is_no_refusal_can_still_be_read(locks, server):
    server.answer = refusal(fence=1)
    async with (
        locks.lock("seats/42"),
        ClientSession(middlewares=[fencing_middleware([server.url])]) as session,
        session.put(server.url) as response,
    ):
        assert (await response.json(content_type=None))["fence"] == 1
    server.answer = refusal(detail="x" * 100_000)
    async with (
        ClientSession(middlewares=[fencing_middleware([server.url])]) as session,
        session.put(server.url) as response,
    ):
        assert len(await response.content.read()) > 100_000  # a stream that nobody has read before


async def test_an_origin_outside_of_the_list_is_not_believed(locks, server, stranger):
    stranger.answer = refusal()
    async with locks.lock("seats/42"), ClientSession(middlewares=[fencing_middleware([server.url])]) as session:
        async with session.put(stranger.url) as response:
            assert response.status == 409


async def test_the_answer_can_be_left_alone_and_asked_later(locks, server):
    server.answer = refusal()
    middleware = fencing_middleware([server.url], raise_stale=False)
    async with (
        locks.lock("seats/42"),
        ClientSession(middlewares=[middleware]) as session,
        session.put(server.url) as response,
    ):
        assert response.status == 409
        with pytest.raises(StaleTokenError):
            await raise_for_stale(response)
    server.answer = lambda: web.Response(status=409, text="another conflict")
    async with ClientSession() as session, session.put(server.url) as response:
        await raise_for_stale(response)
        assert await response.text() == "another conflict"


# What cannot work is said when it is built

NOT_ORIGINS = [
    "",
    "seats.example",
    "//seats.example",
    "ftp://seats.example",
    "ws://seats.example",
    "*",
    "https://*.seats.example",
    "https://",
    "https:///seats",
    "https://seats.example/path",
    "https://seats.example?query",
    "https://seats.example#fragment",
    "https://user@seats.example",
    "https://user:secret@seats.example",
    "https://seats.example:",
    "https://seats.example:0",
    "https://seats.example:65536",
    "https://seats.example:8o",
    "https://seats.example:\u0668\u0660",
    "https://seats.example\n",
    " https://seats.example",
    "https://seats .example",
    "https://s\u00e9ats.example",
    "https://\u212beats.example",
    "https://[::1",
    "https://[::g]",
    "https://[1:2]",
    "https://[fe80::1%25eth0]",
    b"https://seats.example",
    None,
    42,
]


@pytest.mark.parametrize("make", [fencing_middleware, fencing_hook])
@pytest.mark.parametrize("origin", NOT_ORIGINS, ids=ascii)
def test_what_is_no_origin_is_refused(make, origin):
    with pytest.raises(ConfigurationError, match=r"^origins"):
        make(["https://seats.example", origin])


def test_a_password_in_an_origin_is_not_shown():
    with pytest.raises(ConfigurationError) as caught:
        fencing_middleware(["https://user:secret@seats.example"])
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("make", [fencing_middleware, fencing_hook])
@pytest.mark.parametrize("origins", ["https://seats.example", b"https://seats.example", None, 1, [], ()], ids=ascii)
def test_what_is_no_list_of_origins_is_refused(make, origins):
    with pytest.raises(ConfigurationError, match=r"^origins"):
        make(origins)


@pytest.mark.parametrize("make", [fencing_middleware, fencing_hook])
def test_what_is_no_name_of_a_lock_is_refused(make):
    with pytest.raises(ConfigurationError, match=r"^name"):
        make(["https://seats.example"], name="")
