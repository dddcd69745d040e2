"""
Locks in a Kahuna cluster, over its REST interface.

    connect("kahuna://kahuna1:2070,kahuna2:2070,kahuna3:2070")
    connect("kahuna+https://kahuna1:2071?ca=/etc/ssl/kahuna.pem")

Tokens: the server's own numbers, 0 first. Clock: that of the node which leads the lock's
partition. Waiters: they poll, because Kahuna wakes nobody.

    __init__.py     the face: what the answers mean for a claim
    _batch.py       many renewals side by side
    _calls.py       node after node until one answers
    _http.py        one request to one node
    _endpoints.py   where the nodes are
    _contract.py    what requests and answers say
    _options.py     what may be chosen
"""

from __future__ import annotations

import os
import random
import ssl
from collections.abc import Sequence
from urllib.parse import urlsplit

import anyio

from fencing_sdk._http.options import check_connections, read_numbers
from fencing_sdk._http.tls import tls_context
from fencing_sdk._values.claim import Claim, Grant, Held, Holder, Renewal
from fencing_sdk._values.clock import wall_seconds
from fencing_sdk._values.timing import seconds
from fencing_sdk.backends import take_options
from fencing_sdk.backends._shared.unanswered_requests import UnansweredRequests
from fencing_sdk.backends.kahuna._batch import renew_each
from fencing_sdk.backends.kahuna._calls import BACKEND, Calls
from fencing_sdk.backends.kahuna._contract import (
    GET_INFO,
    TRY_EXTEND,
    TRY_LOCK,
    TRY_UNLOCK,
    Answer,
    Kind,
    UnreadableError,
    Wording,
)
from fencing_sdk.backends.kahuna._endpoints import read_endpoints
from fencing_sdk.backends.kahuna._http import Http
from fencing_sdk.backends.kahuna._options import OPTIONS, check_durability
from fencing_sdk.errors import BackendError, BackendRefusedError, BackendUnavailableError, ConfigurationError

__all__ = ["KahunaBackend", "from_url"]

_PROBE = "fencing-sdk/open"
"""The lock that `KahunaBackend.open` asks about. Nobody has to hold it."""
_HINT_LIMIT = 0.5
"""Seconds that the question for the holder's remaining time may take; the refusal is known already."""
_HINT_PART = 1 / 8
"""Part of a ttl that it may take: a third of what the engine waits for an answer, which would then be lost."""
_SHORTEST_HINT = 0.05
"""Seconds below which waiting for an expiry would become spinning: clocks of two machines differ."""
_SPREAD = 0.05
"""Seconds over which those who wait for the same expiry are spread."""


