"""
One request to etcd through its JSON gateway, whichever member answers it.

Requests may be repeated: a transaction compares before it writes. So a member that
cannot be reached, that answers too late, or that has no leader, is followed by the next one at once.
What has to be kept in mind is that a request whose answer was lost may still be carried out.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from types import MappingProxyType
from typing import NamedTuple, Self

import aiohttp

from fencing_sdk._etcd.answers import (
    INVALID,
    NOT_FOUND,
    NOT_NOW,
    UNAUTHENTICATED,
    Fate,
    MemberError,
    member_error,
    read_body,
    read_line,
)
from fencing_sdk._etcd.json_codec import Json, UnreadableError
from fencing_sdk._etcd.login import Credentials, Login
from fencing_sdk._http.endpoints import Endpoint, Endpoints, Site
from fencing_sdk._http.pool import Pools
from fencing_sdk.errors import BackendError, BackendRefusedError, BackendUnavailableError

__all__ = [
    "DELETE",
    "GRANT",
    "KEEP_ALIVE",
    "RANGE",
    "SITE",
    "TIME_TO_LIVE",
    "TXN",
    "WATCH",
    "Gateway",
    "NotFoundError",
    "Reply",
    "Requests",
    "pools",
]

TXN = "/v3/kv/txn"
RANGE = "/v3/kv/range"
DELETE = "/v3/kv/deleterange"
GRANT = "/v3/lease/grant"
KEEP_ALIVE = "/v3/lease/keepalive"
TIME_TO_LIVE = "/v3/lease/timetolive"
WATCH = "/v3/watch"
_AUTHENTICATE = "/v3/auth/authenticate"

SITE = Site(
    example="etcd://localhost:2379",
    plain_port=2379,
    tls_port=2379,
    paths=(TXN, RANGE, DELETE, GRANT, KEEP_ALIVE, TIME_TO_LIVE, WATCH, _AUTHENTICATE),
    user_hint="which stands once, before the first; write etcd://user:password@host:port,host:port",
)

ANSWER_LIMIT = 30.0
"""Seconds after which no caller waits for an answer any more. The engine's limits are far shorter."""
MEMBER_LIMIT = 3.0
"""Seconds after which the next member is asked, where there is one: longer than an election at etcd's defaults."""

_HEADERS = {
    "Accept": "application/json",
    "Accept-Encoding": "identity",
    "Content-Type": "application/json",
    "User-Agent": "fencing-sdk",
}
_to_json = json.JSONEncoder(separators=(",", ":")).encode  # made once: json.dumps would make one for each call


class Reply(NamedTuple):
    """An answer, and what is known of the way to it."""

    fields: Json
    after_loss: bool
    """An earlier try of the same call was sent and lost: it may still be carried out."""


class Requests:
    """
    The body of a stream that goes on while its answers come.

    A server in Go reads it to its end before the first answer, unless the connection is to be closed afterwards.
    """

    HEADERS: Mapping[str, str] = MappingProxyType({"Connection": "close"})

    def __init__(self) -> None:
        self._waiting: asyncio.Queue[bytes] = asyncio.Queue()

    def send(self, bodies: Iterable[Json]) -> bool:
        """Send these after all others; whether there are any."""
        if lines := b"".join(_to_json(body).encode() + b"\n" for body in bodies):
            self._waiting.put_nowait(lines)
        return bool(lines)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        return await self._waiting.get()


class NotFoundError(BackendUnavailableError):
    """The lease does not exist; nothing was done. Another one may help."""


