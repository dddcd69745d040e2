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

from collections.abc import Callable
from typing import Any, Literal, TypeAlias, Unpack, cast, overload

from fencing_sdk._values.drivers import imported_from

with imported_from(None, "django"):
    from django.conf import settings
    from django.db import DEFAULT_DB_ALIAS, connections, models
    from django.http import HttpRequest, HttpResponse, HttpResponseBase

from fencing_sdk._values.drivers import DIFFERS, KnownDriver
from fencing_sdk._values.token import Token, check_token, older_transactions, transaction_looks
from fencing_sdk.abc import Guard
from fencing_sdk.errors import ConfigurationError, StaleTokenError, UsageError, shown
from fencing_sdk.integrations._incoming import GuardOptions, demanded
from fencing_sdk.integrations._problem import MAPPED
from fencing_sdk.integrations.wsgi import BlockingCheckpoint, sent_target, token_of
from fencing_sdk.sync import LockClient

__all__ = ["FenceField", "guard_middleware", "own_connection", "request_token", "write_fenced"]

_DJANGO = KnownDriver("django", user="write_fenced")

GetResponse: TypeAlias = Callable[[HttpRequest], HttpResponseBase]


def guard_middleware(
    guard: Guard | None = None,
    *,
    resource: str | Callable[[HttpRequest], str | None] | None = None,
    locks: LockClient | None = None,
    **options: Unpack[GuardOptions],
) -> Callable[[GetResponse], GetResponse]:
    """
    Make a middleware that refuses stale requests before the view runs, and answers the errors of ours that leave it.

    Arguments and answers are those of `fencing_sdk.integrations.wsgi.GuardedApplication`; a callable *resource* gets
    the request. Put it below the middleware that authenticates.

    Raises:
        ConfigurationError: an argument cannot work.
    """
    checkpoint: BlockingCheckpoint[HttpRequest] = BlockingCheckpoint(
        guard, resource, _target, lambda request: token_of(request.META), locks, **options
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
            answer = self.process_exception(request, error)
            if answer is None:
                raise
            return answer
        return self._get_response(request)

    def process_exception(self, request: HttpRequest, error: Exception) -> HttpResponse | None:
        """Answer an error of the view that has an answer; None leaves it to Django."""
        problem = self._checkpoint.answer_to(error, request)
        if problem is None:
            return None
        headers = {**problem.headers, "Content-Length": str(len(problem.body))}
        return HttpResponse(problem.body, status=problem.status, headers=headers)


@overload
def request_token(request: HttpRequest, *, required: Literal[True] = True) -> Token: ...
@overload
def request_token(request: HttpRequest, *, required: Literal[False]) -> Token | None: ...
def request_token(request: HttpRequest, *, required: bool = True) -> Token | None:
    """
    Return the token that a request carries: the one that `guard_middleware` has looked at.

    Where it is not *required*, a request without a token gives None.

    Raises:
        FencingError: the token is missing or malformed. `guard_middleware` answers 428 or 400.
    """
    return demanded(token_of(request.META), required=required)


def own_connection(using: str = DEFAULT_DB_ALIAS) -> object:
    """Return the driver's connection behind Django's, for `SqlGuard.admit_sync` inside ``transaction.atomic()``."""
    wrapper = connections[using]
    wrapper.ensure_connection()
    connection: object = wrapper.connection
    return connection


class FenceField(models.BigIntegerField):  # type: ignore[misc]  # Django has no types
    """
    The highest token that has written a row: the fence is a column, and there is no other table.

        class Seat(models.Model):
            passenger = models.TextField()
            fence = FenceField()

        write_fenced(Seat.objects.filter(pk=42), lease.token, passenger="Ada")

    ``save()`` of an instance, such as the admin's, leaves the column as it is: the instance was read earlier, and its
    fence may be lower than that of the row. It writes the other fields without a check of any token.

    Not promised: that it distinguishes two holders of one token, refuses the old holder before the new one's first
    write, or covers what you read before you write. `SqlGuard` does all three, if it admits first.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"default": 0, "editable": False, **options})

    def pre_save(self, model_instance: Any, add: bool) -> Any:  # noqa: FBT001  (Django's own)
        """Return what ``save()`` writes: the instance's fence into a new row, and into others what they have."""
        return super().pre_save(model_instance, add) if add else models.F(self.attname)


def write_fenced(row: Any, token: int, **values: object) -> bool:
    """
    Set *values* of one row, unless a later token has written it. The statement that writes checks the token.

    Commit before the lock is released: the next holder reads right afterwards, and a later commit leaves it with the
    old row. So a transaction that is older than the lease is refused, such as that of ``ATOMIC_REQUESTS`` where the
    view takes the lock. The order that works is the lock outside and ``transaction.atomic(durable=True)`` inside. If
    the transaction has to be older, admit the token by `SqlGuard` before you read, and write by ``update``.

    Not promised: that a transaction is refused that begins under the lock and is committed after its release; and
    anything about a token whose lease is held elsewhere, such as that of a request, or that is a copy of the number.

    Args:
        row: A query for the row, of a model that has a `FenceField`: ``Seat.objects.filter(pk=42)``.

        token: The token of the lease.

        **values: The fields to set.

    Returns:
        False if there is no such row.

    Raises:
        StaleTokenError: a later token has written the row. Nothing was changed.
        UsageError: there are several such rows, or the commit would come after the lock is released. Nothing was
            changed.
        ConfigurationError: *token* is none, or the model has no `FenceField`.
        BackendRefusedError: the installed Django does not keep its transactions where they are looked for.
    """
    checked, column = check_token(token), _fence_of(row.model)
    row = row.using(row.select_for_update().db)  # the database that is written, where a router reads from another
    keys = list(row.values_list("pk", flat=True)[:2])
    if len(keys) > 1:
        msg = f"write_fenced() writes one row, and its query finds several of {row.model.__name__}; filter by the key"
        raise UsageError(msg)
    if not keys:
        return False
    name = f"{row.model._meta.label_lower}/{keys[0]}"  # noqa: SLF001  (Django documents it)
    _refuse_older(connections[row.db], checked, name)
    row = row.filter(pk=keys[0])
    if row.filter(**{f"{column}__lte": int(checked)}).update(**{column: int(checked)}, **values):
        return True
    if connections[row.db].vendor == "mysql" and not connections[row.db].get_autocommit():
        row = row.select_for_update()  # a plain query may show the row as it was when the transaction began to read
    fence = row.values_list(column, flat=True).first()
    if fence is None or int(fence) <= checked:  # it is gone, or what the query asks for was changed meanwhile
        return False
    raise StaleTokenError(name, int(checked), int(fence))


def _refuse_older(connection: Any, token: Token, name: str) -> None:
    """
    Refuse a transaction that was open when the lease of *token* was granted, or that no `atomic` ends.

    Raises:
        UsageError: it is one of these.
        BackendRefusedError: the installed Django does not keep its transactions where they are looked for.
    """
    older = older_transactions(token)
    if older is None:
        return
    with _DJANGO.known("write"):
        block = _outermost(connection)
        ends = connection.get_autocommit() or (connection.in_atomic_block and connection.commit_on_exit)
    if not ends or block in older:
        msg = (
            f"a transaction that writes {shown(name)} with token {token:d} would be committed after the lock is "
            "released, when the next holder has read the old row; take the lock outside and begin the transaction "
            "inside it: with locks.lock(...), transaction.atomic(durable=True)"
        )
        raise UsageError(msg)


def _outermost(connection: Any) -> object | None:
    """Return the outermost `atomic` that is open, but none of those that a `TestCase` puts around a test."""
    return next((block for block in connection.atomic_blocks if not block._from_testcase), None)  # noqa: SLF001


def _in_this_thread() -> tuple[object, ...]:
    """Return the transactions that are open in this thread."""
    if not settings.configured:
        return ()
    try:
        blocks = [_outermost(connection) for connection in connections.all(initialized_only=True)]
    except DIFFERS:  # `write_fenced` raises, and those who do without it are not kept from their locks
        return ()
    return tuple(block for block in blocks if block is not None)


transaction_looks.append(_in_this_thread)


def _fence_of(model: Any) -> str:
    for one in model._meta.fields:  # noqa: SLF001  (likewise)
        if isinstance(one, FenceField):
            return str(one.name)
    msg = f"write_fenced() needs a model with a FenceField, which {model.__name__} does not have"
    raise ConfigurationError(msg)


def _target(request: HttpRequest) -> tuple[str, bytes | None]:
    """The path of the request, and the target as it was sent: under ASGI, Django keeps the scope."""
    scope = getattr(request, "scope", None)
    sent = sent_target(request.META) if scope is None else cast("bytes | None", scope.get("raw_path"))
    return str(request.path_info), sent
