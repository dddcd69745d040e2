"""Simulated worlds and their network."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from fencing_sdk import BackendUnavailableError, LeaseLostError, LossReason, StaleTokenError, Token, current_token
from fencing_sdk._values import timing
from fencing_sdk._values.timing import Timing
from fencing_sdk.errors import ConfigurationError
from fencing_sdk.testing.world import World

# The timeline that fencing exists for, and the promises of the lock, on virtual time.


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
        assert any(line.endswith("token 1, token 2 (1.3 s late)") for line in world.history)
        a.pause()
        world.sleep(5)  # the answer arrives, and the deadline passes
        a.resume()
        world.sleep(0.1)
        assert world.holder("short") == "A"
        assert [lease.held for lease in (short, long)] == [False, True]
        assert "short" not in {event.name for event in a.events if event.kind == "renewed"}


def ended_without_heartbeat(world, clock_rate, *, cut):
    """Let A lose a lease under which it works; return when its work ended, and who held the lock then."""
    a, b = world.client("A", clock_rate=clock_rate), world.client("B")
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
    assert b.acquire("seats/42").token == 2
    with pytest.raises(LeaseLostError):
        world.finish(working)
    return ended[0]


@pytest.mark.parametrize("cut", [False, True], ids=["no heartbeat gets an answer", "nothing passes"])
@pytest.mark.parametrize(("clock_rate", "service_rate"), [(SLOW, FAST), (FAST, SLOW), (1.0, 1.0)])
def test_work_is_cancelled_before_the_service_hands_the_lock_on(clock_rate, service_rate, cut):
    with World(service_rate=service_rate) as world:
        moment, holder = ended_without_heartbeat(world, clock_rate, cut=cut)
        assert holder == "A", "the service still counted the lock as A's when the work had ended"
        assert moment > 9, "and not earlier than it had to"


def test_without_an_allowance_for_drift_the_same_work_outlives_its_grant(monkeypatch):
    """The control for the test above: clocks that differ are what the allowance is for."""
    monkeypatch.setattr(Timing, "validity", lambda _, ttl: ttl)
    monkeypatch.setattr(timing, "_built", timing._build)  # the real one remembers timings
    with World(service_rate=FAST) as world:
        assert ended_without_heartbeat(world, SLOW, cut=True)[1] == "B"


@pytest.mark.parametrize("fenced", [True, False])
def test_a_write_that_travels_for_too_long_is_refused_where_the_store_looks_at_the_token(fenced):
    with World() as world:
        a, b = world.client("A"), world.client("B")
        store = world.fenced_store() if fenced else world.unfenced_store()
        lease = a.acquire("seats/42", ttl=10)
        a.link.delay(15, "write", times=1)
        late = a.start(store.write, "A", lease.token)
        world.sleep(1)
        a.link.drop("renew")
        b.write(store, "B", b.acquire("seats/42").token)
        with pytest.raises(StaleTokenError) if fenced else contextlib.nullcontext():
            world.finish(late)
        assert store.value == ("B" if fenced else "A")
        assert world.now > 15


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
        assert answers[:2] == ["release seats/42: gone", "acquire seats/42: token 1"], "the release came first"
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
        heard = []

        async def body():
            async with a.locks.lock("seats/42", ttl=10):
                loop = asyncio.get_running_loop()
                heard.append(loop.time())
                try:
                    await asyncio.sleep(3600)
                finally:
                    heard.append(loop.time())
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
        assert heard[1] - heard[0] < 4, "the loop slept with the machine, and the next heartbeat saw it"


# The links of a world: what can be held up or lost, in which direction, and how often.


def lines(world, *parts):
    return [line for line in world.history if all(part in line for part in parts)]


def test_a_message_takes_the_latency_in_each_direction():
    with World(latency=0.25) as world:
        a, store = world.client("A"), world.unfenced_store()
        a.write(store, "A", 1)
        assert store.history[0].at == pytest.approx(0.25, abs=0.001)
        assert world.now == pytest.approx(0.5, abs=0.001)


def test_latencies_between_two_bounds_follow_the_seed():
    def arrivals(seed):
        with World(seed, latency=(0.1, 0.9)) as world:
            a, store = world.client("A"), world.unfenced_store()
            for value in range(5):
                a.write(store, value, 1)
            return [write.at for write in store.history]

    assert arrivals(1) == arrivals(1)
    assert arrivals(1) != arrivals(2)
    assert all(0.2 <= later - earlier <= 1.81 for earlier, later in zip(arrivals(1), arrivals(1)[1:], strict=False))


@pytest.mark.parametrize(("way", "arrival", "end"), [("request", 2, 2), ("reply", 0, 2), (None, 2, 4)])
def test_a_delay_holds_messages_up(way, arrival, end):
    with World() as world:
        a, store = world.client("A"), world.unfenced_store()
        a.link.delay(2.0, way=way)
        a.write(store, "A", 1)
        assert store.history[0].at == pytest.approx(arrival, abs=0.01)
        assert world.now == pytest.approx(end, abs=0.01)
        assert lines(world, "A > store", "(2 s late)") if way != "reply" else not lines(world, "A > store", "late")


def test_a_lost_request_changes_nothing_and_a_lost_reply_hides_what_happened():
    with World() as world:
        a, first, second = world.client("A"), world.unfenced_store("first"), world.unfenced_store("second")
        a.link.drop("write", way="request", times=1)
        a.start(first.write, "A", 1)
        world.sleep(1)
        a.link.drop("write", way="reply", times=1)
        waiting = a.start(second.write, "A", 1)
        world.sleep(1)
        assert (first.value, second.value) == (None, "A")
        assert not waiting.done()
        assert len(lines(world, "(lost)")) == 2


@pytest.mark.parametrize("later", [0.0, 3.0])
def test_a_doubled_request_takes_effect_twice_and_is_answered_once(later):
    with World() as world:
        a, store = world.client("A"), world.unfenced_store()
        a.link.duplicate(later, "write", times=1)
        a.write(store, "A", 1)
        assert world.now == pytest.approx(0.0, abs=0.01), "nobody waits for the second"
        a.write(store, "B", 1)
        world.sleep(5)
        assert sorted(write.value for write in store.history) == ["A", "A", "B"]
        assert len(lines(world, "A > store", "(again)")) == 1
        assert (store.value == "A") is (later == 3.0), "a late one overtakes what came after the first"


def test_the_second_delivery_is_not_lost_with_the_first():
    with World() as world:
        a, store = world.client("A"), world.unfenced_store()
        a.link.drop("write", way="request", times=1)
        a.link.duplicate(2.0, "write", times=1)
        a.write(store, "A", 1)
        assert store.history[0].at == pytest.approx(2.0, abs=0.01)


@pytest.mark.parametrize("later", [0.0, 0.5, 4.0])
def test_a_doubled_acquisition_is_one_grant(later):
    """The owner id makes it idempotent; nothing else in the message could."""
    with World() as world:
        a, b = world.client("A"), world.client("B")
        a.link.duplicate(later, "acquire")
        a.link.duplicate(later, "release")
        lease = a.acquire("seats/42", ttl=10)
        world.sleep(6)
        assert lease.token == b.run(b.locks.inspect, "seats/42").token == 1
        a.release(lease)
        other = b.acquire("seats/42", ttl=10)
        world.sleep(6)
        assert other.token == b.run(b.locks.inspect, "seats/42").token == 2, "a late release is the old owner's"


def test_an_acquisition_that_arrives_again_after_its_release_is_freed_by_its_ttl():
    with World() as world:
        a, b = world.client("A"), world.client("B")
        a.link.duplicate(3.0, "acquire")
        a.release(a.acquire("seats/42", ttl=10))
        world.sleep(4)
        began = world.now
        assert b.acquire("seats/42", ttl=10).token == 3
        assert world.now - began == pytest.approx(9.0, abs=1.5)


def test_faults_are_for_the_operation_they_name():
    with World() as world:
        a, store = world.client("A"), world.unfenced_store()
        a.link.drop("renew")
        lease = a.acquire("seats/42", ttl=10)
        a.write(store, "A", lease.token)
        world.sleep(8)
        assert not lease.held
        assert lines(world, "A > locks: renew", "(lost)")
        assert lines(world, "A renewal_failed seats/42")


def test_faults_end_after_as_many_messages_as_were_asked_for():
    with World() as world:
        a = world.client("A")
        lease = a.acquire("seats/42", ttl=10)
        a.link.drop("renew", times=2)
        world.sleep(60)
        assert len(lines(world, "A > locks: renew", "(lost)")) == 2
        assert lease.held, "two lost heartbeats are ridden out"


def test_delays_add_up():
    with World() as world:
        a, store = world.client("A"), world.unfenced_store()
        a.link.delay(1, way="request")
        a.link.delay(2, "write")
        a.write(store, "A", 1)
        assert store.history[0].at == pytest.approx(3, abs=0.01)


def test_healing_is_for_messages_sent_later():
    with World() as world:
        a, store = world.client("A"), world.unfenced_store()
        a.link.delay(5)
        a.start(store.write, "early", 1)
        world.sleep(0)
        a.link.heal()
        world.sleep(0.001)
        a.write(store, "late", 1)
        world.sleep(10)
        assert [write.value for write in store.history] == ["late", "early"], "a message that left is on its way"


def test_links_are_independent():
    with World() as world:
        a, b = world.client("A"), world.client("B")
        a.link.drop()
        assert b.acquire("seats/42", ttl=10).held
        with pytest.raises(BackendUnavailableError):
            a.acquire("seats/43", ttl=2, wait=4)


def test_what_was_sent_before_a_pause_travels_on_and_the_answer_waits():
    with World() as world:
        a, store = world.client("A"), world.unfenced_store()
        a.link.delay(5, "write")
        writing = a.start(store.write, "A", 1)
        world.sleep(1)
        a.pause()
        world.sleep(60)
        assert store.value == "A"
        assert not writing.done()
        a.resume()
        world.finish(writing)


def test_the_service_can_be_asked_over_the_link():
    with World() as world:
        a, b = world.client("A"), world.client("B")
        lease = a.acquire("seats/42", label="booking")
        holder = b.run(b.locks.inspect, "seats/42")
        assert (holder.token, holder.id, holder.label) == (1, lease.holder, "booking")
        assert b.run(b.locks.inspect, "seats/43") is None
        a.run(lease.renew)
        assert lines(world, "locks > A: renew seats/42: token 1")


@pytest.mark.parametrize("wrong", ["wrote", "", "Acquire"])
def test_a_misspelt_fault_is_refused_instead_of_striking_nothing(wrong):
    with World() as world:
        link = world.client("A").link
        with pytest.raises(ConfigurationError, match="operation must be one of"):
            link.drop(wrong)
        with pytest.raises(ConfigurationError, match="way must be one of"):
            link.delay(1, way=wrong)
        with pytest.raises(ConfigurationError, match="delay"):
            link.delay(-1)
