"""
The value of a resource: how fence and data are written into it, and how it is replaced by revision, once or never.

    fencing/1 34;holder="9f8a01c2" 5f1d0c77a2b94e60<LF>the data, as they are

The first line is ASCII: the layout, the token as in a header, and a random number of the write, by which a guard knows
its own. The data begin behind the first line feed. Without a line feed there is a fence and no data yet.

There are three outcomes of a replacement:

1. It is done.
2. Another write was first.
3. It is unknown, because an answer was lost or leaves it open. Then the value is read. The number of the write that
   stands in it shows whether this write was carried out, can still be, or never will be.

However late a request is carried out: its condition holds only as long as no other write was accepted.
"""

from __future__ import annotations

import asyncio
import json
import re
from base64 import b64decode, b64encode
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum, unique
from typing import NamedTuple

from fencing_sdk._http.endpoints import Endpoint, Endpoints, read_endpoints
from fencing_sdk._http.node_race import PATIENCE, NodeRace
from fencing_sdk._http.outcomes import RequestFailedError, RequestOutcome, UnreadableAnswerError, any_unknown, to_json
from fencing_sdk._kahuna import NodeClient, rules_for
from fencing_sdk._values.clock import JITTER, BootClock
from fencing_sdk._values.token import Token, format_token, parse_written
from fencing_sdk.errors import BackendError, BackendRefusedError, BackendUnavailableError, ConfigurationError, shown

GUARD = "KahunaGuard"
_SET, _GET = "/v1/kv/try-set", "/v1/kv/try-get"
_PERSISTENT = 1
_IF_ABSENT, _IF_REVISION = 9, 33  # to set, together with the condition
LATEST = -1
"""The number that asks for the present revision. Without a number, 0 is read: the oldest value."""


@unique
class _AnswerType(IntEnum):
    SET = 0
    NOT_SET = 1
    GOT = 3
    INVALID_INPUT = 100
    MISSING = 103
    OPEN = -1
    """Any other type, such as 99 (Errored) or 101 (MustRetry): it leaves open what was done."""


_TYPES = {type_.value: type_ for type_ in _AnswerType if type_ is not _AnswerType.OPEN}


class UnreachedError(BackendUnavailableError):
    """No node could be reached, so nothing was done."""


class SetOutcome(IntEnum):
    """What became of a conditional write."""

    DONE = 0
    NOT_SET = 1
    """The condition did not hold, and no earlier request of this call can have been carried out."""
    UNKNOWN = 2


@dataclass(frozen=True, slots=True)
class StoredValue:
    """A value as it is stored."""

    value: bytes
    revision: int
    expires: bool


@dataclass(frozen=True, slots=True)
class ValueAnswer:
    """An answer that could be read."""

    type: _AnswerType
    fields: dict[str, object]

    @classmethod
    def read(cls, body: bytes, _: str | None = None) -> ValueAnswer:
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
        return cls(_TYPES.get(code, _AnswerType.OPEN), fields)

    def stored(self) -> StoredValue:
        """Return the value that was got, which has to come with its revision and its expiry."""
        text, revision, expires = (self.fields.get(name) for name in ("value", "revision", "expires"))
        if type(revision) is not int or revision < 0 or not isinstance(expires, dict):
            msg = "the answer has a value without its revision or its expiry"
            raise UnreadableAnswerError(msg)
        try:
            value = b64decode(text if isinstance(text, str) else "!", validate=True)
        except ValueError as error:
            msg = "the answer has a value that is not base64"
            raise UnreadableAnswerError(msg) from error
        return StoredValue(value, revision, expires=bool(expires.get("l")))


def read_nodes(texts: object, *, tls: bool) -> Endpoints:
    """Read the address of each node."""
    return read_endpoints(texts, rules_for(_SET, _GET), tls=tls)


