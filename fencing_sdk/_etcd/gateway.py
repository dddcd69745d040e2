"""
One request to etcd through its JSON gateway, whichever member answers it.

Requests may be repeated, because a transaction compares before it writes. So if a member cannot be reached, answers too
late or has no leader, the gateway asks the next member at once. Requests that read, delete or keep alive are also sent
to the next member when there is no answer soon. A request whose answer was lost may still be carried out; the reply of
the next member has ``earlier_unknown`` set then.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import aiohttp

from fencing_sdk._etcd.messages import (
    BODY_LIMIT,
    INVALID,
    NOT_NOW,
    UNAUTHENTICATED,
    Json,
    error_of_failures,
    read_answer,
)
from fencing_sdk._etcd.streams import StreamRequests, stream_answers
from fencing_sdk._http.endpoints import Endpoint, EndpointRules, Endpoints, read_endpoints
from fencing_sdk._http.node_race import PATIENCE, NodeRace
from fencing_sdk._http.outcomes import (
    RequestFailedError,
    RequestOutcome,
    UnreadableAnswerError,
    read_body,
    request_failed,
    to_json,
)
from fencing_sdk._http.pool import HttpPool
from fencing_sdk._http.tls import tls_context
from fencing_sdk._values.clock import BootClock
from fencing_sdk._values.options import read_seconds
from fencing_sdk._values.tasks import SharedCall
from fencing_sdk._values.url import refuse_url, split_url
from fencing_sdk.errors import BackendError, ConfigurationError

__all__ = [
    "ALARM",
    "GRANT",
    "KEEP_ALIVE",
    "RANGE",
    "RULES",
    "STATUS",
    "TIME_TO_LIVE",
    "TXN",
    "WATCH",
    "Credentials",
    "Gateway",
    "GatewayReply",
    "Login",
    "make_gateway",
    "read_url",
]

TXN = "/v3/kv/txn"
RANGE = "/v3/kv/range"
GRANT = "/v3/lease/grant"
KEEP_ALIVE = "/v3/lease/keepalive"
TIME_TO_LIVE = "/v3/lease/timetolive"
WATCH = "/v3/watch"
STATUS = "/v3/maintenance/status"
ALARM = "/v3/maintenance/alarm"
_AUTHENTICATE = "/v3/auth/authenticate"

RULES = EndpointRules(
    example="etcd://localhost:2379",
    plain_port=2379,
    tls_port=2379,
    paths=(TXN, RANGE, GRANT, KEEP_ALIVE, TIME_TO_LIVE, WATCH, STATUS, ALARM, _AUTHENTICATE),
)

MEMBER_LIMIT = 3.0
"""Seconds before the gateway asks the next member, if there is one: longer than an election at etcd's defaults."""


class GatewayReply(NamedTuple):
    """An answer, and what happened to earlier tries of the same call."""

    fields: Json
    earlier_unknown: bool
    """The outcome of an earlier try of the same call is unknown: it may still be carried out."""


