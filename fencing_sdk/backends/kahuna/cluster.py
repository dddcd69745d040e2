"""
One call to the cluster, whichever node answers it: what a request says, and what an answer means.

For Kahuna an owner is a sequence of bytes, which `get-info` shows. So the owner of a request is one text: the
owner id of the claim, followed by its label.

Every request may be repeated, because Kahuna gives the same owner the same grant. What a call does then:

1. The node that answered last for this lock comes first: which node serves is a matter of the lock. After a node that
   cannot be reached, or says MustRetry, the next one comes at once: MustRetry may go on for ever. After each round
   of all nodes there is a pause, because another request for this lock may be replicating.
2. All requests but draws (`KahunaCluster.ask_widely`) are also sent to the next node when there is no answer soon.
   Draws (`KahunaCluster.ask`) are not: a late grant must be known to the engine.
3. A node that is cut off from the others refuses what the majority would allow: a yes needs a quorum, a no does not.
   So if the caller does not believe a no, the cluster asks the other nodes for a second at most, and a yes wins.
   If one of them gives no answer, it may have said yes.

A request whose answer was lost may still be carried out; the answer of the next node has ``earlier_unknown`` set then,
because its "busy" does not mean that nothing was granted. The same holds for Errored: it was said of grants that were
made all the same.

An answer that is not an outcome becomes an error: `BackendRefusedError` if it is permanent *and* certainly took no
lock. Everything else is a `BackendUnavailableError`: the outcome is unknown until Kahuna answers another request.
"""

from __future__ import annotations

import asyncio
import json
import math
from base64 import b64decode, b64encode
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from email.utils import parsedate_to_datetime
from enum import IntEnum, unique

from fencing_sdk._http.nodes import PATIENCE, Endpoint, Endpoints, NodeRace, read_endpoints
from fencing_sdk._http.requests import RequestFailedError, RequestOutcome, UnreadableAnswerError, to_json
from fencing_sdk._kahuna import NodeClient, rules_for
from fencing_sdk._values.claim import LOCK, Claim, Seen, holder_of
from fencing_sdk._values.clock import JITTER
from fencing_sdk._values.token import TOKEN_LIMIT
from fencing_sdk.errors import BackendError, BackendRefusedError, BackendUnavailableError

TRY_LOCK = "/v1/locks/try-lock"
TRY_EXTEND = "/v1/locks/try-extend"
TRY_UNLOCK = "/v1/locks/try-unlock"
GET_INFO = "/v1/locks/get-info"
SET_VALUE = "/v1/kv/try-set"
GET_VALUE = "/v1/kv/try-get"

_PERSISTENT = 1
"""The durability of every request. Without one, Kahuna keeps the lock in the memory of one node (0, "ephemeral")."""

_MOMENT_LIMIT = 2**53
"""Milliseconds since 1970 that no expiry reaches: more is not a moment."""
_DATE_SPAN = 2.0
"""Seconds that a server's clock may be ahead of its Date header, which has whole seconds and is a second old."""


@unique
class AnswerType(IntEnum):
    """The ``type`` of an answer."""

    LOCKED = 0
    BUSY = 1
    EXTENDED = 2
    UNLOCKED = 3
    GOT = 4
    WAITING_FOR_REPLICATION = 10
    ERRORED = 99
    INVALID_INPUT = 100
    MUST_RETRY = 101
    LOCK_DOES_NOT_EXIST = 102
    INVALID_OWNER = 103
    ABORTED = 104


_TYPES = {type_.value: type_ for type_ in AnswerType}

VALUE_SET, VALUE_GOT, NO_VALUE = AnswerType.LOCKED, AnswerType.UNLOCKED, AnswerType.INVALID_OWNER
"""Meaning of the same numbers in answers about values."""
_SET, _LATEST = 1, -1


def body_of(name: str, owner: Claim | str | None = None, *, ttl: float = 0.0) -> bytes:
    """
    Write a request for information about *name*, to unlock it, or with a *ttl* to lock or extend it.

    Args:
        name: The lock.

        owner: The claim, or the owner as an answer wrote it.

        ttl: Seconds.
    """
    fields: dict[str, object] = {"resource": name, "durability": _PERSISTENT}
    if owner is not None:
        fields["owner"] = _owner_text(owner) if isinstance(owner, Claim) else owner
    if ttl:
        fields["expiresMs"] = _milliseconds(ttl)
    return to_json(fields)


def _owner_text(claim: Claim) -> str:
    return _base64(claim.owner if claim.label is None else f"{claim.owner}\0{claim.label}")


def _base64(text: str) -> str:
    return b64encode(text.encode("utf-8", "surrogatepass")).decode()


def _milliseconds(seconds: float) -> int:
    return math.ceil(seconds * 1000)


