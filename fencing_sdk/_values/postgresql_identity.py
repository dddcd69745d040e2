"""
The identity of the database that a ``postgresql://`` URL names, read without I/O.

A backend and a guard compare identities to learn whether they use the same database. Reading the URL also refuses one
that asyncpg could not read: asyncpg would quote it in its error, with the password. Otherwise asyncpg reads the URL
itself, and takes missing parts from the same environment variables.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from getpass import getuser
from urllib.parse import parse_qsl, quote, unquote, urlsplit

from fencing_sdk.errors import ConfigurationError

_HOST = re.compile(r"(?P<host>\[[^\[\]]*\]|[^:\[\]]*)(:(?P<port>[0-9]{1,5}))?", re.ASCII)

_ELSEWHERE = {"service", "options", "search_path"}
"""Options of a URL that may lead to a database or schema that the rest of the URL does not name."""


def database_identity(url: str) -> str | None:
    """
    Return ``user@host:port,host:port/database``, each part percent-encoded, or None if a part is unknown.

    Raises:
        ConfigurationError: *url* cannot be read.
    """
    with suppress(ValueError):  # it may quote the URL, so it must not even be the context of the error below
        parts = urlsplit(url)
        if parts.netloc.count("@") <= 1 and not parts.fragment:
            options = dict(parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query)))
            return _identity(parts.netloc, unquote(parts.path.removeprefix("/")), options)
    msg = (
        "url must be like postgresql://user:password@host:5432/database?option=value, "
        "with %40 for @, %2F for / and so on inside a name or a password"
    )
    raise ConfigurationError(msg)


def _identity(netloc: str, path: str, options: dict[str, str]) -> str | None:
    credentials, _, hosts = netloc.rpartition("@")
    user = unquote(credentials.partition(":")[0]) or options.get("user") or os.environ.get("PGUSER") or _login()
    database = path or options.get("dbname") or options.get("database") or os.environ.get("PGDATABASE") or user
    ports = options.get("port") or os.environ.get("PGPORT") or "5432"
    servers = _hosts(unquote(hosts) or options.get("host") or os.environ.get("PGHOST") or "", ports)
    if options.keys() & _ELSEWHERE or "PGSERVICE" in os.environ or not (user and database and servers):
        return None
    return f"{quote(user, safe='')}@{servers}/{quote(database, safe='')}"


def _hosts(text: str, ports: str) -> str:
    """Return the hosts in *text*, each with its own port or one from *ports*: one for all hosts, or one for each."""
    hosts = text.split(",") if text else []
    each = ports.split(",") if "," in ports else [ports] * len(hosts)
    if hosts and len(each) != len(hosts):
        raise ValueError
    return ",".join(_host(host, port) for host, port in zip(hosts, each, strict=False))


def _host(text: str, port: str) -> str:
    if text.startswith("/"):  # the directory of a Unix socket
        return f"{quote(text, safe='')}:{int(port)}"
    match = _HOST.fullmatch(text)
    if match is None or not match["host"]:
        raise ValueError
    return f"{quote(match['host'].lower(), safe='[]:')}:{int(match['port'] or port)}"


def _login() -> str | None:
    try:
        return getuser()
    except (KeyError, OSError):
        return None
