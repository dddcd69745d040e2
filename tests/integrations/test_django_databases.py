"""Fences on Django's own connection, to SQLite and to the servers: check and write are one transaction."""

from __future__ import annotations

import contextlib
import importlib.util
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import blocking_servers  # noqa: F401  (it configures Django)
import pymysql
import pytest
from django.core.handlers.base import BaseHandler
from django.db import connections, models, transaction
from django.test import TestCase
from mysql_programs import flavours
from mysql_server import MysqlServer
from postgresql_server import PostgresqlServer

from fencing_sdk import StaleTokenError, Token, UsageError
from fencing_sdk.backends.memory import MemoryBackend
from fencing_sdk.guards.sql import SqlGuard
from fencing_sdk.integrations.django import FenceField, own_connection, write_fenced
from fencing_sdk.recipes import Skipped
from fencing_sdk.sync import LockClient, connect, current_token

pytest_plugins = ["mysql_fixtures", "postgresql_fixtures"]


class Seat(models.Model):
    passenger = models.TextField()
    fence = FenceField()

    class Meta:
        app_label = "seats"

    def __str__(self) -> str:
        return self.passenger


@pytest.fixture
def sqlite(tmp_path: Path) -> dict[str, object]:
    return {"ENGINE": "django.db.backends.sqlite3", "NAME": tmp_path / "app.db"}


@pytest.fixture
def postgresql(postgresql_server: PostgresqlServer) -> dict[str, object]:
    address = urlsplit(postgresql_server.url)
    return {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": address.path.lstrip("/"),
        "USER": address.username,
        "HOST": address.hostname,
        "PORT": address.port,
    }


def settings_of(server: MysqlServer) -> dict[str, object]:
    if not importlib.util.find_spec("MySQLdb"):
        pymysql.version_info = (2, 2, 8, "final", 0)  # of the mysqlclient whose place it takes
        pymysql.install_as_MySQLdb()
    address = {"NAME": server.database, "USER": "app", "HOST": "127.0.0.1", "PORT": server.port}
    return {"ENGINE": "django.db.backends.mysql", **address}


@pytest.fixture
def mysql_settings(shared_mysql: Callable[[str], MysqlServer]) -> Iterator[Callable[[str], dict[str, object]]]:
    """The settings for a fresh database of MySQL or MariaDB, with the table of fences that a migration has made."""
    with contextlib.ExitStack() as stack:

        def settings(flavour: str) -> dict[str, object]:
            server = stack.enter_context(shared_mysql(flavour).fresh_database())
            server.ask(SqlGuard().ddl("mysql"))
            return settings_of(server)

        yield settings


@pytest.fixture(params=["sqlite", "postgresql", *flavours()])
def using(request: pytest.FixtureRequest, mysql_settings: Callable[[str], dict[str, object]]) -> Iterator[str]:
    """A database with one seat, by the name that Django knows it by."""
    name = uuid.uuid4().hex
    chosen = mysql_settings(request.param) if request.param in flavours() else request.getfixturevalue(request.param)
    connections.databases[name] = connections.configure_settings(
        {"default": {"ENGINE": "django.db.backends.dummy"}, name: chosen}
    )[name]
    with connections[name].schema_editor() as editor:
        editor.create_model(Seat)
    Seat.objects.using(name).create(pk=42, passenger="")
    yield name
    with connections[name].schema_editor() as editor:
        editor.delete_model(Seat)
    connections[name].close()
    del connections[name]
    del connections.databases[name]


def book(using: str, guard: SqlGuard, passenger: str, token: int) -> None:
    with transaction.atomic(using=using):
        guard.admit_sync(own_connection(using), "seats/42", token)
        Seat.objects.using(using).filter(pk=42).update(passenger=passenger)


def passenger(using: str) -> str:
    return Seat.objects.using(using).get(pk=42).passenger


def test_a_stale_token_writes_nothing(using: str):
    guard = SqlGuard()
    book(using, guard, "Ada", 5)
    book(using, guard, "Bob", 6)
    with pytest.raises(StaleTokenError):
        book(using, guard, "Eve", 5)
    assert passenger(using) == "Bob"


def test_a_transaction_that_is_rolled_back_takes_its_fence_along(using: str):
    guard = SqlGuard()
    book(using, guard, "Ada", 5)
    with pytest.raises(LookupError), transaction.atomic(using=using):
        guard.admit_sync(own_connection(using), "seats/42", 6)
        raise LookupError
    book(using, guard, "Ada again", 5)
    assert passenger(using) == "Ada again"


@pytest.mark.parametrize("fields", [None, ["passenger", "fence"]])
def test_an_instance_that_was_read_before_a_write_does_not_lower_the_fence_when_it_is_saved(using: str, fields):
    """As Django's admin does, and most code of others."""
    row = Seat.objects.using(using).filter(pk=42)
    old = row.get()
    assert write_fenced(row, 6, passenger="Ada")
    old.passenger = "the admin's"
    old.save(update_fields=fields)
    assert (row.get().passenger, row.get().fence) == ("the admin's", 6)
    with pytest.raises(StaleTokenError):
        write_fenced(row, 5, passenger="Eve")