def body_to_set(key: str, text: str, ttl: float) -> bytes:
    """Write a request to keep *text* under *key* for *ttl* seconds."""
    value, expires = _base64(text), _milliseconds(ttl)
    return to_json({"key": key, "value": value, "durability": _PERSISTENT, "flags": _SET, "expiresMs": expires})


def body_to_get(key: str) -> bytes:
    """Write a request for the text under *key*."""
    return to_json({"key": key, "revision": _LATEST, "durability": _PERSISTENT})


@dataclass(frozen=True, slots=True)
class KahunaAnswer:
    """An answer, and the outcome of earlier tries of the same call."""

    type: AnswerType
    fields: dict[str, object]
    date: str | None = None
    """The Date header."""
    retried: bool = False
    """An earlier try of the same call was answered with `AnswerType.MUST_RETRY` or `AnswerType.ERRORED`."""
    earlier_unknown: bool = False
    """The outcome of an earlier try of the same call is unknown: it may still be carried out."""
    node: object = None
    """The node that answered."""

    @classmethod
    def read(cls, body: bytes, date: str | None = None) -> KahunaAnswer:
        """
        Read the body of an HTTP 200.

        Raises:
            UnreadableAnswerError: it is not JSON, or not what the contract says.
        """
        try:
            fields = json.loads(body)
        except (ValueError, RecursionError) as error:
            msg = "the answer is not JSON"
            raise UnreadableAnswerError(msg) from error
        if not isinstance(fields, dict):
            msg = "the answer is not a JSON object"
            raise UnreadableAnswerError(msg)
        code = fields.get("type")
        known = _TYPES.get(code) if isinstance(code, int) and not isinstance(code, bool) else None
        if known is None:
            msg = "the answer has no known type"
            raise UnreadableAnswerError(msg)
        return cls(known, fields, date)

    @property
    def hint(self) -> object:
        """The ``host:port`` of the node that leads the lock's partition, if the server names it, as newer ones do."""
        route = self.fields.get("route")
        return route.get("endpoint") if isinstance(route, dict) else None

    @property
    def token(self) -> int:
        """
        The fencing token; the first one of a name is 0.

        Raises:
            UnreadableAnswerError: the answer has no token.
        """
        token = self.fields.get("fencingToken")
        if isinstance(token, int) and not isinstance(token, bool) and 0 <= token < TOKEN_LIMIT:
            return token
        msg = "the answer has no fencing token from 0 to below 2**53"
        raise UnreadableAnswerError(msg)

    def remaining(self, wall: float) -> float:
        """
        Seconds until the holder's grant ends; *wall* is this host's clock, which the server's Date corrects.

        Raises:
            UnreadableAnswerError: the answer does not say.
        """
        expires = self.fields.get("expires")
        physical = expires.get("l") if isinstance(expires, dict) else None
        if isinstance(physical, int) and not isinstance(physical, bool) and 0 <= physical < _MOMENT_LIMIT:
            with suppress(ValueError, OverflowError):
                seen = parsedate_to_datetime(self.date or "").timestamp()  # in whole seconds
                wall = min(max(wall, seen), seen + _DATE_SPAN)
            return max(0.0, physical / 1000 - wall)
        msg = "the answer does not say when the grant ends"
        raise UnreadableAnswerError(msg)

    @property
    def text(self) -> str | None:
        """The text of a value, or None."""
        encoded = self.fields.get("value")
        with suppress(ValueError):
            return b64decode(encoded, validate=True).decode() if isinstance(encoded, str) else None
        return None

    @property
    def owner(self) -> str:
        """
        The owner of the lock, as other requests have to write it.

        Raises:
            UnreadableAnswerError: the answer does not say.
        """
        encoded = self.fields.get("owner")
        if isinstance(encoded, str) and encoded:
            with suppress(ValueError):
                b64decode(encoded, validate=True)
                return encoded
        msg = "the answer does not name the owner"
        raise UnreadableAnswerError(msg)

    def owner_and_label(self) -> tuple[str, str | None]:
        """
        The owner id, which is secret, and the label.

        Raises:
            UnreadableAnswerError: the answer does not say.
        """
        raw = b64decode(self.owner)
        try:
            owner, separator, label = raw.decode().partition("\0")
        except UnicodeDecodeError:  # a client of another kind: its owner ids are any bytes
            return raw.hex(), None
        return owner, label if separator else None

    def seen(self, wall: float) -> Seen:
        """
        The ticket that holds the lock.

        Raises:
            UnreadableAnswerError: the answer does not say.
        """
        owner, label = self.owner_and_label()
        return Seen(holder_of(owner), LOCK, self.token, None, self.remaining(wall), None, label)


BACKEND = "KahunaBackend"


