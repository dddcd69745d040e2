"""The timeline that fencing exists for, and the promises of the lock, on virtual time."""

import asyncio

import pytest

from fencing_sdk import LeaseLostError, LossReason, StaleTokenError, Token, current_token
from fencing_sdk.errors import ConfigurationError
from fencing_sdk.testing.world import World

DRIFT = 0.01
FAST, SLOW = 1.0045, 0.9955  # together within the drift that a client allows for


def test_a_paused_client_overwrites_the_work_of_the_next_holder():
    world = World()
    a, b, store = world.client("A"), world.client("B"), world.unfenced_store()
    token = a.acquire("seats/42", ttl=10).token
    a.pause(), world.sleep(12)
    b.write(store, "B", b.acquire("seats/42").token)
    a.resume(), a.write(store, "A", token)
    assert store.value == "A"
    assert [(write.client, write.token) for write in store.history] == [("B", 2), ("A", 1)]


def test_a_fenced_store_refuses_the_same_write():
    world = World()
    a, b, store = world.client("A"), world.client("B"), world.fenced_store()
    token = a.acquire("seats/42", ttl=10).token
    a.pause(), world.sleep(12)
    b.write(store, "B", b.acquire("seats/42").token)
    a.resume()
    with pytest.raises(StaleTokenError) as refused:
        a.write(store, "A", token)
    assert (refused.value.token, refused.value.fence, refused.value.conflict) == (1, 2, False)
    assert store.value == "B"
    assert [(write.client, write.accepted) for write in store.history] == [("B", True), ("A", False)]


def test_a_token_is_not_readable_after_the_pause_even_before_anything_has_run():
    with World() as world:
        a = world.client("A")
        lease = a.acquire("seats/42", ttl=10)
        a.pause()
        world.sleep(12)
        a.resume()
        with pytest.raises(LeaseLostError) as lost:
            lease.token  # noqa: B018
        assert lost.value.reason is LossReason.STALLED
        assert "lost" not in {event.kind for event in a.events}, "the read itself looked at the clock"


def test_an_answer_that_is_read_after_the_deadline_does_not_revive_a_lease():
    with World() as world:
        a = world.client("A")
        short = a.acquire("short", ttl=10, heartbeat_interval=2)  # its deadline is 7.9 s after sending
        long = a.acquire("long", ttl=100, heartbeat_interval=2)  # renewed in the same call, which may take 2 s
        a.link.delay(1.3, "renew", way="reply")
        world.sleep(3)
        assert any(line.endswith("renewed, renewed (1.3 s late)") for line in world.history)
        a.pause()
        world.sleep(5)  # the answer arrives, and the deadline passes
        a.resume()
        world.sleep(0.1)
        assert world.holder("short") == "A"
        assert [lease.held for lease in (short, long)] == [False, True]
        assert "short" not in {event.name for event in a.events if event.kind == "renewed"}


@pytest.mark.parametrize("cut", [False, True], ids=["no heartbeat gets an answer", "nothing passes"])
@pytest.mark.parametrize(("clock_rate", "service_rate"), [(SLOW, FAST), (FAST, SLOW), (1.0, 1.0)])
def test_work_is_cancelled_before_the_service_hands_the_lock_on(clock_rate, service_rate, cut):
    with World(service_rate=service_rate) as world:
        a, b = world.client("A", clock_rate=clock_rate, drift=DRIFT), world.client("B")
        ended = []

        async def body():
            async with a.locks.lock("seats/42", ttl=10, safety_buffer=0):
                try:
                    await asyncio.sleep(3600)
                finally:
                    ended.append((world.now, world.holder("seats/42")))

        working = a.start(body)
        world.sleep(1)
        a.link.drop() if cut else a.link.drop("renew")
        granted = b.acquire("seats/42")
        with pytest.raises(LeaseLostError):
            world.finish(working)
        ((moment, holder),) = ended
        assert holder == "A", "the service still counted the lock as A's when the work had ended"
        assert moment > 9, "and not earlier than it had to"
        assert granted.token == 2