class KahunaBackend:
    """
    A Kahuna cluster, 1.0.7 or later, as the lock service.

    Args:
        endpoints: The nodes, each as ``host:port``. Any of them may be asked for any lock.

        tls: Speak HTTPS.

        durability: ``"persistent"``, or ``"ephemeral"`` for locks that only the memory of one node
            knows: a restart or another leader gives the lock to somebody else while its holder
            still works, and tokens start again at 0, so that guards refuse everybody.

        ca: A file of the authorities that certificates are checked against, instead of the system's.

        ssl_context: For client certificates and the like, instead of *ca*.

        connect_timeout: Seconds after which a node that accepts no connection is given up for the next.

        connections: The most that are open at once, to all nodes together.

    Raises:
        ConfigurationError: an argument cannot work. Nothing is sent before the first call.
    """

    def __init__(
        self,
        endpoints: Sequence[str],
        *,
        tls: bool = False,
        durability: str = "persistent",
        ca: str | os.PathLike[str] | None = None,
        ssl_context: ssl.SSLContext | None = None,
        connect_timeout: float = 1.0,
        connections: int = 32,
    ) -> None:
        self._wording = Wording(check_durability(durability))
        self._width = max(1, check_connections(connections) // 2)  # so that a heartbeat leaves room for the others
        self._http = Http(
            tls=tls_context(tls=tls, scheme="kahuna+https", ca=ca, context=ssl_context),
            connect_timeout=seconds(connect_timeout, "connect_timeout", above=True),
            connections=connections,
        )
        self._calls = Calls(self._http, read_endpoints(endpoints, tls=tls))
        self._doubts = UnansweredRequests()

    async def open(self) -> None:
        """See `fencing_sdk.abc.SupportsOpen.open`."""
        await self._look("open", _PROBE)

    async def acquire(self, claim: Claim) -> Grant | Held:
        """See `fencing_sdk.abc.Backend.acquire`."""
        doubtful = self._doubts.begin(claim.owner)
        answer = await self._calls.ask("acquire", TRY_LOCK, self._wording.of_claim(claim))
        if answer.kind is Kind.LOCKED:
            return await self._grant(claim, answer, doubtful=doubtful)
        if answer.kind is Kind.BUSY and not answer.after_loss:
            if not (doubtful or answer.retried):
                self._doubts.end(claim.owner)
            return Held(await self._hint(claim))
        raise _unsettled(answer, "acquire")

    async def _grant(self, claim: Claim, answer: Answer, *, doubtful: bool) -> Grant:
        """
        Make a grant of a yes.

        Kahuna repeats a grant without prolonging it, and does not say that it is a repetition. So
        where an earlier request of this claim may have been the one that was granted, the ttl is
        restarted here: nobody knows since when it has been running.
        """
        try:
            token = answer.token
        except UnreadableError as error:
            raise BackendUnavailableError(BACKEND, "acquire", str(error)) from error
        if doubtful:
            await self._restart(claim)
        self._doubts.end(claim.owner)
        return Grant(token, restarted=doubtful)

    async def _restart(self, claim: Claim) -> None:
        try:
            outcome = await self._extend("acquire", claim)
        except BackendRefusedError as error:  # there is a grant, so whoever gives up must release
            raise BackendUnavailableError(BACKEND, "acquire", error.detail) from error
        if outcome is not Renewal.RENEWED:
            raise BackendUnavailableError(BACKEND, "acquire", "the grant of an earlier try has ended meanwhile")

    async def renew(self, claims: Sequence[Claim]) -> Sequence[Renewal]:
        """See `fencing_sdk.abc.Backend.renew`."""
        if len(claims) > 1:
            return await renew_each(claims, self._renew, width=self._width)
        return [await self._renew(claim) for claim in claims]

    async def _renew(self, claim: Claim) -> Renewal:
        return await self._extend("renew", claim)

    async def _extend(self, operation: str, claim: Claim) -> Renewal:
        answer = await self._calls.ask(operation, TRY_EXTEND, self._wording.of_claim(claim))
        outcome = _RENEWALS.get(answer.kind)
        if outcome is None:
            raise _unsettled(answer, operation)
        return outcome

    async def release(self, claim: Claim) -> None:
        """See `fencing_sdk.abc.Backend.release`."""
        answer = await self._calls.ask("release", TRY_UNLOCK, self._wording.of_release(claim))
        if answer.kind not in _RELEASED:
            raise _unsettled(answer, "release")

    async def inspect(self, name: str) -> Holder | None:
        """See `fencing_sdk.abc.Backend.inspect`."""
        return await self._look("inspect", name)

    async def _look(self, operation: str, name: str) -> Holder | None:
        answer = await self._calls.ask(operation, GET_INFO, self._wording.of_name(name))
        if answer.kind is Kind.LOCK_DOES_NOT_EXIST:
            return None
        if answer.kind is not Kind.GOT:
            raise _unsettled(answer, operation)
        try:
            return answer.holder(name, wall_seconds())
        except UnreadableError as error:
            raise BackendUnavailableError(BACKEND, operation, str(error)) from error

    async def _hint(self, claim: Claim) -> float | None:
        """Seconds that the holder has left, as far as that can be found out soon."""
        holder = None
        with anyio.move_on_after(min(_HINT_LIMIT, claim.ttl * _HINT_PART)):
            try:
                holder = await self._look("acquire", claim.name)
            except BackendError:
                return None
        return None if holder is None else max(_SHORTEST_HINT, holder.remaining) + random.uniform(0, _SPREAD)

    async def aclose(self) -> None:
        """Close the connections. Grants stay until they are released or expire."""
        await self._http.aclose()


_RENEWALS = {
    Kind.EXTENDED: Renewal.RENEWED,
    Kind.LOCK_DOES_NOT_EXIST: Renewal.REFUSED,
    Kind.INVALID_OWNER: Renewal.TAKEN_OVER,
}
_RELEASED = {Kind.UNLOCKED, Kind.LOCK_DOES_NOT_EXIST, Kind.INVALID_OWNER}


def _unsettled(answer: Answer, operation: str) -> BackendError:
    """Make an error of an answer that settles nothing."""
    if answer.kind is Kind.INVALID_INPUT and not (answer.after_loss or answer.retried):
        return BackendRefusedError(BACKEND, operation, "InvalidInput; is this a Kahuna older than 1.0.7?")
    word = "".join(part.capitalize() for part in answer.kind.name.split("_"))
    lost = ", and an earlier request may still be carried out" if answer.after_loss else ""
    return BackendUnavailableError(BACKEND, operation, f"the answer was {word}{lost}")


def from_url(url: str, **options: object) -> KahunaBackend:
    """
    Make a backend for ``kahuna://host:2070,host:2070`` or ``kahuna+https://host:2071``.

    Options: ``durability``, ``ca``, ``ssl_context``, ``connect_timeout``, ``connections``.

    Raises:
        ConfigurationError: the URL names no node, or an option is unknown or cannot work.
    """
    chosen = read_numbers(take_options(url, options, OPTIONS))
    parts = urlsplit(url)
    if parts.path not in {"", "/"}:
        msg = "url has a path, which Kahuna does not have; write kahuna://host:port,host:port"
        raise ConfigurationError(msg)
    endpoints = parts.netloc.split(",")
    return KahunaBackend(endpoints, tls=parts.scheme == "kahuna+https", **chosen)  # type: ignore[arg-type]
