"""
etcd's JSON gateway, for the backend and the guard: messages, streams, and one request, whichever member answers it.

Keys and values are base64, whole numbers of 64 bits are texts, and fields that are zero or false are left out.

Requests may be repeated, because a transaction compares before it writes. So if a member cannot be reached, answers too
late or has no leader, the gateway asks the next member at once. Requests that read, delete or keep alive are also sent
to the next member when there is no answer soon. A request whose answer was lost may still be carried out; the reply of
the next member has ``earlier_unknown`` set then.

A member's error is read by its gRPC code, never by its text. `BackendRefusedError` is for what another try will not
change *and* what surely has done nothing. Everything else is a `BackendUnavailableError`: the outcome is unknown until
another request shows it.

An answer of a stream that cannot be read counts neither as a deletion nor as the absence of one: its reader opens a new
stream from the revision at which the last one began, and etcd repeats what has happened since.
"""

from __future__ import annotations

import asyncio
import json
from base64 import b64decode, b64encode
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Generic, NamedTuple, Self, TypeAlias, TypeVar

import aiohttp

from fencing_sdk._http.nodes import PATIENCE, Endpoint, EndpointRules, Endpoints, NodeRace, read_endpoints
from fencing_sdk._http.requests import (
    HttpPool,
    RequestFailedError,
    RequestOutcome,
    UnreadableAnswerError,
    any_unknown,
    read_body,
    request_failed,
    to_json,
)
from fencing_sdk._http.tls import tls_context
from fencing_sdk._values.clock import BootClock
from fencing_sdk._values.tasks import SharedCall
from fencing_sdk._values.url import read_seconds, refuse_url, split_url
from fencing_sdk.errors import BackendError, BackendRefusedError, BackendUnavailableError, ConfigurationError, shown

INVALID, NOT_FOUND, DENIED, EXHAUSTED, NOT_NOW, UNIMPLEMENTED, UNAUTHENTICATED = 3, 5, 7, 8, 9, 12, 16
"""Codes of gRPC."""

_REJECTED, _UNSENT, _UNKNOWN = RequestOutcome.REJECTED, RequestOutcome.UNSENT, RequestOutcome.UNKNOWN
_BY_CODE = {
    INVALID: (_REJECTED, "etcd does not accept the request, or wants a user and a password"),
    NOT_FOUND: (_REJECTED, "the lease does not exist"),
    DENIED: (_REJECTED, "the user may not read and write the keys; see the page of the backend for its role"),
    EXHAUSTED: (_UNSENT, "etcd accepts no more: its space is used up (NOSPACE), or it is overloaded"),
    NOT_NOW: (_REJECTED, "etcd cannot do this in its state"),
    UNIMPLEMENTED: (_REJECTED, "etcd cannot do this; is it 3.4 or newer?"),
    UNAUTHENTICATED: (_REJECTED, "etcd does not accept the token of the login"),
}


class LeaseNotFoundError(BackendUnavailableError):
    """The lease does not exist, so nothing was done. A call with another lease may succeed."""


def failure_by_code(code: int, status: int, message: str) -> RequestFailedError:
    """Read a member's error. After a code that is not in the table, the outcome is unknown."""
    outcome, detail = _BY_CODE.get(code, (_UNKNOWN, f"HTTP {status}"))
    return RequestFailedError(outcome, f"{detail} ({shown(message)})" if message else detail, code)


def error_of_failures(component: str, operation: str, failures: Sequence[RequestFailedError]) -> BackendError:
    """
    Make an error of the failures of all members in question.

    There are three cases:

    1. etcd does not know the lease, and no earlier request may still be carried out: `LeaseNotFoundError`.
    2. The request was rejected, and no earlier one may still be carried out: `BackendRefusedError`.
    3. Everything else: `BackendUnavailableError`.
    """
    last, unknown = failures[-1], any_unknown(failures)
    if last.code == NOT_FOUND and not unknown:
        return LeaseNotFoundError(component, operation, last.detail)
    decisive = last if last.code else next((failure for failure in failures if failure.outcome is not _REJECTED), last)
    text = decisive.sentence(operation)
    detail = text if len(failures) == 1 else f"{text} (the last of {len(failures)} members asked)"
    refused = decisive.outcome is _REJECTED and not unknown
    error = (BackendRefusedError if refused else BackendUnavailableError)(component, operation, detail)
    error.__cause__ = decisive
    return error


