"""The plugin in projects of their own, in tasks and in threads."""

from __future__ import annotations

import asyncio
import re
import threading
from pathlib import Path

import pytest
from page_project import run_pytest, write_from_page
from patience import wait_until

from fencing_sdk import AcquireTimeoutError, LeaseLostError, LockHeldError, LossReason, UsageError
from fencing_sdk.errors import AcquireCancelledError
from fencing_sdk.recipes import Ran, Skipped
from fencing_sdk.sync import connect, current_lease, current_token
from fencing_sdk.testing import World, _plugin_worlds

pytest_plugins = ["fencing_sdk.testing.plugin"]


# The plugin in a project of its own: real pytest in its own process, on a service with a bug and on the mended one.


ALONE = "--disable-plugin-autoload"
IN_PROJECT = 'pytest_plugins = ["fencing_sdk.testing.plugin"]\n'


def write_project(folder: Path, **files: str) -> None:
    for name, text in {"conftest": IN_PROJECT, **files}.items():
        (folder / f"{name}.py").write_text(text)


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    """The project of the page for coroutines."""
    write_from_page("testing.md", tmp_path, "shop.py", "test_shop.py")
    return tmp_path


def test_the_test_of_the_page_has_ten_lines(shop: Path):
    test = (shop / "test_shop.py").read_text().partition("def test_")[2]
    assert len(test.splitlines()) <= 10


def test_the_service_of_the_page_is_caught_and_the_history_is_shown_once(shop: Path):
    code, output = run_pytest(shop, ALONE)
    assert code == pytest.ExitCode.TESTS_FAILED, output
    assert "assert ['Bob', 'Ada'] == ['Bob']" in output
    assert "1 failed" in output
    assert "1 error" not in output, "one story, one verdict"
    assert output.count("history of the lock world") == 1
    assert re.search(r"1\.000000 Ada paused\n.*Bob acquired seats/42 token=2\n.*Ada resumed\n", output, re.DOTALL)


def test_the_mended_service_passes(shop: Path):
    service = shop / "shop.py"
    careless = "seats.buyers.append(buyer)"
    assert careless in service.read_text()
    mended = service.read_text().replace(
        careless, 'MemoryGuard().write("seats/42", lease.token, seats.buyers.append, buyer)'
    )
    service.write_text(f"from fencing_sdk.guards.memory import MemoryGuard\n{mended}")
    code, output = run_pytest(shop, ALONE)
    assert code == pytest.ExitCode.OK, output
    assert "1 passed" in output


def test_an_error_that_nobody_waited_for_fails_a_test_and_is_no_second_verdict_on_a_failed_one(tmp_path: Path):
    story = """
async def fail():
    raise RuntimeError("nobody waits for this")

def test_passes(lock_world):
    kept.append(lock_world.client("A").start(fail))
    lock_world.sleep(1)

def test_fails(lock_world):
    test_passes(lock_world)
    assert False

kept = []
"""
    write_project(tmp_path, test_story=story)
    code, output = run_pytest(tmp_path, ALONE)
    assert code == pytest.ExitCode.TESTS_FAILED
    assert "1 failed, 1 passed, 1 error" in output, output
    assert "ERROR at teardown of test_passes" in output
    assert "and when the world ended: RuntimeError('nobody waits for this')" in output


@pytest.mark.slow
def test_it_gets_along_with_plugins_for_asynchronous_tests(tmp_path: Path):
    story = """
import anyio, pytest
from fencing_sdk import LeaseLostError, LossReason, connect, current_lease

async def story(backend, end, reason):
    async with connect(backend) as locks:
        with pytest.raises(LeaseLostError) as raised:
            async with locks.lock("a"):
                end(current_lease())
                await anyio.sleep_forever()
        assert raised.value.reason is reason
        assert await locks.inspect("a") is None

@pytest.mark.asyncio
async def test_asyncio(faulty_backend, expire):
    await story(faulty_backend, expire, LossReason.EXPIRED)

@pytest.mark.anyio
async def test_anyio(faulty_backend, lose):
    await story(faulty_backend, lose, LossReason.REVOKED)

@pytest.fixture
def anyio_backend():
    return "asyncio"
"""
    write_project(tmp_path, test_story=story)
    code, output = run_pytest(tmp_path, "-o", "asyncio_default_fixture_loop_scope=function")
    assert code == pytest.ExitCode.OK, output
    assert "2 passed" in output


def test_tests_without_locks_pay_for_nothing(tmp_path: Path):
    story = """
import sys

def test_nothing_is_loaded():
    assert "fencing_sdk.testing.plugin" in sys.modules
    loaded = {name for name in sys.modules if name.startswith("fencing_sdk.testing.")}
    assert loaded == {"fencing_sdk.testing.plugin"}
    assert not {"redis", "asyncpg", "kazoo", "fencing_sdk.backends.sqlite"} & sys.modules.keys()
"""
    write_project(tmp_path, test_story=story)
    code, output = run_pytest(tmp_path, ALONE)
    assert code == pytest.ExitCode.OK, output


