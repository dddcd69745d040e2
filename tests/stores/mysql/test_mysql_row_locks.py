"""
What a history of calls, one after the other, cannot show: two clients want the row of a lock, or names that look alike.

Each story is told twice: as the store is, and with the change of one rule that the story has to notice.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import pytest
from mysql_server import MysqlServer
from mysql_stage import in_transaction
from patience import until
from stays import PATIENCE

from fencing_sdk import BackendUnavailableError
from fencing_sdk._mysql import driver
from fencing_sdk.abc import Busy, Claim, Grant, Renewal
from fencing_sdk.backends.mysql import MysqlBackend, from_url, store

pytest_plugins = ["mysql_fixtures"]

pytestmark = pytest.mark.usefixtures("patient_mysql")

LOCKED = "SELECT name FROM fencing_lock WHERE name = 'a' FOR UPDATE"
SET_GRANTS = "UPDATE fencing_lock SET grants = %s WHERE name = 'a'"


@dataclass
class Stage:
    """Two clients of one server, and what an operator sees."""

    server: MysqlServer
    backend: MysqlBackend
    rival: MysqlBackend

    async def now(self) -> int:
        return int(await self.server.value(f"SELECT {store.NOW}"))

    async def grants(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(await self.server.value("SELECT grants FROM fencing_lock"))
        return found

    async def deadlocks(self) -> int:
        """How many the server has resolved since its start."""
        counted = "SELECT count FROM information_schema.innodb_metrics WHERE name = 'lock_deadlocks'"
        return int(await self.server.value(counted))

    async def ended(self, call: Callable[[], Awaitable[Any]]) -> Any:
        """Let *call* wait for the row of a lock whose lease ends meanwhile, and return its answer."""
        grants = await self.grants()
        async with in_transaction(self.server, LOCKED) as operator:
            waiting = asyncio.ensure_future(call())
            await self.server.has_a_waiter()
            ended = json.dumps([grant | {"expires": await self.now()} for grant in grants])
            await operator.execute(SET_GRANTS, (ended,))
            await operator.execute("COMMIT")
            return await waiting


OpenStage = Callable[[], Awaitable[Stage]]
Story = Callable[[Stage], Awaitable[None]]


@pytest.fixture
async def stage(mysql_server: MysqlServer) -> AsyncIterator[OpenStage]:
    """Open two clients."""
    async with aclosing(from_url(mysql_server.url)) as backend, aclosing(from_url(mysql_server.url)) as rival:

        async def opened() -> Stage:
            for each in (backend, rival):
                await each.open()
            return Stage(mysql_server, backend, rival)

        yield opened


async def a_lock_that_is_free_since_then_is_granted(stage: Stage) -> None:
    held = await stage.rival.acquire(Claim("a", 60.0))
    assert isinstance(held, Grant)
    outcome = await stage.ended(lambda: stage.backend.acquire(Claim("a", 60.0)))
    assert isinstance(outcome, Grant)
    assert outcome.token > held.token


async def a_lock_that_is_held_is_refused(stage: Stage) -> None:
    assert isinstance(await stage.rival.acquire(Claim("a", 60.0)), Grant)
    async with in_transaction(stage.server, LOCKED) as operator:
        waiting = asyncio.ensure_future(stage.backend.acquire(Claim("a", 60.0)))
        await stage.server.has_a_waiter()
        await operator.execute("ROLLBACK")
        assert isinstance(await waiting, Busy)


async def a_lease_that_has_ended_since_then_is_not_renewed(stage: Stage) -> None:
    held = Claim("a", 900.0)  # the row is waited for during a part of that
    assert isinstance(await stage.backend.acquire(held), Grant)
    assert list(await stage.ended(lambda: stage.backend.renew([held]))) == [Renewal.REFUSED]


async def a_lease_lasts_for_its_ttl_from_then_on(stage: Stage) -> None:
    before = Claim("a", 60.0)
    await stage.backend.acquire(before)
    await stage.backend.release(before)
    async with in_transaction(stage.server, LOCKED) as operator:
        waiting = asyncio.ensure_future(stage.backend.acquire(Claim("a", 60.0)))
        await stage.server.has_a_waiter()
        freed = await stage.now()
        await operator.execute("ROLLBACK")
        assert isinstance(await waiting, Grant)
    (granted,) = await stage.grants()
    assert granted["expires"] >= freed + 60 * store.SECOND


async def two_clients_that_lock_one_row_do_not_deadlock(stage: Stage) -> None:
    """The one locks as the store does; the server sees a deadlock once both have locked, and one of them writes."""
    before = Claim("a", 60.0)
    await stage.rival.acquire(before)
    await stage.rival.release(before)
    deadlocks = await stage.deadlocks()
    async with in_transaction(stage.server, store.lock("a")) as operator:
        waiting = asyncio.ensure_future(stage.backend.acquire(Claim("a", 60.0)))
        await stage.server.has_a_waiter()
        with contextlib.suppress(driver.ServerError):  # it may be the one that is rolled back
            await operator.execute("UPDATE fencing_lock SET token = token + 1 WHERE name = 'a'")
        await operator.execute("COMMIT")
        assert isinstance(await waiting, Grant)
    assert await stage.deadlocks() == deadlocks


async def names_with_blanks_at_their_end_are_locks_of_their_own(stage: Stage) -> None:
    """The longest names there are, of characters that need four bytes each."""
    letters = "\U0001d49c" * 127
    for name in (letters, letters + " ", letters + "    "):
        assert len(name.encode()) <= 512
        held, other = Claim(name, 60.0), Claim(name, 60.0)
        assert isinstance(await stage.backend.acquire(held), Grant)
        assert isinstance(await stage.rival.acquire(other), Busy)
        assert list(await stage.backend.renew([held])) == [Renewal.RENEWED]
        assert await stage.backend.inspect(name) is not None
    found = await stage.backend.list_holders(letters, None, 10)
    assert [len(holder.name.encode()) for holder in found.holders] == [508, 509, 512]


async def first_done(stage: Stage, *calls: asyncio.Future[Any]) -> None:
    """Wait for one of *calls* while the server has its turns: a machine that stands still passes none."""
    for _ in range(40):
        await stage.now()
        if (await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED, timeout=0.05))[0]:
            return


async def who_waits_for_a_row_holds_up_no_call_about_another(stage: Stage) -> None:
    await stage.backend.acquire(Claim("a", 60.0))
    async with in_transaction(stage.server, LOCKED):
        waiting = asyncio.ensure_future(stage.backend.acquire(Claim("a", 60.0)))
        await stage.server.has_a_waiter()
        other = asyncio.ensure_future(stage.backend.acquire(Claim("b", 60.0)))
        await first_done(stage, waiting, other)
        assert (waiting.done(), other.done()) == (False, True)
    assert isinstance(await waiting, Busy)


async def a_name_that_another_is_about_to_create_holds_up_no_call(stage: Stage) -> None:
    async with in_transaction(stage.server, store.lock("a")):
        waiting = asyncio.ensure_future(stage.backend.acquire(Claim("a", 60.0)))
        await stage.server.has_a_waiter()
        other = asyncio.ensure_future(stage.backend.acquire(Claim("b", 60.0)))
        await first_done(stage, waiting, other)
        assert (waiting.done(), other.done()) == (False, True)
    assert isinstance(await waiting, Grant)


async def one_wait_in_vain_is_the_answer_to_all_that_came_before(stage: Stage) -> None:
    await stage.backend.acquire(Claim("a", 60.0))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            driver,
            "_SETTINGS",
            driver._SETTINGS.replace(f"lock_wait_timeout = {PATIENCE:.0f}", "lock_wait_timeout = 1"),
        )
        async with in_transaction(stage.server, LOCKED):
            calls = [asyncio.ensure_future(stage.backend.acquire(Claim("a", 60.0))) for _ in range(10)]
            done, _ = await asyncio.wait(calls, timeout=8.0)
            assert len(done) == len(calls)
    assert {type(call.exception()) for call in calls} == {BackendUnavailableError}


async def a_release_that_waits_for_its_row_comes_true_without_its_caller(stage: Stage) -> None:
    held = [Claim(name, 60.0) for name in "ab"]
    for claim in held:
        await stage.backend.acquire(claim)
    patient = stage.backend._mysql._patient_connection
    async with in_transaction(stage.server, "SELECT name FROM fencing_lock FOR UPDATE"):
        before = asyncio.ensure_future(stage.backend.acquire(Claim("a", 60.0)))
        await stage.server.has_a_waiter()
        releasing = asyncio.ensure_future(stage.backend.release(held[1]))
        await until(lambda: patient._queue is not None and len(patient._queue._urgent) == 1, what="the release waits")
        releasing.cancel()
        await asyncio.wait((releasing,))
    await patient.run(lambda session: session.ask("DO 0"))
    await asyncio.wait((before,))
    assert isinstance(await stage.rival.acquire(Claim("b", 60.0)), Grant)


async def a_row_that_is_locked_for_long_does_not_hide_one_that_is_busy(stage: Stage) -> None:
    """What a renewal waited for in vain it waits for last, the next time."""
    held = [Claim(name, 900.0) for name in "abc"]
    for claim in held:
        await stage.backend.acquire(claim)
    async with (
        in_transaction(stage.server, LOCKED),
        in_transaction(stage.server, "SELECT name FROM fencing_lock WHERE name = 'b' FOR UPDATE") as busy,
    ):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("fencing_sdk.backends.mysql.store._ROW_PATIENCE", 0.1)
            assert list(await stage.backend.renew(held)) == [Renewal.UNKNOWN, Renewal.UNKNOWN, Renewal.RENEWED]
            patch.setattr("fencing_sdk.backends.mysql.store._ROW_PATIENCE", 6.0)
            before = await stage.server.waiters()  # those of a connection that was closed wait on
            renewing = asyncio.ensure_future(stage.backend.renew(held))
            await stage.server.has_a_waiter(besides=before)
            await busy.execute("ROLLBACK")
            assert list(await renewing) == [Renewal.UNKNOWN, Renewal.RENEWED, Renewal.RENEWED]


STORIES: list[Story] = [
    who_waits_for_a_row_holds_up_no_call_about_another,
    a_name_that_another_is_about_to_create_holds_up_no_call,
    one_wait_in_vain_is_the_answer_to_all_that_came_before,
    a_release_that_waits_for_its_row_comes_true_without_its_caller,
    a_row_that_is_locked_for_long_does_not_hide_one_that_is_busy,
    a_lock_that_is_held_is_refused,
    a_lock_that_is_free_since_then_is_granted,
    a_lease_that_has_ended_since_then_is_not_renewed,
    a_lease_lasts_for_its_ttl_from_then_on,
    two_clients_that_lock_one_row_do_not_deadlock,
    names_with_blanks_at_their_end_are_locks_of_their_own,
]


@pytest.mark.slow
@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.__name__)
async def test_a_row_that_two_clients_want(story: Story, stage: OpenStage):
    await story(await stage())