Json: TypeAlias = dict[str, Any]
_NUMBER_LIMIT = 2**63


def encoded(key: bytes) -> str:
    return b64encode(key).decode()


def decoded(text: object) -> bytes:
    try:
        return b64decode(text if isinstance(text, str) else "", validate=True)
    except ValueError as error:
        msg = "the answer has a key or a value that is not base64"
        raise UnreadableAnswerError(msg) from error


def number(fields: Json, name: str) -> int:
    """A whole number of 64 bits, 0 if the field was left out."""
    value = fields.get(name, 0)
    try:
        read = int(value) if isinstance(value, int | str) and not isinstance(value, bool) else None
    except ValueError:
        read = None
    if read is None or not -_NUMBER_LIMIT <= read < _NUMBER_LIMIT:
        msg = f"the answer has no number as {name}"
        raise UnreadableAnswerError(msg)
    return read


def revision_in(fields: Json) -> int:
    """The revision of an answer; 0 if it has none."""
    header = fields.get("header")
    return number(header if isinstance(header, dict) else {}, "revision")


@dataclass(frozen=True, slots=True)
class Entry:
    """A key that exists."""

    key: bytes
    value: bytes
    created: int
    """The revision of the transaction that created it: greater than that of every key created before."""
    modified: int
    """The revision of the last put."""
    lease: int

    @classmethod
    def read(cls, fields: Json) -> Self:
        numbers = [number(fields, name) for name in ("create_revision", "mod_revision", "lease")]
        if min(numbers[:2]) <= 0:
            msg = "the answer has a key without its revisions"
            raise UnreadableAnswerError(msg)
        return cls(decoded(fields.get("key", "")), decoded(fields.get("value", "")), *numbers)


def compared(key: bytes, target: str, result: str, value: int | bytes, *, end: bytes | None = None) -> Json:
    """
    Compare ``CREATE`` or ``MOD`` with a revision, ``LEASE`` with a lease, or ``VALUE`` with bytes, of *key*.

    With *end*: of every key up to it.
    """
    field = {"CREATE": "create_revision", "MOD": "mod_revision", "LEASE": "lease", "VALUE": "value"}[target]
    wanted = encoded(value) if isinstance(value, bytes) else str(value)
    return {"key": encoded(key), "target": target, "result": result, field: wanted, **_up_to(end)}


def put(key: bytes, value: bytes, lease: int = 0) -> Json:
    fields = {"key": encoded(key), "value": encoded(value)}
    return {"request_put": {**fields, "lease": str(lease)} if lease else fields}


def put_on(key: bytes, lease: int) -> Json:
    """Move a key that is there to another lease."""
    return {"request_put": {"key": encoded(key), "ignore_value": True, "lease": str(lease)}}


def delete(key: bytes) -> Json:
    return {"request_delete_range": {"key": encoded(key)}}


def ranged(
    key: bytes,
    *,
    end: bytes | None = None,
    first: int = 0,
    last: int = 0,
    most: int = 0,
    before: int = 0,
    after: int = 0,
    keys_only: bool = False,
) -> Json:
    """
    Read one key; or, of the keys up to *end*, so many of the *first* or the *last* that were created.

    With *most* instead, so many in the order of the keys. With *before* and *after*, only keys that were created
    before or after that revision count.
    """
    fields: Json = {"key": encoded(key), **_up_to(end)}
    if first or last:
        fields |= {"limit": str(first or last), "sort_target": "CREATE", "sort_order": "ASCEND" if first else "DESCEND"}
    elif most:
        fields["limit"] = str(most)
    if after:
        fields["min_create_revision"] = str(after + 1)
    if before:
        fields["max_create_revision"] = str(before - 1)
    if keys_only:
        fields["keys_only"] = True
    return {"request_range": fields}


