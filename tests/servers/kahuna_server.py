"""
A stand-in for a Kahuna cluster, written from the contract alone; it contains no Kahuna code.

Started as a program it is a process of its own: several nodes, each with a port, on one lock table. Every node answers
for every lock, as real ones do, which pass a request on to the leader. With ``upstream`` it stands in front of a real
Kahuna instead of the table: each test gets a prefix of its own for its names, and the faults are the same.
"""

from __future__ import annotations

import asyncio
import binascii
import http.client
import json
import random
import signal
import ssl
import subprocess
import sys
import uuid
from base64 import b64decode
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import aiohttp
from aiohttp import web
from kahuna_faults import MISHAPS, Fault, later, play
from kahuna_store import KahunaStore
from local_ports import HOST, free_port

CALLS = ("try-lock", "try-extend", "try-unlock", "get-info")
NODE = web.AppKey("node", int)
_READY = b"ready\n"


@dataclass(slots=True)
class Settings:
    """What the process is told when it starts."""

    ports: list[int]
    journal: str
    certificate: str = ""
    key: str = ""
    upstream: str = ""
    prefix: str = ""


@dataclass(slots=True)
class Cluster:
    """The inside of the process."""

    settings: Settings
    store: KahunaStore
    faults: list[Fault] = field(default_factory=list)
    chaos: float = 0.0
    """How probable it is that a request meets one of `MISHAPS`."""
    spared: str = ""
    """The lock whose requests never do."""
    seen: list[dict[str, Any]] = field(default_factory=list)
    runners: dict[int, web.AppRunner] = field(default_factory=dict)
    session: aiohttp.ClientSession | None = None

    async def up(self, node: int) -> None:
        app = web.Application()
        app[NODE] = node
        app.router.add_post("/v1/locks/{call}", self.lock)
        app.router.add_post("/stand-in/{call}", self.told)
        runner = self.runners[node] = web.AppRunner(app, handler_cancellation=False, shutdown_timeout=0)
        await runner.setup()
        context = None
        if self.settings.certificate:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(self.settings.certificate, self.settings.key)
        port = self.settings.ports[node]
        plain = node == len(self.settings.ports) - 1  # the last one only listens to the tests
        await web.TCPSite(runner, HOST, port, ssl_context=None if plain else context, reuse_address=True).start()

    async def down(self, node: int) -> None:
        await self.runners.pop(node).cleanup()

    def heal(self) -> None:
        self.faults.clear()
        self.chaos = 0.0
        self.store.replication = KahunaStore.replication_by_default

    # What tests ask for.

    async def told(self, request: web.Request) -> web.Response:
        told = await request.json()
        match request.match_info["call"]:
            case "fault":
                self.faults.append(Fault(**told))
            case "heal":
                self.heal()
            case "chaos":
                self.chaos, self.spared = told["probability"], told["spared"]
            case "replication":
                self.store.replication = told["seconds"]
            case "reset":
                self.heal()
                self.seen.clear()
                self.store.clear()
                self.settings.prefix = told["prefix"]
            case "down":
                await self.down(told["node"])
            case "up":
                await self.up(told["node"])
            case "seen":
                return web.json_response(self.seen)
        return web.json_response(None)

    # What clients ask for.

    async def lock(self, request: web.Request) -> web.StreamResponse:
        call, node = request.match_info["call"], request.app[NODE]
        fields, refusal = await _read(request)
        peer = (request.get_extra_info("peername") or (None, None))[1]  # none when it has gone already
        self.seen.append({"call": call, "node": node, "peer": peer, **fields})
        if refusal is not None:
            return refusal
        fault = next((fault for fault in self.faults if fault.meets(call, node)), None)
        if fault is None and fields.get("resource") != self.spared and random.random() < self.chaos:
            fault = replace(random.choice(MISHAPS), apply=random.random() < 0.5)
        if fault is None:
            return await self.carry_out(call, fields)
        await asyncio.sleep(fault.delay)
        if fault.late is not None:
            later(asyncio.get_running_loop().create_task(self.carry_out_late(fault.late, call, fields)))
        apply = fault.apply and fault.late is None
        return await play(fault, request, await self.carry_out(call, fields) if apply else None)

    async def carry_out_late(self, seconds: float, call: str, fields: dict[str, Any]) -> None:
        await asyncio.sleep(seconds)
        await self.carry_out(call, fields)

    async def carry_out(self, call: str, fields: dict[str, Any]) -> web.Response:
        if self.settings.upstream:
            return await self.pass_on(call, fields)
        answer = {"servedFrom": "", "fencingToken": 0, **await self.store.answer(call, fields)}
        text = json.dumps(answer, ensure_ascii=True).replace("+", "\\u002B")  # as .NET writes it
        return web.Response(text=text, content_type="application/json")

    async def pass_on(self, call: str, fields: dict[str, Any]) -> web.Response:
        if self.session is None:
            self.session = aiohttp.ClientSession()
        body = {**fields, "resource": self.settings.prefix + fields["resource"]} if fields.get("resource") else fields
        async with self.session.post(f"{self.settings.upstream}/v1/locks/{call}", json=body) as response:
            headers = {"Date": response.headers["Date"]} if "Date" in response.headers else {}
            content = await response.read()
            return web.Response(
                status=response.status, body=content, headers=headers, content_type=response.content_type
            )


