"""What backends share: connections, the line of nodes, polling, and why a lock was revoked."""

from __future__ import annotations

import asyncio
import contextvars
import re
from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from fencing_sdk import connect
from fencing_sdk.abc import LOCK, READER, WRITER, Claim, Permit, Renewal, Revoked
from fencing_sdk.backends._shared.background_task import BackgroundTask, BackgroundTasks
from fencing_sdk.backends._shared.error_translation import (
    ErrorTranslation,
    Verdict,
    verdict_by_class,
)
from fencing_sdk.backends._shared.losses import LossNotices, reason_for, with_reasons
from fencing_sdk.backends._shared.node_line import PERMITS, holding, holds, refusal, rival_of
from fencing_sdk.backends._shared.polling_line import Pace, PlaceToPoll, PollingLine
from fencing_sdk.backends._shared.waiters import Waiter, WaiterTable
from fencing_sdk.errors import BackendError, BackendRefusedError, BackendUnavailableError, LossReason

# The chores that all backends share: waiters, loss notices, the background task, error translation.


def claim(owner: str = "a", name: str = "x") -> Claim:
    return Claim(name, 15.0, owner)


async def returned(waiter: Waiter) -> bool:
    """Whether `wait` returns at once."""
    try:
        async with asyncio.timeout(0.01):
            await waiter.wait()
    except TimeoutError:
        return False
    return True


async def forever() -> None:
    await asyncio.Event().wait()


class TestWaiters:
    async def test_a_waiter_whose_place_is_lost_raises_the_error_again_and_again(self):
        waiter = Waiter(claim())
        waiter.fail(BackendUnavailableError("Store", "queue", "the line has moved"))
        for _ in range(2):
            with pytest.raises(BackendUnavailableError, match="moved"):
                await waiter.wait()
            waiter.wake()

    def test_removing_an_earlier_waiter_leaves_a_later_one_of_the_same_claim(self):
        table = WaiterTable[Waiter]()
        earlier, later = Waiter(claim(), "1"), Waiter(claim(), "2")
        table.add(earlier)
        table.add(later)
        table.remove(earlier)
        assert table.find(claim()) is later
        assert table.find_ticket("1") is None

    def test_a_waiter_may_leave_while_all_are_woken(self):
        table = WaiterTable[Waiter]()

        class Leaving(Waiter):
            def wake(self) -> None:
                table.clear()

        for owner in "abc":
            table.add(Leaving(claim(owner)))
        table.wake_all()
        assert not table

    def test_a_waiter_of_a_closed_loop_does_not_keep_the_others_from_being_woken(self):
        table = WaiterTable[Waiter]()
        loop = asyncio.new_event_loop()
        asleep = table.add(Waiter(claim("a")))
        task = loop.create_task(asleep.wait())
        loop.call_soon(loop.stop)
        loop.run_forever()
        loop.close()

        async def wake() -> bool:
            awake = table.add(Waiter(claim("b")))
            table.wake_all()
            return await returned(awake)

        assert asyncio.run(wake())
        task._log_destroy_pending = False


class TestLossNotices:
    def test_a_callback_may_take_itself_back_while_it_is_called(self):
        heard: list[str] = []
        notices = LossNotices()
        stop = notices.on_loss(lambda *_: (heard.append("one"), stop()))
        notices.on_loss(lambda *_: heard.append("other"))
        notices.notify(claim(), LossReason.REVOKED)
        notices.notify(claim(), LossReason.REVOKED)
        assert heard == ["one", "other", "other"]


class TestBackgroundTask:
    async def test_work_is_not_begun_twice(self):
        begun: list[None] = []

        async def work() -> None:
            begun.append(None)
            await asyncio.Event().wait()

        task = BackgroundTask()
        assert not task.running
        for _ in range(3):
            task.start(work)
            await asyncio.sleep(0)
        assert len(begun) == 1
        assert task.running
        await task.aclose()
        assert not task.running
        await task.aclose()

    async def test_it_sees_no_context_variable_of_the_caller(self):
        variable = contextvars.ContextVar("variable", default="none")
        variable.set("the caller's")
        seen: list[str] = []

        async def work() -> None:
            seen.append(variable.get())

        task = BackgroundTask()
        task.start(work)
        await asyncio.sleep(0)
        assert seen == ["none"]

    def test_the_next_loop_has_a_task_of_its_own(self):
        task = BackgroundTask()
        begun: list[asyncio.AbstractEventLoop] = []

        async def work() -> None:
            begun.append(asyncio.get_running_loop())
            await asyncio.Event().wait()

        async def use(*, close: bool) -> bool:
            running = task.running
            task.start(work)
            await asyncio.sleep(0)
            if close:
                await task.aclose()
            return running

        assert [asyncio.run(use(close=False)), asyncio.run(use(close=True))] == [False, False]
        assert len(set(begun)) == 2


