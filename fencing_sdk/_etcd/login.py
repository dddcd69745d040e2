"""Who asks etcd, and the token that a login gives."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple

from fencing_sdk._etcd.shared_call import SharedCall
from fencing_sdk._values.clock import BootClock

__all__ = ["Credentials", "Login"]

_LIMIT = 30.0
"""Seconds for which one login serves others who want one."""


class Credentials(NamedTuple):
    """The user of etcd's login. Never shown."""

    user: str
    password: str

    def __repr__(self) -> str:
        return "<Credentials>"


class Login:
    """The token of a user, made once for all who need it, and again when etcd does not know it any more."""

    def __init__(self, credentials: Credentials) -> None:
        self.credentials = credentials
        self._known = False
        self._token: str | None = None
        self._flight: SharedCall[str | None] | None = None

    async def token(self, authenticate: Callable[[], Coroutine[Any, Any, str | None]]) -> str | None:
        """What to send: None where etcd does not ask."""
        if self._known:
            return self._token
        now = BootClock().now()
        flight = self._flight
        if flight is None or not flight.takes(now - _LIMIT):
            flight = self._flight = SharedCall(authenticate, now)
        self._token = await flight.join()
        self._known = True
        return self._token

    def forget(self, token: str | None) -> None:
        """*token* is not accepted; if there is another one meanwhile, that may be."""
        if token is None or token == self._token:
            self._known = False

    async def aclose(self) -> None:
        flight, self._flight = self._flight, None
        if flight is not None:
            await flight.aclose()
