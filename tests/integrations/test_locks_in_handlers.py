"""
What the caller of a handler is told that needs a lock: it is taken, or the store that keeps it is down.

By FastAPI; `test_guarded_endpoints.py` has the answers of every server. The locks are kept by a real Redis server.
"""

import logging
from typing import Annotated

import pytest
from fastapi import FastAPI
from inside import LAST_CALL
from web_servers import send, uvicorn_server

from fencing_sdk import Lease, LockClient, connect
from fencing_sdk.integrations import fastapi as fenced_fastapi

pytest_plugins = ["redis_fixtures"]

LONG = 30.0
"""Seconds for which a lock is held that no test waits for."""


def ttl_for(wait: float | None) -> float:
    """A request without a limit for its wait learns after one ttl that the store is down."""
    return 2.0 if wait is None else LONG


@pytest.fixture(autouse=True)
def a_store_may_answer_late(monkeypatch):
    """A busy machine needs more than a second for an answer now and then, and the store is not down then."""
    monkeypatch.setattr(LAST_CALL, 10.0)


def fastapi_app(locks: LockClient, wait: float | None):
    app = FastAPI(lifespan=fenced_fastapi.lifespan(locks))
    fenced_fastapi.answer_problems(app)

    @app.put("/seats/{seat}")
    async def handler(
        seat: str, lease: Annotated[Lease, fenced_fastapi.Leased(locks, "seats/{seat}", ttl=ttl_for(wait), wait=wait)]
    ) -> int:
        return lease.token

    return uvicorn_server(app)


@pytest.mark.parametrize("wait", [None, 0], ids=["after one ttl", "asked once"])
async def test_a_store_that_is_down_is_503_with_a_time_to_come_back_and_is_logged(start_redis, caplog, wait):
    server = start_redis()
    async with fastapi_app(connect(server.url), wait) as url:
        assert (await send(url)).status == 200
        server.kill()
        with caplog.at_level(logging.WARNING, "fencing_sdk"):
            answer = await send(url)
    assert (answer.status, answer.problem["status"], answer.problem["title"]) == (503, 503, "Lock store unavailable")
    assert 1 <= int(answer.headers["retry-after"]) <= 60
    assert len(answer.body) < 300
    for private in (b"redis", b"127.0.0.1", b"seats"):
        assert private not in answer.body
    (line,) = [record.getMessage() for record in caplog.records if "503" in record.getMessage()]
    assert line.startswith("a request is answered with 503: RedisBackend: acquire failed: ")


async def test_a_store_that_refuses_is_503_without_a_time_because_another_try_does_not_help(start_redis, caplog):
    server = start_redis()
    async with fastapi_app(connect(server.url), 0) as url:
        server.ask("ACL", "SETUSER", "default", "-evalsha", "-eval")
        with caplog.at_level(logging.WARNING, "fencing_sdk"):
            answer = await send(url)
    assert (answer.status, answer.problem["title"]) == (503, "Lock store unavailable")
    assert "retry-after" not in answer.headers
    (record,) = [record for record in caplog.records if "503" in record.getMessage()]
    assert (record.levelname, "NOPERM" in record.getMessage()) == ("ERROR", True)


@pytest.mark.parametrize("wait", [0, 0.1], ids=["LockHeldError", "AcquireTimeoutError"])
async def test_a_lock_that_is_taken_is_423_with_a_time_to_come_back(redis_server, wait):
    async with (
        connect(redis_server.url) as others,
        others.lock("seats/42", ttl=LONG),
        fastapi_app(connect(redis_server.url), wait) as url,
    ):
        answer = await send(url)
        free = await send(url, path=b"/seats/43")
    assert (answer.status, answer.problem["title"], free.status) == (423, "Locked", 200)
    assert 1 <= int(answer.headers["retry-after"]) <= LONG
    assert b"seats" not in answer.body