class TestBackgroundTasks:
    async def test_a_forked_child_forgets_those_of_its_parent(self):
        tasks = BackgroundTasks()
        task = tasks.start(forever())
        tasks.forget()
        await tasks.aclose(patience=0.0)
        assert not task.done()
        task.cancel()

    def test_without_a_loop_the_work_is_not_left_unawaited(self):
        with pytest.raises(RuntimeError):
            BackgroundTasks().start(forever())  # a warning would be an error here


class TestErrorTranslation:
    CLASSES: tuple[tuple[type[Exception], Verdict], ...] = (
        (ConnectionRefusedError, (BackendUnavailableError, "nothing listens")),
        (PermissionError, (BackendRefusedError, "no permission")),
        (OSError, (BackendUnavailableError, "no connection")),
    )
    UNKNOWN: Verdict = (BackendUnavailableError, "the store failed")

    def translated(self, operation: str, error: Exception) -> BackendError:
        kind, hint = verdict_by_class(error, self.CLASSES, self.UNKNOWN)
        return kind("Store", operation, hint)

    @pytest.mark.parametrize(
        ("error", "kind", "hint"),
        [
            (ConnectionRefusedError(), BackendUnavailableError, "nothing listens"),
            (PermissionError(), BackendRefusedError, "no permission"),
            (TimeoutError(), BackendUnavailableError, "no connection"),
            (ValueError("secret"), BackendUnavailableError, "the store failed"),
        ],
    )
    def test_an_error_of_the_driver_leaves_as_one_of_the_contract(self, error, kind, hint):
        with pytest.raises(kind, match=hint) as caught, ErrorTranslation(self.translated, "acquire"):
            raise error
        assert caught.value.__cause__ is error
        assert "secret" not in str(caught.value)

    def test_errors_of_the_package_and_cancellations_pass(self):
        ours = BackendRefusedError("Store", "acquire", "because")
        with pytest.raises(BackendRefusedError) as caught, ErrorTranslation(self.translated, "acquire"):
            raise ours
        assert caught.value is ours
        with pytest.raises(asyncio.CancelledError), ErrorTranslation(self.translated, "acquire"):
            raise asyncio.CancelledError


@pytest.mark.parametrize(
    ("url", "servers"),
    [
        ("redis://:secret@127.0.0.1:1", "127.0.0.1:1"),
        ("etcd://127.0.0.1:1", "127.0.0.1:1"),
        ("kahuna://127.0.0.1:1", "127.0.0.1:1"),
        ("postgresql://user:secret@127.0.0.1:1/app", "127.0.0.1:1"),
        ("postgresql://user:secret@127.0.0.1:1,127.0.0.1:2/app", "127.0.0.1:1 (Connection refused), 127.0.0.1:2"),
        ("zookeeper://user:secret@127.0.0.1:1,127.0.0.1:2", "127.0.0.1:1, 127.0.0.1:2"),
    ],
)
async def test_servers_that_take_no_connection_are_told_with_their_hosts_and_ports(url: str, servers: str):
    with pytest.raises(BackendUnavailableError, match=rf"no connection to {re.escape(servers)} \(") as heard:
        async with connect(url):
            pass
    assert "secret" not in f"{heard.value} {heard.value.__cause__!r} {heard.value.__cause__}"


# The rules of etcd and ZooKeeper about a line of nodes, as tables. `tests/simulation/line_model.py` plays `rival_of`
# in every state that a few clients can reach.


MODES = {"L": LOCK, "W": WRITER, "R": READER, "P": Permit(2), "Q": Permit(3)}


@dataclass(frozen=True)
class OneNode:
    word: str
    """``L``, ``W``, ``R``; ``P`` is a permit without a number, ``0`` the one with this number."""

    @property
    def shared(self) -> str:
        return {"L": "", "W": "", "R": "reader"}.get(self.word, "permit")

    @property
    def permit(self) -> int | None:
        return int(self.word) if self.word.isdigit() else None


def line_of(words: str) -> list[OneNode]:
    return [OneNode(word) for word in words]


def words_of(line: list[OneNode]) -> str:
    return "".join(node.word for node in line)


