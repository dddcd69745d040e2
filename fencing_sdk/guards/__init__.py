"""
The resource's side: guards that refuse a stale token where the write happens.

    memory.py   MemoryGuard: a resource within this process
    sql/        SqlGuard, FenceColumn: in the caller's own transaction
    redis/      RedisGuard: check and commands in one script
    etcd.py     EtcdGuard: check and operations in one transaction
    kahuna.py   KahunaGuard: fence and data in one value, replaced by revision
    files.py    FileGuard: the token in the file name

Nothing here knows locks, leases or backends: a guard meets them in the token alone. The one decision of every guard:
may a write with this token go on?

    the resource has no fence            yes; the token is the fence
    higher than the fence                yes; the token is the fence
    equal, and no two holders known      yes; a holder that was unknown is remembered
    equal, from another holder           no: two grants shared a number
    lower than the fence                 no: the lock has gone to a later holder

The guard must keep the fence unchanged until it has acted on the answer.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from fencing_sdk._values.claim import check_name
from fencing_sdk._values.clock import BootClock
from fencing_sdk._values.loop_owner import Uncopied
from fencing_sdk._values.observers import Observer, Observers
from fencing_sdk._values.token import Token, check_token, conflicting
from fencing_sdk.errors import ConfigurationError, StaleTokenError, shown
from fencing_sdk.events import FenceRaised, stale_rejected

__all__ = ["admitted"]


def admitted(resource: str, token: int, fence: Token | None) -> Token:
    """
    Return the fence to remember when *token* writes to a resource whose fence is *fence*.

    For guards of your own. Keep what it returns in the same atomic step as the write, holder included.

    Raises:
        StaleTokenError: the token is lower, or equal and another holder's.
        ConfigurationError: *resource* or *token* is not one.
    """
    resource, token = check_name(resource, parameter="resource"), check_token(token)
    if fence is None or token > fence:
        return token
    if token < fence or conflicting(token, fence):
        raise refusal(resource, token, fence)
    return fence if token.holder is None else token


def is_unchanged(fence: Token, before: Token | None) -> bool:
    """Return whether a *fence* that `admitted` returned is what the resource has: there is nothing to write."""
    return before is not None and (fence, fence.holder) == (before, before.holder)


def check_tokens(tokens: object) -> dict[str, Token]:
    """
    Return the token of each resource, sorted by the resources as every guard sorts them: by their bytes.

    Raises:
        ConfigurationError: it is not a mapping of such, or is an empty one.
    """
    if not isinstance(tokens, Mapping) or not tokens:
        msg = f"tokens must be a mapping of resources to their tokens, such as held.tokens, not {shown(tokens)}"
        raise ConfigurationError(msg)
    checked = {check_name(resource, parameter="resource"): check_token(token) for resource, token in tokens.items()}
    return dict(sorted(checked.items()))


def check_token_of(resource: str, token: int) -> dict[str, Token]:
    """Do the same for one *resource*."""
    return {check_name(resource, parameter="resource"): check_token(token)}


def refusal(resource: str, token: Token, fence: Token) -> StaleTokenError:
    """The error that refuses *token* because of *fence*."""
    return StaleTokenError(resource, int(token), int(fence), conflict=token == fence)


class Reports:
    """Reports to a guard's observers what it refused and accepted, and which fence it raised."""

    __slots__ = ("_clock", "_observers")

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._observers = Observers(observers)
        self._clock = BootClock()

    @contextmanager
    def of_verdict(self, tokens: int | Mapping[str, int]) -> Iterator[None]:
        """
        Report the `StaleTokenError` that leaves the body, if one does, and count the tokens if the body ends.

        *tokens* are those by resource. A `FenceColumn`, which has no resources, gives its token, which is not counted.
        """
        try:
            yield
            if isinstance(tokens, Mapping):
                for resource in tokens:
                    self._observers.measure("accepted", resource, tokens[resource])
        except StaleTokenError as error:
            token = tokens.get(error.resource) if isinstance(tokens, Mapping) else tokens
            now, holder = self._clock.now(), token.holder if isinstance(token, Token) else None
            self._observers.emit(stale_rejected(error, name=error.resource, at=now, holder=holder))
            raise

    def raised(self, tokens: Mapping[str, Token]) -> None:
        """Report that every token below that of its resource is refused from now on."""
        if self._observers:
            for resource, token in tokens.items():
                now, holder = self._clock.now(), token.holder
                self._observers.emit(FenceRaised(name=resource, at=now, holder=holder, token=token, resource=resource))


class StoreGuard(Uncopied, ABC):
    """A guard with connections to a store, which the end of ``async with`` closes."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._reports = Reports(observers)

    @abstractmethod
    async def aclose(self) -> None:
        """Close the connections. The next call opens new ones: then close the guard again."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()


_PREFIX = re.compile(r"[!-~]{1,256}")


def check_place(url: object, prefix: object, *, schemes: str, example: str) -> None:
    """Refuse a *url* with options, and a *prefix* that cannot begin a key."""
    if not isinstance(url, str) or not re.fullmatch(rf"({schemes})://[^\x00-\x1f\x7f?#]+", url):
        msg = f"url must look like {example!r}, without a query; pass options as arguments"
        raise ConfigurationError(msg)
    if not isinstance(prefix, str) or not _PREFIX.fullmatch(prefix):
        msg = f"prefix must be 1 to 256 printable ASCII characters without spaces, got {shown(prefix)}"
        raise ConfigurationError(msg)
