"""
Functions that must be called under a lock.

    @holding("accounts/{account_id}")
    async def withdraw(account_id: int, cents: int) -> None: ...

Locks are not reentrant, because child tasks inherit the context of their parent: "the same owner again" would be two
tasks at once. So a function that needs its caller's lock declares that, and does not take the lock.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

from fencing_sdk._lease import innermost
from fencing_sdk._name_template import NameTemplate
from fencing_sdk._values.claim import check_name
from fencing_sdk.errors import ConfigurationError, shown

P = ParamSpec("P")
R = TypeVar("R")


def holding(name: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """
    Decorate a function that must be called under the lock *name*: every call looks for its lease first.

    For plain functions, ``async def`` functions and methods. The check is made when the body is about to begin,
    so it refuses a coroutine that was made under the lock and awaited after it. Each use of
    `current_token` in the body looks again.

    The lock is found by its name, whichever client holds it: a block ``async with``, in this task or in one
    that has started this task. A plain handle (``await lock.acquire()``) is not found.

    Args:
        name: The lock's name, with placeholders for the call's arguments, as for `LockClient.locking`.

    Raises:
        ConfigurationError: at decoration, when a placeholder is not a parameter, or the function is a generator,
            whose body runs later, bit by bit. When called, when the arguments do not make a valid name.
        NoLeaseError: when called, there is no such lock around the call.
        LeaseLostError: when called, there is one, and its lease is over.
    """
    check_name(name)

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        given: object = function
        if not callable(given) or isinstance(given, type):
            msg = f"holding() decorates functions, not {shown(function)}"
            raise ConfigurationError(msg)
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            msg = (
                f"holding() cannot decorate a generator, {shown(function)}: its body runs later, bit by bit; "
                "call current_lease(name).check() in the body, after each yield"
            )
            raise ConfigurationError(msg)
        template = NameTemplate(name, function)

        def check(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            innermost(template.fill(args, kwargs)).check()

        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def checked_when_awaited(*args: P.args, **kwargs: P.kwargs) -> object:
                check(args, kwargs)
                return await function(*args, **kwargs)

            return cast("Callable[P, R]", checked_when_awaited)

        @functools.wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            check(args, kwargs)
            return function(*args, **kwargs)

        return checked

    return decorate