def error_of_answer(answer: KahunaAnswer, operation: str) -> BackendError:
    """Make an error of an answer that is not one of the operation's outcomes."""
    if answer.type is AnswerType.INVALID_INPUT and not (answer.earlier_unknown or answer.retried):
        return BackendRefusedError(BACKEND, operation, "InvalidInput; is this a Kahuna older than 1.0.7?")
    type_name = "".join(part.capitalize() for part in answer.type.name.split("_"))
    unknown = ", and an earlier request may still be carried out" if answer.earlier_unknown else ""
    return BackendUnavailableError(BACKEND, operation, f"the answer was {type_name}{unknown}")


def error_of_failures(failures: Sequence[RequestFailedError], operation: str) -> BackendError:
    """Make an error of the failures of all nodes: refused only if every node has rejected the request."""
    decisive = next((failure for failure in failures if failure.outcome is not RequestOutcome.REJECTED), failures[0])
    text = decisive.sentence(operation)
    detail = text if len(failures) == 1 else f"none of {len(failures)} nodes: {text}"
    kind = BackendRefusedError if decisive.outcome is RequestOutcome.REJECTED else BackendUnavailableError
    error = kind(BACKEND, operation, detail)
    error.__cause__ = decisive.__cause__
    return error


HEALTH = "/v1/cluster/health"
PLACEMENT = "/v1/cluster/placement"

_RULES = rules_for(TRY_LOCK, TRY_EXTEND, TRY_UNLOCK, GET_INFO, SET_VALUE, GET_VALUE, HEALTH, PLACEMENT)


def read_nodes(texts: object, *, tls: bool) -> Endpoints:
    """
    Read the address of each node: ``host``, ``host:port`` or ``[address]:port``.

    Raises:
        ConfigurationError: there is no address, or one cannot be read.
    """
    return read_endpoints(texts, _RULES, tls=tls)


def warnings_of(cluster: dict[str, object]) -> Sequence[str]:
    """
    Return the settings of the *cluster*, as a node reports them, that put exclusion at stake, one sentence each.

    With a replication factor above 0 each lock is on a part of the nodes only: its authors' own tests saw two owners
    with one token, and tokens that went backwards. (No answer shows that there is no authentication.)
    """
    partitions = cluster.get("partitions")
    each = [entry for entry in partitions if isinstance(entry, dict)] if isinstance(partitions, list) else []
    factors = (cluster.get("replicationFactor"), *(partition.get("effectiveReplicationFactor") for partition in each))
    if max((factor for factor in factors if isinstance(factor, int)), default=0) <= 0:
        return []
    return ["replicationFactor is above 0, so two owners may get one token; set it to 0 on every node, or use guards"]


PAUSES = (0.002, 0.004, 0.008, 0.016, 0.032, 0.064)
"""Seconds before each further round while nodes cannot answer yet: another request is being replicated."""
_LONGEST_PAUSE = 0.1
_SOON_PART = 1 / 40
"""Part of a ttl after which a request without an answer is also sent to the next node, if that is less."""
_LATEST_PART = 1 / 10
"""Part of a ttl after which it is sent there although answers are usually slow."""
_PATIENCE_PART = 1 / 6
_LONGEST_PATIENCE = 2.0
"""
Part of a ttl, and the most seconds, for which a renewal or release is repeated while nodes cannot answer.

It is less than an interval, so that the engine learns why there is no answer. The engine then asks again.
"""
_DOUBT = 1.0
"""Seconds for asking the other nodes about a refusal that the caller does not believe."""
_USUALLY = 3
"""Times the usual time of an answer after which it is late: a slow cluster is not sent more than a fast one."""
_WEIGHT = 1 / 16

_NOT_YET = {AnswerType.MUST_RETRY, AnswerType.WAITING_FOR_REPLICATION}
"""A change of the lock is being replicated, or nothing can be; the second is what `get-info` says of it."""


