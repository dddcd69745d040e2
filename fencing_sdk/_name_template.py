"""A lock name with placeholders that the arguments of a call fill in."""

from __future__ import annotations

import inspect
import string
from collections.abc import Callable, Mapping
from functools import partial
from types import FunctionType, MethodType
from typing import Any

from fencing_sdk._values.claim import LockName, check_name
from fencing_sdk.errors import ConfigurationError, shown


class NameTemplate:
    """
    ``"report/{report_id}"``, bound to the signature of a function.

    A placeholder names a parameter, and may go into it: ``{order.id}``, ``{row[0]}``, ``{day:%F}``.

    Raises:
        ConfigurationError: the template is malformed, or names what is not a parameter.
    """

    __slots__ = ("_function", "_hides", "_signature", "_template")

    def __init__(self, template: object, function: Callable[..., Any]) -> None:
        self._template = check_name(template)
        self._function = function
        self._signature = inspect.signature(function)
        plain = inspect.unwrap(function)
        looks_like_one = hasattr(plain, "__code__") and not isinstance(plain, (FunctionType, MethodType))
        self._hides = looks_like_one and not self._signature.parameters  # a coroutine function that mypyc compiled
        self._try_out(self._called())

    def _called(self) -> str:
        function = self._function
        while isinstance(function, partial) and not hasattr(function, "__qualname__"):
            function = function.func
        return str(getattr(function, "__qualname__", getattr(function, "__name__", shown(function))))

    def _try_out(self, function: str) -> None:
        """Fill the template in once, with arguments that go along with everything."""
        parameters = self._signature.parameters
        known = f"its parameters are: {', '.join(parameters) or 'none'}"
        try:
            if any("{" in (spec or "") for _, _, spec, _ in string.Formatter().parse(self._template)):
                problem = "a placeholder inside a format, by which an argument could fill the memory; " + known
            else:
                self._template.format(**dict.fromkeys(parameters, _AnyArgument()))
                return
        except KeyError as error:
            problem = f"a placeholder {shown(error.args[0])}, which {function} does not take; {known}"
            if self._hides:
                problem = (
                    f"a placeholder {shown(error.args[0])}, and {function} hides its parameters, as a coroutine "
                    "function that mypyc has compiled does; decorate one that is not compiled, and let it call this one"
                )
        except IndexError:
            problem = f"a placeholder without a name; {known}"
        except ValueError as error:
            msg = f"name {shown(self._template)} is not a template: {error}; write {{{{ }}}} for braces"
            raise ConfigurationError(msg) from error
        msg = f"name {shown(self._template)} has {problem}; write {{{{ }}}} for braces"
        raise ConfigurationError(msg)

    def fill(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> LockName:
        """
        Return the name for one call, which remembers the template.

        Raises:
            ConfigurationError: an argument has no such attribute or item as its placeholder names, or refuses
                its format.
            TypeError: the call does not fit the signature.
        """
        if self._hides:
            return LockName(self._template.format(), self._template)
        bound = self._bind(args, kwargs)
        bound.apply_defaults()
        try:
            return LockName(self._template.format(**bound.arguments), self._template)
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            msg = f"name {shown(self._template)} cannot be filled in from this call: {shown(error)}"
            raise ConfigurationError(msg) from error

    def _bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> inspect.BoundArguments:
        try:
            return self._signature.bind(*args, **kwargs)
        except TypeError as error:
            problem = str(error)  # which names no function
        if inspect.isfunction(self._function) and self._function.__code__.co_flags & inspect.CO_COROUTINE:
            self._function(*args, **kwargs).close()  # raises Python's own error; the body does not begin in any case
        msg = f"{self._called()}(): {problem}"
        raise TypeError(msg)


class _AnyArgument:
    """Has every attribute and item, and takes every format."""

    def __getattr__(self, name: str) -> _AnyArgument:
        return self

    def __getitem__(self, key: object) -> _AnyArgument:
        return self

    def __format__(self, spec: str) -> str:
        return "0"


def template_for_tasks(name: str, function: Callable[..., object], decorator: str) -> NameTemplate:
    """
    Return the template that names the lock of each call of *function*, whose *decorator* is one for tasks.

    Raises:
        ConfigurationError: it is not a coroutine function, or as `NameTemplate`.
    """
    if not inspect.iscoroutinefunction(function):
        msg = f"{decorator}() decorates 'async def' functions, not {shown(function)}"
        raise ConfigurationError(msg)
    return NameTemplate(name, function)


def template_for_threads(name: str, function: Callable[..., object], decorator: str) -> NameTemplate:
    """
    Do the same for a *decorator* of threads. The body of a generator would run when the lock was released.

    Raises:
        ConfigurationError: it is not a plain function, or as `NameTemplate`.
    """
    given: object = function
    later = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)
    if not callable(given) or isinstance(given, type) or any(kind(given) for kind in later):
        msg = (
            f"{decorator}() of fencing_sdk.sync decorates plain functions, not {shown(given)}; "
            "for 'async def' use the client of fencing_sdk.connect"
        )
        raise ConfigurationError(msg)
    return NameTemplate(name, function)
