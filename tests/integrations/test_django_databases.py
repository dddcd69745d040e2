"""Fences on Django's own connection, to SQLite and to PostgreSQL: check and write are one transaction."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import blocking_servers  # noqa: F401  (it configures Django)
import pytest
from django.db import connections, models, transaction
from postgresql_server import PostgresqlServer

from fencing_sdk import StaleTokenError
from fencing_sdk.guards.sql import SqlGuard
from fencing_sdk.integrations.django import FenceField, own_connection, write_fenced

pytest_plugins = ["postgresql_fixtures"]


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


@pytest.fixture(params=["sqlite", "postgresql"])
def using(request: pytest.FixtureRequest) -> Iterator[str]:
    """A database with one seat, by the name that Django knows it by."""
    name = uuid.uuid4().hex
    connections.databases[name] = connections.configure_settings(
        {"default": {"ENGINE": "django.db.backends.dummy"}, name: request.getfixturevalue(request.param)}
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


def test_a_row_keeps_its_own_fence(using: str):
    row = Seat.objects.using(using).filter(pk=42)
    assert write_fenced(row, 6, passenger="Ada")
    with pytest.raises(StaleTokenError):
        write_fenced(row, 5, passenger="Eve")
    assert passenger(using) == "Ada"
    assert not write_fenced(Seat.objects.using(using).filter(pk=7), 6, passenger="Eve"), "there is no such seat"
