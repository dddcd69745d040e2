"""Which lease a task holds: the current one, those of its parents, what is shown of a holder, and a wait for itself."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import inspect
import json
import os
import sys
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta

import pytest
from inside import (
    LoopClock,
    facts_about_command,
    held_here,
    label_of,
    memory_on,
    on_clock,
    read_facts,
    say_detached,
    say_kept,
)
from virtual_time import in_virtual_time, settle

from fencing_sdk import (
    ConfigurationError,
    LeaseLostError,
    LockClient,
    UsageError,
    current_lease,
    current_token,
)
from fencing_sdk._values import reports
from fencing_sdk._values.claim import Holder, Waiting
from fencing_sdk.backends.memory import MemoryBackend
from fencing_sdk.errors import NoLeaseError
from fencing_sdk.recipes import holding

# ``@holding``: a function that is called without its lock is refused before its body begins.


@pytest.fixture
def store():
    return MemoryBackend(tokens="counter")


@pytest.fixture
async def locks(store):
    async with LockClient(store) as locks:
        yield locks


@holding("accounts/{account_id}")
async def withdraw(account_id, cents):
    return current_token(), cents


@holding("accounts/{account_id}")
def withdraw_at_once(account_id, cents):
    return current_token(), cents


class Account:
    def __init__(self, account_id):
        self.account_id = account_id

    @holding("accounts/{self.account_id}")
    async def withdraw(self, cents):
        return current_token(), cents

    @holding("accounts/{self.account_id}")
    def withdraw_at_once(self, cents):
        return current_token(), cents


async def outcome(value):
    return await value if inspect.isawaitable(value) else value


CALLS = {
    "async": lambda: withdraw(7, cents=5),
    "plain": lambda: withdraw_at_once(7, cents=5),
    "async method": lambda: Account(7).withdraw(5),
    "plain method": lambda: Account(7).withdraw_at_once(5),
}
calls = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)


@calls
@pytest.mark.every_loop
async def test_under_its_lock_a_function_runs(locks, call):
    async with locks.lock("accounts/7"):
        assert await outcome(call()) == (1, 5)


@calls
async def test_without_its_lock_a_function_does_not_begin(locks, call):
    for name in ("accounts/8", "accounts"):
        async with locks.lock(name):
            with pytest.raises(NoLeaseError, match="accounts/7"):
                await outcome(call())


@calls
async def test_after_the_loss_of_its_lock_a_function_does_not_begin(locks, store, call):
    with pytest.raises(LeaseLostError):
        async with locks.lock("accounts/7"):
            store.take_away("accounts/7")
            await asyncio.sleep(0)
            with pytest.raises(LeaseLostError, match="accounts/7"):
                await outcome(call())


async def test_a_coroutine_is_judged_when_its_body_begins(locks):
    async with locks.lock("accounts/7"):
        late = withdraw(7, 5)
    with pytest.raises(NoLeaseError):
        await late


async def test_a_task_that_outlives_the_lock_of_its_parent_is_refused(locks):
    released = asyncio.Event()

    async def later():
        assert await withdraw(7, 5) == (1, 5)
        await released.wait()
        await withdraw(7, 5)

    async with locks.lock("accounts/7"):
        task = asyncio.create_task(later())
        await asyncio.sleep(0)
    released.set()
    with pytest.raises(LeaseLostError):
        await task


def test_a_function_that_reads_its_lease_stays_what_it_was():
    assert inspect.iscoroutinefunction(withdraw)
    assert not inspect.iscoroutinefunction(withdraw_at_once)
    assert withdraw.__name__ == "withdraw"
    assert list(inspect.signature(withdraw).parameters) == ["account_id", "cents"]


def generator():
    yield


async def async_generator():
    yield


@pytest.mark.parametrize("function", [generator, async_generator, Account, 7])
def test_what_has_no_body_that_begins_once_is_refused(function):
    with pytest.raises(ConfigurationError, match=r"holding\(\)"):
        holding("a")(function)


def test_a_placeholder_names_a_parameter():
    with pytest.raises(ConfigurationError, match="account_number"):
        holding("accounts/{account_number}")(lambda account_id: None)
    with pytest.raises(ConfigurationError):
        holding("")


# The lease of the code that runs now.


async def test_without_a_lock_there_is_no_lease_and_the_error_says_where_there_would_be_one():
    for ask in (current_lease, current_token):
        with pytest.raises(NoLeaseError, match="no lease in this context; call from inside the block of the lock"):
            ask()
        with pytest.raises(NoLeaseError, match="no lease on 'seats/42' in this context"):
            ask("seats/42")


async def test_a_lease_is_found_by_the_users_name_and_not_by_the_stores(stage):
    stage.client._namespace = "shop"
    async with stage.lock("seats") as lease:
        assert current_lease("seats") is lease
        with pytest.raises(NoLeaseError):
            current_lease("shop:seats")


async def test_what_a_copied_context_was_entered_under_is_seen_there_only(stage):
    before = contextvars.copy_context()
    async with stage.lock() as lease:
        inside = contextvars.copy_context()
        assert before.run(held_here) == ()
    assert held_here() == ()
    assert inside.run(held_here) == (lease,)


async def test_a_child_that_enters_a_lock_does_not_change_its_parents_context(stage):
    async def child():
        async with stage.lock("inner"):
            assert [lease.name for lease in held_here()] == ["outer", "inner"]

    async with stage.lock("outer") as outer:
        await asyncio.create_task(child())
        assert held_here() == (outer,)


# What others read of a holder: from any text, which a client of another version or a stranger may have written.


FACTS = '{"host": "web-1", "pid": 812, "program": "backup.sh", "start": "2026-03-01T03:00:00+00:00"}'


def holder(label, remaining=10.0, held_for=None):
    return Holder("a", 1, "9f8a01c2", remaining, label, held_for=held_for)


@pytest.mark.parametrize(
    "text",
    [
        *("", "worker 3", "null", "[]", "7", '"host"', "{}", '{"host": "web-1"}', "[" * 1000, "\x1b[2J"),
        *("when its run has ended", "when its run has ended, kept for ages from its start (ttl 1 s)"),
        *(
            "when its run has ended, kept for 20 s from its start (ttl . s)",
            "when its run has ended, kept for \x1b[2J s from its start (ttl 1 s)",
        ),
    ],
)
def test_a_label_that_no_client_wrote_is_shown_as_it_is(text):
    assert read_facts(holder(text, 1e9)) == (None, "", None, text, None)


def test_the_facts_are_a_sentence_whose_words_cannot_move_a_cursor():
    assert (
        read_facts(holder(FACTS)).summary == "backup.sh (pid 812) on web-1 since 2026-03-01T03:00:00+00:00 by its clock"
    )
    assert read_facts(Waiting("9f8a01c2", label=FACTS)).who == read_facts(holder(FACTS)).who
    odd = json.dumps({"host": "\x1b[2J" * 90, "pid": ["\n"], "program": None, "start": "\r"})
    assert read_facts(holder(odd)).who.isprintable()
    assert len(read_facts(holder(odd)).who) < 300


@pytest.mark.parametrize(
    ("ttl", "remaining", "sure"),
    [(15, 15.0, False), (15, 25.0, False), (15, 25.1, True), (400, 490, False), (1, 12, True)],
)
def test_nothing_runs_for_sure_only_if_more_time_is_left_than_any_renewal_gives(ttl, remaining, sure):
    """Stores round up, and their clocks differ from ours."""
    facts = read_facts(holder(say_kept("worker 3", 3600, ttl), remaining))
    assert (facts.kept_until is not None, facts.state.endswith(", nothing runs")) == (sure, sure)
    assert facts.text == "worker 3"


def test_moments_are_those_of_the_reader_whatever_clock_the_holder_has(monkeypatch):
    now = datetime(2026, 3, 2, 3, tzinfo=UTC)
    monkeypatch.setattr(reports, "wall_seconds", (now - timedelta(days=1)).timestamp)
    label = say_kept(facts_about_command("backup.sh"), 60, 15)
    monkeypatch.setattr(reports, "wall_seconds", now.timestamp)
    running, kept = read_facts(holder(label, held_for=20.0)), read_facts(holder(label, 40.0, held_for=20.0))
    assert running.state == "when its run has ended, kept until 2026-03-02T03:00:40+00:00"
    assert kept.kept_until == "2026-03-02T03:00:40+00:00"
    assert running.who.endswith(" since 2026-03-02T02:59:40+00:00")
    assert kept.who == running.who
    assert read_facts(holder(label)).state == "when its run has ended, kept for 60 s from its start"


@pytest.mark.parametrize(
    ("argv", "program"),
    [
        (["/srv/app/worker.py", "--password=secret"], "worker.py"),
        (["/srv/app/reports/__main__.py"], "reports"),
        (["-c"], "-c"),
        ([""], "python"),
        ([], "python"),
        (None, "python"),
        (["/srv/" + "\U0001f600\udcff\x1b" * 90], "?" * 64),
        (["/srv/täglich"], "täglich"),
    ],
)
def test_a_program_is_named_without_its_folder_and_its_arguments(monkeypatch, argv, program):
    monkeypatch.setattr(sys, "argv", argv)
    reports._facts_about.cache_clear()
    try:
        text = label_of()
    finally:
        reports._facts_about.cache_clear()
    assert json.loads(text) == {"host": os.uname().nodename, "pid": os.getpid(), "program": program}
    assert text.isascii(), "so that a database in any encoding keeps it"
    assert "secret" not in text


def test_a_detached_lease_shows_until_when_by_the_clock_of_the_reader_and_who_has_detached_it(monkeypatch):
    monkeypatch.setattr(reports, "wall_seconds", datetime(2026, 3, 2, 3, tzinfo=UTC).timestamp)
    for label, text in ((None, ""), ("", ""), ("deploy 7", "deploy 7"), (FACTS, FACTS)):
        facts = read_facts(holder(say_detached(label), 40.0))
        assert facts.detached_until == "2026-03-02T03:00:40+00:00"
        assert facts.summary.startswith("detached until 2026-03-02T03:00:40+00:00, nothing runs")
        assert facts.text == text
    assert "backup.sh (pid 812) on web-1" in facts.summary
    assert len(say_detached("x" * reports.LABEL_LIMIT)) == reports.LABEL_LIMIT


def test_the_longest_names_stay_readable_behind_a_note(monkeypatch):
    longest = "é" * 5000
    monkeypatch.setattr(os, "uname", lambda: os.uname_result(("Linux", longest, "", "", "")))
    kept = say_kept(facts_about_command(longest), 86_400, 0.123456789012)
    assert len(kept) < reports.LABEL_LIMIT
    assert read_facts(holder(kept)).who


# A task that waits for a lock under which it was started is named after one ttl, and nothing else is.


TTL = 10.0
WARNING = (
    "task 'helper' has waited 10 s for lock 'a', which task 'parent' holds and under which it was started; "
    "if that task waits for it, neither goes on: locks are not reentrant"
)


@contextlib.asynccontextmanager
async def opened() -> AsyncIterator[LockClient]:
    asyncio.current_task().set_name("parent")
    async with on_clock(LockClient(memory_on(LoopClock())), LoopClock()) as locks:
        yield locks


async def hold(locks: LockClient, name: str = "a", **options) -> None:
    async with locks.lock(name, ttl=TTL, **options):
        pass


def helper(locks: LockClient, **options) -> asyncio.Task[None]:
    return asyncio.create_task(hold(locks, **options), name="helper")


@in_virtual_time
async def test_a_task_that_waits_for_the_lock_of_its_parent_is_named_once_after_one_ttl(caplog):
    async with opened() as locks:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(10 * TTL), locks.lock("a", ttl=TTL):
                task = helper(locks)
                await asyncio.sleep(TTL - 0.01)
                assert not caplog.messages
                await asyncio.sleep(0.02)
                assert caplog.messages == [WARNING]
                await asyncio.gather(task)
    assert caplog.messages == [WARNING]


@in_virtual_time
async def test_a_wait_for_another_lock_or_the_lock_of_another_client_is_not_named(caplog):
    async with opened() as locks, opened() as others:
        handles = [await locks.lock("b", ttl=TTL).acquire(), await others.lock("a", ttl=TTL).acquire()]
        async with locks.lock("a", ttl=TTL):
            tasks = [helper(locks, name="b"), helper(others, name="a")]
            await asyncio.sleep(2 * TTL)
            assert not any(task.done() for task in tasks)
        for handle in handles:
            await handle.release()
        await asyncio.gather(*tasks)
    assert not caplog.messages


@in_virtual_time
async def test_a_task_that_holds_the_lock_itself_is_refused_at_once(caplog):
    async with opened() as locks, locks.lock("a", ttl=TTL):
        with pytest.raises(UsageError, match="this task holds lock 'a' already; locks are not reentrant"):
            await hold(locks)
        assert await locks.lock("a").try_acquire() is None
    assert not caplog.messages


@in_virtual_time
async def test_names_of_tasks_cannot_forge_the_log(caplog):
    async with opened() as locks:
        async with locks.lock("a\u2028", ttl=TTL):
            task = asyncio.create_task(hold(locks, "a\u2028"), name="helper\nCRITICAL forged")
            await asyncio.sleep(2 * TTL)
        await task
    (message,) = caplog.messages
    assert message.isprintable()


@in_virtual_time
async def test_no_timer_is_left_behind(caplog):
    async with opened() as locks:
        async with locks.lock("a", ttl=TTL):
            task = helper(locks)
            await settle()
            task.cancel()
            await asyncio.wait([task])
            await asyncio.sleep(2 * TTL)
    assert not caplog.messages
