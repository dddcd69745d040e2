"""
Splits the URL of a store into its parts.

    scheme://[user[:password]@]host[:port][,host[:port]...][/path][?query]

All backends and guards, and the command line, read their URLs here. `urllib.parse.urlsplit` knows one host only, and
the security releases of Python refuse a list of hosts that contains an IPv6 address. The drivers read URLs with it, so
they are given the parts instead.

A password that was not percent-encoded may end up in any part of a URL. An error names the part and never repeats it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from ipaddress import IPv6Address
from typing import NamedTuple, NoReturn
from urllib.parse import unquote

from fencing_sdk.errors import ConfigurationError

__all__ = [
    "HostAddress",
    "StoreUrl",
    "decoded",
    "is_ipv6",
    "joined",
    "read_database",
    "read_hosts",
    "read_port",
    "refuse_url",
    "split_url",
]

_PORTS = range(1, 65536)
_LONGEST_PORT = 5
_LONGEST_DATABASE = 10
_IPV6 = re.compile(r"(?P<address>[0-9A-Fa-f:.]{2,45})(?:%(?!25\Z)(?:25)?(?P<zone>[A-Za-z0-9._~-]{1,64}))?")
"""An address and its zone. The '%' between them is written %25 in a URL."""
_NOT_IN_A_HOST = frozenset('[]<>@,?#\\^`{|}"')
_HOST_FIRST = re.compile(r"(?:\[[^]]*]|[^:,\[]+)(?::[0-9]{1,5})?,")


class HostAddress(NamedTuple):
    """One host of a list, decoded and without brackets, and its port if the text names one."""

    host: str
    port: int | None

    def at(self, port: int) -> tuple[str, int]:
        """The host with its port, or with *port* if the text names none."""
        return self.host, self.port or port


@dataclass(frozen=True, slots=True, repr=False)
class StoreUrl:
    """The parts of a URL. There is no repr, because most of them may hold a password."""

    scheme: str
    """Empty if the text is no URL."""
    user: str | None
    """Decoded; None if there is no ``@``."""
    password: str | None
    """Decoded; None if there is no ``:`` before the ``@``."""
    hosts: str
    """As it stands in the URL; see `addresses`."""
    path: str
    """As it stands in the URL, with its first slash."""
    query: str

    def addresses(self) -> tuple[HostAddress, ...]:
        """
        Read the hosts, separated by commas.

        Raises:
            ConfigurationError: one of them cannot be read.
        """
        return read_hosts(self.hosts.split(","), "url")

    def host_texts(self) -> list[str]:
        """
        Return the hosts as the arguments of a backend have them.

        Raises:
            ConfigurationError: one of them cannot be read.
        """
        self.addresses()
        return self.hosts.split(",")


def split_url(url: str) -> StoreUrl:
    """
    Split *url*.

    Raises:
        ConfigurationError: a part cannot be told from the next one, or is not UTF-8 when it is decoded.
    """
    scheme, mark, rest = url.partition("://")
    if not mark:
        return StoreUrl("", None, None, "", "", "")
    if "#" in rest:
        refuse_url("has a '#', after which nothing would be read; write %23 where it is meant")
    rest, _, query = rest.partition("?")
    authority, slash, path = rest.partition("/")
    login, at, hosts = authority.rpartition("@")
    if hosts and "@" in path:
        refuse_url("has a '/' before an '@'; in user and password write %2F for '/', in a path %40 for '@'")
    if "@" in login:
        refuse_url("has two '@'; user and password stand once, before all hosts, with %40 for an '@' in them")
    if _HOST_FIRST.match(login):
        refuse_url("has a host before the user; user and password stand once, before all hosts, with %2C for a ','")
    user, colon, password = login.partition(":")
    return StoreUrl(
        scheme,
        user=decoded(user, "user") if at else None,
        password=decoded(password, "password") if colon else None,
        hosts=hosts,
        path=slash + path,
        query=query,
    )


def read_hosts(texts: Iterable[object], parameter: str, *, sockets: bool = False) -> tuple[HostAddress, ...]:
    """
    Read ``host``, ``host:port`` or ``[address]:port`` of each text.

    Args:
        texts: They stand in *parameter*, which errors name.

        parameter: Such as ``"url"``.

        sockets: Whether a host may be the folder of a Unix socket.

    Raises:
        ConfigurationError: one of the texts cannot be read.
    """
    return tuple(_host(text, f"host {number} of {parameter}", sockets) for number, text in enumerate(texts, 1))


def _host(text: object, which: str, sockets: bool) -> HostAddress:  # noqa: FBT001  (private)
    if not isinstance(text, str):
        _refuse(which, f"must be a str such as 'host:port', not {type(text).__name__}")
    if any(char.isspace() for char in text):
        _refuse(which, "has a space or a line break; write commas alone between hosts")
    if text.startswith("["):
        host, port = _bracketed(text, which)
    else:
        host, colon, number = text.partition(":")
        if ":" in number:
            _refuse(which, "has an IPv6 address without brackets, as in [::1]:80, or a ':' that is not percent-encoded")
        port = number if colon else None
        host = _name(host, which, sockets=sockets)
    return HostAddress(host, None if port is None else read_port(port, which))


def _name(text: str, which: str, *, sockets: bool) -> str:
    name = _decoded(text)
    if name is None:
        _refuse(which, "has bytes that are not UTF-8")
    if not name:
        _refuse(which, "is empty; is there a comma or a ':' too many?")
    if _has_control(name) or any(char.isspace() for char in name):
        _refuse(which, "has a space or a control character")
    if _NOT_IN_A_HOST & set(name) or ("/" in name and not (sockets and name.startswith("/"))):
        _refuse(which, "has a character that is part of no host; is one in user or password not percent-encoded?")
    return name if "/" in name else name.lower()


def _bracketed(text: str, which: str) -> tuple[str, str | None]:
    inside, bracket, rest = text[1:].partition("]")
    match = _IPV6.fullmatch(inside)
    if not bracket or rest[:1] not in {"", ":"} or match is None or not is_ipv6(match["address"]):
        _refuse(which, "has brackets around what is no IPv6 address; write [::1]:80 or [fe80::1%25eth0]:80")
    zone = f"%{match['zone']}" if match["zone"] else ""
    return match["address"].lower() + zone, rest[1:] if rest else None


def is_ipv6(text: str) -> bool:
    """Whether *text* is an IPv6 address without brackets and zone."""
    try:
        IPv6Address(text)
    except ValueError:
        return False
    return True


def read_port(text: str, which: str) -> int:
    """
    Return the number of a port.

    Raises:
        ConfigurationError: *text* is none; *which* names it.
    """
    if not (text.isascii() and text.isdigit() and len(text) <= _LONGEST_PORT and int(text) in _PORTS):
        _refuse(which, "has a port that is no number from 1 to 65535")
    return int(text)


def read_database(path: str) -> int | None:
    """
    Return the number of a Redis database, which is the *path* of a URL; None if the path is empty.

    Raises:
        ConfigurationError: *path* is no number.
    """
    text = path.strip("/")
    if text and not (text.isascii() and text.isdigit() and len(text) <= _LONGEST_DATABASE and int(text) < 2**31):
        refuse_url("must have the number of a database as its path, such as /0")
    return int(text) if text else None


def decoded(text: str, part: str) -> str:
    """
    Decode the percent-encoded *part* of a URL.

    Raises:
        ConfigurationError: it is not UTF-8, or has a control character.
    """
    plain = _decoded(text)
    if plain is None:
        refuse_url(f"has bytes in its {part} that are not UTF-8; percent-encode special characters as UTF-8")
    if _has_control(plain):
        refuse_url(f"has a control character in its {part}, such as a line break at the end")
    return plain


def _decoded(text: str) -> str | None:
    try:
        plain = unquote(text, errors="strict")
        plain.encode()  # no lone surrogate
    except UnicodeError:  # it quotes the text, so it must not become the context of an error
        return None
    return plain


def _has_control(text: str) -> bool:
    return any(char < " " or char == "\x7f" for char in text)


def joined(host: str, port: int | None) -> str:
    """``host:port``, with brackets around an IPv6 address."""
    shown = f"[{host}]" if ":" in host else host
    return shown if port is None else f"{shown}:{port}"


def refuse_url(how: str) -> NoReturn:
    """Raise a `ConfigurationError` that says what is wrong with the URL."""
    _refuse("url", how)


def _refuse(which: str, how: str) -> NoReturn:
    msg = f"{which} {how}"
    raise ConfigurationError(msg)
