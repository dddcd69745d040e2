"""
Locks in MySQL or MariaDB, beside the data that they protect.

    connect("mysql://user:password@localhost:3306/app")
    connect("mariadb://db1,db2/app?tls=true&ca=/etc/ssl/db.pem")   # the first host that takes writes

Tokens: hybrid by default, kept in the lock's row. Clock: the server's, read while the row is locked. Waiters: first
come, first served, woken by KILL QUERY. One connection for the requests, and one that sleeps while a request waits.

    __init__.py    the backend, its options and its URL
    store.py       the server as a store of rows: how they are read, changed and deleted
    bell.py        the connection that sleeps until another client wakes it
    connection.py  opens a session with the server that takes writes, and what a transaction on it is
    schema.sql     the tables
    errors.py      translates errors of the server to those of the contract
"""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from functools import partial
from typing import Any

from fencing_sdk._mysql.url import read_mysql_url
from fencing_sdk._values.claim import Busy, Claim, Grant
from fencing_sdk._values.url import option_names, read_hybrid, read_seconds, read_switch
from fencing_sdk.abc import Guard
from fencing_sdk.abc._powers import TransactionalGuard
from fencing_sdk.backends import take_options
from fencing_sdk.backends._shared import rules
from fencing_sdk.backends._shared.row_backend import RowBackend
from fencing_sdk.backends.mysql.connection import SCHEMA, MysqlDialer
from fencing_sdk.backends.mysql.errors import translating
from fencing_sdk.backends.mysql.store import MysqlStore

__all__ = ["MysqlBackend", "from_url"]


class MysqlBackend(RowBackend):
    """
    A lock service in MySQL, from version 8.0 on, or MariaDB, from version 10.6 on.

    Args:
        url: ``mysql://user:password@host:port/database``, or ``mariadb://``, which means the same. Of several hosts,
            separated by commas, the backend uses the first one that takes writes.

        tokens: ``"hybrid"``, or ``"counter"`` for 1, 2, 3, which repeat when the server loses the last grants.

        create: Whether the first call that misses the tables creates them.

        bell: Whether a client with waiters, or with a lock that it holds for longer than a moment, keeps a second
            connection on which others wake it. Without it waiters try once a second.

        connect_timeout: Seconds that the opening of a connection may take.

        unix_socket: The path of the server's socket, instead of a host.

        tls: Whether connections use TLS. Then the server's certificate is checked.

        ca: PEM file of the authorities to trust. The default is the system's.

        cert: PEM file of the client's certificate, for servers that ask for one.

        key: PEM file of its key, unless it is in *cert*.

        ssl_context: A context for TLS, instead of the files.

    Raises:
        ConfigurationError: an argument cannot work. No I/O happens before the first call.
    """

    def __init__(
        self,
        url: str,
        *,
        tokens: str = "hybrid",
        create: bool = True,
        bell: bool = True,
        connect_timeout: float = 4.0,
        unix_socket: str | None = None,
        tls: bool = False,
        ca: str | None = None,
        cert: str | None = None,
        key: str | None = None,
        ssl_context: ssl.SSLContext | None = None,
    ) -> None:
        address = read_mysql_url(
            url, unix_socket=unix_socket, tls=tls, ca=ca, cert=cert, key=key, ssl_context=ssl_context
        )
        patience = read_seconds("connect_timeout", connect_timeout)
        dialer = MysqlDialer(address, create=read_switch("create", create), patience=patience)
        self._mysql = MysqlStore(dialer, hybrid=read_hybrid(tokens), bell=read_switch("bell", bell))
        super().__init__(self._mysql)
        self._database_identity = address.identity()

    def keeps(self, guard: Guard) -> bool:
        """See ``abc._powers.SupportsFence.keeps``."""
        known = self._database_identity
        return known is not None and isinstance(guard, TransactionalGuard) and guard.database == known

    async def acquire_fenced(self, claim: Claim, fences: Sequence[tuple[Guard, str]]) -> Grant | Busy:
        """See ``abc._powers.SupportsFence.acquire_fenced``. Another connection waits for locked fences."""
        outcome = await self._mysql.run_fenced(claim, partial(rules.acquire, claim=claim), fences)
        return self._answered(claim, outcome)

    def schema_sql(self) -> str:
        """See ``abc._powers.SupportsSchema.schema_sql``."""
        return SCHEMA

    async def create_schema(self) -> None:
        """See ``abc._powers.SupportsSchema.create_schema``."""
        with translating("create_schema"):
            await (await self._mysql.dialer.dial(create=True)).aclose()


def from_url(url: str, **options: object) -> MysqlBackend:
    """
    Make a backend for a ``mysql://`` or ``mariadb://`` URL. `MysqlBackend` explains the options.

    Raises:
        ConfigurationError: the URL or an option cannot be used.
    """
    chosen: dict[str, Any] = take_options(url, options, option_names(MysqlBackend))
    return MysqlBackend(url.partition("?")[0], **chosen)