class KahunaValues:
    """
    The requests of one guard.

    All of them may be sent to several nodes, carried out twice, and carried out late: a write has a condition that
    holds once at most.
    """

    def __init__(self, nodes: NodeClient[ValueAnswer], endpoints: Endpoints) -> None:
        self._nodes = nodes
        self._endpoints = endpoints

    async def get(self, operation: str, key: str, revision: int = LATEST) -> StoredValue | None:
        """
        The value of *key* now, or at *revision*; None where there is none.

        Raises:
            UnreachedError: no node could be reached.
            BackendUnavailableError: no node answered.
            BackendRefusedError: Kahuna rejects the request.
        """
        body = {"key": key, "revision": revision, "durability": _PERSISTENT}
        answer, _ = await self._ask(operation, _GET, body, key)
        if answer.type is _AnswerType.MISSING:
            return None
        if answer.type is not _AnswerType.GOT:
            raise _unexpected(operation, answer)
        try:
            return answer.stored()
        except UnreadableAnswerError as error:
            raise BackendUnavailableError(GUARD, operation, str(error)) from error

    async def replace(self, operation: str, key: str, revision: int | None, value: bytes) -> SetOutcome:
        """
        Write *value* if *key* is at *revision*, or, with None, if it does not exist.

        Raises:
            BackendRefusedError: Kahuna rejects the request, and nothing was written.
        """
        body: dict[str, object] = {"key": key, "value": b64encode(value).decode(), "durability": _PERSISTENT}
        condition = {"flags": _IF_ABSENT} if revision is None else {"flags": _IF_REVISION, "compareRevision": revision}
        try:
            answer, earlier_unknown = await self._ask(operation, _SET, {**body, "expiresMs": 0, **condition}, key)
        except BackendUnavailableError:
            return SetOutcome.UNKNOWN
        if answer.type is _AnswerType.SET:
            return SetOutcome.DONE
        if earlier_unknown:
            return SetOutcome.UNKNOWN
        if answer.type is not _AnswerType.NOT_SET:
            raise _unexpected(operation, answer)
        return SetOutcome.NOT_SET

    async def _ask(self, operation: str, path: str, body: dict[str, object], key: str) -> tuple[ValueAnswer, bool]:
        """Ask the node that answered last for *key* first. Return also whether another request may be carried out."""
        payload = to_json(body)

        async def ask(endpoint: Endpoint) -> ValueAnswer:
            answer = await self._nodes.post(endpoint.urls[path], payload)
            if answer.type is _AnswerType.OPEN:
                detail = f"the answer was of type {answer.fields['type']}"
                raise RequestFailedError(RequestOutcome.UNKNOWN, detail, again=True)
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

    async def aclose(self) -> None:
        """Close the connections; the next request opens new ones."""
        await self._nodes.aclose()


def _error(operation: str, failures: Sequence[RequestFailedError]) -> BackendError:
    """Refused only if every node has rejected the request; without a connection only if none may have received it."""
    decisive = next((failure for failure in failures if failure.outcome is not RequestOutcome.REJECTED), failures[0])
    if decisive.outcome is RequestOutcome.REJECTED:
        return BackendRefusedError(GUARD, operation, decisive.detail)
    kind = BackendUnavailableError if any_unknown(failures) else UnreachedError
    return kind(GUARD, operation, decisive.detail)


def _unexpected(operation: str, answer: ValueAnswer) -> BackendError:
    if answer.type is _AnswerType.INVALID_INPUT:
        return BackendRefusedError(GUARD, operation, "Kahuna does not accept the request (InvalidInput)")
    return BackendUnavailableError(GUARD, operation, f"the answer was of type {answer.type:d}")


_FIRST_LINE = re.compile(rb"fencing/1 ([0-9a-z;=\"]{1,100}) ([0-9a-f]{16})")


class ForeignValueError(ValueError):
    """The value was written by another program."""


@dataclass(frozen=True, slots=True)
class FencedValue:
    """A fence, and the data that it protects."""

    fence: Token
    data: bytes | None
    """None until the first write."""
    write: str
    """The number of the write."""

    def to_bytes(self) -> bytes:
        """Write it in the layout."""
        line = f"fencing/1 {format_token(self.fence)} {self.write}".encode("ascii")
        return line if self.data is None else line + b"\n" + self.data

    @classmethod
    def read(cls, value: bytes) -> FencedValue:
        """Read the layout. A *value* of another layout is a `ForeignValueError`."""
        line, newline, data = value.partition(b"\n")
        match = _FIRST_LINE.fullmatch(line)
        if match is None:
            raise ForeignValueError
        try:
            fence = parse_written(match[1].decode())
        except ConfigurationError as error:
            raise ForeignValueError from error
        return cls(fence, data if newline else None, match[2].decode())


_FIRST_PAUSE, _LONGEST_PAUSE = 0.002, 0.25
_OLDER = 4
"""Revisions that are looked at below the present one, where the first write of a key may have been replaced at once."""


class Revision(NamedTuple):
    """What a resource has, and the revision of that; None and None if it has nothing yet."""

    value: FencedValue | None
    number: int | None

    def is_write(self, value: FencedValue) -> bool:
        """Return whether this is the very write of *value*."""
        return self.value is not None and self.value.write == value.write