class KahunaCluster:
    """Asks the nodes until one answers."""

    def __init__(self, nodes: NodeClient[KahunaAnswer], endpoints: Endpoints) -> None:
        self._nodes = nodes
        self._endpoints = endpoints
        self._usual_time = 0.0

    async def ask(self, operation: str, path: str, body: bytes, name: str) -> KahunaAnswer:
        """
        Ask one node after the other about the lock *name*.

        Raises:
            BackendUnavailableError: no node answered; the outcome is unknown.
            BackendRefusedError: every node rejected the request.
        """
        order = self._endpoints.in_turn(name)
        race = self._race(order, path, body, name, soon=None, pauses=_pauses(sum(PAUSES)))
        return await self._answer(operation, race)

    async def ask_widely(
        self, operation: str, path: str, body: bytes, name: str, *, ttl: float, doubted: Collection[AnswerType] = ()
    ) -> KahunaAnswer:
        """
        `ask` for requests that may be carried out twice and late: also ask the next node when no answer comes soon.

        Args:
            operation: What is done, for errors.

            path: The path of the request.

            body: The request.

            name: The lock, or the key.

            ttl: Seconds that its grant lasts: they decide what is soon.

            doubted: Answers that need the word of the other nodes too.
        """
        order = self._endpoints.in_turn(name)
        patience = min(_LONGEST_PATIENCE, ttl * _PATIENCE_PART)
        soon = min(max(min(PATIENCE, ttl * _SOON_PART), self._usual_time * _USUALLY), ttl * _LATEST_PART)
        race = self._race(order, path, body, name, soon=soon, pauses=_pauses(patience, longest=soon))
        answer = await self._answer(operation, race)
        if answer.type in doubted and len(order) > 1:
            limit = min(_DOUBT, patience)
            others = _Others(order, answer, doubted)
            race = self._race(
                others.order, path, body, name, soon=soon, pauses=_pauses(limit, longest=soon), others=others
            )
            with suppress(TimeoutError, BackendError):
                async with asyncio.timeout(limit):
                    return await self._answer(operation, race)
            return replace(answer, earlier_unknown=answer.earlier_unknown or race.earlier_unknown)
        return answer

    def _race(
        self,
        order: Sequence[Endpoint],
        path: str,
        body: bytes,
        name: str,
        *,
        soon: float | None,
        pauses: Iterator[float],
        others: _Others | None = None,
    ) -> NodeRace[KahunaAnswer]:
        async def ask(endpoint: Endpoint) -> KahunaAnswer:
            answer = await self._ask_node(endpoint, path, body, name)
            if others is not None:
                others.check(answer)
            return answer

        def leave(endpoint: Endpoint) -> None:
            if others is None or endpoint not in others.refusing:
                self._endpoints.mark_failed(endpoint)

        return NodeRace(order, ask, leave=leave, patience=soon, is_final=lambda _: False, pauses=pauses)

    async def _ask_node(self, endpoint: Endpoint, path: str, body: bytes, name: str) -> KahunaAnswer:
        """One request to one node; an answer that settles nothing is a failure after which another try helps."""
        sent_at = asyncio.get_running_loop().time()
        answer = await self._nodes.post(endpoint.urls[path], body)
        if answer.type in _NOT_YET:
            raise RequestFailedError(RequestOutcome.UNSENT, "the cluster cannot answer yet (MustRetry)", again=True)
        if answer.type is AnswerType.ERRORED:
            raise RequestFailedError(RequestOutcome.UNKNOWN, "the answer was Errored", again=True)
        self._usual_time += (asyncio.get_running_loop().time() - sent_at - self._usual_time) * _WEIGHT
        self._endpoints.mark_answered(endpoint, name, answer.hint)
        return replace(answer, node=endpoint)

    async def _answer(self, operation: str, race: NodeRace[KahunaAnswer]) -> KahunaAnswer:
        try:
            async with await self._nodes.pool.turn(operation):
                answer = await race.run()
        except RequestFailedError as failure:
            again = [each for each in race.failures if each.again]
            if again:  # the request may still be carried out, so what followed it is not a refusal
                last = failure if failure.outcome is RequestOutcome.REJECTED else again[-1]
                raise BackendUnavailableError(BACKEND, operation, last.detail) from failure
            error = error_of_failures(race.failures, operation)
            raise error from error.__cause__ or failure
        if not race.failures and not race.overtaken:
            return answer
        retried = any(failure.again for failure in race.failures)
        return replace(answer, retried=retried, earlier_unknown=race.earlier_unknown)


class _Others:
    """The nodes to ask about a no that the caller does not believe."""

    def __init__(self, order: Sequence[Endpoint], answer: KahunaAnswer, doubted: Collection[AnswerType]) -> None:
        self.order = [endpoint for endpoint in order if endpoint is not answer.node]
        self.refusing: set[object] = set()
        """Nodes that say no as well. They have not failed."""
        self._doubted = doubted

    def check(self, answer: KahunaAnswer) -> None:
        if answer.type in self._doubted:
            self.refusing.add(answer.node)
            raise RequestFailedError(RequestOutcome.REJECTED, "another no")


def _pauses(seconds: float, *, longest: float = _LONGEST_PAUSE) -> Iterator[float]:
    """The pauses between rounds: short at first, none longer than *longest*, and *seconds* in all."""
    pause = PAUSES[0]
    while seconds > 0:
        yield min(pause, seconds) * JITTER.uniform(0.5, 1.0)
        seconds -= pause
        pause = min(pause * 2, longest, _LONGEST_PAUSE)
