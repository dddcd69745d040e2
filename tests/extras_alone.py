"""Use what one extra installs, where the packages of no other extra are: `python tests/extras_alone.py EXTRA`."""

import asyncio
import subprocess
import sys
from pathlib import Path

import fencing_sdk
import fencing_sdk.sync
from fencing_sdk import BackendUnavailableError, connect

NOWHERE = "127.0.0.1:1"


def hold(url: str, **options: object) -> None:
    async def held() -> None:
        async with connect(url, **options) as locks, locks.lock("a") as lease:
            assert lease.token > 0

    asyncio.run(held())


def reach(url: str) -> None:
    """Let the driver find out that no server is there."""
    try:
        hold(url)
    except BackendUnavailableError:
        return
    raise AssertionError(url)


def nothing() -> None:
    hold("memory://")
    hold("sqlite:///locks.db")
    for url in (f"etcd://{NOWHERE}", f"kahuna://{NOWHERE}"):
        reach(url)
    with fencing_sdk.sync.connect("sqlite:///locks.db") as locks, locks.lock("a"):
        pass
    fencing("run", "a", "--", "true")


def cli() -> None:
    for words in (["ls"], ["show", "a"], ["doctor", "--for", "1s"], ["--help"]):
        fencing(*words)


def fencing(*words: str) -> None:
    command = Path(sys.executable).with_name("fencing")
    subprocess.run([command, *words], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


async def fastapi() -> None:
    from typing import Annotated

    from fastapi import FastAPI

    from fencing_sdk import Token
    from fencing_sdk.guards.memory import MemoryGuard
    from fencing_sdk.integrations.fastapi import Fenced, answer_problems

    app, heard = FastAPI(), []
    answer_problems(app)

    @app.put("/seats/{seat}")
    async def book(seat: str, token: Annotated[Token, Fenced(MemoryGuard(), resource="seats/{seat}")]) -> int:
        return token

    async def receive() -> dict[str, object]:
        return {"type": "http.request"}

    async def send(message: dict[str, object]) -> None:
        heard.append(message)

    headers = [(b"fencing-token", b"7")]
    scope = {"type": "http", "method": "PUT", "path": "/seats/42", "query_string": b"", "headers": headers}
    await app(scope, receive, send)
    assert (heard[0]["status"], heard[1]["body"]) == (200, b"7"), heard
    assert app.openapi()


def opentelemetry() -> None:
    from fencing_sdk.integrations.opentelemetry import OpenTelemetryMetrics, OpenTelemetrySpans

    hold("memory://", observers=[OpenTelemetryMetrics(), OpenTelemetrySpans()])


def prometheus() -> None:
    import prometheus_client

    from fencing_sdk.integrations.prometheus import PrometheusMetrics

    hold("memory://", observers=[PrometheusMetrics(lock_label=str)])
    assert b'fencing_hold_seconds_count{lock="a",recipe="lock"} 1.0' in prometheus_client.generate_latest()


async def sqlalchemy() -> None:
    from sqlalchemy import text
    from sqlalchemy.ext.asyncio import create_async_engine

    from fencing_sdk.guards.sql import SqlGuard

    guard, engine = SqlGuard(), create_async_engine("sqlite+aiosqlite:///app.db")
    async with engine.begin() as transaction:
        await transaction.execute(text(guard.ddl("sqlite")))
        await guard.admit(transaction, "seats/42", 7)
        await guard.admit(transaction, "seats/42", 7)
        assert (await transaction.execute(text("SELECT count(*) FROM fencing_fence"))).scalar() == 1
    await engine.dispose()


def testing() -> None:
    assert __import__("fencing_sdk.testing.plugin").testing.plugin.lock_world
    Path("test_it.py").write_text(
        "pytest_plugins = ['fencing_sdk.testing.plugin']\n"
        "def test_it(lock_world, pause):\n"
        "    async def hold(locks):\n"
        "        async with locks.lock('a') as lease:\n"
        "            return int(lease.token)\n"
        "    ada = lock_world.client('Ada')\n"
        "    assert ada.run(hold, ada.locks)\n"
    )
    subprocess.run([sys.executable, "-m", "pytest", "-q", "test_it.py"], check=True, stdout=subprocess.DEVNULL)


EXTRAS = {
    "": nothing,
    "cli": cli,
    "fastapi": lambda: asyncio.run(fastapi()),
    "mysql": lambda: reach(f"mysql://u@{NOWHERE}/db"),
    "opentelemetry": opentelemetry,
    "postgresql": lambda: reach(f"postgresql://u@{NOWHERE}/db"),
    "prometheus": prometheus,
    "redis": lambda: reach(f"redis://{NOWHERE}"),
    "sqlalchemy": lambda: asyncio.run(sqlalchemy()),
    "testing": testing,
    "zookeeper": lambda: reach(f"zookeeper://{NOWHERE}"),
}

if __name__ == "__main__":
    EXTRAS[sys.argv[1]]()
