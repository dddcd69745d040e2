"""
A guard inside Kahuna: fence and data in one value, which is replaced by revision.

    guard = KahunaGuard("kahuna://kahuna1:2070,kahuna2:2070,kahuna3:2070")
    await guard.write("seats/42", lease.token, b"Ada")

Each write reads the value, compares the tokens, and replaces the value if its revision is still the one that was read.
If another write was first, it begins again. The value is

    fencing/1 34;holder="9f8a01c2" 5f1d0c77a2b94e60<LF>the data, as they are

The first line is ASCII: the layout, the token as in a header, and a random number of the write, by which a guard knows
its own. The data begin behind the first line feed. Without a line feed there is a fence and no data yet.

All requests may be sent to several nodes, carried out twice, and carried out late: a write has a condition that holds
once at most. If the answer to a write is lost or leaves the outcome open, the guard reads the value:

    its own write                    it was carried out
    the revision that was there      not yet: the same request is sent again
    the next one, another write      it never will be carried out: the guard begins again
    a later one                      unknown: `BackendUnavailableError`

No script of the server is used: in a script, the check and the write are two steps. See docs/backends/kahuna.md.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import ssl
import uuid
from base64 import b64decode, b64encode
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from fencing_sdk._http.nodes import PATIENCE, Endpoint, NodeRace, read_endpoints
from fencing_sdk._http.requests import RequestFailedError, RequestOutcome, UnreadableAnswerError, any_unknown, to_json
from fencing_sdk._http.tls import tls_context
from fencing_sdk._kahuna import NodeClient, nodes_of_url, rules_for
from fencing_sdk._values.claim import check_name
from fencing_sdk._values.clock import JITTER, BootClock
from fencing_sdk._values.token import Token, check_token, format_token, parse_written
from fencing_sdk.errors import BackendError, BackendRefusedError, BackendUnavailableError, ConfigurationError, shown
from fencing_sdk.events import Observer
from fencing_sdk.guards import StoreGuard, admitted, check_place, check_token_of

__all__ = ["KahunaGuard"]

_GUARD = "KahunaGuard"
_DATA_LIMIT = 2**19
"""Bytes of data: half of the largest value that was tried on a real server."""
_BODY_LIMIT = 4 * _DATA_LIMIT
_LONGEST_CALL = 15.0
"""The time limit of a call in seconds: three times what a cluster needs to replace a leader."""
_CONNECT_TIMEOUT = 1.0
"""Seconds for a node to accept a connection, before the next one is asked."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.002, 0.25

_SET, _GET = "/v1/kv/try-set", "/v1/kv/try-get"
_PERSISTENT = 1
_IF_ABSENT, _IF_REVISION = 9, 33  # to set, together with the condition
_LATEST = -1
"""The number that asks for the present revision. Without a number, 0 is read: the oldest value."""
_WAS_SET, _NOT_SET, _GOT, _INVALID_INPUT, _MISSING = 0, 1, 3, 100, 103
_DEFINITE = {_WAS_SET, _NOT_SET, _GOT, _INVALID_INPUT, _MISSING}
"""Any other type of answer, such as 99 (Errored) or 101 (MustRetry), leaves open what was done."""
_FIRST_LINE = re.compile(rb"fencing/1 ([0-9a-z;=\"]{1,100}) ([0-9a-f]{16})")