class Gateway:
    """
    A cluster of etcd members.

    Args:
        who: Whose errors these are: the name of a backend or a guard.

        endpoints: The members. Each may be asked for anything.

        pools: Connections for requests.

        streams: Connections for watches, of which each keeps one busy.
    """

    def __init__(
        self, who: str, endpoints: Endpoints, *, pools: Pools, streams: Pools, credentials: Credentials | None
    ) -> None:
        self.who = who
        self._endpoints = endpoints
        self._pools = pools
        self._streams = streams
        self._login = None if credentials is None else Login(credentials)
        alone = len(endpoints.in_turn()) == 1
        connect = pools.limits.sock_connect
        self._limits = pools.limits if alone else aiohttp.ClientTimeout(total=MEMBER_LIMIT, sock_connect=connect)

    async def call(self, operation: str, path: str, body: Json, *, once: bool = False) -> Reply:
        """
        Ask member after member until one answers; with *once*, until one may have done it.

        Raises:
            NotFoundError: the lease in *body* does not exist.
            BackendUnavailableError: no member answered; the outcome is unknown.
            BackendRefusedError: etcd will not do this.
        """
        payload = _to_json(body).encode()
        errors: list[MemberError] = []
        for endpoint in self._endpoints.in_turn():
            try:
                fields = await self._ask(endpoint, path, payload)
            except MemberError as error:
                errors.append(error)
                if error.code and error.fate is Fate.REJECTED:
                    break  # that is the cluster's word, and not this member's
                self._endpoints.failed(endpoint)
                if once and error.fate is Fate.LOST:
                    break
            except asyncio.CancelledError:  # most often the engine's limit: the member hangs
                self._endpoints.failed(endpoint)
                raise
            else:
                return Reply(fields, _lost(errors))
        raise self._silence(operation, errors)

    def _silence(self, operation: str, errors: Sequence[MemberError]) -> BackendError:
        """Refused is only what another try will not change *and* what surely did nothing."""
        last = errors[-1]
        if last.code == NOT_FOUND and not _lost(errors):
            return NotFoundError(self.who, operation, last.detail)
        told = last if last.code else next((error for error in errors if error.fate is not Fate.REJECTED), last)
        detail = told.detail if len(errors) == 1 else f"{told.detail} (the last of {len(errors)} members asked)"
        refused = told.fate is Fate.REJECTED and not _lost(errors)
        error = (BackendRefusedError if refused else BackendUnavailableError)(self.who, operation, detail)
        error.__cause__ = told
        return error

    async def _ask(self, endpoint: Endpoint, path: str, payload: bytes) -> Json:
        token = None if self._login is None else await self._authorized(endpoint)
        try:
            return await self._post(endpoint, path, payload, token)
        except MemberError as error:
            if self._login is None or error.code not in {UNAUTHENTICATED, INVALID}:
                raise
            self._login.forget(token)  # it has expired, or users and roles were changed since
        return await self._post(endpoint, path, payload, await self._authorized(endpoint))

    async def _authorized(self, endpoint: Endpoint) -> str | None:
        login = self._login
        assert login is not None

        async def authenticate() -> str | None:
            payload = _to_json({"name": login.credentials.user, "password": login.credentials.password}).encode()
            try:
                token = (await self._post(endpoint, _AUTHENTICATE, payload, None)).get("token")
            except MemberError as error:
                if error.code == NOT_NOW:
                    return None  # etcd does not ask who we are
                detail = "wrong user or password" if error.code == INVALID else error.detail
                raise MemberError(error.fate, detail, error.code) from error.__cause__
            if not isinstance(token, str) or not token.isprintable():
                raise MemberError(Fate.UNSENT, "the answer to the login has no token")
            return token

        return await login.token(authenticate)

    async def _post(self, endpoint: Endpoint, path: str, payload: bytes, token: str | None) -> Json:
        session = await self._pools.session()
        headers = {} if token is None else {"Authorization": token}
        try:
            async with session.post(
                endpoint.urls[path], data=payload, headers=headers, timeout=self._limits, allow_redirects=False
            ) as response:
                fields = read_line(await read_body(response), response.status)
        except UnreadableError as error:
            raise MemberError(Fate.LOST, str(error)) from error
        except (aiohttp.ClientError, OSError) as error:  # among them every TimeoutError
            raise member_error(error) from error
        return fields

    @asynccontextmanager
    async def stream(self, operation: str, path: str, body: Json | Requests) -> AsyncIterator[AsyncIterator[Json]]:
        """
        Open a stream of answers at one member; it ends when the member does, or has no leader.

        With `Requests` as *body*, more can be asked of it; it opens with the answer to the first.

        Raises:
            BackendUnavailableError, BackendRefusedError: as `call`, also while the answers are read.
        """
        endpoint = self._endpoints.in_turn()[0]
        try:
            token = None if self._login is None else await self._authorized(endpoint)
            headers = {"Grpc-Metadata-hasleader": "true"} | ({} if token is None else {"Authorization": token})
            data: Requests | bytes = body if isinstance(body, Requests) else _to_json(body).encode()
            if isinstance(body, Requests):
                headers |= body.HEADERS
            session = await self._streams.session()
            async with session.post(endpoint.urls[path], data=data, headers=headers, allow_redirects=False) as response:
                yield _lines(response)
        except MemberError as error:
            if self._login is not None and error.code in {UNAUTHENTICATED, INVALID}:
                self._login.forget(None)
            elif error.fate is not Fate.REJECTED:
                self._endpoints.failed(endpoint)
            raise self._silence(operation, [error]) from error
        except (aiohttp.ClientError, OSError, ValueError) as error:  # ValueError: a line without end, or not ours
            self._endpoints.failed(endpoint)
            raise self._silence(operation, [MemberError(Fate.LOST, "the stream broke")]) from error

    async def aclose(self) -> None:
        """Close the connections; the next request opens new ones."""
        if self._login is not None:
            await self._login.aclose()
        await self._pools.aclose()
        await self._streams.aclose()


def pools(tls: ssl.SSLContext | None, *, connect_timeout: float, connections: int) -> tuple[Pools, Pools]:
    """Connections for requests, so many at most, and for streams, as many as are wanted."""
    requests = aiohttp.ClientTimeout(total=ANSWER_LIMIT, sock_connect=connect_timeout)
    streams = aiohttp.ClientTimeout(total=None, sock_connect=connect_timeout)
    return (
        Pools(tls=tls, connections=connections, limits=requests, headers=_HEADERS),
        Pools(tls=tls, connections=0, limits=streams, headers=_HEADERS),
    )


def _lost(errors: Sequence[MemberError]) -> bool:
    return any(error.fate is Fate.LOST for error in errors)


async def _lines(response: aiohttp.ClientResponse) -> AsyncIterator[Json]:
    if response.status != 200:  # noqa: PLR2004
        read_line(await read_body(response), response.status)
    async for line in response.content:
        yield read_line(line, response.status)
