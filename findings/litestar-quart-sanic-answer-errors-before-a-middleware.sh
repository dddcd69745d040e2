#!/usr/bin/env bash
# Litestar 2.25.0, Quart 0.22.0, Sanic 25.12.1 | Starlette 1.10.0 (add_middleware); httpx 0.28.1; Python 3.11.7.
#
# An ASGI middleware that answers an error of the handler, such as a refused lock by 423, never sees that error in Litestar,
# Quart and Sanic: they turn it into a 500 inside, and callers and proxies repeat a 500. Their own error handlers see it.
# Starlette hands it to what `add_middleware` has added, and not to a middleware around the whole application.
#
# Seen:
#   Litestar 500, Quart 500, Sanic 500, Starlette (add_middleware) 423, Starlette (around it) 500
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
uv venv --quiet "$folder/venv"
uv pip install --quiet --python "$folder/venv" litestar==2.25.0 quart==0.22.0 sanic==25.12.1 starlette==1.10.0 httpx==0.28.1
"$folder/venv/bin/python" - 2>/dev/null <<'PYTHON'
import asyncio

import httpx
from litestar import Litestar, get
from quart import Quart
from sanic import Sanic
from starlette.applications import Starlette
from starlette.routing import Route


class Refused(Exception):
    pass


class Answers:
    """The middleware: 423 for Refused."""

    def __init__(self, app):
        self.app = app

    async def __call__(self, scope, receive, send):
        begun = False

        async def watched(message):
            nonlocal begun
            begun = True
            await send(message)

        try:
            await self.app(scope, receive, watched)
        except Refused:
            if begun:
                raise
            await send({"type": "http.response.start", "status": 423, "headers": []})
            await send({"type": "http.response.body", "body": b""})


async def refuse(*_request):
    raise Refused


@get("/")
async def with_litestar() -> str:
    raise Refused


with_quart = Quart("a")
with_quart.get("/")(refuse)
with_sanic = Sanic("a")
with_sanic.get("/")(refuse)
inside = Starlette(routes=[Route("/", refuse)])
inside.add_middleware(Answers)


async def main():
    with_sanic.asgi = True
    await with_sanic._startup()  # as its lifespan does
    found = {}
    apps = {
        "Litestar": Answers(Litestar([with_litestar])),
        "Quart": Answers(with_quart),
        "Sanic": Answers(with_sanic),
        "Starlette (add_middleware)": inside,
        "Starlette (around it)": Answers(Starlette(routes=[Route("/", refuse)])),
    }
    for name, app in apps.items():
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://a") as client:
            found[name] = (await client.get("/")).status_code
    print(", ".join(f"{name} {status}" for name, status in found.items()))
    assert list(found.values()) == [500, 500, 500, 423, 500]


asyncio.run(main())
PYTHON