class KahunaGuard(StoreGuard):
    """
    Keeps fence and data of each resource in one value of Kahuna, and replaces it only with a current token.

    If the answer to a write is lost, the guard reads the value. If that does not show the outcome, because other writes
    came meanwhile or no node answers for 15 s, it raises `BackendUnavailableError`: the write may have been carried out
    or may still be. The same holder may write again.

    Not promised: anything about writes that go around the guard; that `read` sees the last write, if the node that
    answers is cut off from the others; anything after an operator deletes the value, because the fence goes with it.

    Args:
        url: ``kahuna://host:2070,host:2070``, or ``kahuna+https://host:2071``.

        prefix: The beginning of every key.

        ca: A file of the authorities that certificates are checked against, instead of the system's.

        ssl_context: For client certificates and the like, instead of *ca*.

        observers: Callables that receive `StaleRejected` for every refusal and `FenceRaised` for
            every successful `raise_to`.

    Raises:
        ConfigurationError: an argument cannot work. Nothing is sent yet.
    """

    def __init__(
        self,
        url: str,
        *,
        prefix: str = "guarded/",
        ca: str | os.PathLike[str] | None = None,
        ssl_context: ssl.SSLContext | None = None,
        observers: Sequence[Observer] = (),
    ) -> None:
        super().__init__(observers)
        check_place(url, prefix, schemes=r"kahuna(?:\+https)?", example="kahuna://host:2070,host:2070")
        endpoints, tls = nodes_of_url(url)
        self._endpoints = read_endpoints(endpoints, rules_for(_SET, _GET), tls=tls)
        self._nodes = NodeClient(
            _Answer.read,
            body_limit=_BODY_LIMIT,
            tls=tls_context(tls=tls, scheme="kahuna+https", ca=ca, context=ssl_context),
            connect_timeout=_CONNECT_TIMEOUT,
        )
        self._prefix = prefix

    def key(self, resource: str) -> str:
        """
        The key of the value of *resource*. Any client may read it; only the guard writes it.

        Raises:
            ConfigurationError: *resource* cannot be the name of a resource.
        """
        return self._prefix + check_name(resource, parameter="resource")

    async def write(self, resource: str, token: int, data: bytes) -> None:
        """
        Check *token* and write *data*, in one step.

        Raises:
            StaleTokenError: the resource has seen a later token; nothing was written.
            ConfigurationError: *resource* cannot be the name of a resource, *token* no token, or *data* no bytes or
                more than 512 KiB.
            BackendUnavailableError: the outcome is unknown.
            BackendRefusedError: Kahuna rejects the request, or another program has written the value.
        """
        checked = _checked(data)
        await self._replace("write", resource, token, lambda _: checked)

    async def update(self, resource: str, token: int, change: Callable[[bytes | None], bytes]) -> bytes:
        """
        Check *token* and replace the data by ``change(data)``, in one step; return what was written.

        *change* is called again with newer data, and the token is checked again, when another write was first.
        Its argument is None before the first write. It must not await, and must have no effects of its own.

        Raises:
            StaleTokenError: as `write`, like all other errors, and those that *change* raises.
        """
        written = await self._replace("update", resource, token, lambda data: _checked(change(data)))
        assert written is not None  # what was checked is bytes
        return written

    async def read(self, resource: str) -> bytes | None:
        """
        Return the data; None before the first write.

        Raises:
            ConfigurationError: *resource* cannot be the name of a resource.
            BackendUnavailableError: no node can be reached, or no node has answered for 15 s.
            BackendRefusedError: another program has written the value.
        """
        found = await self._read("read", self.key(resource), _Pauses())
        return None if found is None else found.data

    async def raise_to(self, resource: str, token: int) -> None:
        """See `fencing_sdk.abc.Guard.raise_to`. The data stay as they are."""
        await self._replace("raise_to", resource, token, lambda data: data)
        self._reports.raised(check_token_of(resource, token))

    async def highest(self, resource: str) -> Token | None:
        """See `fencing_sdk.abc.Guard.highest`."""
        found = await self._read("highest", self.key(resource), _Pauses())
        return None if found is None else found.fence

    async def aclose(self) -> None:
        """Close the connections."""
        await self._nodes.pool.aclose()

    async def _replace(
        self, operation: str, resource: str, token: int, change: Callable[[bytes | None], bytes | None]
    ) -> bytes | None:
        """Replace the value until it is done, refused, or given up. Return the data."""
        key, checked = self.key(resource), check_token(token)
        format_token(checked)  # refuses a token whose text in the value could be read in two ways
        pauses = _Pauses()
        with self._reports.of_verdict({resource: checked}):
            while True:
                before = await self._read(operation, key, pauses, for_write=True)
                fence, data = (None, None) if before is None else (before.fence, before.data)
                value = _FencedValue(admitted(resource, checked, fence), change(data), uuid.uuid4().hex[:16])
                if await self._write_once(operation, key, pauses, before=before, value=value):
                    return value.data
                if pauses.over:
                    raise BackendUnavailableError(_GUARD, operation, "other writes were first, for all of 15 s")
                await pauses.sleep()

    async def _write_once(
        self, operation: str, key: str, pauses: _Pauses, *, before: _FencedValue | None, value: _FencedValue
    ) -> bool:
        """
        Put *value* in the place of *before*. Return False if another write was first and this one never can be done.

        Raises:
            BackendUnavailableError: the outcome is unknown.
            BackendRefusedError: Kahuna rejects the request, and nothing was written.
        """
        condition: dict[str, object] = {"flags": _IF_ABSENT}
        following = 0
        if before is not None:
            condition, following = {"flags": _IF_REVISION, "compareRevision": before.revision}, before.revision + 1
        body = {"key": key, "value": b64encode(value.to_bytes()).decode(), "durability": _PERSISTENT, "expiresMs": 0}
        doubtful = False  # an earlier request of this write may have been carried out, or may still be
        try:
            while True:
                done = await self._set(operation, key, {**body, **condition})
                if done or (done is False and not doubtful):
                    return done
                doubtful = True
                present = await self._read(operation, key, pauses, for_write=True)
                if present is not None and present.number == value.number:
                    return True
                if present is not None and present.revision >= following:
                    break
                if pauses.over:
                    raise BackendUnavailableError(_GUARD, operation, "no node says whether the value was written")
                await pauses.sleep()
        except BackendRefusedError as error:
            if not doubtful:
                raise
            raise BackendUnavailableError(_GUARD, operation, error.detail) from error
        if present.revision > following:
            detail = "the outcome is unknown: other writes came before the value was read again"
            raise BackendUnavailableError(_GUARD, operation, detail)
        return False

    async def _set(self, operation: str, key: str, body: dict[str, object]) -> bool | None:
        """Send a conditional write once. Return False if its condition did not hold; None if the outcome is unknown."""
        try:
            answer, earlier_unknown = await self._ask(operation, _SET, body, key)
        except BackendUnavailableError:
            return None
        if answer.type == _WAS_SET:
            return True
        if earlier_unknown:
            return None
        if answer.type != _NOT_SET:
            raise answer.unexpected(operation)
        return False

    async def _read(self, operation: str, key: str, pauses: _Pauses, *, for_write: bool = False) -> _FencedValue | None:
        """
        Read what a resource has now; None if it has nothing yet. Try again after no answer.

        A healthy server gives no answer to a read (MustRetry) while it replicates another write of the same value. If
        no node can be reached, a write waits for one, and a read that is not *for_write* fails at once.

        Raises:
            BackendUnavailableError: no node has answered until the end of *pauses*.
            BackendRefusedError: another program has written the value.
        """
        body = {"key": key, "revision": _LATEST, "durability": _PERSISTENT}
        while True:
            try:
                answer, _ = await self._ask(operation, _GET, body, key)
                if answer.type == _MISSING:
                    return None
                if answer.type != _GOT:
                    raise answer.unexpected(operation)
                stored, revision, expires = answer.stored()
            except UnreadableAnswerError as error:
                if pauses.over:
                    raise BackendUnavailableError(_GUARD, operation, str(error)) from error
            except BackendUnavailableError as error:
                if pauses.over or (isinstance(error, _UnreachedError) and not for_write):
                    raise
            else:
                value = None if expires else _FencedValue.read(stored, revision)  # else the fence would go with it
                if value is not None:
                    return value
                detail = f"the value of {shown(key)} was written by another program; set another prefix"
                raise BackendRefusedError(_GUARD, operation, detail)
            await pauses.sleep()

    async def _ask(self, operation: str, path: str, body: dict[str, object], key: str) -> tuple[_Answer, bool]:
        """Ask the node that answered last for *key* first. Return also whether another request may be carried out."""
        payload = to_json(body)

        async def ask(endpoint: Endpoint) -> _Answer:
            answer = await self._nodes.post(endpoint.urls[path], payload)
            if answer.type not in _DEFINITE:
                raise RequestFailedError(RequestOutcome.UNKNOWN, f"the answer was of type {answer.type}", again=True)
            self._endpoints.mark_answered(endpoint, key)
            return answer

        race = NodeRace(
            self._endpoints.in_turn(key),
            ask,
            leave=self._endpoints.mark_failed,
            patience=PATIENCE,
            is_final=lambda _: False,
        )
        try:
            async with await self._nodes.pool.turn(operation):
                answer = await race.run()
        except RequestFailedError as failure:
            raise _error(operation, race.failures) from failure
        return answer, race.earlier_unknown


