"""As much of pure-sasl as kazoo asks for, so that the tests need no package: a login by DIGEST-MD5 (RFC 2831)."""

from __future__ import annotations

import re
import secrets
import sys
from hashlib import md5
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest


class SASLError(Exception): ...


class SASLProtocolException(Exception): ...


class SASLClient:
    """The client's side of one login."""

    def __init__(self, host: str, *, service: str, mechanism: str, username: str = "", password: str = "") -> None:
        self.complete = False
        self._mechanism = mechanism
        self._login = (username, password)
        self._uri = f"{service}/{host}"

    def process(self, challenge: bytes | None = None) -> bytes | None:
        """Answer what the server says."""
        if self._mechanism != "DIGEST-MD5":
            raise SASLError(self._mechanism)
        if not challenge:
            return None
        said = dict(re.findall(r'([a-z-]+)="?([^",]*)"?', challenge.decode()))
        if "rspauth" in said:
            self.complete = True
            return None
        return self._prove(said["realm"], said["nonce"]).encode()

    def _prove(self, realm: str, nonce: str) -> str:
        (user, password), own = self._login, secrets.token_hex(8)
        secret = md5(f"{user}:{realm}:{password}".encode()).digest() + f":{nonce}:{own}".encode()
        where = md5(f"AUTHENTICATE:{self._uri}".encode()).hexdigest()
        proof = md5(f"{md5(secret).hexdigest()}:{nonce}:00000001:{own}:auth:{where}".encode()).hexdigest()
        return (
            f'username="{user}",realm="{realm}",nonce="{nonce}",cnonce="{own}",nc=00000001,qop=auth,'
            f'digest-uri="{self._uri}",response={proof},charset=utf-8'
        )

    def dispose(self) -> None: ...


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let kazoo find this in the place of pure-sasl for one test."""
    package, client = ModuleType("puresasl"), ModuleType("puresasl.client")
    package.__spec__ = ModuleSpec("puresasl", None)
    package.__dict__.update(SASLError=SASLError, SASLProtocolException=SASLProtocolException, client=client)
    client.__dict__["SASLClient"] = SASLClient
    monkeypatch.setitem(sys.modules, "puresasl", package)
    monkeypatch.setattr("kazoo.protocol.connection.puresasl", package, raising=False)
    monkeypatch.setattr("kazoo.protocol.connection.PURESASL_AVAILABLE", True)