def _up_to(end: bytes | None) -> Json:
    return {} if end is None else {"range_end": encoded(end)}


def txn(*, compare: list[Json], success: list[Json], failure: list[Json] | None = None) -> Json:
    return {"compare": compare, "success": success, "failure": failure or []}


def nested(*, compare: list[Json], success: list[Json], failure: list[Json] | None = None) -> Json:
    """A transaction as one operation of another one. What it compares is what was there before the outer one."""
    return {"request_txn": txn(compare=compare, success=success, failure=failure)}


def responses(fields: Json, count: int) -> list[Json]:
    """The answers of a transaction's operations, in order."""
    found = fields.get("responses", [])
    if not isinstance(found, list) or len(found) != count or not all(isinstance(each, dict) for each in found):
        msg = f"the answer does not have {count} responses"
        raise UnreadableAnswerError(msg)
    return [next((part for part in each.values() if isinstance(part, dict)), {}) for each in found]


E = TypeVar("E", bound=Entry)


def entries(fields: Json, kind: type[E]) -> list[E]:
    """The keys that a range found, each as one of this *kind*."""
    found = fields.get("kvs", [])
    if not isinstance(found, list) or not all(isinstance(each, dict) for each in found):
        msg = "the answer has no list of keys"
        raise UnreadableAnswerError(msg)
    return [kind.read(each) for each in found]


BODY_LIMIT = 4 * 1024 * 1024
"""Bytes of an answer: twice what etcd sends at most."""


def read_answer(body: bytes, status: int) -> Json:
    """
    Read one answer. In a stream, its fields stand in ``result``.

    Raises:
        RequestFailedError: the answer is an error, or an HTTP status that another try will not change.
        UnreadableAnswerError: it is not an answer of etcd.
    """
    try:
        fields = json.loads(body.decode())
    except (ValueError, RecursionError):
        fields = None
    if not isinstance(fields, dict):
        if 300 <= status < 500:  # noqa: PLR2004
            msg = f"HTTP {status}; is this the client port of an etcd 3.4 or newer? With TLS, write etcd+https://"
            raise RequestFailedError(RequestOutcome.REJECTED, msg)
        msg = "the answer is not a JSON object" if status == 200 else f"HTTP {status}"  # noqa: PLR2004
        raise UnreadableAnswerError(msg)
    error = fields.get("error")
    detail = error if isinstance(error, dict) else fields
    code = detail.get("code", detail.get("grpc_code"))
    if error is not None or status != 200:  # noqa: PLR2004
        raise failure_by_code(code if isinstance(code, int) else 0, status, str(detail.get("message", "")))
    result = fields.get("result", fields)
    return result if isinstance(result, dict) else {}


class StreamRequests:
    """
    Requests of one stream of watches, which are sent while its answers arrive.

    Where there are none for *idle_for* seconds, the client asks for progress, and hears that the member is there.

    A server written in Go reads the whole body before its first answer, unless the client announces that the
    connection is closed afterwards. `HEADERS` do that.
    """

    HEADERS: Mapping[str, str] = MappingProxyType({"Connection": "close"})

    def __init__(self, idle_for: float) -> None:
        self._unsent: asyncio.Queue[bytes] = asyncio.Queue()
        self._idle_for = idle_for
        self.idle = False
        """True if the latest request was for progress."""

    def send(self, bodies: Iterable[Json]) -> None:
        """Send *bodies* after all earlier ones."""
        if lines := b"".join(to_json(body) + b"\n" for body in bodies):
            self._unsent.put_nowait(lines)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        try:
            async with asyncio.timeout(self._idle_for):
                lines = await self._unsent.get()
        except TimeoutError:
            self.idle = True
            return b'{"progress_request":{}}\n'
        self.idle = False
        return lines