class Gateway:
    """
    A cluster of etcd members.

    Args:
        component: The name of the backend or guard, for its errors.

        endpoints: The members. Each answers any request.

        requests: Connections for requests.

        streams: Connections for watches. An open watch keeps its connection to itself.

        credentials: What the login needs, if etcd asks for one.
    """

    def __init__(
        self,
        component: str,
        endpoints: Endpoints,
        *,
        requests: HttpPool,
        streams: HttpPool,
        credentials: Credentials | None,
    ) -> None:
        self.component = component
        self._endpoints = endpoints
        self._requests = requests
        self._streams = streams
        self._login = None if credentials is None else Login(credentials)
        only_member = len(endpoints.in_turn()) == 1
        limited = aiohttp.ClientTimeout(total=MEMBER_LIMIT, sock_connect=requests.limits.sock_connect)
        self._limits = requests.limits if only_member else limited

    async def call(
        self, operation: str, path: str, body: Json, *, once: bool = False, hedged: bool = False
    ) -> GatewayReply:
        """
        Ask member after member until one answers.

        Args:
            operation: What is done, for errors.

            path: Of the gateway.

            body: The request.

            once: Ask until one member may have carried the request out.

            hedged: Ask the next member also when there is no answer soon. For requests that may be carried out twice,
                and late.

        Raises:
            LeaseNotFoundError: the lease in *body* does not exist.
            BackendUnavailableError: no member answered; the outcome is unknown.
            BackendRefusedError: etcd rejects the request.
        """
        payload = to_json(body)
        race = NodeRace(
            self._endpoints.in_turn(),
            lambda endpoint: self._ask(endpoint, path, payload),
            leave=self._endpoints.mark_failed,
            patience=PATIENCE if hedged else None,
            is_final=_once_is_final if once else _is_decision,
        )
        try:
            async with await self._requests.turn("renew" if path == KEEP_ALIVE else operation):
                fields = await race.run()
        except RequestFailedError as failure:
            raise error_of_failures(self.component, operation, race.failures) from failure
        return GatewayReply(fields, race.earlier_unknown)

    async def _ask(self, endpoint: Endpoint, path: str, payload: bytes) -> Json:
        if self._login is None:
            return await self._post(endpoint, path, payload, None)
        token = await self._token(self._login, endpoint)
        try:
            return await self._post(endpoint, path, payload, token)
        except RequestFailedError as failure:
            if failure.code not in {UNAUTHENTICATED, INVALID}:
                raise
            self._login.forget(token)  # it has expired, or an operator has changed users or roles
        return await self._post(endpoint, path, payload, await self._token(self._login, endpoint))

    async def _token(self, login: Login, endpoint: Endpoint) -> str | None:
        async def authenticate() -> str | None:
            payload = to_json({"name": login.credentials.user, "password": login.credentials.password})
            try:
                token = (await self._post(endpoint, _AUTHENTICATE, payload, None)).get("token")
            except RequestFailedError as failure:
                if failure.code == NOT_NOW:
                    return None  # this etcd has no authentication
                detail = "wrong user or password" if failure.code == INVALID else failure.detail
                raise RequestFailedError(failure.outcome, detail, failure.code) from failure.__cause__
            if not isinstance(token, str) or not token.isprintable():
                raise RequestFailedError(RequestOutcome.UNSENT, "the answer to the login has no token")
            return token

        return await login.token(authenticate)

    async def _post(self, endpoint: Endpoint, path: str, payload: bytes, token: str | None) -> Json:
        session = await self._requests.session()
        headers = {} if token is None else {"Authorization": token}
        try:
            async with session.post(
                endpoint.urls[path], data=payload, headers=headers, timeout=self._limits, allow_redirects=False
            ) as response:
                fields = read_answer(await read_body(response, BODY_LIMIT), response.status)
        except UnreadableAnswerError as error:
            raise RequestFailedError(RequestOutcome.UNKNOWN, str(error)) from error
        except (aiohttp.ClientError, OSError) as error:  # every TimeoutError is an OSError
            raise request_failed(error, endpoint.urls[path]) from error
        return fields

    async def ask_each(self, operation: str, path: str, body: Json) -> dict[str, Json | BackendError]:
        """Ask every member, and not only one that answers. An error is the answer of its member."""
        members = self._endpoints.in_turn()
        payload = to_json(body)
        answers = await asyncio.gather(
            *(self._ask(member, path, payload) for member in members), return_exceptions=True
        )
        outcomes: dict[str, Json | BackendError] = {}
        for member, answer in zip(members, answers, strict=True):
            if isinstance(answer, RequestFailedError):
                outcomes[member.origin] = error_of_failures(self.component, operation, [answer])
            elif isinstance(answer, BaseException):
                raise answer
            else:
                outcomes[member.origin] = answer
        return outcomes

    @asynccontextmanager
    async def stream(
        self, operation: str, path: str, body: Json | StreamRequests
    ) -> AsyncIterator[AsyncIterator[Json]]:
        """
        Open a stream of answers at one member. It ends when the member stops or loses its leader.

        With `StreamRequests` as *body*, more requests can follow; the stream opens with the answer to the first.

        Raises:
            BackendUnavailableError, BackendRefusedError: as `call`, also while the answers are read.
        """
        endpoint = self._endpoints.in_turn()[0]
        try:
            token = None if self._login is None else await self._token(self._login, endpoint)
            headers = {"Grpc-Metadata-hasleader": "true"} | ({} if token is None else {"Authorization": token})
            data: StreamRequests | bytes = body if isinstance(body, StreamRequests) else to_json(body)
            if isinstance(body, StreamRequests):
                headers |= body.HEADERS
            session = await self._streams.session()
            async with session.post(endpoint.urls[path], data=data, headers=headers, allow_redirects=False) as response:
                yield stream_answers(response)
        except RequestFailedError as failure:
            if self._login is not None and failure.code in {UNAUTHENTICATED, INVALID}:
                self._login.forget(None)
            elif failure.outcome is not RequestOutcome.REJECTED:
                self._endpoints.mark_failed(endpoint)
            raise error_of_failures(self.component, operation, [failure]) from failure
        except (aiohttp.ClientError, OSError, ValueError) as error:  # ValueError: a line is too long or unreadable
            self._endpoints.mark_failed(endpoint)
            broken = RequestFailedError(RequestOutcome.UNKNOWN, "the stream broke")
            raise error_of_failures(self.component, operation, [broken]) from error

    async def aclose(self) -> None:
        """Close the connections; the next request opens new ones."""
        if self._login is not None:
            await self._login.aclose()
        await self._requests.aclose()
        await self._streams.aclose()