def test_without_an_allowance_for_drift_the_same_work_outlives_its_grant():
    """The control for the test above: clocks that differ are what the allowance is for."""
    with World(service_rate=FAST) as world:
        a, b = world.client("A", clock_rate=SLOW, drift=0.0), world.client("B")
        ended = []

        async def body():
            async with a.locks.lock("seats/42", ttl=10, safety_buffer=0):
                try:
                    await asyncio.sleep(3600)
                finally:
                    ended.append(world.holder("seats/42"))

        working = a.start(body)
        world.sleep(1)
        a.link.drop()
        b.acquire("seats/42")
        with pytest.raises(LeaseLostError):
            world.finish(working)
        assert ended == ["B"]


def test_a_write_that_travels_for_too_long_is_refused():
    with World() as world:
        a, b, store = world.client("A"), world.client("B"), world.fenced_store()
        lease = a.acquire("seats/42", ttl=10)
        a.link.delay(15, "write", times=1)
        late = a.start(store.write, "A", lease.token)
        world.sleep(1)
        a.link.drop("renew")
        b.write(store, "B", b.acquire("seats/42").token)
        with pytest.raises(StaleTokenError):
            world.finish(late)
        assert store.value == "B"
        assert world.now > 15


def test_the_same_late_write_wins_where_nobody_looks_at_the_token():
    with World() as world:
        a, b, store = world.client("A"), world.client("B"), world.unfenced_store()
        lease = a.acquire("seats/42", ttl=10)
        a.link.delay(15, "write", times=1)
        late = a.start(store.write, "A", lease.token)
        world.sleep(1)
        a.link.drop("renew")
        b.write(store, "B", b.acquire("seats/42").token)
        world.finish(late)
        assert store.value == "A"


@pytest.mark.parametrize("raised", [True, False])
def test_a_fence_raised_at_acquisition_refuses_the_old_holder_before_the_first_write(raised):
    with World() as world:
        a, b, store = world.client("A"), world.client("B"), world.fenced_store("seats/42")
        token = a.acquire("seats/42", ttl=10).token
        a.pause()
        world.sleep(12)
        b.acquire("seats/42", fences=[store] if raised else ())
        a.resume()
        if raised:
            with pytest.raises(StaleTokenError):
                a.write(store, "A", token)
            assert (store.value, store.fence) == (None, 2)
        else:
            a.write(store, "A", token)
            assert store.value == "A", "without it the window is open until B writes"


@pytest.mark.parametrize(("kind", "value"), [("unfenced_store", "A"), ("fenced_store", "B")])
def test_only_a_fence_covers_a_stall_between_the_check_and_the_write(kind, value):
    with World() as world:
        a, b = world.client("A"), world.client("B")
        store = getattr(world, kind)()

        async def book(client, stall):
            async with client.locks.lock("seats/42", ttl=10) as lease:
                token = lease.token  # checked: still ours
                world.sleep(stall)  # a garbage collection, just here
                await store.write(client.name, token)

        first, second = a.start(book, a, 12.0), b.start(book, b, 0.0)
        world.finish(second)
        with pytest.raises(LeaseLostError):
            world.finish(first)
        world.sleep(1)
        assert [write.client for write in store.history] == ["B", "A"]
        assert store.value == value


def test_independent_stores_keep_independent_fences():
    with World() as world:
        a = world.client("A")
        first, second = world.fenced_store("first"), world.fenced_store("second")
        a.write(first, "new", 7)
        a.write(second, "old", 3)
        assert (first.fence, second.fence) == (7, 3)
        with pytest.raises(StaleTokenError):
            a.write(first, "old", 3)


def test_one_holder_writes_many_times_with_one_token():
    with World() as world:
        a, store = world.client("A"), world.fenced_store()
        lease = a.acquire("seats/42")
        for value in range(3):
            a.write(store, value, lease.token)
        assert store.value == 2