@pytest.mark.parametrize(
    ("mode", "ahead", "rival"),
    [
        *(("L", "", None), ("L", "R", 0), ("L", "LW", 1), ("W", "", None), ("W", "RR", 1), ("W", "0", 0)),
        *(("R", "", None), ("R", "RRR", None), ("R", "W", 0), ("R", "RWR", 1), ("R", "WWRR", 1), ("R", "0", 0)),
        *(("P", "", None), ("P", "0", None), ("P", "01", PERMITS), ("P", "0P", 1), ("P", "P0", 0), ("P", "RR", 1)),
        *(("Q", "01", None), ("Q", "012", PERMITS), ("P", "2", None), ("P", "L", 0), ("P", "0W1", 1)),
    ],
)
def test_what_a_claim_waits_for(mode, ahead, rival):
    line = line_of(ahead)
    found = rival_of(MODES[mode], line)
    assert found is (line[rival] if isinstance(rival, int) else rival)


@pytest.mark.parametrize(
    ("line", "held", "without_a_phase"),
    [
        *(("", "", ""), ("L", "L", "L"), ("LL", "L", "L"), ("WR", "W", "W"), ("LR", "L", "L")),
        *(("RRWR", "RR", ""), ("R", "R", ""), ("R0", "R", ""), ("01P", "01", "01"), ("P", "", ""), ("P0", "", "")),
        *(("0R", "0", "0"), ("0L1", "0", "0")),
    ],
)
def test_who_holds(line, held, without_a_phase):
    assert words_of(holding(line_of(line), phase=True)) == held
    assert words_of(holding(line_of(line), phase=False)) == without_a_phase


@pytest.mark.parametrize(
    ("own", "ahead", "may"),
    [
        *(("L", "", True), ("L", "L", False), ("W", "", True), ("W", "R", False), ("R", "RR", True)),
        *(("R", "RW", False), ("P", "", False), ("1", "0", True), ("0", "", True)),
    ],
)
def test_which_nodes_may_be_those_of_grants(own, ahead, may):
    assert holds(MODES.get(own, MODES["P"]), OneNode(own), line_of(ahead)) is may


def test_only_one_that_wants_to_hold_alone_is_taken_over():
    assert [refusal(mode, others=True) is Renewal.TAKEN_OVER for mode in MODES.values()] == [True] * 2 + [False] * 3
    assert {refusal(mode, others=False) for mode in MODES.values()} == {Renewal.REFUSED}


# A holder that was revoked is told why, if the store answers in time.


CLAIM = Claim("a", 15.0)


class Store:
    """Fails so many times before it answers."""

    def __init__(self, failures: int) -> None:
        self.left = failures
        self.asked = 0

    async def reasons(self, claims: Sequence[Claim]) -> list[str | None]:
        self.asked += 1
        if self.left:
            self.left -= 1
            raise ConnectionError
        return ["deploy"] * len(claims)


@pytest.mark.parametrize(("failures", "reason"), [(0, "deploy"), (1, "deploy"), (2, "deploy"), (9, "")])
async def test_a_store_whose_connection_breaks_is_asked_again(failures: int, reason: str):
    store = Store(failures)
    assert await reason_for(CLAIM, store.reasons) == reason
    assert store.asked == min(failures + 1, 3)


async def test_a_refused_renewal_has_the_reason_of_the_second_answer():
    renewals = [Renewal.RENEWED, Renewal.REFUSED]
    assert await with_reasons([CLAIM, CLAIM], renewals, Store(1).reasons) == [Renewal.RENEWED, Revoked("deploy")]


# Who asks a store that wakes no waiter, and how often.


LONGEST = 0.55


class Stage:
    """A line for the lock "a", and what its waiters were told."""

    def __init__(self) -> None:
        self.left = 0.0
        self.line = PollingLine(lambda _: self.left)
        self.woken: list[str] = []

    def join(self, owner: str) -> PlaceToPoll:
        return self.line.stand(Claim("a", 10.0, owner=owner), lambda *_: self.woken.append(owner))

    def refused(self, owner: str) -> bool:
        return self.line.refusal(Claim("a", 10.0, owner=owner)) is not None


async def test_only_the_head_may_ask():
    stage = Stage()
    assert not stage.refused("newcomer")
    first, _ = stage.join("1"), stage.join("2")
    assert [stage.refused(owner) for owner in ("1", "2", "newcomer")] == [False, True, True]
    first.leave()
    assert stage.woken == ["2"]
    assert [stage.refused(owner) for owner in ("2", "newcomer")] == [False, True]


