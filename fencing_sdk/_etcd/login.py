"""The user that asks etcd, and the token that a login gives."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple

from fencing_sdk._values.clock import BootClock
from fencing_sdk._values.shared_call import SharedCall

__all__ = ["Credentials", "Login"]

_LIMIT = 30.0
"""Seconds for which further callers may join a login that is under way."""


class Credentials(NamedTuple):
    """A user and a password. Its repr shows neither."""

    user: str
    password: str

    def __repr__(self) -> str:
        return "<Credentials>"


class Login:
    """The token of a user: one login serves all callers, until etcd does not accept the token any more."""

    def __init__(self, credentials: Credentials) -> None:
        self.credentials = credentials
        self._known = False
        self._token: str | None = None
        self._call: SharedCall[str | None] | None = None

    async def token(self, authenticate: Callable[[], Coroutine[Any, Any, str | None]]) -> str | None:
        """The token to send, or None where etcd asks for no login."""
        if self._known:
            return self._token
        now = BootClock().now()
        call = self._call
        if call is None or not call.can_join(now - _LIMIT):
            call = self._call = SharedCall(authenticate, now)
        self._token = await call.join()
        self._known = True
        return self._token

    def forget(self, token: str | None) -> None:
        """Log in again if *token*, which etcd does not accept, is still the present one; None is any token."""
        if token is None or token == self._token:
            self._known = False

    async def aclose(self) -> None:
        """Cancel the login that is under way."""
        call, self._call = self._call, None
        if call is not None:
            await call.aclose()