_FIELDS = {"resource": str, "owner": str, "expiresMs": int, "durability": int}


async def _read(request: web.Request) -> tuple[dict[str, Any], web.Response | None]:
    """Read the JSON of a request as ASP.NET does: unknown members are ignored, wrong types are an error."""
    if request.match_info["call"] not in CALLS:
        return {}, web.Response(status=404)
    if request.content_type != "application/json":
        return {}, web.Response(status=415)
    try:
        fields = json.loads(await request.read())
        known = {name: fields[name] for name in _FIELDS if fields.get(name) is not None}
        if not all(type(value) is _FIELDS[name] for name, value in known.items()):
            raise ValueError
        if not -(2**31) <= known.get("expiresMs", 0) < 2**31 or known.get("durability", 0) not in {0, 1}:
            raise ValueError
        b64decode(known.get("owner", ""), validate=True)
    except (ValueError, AttributeError, binascii.Error):
        return {}, web.Response(status=400, text='{"title":"Bad Request"}')
    return known, None


async def serve(settings: Settings) -> None:
    """Run until the pipe from the tests ends, which it also does when they are killed."""
    cluster = Cluster(settings, KahunaStore(Path(settings.journal)))
    cluster.store.load()
    for node in range(len(settings.ports)):
        await cluster.up(node)
    sys.stdout.buffer.write(_READY)
    sys.stdout.buffer.flush()
    await asyncio.to_thread(sys.stdin.buffer.read)
    for node in list(cluster.runners):
        await cluster.down(node)
    if cluster.session is not None:
        await cluster.session.close()


class KahunaServer:
    """The process, as the tests see it."""

    def __init__(
        self, folder: Path, *, nodes: int = 1, upstream: str = "", certificate: str = "", key: str = ""
    ) -> None:
        ports = [free_port() for _ in range(nodes + 1)]
        self.settings = Settings(ports, str(folder / "journal"), certificate, key, upstream)
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    @property
    def ports(self) -> list[int]:
        """Those of the nodes."""
        return self.settings.ports[:-1]

    @property
    def url(self) -> str:
        scheme = "kahuna+https" if self.settings.certificate else "kahuna"
        return f"{scheme}://{','.join(f'{HOST}:{port}' for port in self.ports)}"

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start, or start again with what was persistent."""
        command = [sys.executable, __file__, json.dumps(asdict(self.settings))]
        process = self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line == _READY, "the stand-in did not start"

    def kill(self) -> None:
        """End it as ``kill -9`` does."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def pause(self) -> None:
        """Stop it in the middle of whatever it does."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def reset(self) -> None:
        """Forget locks, faults and requests; start what is not running."""
        if not self.running:
            self.start()
        self.settings.prefix = f"test/{uuid.uuid4().hex}/"
        self._tell("reset", prefix=self.settings.prefix)

    def fault(self, act: str, value: object = "", **details: Any) -> None:
        """See `Fault`. A *value* that is no text becomes JSON."""
        self._tell("fault", act=act, value=value if isinstance(value, str) else json.dumps(value), **details)

    def heal(self) -> None:
        """No more faults."""
        self._tell("heal")

    def chaos(self, probability: float, *, spared: str = "") -> None:
        """Let a part of all requests, but those for the lock *spared*, meet any of `MISHAPS`."""
        self._tell("chaos", probability=probability, spared=spared)

    def replication(self, seconds: float) -> None:
        """How long a change takes, during which the lock is not answered for."""
        self._tell("replication", seconds=seconds)

    def down(self, node: int) -> None:
        """Let one node refuse connections."""
        self._tell("down", node=node)

    def up(self, node: int) -> None:
        self._tell("up", node=node)

    def seen(self, call: str | None = None) -> list[dict[str, Any]]:
        """The requests that arrived since the reset: their fields, call, node, and port of the client."""
        return [request for request in self._tell("seen") if call in {None, request["call"]}]

    def _tell(self, order: str, /, **told: Any) -> Any:
        connection = http.client.HTTPConnection(HOST, self.settings.ports[-1], timeout=20)
        try:
            connection.request("POST", f"/stand-in/{order}", json.dumps(told), {"Content-Type": "application/json"})
            response = connection.getresponse()
            body = response.read()
            assert response.status == 200, body
            return json.loads(body)
        finally:
            connection.close()


if __name__ == "__main__":
    asyncio.run(serve(Settings(**json.loads(sys.argv[1]))))