def test_an_instance_whose_row_is_new_is_saved_with_a_fence(using: str):
    for seat in (Seat(pk=7, passenger="Ada"), Seat(pk=8, passenger="Bob", fence=3)):
        seat.save(using=using)
    fences = Seat.objects.using(using).exclude(pk=42).order_by("pk").values_list("fence", flat=True)
    assert list(fences) == [0, 3]


def test_a_row_keeps_its_own_fence(using: str):
    row = Seat.objects.using(using).filter(pk=42)
    assert write_fenced(row, 6, passenger="Ada")
    with pytest.raises(StaleTokenError):
        write_fenced(row, 5, passenger="Eve")
    assert passenger(using) == "Ada"
    assert not write_fenced(Seat.objects.using(using).filter(pk=7), 6, passenger="Eve"), "there is no such seat"


@pytest.mark.parametrize("inside", [False, True], ids=["alone", "in a transaction"])
def test_a_fence_that_was_raised_since_the_transaction_has_read_refuses_the_write(using: str, inside: bool):
    """At REPEATABLE READ of MySQL a plain query shows the row as it was before, which would look writable."""
    if connections[using].vendor == "mysql":
        connections[using].close()
        connections.databases[using]["OPTIONS"] = {"isolation_level": "repeatable read"}
    row = Seat.objects.using(using).filter(pk=42)

    def raise_it() -> None:
        assert write_fenced(row, 6, passenger="Ada")
        connections[using].close()

    with transaction.atomic(using=using) if inside else contextlib.nullcontext():
        assert row.get().fence == 0
        if connections[using].vendor != "sqlite":  # where a transaction that has read would keep the other from writing
            other = threading.Thread(target=raise_it)
            other.start()
            other.join(60)
        else:
            assert write_fenced(row, 6, passenger="Ada")
        with pytest.raises(StaleTokenError):
            write_fenced(row, 5, passenger="Eve")
    assert passenger(using) == "Ada"


def test_a_query_of_several_rows_writes_none_of_them(using: str):
    """Of those whose fence is lower it wrote some, and skipped the others."""
    seats = Seat.objects.using(using)
    seats.create(pk=43, passenger="", fence=7)
    for rows in (seats, seats.filter(passenger=""), seats.filter(pk__in=[42, 43])):
        for token in (6, 8):
            with pytest.raises(UsageError, match="finds several of Seat"):
                write_fenced(rows, token, passenger="Ada")
    assert set(seats.values_list("passenger", "fence")) == {("", 0), ("", 7)}
    assert write_fenced(seats.filter(passenger="", fence=7), 8, passenger="Ada"), "one row, found in another way"


# The commit and the lock.


@pytest.fixture
def locks() -> Iterator[LockClient]:
    with connect(MemoryBackend(tokens="counter")) as locks:
        yield locks


def seat(using: str) -> models.QuerySet[Seat]:
    return Seat.objects.using(using).filter(pk=42)


@pytest.fixture(params=["atomic", "durable", "a decorator", "ATOMIC_REQUESTS", "inside of another", "autocommit off"])
def around(request: pytest.FixtureRequest, using: str) -> Callable[[Callable[[], object]], None]:
    """A transaction around a function that takes the lock."""

    def run(view: Callable[[], object]) -> None:
        if request.param == "ATOMIC_REQUESTS":
            connections.databases[using]["ATOMIC_REQUESTS"] = True
            BaseHandler().make_view_atomic(view)()
        elif request.param == "a decorator":
            transaction.atomic(using=using)(view)()
        elif request.param == "autocommit off":
            transaction.set_autocommit(autocommit=False, using=using)
            try:
                view()
                transaction.commit(using=using)
            finally:
                transaction.rollback(using=using)
                transaction.set_autocommit(autocommit=True, using=using)
        else:
            with transaction.atomic(using=using, durable=request.param == "durable"):
                if request.param == "inside of another":
                    with transaction.atomic(using=using), transaction.atomic(using=using, savepoint=False):
                        view()
                else:
                    view()

    return run


def test_a_transaction_around_the_lock_is_refused_before_it_writes(using: str, locks: LockClient, around):
    refused = []

    def view() -> None:
        with locks.lock("seats/42") as lease:
            with pytest.raises(UsageError, match=r"durable=True") as refusal:
                write_fenced(seat(using), lease.token, passenger="Ada")
            refused.append(str(refusal.value))

    def view_with_a_handle() -> None:
        lease = locks.lock("seats/42").acquire()
        try:
            write_fenced(seat(using), lease.token, passenger="Ada")
        finally:
            lease.release()

    around(view)
    assert "'seats.seat/42'" in refused[0]
    with pytest.raises(UsageError, match=r"durable=True"):
        around(view_with_a_handle)
    assert passenger(using) == ""


def held_by_a_block(locks: LockClient, write: Callable[[], object]) -> None:
    with locks.lock("seats/42"):
        write()


def held_by_a_function(locks: LockClient, write: Callable[[], object]) -> None:
    locks.locking("seats/42")(write)()


