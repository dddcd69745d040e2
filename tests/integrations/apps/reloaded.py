"""A project of Django in one file, for ``runserver``, which starts it anew when a file has changed."""

import os
import sys

from django.conf import settings
from django.core.management import execute_from_command_line
from django.http import HttpRequest, HttpResponse
from django.urls import path

from fencing_sdk.sync import Lease, connect

settings.configure(
    ALLOWED_HOSTS=["*"],
    DEBUG=True,
    INSTALLED_APPS=[],
    MIDDLEWARE=[],
    ROOT_URLCONF=__name__,
    SECRET_KEY="of a test",
    DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}},
)
locks = connect(os.environ["FENCING_URL"])
kept: list[Lease] = []


def keep(_: HttpRequest) -> HttpResponse:
    """Hold a lock for as long as the process lives; return which one that is."""
    kept.append(locks.lock("kept", ttl=300).acquire())
    return HttpResponse(str(os.getpid()))


urlpatterns = [path("keep", keep)]

if __name__ == "__main__":
    execute_from_command_line(sys.argv)