def test_the_fixtures_are_listed_with_their_meaning(tmp_path: Path):
    write_project(tmp_path)
    _, output = run_pytest(tmp_path, ALONE, "--fixtures")
    for fixture in ("lock_world", "pause", "pause_anywhere", "expire", "lose", "faulty_backend"):
        assert re.search(rf"^{fixture} -- .*plugin\.py:\d+\n +\S", output, re.MULTILINE), output


# What the fixtures of the plugin do for `fencing_sdk.sync`: for a client of its own, and in a world.


NAME = "seats/42"
PATIENCE = 60.0

# A client of the program.


@pytest.mark.parametrize("behind", ["memory", "faulty"])
def test_the_lease_of_a_thread_ends_now(faulty_backend, end, reason, behind):
    backend = faulty_backend if behind == "faulty" else faulty_backend._backend
    events = []
    with connect(backend, namespace="shop", observers=[events.append]) as locks:
        with pytest.raises(LeaseLostError) as raised:
            with locks.lock(NAME, ttl=3600) as lease:
                end(current_lease())
                assert lease.lost_reason is reason
                assert locks.inspect(NAME) is None
                lease.check()
        assert raised.value.reason is reason
        assert [event.reason for event in events if event.kind == "lost"] == [reason]


def test_the_end_of_a_block_says_it_to_a_body_that_does_not_ask(faulty_backend, end, reason):
    with connect(faulty_backend) as locks:
        with pytest.raises(LeaseLostError) as raised:
            with locks.lock(NAME, ttl=3600):
                end(current_lease())
        assert raised.value.reason is reason


def test_the_lease_of_a_job_ends_and_a_plain_handle_does_from_any_thread(faulty_backend, end, reason):
    with connect(faulty_backend) as locks:

        @locks.job("nightly", at_least_for=60)
        def nightly():
            end(current_lease())
            return current_token()

        with pytest.raises(LeaseLostError) as raised:
            nightly()
        assert raised.value.reason is reason

        lease = locks.lock(NAME, ttl=3600).acquire()
        thread = threading.Thread(target=end, args=(lease,))
        thread.start()
        thread.join()
        assert lease.lost_reason is reason


def test_the_next_thread_in_line_is_woken(faulty_backend, end):
    with connect(faulty_backend._backend) as locks:
        lease = locks.lock(NAME, ttl=3600).acquire()
        taken = []
        waiter = threading.Thread(target=lambda: taken.append(locks.lock(NAME).acquire()))
        waiter.start()
        wait_until(lambda: locks.waiters(NAME))
        end(lease)
        waiter.join(PATIENCE)
        (following,) = taken
        assert following.token == 2
        following.release()


async def test_a_lease_of_a_task_ends_from_a_thread_that_works_for_it(faulty_backend, end, reason):
    import fencing_sdk

    async with fencing_sdk.connect(faulty_backend) as locks:
        with pytest.raises(LeaseLostError) as raised:
            async with locks.lock(NAME, ttl=3600) as lease:
                await asyncio.to_thread(end, lease)
                await asyncio.sleep(PATIENCE)
        assert raised.value.reason is reason


async def test_a_lease_whose_loop_stands_still_meanwhile_is_refused_and_goes_on(
    faulty_backend, lock_world, end, monkeypatch
):
    import fencing_sdk

    monkeypatch.setattr(_plugin_worlds, "_PATIENCE", 0.05)
    async with fencing_sdk.connect(faulty_backend) as locks:
        lease = await locks.lock(NAME, ttl=3600).acquire()

        async def inside():
            end(lease)

        with pytest.raises(UsageError, match="an event loop that does not run now"):
            lock_world.client("Ada").run(inside)
        assert await locks.lock(NAME).locked()
        assert lease.held
        await lease.release()


def test_a_plain_handle_plays_another_holder(faulty_backend):
    with connect(faulty_backend) as locks:
        with locks.lock(NAME).acquire(), pytest.raises(LockHeldError):
            locks.lock(NAME, wait=0).acquire()


def test_a_lease_of_a_closed_client_is_refused(faulty_backend, end):
    locks = connect(faulty_backend)
    with locks:
        lease = locks.lock(NAME).acquire()
    with pytest.raises(UsageError, match="is over already"):
        end(lease)


def test_a_bad_network_is_one_for_threads_too(faulty_backend):
    with connect(faulty_backend) as locks:
        faulty_backend.lose_reply("acquire", times=1)
        with locks.lock(NAME) as lease:
            assert lease.token == 1
        assert [operation for operation, _ in faulty_backend.calls][:2] == ["acquire", "acquire"]
        faulty_backend.duplicate("release", 0.01, times=1)
        locks.lock(NAME).acquire().release()
        locks.run(faulty_backend.delivered)
        assert not locks.lock(NAME).locked()