def held_by_a_job(locks: LockClient, write: Callable[[], object]) -> None:
    run = locks.job("seats/42", at_least_for=0.01)(write)
    while isinstance(run(), Skipped):  # the lock is kept for a moment after the run before
        time.sleep(0.01)


def held_by_several(locks: LockClient, write: Callable[[], object]) -> None:
    with locks.multilock("seats/41", "seats/42"):
        write()


def held_by_a_writer(locks: LockClient, write: Callable[[], object]) -> None:
    with locks.rwlock("seats/42").writer:
        write()


def held_by_a_leader(locks: LockClient, write: Callable[[], object]) -> None:
    for term in locks.election("seats/42"):
        with term:
            write()
        break


@pytest.mark.parametrize(
    "hold", [held_by_a_block, held_by_a_function, held_by_a_job, held_by_several, held_by_a_writer, held_by_a_leader]
)
def test_whatever_holds_the_lock_knows_the_transaction_around_it(using: str, locks: LockClient, hold):
    def write() -> None:
        write_fenced(seat(using), current_token("seats/42"), passenger="Ada")

    def refused() -> None:
        with pytest.raises(UsageError, match=r"durable=True"):
            write()

    with transaction.atomic(using=using):
        hold(locks, refused)
    assert passenger(using) == ""
    hold(locks, write)
    assert passenger(using) == "Ada"


def test_a_transaction_around_the_lock_that_admits_the_token_first_may_update(using: str, locks: LockClient, around):
    guard = SqlGuard()

    def view() -> None:
        with locks.lock("seats/42") as lease:
            guard.admit_sync(own_connection(using), "seats/42", lease.token)
            assert seat(using).update(passenger="Ada")

    around(view)
    assert passenger(using) == "Ada"


def test_a_transaction_around_the_lock_with_a_token_from_elsewhere_may_write(using: str, locks: LockClient, around):
    """As with the token of a request: its caller holds the lock until the answer, which comes after the commit."""

    def view() -> None:
        with locks.lock("seats/42") as lease:
            assert write_fenced(seat(using), Token(int(lease.token), lease.holder), passenger="Ada")

    around(view)
    assert passenger(using) == "Ada"


@pytest.mark.parametrize("durable", [False, True])
def test_a_transaction_inside_of_the_lock_may_write(using: str, locks: LockClient, durable: bool):
    with locks.lock("seats/42") as lease:
        for name in ("Ada", "Bob"):
            with transaction.atomic(using=using, durable=durable):
                assert write_fenced(seat(using), lease.token, passenger=name)
        assert write_fenced(seat(using), lease.token, passenger="Cid"), "without a transaction"
    assert passenger(using) == "Cid"


def test_a_view_without_the_transaction_of_requests_has_the_lock_outside(using: str, locks: LockClient):
    connections.databases[using]["ATOMIC_REQUESTS"] = True

    @transaction.non_atomic_requests(using)
    def view() -> None:
        with locks.lock("seats/42") as lease, transaction.atomic(using=using, durable=True):
            assert write_fenced(seat(using), lease.token, passenger="Ada")

    BaseHandler().make_view_atomic(view)()
    assert passenger(using) == "Ada"


def test_the_transaction_around_a_test_of_django_is_no_transaction_of_the_code(using: str, locks: LockClient):
    """`TestCase` rolls it back. What is refused without it is refused with it, and nothing else."""

    class Around(TestCase):
        databases = {using}  # noqa: RUF012  (as Django has it)

    atomics = Around._enter_atomics()
    try:
        with locks.lock("seats/42") as lease:
            assert write_fenced(seat(using), lease.token, passenger="Ada")
            with transaction.atomic(using=using, durable=True):
                assert write_fenced(seat(using), lease.token, passenger="Bob")
        with transaction.atomic(using=using), locks.lock("seats/42") as lease:
            with pytest.raises(UsageError, match=r"durable=True"):
                write_fenced(seat(using), lease.token, passenger="Cid")
    finally:
        Around._rollback_atomics(atomics)
    assert passenger(using) == ""


def test_of_two_requests_at_once_one_gets_the_seat(using: str, locks: LockClient):
    """The first one's commit comes when the second one has read the row: both were told that they had the seat."""
    answers: dict[str, str] = {}
    has_read = threading.Event()

    def book(name: str) -> None:
        with locks.lock("seats/42") as lease:
            free = not passenger(using)
            if name == "Bob":
                has_read.set()
            answers[name] = "taken"
            if free:
                write_fenced(seat(using), lease.token, passenger=name)
                answers[name] = "booked"

    def second() -> None:
        try:
            book("Bob")
        finally:
            connections[using].close()

    bob = threading.Thread(target=second)
    with contextlib.suppress(UsageError), transaction.atomic(using=using):
        book("Ada")
        bob.start()
        has_read.wait(60)
    if bob.ident is None:
        bob.start()
    bob.join(60)
    assert answers == {"Ada": "taken", "Bob": "booked"}
    assert passenger(using) == "Bob"
