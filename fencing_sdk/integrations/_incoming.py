"""
Resource's side: the token that a request carries, and the resource that it means.

A header that two readers may read differently is refused: a proxy that takes the first of two
values and a guard that takes the last would fence different requests.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Generic, TypeAlias, TypedDict, TypeVar
from urllib.parse import unquote_to_bytes

from fencing_sdk._arguments import check_flag
from fencing_sdk._values.claim import LockName, check_name
from fencing_sdk._values.clock import BootClock
from fencing_sdk._values.observers import Observer, Observers
from fencing_sdk._values.token import ACCEPTED_HEADERS, TEXT_LIMIT, Token, parse_one_token, read_token
from fencing_sdk.abc import Guard
from fencing_sdk.errors import ConfigurationError, StaleTokenError, shown
from fencing_sdk.integrations._problem import (
    MAPPED,
    Problem,
    RequestRefused,
    as_problem,
    check_stale_status,
    malformed_token,
    missing_token,
    unnamed_resource,
)

R = TypeVar("R")

_CLOCK = BootClock()
WRITES = ("POST", "PUT", "PATCH", "DELETE")

Headers: TypeAlias = Iterable[tuple[str | bytes, str | bytes]]
"""The headers of a request, as pairs of a name and a value."""

_NAMES = tuple(name.lower() for name in ACCEPTED_HEADERS)
_LENGTHS = frozenset(map(len, _NAMES))


def problem_of(error: Exception, headers: Headers, *, stale_status: int = 409) -> Problem:
    """
    Return the answer to an *error* that left a handler, for the error handler of any web framework.

        problem = problem_of(error, request.headers.items())
        return Response(problem.body, problem.status, problem.headers)

    Every middleware of these modules makes its answers so. `StaleTokenError` is *stale_status*, `InvalidNameError` 400,
    a lock that was not acquired 423; `LeaseLostError`, `DrainingError` and `BackendError`, which is logged, are 503.

    Args:
        error: The error. Register the handler for `FencingError`.

        headers: The headers of the request, as pairs. A `StaleTokenError` about another token than theirs is no
            answer to this request: the handler wrote under a lease of its own.

        stale_status: 409, or 412.

    Raises:
        ConfigurationError: *stale_status* is neither 409 nor 412.
        Exception: the *error* itself, if the request has not caused it and no lock or store has: it stays an error.
    """
    problem = answer_to(error, lambda: token_in(headers), check_stale_status(stale_status))
    if problem is None:
        raise error
    return problem


def answer_to(error: Exception, read: Callable[[], Token | None], stale_status: int) -> Problem | None:
    """
    Return the answer to an *error* that left a handler, or None if it stays an error.

    A handler may write under a lease of its own. If that one is stale, the token of the request, which *read* returns,
    is not to blame: an answer that blames it would make the caller give up a lock that it holds.
    """
    if not isinstance(error, MAPPED):
        return None
    if isinstance(error, StaleTokenError):
        try:
            token = read()
        except RequestRefused:
            return None
        if token is None or error.token != token:
            return None
    return as_problem(error, stale_status=stale_status)


def token_in(headers: Headers) -> Token | None:
    """
    Return the one token in the *headers* of a request, which are pairs, or None.

    Raises:
        FencingError: it is malformed, or came twice. The middlewares and `problem_of` answer that error, too.
    """
    values: list[str] = []
    old: list[str] = []
    for name, value in headers:
        if len(name) in _LENGTHS and (known := _text(name).lower()) in _NAMES and _text(name).isascii():
            (values if known == _NAMES[0] else old).append(_text(value))
    return presented(values, old)


def _text(raw: str | bytes) -> str:
    return raw if isinstance(raw, str) else bytes(raw).decode("latin-1")


def presented(values: Sequence[str], old: Sequence[str] = ()) -> Token | None:
    """
    Return the one token in the *values* of the header and of the *old* one, or None when there is none.

    Raises:
        RequestRefused: a header came twice or is not a token, or the two disagree.
    """
    if len(values) == 1 and not old and len(values[0]) <= TEXT_LIMIT and (token := read_token(values[0])) is not None:
        return token  # the usual case
    try:
        return parse_one_token(values, old)
    except ConfigurationError as error:
        raise RequestRefused(malformed_token(str(error))) from error


class ResourceTemplate:
    """
    ``"seats/{seat}"``: a name, with placeholders for what the router found in the path.

    Raises:
        ConfigurationError: it is malformed.
    """

    __slots__ = ("_template", "_text", "fields")

    def __init__(self, template: str, *, parameter: str = "resource") -> None:
        pieces = _pieces(check_name(template, parameter=parameter), parameter)
        self.fields = frozenset(field for _, field, _ in pieces if field)
        self._template = template
        self._text = "".join(text.replace("%", "%%") + (f"%({field})s" if field else "") for text, field, _ in pieces)

    def fill(self, values: Mapping[str, object]) -> LockName:
        """
        Return the name for a request whose router found *values*. It remembers the template.

        Raises:
            ConfigurationError: the route has no such parameter; fix the template.
        """
        try:
            return LockName(self._text % values, self._template)
        except KeyError as error:
            msg = f"{shown(self._template)} cannot be filled in: the route has no parameter {shown(error.args[0])}"
            raise ConfigurationError(msg) from error


class RouteTemplate(ResourceTemplate):
    """
    A resource, and the paths that belong to it.

    Args:
        resource: The name. ``{seat}`` is one segment of the path, ``{file:path}`` is its whole rest.

        path: Where such requests go, when that is not ``"/" + resource``. Every path below it
            belongs to the resource, too. If it ends with a slash, so may all these.

    Raises:
        ConfigurationError: a template is malformed, or the path lacks a placeholder of the name.
    """

    __slots__ = ("_canonical", "_pattern", "_slashed")

    def __init__(self, resource: str, *, path: str | None = None) -> None:
        super().__init__(resource)
        path = f"/{resource.lstrip('/')}" if path is None else path
        self._slashed = path != "/" and path.endswith("/")
        route = _pieces(path.removesuffix("/") if self._slashed else path, "path")
        fields = [field for _, field, _ in route if field]
        # Each segment has one reading, so the time of a match is linear in the length of a path.
        crowded = any("/" not in text for text, field, _ in route[1:] if field) or len({*fields}) < len(fields)
        if not path.startswith("/") or crowded or any(kind for _, _, kind in route[:-1]):
            msg = (
                f"path {shown(path)} must begin with '/', have one placeholder in a segment, each of its own name, "
                "and {file:path} at its end only"
            )
            raise ConfigurationError(msg)
        if missing := self.fields.difference(fields):
            msg = f"resource {shown(resource)} has {{{min(missing)}}}, which path {shown(path)} does not give"
            raise ConfigurationError(msg)
        self._canonical = "".join(text + (f"{{{field}}}" if field else "") for text, field, _ in route)
        expression = "".join(
            re.escape(text) + (f"(?P<{field}>{'.+' if kind else '[^/]+'})" if field else "")
            for text, field, kind in route
        )
        self._pattern = re.compile(f"{expression}(?:/.*)?", re.DOTALL)

    def __str__(self) -> str:
        return f"path {shown(self._canonical)}"

    def match(self, path: str, sent: bytes | None = None) -> str | None:
        """
        Return the resource of a request for *path*, or None when it is not one of ours.

        Raises:
            RequestRefused: `check_path` does not take it.
        """
        match = self._pattern.fullmatch(_SLASHES.sub("/", path))  # a router may merge them, and run the handler
        if match is None:
            return None
        check_path(path, sent, slashed=self._slashed)
        return self.fill(match.groupdict())

    def by(self, target_of: Callable[[R], tuple[str, bytes | None]]) -> Callable[[R], str | None]:
        """Return what names the resource of a request, where *target_of* returns its path, decoded and as sent."""
        return lambda request: self.match(*target_of(request))

    def covers(self, canonical: str) -> bool:
        """Return whether a route that is written like this belongs to the resource."""
        return canonical == self._canonical or canonical.startswith(f"{self._canonical}/")


_SLASHES = re.compile("//+")
_BEFORE_PATH = re.compile(rb"[A-Za-z][A-Za-z0-9+.-]*://[^/?#]*")
_NO_SEGMENTS = frozenset({"", ".", ".."})


def check_path(path: str, sent: bytes | None, *, slashed: bool) -> None:
    """
    Refuse a path that two services may read differently: they would fence two resources.

    Args:
        path: The path as the server has decoded it.

        sent: The target of the request before that; None where the server does not hand it over, and hides ``%2F``.

        slashed: Whether paths of this route end with a slash.

    Raises:
        RequestRefused: it has an empty segment, ``.`` or ``..``, an escaped slash, a ``#`` that is not escaped, bytes
            that are not UTF-8, or U+FFFD, which such bytes may have become.
    """
    if sent is not None:
        raw = _BEFORE_PATH.sub(b"", sent.partition(b"?")[0], count=1)
        if b"%2f" in raw.lower():
            raise RequestRefused(unnamed_resource("the path has an escaped slash, which ends a name to some servers"))
        if b"#" in raw:
            raise RequestRefused(unnamed_resource("the path has a '#', at which some servers end it; write %23"))
        path = unquote_to_bytes(raw).decode("utf-8", "replace")
    segments = (path.removesuffix("/") if slashed else path).split("/")[1:]
    if not _NO_SEGMENTS.isdisjoint(segments):
        raise RequestRefused(unnamed_resource("the path has an empty segment, '.' or '..', which some servers remove"))
    if "\ufffd" in path:
        raise RequestRefused(unnamed_resource("the path has bytes that are not UTF-8, which servers read differently"))


_PLACEHOLDER = re.compile(r"\{([^\W\d]\w*)(?::(path))?\}")


def _pieces(template: str, parameter: str) -> list[tuple[str, str | None, str | None]]:
    """Take a template apart: text, the placeholder after it, and its kind, which is None or ``path``."""
    pieces = _PLACEHOLDER.split(template)  # text, and perhaps a placeholder, its kind, text ...
    texts: list[str] = pieces[::3]
    if any("{" in text or "}" in text for text in texts):
        msg = f"{parameter} {shown(template)} may have placeholders like {{seat}} or {{file:path}} only"
        raise ConfigurationError(msg)
    taken = list(zip(texts, [*pieces[1::3], None], [*pieces[2::3], None], strict=True))
    return taken if texts[-1] else taken[:-1]


class GuardOptions(TypedDict, total=False):
    """The options of every middleware that guards; `FencingMiddleware` has the texts."""

    path: str | None
    methods: Iterable[str]
    required: bool
    stale_status: int
    observers: Sequence[Observer]


class Checkpoint(Generic[R]):
    """
    The check of a server's middleware, in a request of type *R*, before the handler runs.

    Args:
        guard: None leaves the check to the handler.

        resource: A template of the name, or a callable that gets the *whole* request and returns the name.

        by: Makes such a callable of a template, by what the server knows of paths.

        read: Returns the token of a request.

    Raises:
        ConfigurationError: an argument cannot work.
    """

    __slots__ = ("_demands", "_methods", "_named", "_read", "_stale_status", "guard")

    def __init__(
        self,
        guard: Guard | None,
        resource: str | Callable[[R], str | None] | None,
        by: Callable[[RouteTemplate], Callable[[R], str | None]],
        read: Callable[[R], Token | None],
        *,
        whole: str = "request",
        path: str | None = None,
        methods: Iterable[str] = WRITES,
        required: bool = True,
        stale_status: int = 409,
        observers: Sequence[Observer] = (),
    ) -> None:
        if isinstance(resource, str):
            resource = by(RouteTemplate(resource, path=path))
        elif path is not None:
            msg = f"path goes with a resource that is a template; a callable gets the whole {whole}"
            raise ConfigurationError(msg)
        self.guard = None if guard is None else check_guard(guard, resource)
        given_resource: object = resource
        if resource is not None and not callable(given_resource):
            msg = f"resource must be a template such as 'seats/{{seat}}' or a callable, got {shown(given_resource)}"
            raise ConfigurationError(msg)
        self._named = resource
        self._read = read
        given: list[object] = [] if isinstance(methods, str) else [*methods]
        self._methods = frozenset(method for method in given if isinstance(method, str) and method.isupper())
        if not given or len(self._methods) < len(set(given)):
            msg = f"methods must be a list such as ['PUT', 'DELETE'], got {shown(methods)}"
            raise ConfigurationError(msg)
        self._demands = Demand(observers, required=required)
        self._stale_status = check_stale_status(stale_status)

    def question(self, request: R, method: str) -> tuple[str, Token] | None:
        """
        Return the resource and token that the guard has to check first; None when there is nothing to check.

        Raises:
            RequestRefused: the token is missing or malformed, or there is no such resource.
        """
        if method.upper() not in self._methods:  # "patch" too: Werkzeug and Django run the handler of PATCH
            return None
        resource = None if self._named is None else self._named(request)
        if resource is None and self._named is not None:
            return None
        token = self._read(request)
        if token is None or resource is None:
            self._demands.check(token, resource)
            return None
        try:
            return _checked_name(resource), token
        except ConfigurationError:
            return check_resource(resource), token  # a bad request is answered; a mistake of the application is raised

    def answer_to(self, error: Exception, request: R) -> Problem | None:
        """As `answer_to`, in this *request*."""
        return answer_to(error, lambda: self._read(request), self._stale_status)


def demanded(token: Token | None, *, required: bool) -> Token | None:
    """
    Return *token*.

    Raises:
        RequestRefused: there is none, and one is *required*.
    """
    if token is None and required:
        raise RequestRefused(missing_token())
    return token


class Demand:
    """Looks whether the requests of a middleware or dependency carry a token, and reports those that do not."""

    __slots__ = ("_observers", "_required")

    def __init__(self, observers: Sequence[Observer], *, required: bool) -> None:
        self._required = check_flag(required, "required")
        self._observers = Observers(observers)

    def check(self, token: Token | None, resource: object) -> Token | None:
        """As `demanded`, in a request for *resource*, which is None where nothing names it."""
        if token is None and self._observers:
            from fencing_sdk.events import TokenMissing  # noqa: PLC0415  (a program without observers does not load it)

            try:
                name = "" if resource is None else check_resource(resource)
            except RequestRefused:  # the missing token is answered first
                name = ""
            now = _CLOCK.now()
            missing = TokenMissing(name=name, at=now, holder=None, resource=name, required=self._required)
            self._observers.emit(missing)
        return demanded(token, required=self._required)


def check_resource(resource: object) -> str:
    """
    Return the name that a request's path makes, if it is one.

    Raises:
        RequestRefused: it is too long or has control characters.
    """
    if not isinstance(resource, str):
        msg = f"resource must be named by a str, not {type(resource).__name__}"
        raise ConfigurationError(msg)
    try:
        return _checked_name(resource)
    except ConfigurationError as error:
        raise RequestRefused(unnamed_resource(str(error))) from error


@lru_cache(maxsize=1024)  # the same few are written to all the time; what is not a name is not remembered
def _checked_name(resource: str) -> str:
    return check_name(resource, parameter="resource")


def check_guard(guard: object, resource: object) -> Guard:
    """Return *guard* if it is one, and if it is known what it guards."""
    if not isinstance(guard, Guard):
        msg = f"guard must have raise_to() and highest(), like those of fencing_sdk.guards; got {shown(guard)}"
        raise ConfigurationError(msg)
    if resource is None:
        msg = "resource is missing: name what the guard protects, such as resource='seats/{seat}'"
        raise ConfigurationError(msg)
    return guard
