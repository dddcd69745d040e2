"""The links of a world: what can be held up or lost, in which direction, and how often."""

import pytest

from fencing_sdk import BackendUnavailableError
from fencing_sdk.errors import ConfigurationError
from fencing_sdk.testing.world import World


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
        lease = a.acquire("seats/42", metadata="booking")
        holder = b.run(b.locks.inspect, "seats/42")
        assert (holder.token, holder.holder, holder.metadata) == (1, lease.holder, "booking")
        assert b.run(b.locks.inspect, "seats/43") is None
        a.run(lease.renew)
        assert lines(world, "locks > A: renew seats/42: renewed")


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
