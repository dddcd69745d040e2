"""
Locks in a Kahuna cluster, over its REST interface.

    connect("kahuna://kahuna1:2070,kahuna2:2070,kahuna3:2070")
    connect("kahuna+https://kahuna1:2071?ca=/etc/ssl/kahuna.pem")

Tokens: the server's own numbers, from 0. Clock: that of the node that leads the lock's partition.
Waiters: Kahuna has no line and wakes no waiter, so each asks again.

A lock that is held is the one ticket of its name, and its number is the token plus 1. A draw is `try-lock`, a keep is
`try-extend`, and a give-back is `try-unlock`. What Kahuna does not have is added here:

1. It repeats a grant to the same owner without a fresh ttl, and does not say so. So a draw that may have found an older
   grant extends it.
2. A ticket that is given back for later is extended for the last time. This object answers for it from then on.
3. An operator's reason is a value beside the locks, which the owner looks for when it is refused.

    __init__.py   the verbs
    known.py      what this object knows of its own tickets
    cluster.py    asks node after node: requests, answers, errors

One request to one node, which the guard uses too, is `fencing_sdk._kahuna`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

from fencing_sdk._http.requests import CONNECTIONS, RequestFailedError, UnreadableAnswerError
from fencing_sdk._http.tls import tls_context
from fencing_sdk._kahuna import NodeClient, nodes_of_url
from fencing_sdk._values.claim import Busy, Claim, Gone, Place, Seen
from fencing_sdk._values.clock import JITTER, wall_seconds
from fencing_sdk._values.loop_owner import Uncopied
from fencing_sdk._values.observers import logger
from fencing_sdk._values.tasks import move_on_after, side_by_side
from fencing_sdk._values.url import option_names
from fencing_sdk.abc import Bell, Kept
from fencing_sdk.abc.line import REASON_TTL
from fencing_sdk.backends import take_options
from fencing_sdk.backends._shared.bells import bell_key
from fencing_sdk.backends.kahuna.cluster import (
    BACKEND,
    GET_INFO,
    GET_VALUE,
    HEALTH,
    PLACEMENT,
    SET_VALUE,
    TRY_EXTEND,
    TRY_LOCK,
    TRY_UNLOCK,
    VALUE_GOT,
    VALUE_SET,
    AnswerType,
    KahunaAnswer,
    KahunaCluster,
    body_of,
    body_to_get,
    body_to_set,
    error_of_answer,
    read_nodes,
    warnings_of,
)
from fencing_sdk.backends.kahuna.known import KnownTickets
from fencing_sdk.errors import BackendError, BackendRefusedError, BackendUnavailableError, UnsupportedError

__all__ = ["KahunaBackend", "from_url"]

_PROBE = "fencing-sdk/open"
"""The lock that `KahunaBackend.open` asks about. It need not exist."""
_ENDED = "fencing-sdk/ended/"
"""Before the digest of an owner: the key of the reason for which an operator has ended its ticket."""
_BODY_LIMIT = 65_536
"""Bytes of an answer. Kahuna's longest answer is an owner with its label, some 6 KiB."""
_PROBE_TTL = 2.0
"""The ttl that decides how long one such question takes: a part of it, so that what it says is known in time."""
_START = 4.4
"""Seconds that a cluster which starts is waited for: less than the engine gives to opening. A start needs 4 to 5."""
_START_PAUSE = 0.05
_WARNING_LIMIT = 0.5
"""Seconds that asking for the cluster's settings may take: opening does not fail without an answer."""
_LOOK = 10.0
"""The ttl that decides how long to ask nodes for the holder of a lock."""
_LOOK_LIMIT = 0.5
"""Seconds that another question after a refusal may take: the refusal is known already."""
_LOOK_PART = 1 / 8
"""Part of a ttl that it may take: a third of what the engine waits for an answer, which would then be lost."""
_SHORTEST_WAIT = 0.05
"""Seconds that a waiter waits for an expiry at least: clocks of two machines differ, and it must not spin."""
_SPREAD = 0.05
"""Seconds over which the tries of several waiters for the same expiry are spread."""
_WAITERS = 1_000
"""Owners that were refused, and do not look for the end of the holder's grant again."""
_KEEP_PART = 1 / 8
"""Part of a ttl after which keeps that are done wait no longer for the others: more than half an interval."""
_PARK_PAUSE = 0.01
_REFUSALS = {AnswerType.LOCK_DOES_NOT_EXIST, AnswerType.INVALID_OWNER}
"""Answers that a node which is cut off gives for a held lock too: not believed if our clock contradicts them."""


