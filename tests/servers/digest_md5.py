"""As much of pure-sasl as kazoo asks for, so that the tests need no package: a login by DIGEST-MD5 (RFC 2831)."""

import re
import sys
from hashlib import md5
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest


class SASLError(Exception): ...


class SASLClient:
    """The client's side of one login."""

    def __init__(self, host: str, *, service: str, mechanism: str, username: str = "", password: str = "") -> None:
        self.complete = False
        self._mechanism = mechanism
        self._login = (username, password)
        self._uri = f"{service}/{host}"

    def process(self, challenge: bytes | None = None) -> bytes | None:
        if self._mechanism != "DIGEST-MD5":
            raise SASLError(self._mechanism)
        said = dict(re.findall(r'([a-z-]+)="?([^",]*)"?', (challenge or b"").decode()))
        self.complete = "rspauth" in said
        return self.prove(said["realm"], said["nonce"]).encode() if "nonce" in said else None

    def prove(self, realm: str, nonce: str) -> str:
        user, password = self._login
        secret = md5(f"{user}:{realm}:{password}".encode()).digest() + f":{nonce}:ours".encode()
        where = md5(f"AUTHENTICATE:{self._uri}".encode()).hexdigest()
        proof = md5(f"{md5(secret).hexdigest()}:{nonce}:00000001:ours:auth:{where}".encode()).hexdigest()
        return (
            f'username="{user}",realm="{realm}",nonce="{nonce}",cnonce="ours",nc=00000001,qop=auth,'
            f'digest-uri="{self._uri}",response={proof},charset=utf-8'
        )

    def dispose(self) -> None: ...


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let kazoo find this in the place of pure-sasl for one test."""
    package = ModuleType("puresasl")
    package.__spec__ = ModuleSpec("puresasl", None)
    package.__dict__.update(SASLError=SASLError, SASLProtocolException=SASLError, client=sys.modules[__name__])
    monkeypatch.setitem(sys.modules, "puresasl", package)
    monkeypatch.setattr("kazoo.protocol.connection.puresasl", package, raising=False)
    monkeypatch.setattr("kazoo.protocol.connection.PURESASL_AVAILABLE", True)
