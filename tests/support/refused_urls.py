"""A Python whose `urllib.parse` refuses every URL: what reads the URL of a store by itself works there too."""

from __future__ import annotations

import sys
import urllib.parse
from typing import NoReturn

import pytest


def _refuse(*_: object, **__: object) -> NoReturn:
    raise ValueError("urlsplit was called")


def refuse_every_url(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace `urlsplit` and `urlparse` in `urllib.parse`, in this package, and in the drivers that were imported."""
    monkeypatch.setattr(urllib.parse, "urlsplit", _refuse)
    monkeypatch.setattr(urllib.parse, "urlparse", _refuse)
    rooms = ("fencing_sdk", "redis", "asyncpg", "kazoo", "aiohttp", "yarl")
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in rooms:
            for function in ("urlsplit", "urlparse"):
                if function in vars(module):
                    monkeypatch.setattr(module, function, _refuse)
