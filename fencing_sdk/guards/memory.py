"""
A guard for a resource that lives in this process: a dict, a cache, a device handle.

One lock per guard makes check and write one step, and it is held by plain functions only: a body
that could await while it holds the lock would stop every other task of its event loop.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import ParamSpec, TypeVar

from fencing_sdk._values.claim import check_name
from fencing_sdk._values.token import Token
from fencing_sdk.errors import UsageError
from fencing_sdk.events import Observer
from fencing_sdk.guards import Reports, admitted, check_token_of, check_tokens

__all__ = ["MemoryGuard"]

P = ParamSpec("P")
R = TypeVar("R")


class MemoryGuard:
    """
    Fences for resources of this process, safe to use from any task and any thread.

    The fences live as long as the guard, one small entry for each resource it ever saw: a fence
    that was forgotten would let an old token in again.

    Not promised: anything about other processes, or about this one after a restart. A resource
    that outlives the process needs a guard that does.

    Args:
        observers: Callables that receive `StaleRejected` for every refusal and `FenceRaised` for
            every successful `raise_to`, in the thread where it happens.
    """

    def __init__(self, *, observers: Sequence[Observer] = ()) -> None:
        self._fences: dict[str, Token] = {}
        self._lock = threading.RLock()  # a guarded function may write to another resource of the same guard
        self._reports = Reports(observers)

    def write(self, resource: str, token: int, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """
        Check *token* and call ``function(*args, **kwargs)`` as one step; return what it returns.

        No other write and no `raise_to` of this guard comes in between, from any task or thread.
        They wait meanwhile, the event loop with them, so *function* should be short.

        Raises:
            StaleTokenError: the resource has seen a later token; *function* was not called.
            UsageError: *function* is a coroutine function: its writes would come after the check.
            ConfigurationError: *resource* or *token* is not one.
        """
        return self.write_all(check_token_of(resource, token), function, *args, **kwargs)

    def write_all(self, tokens: Mapping[str, int], function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """
        Check the token of each resource and call *function* as one step, as `write` does for one resource.

        *tokens* has the token of each resource, such as ``held.tokens`` of a `MultiLock`.

        Raises:
            StaleTokenError: one of the resources has seen a later token, and the error names it; *function* was not
                called, and no fence was raised.
            UsageError, ConfigurationError: as `write`.
        """
        if inspect.iscoroutinefunction(function):
            msg = "the guarded function must not be 'async def': it would write after the check; do the awaiting first"
            raise UsageError(msg)
        checked = check_tokens(tokens)
        with self._reports.of_verdict(checked), self._lock:
            self._admit(checked)
            result = function(*args, **kwargs)
        if inspect.isawaitable(result):
            if inspect.iscoroutine(result):
                result.close()
            msg = "the guarded function returned an awaitable, so it would write after the check; await first"
            raise UsageError(msg)
        return result

    def admit(self, resource: str, token: int) -> None:
        """
        Check *token* and remember it. The write is yours, and has to follow without an ``await``.

        For code that runs in one event loop alone: tasks take turns only at an ``await``, so check
        and write are one step as long as there is none in between. With threads, use `write`.

        Raises:
            StaleTokenError: the resource has seen a later token; do not write.
            ConfigurationError: *resource* or *token* is not one.
        """
        self.admit_all(check_token_of(resource, token))

    def admit_all(self, tokens: Mapping[str, int]) -> None:
        """
        Check the token of each resource and remember all of them, or none. As after `admit`, the writes follow at once.

        Raises:
            StaleTokenError: one of the resources has seen a later token, and the error names it; do not write.
            ConfigurationError: *tokens* is not a mapping of resources to tokens.
        """
        checked = check_tokens(tokens)
        with self._reports.of_verdict(checked), self._lock:
            self._admit(checked)

    async def raise_to(self, resource: str, token: int) -> None:
        """See `fencing_sdk.abc.Guard.raise_to`. Waits for a `write` that another thread is in."""
        checked = check_token_of(resource, token)
        self.admit_all(checked)
        self._reports.raised(checked)

    async def highest(self, resource: str) -> Token | None:
        """See `fencing_sdk.abc.Guard.highest`."""
        return self._fences.get(check_name(resource, parameter="resource"))

    def _admit(self, tokens: Mapping[str, Token]) -> None:
        self._fences |= {
            resource: admitted(resource, token, self._fences.get(resource)) for resource, token in tokens.items()
        }
