"""
Stories that no history of calls, one after the other, can show: two clients want a row, or names look alike.

A keep locks tickets and no name: the stories of a keep that is under way fail if a death is written without a lock, or
if a rule writes a ticket back as it was read.
"""

from __future__ import annotations

import asyncio
import contextlib
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
from fencing_sdk.abc import Busy, Claim, Gone, Place
from fencing_sdk.backends.mysql import MysqlBackend, from_url, lines
from fencing_sdk.backends.mysql.connection import NOW, SECOND

pytest_plugins = ["mysql_fixtures"]

pytestmark = pytest.mark.usefixtures("patient_mysql")

LOCKED = "SELECT name FROM fencing_line WHERE name = 'a' FOR UPDATE"
ROW_PATIENCE = "fencing_sdk.backends.mysql._ROW_PATIENCE"


@dataclass
class Stage:
    """Two clients of one server, and what an operator sees."""

    server: MysqlServer
    backend: MysqlBackend
    rival: MysqlBackend

    async def now(self) -> int:
        return int(await self.server.value(f"SELECT {NOW}"))

    async def deadlocks(self) -> int:
        """Count those that the server has resolved since its start."""
        counted = "SELECT count FROM information_schema.innodb_metrics WHERE name = 'lock_deadlocks'"
        return int(await self.server.value(counted))

    async def used(self, name: str = "a") -> None:
        """Let a ticket come and go."""
        claim = Claim(name, 60.0)
        await self.rival.draw(claim)
        await self.rival.give_back(claim)

    async def ended(self, call: Callable[[], Awaitable[Any]]) -> Any:
        """Let *call* wait for the row of a name whose ticket dies meanwhile, and return its answer."""
        async with in_transaction(self.server, LOCKED) as operator:
            waiting = asyncio.ensure_future(call())
            await self.server.has_a_waiter()
            await operator.execute(f"UPDATE fencing_line SET dies = {NOW} WHERE name = 'a'")
            await operator.execute("COMMIT")
            return await waiting

    async def holder_behind(self) -> Claim:
        """Let a ticket hold that was drawn behind another one, which is gone."""
        first, second = Claim("a", 60.0), Claim("a", 60.0)
        await self.rival.draw(first)
        await self.rival.draw(second)
        await self.rival.give_back(first)
        return second

    async def dies(self) -> int:
        return int(await self.server.value("SELECT dies FROM fencing_ticket WHERE token IS NOT NULL"))


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


def holds(place: object) -> bool:
    return isinstance(place, Place) and place.token is not None


async def a_name_that_is_free_since_then_is_held(stage: Stage) -> None:
    held = await stage.rival.draw(Claim("a", 60.0))
    place = await stage.ended(lambda: stage.backend.draw(Claim("a", 60.0)))
    assert holds(place)
    assert place.token > held.token


async def a_name_that_is_held_is_waited_for(stage: Stage) -> None:
    await stage.rival.draw(Claim("a", 60.0))
    async with in_transaction(stage.server, LOCKED) as operator:
        waiting = asyncio.ensure_future(stage.backend.draw(Claim("a", 60.0)))
        await stage.server.has_a_waiter()
        await operator.execute("ROLLBACK")
        assert not holds(await waiting)


async def a_ticket_that_has_died_since_then_is_not_kept(stage: Stage) -> None:
    held = Claim("a", 900.0)  # the row is waited for during a part of that
    place = await stage.backend.draw(held)
    assert await stage.ended(lambda: stage.backend.keep([(held, place.number)])) == [Gone()]


async def a_ticket_lives_for_its_ttl_from_then_on(stage: Stage) -> None:
    await stage.used()
    async with in_transaction(stage.server, LOCKED) as operator:
        waiting = asyncio.ensure_future(stage.backend.draw(Claim("a", 60.0)))
        await stage.server.has_a_waiter()
        freed = await stage.now()
        await operator.execute("ROLLBACK")
        assert holds(await waiting)
    assert await stage.server.value("SELECT dies FROM fencing_line") >= freed + 60 * SECOND


