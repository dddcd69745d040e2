"""The stand-in for Kahuna survives what a real one survives, and can be started as a program."""

import asyncio
import subprocess
import sys
from pathlib import Path

import aiohttp
import pytest
from kahuna_server import HOST, KahunaServer
from local_ports import free_port

from fencing_sdk.abc import Busy, Claim, Grant, Holder
from fencing_sdk.backends.kahuna import from_url

pytest_plugins = ["kahuna_fixtures"]

ROOT = Path(__file__).parent.parent.parent
DEEP = "[" * 100_000
HOSTILE = {
    "deep": DEEP,
    "deep and closed": DEEP + "]" * 100_000,
    "deep in a member": '{"resource":"a","more":' + '{"a":' * 100_000 + "1" + "}" * 100_001,
    "65 levels": '{"resource":"a","more":' + "[" * 64 + "]" * 64 + "}",
    "long number": '{"resource":"a","durability":' + "9" * 100_000 + "}",
    "no number": '{"resource":"a","durability":NaN}',
    "UTF-16": '{"resource":"a"}'.encode("utf-16"),
    "no text": b"\xff\xfe\xfd",
}


@pytest.mark.parametrize("body", HOSTILE)
async def test_no_body_brings_a_node_down(kahuna_server: KahunaServer, body: str):
    raw = HOSTILE[body]
    async with aiohttp.ClientSession(headers={"Content-Type": "application/json"}) as session:
        for _ in range(2):
            for path in ("locks/get-info", "locks/try-lock", "kv/try-set"):
                url = f"{kahuna_server.origins[0]}/v1/{path}"
                async with session.post(url, data=raw if isinstance(raw, bytes) else raw.encode()) as response:
                    assert response.status == 400
        async with session.get(kahuna_server.origins[0]) as response:
            assert await response.text() == "Kahuna.Server"


async def test_locks_values_and_revisions_survive_a_kill(kahuna_server: KahunaServer):
    async def ask(call: str, **fields: object) -> dict[str, object]:
        async with (
            aiohttp.ClientSession() as session,
            session.post(
                f"{kahuna_server.origins[0]}/v1/kv/{call}", json={"key": "a", "durability": 1, **fields}
            ) as heard,
        ):
            return dict(await heard.json())

    backend = from_url(kahuna_server.url)
    assert await backend.acquire(Claim("a", 60.0)) == Grant(0, restarted=False)
    for value in ("b25l", "dHdv"):
        await ask("try-set", value=value, flags=1)
    await asyncio.to_thread(kahuna_server.kill)
    await asyncio.to_thread(kahuna_server.start)
    assert isinstance(await backend.inspect("a"), Holder)
    await backend.aclose()
    assert [(await ask("try-get", revision=revision))["value"] for revision in (-1, 0, 1)] == ["dHdv", "b25l", "dHdv"]


def test_it_can_be_started_as_a_program():
    """As a process of its own it stands behind FENCING_TEST_KAHUNA_URL like a real one."""
    command = [sys.executable, "-m", "tests.servers.kahuna_server", "--ports", f"{free_port()},{free_port()}"]

    async def acquired(endpoints: str) -> Grant | Busy:
        backend = from_url(f"kahuna://{endpoints}")
        try:
            return await backend.acquire(Claim("a", 60.0))
        finally:
            await backend.aclose()

    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        urls = program.stdout.readline().strip().split(",")
        assert [url.rpartition(":")[0] for url in urls] == [f"http://{HOST}"] * 2
        endpoints = ",".join(url.removeprefix("http://") for url in urls)
        assert asyncio.run(acquired(endpoints)) == Grant(0, restarted=False)
        program.communicate()
    assert program.returncode == 0
