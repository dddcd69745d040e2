"""The database of a test of leased rows, as Django knows it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import django_settings  # noqa: F401  (it configures Django)
import pymysql
from django.db import connections
from django.test import override_settings
from row_benches import RowBench
from sqlalchemy.engine import make_url


def settings_of(bench: RowBench) -> dict[str, Any]:
    url = make_url(bench.url)
    if url.drivername == "sqlite":
        return {"ENGINE": "django.db.backends.sqlite3", "NAME": url.database}
    kind = "postgresql" if url.drivername == "postgresql" else "mysql"
    address = {"NAME": url.database, "USER": url.username or "app", "HOST": url.host, "PORT": url.port}
    return {"ENGINE": f"django.db.backends.{kind}", **address}


@contextmanager
def known_to_django(bench: RowBench) -> Iterator[str]:
    """Let Django know a database, and use it for all models; yield the name by which it knows it."""
    pymysql.version_info = (2, 2, 8, "final", 0)  # of the mysqlclient whose place it takes
    pymysql.install_as_MySQLdb()
    name = "of_this_test"
    connections.databases[name] = connections.configure_settings({"default": {}, name: settings_of(bench)})[name]
    there = type("There", (), {"db_for_write": lambda *_, **__: name, "db_for_read": lambda *_, **__: name})()
    with override_settings(DATABASE_ROUTERS=[there]):
        yield name
    connections[name].close()
    del connections[name], connections.databases[name]