async def two_clients_that_lock_one_row_do_not_deadlock(stage: Stage) -> None:
    """The one locks as the store does; the server sees a deadlock once both have locked, and one of them writes."""
    await stage.used()
    deadlocks = await stage.deadlocks()
    async with in_transaction(stage.server, lines.wait_for("a")) as operator:
        waiting = asyncio.ensure_future(stage.backend.draw(Claim("a", 60.0)))
        await stage.server.has_a_waiter()
        with contextlib.suppress(driver.ServerError):  # it may be the one that is rolled back
            await operator.execute("UPDATE fencing_line SET last = last + 1 WHERE name = 'a'")
        await operator.execute("COMMIT")
        assert holds(await waiting)
    assert await stage.deadlocks() == deadlocks


async def names_with_blanks_at_their_end_are_names_of_their_own(stage: Stage) -> None:
    """The longest names there are, of characters that need four bytes each."""
    letters = "\U0001d49c" * 127
    for name in (letters, letters + " ", letters + "    "):
        assert len(name.encode()) <= 512
        held = Claim(name, 60.0)
        place = await stage.backend.draw(held)
        assert holds(place)
        assert isinstance(await stage.rival.draw(Claim(name, 60.0), only_if_it_holds=True), Busy)
        assert await stage.backend.keep([(held, place.number)]) == [place]
    found, _ = await stage.backend.names(letters, None, 10)
    assert [len(name.encode()) for name in found] == [508, 509, 512]


async def first_done(stage: Stage, *calls: asyncio.Future[Any]) -> None:
    """Wait for one of *calls* while the server has its turns: a machine that stands still passes none."""
    for _ in range(40):
        await stage.now()
        if (await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED, timeout=0.05))[0]:
            return


async def who_waits_for_a_row_holds_up_no_call_about_another(stage: Stage) -> None:
    await stage.backend.draw(Claim("a", 60.0))
    async with in_transaction(stage.server, LOCKED):
        waiting = asyncio.ensure_future(stage.backend.draw(Claim("a", 60.0)))
        await stage.server.has_a_waiter()
        other = asyncio.ensure_future(stage.backend.draw(Claim("b", 60.0)))
        await first_done(stage, waiting, other)
        assert (waiting.done(), other.done()) == (False, True)
    assert not holds(await waiting)


async def a_name_that_another_is_about_to_create_holds_up_no_call(stage: Stage) -> None:
    async with in_transaction(stage.server, lines.wait_for("a")):
        waiting = asyncio.ensure_future(stage.backend.draw(Claim("a", 60.0)))
        await stage.server.has_a_waiter()
        other = asyncio.ensure_future(stage.backend.draw(Claim("b", 60.0)))
        await first_done(stage, waiting, other)
        assert (waiting.done(), other.done()) == (False, True)
    assert holds(await waiting)


async def one_wait_in_vain_is_the_answer_to_all_that_came_before(stage: Stage) -> None:
    await stage.backend.draw(Claim("a", 60.0))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            driver,
            "_SETTINGS",
            driver._SETTINGS.replace(f"lock_wait_timeout = {PATIENCE:.0f}", "lock_wait_timeout = 1"),
        )
        async with in_transaction(stage.server, LOCKED):
            calls = [asyncio.ensure_future(stage.backend.draw(Claim("a", 60.0))) for _ in range(10)]
            done, _ = await asyncio.wait(calls, timeout=8.0)
            assert len(done) == len(calls)
    assert {type(call.exception()) for call in calls} == {BackendUnavailableError}


async def a_ticket_whose_row_is_locked_is_given_back_without_its_caller(stage: Stage) -> None:
    held = [Claim(name, 60.0) for name in "ab"]
    for claim in held:
        await stage.backend.draw(claim)
    patient = stage.backend._mysql._patient_connection
    async with in_transaction(stage.server, "SELECT name FROM fencing_line FOR UPDATE"):
        before = asyncio.ensure_future(stage.backend.draw(Claim("a", 60.0)))
        await stage.server.has_a_waiter()
        leaving = asyncio.ensure_future(stage.backend.give_back(held[1]))
        await until(lambda: patient._queue is not None and len(patient._queue._urgent) == 1, what="it waits")
        leaving.cancel()
        await asyncio.wait((leaving,))
    await patient.run(lambda session: session.ask("DO 0"))
    await asyncio.wait((before,))
    assert holds(await stage.rival.draw(Claim("b", 60.0)))


