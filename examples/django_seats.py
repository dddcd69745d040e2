"""
Django: a view and a management command that write under a lock, and a database that refuses the one that comes late.

The fence is checked in the same transaction as the write, on Django's own connection. The row keeps a fence of its own
besides, which checks a write alone and nothing that was read before. In a project these parts are in settings.py,
models.py, views.py and management/commands.

Run it: uv run python examples/django_seats.py
"""

import tempfile
from pathlib import Path

import django
from django.conf import settings

folder = Path(tempfile.mkdtemp())
settings.configure(
    ALLOWED_HOSTS=["testserver"],
    DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": folder / "app.db"}},
    MIDDLEWARE=["__main__.answers_stale_tokens"],
    ROOT_URLCONF=__name__,
    USE_TZ=True,
)
django.setup()

from django.core.management import BaseCommand, call_command  # noqa: E402
from django.db import connection, models, transaction  # noqa: E402
from django.http import HttpResponse  # noqa: E402
from django.test import Client  # noqa: E402
from django.urls import path  # noqa: E402

from fencing_sdk import StaleTokenError, UsageError  # noqa: E402
from fencing_sdk.guards.sql import SqlGuard  # noqa: E402
from fencing_sdk.integrations.django import (  # noqa: E402
    FenceField,
    guard_middleware,
    own_connection,
    request_token,
    write_fenced,
)
from fencing_sdk.sync import connect, current_token  # noqa: E402

locks = connect(f"sqlite:///{folder}/locks.db")  # in settings.py or apps.py: one for the process, made before any fork
guard = SqlGuard()
answers_stale_tokens = guard_middleware(required=False)  # no guard in front: the view admits the token itself


class Seat(models.Model):
    passenger = models.TextField()
    fence = FenceField()

    class Meta:
        app_label = "seats"

    def __str__(self) -> str:
        return f"{self.pk}: {self.passenger}"


def book(number: int, passenger: str, token: int) -> None:
    with transaction.atomic(durable=True):  # one transaction, inside of the lock: check and write
        guard.admit_sync(own_connection(), f"seats/{number}", token)  # first; may raise StaleTokenError
        Seat.objects.update_or_create(pk=number, defaults={"passenger": passenger})


def book_view(request, number: int) -> HttpResponse:
    """The caller holds the lock, and sends its token."""
    book(number, request.GET["passenger"], request_token(request))
    return HttpResponse("booked")


urlpatterns = [path("seats/<int:number>", book_view)]


class Command(BaseCommand):
    help = "Tidy up the seats, in one process at a time."

    def handle(self, *args, **options) -> None:
        with locks.lock("seats/42", ttl=15, wait=5):
            book(42, "Carol", current_token())


with connection.schema_editor() as editor:
    editor.create_model(Seat)
client = Client()

with locks.lock("seats/42", ttl=15) as lease:
    late = lease.headers()["Fencing-Token"]
    response = client.put("/seats/42?passenger=Ada", headers={"Fencing-Token": late})
print("the view, under a lock:", response.status_code, Seat.objects.get(pk=42).passenger)
assert response.status_code == 200

call_command(Command())
print("the command:", Seat.objects.get(pk=42).passenger)

response = client.put("/seats/42?passenger=Bob", headers={"Fencing-Token": late})
print("the first holder, too late:", response.status_code, response.json()["title"])
assert response.status_code == 409
assert Seat.objects.get(pk=42).passenger == "Carol"

with locks.lock("seats/42") as older:
    token = older.token
with locks.lock("seats/42") as newer:
    assert write_fenced(Seat.objects.filter(pk=42), newer.token, passenger="Dan")
try:
    write_fenced(Seat.objects.filter(pk=42), token, passenger="Eve")
except StaleTokenError as error:
    print("the row refuses, without a guard:", error)
assert Seat.objects.get(pk=42).passenger == "Dan"
try:
    with transaction.atomic(), locks.lock("seats/42") as lease:  # as with ATOMIC_REQUESTS: it commits after the lock
        write_fenced(Seat.objects.filter(pk=42), lease.token, passenger="Eve")
except UsageError as error:
    print("a transaction around the lock:", error)
assert Seat.objects.get(pk=42).passenger == "Dan"
assert not write_fenced(Seat.objects.filter(pk=7), token, passenger="Eve"), "there is no such seat"
connection.close()
