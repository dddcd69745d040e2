"""
The process of the stand-in: its nodes, each with a port, over one store, and what tests may tell it to do.

Every node answers for every lock and value, as real ones do, which pass a request on to the leader. With upstreams
the nodes stand in front of a real cluster instead of the store, with a prefix for each test's names, and the faults
are the same.
"""

from __future__ import annotations

import asyncio
import json
import random
import ssl
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web
from kahuna_faults import MISHAPS, Fault, later, play
from kahuna_members import Member, Members
from kahuna_store import Habits, KahunaStore
from kahuna_wire import LOCK_CALLS, VALUE_CALLS, Fields, UnreadableRequestError, read_request, written
from local_ports import HOST

NODE = web.AppKey("node", int)
READY = b"ready\n"
_BODY_LIMIT = 30_000_000
"""Bytes of a request that are read, as Kestrel has it."""


@dataclass(slots=True)
class Settings:
    """What the process is details when it starts. The last port is for the tests, the others are the nodes'."""

    ports: list[int]
    journal: str
    certificate: str = ""
    key: str = ""
    upstreams: list[str] = field(default_factory=list)
    prefix: str = ""


@dataclass(slots=True)
class Cluster:
    """The inside of the process."""

    settings: Settings
    store: KahunaStore
    members: Members
    faults: list[Fault] = field(default_factory=list)
    chaos: float = 0.0
    """How probable it is that a request meets one of `MISHAPS`."""
    spared: str = ""
    """The lock whose requests never do."""
    seen: list[dict[str, Any]] = field(default_factory=list)
    runners: dict[int, web.AppRunner] = field(default_factory=dict)
    session: aiohttp.ClientSession | None = None

    async def up(self, node: int) -> None:
        app = web.Application(client_max_size=_BODY_LIMIT)
        app[NODE] = node
        app.router.add_post("/stand-in/{call}", self.ordered)
        app.router.add_route("*", "/{path:.*}", self.asked)
        runner = self.runners[node] = web.AppRunner(app, handler_cancellation=False, shutdown_timeout=0)
        await runner.setup()
        context = None
        if self.settings.certificate:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(self.settings.certificate, self.settings.key)
        port = self.settings.ports[node]
        plain = node == len(self.settings.ports) - 1
        await web.TCPSite(runner, HOST, port, ssl_context=None if plain else context, reuse_address=True).start()

    async def down(self, node: int) -> None:
        await self.runners.pop(node).cleanup()

    def heal(self) -> None:
        self.faults.clear()
        self.chaos = 0.0
        self.store.habits = Habits()

    # What tests ask for.

    async def ordered(self, request: web.Request) -> web.Response:
        details = await request.json()
        match request.match_info["call"]:
            case "seen":
                return web.json_response(self.seen)
            case "down" | "up" as order:
                await self.move(order, **details)
            case "stop" | "go_on" | "cut" | "join" | "stick" as trouble:
                getattr(self.members, trouble)(**details)
            case order:
                self.set(order, details)
        return web.json_response(None)

    async def move(self, order: str, node: int, settle: float = 0.0) -> None:
        if order == "down":
            self.members.kill(node)
            await self.down(node)
        else:
            await self.up(node)
            self.members.begin(node, settle)

    def set(self, order: str, details: dict[str, Any]) -> None:
        match order:
            case "fault":
                self.faults.append(Fault(**details))
            case "heal":
                self.heal()
            case "chaos":
                self.chaos, self.spared = details["probability"], details["spared"]
            case "habits":
                self.store.habits = replace(self.store.habits, **details)
            case "cluster":
                for name, value in details.items():
                    setattr(self.members, name, value)
            case "reset":
                self.heal()
                self.members.reset()
                self.seen.clear()
                self.store.clear()
                self.settings.prefix = details["prefix"]

    # What clients ask for.

    async def asked(self, request: web.Request) -> web.StreamResponse:
        if request.path == "/":
            return web.Response(text="Kahuna.Server")
        kind, _, call = request.path.lower().strip("/").rpartition("/")
        if kind == "v1/cluster" and not self.settings.upstreams:
            return self.operator(call, request.app[NODE])
        if call not in {"v1/locks": LOCK_CALLS, "v1/kv": VALUE_CALLS}.get(kind, ()):
            return web.Response(status=404)
        if request.method != "POST":
            return web.Response(status=405)
        if not (request.content_type == "application/json" or request.content_type.endswith("+json")):
            return web.Response(status=415)
        try:
            fields = read_request(call, await request.read())
        except UnreadableRequestError:
            return web.Response(status=400, text='{"title":"Bad Request"}')
        return await self.read(call, fields, request)

    def operator(self, call: str, node: int) -> web.Response:
        details = {"health": self.members.health, "placement": self.members.placement}.get(call)
        if details is None:
            return web.Response(status=404)
        return web.json_response(details(node), status=200 if self.members.health(node)["ready"] else 503)

    async def read(self, call: str, fields: Fields, request: web.Request) -> web.StreamResponse:
        """Answer a request that was read, or do to it what the tests have ordered."""
        node = request.app[NODE]
        peer = (request.get_extra_info("peername") or (None, None))[1]  # none when it has gone already
        self.seen.append({"call": call, "node": node, "peer": peer, **fields})
        fault = next((fault for fault in self.faults if fault.meets(call, node)), None)
        if fault is None and fields.get("resource") != self.spared and random.random() < self.chaos:
            fault = replace(random.choice(MISHAPS), apply=random.random() < 0.5)
        if fault is None:
            return await self.carry_out(call, fields, node)
        await asyncio.sleep(fault.delay)
        if fault.late is not None:
            later(asyncio.get_running_loop().create_task(self.carry_out_late(fault.late, call, fields, node)))
        apply = fault.apply and fault.late is None
        return await play(fault, request, await self.carry_out(call, fields, node) if apply else None)

    async def carry_out_late(self, seconds: float, call: str, fields: Fields, node: int) -> None:
        await asyncio.sleep(seconds)
        await self.carry_out(call, fields, node)

    async def carry_out(self, call: str, fields: Fields, node: int) -> web.Response:
        if self.settings.upstreams:
            return await self.pass_on(call, fields, self.settings.upstreams[node % len(self.settings.upstreams)])
        answer = await self.members.answer(node, call, fields)
        return web.Response(text=written(answer), content_type="application/json")

    async def pass_on(self, call: str, fields: Fields, upstream: str) -> web.Response:
        if self.session is None:
            self.session = aiohttp.ClientSession()
        kind, name = ("locks", "resource") if call in LOCK_CALLS else ("kv", "key")
        body = {**fields, name: self.settings.prefix + fields[name]} if fields.get(name) else fields
        async with self.session.post(f"{upstream}/v1/{kind}/{call}", json=body) as response:
            headers = {"Date": response.headers["Date"]} if "Date" in response.headers else {}
            content = await response.read()
            return web.Response(
                status=response.status, body=content, headers=headers, content_type=response.content_type
            )


async def serve(settings: Settings) -> None:
    """Run until the pipe from the tests ends, which it also does when they are killed."""
    store = KahunaStore(Path(settings.journal))
    store.load()
    cluster = Cluster(settings, store, Members(store, [Member() for _ in settings.ports[:-1]]))
    for node in range(len(settings.ports)):
        await cluster.up(node)
    sys.stdout.buffer.write(READY)
    sys.stdout.buffer.flush()
    await asyncio.to_thread(sys.stdin.buffer.read)
    for node in list(cluster.runners):
        await cluster.down(node)
    if cluster.session is not None:
        await cluster.session.close()


if __name__ == "__main__":
    asyncio.run(serve(Settings(**json.loads(sys.argv[1]))))