async def _stream_answers(response: aiohttp.ClientResponse) -> AsyncIterator[Json]:
    """
    Read the answers of a stream, one a line.

    Raises:
        RequestFailedError, UnreadableAnswerError: as `read_answer`.
    """
    if response.status != 200:  # noqa: PLR2004
        read_answer(await read_body(response, BODY_LIMIT), response.status)
    async for line in response.content:
        yield read_answer(line, response.status)


class WatchAnswer(NamedTuple, Generic[E]):
    """One answer."""

    watch_id: int
    """The watch of the stream that the answer is about; 0 if this client gave it no id."""
    cancelled: bool
    """True if etcd has ended the watch."""
    deletions: list[int]
    """The revisions at which keys were deleted, also by the end of their leases."""
    puts: list[E]


def read_watch_answer(fields: Json, kind: type[E]) -> WatchAnswer[E]:
    """
    Read the whole answer before any part of it is used; each key that was put as one of this *kind*.

    Raises:
        UnreadableAnswerError: a part of it cannot be read.
    """
    cancelled, events = fields.get("canceled", False), fields.get("events", [])
    if not isinstance(cancelled, bool) or not isinstance(events, list):
        msg = "the answer is not one of a watch"
        raise UnreadableAnswerError(msg)
    deletions: list[int] = []
    puts: list[E] = []
    for event in events:
        kv = event.get("kv") if isinstance(event, dict) else None
        if not isinstance(kv, dict) or event.get("type", "PUT") not in ("PUT", "DELETE"):
            msg = "the answer has an event that is neither a put nor a deletion"
            raise UnreadableAnswerError(msg)
        if event.get("type") == "DELETE":
            deletions.append(_deleted_at(kv))
        else:
            puts.append(kind.read(kv))
    return WatchAnswer(number(fields, "watch_id"), cancelled, deletions, puts)


def _deleted_at(kv: Json) -> int:
    revision = number(kv, "mod_revision")
    if not decoded(kv.get("key")) or revision <= 0:
        msg = "the answer has a deletion without its key or its revision"
        raise UnreadableAnswerError(msg)
    return revision


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
            is_final=lambda failure: _is_decision(failure) or (once and failure.outcome is _UNKNOWN),
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
    async def stream(self, operation: str, path: str, body: StreamRequests) -> AsyncIterator[AsyncIterator[Json]]:
        """
        Open a stream of answers at one member. It ends when the member stops or loses its leader.

        The stream opens with the answer to the first request of *body*; more can follow.

        Raises:
            BackendUnavailableError, BackendRefusedError: as `call`, also while the answers are read.
        """
        endpoint = self._endpoints.in_turn()[0]
        try:
            token = None if self._login is None else await self._token(self._login, endpoint)
            login = {} if token is None else {"Authorization": token}
            headers = {"Grpc-Metadata-hasleader": "true", **body.HEADERS, **login}
            session = await self._streams.session()
            async with session.post(endpoint.urls[path], data=body, headers=headers, allow_redirects=False) as response:
                yield _stream_answers(response)
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
    requests = HttpPool(tls=context, limits=answer_limit)
    streams = HttpPool(tls=context, limits=endless)
    for name, text in (("user", user), ("password", password)):
        if text is not None and (not isinstance(text, str) or not text):
            msg = f"{name} must be a non-empty str, or None"
            raise ConfigurationError(msg)
    if (user is None) != (password is None):
        given, missing = ("user", "password") if password is None else ("password", "user")
        msg = f"{given} needs the other one; pass {missing} too"
        raise ConfigurationError(msg)
    credentials = None if user is None else Credentials(str(user), str(password))
    members = read_endpoints(endpoints, RULES, tls=bool(tls))
    return Gateway(component, members, requests=requests, streams=streams, credentials=credentials)


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