def _is_decision(failure: RequestFailedError) -> bool:
    """Return whether the cluster has rejected the request, so that every member would."""
    return bool(failure.code) and failure.outcome is RequestOutcome.REJECTED


def _once_is_final(failure: RequestFailedError) -> bool:
    return _is_decision(failure) or failure.outcome is RequestOutcome.UNKNOWN


_LIMIT = 30.0
"""Seconds for which further callers may join a login that is under way."""


class Credentials(NamedTuple):
    """A user and a password. Its repr shows neither."""

    user: str
    password: str

    def __repr__(self) -> str:
        return "<Credentials>"


class Login:
    """The token of a user: one login serves all callers, until etcd rejects the token."""

    def __init__(self, credentials: Credentials) -> None:
        self.credentials = credentials
        self._known = False
        self._token: str | None = None
        self._call: SharedCall[str | None] | None = None

    async def token(self, authenticate: Callable[[], Coroutine[Any, Any, str | None]]) -> str | None:
        """The token to send, or None where etcd asks for no login."""
        if self._known:
            return self._token
        now = BootClock().now()
        call = self._call
        if call is None or not call.can_join(now - _LIMIT):
            call = self._call = SharedCall(authenticate, now)
        self._token = await call.join()
        self._known = True
        return self._token

    def forget(self, token: str | None) -> None:
        """Log in again if *token*, which etcd does not accept, is still the present one; None is any token."""
        if token is None or token == self._token:
            self._known = False

    async def aclose(self) -> None:
        """Cancel the login that is under way."""
        call, self._call = self._call, None
        if call is not None:
            await call.aclose()


ANSWER_LIMIT = 30.0
"""Seconds that a request may take, if its caller does not give up earlier. The engine's limits are far shorter."""


def make_gateway(
    component: str,
    endpoints: object,
    *,
    tls: object = False,
    user: object = None,
    password: object = None,
    ca: object = None,
    cert: object = None,
    key: object = None,
    ssl_context: object = None,
    connect_timeout: object = 1.0,
    connections: object = 32,
) -> Gateway:
    """
    Make a gateway to an etcd cluster, for the backend or guard *component*. Nothing is sent.

    Raises:
        ConfigurationError: an option cannot work.
    """
    context = tls_context(tls=tls, scheme="etcd+https", ca=ca, cert=cert, key=key, context=ssl_context)
    limit = read_seconds("connect_timeout", connect_timeout)
    answer_limit = aiohttp.ClientTimeout(total=ANSWER_LIMIT, sock_connect=limit)
    endless = aiohttp.ClientTimeout(total=None, sock_connect=limit)
    requests = HttpPool(tls=context, connections=connections, limits=answer_limit)
    streams = HttpPool(tls=context, connections=connections, limits=endless)
    credentials = _credentials(user, password)
    members = read_endpoints(endpoints, RULES, tls=bool(tls))
    return Gateway(component, members, requests=requests, streams=streams, credentials=credentials)


def _credentials(user: object, password: object) -> Credentials | None:
    for name, text in (("user", user), ("password", password)):
        if text is not None and (not isinstance(text, str) or not text):
            msg = f"{name} must be a non-empty str, or None"
            raise ConfigurationError(msg)
    if (user is None) != (password is None):
        given, missing = ("user", "password") if password is None else ("password", "user")
        msg = f"{given} needs the other one; pass {missing} too"
        raise ConfigurationError(msg)
    return None if user is None else Credentials(str(user), str(password))


def read_url(url: str, options: dict[str, Any]) -> tuple[Sequence[str], dict[str, Any]]:
    """
    Split a URL into its endpoints and the options for `make_gateway`: *options*, the login and ``tls``.

    Raises:
        ConfigurationError: the URL has a path, or a login that can be misread.
    """
    parts = split_url(url)
    if parts.path not in {"", "/"}:
        refuse_url(
            "has a path, which etcd does not have; write etcd://host:port,host:port, and prefix= for a place in it"
        )
    chosen = {**options, "tls": parts.scheme == "etcd+https"}
    if parts.user is not None:
        if not (parts.user and parts.password):
            refuse_url("must have both user and password before the '@'; write etcd://user:password@host:port")
        if {"user", "password"} & options.keys():
            refuse_url("has a login that is an option too; pass user and password once")
        chosen |= {"user": parts.user, "password": parts.password}
    return parts.host_texts(), chosen