def _checked(data: object) -> bytes:
    if not isinstance(data, bytes):
        msg = f"data must be bytes, not {type(data).__name__}"
        raise ConfigurationError(msg)
    if len(data) > _DATA_LIMIT:
        msg = f"data must have at most {_DATA_LIMIT} bytes, got {len(data)}; keep the rest elsewhere"
        raise ConfigurationError(msg)
    return data


class _UnreachedError(BackendUnavailableError):
    """No node could be reached, so nothing was done."""


def _error(operation: str, failures: Sequence[RequestFailedError]) -> BackendError:
    """Refused only if every node has rejected the request; without a connection only if none may have received it."""
    decisive = next((failure for failure in failures if failure.outcome is not RequestOutcome.REJECTED), failures[0])
    if decisive.outcome is RequestOutcome.REJECTED:
        return BackendRefusedError(_GUARD, operation, decisive.detail)
    kind = BackendUnavailableError if any_unknown(failures) else _UnreachedError
    return kind(_GUARD, operation, decisive.detail)


@dataclass(frozen=True, slots=True)
class _Answer:
    """An answer that could be read."""

    type: int
    fields: dict[str, object]

    @classmethod
    def read(cls, body: bytes, _: str | None = None) -> _Answer:
        """Read the body of an HTTP 200, which has to be JSON with a type."""
        try:
            fields = json.loads(body)
        except (ValueError, RecursionError) as error:
            msg = "the answer is not JSON"
            raise UnreadableAnswerError(msg) from error
        code = fields.get("type") if isinstance(fields, dict) else None
        if type(code) is not int:
            msg = "the answer has no type"
            raise UnreadableAnswerError(msg)
        return cls(code, fields)

    def stored(self) -> tuple[bytes, int, bool]:
        """Return the value, its revision, and whether it expires."""
        text, revision, expires = (self.fields.get(name) for name in ("value", "revision", "expires"))
        if type(revision) is not int or revision < 0 or not isinstance(expires, dict):
            msg = "the answer has a value without its revision or its expiry"
            raise UnreadableAnswerError(msg)
        try:
            value = b64decode(text if isinstance(text, str) else "!", validate=True)
        except ValueError as error:
            msg = "the answer has a value that is not base64"
            raise UnreadableAnswerError(msg) from error
        return value, revision, bool(expires.get("l"))

    def unexpected(self, operation: str) -> BackendError:
        """Return the error for an answer of this type."""
        if self.type == _INVALID_INPUT:
            return BackendRefusedError(_GUARD, operation, "Kahuna does not accept the request (InvalidInput)")
        return BackendUnavailableError(_GUARD, operation, f"the answer was of type {self.type}")