# A world.


def test_another_client_holds_the_lock_and_the_wait_takes_virtual_time(lock_world):
    ada, bob = lock_world.client("Ada"), lock_world.client("Bob")
    with ada.sync_locks.lock(NAME, ttl=10) as lease:
        with pytest.raises(LockHeldError):
            bob.sync_locks.lock(NAME, wait=0).acquire()
        with pytest.raises(AcquireTimeoutError):
            bob.sync_locks.lock(NAME, wait=100).acquire()
        assert lock_world.now > 100
        assert lease.held, "its heartbeat goes on while the body computes"
        with pytest.raises(UsageError, match="not reentrant; in a test, let another client or a plain handle hold it"):
            ada.sync_locks.lock(NAME).acquire()
    assert lock_world.holder(NAME) is None
    assert bob.acquire(NAME, wait=0).token == 2


def test_a_client_is_paused_where_its_plain_code_calls_out(lock_world, pause):
    ada, bob = lock_world.client("Ada"), lock_world.client("Bob")
    with pytest.raises(LeaseLostError) as raised:
        with ada.sync_locks.lock(NAME, ttl=10) as lease:
            with pause(ada):
                with bob.sync_locks.lock(NAME) as later:
                    assert (later.token, current_token()) == (2, 2)
                with pytest.raises(UsageError, match="client 'Ada' is paused"):
                    lease.renew()
            assert current_token() == 1
    assert raised.value.reason is LossReason.STALLED


def test_plain_code_runs_outside_of_every_event_loop(lock_world):
    """Django's ORM refuses to run where one runs."""
    ada = lock_world.client("Ada")
    with ada.sync_locks.lock(NAME):
        with pytest.raises(RuntimeError, match="no running event loop"):
            asyncio.get_running_loop()


async def test_a_world_is_driven_by_plain_code_inside_another_loop(lock_world):
    ada = lock_world.client("Ada")
    with ada.sync_locks.lock(NAME) as lease:
        lock_world.sleep(100)
        assert lease.token == 1


@pytest.mark.parametrize("named", ["by its name", "by the lease"])
def test_a_lease_of_a_world_ends_and_observers_of_the_loss_are_called_in_order(lock_world, end, reason, named, caplog):
    ada, heard = lock_world.client("Ada"), []
    with pytest.raises(LeaseLostError) as raised:
        with ada.sync_locks.lock(NAME) as lease:
            lease.on_lost(heard.append)
            end(NAME if named == "by its name" else lease)
            assert heard == [reason]
            lock_world.sleep(1)
    assert raised.value.reason is reason
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == []


def test_jobs_and_several_locks_and_what_is_run_by_the_client_are_in_a_world_too(lock_world):
    ada, bob, seats = lock_world.client("Ada"), lock_world.client("Bob"), lock_world.fenced_store(NAME)

    def nightly():
        lock_world.sleep(30)
        return int(current_token())

    outcomes = [client.sync_locks.job("nightly", at_least_for=60)(nightly)() for client in (ada, bob)]
    assert [type(outcome) for outcome in outcomes] == [Ran, Skipped]
    assert outcomes[0].value == 1
    with ada.sync_locks.multilock("a", "b") as held:
        assert set(held.tokens) == {"a", "b"}
    with ada.sync_locks.lock(NAME, fences=[seats]) as lease:
        ada.sync_locks.run(seats.write, "Ada", lease.token)
    assert seats.value == "Ada"


def test_a_wait_that_is_cancelled_or_never_ends_leaves_nothing_behind():
    world = World(patience=60)
    ada, bob, stop = world.client("Ada"), world.client("Bob"), threading.Event()
    with bob.sync_locks.lock(NAME):
        world.after(3, stop.set)
        with pytest.raises(AcquireCancelledError):
            ada.sync_locks.lock(NAME, cancel=stop).acquire()
        with pytest.raises(UsageError, match="did not end within 60 virtual seconds"):
            ada.sync_locks.lock(NAME).acquire()
    world.sleep(100)
    assert world.holder(NAME) is None
    assert [event.kind for event in ada.events].count("not_acquired") == 2


def test_a_client_that_was_closed_opens_again(lock_world):
    ada = lock_world.client("Ada")
    with ada.sync_locks as locks:
        lease = locks.lock(NAME).acquire()
    assert lease.lost_reason is LossReason.CLOSED
    with ada.sync_locks.lock(NAME) as lease:
        assert lease.token == 2


def test_a_client_does_not_wait_for_itself(lock_world):
    ada = lock_world.client("Ada")

    async def wrong():
        ada.sync_locks.lock(NAME).acquire()

    with pytest.raises(UsageError, match="would wait for itself"):
        ada.run(wrong)
