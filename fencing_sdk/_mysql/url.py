"""
Reads ``mysql://`` and ``mariadb://`` URLs: the two servers speak one protocol, so either word stands for both.

    mysql://user:password@host[:port][,host[:port]...]/database[?option=value&...]
    mysql://user@/database?unix_socket=/run/mysqld/mysqld.sock
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import parse_qsl, quote

from fencing_sdk._http.tls import TlsContext, tls_context
from fencing_sdk._values.url import HostAddress, decoded, joined, nearest, read_switch, refuse_url, split_url
from fencing_sdk.errors import ConfigurationError, shown

__all__ = ["SCHEMES", "MysqlUrl", "read_mysql_query", "read_mysql_url"]

SCHEMES = ("mysql", "mariadb")
OPTIONS = ("unix_socket", "tls", "ca", "cert", "key")
"""The options of a URL's query that belong to the connection."""
_PORT = 3306
_HERE = HostAddress("localhost", None)


@dataclass(frozen=True, slots=True, repr=False)
class MysqlUrl:
    """Where a database is, and how to log in. There is no repr, because it would show the password."""

    addresses: tuple[HostAddress, ...]
    user: str | None
    password: str | None
    database: str
    unix_socket: str | None = None
    tls: TlsContext | None = None

    def each_host(self) -> tuple[MysqlUrl, ...]:
        """The same database at each of the hosts."""
        return tuple(replace(self, addresses=(address,)) for address in self.addresses)

    @property
    def place(self) -> str:
        """The first host with its port, without the login."""
        return "the Unix socket" if self.unix_socket else joined(*self.addresses[0].at(_PORT))

    def identity(self) -> str | None:
        """``user@host:port,host:port/database``, each part percent-encoded; None without a user."""
        if self.user is None:
            return None
        where = ",".join(
            joined(quote(host, safe=":"), port) for host, port in (each.at(_PORT) for each in self.addresses)
        )
        if self.unix_socket:
            where = quote(self.unix_socket, safe="")
        return f"{quote(self.user, safe='')}@{where}/{quote(self.database, safe='')}"

    def arguments(self) -> dict[str, object]:
        """The arguments of ``asyncmy.connect`` for the first host."""
        host, port = self.addresses[0].at(_PORT)
        given: dict[str, object] = {"host": host, "port": port, "user": self.user, "database": self.database}
        given["password"] = (self.password or "").encode()  # asyncmy would encode a text as Latin-1
        if self.unix_socket:
            given["unix_socket"] = self.unix_socket
        if self.tls is not None:
            given["ssl"] = self.tls()
        return given


def read_mysql_url(
    url: object,
    *,
    unix_socket: object = None,
    tls: object = False,
    ca: object = None,
    cert: object = None,
    key: object = None,
    ssl_context: ssl.SSLContext | None = None,
) -> MysqlUrl:
    """
    Read *url*, whose query is passed as arguments, and the files for TLS.

    Raises:
        ConfigurationError: a part cannot be used. The URL is never repeated.
    """
    if not isinstance(url, str):
        msg = f"url must be a str, such as 'mysql://user@localhost/app', not {type(url).__name__}"
        raise ConfigurationError(msg)
    parts = split_url(url)
    if parts.scheme not in SCHEMES:
        refuse_url("must begin with mysql:// or mariadb://")
    if parts.query:
        refuse_url("has a query, whose options are arguments here; fencing_sdk.connect() takes both")
    if unix_socket is not None and (not isinstance(unix_socket, str) or not unix_socket.startswith("/")):
        msg = f"unix_socket must be the path of a socket, such as '/run/mysqld/mysqld.sock', not {shown(unix_socket)}"
        raise ConfigurationError(msg)
    if unix_socket is not None and parts.hosts:
        refuse_url("names a host and unix_socket; write mysql://user@/app?unix_socket=/run/mysqld/mysqld.sock")
    addresses = parts.addresses() if parts.hosts else (_HERE,)
    database = decoded(parts.path.removeprefix("/"), "path")
    if not database or "/" in database:
        refuse_url("must name one database, as in mysql://user@localhost/app")
    context = tls_context(tls=read_switch("tls", tls), scheme=None, ca=ca, cert=cert, key=key, context=ssl_context)
    return MysqlUrl(addresses, parts.user or None, parts.password, database, unix_socket, context)


def read_mysql_query(url: str) -> MysqlUrl:
    """
    Read *url* with the options of the connection in its query.

    Raises:
        ConfigurationError: a part cannot be used, or an option is unknown.
    """
    options: dict[str, Any] = dict(parse_qsl(split_url(url).query, keep_blank_values=True))
    if unknown := [name for name in options if name not in OPTIONS]:
        refuse_url(f"has an unknown option in its query{nearest(unknown[0], OPTIONS)}; known are {', '.join(OPTIONS)}")
    return read_mysql_url(url.partition("?")[0], **options)