class Pauses:
    """The pauses between the tries of one call of the guard, and the end of them."""

    def __init__(self, limit: float) -> None:
        self._clock = BootClock()
        self._end = self._clock.now() + limit
        self._pause = _FIRST_PAUSE

    @property
    def over(self) -> bool:
        """True if the time of the call is over."""
        return self._clock.now() > self._end

    async def sleep(self) -> None:
        """Wait for a moment, each time for a longer one."""
        await asyncio.sleep(self._pause * JITTER.uniform(0.5, 1.0))
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)


async def read_revision(
    values: KahunaValues, operation: str, key: str, pauses: Pauses, number: int = LATEST, *, for_write: bool = True
) -> Revision:
    """
    Read what a resource has now, or at the revision *number*. Try again after no answer.

    A healthy server gives no answer to a read (MustRetry) while it replicates another write of the same value. Where
    no node can be reached, a write waits for one, and a read that is not *for_write* fails at once.

    Raises:
        BackendUnavailableError: no node has answered until the end of *pauses*.
        BackendRefusedError: another program has written the value.
    """
    while True:
        try:
            found = await values.get(operation, key, number)
        except BackendUnavailableError as error:
            if pauses.over or (isinstance(error, UnreachedError) and not for_write):
                raise
        else:
            if found is None:
                return Revision(None, None)
            with suppress(ForeignValueError):
                if not found.expires:  # the guard writes none that expires: the fence would go with it
                    return Revision(FencedValue.read(found.value), found.revision)
            detail = f"the value of {shown(key)} was written by another program; set another prefix"
            raise BackendRefusedError(GUARD, operation, detail)
        await pauses.sleep()


class Replacement:
    """One write: *value* in the place of *before*."""

    def __init__(
        self,
        values: KahunaValues,
        operation: str,
        key: str,
        pauses: Pauses,
        *,
        before: Revision,
        value: FencedValue,
    ) -> None:
        self._values = values
        self._operation = operation
        self._key = key
        self._pauses = pauses
        self._before = before.number
        self._value = value
        self._doubtful = False
        """An earlier request of this write may have been carried out, or may still be."""

    async def run(self) -> bool:
        """
        Return whether it is done; False: another write was first, and this one never will be done.

        Raises:
            BackendUnavailableError: that is not known.
            BackendRefusedError: Kahuna rejects the request, and nothing was written.
        """
        while True:
            try:
                done = await self._try()
            except BackendRefusedError as error:
                if self._doubtful:
                    raise BackendUnavailableError(GUARD, self._operation, error.detail) from error
                raise
            if done is not None:
                return done
            if self._pauses.over:
                raise BackendUnavailableError(GUARD, self._operation, "no node says whether the value was written")
            await self._pauses.sleep()

    async def _try(self) -> bool | None:
        """Send the request; None: the outcome is unknown, and the same request may be sent again."""
        outcome = await self._values.replace(self._operation, self._key, self._before, self._value.to_bytes())
        if outcome is SetOutcome.DONE:
            return True
        if outcome is SetOutcome.NOT_SET and not self._doubtful:
            return False
        self._doubtful = True
        return await self._settle(await self._at(LATEST))

    async def _settle(self, present: Revision) -> bool | None:
        """
        Say by what is there whether the write was carried out.

        There are four cases:

        1. It is the write itself.
        2. It is what was there before: the write was not carried out, or not yet. (A node that is cut off may show
           an even older value.)
        3. It is the next revision, by another write: this one never will be carried out.
        4. It is a later one. An earlier revision shows this write, or the write that took its place.
        """
        if present.is_write(self._value):
            return True
        if present.number is None:
            return None
        if self._before is None:
            return await self._was_first(present.number)
        following = self._before + 1
        if present.number <= following:
            return False if present.number == following else None
        found = await self._at(following)
        if found.number is None:
            raise BackendUnavailableError(GUARD, self._operation, "the value was replaced before it could be read")
        return found.is_write(self._value)

    async def _was_first(self, present: int) -> bool:
        """Look for the first write of a key among the older revisions: its number is not known."""
        oldest = max(0, present - _OLDER)
        for number in range(present - 1, oldest - 1, -1):
            found = await self._at(number)
            if found.number is None:
                break
            if found.is_write(self._value):
                return True
        else:
            if not oldest:
                return False
        raise BackendUnavailableError(GUARD, self._operation, "the value was replaced before it could be read")

    async def _at(self, number: int) -> Revision:
        return await read_revision(self._values, self._operation, self._key, self._pauses, number)
