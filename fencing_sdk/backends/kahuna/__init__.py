"""
Locks in a Kahuna cluster, over its REST interface.

    connect("kahuna://kahuna1:2070,kahuna2:2070,kahuna3:2070")
    connect("kahuna+https://kahuna1:2071?ca=/etc/ssl/kahuna.pem")

Tokens: the server's own numbers, from 0. Clock: that of the node that leads the lock's partition.
Waiters: Kahuna wakes no waiter, so those of one client stand in line, and its head asks (`waiters`).

    __init__.py   the backend: what the answers mean for a claim
    waiters.py    how the waiters of one client share the asking, and until when its grants last
    cluster.py    asks node after node: requests, answers, errors

One request to one node, which the guard uses too, is `fencing_sdk._kahuna`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from typing import Any

from fencing_sdk._http.requests import CONNECTIONS, RequestFailedError, UnreadableAnswerError
from fencing_sdk._http.tls import tls_context
from fencing_sdk._kahuna import NodeClient, nodes_of_url
from fencing_sdk._values.claim import Busy, Claim, Grant, Holder, Renewal
from fencing_sdk._values.clock import wall_seconds
from fencing_sdk._values.loop_owner import Uncopied
from fencing_sdk._values.observers import logger
from fencing_sdk._values.tasks import move_on_after
from fencing_sdk._values.url import option_names
from fencing_sdk.abc import WaiterNotice
from fencing_sdk.backends import take_options
from fencing_sdk.backends._shared.polling_line import PlaceToPoll
from fencing_sdk.backends._shared.waiters import UnansweredRequests
from fencing_sdk.backends.kahuna.cluster import (
    BACKEND,
    GET_INFO,
    HEALTH,
    PLACEMENT,
    TRY_EXTEND,
    TRY_LOCK,
    TRY_UNLOCK,
    AnswerType,
    KahunaAnswer,
    KahunaCluster,
    body_of,
    error_of_answer,
    read_nodes,
    warnings_of,
)
from fencing_sdk.backends.kahuna.waiters import KahunaWaiters, KnownGrants
from fencing_sdk.errors import BackendError, BackendRefusedError, BackendUnavailableError

__all__ = ["KahunaBackend", "from_url"]

_PROBE = "fencing-sdk/open"
"""The lock that `KahunaBackend.open` asks about. It need not exist."""
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
_RENEWALS = {
    AnswerType.EXTENDED: Renewal.RENEWED,
    AnswerType.LOCK_DOES_NOT_EXIST: Renewal.REFUSED,
    AnswerType.INVALID_OWNER: Renewal.TAKEN_OVER,
}
_REFUSALS = {AnswerType.LOCK_DOES_NOT_EXIST, AnswerType.INVALID_OWNER}
"""Answers that a node which is cut off gives for a held lock too: not believed if our clock contradicts them."""


class KahunaBackend(Uncopied):
    """
    A Kahuna cluster, 1.0.7 or later, as the lock service.

    Args:
        endpoints: The nodes, each as ``host:port``. Any of them will do for any lock.

        tls: Speak HTTPS.

        ca: A file of the authorities that certificates are checked against, instead of the system's.

        cert: A file with a client certificate, and its key unless that is in *key*.

        connect_timeout: Seconds to wait for a node to accept the connection, before the next one gets the request.

    Raises:
        ConfigurationError: an argument cannot work. Nothing is sent before the first call.
    """

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
        self._unanswered = UnansweredRequests()
        self._grants = KnownGrants()
        self._waiters = KahunaWaiters(
            lambda claim: self._get_info("acquire", claim.name, ttl=claim.ttl), self._grants.left
        )

    async def open(self) -> None:
        """
        See `fencing_sdk.abc.SupportsOpen.open`. A cluster that starts is waited for, as long as opening may take.

        A warning is logged for each setting that puts exclusion at stake.
        """
        why = "no node answers"
        with move_on_after(_START) as starting:
            while True:
                try:
                    await self._get_info("open", _PROBE, ttl=_PROBE_TTL)
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

    async def acquire(self, claim: Claim) -> Grant | Busy:
        """See `fencing_sdk.abc.Backend.acquire`."""
        may_hold = self._unanswered.has(claim.owner) or self._grants.lives(claim)
        if not may_hold and (busy := await self._waiters.refusal(claim)) is not None:
            return busy
        with self._waiters.first_asks.asking(claim) as settle:
            outcome = await self._try_lock(claim)
            settle(outcome)
        return outcome

    async def _try_lock(self, claim: Claim) -> Grant | Busy:
        earlier_unanswered, sent_at = self._unanswered.begin(claim.owner), self._grants.now()
        answer = await self._cluster.ask("acquire", TRY_LOCK, body_of(claim.name, claim, ttl=claim.ttl), claim.name)
        if answer.type is AnswerType.LOCKED:
            grant = await self._granted(claim, answer, restart=earlier_unanswered)
            self._grants.keep(claim, sent_at)
            self._waiters.line.granted(claim, grant.token)
            return grant
        if answer.type is AnswerType.BUSY and not answer.earlier_unknown:
            if not (earlier_unanswered or answer.retried):
                self._unanswered.end(claim.owner)
            return await self._waiters.refused(claim)
        raise error_of_answer(answer, "acquire")

    def stand(self, claim: Claim, notify: WaiterNotice, *, hand_over: bool) -> PlaceToPoll:  # noqa: ARG002  (it hands nothing over)
        """See `fencing_sdk.abc.SupportsLine.stand`."""
        return self._waiters.line.stand(claim, notify)

    async def _granted(self, claim: Claim, answer: KahunaAnswer, *, restart: bool) -> Grant:
        """
        Read a grant, and restart its ttl where that may have begun earlier.

        Kahuna repeats a grant without prolonging it, and does not say that it is a repetition. If an earlier
        request of this claim is unanswered, that one may have been granted, at an unknown time.
        """
        try:
            token = answer.token
        except UnreadableAnswerError as error:
            raise BackendUnavailableError(BACKEND, "acquire", str(error)) from error
        if restart:
            try:
                outcome = await self._extend("acquire", claim)
            except BackendRefusedError as error:  # after a refusal the engine sends no release, but a grant exists
                raise BackendUnavailableError(BACKEND, "acquire", error.detail) from error
            if outcome is not Renewal.RENEWED:
                raise BackendUnavailableError(BACKEND, "acquire", "the grant of an earlier try has ended meanwhile")
        self._unanswered.end(claim.owner)
        return Grant(token, restarted=restart)

    async def renew(self, claims: Sequence[Claim]) -> Sequence[Renewal]:
        """See `fencing_sdk.abc.Backend.renew`."""
        if len(claims) > 1:
            return await renew_each(claims, partial(self._extend, "renew"), width=CONNECTIONS // 2)
        return [await self._extend("renew", claim) for claim in claims]

    async def _extend(self, operation: str, claim: Claim) -> Renewal:
        sent_at = self._grants.now()
        answer = await self._cluster.ask_widely(
            operation,
            TRY_EXTEND,
            body_of(claim.name, claim, ttl=claim.ttl),
            claim.name,
            ttl=claim.ttl,
            doubted=_REFUSALS if self._grants.lives(claim) else (),
        )
        outcome = _RENEWALS.get(answer.type)
        if outcome is None:
            raise error_of_answer(answer, operation)
        if outcome is Renewal.RENEWED:
            self._grants.keep(claim, sent_at)
        else:
            self._forget(claim)
        return outcome

    async def release(self, claim: Claim) -> Renewal | None:
        """See `fencing_sdk.abc.Backend.release`."""
        expired = self._grants.ended(claim)  # its owner may unlock it all the same
        answer = await self._cluster.ask_widely(
            "release",
            TRY_UNLOCK,
            body_of(claim.name, claim),
            claim.name,
            ttl=claim.ttl,
            doubted=_REFUSALS if self._grants.lives(claim) else (),
        )
        if answer.type is not AnswerType.UNLOCKED and answer.type not in _REFUSALS:
            raise error_of_answer(answer, "release")
        self._forget(claim)
        if answer.type is AnswerType.UNLOCKED:
            return Renewal.REFUSED if expired else None
        return None if answer.earlier_unknown or answer.retried else _RENEWALS[answer.type]

    def _forget(self, claim: Claim) -> None:
        self._grants.forget(claim)
        self._waiters.line.ended(claim)

    async def inspect(self, name: str) -> Holder | None:
        """See `fencing_sdk.abc.Backend.inspect`."""
        return await self._get_info("inspect", name)

    async def _get_info(self, operation: str, name: str, *, ttl: float = _LOOK) -> Holder | None:
        answer = await self._cluster.ask_widely(operation, GET_INFO, body_of(name), name, ttl=ttl)
        if answer.type is AnswerType.LOCK_DOES_NOT_EXIST:
            return None
        if answer.type is not AnswerType.GOT:
            raise error_of_answer(answer, operation)
        try:
            return answer.holder(name, wall_seconds())
        except UnreadableAnswerError as error:
            raise BackendUnavailableError(BACKEND, operation, str(error)) from error

    async def aclose(self) -> None:
        """Close the connections. Grants stay until they are released or expire."""
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


_WAIT_PART = 1 / 8
"""Part of a ttl after which renewals that are done wait no longer for the others: more than half an interval."""


async def renew_each(
    claims: Sequence[Claim], renew: Callable[[Claim], Awaitable[Renewal]], *, width: int
) -> Sequence[Renewal]:
    """
    Renew every claim by *renew*, at most *width* at a time. A renewal that fails stops no other.

    Raises:
        BackendError: no renewal has an outcome; this is the first error.
    """
    outcomes: dict[Claim, Renewal] = {}
    errors: list[BackendError] = []
    distinct = dict.fromkeys(claims)
    waiting = iter(distinct)  # shared: each worker takes the next one

    async def work(waiting: Iterator[Claim]) -> None:
        for claim in waiting:
            try:
                outcomes[claim] = await renew(claim)
            except BackendError as error:
                errors.append(error)

    loop = asyncio.get_running_loop()
    workers = [loop.create_task(work(waiting), name="fencing-store") for _ in range(min(width, len(distinct)))]
    try:
        await asyncio.wait(workers, timeout=_WAIT_PART * min(claim.ttl for claim in distinct))
        if not outcomes:  # there is no outcome to deliver in time
            await asyncio.wait(workers)
    finally:
        for worker in workers:
            worker.cancel()
        ends = await asyncio.gather(*workers, return_exceptions=True)
    for end in ends:
        if isinstance(end, Exception):
            raise end
    if errors and not outcomes:
        raise errors[0]
    return [outcomes.get(claim, Renewal.UNKNOWN) for claim in claims]
