"""Options of redis-py in the query of a URL. They are read strictly: a typing error must not turn TLS off."""

from __future__ import annotations

import ssl
from collections.abc import Callable, Mapping

from fencing_sdk.backends._shared.option_values import read_seconds, read_switch
from fencing_sdk.errors import ConfigurationError

Reader = Callable[[str, object], object]


def _text(name: str, value: object) -> object:
    if isinstance(value, str) and value:
        return value
    msg = f"{name} must be a text that is not empty"
    raise ConfigurationError(msg)


def _client_name(name: str, value: object) -> object:
    text = _text(name, value)
    if all("!" <= letter <= "~" for letter in str(text)):
        return text
    msg = f"{name} must have no spaces, and no letters beyond ASCII: the server would refuse it"
    raise ConfigurationError(msg)


def _database(name: str, value: object) -> object:
    text = str(value)
    if not isinstance(value, str | int) or isinstance(value, bool) or not (text.isascii() and text.isdigit()):
        msg = f"{name} must be a whole number from 0"
        raise ConfigurationError(msg)
    if len(text) > 9:  # noqa: PLR2004
        msg = f"{name} is too large"
        raise ConfigurationError(msg)
    return int(text)


def _choice(choices: Mapping[str, object]) -> Reader:
    def read(name: str, value: object) -> object:
        text = str(value).lower()
        if not isinstance(value, str | bool) or text not in choices:  # None is not "none": it must not turn TLS off
            msg = f"{name} must be one of {', '.join(choices)}"
            raise ConfigurationError(msg)
        return choices[text]

    return read


_READERS: Mapping[str, Reader] = {
    "db": _database,
    "username": _text,
    "password": _text,
    "client_name": _client_name,
    "socket_connect_timeout": read_seconds,
    "socket_timeout": read_seconds,
    "socket_keepalive": read_switch,
    "sentinel_username": _text,
    "sentinel_password": _text,
    "ssl_ca_certs": _text,
    "ssl_ca_data": _text,
    "ssl_certfile": _text,
    "ssl_keyfile": _text,
    "ssl_ciphers": _text,
    "ssl_cert_reqs": _choice({"required": "required", "optional": "optional", "none": "none"}),
    "ssl_check_hostname": read_switch,
    "ssl_min_version": _choice({"tlsv1.2": ssl.TLSVersion.TLSv1_2, "tlsv1.3": ssl.TLSVersion.TLSv1_3}),
}

DRIVER_OPTIONS = tuple(_READERS)
"""The options of a URL's query, or of `connect`, that belong to the driver and not to the backend."""


def driver_arguments(options: Mapping[str, object], *, refused: tuple[str, ...] = ()) -> dict[str, object]:
    """
    Convert *options*, named in `DRIVER_OPTIONS`, to arguments of redis-py's connections.

    Args:
        options: Names and values; a value from a URL is a text.

        refused: Beginnings of names that have no meaning for the scheme.

    Raises:
        ConfigurationError: a value has a wrong type or range, or the scheme does not take the option.
    """
    for name in options:
        if refused and name.startswith(refused):
            msg = f"{name} needs another scheme: write rediss:// for TLS, redis+sentinel:// for Sentinels"
            raise ConfigurationError(msg)
    return {name: _READERS[name](name, value) for name, value in options.items()}