@dataclass(frozen=True, slots=True)
class _FencedValue:
    """A fence, and the data that it protects."""

    fence: Token
    data: bytes | None
    """None until the first write."""
    number: str
    """The random number of the write."""
    revision: int = -1

    def to_bytes(self) -> bytes:
        """Write it in the layout."""
        line = f"fencing/1 {format_token(self.fence)} {self.number}".encode("ascii")
        return line if self.data is None else line + b"\n" + self.data

    @classmethod
    def read(cls, value: bytes, revision: int) -> _FencedValue | None:
        """Read the layout; None if *value* has another one."""
        line, newline, data = value.partition(b"\n")
        match = _FIRST_LINE.fullmatch(line)
        if match is not None:
            with suppress(ConfigurationError):
                fence = parse_written(match[1].decode())
                return cls(fence, data if newline else None, match[2].decode(), revision)
        return None


class _Pauses:
    """The pauses between the tries of one call of the guard, and the end of them."""

    def __init__(self) -> None:
        self._clock = BootClock()
        self._end = self._clock.now() + _LONGEST_CALL
        self._pause = _FIRST_PAUSE

    @property
    def over(self) -> bool:
        """True if the time of the call is over."""
        return self._clock.now() > self._end

    async def sleep(self) -> None:
        """Wait for a moment, each time for a longer one."""
        await asyncio.sleep(self._pause * JITTER.uniform(0.5, 1.0))
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)