class KahunaBackend(Uncopied):
    """
    A Kahuna cluster, 1.0.7 or later, as the lock service. It has no line and no bell, and cannot list its locks.

    Args:
        endpoints: The nodes, each as ``host:port``. Any of them will do for any lock.

        tls: Speak HTTPS.

        ca: A file of the authorities that certificates are checked against, instead of the system's.

        cert: A file with a client certificate, and its key unless that is in *key*.

        connect_timeout: Seconds to wait for a node to accept the connection, before the next one gets the request.

    Raises:
        ConfigurationError: an argument cannot work. Nothing is sent before the first call.
    """

    modes = frozenset({"lock"})
    rings = False

    def __init__(
        self,
        endpoints: Sequence[str],
        *,
        tls: bool = False,
        ca: str | os.PathLike[str] | None = None,
        cert: str | os.PathLike[str] | None = None,
        key: str | os.PathLike[str] | None = None,
        connect_timeout: float = 1.0,
    ) -> None:
        self._nodes = NodeClient(
            KahunaAnswer.read,
            body_limit=_BODY_LIMIT,
            tls=tls_context(tls=tls, scheme="kahuna+https", ca=ca, cert=cert, key=key),
            connect_timeout=connect_timeout,
        )
        self._endpoints = read_nodes(endpoints, tls=tls)
        self._cluster = KahunaCluster(self._nodes, self._endpoints)
        self._known = KnownTickets()
        self._refused: OrderedDict[str, None] = OrderedDict()
        self._keeping: Counter[str] = Counter()  # by owner

    async def open(self) -> None:
        """
        See `fencing_sdk.abc.SupportsOpen.open`. A cluster that starts is waited for, as long as opening may take.

        A warning is logged for each setting that puts exclusion at stake.
        """
        why = "no node answers"
        with move_on_after(_START) as starting:
            while True:
                try:
                    await self._look("open", _PROBE, ttl=_PROBE_TTL)
                    break
                except BackendUnavailableError as error:
                    why = error.detail
                    await asyncio.sleep(_START_PAUSE)
        if starting.cancelled_caught:
            detail = f"the cluster did not start within {_START:.2g} s: {why}"
            raise BackendUnavailableError(BACKEND, "open", detail)
        with move_on_after(_WARNING_LIMIT):
            for warning in await self.warnings():
                logger.warning("Kahuna: %s", warning)

    async def warnings(self) -> Sequence[str]:
        """Settings of the cluster that put exclusion at stake, as far as nodes report them."""
        cluster: dict[str, object] = {}
        for endpoint in self._endpoints.in_turn():
            with contextlib.suppress(RequestFailedError):
                for path in (HEALTH, PLACEMENT):
                    cluster |= await self._nodes.get(endpoint.urls[path])
                break
        return warnings_of(cluster)

    async def draw(self, claim: Claim, *, only_if_it_holds: bool = False) -> Place | Busy:  # noqa: ARG002  (no line)
        """See `fencing_sdk.abc.Backend.draw`: no ticket ever waits."""
        if await self._is_parked("acquire", claim):
            return Busy(self._known.left(claim.owner))
        may_be_old, sent_at = self._known.begin(claim.owner), self._known.now()
        answer = await self._cluster.ask("acquire", TRY_LOCK, body_of(claim.name, claim, ttl=claim.ttl), claim.name)
        if answer.type is AnswerType.BUSY and not answer.earlier_unknown:
            if not (may_be_old or answer.retried):
                self._known.refused(claim.owner)
            return Busy(await self._look_after(claim))
        if answer.type is not AnswerType.LOCKED:
            raise error_of_answer(answer, "acquire")
        if may_be_old:
            return await self._found(claim)
        place = _place_in(answer, "acquire")
        self._known.holds(claim.owner, sent_at, claim.ttl)
        return place

    async def _found(self, claim: Claim) -> Place:
        """Restart the ttl of a ticket that an earlier request of its owner may have drawn, at an unknown time."""
        try:
            place = await self._extend("acquire", claim)
        except BackendRefusedError as error:  # after a refusal the engine gives nothing back, but a ticket exists
            raise BackendUnavailableError(BACKEND, "acquire", error.detail) from error
        if isinstance(place, Gone):
            raise BackendUnavailableError(BACKEND, "acquire", "the grant of an earlier try has ended meanwhile")
        return place

    async def _look_after(self, claim: Claim) -> float | None:
        """Return the seconds until the holder's grant ends. A waiter asks once: it tries again long before that."""
        if claim.owner in self._refused:
            return None
        self._refused[claim.owner] = None
        if len(self._refused) > _WAITERS:
            self._refused.popitem(last=False)
        with move_on_after(min(_LOOK_LIMIT, claim.ttl * _LOOK_PART)), contextlib.suppress(BackendError):
            answer = await self._look("acquire", claim.name, ttl=claim.ttl)
            if answer is not None:
                return max(_SHORTEST_WAIT, _seen_in(answer, "acquire").remaining) + JITTER.uniform(0, _SPREAD)
        return None

    async def keep(self, tickets: Sequence[Kept]) -> Sequence[Place | Gone | None]:
        """
        See `fencing_sdk.abc.Backend.keep`: one request for each, of which a part is under way at a time.

        One without an answer stops no other, and the answers of the others are not lost with it.
        """
        if len(tickets) == 1:
            return [await self._keep(*tickets[0])]
        answers: dict[int, Place | Gone] = {}
        errors: list[BackendError] = []
        waiting = iter(enumerate(tickets))  # shared: each worker takes the next one

        async def work() -> None:
            for index, kept in waiting:
                try:
                    answers[index] = await self._keep(*kept)
                except BackendError as error:
                    errors.append(error)

        limit = _KEEP_PART * min((claim.ttl for claim, _ in tickets), default=0.0)
        works = [work() for _ in range(min(CONNECTIONS // 2, len(tickets)))]
        for failure in await side_by_side(works, patience=limit, enough=lambda: bool(answers)):
            raise failure
        if errors and not answers:
            raise errors[0]
        return [answers.get(index) for index in range(len(tickets))]

    async def _keep(self, claim: Claim, number: int) -> Place | Gone:
        if await self._is_parked("renew", claim):
            return Gone(taken=True)
        self._keeping[claim.owner] += 1
        try:
            place = await self._extend("renew", claim)
        finally:
            self._keeping[claim.owner] -= 1
            if not self._keeping[claim.owner]:
                del self._keeping[claim.owner]
        if isinstance(place, Place) and number not in {0, place.number}:
            return Gone(taken=True)
        return place if isinstance(place, Place) else await self._gone(claim, taken=place.taken)

    async def _extend(self, operation: str, claim: Claim, ttl: float = 0.0) -> Place | Gone:
        """Let a ticket live for exactly *ttl* seconds, or for the ttl of its claim and no shorter than it would."""
        sent_at = self._known.now()
        seconds = ttl or max(claim.ttl, self._known.left(claim.owner))
        answer = await self._cluster.ask_widely(
            operation,
            TRY_EXTEND,
            body_of(claim.name, claim, ttl=seconds),
            claim.name,
            ttl=claim.ttl,
            doubted=_REFUSALS if self._known.lives(claim.owner) else (),
        )
        if answer.type in _REFUSALS:
            return Gone(taken=answer.type is AnswerType.INVALID_OWNER)
        if answer.type is not AnswerType.EXTENDED:
            raise error_of_answer(answer, operation)
        place = _place_in(answer, operation)
        if not ttl:
            self._known.holds(claim.owner, sent_at, seconds)
        return place

    async def give_back(self, claim: Claim, *, after: float = 0.0) -> Gone | None:
        """See `fencing_sdk.abc.Backend.give_back`. After a lost answer it is unknown whether the ticket was there."""
        if await self._is_parked("release", claim):
            return None
        if after > 0:
            return await self._park(claim, after)
        was_held, lives = self._known.was_held(claim.owner), self._known.lives(claim.owner)
        answer = await self._cluster.ask_widely(
            "release",
            TRY_UNLOCK,
            body_of(claim.name, claim),
            claim.name,
            ttl=claim.ttl,
            doubted=_REFUSALS if lives else (),
        )
        if answer.type is AnswerType.UNLOCKED:
            self._known.forget(claim.owner)
            return Gone() if was_held and not lives else None  # a grant that has expired may be unlocked all the same
        if answer.type not in _REFUSALS:
            raise error_of_answer(answer, "release")
        if answer.earlier_unknown or answer.retried:
            self._known.forget(claim.owner)
            return None
        taken = answer.type is AnswerType.INVALID_OWNER
        return await self._gone(claim, taken=taken) if was_held else Gone(taken=taken)

    async def _park(self, claim: Claim, after: float) -> Gone | None:
        while self._keeping[claim.owner]:  # noqa: ASYNC110  (one carried out later would move the end)
            await asyncio.sleep(_PARK_PAUSE)
        sent_at = self._known.now()
        place = await self._extend("release", claim, after)
        if isinstance(place, Gone):
            return await self._gone(claim, taken=place.taken)
        self._known.park(claim.owner, sent_at + after)
        return None

    async def _is_parked(self, operation: str, claim: Claim) -> bool:
        """Return whether *claim* was given back here for later, and no operator has ended it meanwhile."""
        if not self._known.is_parked(claim.owner):
            return False
        look = await self._look(operation, claim.name)
        if look is not None and _seen_in(look, operation).holder == claim.holder:
            return True
        self._known.forget(claim.owner)
        return False

    async def _gone(self, claim: Claim, *, taken: bool) -> Gone:
        """Look for an operator's reason. It is found again while this object knows the ticket."""
        reason = None
        with move_on_after(min(_LOOK_LIMIT, claim.ttl * _LOOK_PART)), contextlib.suppress(BackendError):
            key = _ENDED + bell_key(claim.owner)
            answer = await self._cluster.ask_widely("renew", GET_VALUE, body_to_get(key), key, ttl=claim.ttl)
            reason = answer.text if answer.type is VALUE_GOT else None
        if reason is None:
            self._known.forget(claim.owner)
        return Gone(reason, taken)

    async def end(self, name: str, token: int, reason: str) -> bool:
        """See `fencing_sdk.abc.Backend.end`: Kahuna shows the owner, and so lets any client release its lock."""
        look = await self._look("revoke", name)
        if look is None:
            return False
        seen = _seen_in(look, "revoke")
        if seen.token != token:
            return False
        key = _ENDED + bell_key(look.owner_and_label()[0])
        body = body_to_set(key, reason, seen.remaining + REASON_TTL)
        noted = await self._cluster.ask_widely("revoke", SET_VALUE, body, key, ttl=_LOOK)
        if noted.type is not VALUE_SET:
            raise error_of_answer(noted, "revoke")
        answer = await self._cluster.ask_widely(
            "revoke", TRY_UNLOCK, body_of(name, look.owner), name, ttl=_LOOK, doubted=_REFUSALS
        )
        if answer.type in _REFUSALS and not answer.earlier_unknown:
            return False
        if answer.type is not AnswerType.UNLOCKED:
            raise error_of_answer(answer, "revoke")
        return True

    async def tickets(self, names: Sequence[str]) -> Sequence[Sequence[Seen]]:
        """See `fencing_sdk.abc.Backend.tickets`."""
        looks = [await self._look("inspect", name) for name in names]
        return [[] if look is None else [_seen_in(look, "inspect")] for look in looks]

    async def names(self, prefix: str, cursor: str | None, limit: int) -> tuple[Sequence[str], str | None]:  # noqa: ARG002
        """
        Refuse: Kahuna does not list its locks.

        Raises:
            UnsupportedError: always.
        """
        msg = f"{BACKEND} cannot list locks: Kahuna has no such request"
        raise UnsupportedError(msg)

    def listen(self, claim: Claim, bell: Bell) -> Callable[[], object]:  # noqa: ARG002  (it never rings)
        """See `fencing_sdk.abc.Backend.listen`."""
        return lambda: None

    async def _look(self, operation: str, name: str, *, ttl: float = _LOOK) -> KahunaAnswer | None:
        """Return the answer that shows the holder of *name*; None if it is free."""
        answer = await self._cluster.ask_widely(operation, GET_INFO, body_of(name), name, ttl=ttl)
        if answer.type is AnswerType.LOCK_DOES_NOT_EXIST:
            return None
        if answer.type is not AnswerType.GOT:
            raise error_of_answer(answer, operation)
        return answer

    async def aclose(self) -> None:
        """Close the connections. Tickets stay until they are given back or die."""
        await self._nodes.pool.aclose()


def from_url(url: str, **options: object) -> KahunaBackend:
    """
    Make a backend for ``kahuna://host:2070,host:2070`` or ``kahuna+https://host:2071``; see `KahunaBackend`.

    Raises:
        ConfigurationError: the URL names no node, or an option is unknown or cannot work.
    """
    chosen: dict[str, Any] = take_options(url, options, option_names(KahunaBackend, besides={"tls"}))
    endpoints, tls = nodes_of_url(url)
    return KahunaBackend(endpoints, tls=tls, **chosen)


def _place_in(answer: KahunaAnswer, operation: str) -> Place:
    try:
        return Place(answer.token, None, answer.token + 1)
    except UnreadableAnswerError as error:
        raise BackendUnavailableError(BACKEND, operation, str(error)) from error


def _seen_in(answer: KahunaAnswer, operation: str) -> Seen:
    try:
        return answer.seen(wall_seconds())
    except UnreadableAnswerError as error:
        raise BackendUnavailableError(BACKEND, operation, str(error)) from error