async def test_a_waiter_that_leaves_from_the_middle_wakes_no_other():
    stage = Stage()
    stage.join("1")
    second = stage.join("2")
    stage.join("3")
    second.leave()
    second.leave()
    assert not stage.woken


async def test_while_a_grant_of_this_client_lasts_the_head_asks_for_nothing_and_its_release_wakes_it():
    stage = Stage()
    holder = Claim("a", 10.0)
    stage.line.granted(holder, 7)
    stage.left = 9.0
    place = stage.join("1")
    assert stage.line.refusal(place.claim) == 9.0
    assert place.retry_after(5.0) == 5.0
    stage.line.ended(Claim("a", 10.0))
    assert not stage.woken, "another claim was released"
    stage.line.ended(holder)
    assert stage.woken == ["1"]
    assert not stage.refused("1")


async def test_a_grant_that_has_run_out_refuses_no_waiter():
    stage = Stage()
    stage.line.granted(Claim("a", 10.0), 7)
    stage.left = -1.0
    stage.join("1")
    assert not stage.refused("1")


async def test_a_head_looks_first_unless_it_was_woken():
    stage = Stage()
    first, second = stage.join("1"), stage.join("2")
    assert stage.line.looks_first(first.claim)
    assert not stage.line.looks_first(second.claim)
    first.leave()
    assert [stage.line.looks_first(second.claim) for _ in range(2)] == [False, True]


async def test_a_nap_is_no_longer_than_the_store_advises():
    stage = Stage()
    assert stage.join("1").retry_after(0.2) == 0.2
    assert stage.join("2").retry_after(5.0) == 5.0, "those behind the head have nothing to ask"


def test_waiters_of_a_loop_that_has_ended_stand_in_no_line():
    stage = Stage()

    async def join(owner: str) -> None:
        stage.join(owner)

    async def asks(owner: str) -> None:
        assert not stage.refused(owner)

    async def joins(owner: str, former: str) -> None:
        stage.join(owner)
        assert not stage.refused(owner)
        assert stage.refused(former)

    asyncio.run(join("1"))
    asyncio.run(asks("2"))
    asyncio.run(join("1"))
    asyncio.run(joins("2", former="1"))


async def test_the_memory_of_locks_is_bounded_but_keeps_lines(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(PollingLine, "NAMES", 3)
    stage = Stage()
    place = stage.join("1")
    for number in range(10):
        stage.line.see(f"other/{number}", 0)
    assert len(stage.line._names) == 3
    assert stage.line.waits(place.claim)


# How often


def paced(*seen: tuple[float, int]) -> Pace:
    pace = Pace()
    for now, token in seen:
        pace.see(token, now)
    return pace


def test_a_lock_of_unknown_pace_is_asked_as_a_slow_one():
    """Else a waiter that just came would ask more often than one that knows that the lock is slow."""
    assert paced((0.0, 5)).pause(0.0, 0) == paced((0.0, 5), (60.0, 6)).pause(60.0, 0) == LONGEST


@pytest.mark.parametrize(("between", "pause"), [(0.02, 0.01), (0.1, 0.025), (0.4, 0.1), (2.0, 0.5), (60.0, LONGEST)])
def test_pauses_follow_how_fast_the_lock_changes_hands(between: float, pause: float):
    pace = paced(*((number * between, 10 + number) for number in range(10)))
    assert pace.pause(9 * between, 0) == pytest.approx(pause)


def test_tokens_that_were_not_seen_count_too():
    assert paced((0.0, 10), (4.0, 20)).pause(4.0, 0) == pytest.approx(0.1)


def test_a_lock_that_stays_with_its_holder_is_asked_less_and_less():
    pace = paced((0.0, 1), (0.1, 2))
    pauses = [pace.pause(0.1 + age, 0) for age in (0.0, 0.4, 1.0, 10.0, 600.0)]
    assert pauses == sorted(pauses)
    assert pauses[-1] == LONGEST


@pytest.mark.parametrize("age", [0.0, 0.5, 1.5, 60.0])
def test_a_waiter_that_has_waited_longer_never_asks_less_often(age: float):
    pace = paced((0.0, 1), (0.1, 2))
    pauses = [pace.pause(0.1 + age, passed_over) for passed_over in range(50)]
    assert pauses == sorted(pauses, reverse=True)
    assert pauses[-1] >= 0.01


def test_a_token_that_comes_late_changes_nothing():
    assert paced((0.0, 5), (1.0, 6), (1.1, 5)) == paced((0.0, 5), (1.0, 6))
