"""
The resource's side for Django: a middleware that refuses stale requests, and a field for rows that keep their fence.

    seats_are_guarded = guard_middleware(guard, resource="seats/{seat}", locks=locks)   # in MIDDLEWARE, by its path
    fenced = guard_middleware()                                                          # the view admits the token

A view that writes to the database needs no guard in front: it admits the token in its own transaction.

    with transaction.atomic():
        guard.admit_sync(own_connection(), f"seats/{seat}", request_token(request))
        Seat.objects.filter(pk=seat).update(passenger=passenger)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeAlias, cast

from fencing_sdk._values.extras import imported_from

with imported_from(None, "django"):
    from django.db import DEFAULT_DB_ALIAS, connections, models
    from django.http import HttpRequest, HttpResponse, HttpResponseBase

from fencing_sdk._values.claim import Token
from fencing_sdk._values.token_wire import check_token
from fencing_sdk.abc import Guard
from fencing_sdk.errors import ConfigurationError, StaleTokenError
from fencing_sdk.guards.sql._protocols import SyncTransaction
from fencing_sdk.integrations._blocking import BlockingCheckpoint, sent_target, token_of
from fencing_sdk.integrations._incoming import WRITES
from fencing_sdk.integrations._problem import MAPPED, Problem, problem_of
from fencing_sdk.sync import SyncLockClient

__all__ = ["FenceField", "guard_middleware", "own_connection", "request_token", "write_fenced"]

GetResponse: TypeAlias = Callable[[HttpRequest], HttpResponseBase]


def guard_middleware(
    guard: Guard | None = None,
    *,
    resource: str | Callable[[HttpRequest], str | None] | None = None,
    path: str | None = None,
    locks: SyncLockClient | None = None,
    methods: Iterable[str] = WRITES,
    required: bool = True,
    stale_status: int = 409,
) -> Callable[[GetResponse], GetResponse]:
    """
    Make a middleware that refuses stale requests before the view runs, and answers the errors of ours that leave it.

    Arguments and answers are those of `fencing_sdk.integrations.wsgi.GuardedApplication`; a callable *resource* gets
    the request. Put it below the middleware that authenticates.

    Raises:
        ConfigurationError: an argument cannot work.
    """
    checkpoint: BlockingCheckpoint[HttpRequest] = BlockingCheckpoint(
        guard,
        resource,
        request_token,
        lambda request: (str(request.path_info), _sent(request)),
        path=path,
        locks=locks,
        methods=methods,
        required=required,
        stale_status=stale_status,
    )
    return lambda get_response: _GuardedViews(get_response, checkpoint)


class _GuardedViews:
    """The middleware. Django hands the errors of a view to `process_exception`, and never lets them through."""

    def __init__(self, get_response: GetResponse, checkpoint: BlockingCheckpoint[HttpRequest]) -> None:
        self._get_response = get_response
        self._checkpoint = checkpoint

    def __call__(self, request: HttpRequest) -> HttpResponseBase:
        try:
            self._checkpoint.admit(request, request.method or "")
        except MAPPED as error:
            return self._answer(error)
        return self._get_response(request)

    def process_exception(self, request: HttpRequest, error: Exception) -> HttpResponse | None:
        """Answer an error of the view that has an answer; None leaves it to Django."""
        if isinstance(error, MAPPED) and self._checkpoint.blames(error, request):
            return self._answer(error)
        return None

    def _answer(self, error: Any) -> HttpResponse:
        return _response(problem_of(error, stale_status=self._checkpoint.stale_status))


def request_token(request: HttpRequest) -> Token | None:
    """
    The token that a request carries, or None.

    Raises:
        FencingError: it is malformed. `guard_middleware` answers that error, too.
    """
    return token_of(request.META)


def own_connection(using: str = DEFAULT_DB_ALIAS) -> SyncTransaction:
    """Return the driver's connection behind Django's, for `SqlGuard.admit_sync` inside ``transaction.atomic()``."""
    wrapper = connections[using]
    wrapper.ensure_connection()
    return cast("SyncTransaction", wrapper.connection)


class FenceField(models.BigIntegerField):  # type: ignore[misc]  # Django has no types
    """
    The highest token that has written a row: the fence is a column, and there is no other table.

        class Seat(models.Model):
            passenger = models.TextField()
            fence = FenceField()

        write_fenced(Seat.objects.filter(pk=42), lease.token, passenger="Ada")

    Not promised: that it tells two holders of one token apart, or refuses the old holder before the new one's first
    write. `SqlGuard` does both.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"default": 0, "editable": False, **options})


def write_fenced(row: Any, token: int, **values: object) -> bool:
    """
    Set *values* of one row by one statement, unless a later token has written it.

    Args:
        row: A query for the row, of a model that has a `FenceField`: ``Seat.objects.filter(pk=42)``.

        token: The token of the lease.

        **values: The fields to set.

    Returns:
        False if there is no such row.

    Raises:
        StaleTokenError: a later token has written the row. Nothing was changed.
        ConfigurationError: *token* is none, or the model has no `FenceField`.
    """
    checked, column = check_token(token), _fence_of(row.model)
    if row.filter(**{f"{column}__lte": int(checked)}).update(**{column: int(checked)}, **values):
        return True
    key, fence = row.values_list("pk", column).first() or (None, None)
    if fence is None:
        return False
    name = f"{row.model._meta.label_lower}/{key}"  # noqa: SLF001  (Django documents it)
    raise StaleTokenError(name, int(checked), int(fence))


def _fence_of(model: Any) -> str:
    for one in model._meta.fields:  # noqa: SLF001  (likewise)
        if isinstance(one, FenceField):
            return str(one.name)
    msg = f"write_fenced() needs a model with a FenceField, which {model.__name__} has not"
    raise ConfigurationError(msg)


def _response(problem: Problem) -> HttpResponse:
    return HttpResponse(
        problem.body, status=problem.status, headers={**problem.headers, "Content-Length": str(len(problem.body))}
    )


def _sent(request: HttpRequest) -> bytes | None:
    """The target of the request: under ASGI, Django keeps the scope."""
    scope = getattr(request, "scope", None)
    return sent_target(request.META) if scope is None else cast("bytes | None", scope.get("raw_path"))