async def a_row_that_is_locked_for_long_does_not_hide_one_that_is_busy(stage: Stage) -> None:
    """A row that a keep waited for in vain comes last, the next time."""
    held = [Claim(name, 900.0) for name in "abc"]
    kept = [(claim, (await stage.backend.draw(claim)).number) for claim in held]
    async with (
        in_transaction(stage.server, LOCKED),
        in_transaction(stage.server, "SELECT name FROM fencing_line WHERE name = 'b' FOR UPDATE") as busy,
    ):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ROW_PATIENCE, 0.1)
            assert list(map(holds, await stage.backend.keep(kept))) == [False, False, True]
            patch.setattr(ROW_PATIENCE, 6.0)
            before = await stage.server.waiters()  # those of a connection that was closed wait on
            keeping = asyncio.ensure_future(stage.backend.keep(kept))
            await stage.server.has_a_waiter(besides=before)
            await busy.execute("ROLLBACK")
            assert list(map(holds, await keeping)) == [False, True, True]


async def a_ticket_whose_keep_is_under_way_is_not_passed_over(stage: Stage) -> None:
    """The keep has found it alive, and has locked it; then it dies; then the keep writes its new life."""
    held = await stage.holder_behind()
    await stage.server.execute(f"UPDATE fencing_ticket SET dies = {NOW}")
    number = await stage.server.value("SELECT number FROM fencing_ticket")
    locked = f"SELECT * FROM fencing_ticket WHERE name = 'a' AND number = {number} FOR UPDATE"
    async with in_transaction(stage.server, locked) as keep:
        assert not holds(await stage.backend.draw(Claim("a", 60.0)))
        await keep.execute(f"UPDATE fencing_ticket SET dies = {NOW} + 60000000 WHERE token IS NOT NULL")
        await keep.execute("COMMIT")
    (place,) = await stage.rival.keep([(held, 0)])
    assert holds(place)


async def a_life_that_a_keep_has_prolonged_meanwhile_is_not_written_back(stage: Stage) -> None:
    """A rule lets a waiting ticket hold; between its reading and its writing, the ticket is kept."""
    first, second = Claim("a", 60.0), Claim("a", 60.0)
    await stage.rival.draw(first)
    await stage.rival.draw(second)
    changes = lines.NameLine.changes

    def kept_before(line: lines.NameLine) -> list[str]:
        stage.server.ask(
            f"UPDATE {stage.server.database}.fencing_ticket SET dies = dies + 60000000, longest = 65000000"
        )
        return changes(line)

    before = int(await stage.server.value("SELECT dies FROM fencing_ticket"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lines.NameLine, "changes", kept_before)
        await stage.rival.give_back(first)
    assert await stage.dies() == before + 60 * SECOND


STORIES: list[Story] = [
    who_waits_for_a_row_holds_up_no_call_about_another,
    a_name_that_another_is_about_to_create_holds_up_no_call,
    one_wait_in_vain_is_the_answer_to_all_that_came_before,
    a_ticket_whose_row_is_locked_is_given_back_without_its_caller,
    a_row_that_is_locked_for_long_does_not_hide_one_that_is_busy,
    a_name_that_is_held_is_waited_for,
    a_name_that_is_free_since_then_is_held,
    a_ticket_that_has_died_since_then_is_not_kept,
    a_ticket_lives_for_its_ttl_from_then_on,
    two_clients_that_lock_one_row_do_not_deadlock,
    names_with_blanks_at_their_end_are_names_of_their_own,
    a_ticket_whose_keep_is_under_way_is_not_passed_over,
    a_life_that_a_keep_has_prolonged_meanwhile_is_not_written_back,
]


@pytest.mark.slow
@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.__name__)
async def test_a_row_that_two_clients_want(story: Story, stage: OpenStage):
    await story(await stage())