def test_an_equal_token_from_another_holder_is_a_conflict():
    with World() as world:
        a, b, store = world.client("A"), world.client("B"), world.fenced_store()
        a.write(store, "A", Token(5, "aaaaaaaa"))
        with pytest.raises(StaleTokenError) as refused:
            b.write(store, "B", Token(5, "bbbbbbbb"))
        assert refused.value.conflict
        a.write(store, "A again", Token(5))
        with pytest.raises(StaleTokenError):
            b.write(store, "B", Token(5, "bbbbbbbb"))
        assert store.value == "A again"


def test_a_fence_of_another_name_is_refused_instead_of_guarding_nothing():
    with World() as world:
        a, store = world.client("A"), world.fenced_store("disk")
        with pytest.raises(ConfigurationError, match=r"fences=\[\(store, store.name\)\]"):
            a.acquire("seats/42", fences=[store])
        lease = a.acquire("seats/42", fences=[(store, store.name)])
        assert store.fence == lease.token
        assert a.run(store.highest, "disk") == lease.token


def test_a_pause_stops_the_heartbeat_and_the_lock_moves_on_after_one_ttl():
    with World() as world:
        a, b = world.client("A"), world.client("B")
        a.acquire("seats/42", ttl=10)
        world.sleep(30)
        assert world.holder("seats/42") == "A", "a running client renews for ever"
        renewals = [event for event in a.events if event.kind == "renewed"]
        a.pause()
        paused_at = world.now
        b.acquire("seats/42")
        assert paused_at + 8 <= world.now <= paused_at + 12
        assert [event for event in a.events if event.kind == "renewed"] == renewals


def test_a_crashed_client_is_one_that_is_never_resumed():
    with World() as world:
        a, b = world.client("A"), world.client("B")
        a.acquire("seats/42", ttl=10)
        a.pause()
        assert b.acquire("seats/42").token == 2


def test_an_acquisition_that_is_given_up_without_an_answer_leaves_no_orphan():
    with World() as world:
        a, b = world.client("A"), world.client("B")
        a.link.drop("acquire", way="reply")

        async def give_up():
            async with asyncio.timeout(1):
                await a.locks.lock("seats/42", ttl=600).acquire()

        with pytest.raises(TimeoutError):
            a.run(give_up)
        (ended,) = [event for event in a.events if event.kind == "not_acquired"]
        assert (ended.reason, ended.unanswered) == ("cancelled", 1)
        world.sleep(0.1)
        assert b.acquire("seats/42", wait=0).token == 2


def test_a_release_that_overtakes_its_acquisition_leaves_no_orphan():
    with World() as world:
        a, b = world.client("A"), world.client("B")
        a.link.delay(5, "acquire", way="request")

        async def give_up():
            async with asyncio.timeout(1):
                await a.locks.lock("seats/42", ttl=60).acquire()

        with pytest.raises(TimeoutError):
            a.run(give_up)
        world.sleep(5)
        answers = [line.partition("locks > A: ")[2] for line in world.history if "locks > A" in line]
        assert answers[:2] == ["release seats/42: refused", "acquire seats/42: token 1"], "the release came first"
        assert b.acquire("seats/42", wait=0).token == 2


def test_a_released_lock_is_free_at_once():
    with World() as world:
        a, b = world.client("A"), world.client("B")
        a.release(a.acquire("seats/42", ttl=600))
        assert world.holder("seats/42") is None
        assert b.acquire("seats/42", wait=0).token == 2
        assert world.holder("seats/42") == "B"
        assert world.holder("seats/43") is None


def test_a_suspended_machine_finds_its_lease_over_although_its_timers_have_not_fired():
    with World() as world:
        a = world.client("A")
        told = []

        async def body():
            async with a.locks.lock("seats/42", ttl=10):
                loop = asyncio.get_running_loop()
                told.append(loop.time())
                try:
                    await asyncio.sleep(3600)
                finally:
                    told.append(loop.time())
                    with pytest.raises(LeaseLostError):
                        current_token()

        working = a.start(body)
        world.sleep(1)
        a.suspend()
        world.sleep(3600)
        a.resume()
        with pytest.raises(LeaseLostError):
            world.finish(working)
        assert world.now < 3604
        assert told[1] - told[0] < 4, "the loop slept with the machine, and the next heartbeat saw it"
