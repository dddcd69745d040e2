"""An election for threads: terms one after the other, what ends one, and who is told."""

import asyncio
import contextlib
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from patience import wait_until
from stays import PATIENCE

from fencing_sdk import ConfigurationError, ElectionStanding, LossReason, UsageError, current_token
from fencing_sdk.backends.memory import MemoryBackend
from fencing_sdk.recipes.election import Candidacy
from fencing_sdk.sync import connect


@pytest.fixture
def store():
    return MemoryBackend(tokens="counter")


@pytest.fixture
def locks(store):
    with connect(store) as client:
        yield client


def take_away(locks, store):
    async def revoke():
        store.take_away("a")

    locks.run(revoke)


def test_a_leader_leads_term_after_term_and_gives_the_lock_back_when_it_leaves(locks):
    election, tokens = locks.election("a"), []
    for term in election:
        with term as lease:
            assert term.lease is lease
            assert (election.leading, election.standing) == (True, ElectionStanding.LEADING)
            assert election.leader().token == current_token() == lease.token
            assert locks.status().leads == ("a",)
            assert not term.over
            tokens.append(lease.token)
        if len(tokens) == 3:
            break
    assert tokens == [1, 2, 3]
    assert (election.leading, election.standing) == (False, ElectionStanding.IDLE)
    assert locks.inspect("a") is None
    assert election.leader() is None


@pytest.mark.parametrize("checks", [True, False])
def test_a_lead_that_is_lost_ends_the_term_and_the_loop_stands_again(locks, store, checks):
    tokens = []
    for term in locks.election("a", ttl=PATIENCE):
        with term as lease:
            tokens.append(lease.token)
            if len(tokens) == 2:
                break
            take_away(locks, store)
            assert lease.wait_lost(PATIENCE) is LossReason.REVOKED
            assert term.over
            if checks:
                lease.check()
                pytest.fail("the body goes on without the lead")
    assert tokens == [1, 2]
    assert locks.inspect("a") is None


def test_the_error_of_a_body_leaves_the_loop_as_it_is(locks):
    error = ValueError("mine")
    with pytest.raises(ValueError) as raised:
        for term in locks.election("a"):
            with term:
                raise error
    assert raised.value is error
    assert locks.inspect("a") is None


def test_one_thread_leads_at_a_time_and_one_that_resigns_is_followed_by_another(locks):
    mine, led = locks.election("a"), []

    def stand(election, name):
        for term in election:
            with term as lease:
                led.append((name, lease.token))
                wait_until(lambda term=term: term.over or len(led) > 1, within=PATIENCE)
                assert lease.held, "the lock is given back when the body has ended"
            return

    with ThreadPoolExecutor(2) as pool:
        leader = pool.submit(stand, mine, "one")
        wait_until(lambda: led, within=PATIENCE)
        other = pool.submit(stand, locks.election("a"), "two")
        wait_until(lambda: len(locks.waiters("a")) == 1, within=PATIENCE)
        assert led == [("one", 1)]
        mine.resign()
        leader.result(PATIENCE)
        other.result(PATIENCE)
    assert led == [("one", 1), ("two", 2)]


def test_a_drain_ends_the_loop_of_a_leader_and_of_a_candidate_in_order(locks):
    ended = []

    def stand(name):
        for term in locks.election("a"):
            with term:
                ended.append("leads")
                wait_until(lambda term=term: term.over, within=PATIENCE)
        ended.append(name)

    with ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(stand, "leader")]
        wait_until(lambda: ended, within=PATIENCE)
        futures.append(pool.submit(stand, "candidate"))
        wait_until(lambda: len(locks.waiters("a")) == 1, within=PATIENCE)
        assert locks.drain(within=PATIENCE)
        for future in futures:
            future.result(PATIENCE)
    assert ended[0] == "leads"
    assert sorted(ended[1:]) == ["candidate", "leader"]


def test_a_term_that_is_not_entered_is_given_back_and_told(locks):
    with pytest.raises(UsageError, match="with term as lease"):
        for _ in locks.election("a"):
            pass
    assert locks.inspect("a") is None
    for term in locks.election("a"):  # noqa: B007  (used below)
        break
    assert locks.inspect("a") is None
    with pytest.raises(UsageError, match="before its loop was left, so its lock was given back"), term:
        pytest.fail("a body without the lead")


def test_a_term_is_entered_once(locks):
    for term in locks.election("a"):
        with term:
            pass
        with pytest.raises(UsageError, match="entered once"), term:
            pytest.fail("entered again")
        break


def test_a_candidate_whose_client_closes_is_told_and_leaves_the_line(tmp_path):
    url = f"sqlite:///{tmp_path}/locks.db"
    with connect(url) as locks, connect(url) as other, other.lock("a"), ThreadPoolExecutor(1) as pool:
        candidate = pool.submit(lambda: next(iter(locks.election("a"))))
        wait_until(lambda: len(other.waiters("a")) == 1, within=PATIENCE)
        locks.close()
        assert isinstance(candidate.exception(PATIENCE), UsageError)
        wait_until(lambda: not other.waiters("a"), within=PATIENCE)


def test_an_elected_function_runs_as_the_leader_and_again_after_a_loss(locks, store):
    runs = []

    @locks.elected("{name}", ttl=PATIENCE)
    def plan(name: str) -> int:
        """Make a plan."""
        runs.append(current_token())
        if len(runs) == 1:
            take_away(locks, store)
            wait_until(lambda: locks.inspect("a") is None, within=PATIENCE)
        return current_token()

    assert plan.__doc__ == "Make a plan."
    assert plan("a") == 2
    assert runs == [1, 2]
    assert locks.drain(within=0)
    assert plan("a") is None


def test_what_cannot_work_is_refused_at_once(locks):
    with pytest.raises(ConfigurationError, match=r"takes no drain: .*term\.over"):
        locks.election("a", drain=3)
    with pytest.raises(ConfigurationError, match="takes no wait"):
        locks.election("a", wait=3)
    with pytest.raises(ConfigurationError, match="plain functions"):

        @locks.elected("a")
        async def plan() -> None: ...


def test_a_lead_that_was_won_when_its_candidate_was_interrupted_is_given_back(locks, monkeypatch):
    """The thread is interrupted in its sleep at the very moment at which the loop has the lease."""
    stand, won = Candidacy.stand, []

    async def slowly(candidacy, *, resigned):
        won.append(await stand(candidacy, resigned=resigned))
        await asyncio.sleep(0.1)  # a signal that comes right before a thread sleeps does not wake it
        signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(PATIENCE)
        return won[0]

    monkeypatch.setattr(Candidacy, "stand", slowly)
    before = signal.signal(signal.SIGUSR1, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            next(iter(locks.election("a")))
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert len(won) == 1
    assert locks.inspect("a") is None
