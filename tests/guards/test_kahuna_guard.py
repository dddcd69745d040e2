"""KahunaGuard: the contract, outcomes that are unknown at first, and the whole history of values under troubles."""

from __future__ import annotations

import asyncio
import http.client
import json
import random
from base64 import b64decode, b64encode
from contextlib import asynccontextmanager

import pytest
from campaigns import amount
from stays import eventually

from fencing_sdk import (
    BackendRefusedError,
    BackendUnavailableError,
    ConfigurationError,
    StaleTokenError,
    Token,
    connect,
)
from fencing_sdk.guards.kahuna import KahunaGuard
from fencing_sdk.testing.suites import GuardSuite

pytest_plugins = ["kahuna_fixtures"]

OLD, NEW = Token(33, "aaaaaaaa"), Token(34, "bbbbbbbb")


def call(server, call, **fields):
    """Ask a node as any other client does."""
    connection = http.client.HTTPConnection("127.0.0.1", server.ports[0], timeout=10)
    try:
        body = json.dumps({"durability": 1, **fields})
        connection.request("POST", f"/v1/kv/{call}", body, {"Content-Type": "application/json"})
        return json.loads(connection.getresponse().read())
    finally:
        connection.close()


def stored(server, key, revision=-1):
    """The bytes of a value, or None."""
    answer = call(server, "try-get", key=key, revision=revision)
    return b64decode(answer["value"]) if answer["type"] == 3 else None


def put(server, key, value, **fields):
    return call(server, "try-set", key=key, value=b64encode(value).decode(), **{"flags": 1, "expiresMs": 0, **fields})


@pytest.fixture
async def guard(kahuna_server):
    async with KahunaGuard(kahuna_server.url) as guard:
        yield guard


class TestKahunaGuard(GuardSuite):
    @pytest.fixture
    async def guard(self, kahuna_server):
        self.server = kahuna_server
        async with self.opened() as guard:
            yield guard

    @asynccontextmanager
    async def opened(self):
        async with KahunaGuard(self.server.url) as guard:
            yield guard

    async def write(self, guard, resource, token, value):
        await guard.write(resource, token, value.encode())

    async def read(self, guard, resource):
        data = await guard.read(resource)
        return None if data is None else data.decode()

    def reopen(self, guard):
        return self.opened()


# The value


async def test_the_value_can_be_read_by_any_program(kahuna_server, guard):
    await guard.write("seats/42", NEW, b"Ada\n\x00")
    assert guard.key("seats/42") == "guarded/seats/42"
    line, data = stored(kahuna_server, "guarded/seats/42").split(b"\n", 1)
    layout, token, number = line.split(b" ")
    assert (layout, token, data) == (b"fencing/1", b'34;holder="bbbbbbbb"', b"Ada\n\x00")
    assert len(number) == 16


async def test_a_fence_without_data_is_told_from_empty_data(guard):
    await guard.raise_to("a", OLD)
    assert await guard.read("a") is None
    await guard.write("a", OLD, b"")
    assert await guard.read("a") == b""
    await guard.raise_to("a", NEW)
    assert (await guard.read("a"), await guard.highest("a")) == (b"", NEW)


@pytest.mark.parametrize(
    "odd",
    [
        b"",
        b"\xff\xfe",
        b"34",
        b"fencing/1",
        b"fencing/2 34 0123456789abcdef\nAda",
        b"fencing/1 34 0123456789abcde\nAda",
        b"fencing/1 34 0123456789ABCDEF\nAda",
        b"fencing/1 -34 0123456789abcdef\nAda",
        b'fencing/1 34;holder="x 0123456789abcdef\nAda',
        b"fencing/1 99999999999999999999 0123456789abcdef\nAda",
        b"fencing/1 34;ttl=5 0123456789abcdef\nAda",
        b"fencing/1 34 0123456789abcdef \nAda",
        b"\nfencing/1 34 0123456789abcdef\nAda",
    ],
)
async def test_the_value_of_another_program_is_refused_and_left_alone(kahuna_server, guard, odd):
    put(kahuna_server, "guarded/a", odd)
    for work in (guard.write("a", NEW, b"x"), guard.raise_to("a", NEW), guard.read("a"), guard.highest("a")):
        with pytest.raises(BackendRefusedError, match="another program"):
            await work
    assert stored(kahuna_server, "guarded/a") == odd


async def test_a_value_that_expires_is_refused_because_its_fence_would_go_with_it(kahuna_server, guard):
    await guard.write("a", OLD, b"x")
    put(kahuna_server, "guarded/a", stored(kahuna_server, "guarded/a"), expiresMs=60_000)
    with pytest.raises(BackendRefusedError, match="another program"):
        await guard.write("a", NEW, b"y")


async def test_nothing_that_is_written_expires_or_is_ephemeral(kahuna_server, guard):
    await guard.write("a", OLD, b"1")
    await guard.write("a", OLD, b"2")
    sent = kahuna_server.seen("try-set")
    assert [(fields["durability"], fields["expiresMs"], fields["flags"]) for fields in sent] == [(1, 0, 9), (1, 0, 33)]
    assert {(fields["durability"], fields["revision"]) for fields in kahuna_server.seen("try-get")} == {(1, -1)}


async def test_a_deleted_value_begins_again_and_revisions_go_on(kahuna_server, guard):
    await guard.write("a", NEW, b"1")
    call(kahuna_server, "try-delete", key="guarded/a")
    await guard.write("a", OLD, b"2")
    assert (await guard.read("a"), await guard.highest("a")) == (b"2", OLD)


# Updates


async def test_updates_side_by_side_lose_none(kahuna_cluster, guard):
    async with KahunaGuard(kahuna_cluster.url) as one, KahunaGuard(kahuna_cluster.url) as other:
        for _ in range(3):
            await asyncio.gather(*(each.update("a", OLD, counted) for each in (one, other) for _ in range(4)))
        assert await one.read("a") == b"24"


def counted(data):
    return b"%d" % (int(data or b"0") + 1)


async def test_an_update_that_lost_a_race_checks_the_token_again(kahuna_server, guard):
    """The later holder comes between the read and the replacement."""
    seen = []

    def change(data):
        seen.append(data)
        put_fenced(kahuna_server, "guarded/a", NEW, b"new")
        return b"stale"

    with pytest.raises(StaleTokenError):
        await guard.update("a", OLD, change)
    assert seen == [None]
    assert await guard.read("a") == b"new"


async def test_an_error_of_the_change_leaves_bare_and_writes_nothing(kahuna_server, guard):
    with pytest.raises(ZeroDivisionError):
        await guard.update("a", OLD, lambda data: b"%d" % (1 // 0))
    assert not kahuna_server.seen("try-set")


@pytest.mark.parametrize("data", ["text", None, bytearray(b"x"), b"x" * (2**19 + 1)], ids=lambda data: str(type(data)))
async def test_data_that_cannot_be_written_are_refused(kahuna_server, guard, data):
    with pytest.raises(ConfigurationError, match="data"):
        await guard.write("a", OLD, data)
    with pytest.raises(ConfigurationError, match="data"):
        await guard.update("a", OLD, lambda _: data)
    assert not kahuna_server.seen("try-set")


# Outcomes that are unknown at first


UNKNOWN = [("drop", ""), ("status", "503"), ("truncate", ""), *(("body", {"type": code}) for code in (99, 101, 10))]


@pytest.mark.parametrize(("act", "value"), UNKNOWN, ids=str)
@pytest.mark.parametrize("applied", [True, False])
@pytest.mark.parametrize("first", [True, False])
async def test_a_write_without_an_answer_is_done_once(kahuna_server, guard, act, value, applied, first):
    if not first:
        await guard.update("a", OLD, counted)
    kahuna_server.fault(act, value, call="try-set", times=1, apply=applied)
    await guard.update("a", OLD, counted)
    assert await guard.read("a") == (b"1" if first else b"2")


async def test_a_no_after_a_lost_answer_is_not_believed(kahuna_server, guard, monkeypatch):
    """The value is read at a node that is behind. So the write is sent again, and refused: it was carried out."""
    await guard.update("a", OLD, counted)
    original, reads = guard._read, []

    async def read(*arguments, **options):
        reads.append(await original(*arguments, **options))
        return reads[0] if len(reads) == 2 else reads[-1]

    monkeypatch.setattr(guard, "_read", read)
    kahuna_server.fault("drop", call="try-set", times=1)
    assert await guard.update("a", OLD, counted) == b"2"
    assert await guard.read("a") == b"2"


@pytest.mark.parametrize("first", [True, False])
async def test_a_lost_answer_is_unknown_if_others_wrote_before_the_value_was_read_again(kahuna_server, guard, first):
    if not first:
        await guard.write("a", OLD, b"1")
    kahuna_server.fault("drop", call="try-set", times=1)
    after_the_first_set(guard, lambda: put_fenced(kahuna_server, "guarded/a", NEW, b"3"))
    with pytest.raises(BackendUnavailableError, match="the outcome is unknown"):
        await guard.write("a", OLD, b"2")
    assert await guard.read("a") == b"3"
    with pytest.raises(StaleTokenError):
        await guard.write("a", OLD, b"2")


async def test_a_write_that_was_not_carried_out_is_refused_when_a_later_holder_came(kahuna_server, guard):
    await guard.write("a", OLD, b"1")
    kahuna_server.fault("drop", call="try-set", times=1, apply=False)
    after_the_first_set(guard, lambda: put_fenced(kahuna_server, "guarded/a", NEW, b"3"))
    with pytest.raises(StaleTokenError):
        await guard.write("a", OLD, b"2")
    assert await guard.read("a") == b"3"


async def test_a_request_that_is_carried_out_late_replaces_nothing_newer(kahuna_server, guard):
    await guard.write("a", OLD, b"1")
    kahuna_server.fault("drop", call="try-set", times=1, late=0.3)
    await guard.write("a", OLD, b"2")
    await guard.write("a", NEW, b"3")
    await asyncio.sleep(0.5)
    assert await guard.read("a") == b"3"


async def test_a_write_is_given_up_and_told_as_unknown(kahuna_server, guard, monkeypatch):
    monkeypatch.setattr("fencing_sdk.guards.kahuna._LONGEST_CALL", 0.3)
    kahuna_server.fault("body", {"type": 101}, call="try-set", apply=False)
    with pytest.raises(BackendUnavailableError, match="whether the value was written"):
        await guard.write("a", OLD, b"1")
    kahuna_server.fault("hang", call="try-get")
    with pytest.raises(BackendUnavailableError), monkeypatch.context() as patch:
        patch.setattr("fencing_sdk._kahuna.ANSWER_LIMIT", 0.3)
        async with KahunaGuard(kahuna_server.url) as other:
            await other.write("a", OLD, b"1")


async def test_a_refusal_after_a_doubtful_request_is_no_refusal(kahuna_server, guard):
    kahuna_server.fault("drop", call="try-set", times=1)
    after_the_first_set(guard, lambda: kahuna_server.fault("body", {"type": 100}, call="try-get", times=None))
    with pytest.raises(BackendUnavailableError, match="InvalidInput"):
        await guard.write("a", OLD, b"1")


async def test_kahunas_own_refusal_leaves_as_ours(kahuna_server, guard):
    kahuna_server.fault("body", {"type": 100}, call="try-set", apply=False)
    with pytest.raises(BackendRefusedError, match="InvalidInput"):
        await guard.write("a", OLD, b"1")


@pytest.mark.parametrize(
    "answer", [{"type": 3}, {"type": 3, "value": "!", "revision": 0, "expires": {}}, {"type": "3"}, 5]
)
async def test_an_answer_that_cannot_be_read_is_no_value(kahuna_server, guard, answer, monkeypatch):
    await guard.write("a", OLD, b"1")
    kahuna_server.fault("body", answer, call="try-get")
    monkeypatch.setattr("fencing_sdk.guards.kahuna._LONGEST_CALL", 0.1)
    for read in (guard.read, guard.highest):
        with pytest.raises(BackendUnavailableError):
            await read("a")


async def test_a_read_beside_a_write_of_the_same_value_waits_for_it(kahuna_server, guard):
    """While the server replicates the write, its answer to a read is MustRetry."""
    await guard.write("a", OLD, b"1")
    kahuna_server.replication(0.3)

    async def is_under_way():
        return len(await asyncio.to_thread(kahuna_server.seen, "try-set")) == 2

    async with asyncio.TaskGroup() as group:
        group.create_task(guard.write("a", NEW, b"2"))
        await eventually(is_under_way, what="the write is under way")
        assert (await guard.read("a"), await guard.highest("a")) == (b"2", NEW)


@pytest.mark.parametrize(("act", "value"), UNKNOWN, ids=str)
async def test_a_read_without_an_answer_is_made_again(kahuna_server, guard, act, value):
    await guard.write("a", OLD, b"1")
    kahuna_server.fault(act, value, call="try-get", times=1)
    assert await guard.read("a") == b"1"
    kahuna_server.fault(act, value, call="try-get", times=1)
    assert await guard.highest("a") == OLD


def counted_reads(guard, monkeypatch):
    """The requests of the guard to read, as they are sent."""
    original, reads = guard._ask, []

    async def ask(*arguments):
        reads.append(arguments)
        return await original(*arguments)

    monkeypatch.setattr(guard, "_ask", ask)
    return reads


async def tried_again(reads):
    async def again():
        return len(reads) > 3

    await eventually(again, what="another try")


async def test_a_read_fails_at_once_where_no_node_can_be_reached(kahuna_cluster, monkeypatch):
    monkeypatch.setattr("fencing_sdk.guards.kahuna._LONGEST_CALL", 1.0)
    async with KahunaGuard(kahuna_cluster.url) as guard:
        kahuna_cluster.kill()
        reads = counted_reads(guard, monkeypatch)
        for read in (guard.read, guard.highest):
            with pytest.raises(BackendUnavailableError, match="no connection"):
                await read("a")
        assert len(reads) == 2


@pytest.mark.parametrize("change", [lambda guard: guard.write("a", NEW, b"2"), lambda guard: guard.raise_to("a", NEW)])
async def test_a_write_waits_for_a_node_that_can_be_reached(kahuna_cluster, change, monkeypatch):
    monkeypatch.setattr("fencing_sdk.guards.kahuna._LONGEST_CALL", 120.0)
    async with KahunaGuard(kahuna_cluster.url) as guard:
        kahuna_cluster.kill()
        reads = counted_reads(guard, monkeypatch)
        writing = asyncio.create_task(change(guard))
        await tried_again(reads)
        await asyncio.to_thread(kahuna_cluster.start)
        await writing
        assert await guard.highest("a") == NEW


def after_the_first_set(guard, act):
    """Do something between the first request to set and what the guard does next."""
    original = guard._set

    async def set_once(*arguments):
        outcome = await original(*arguments)
        guard._set = original
        await asyncio.to_thread(act)
        return outcome

    guard._set = set_once


def put_fenced(server, key, token, data):
    number = f"{random.getrandbits(64):016x}"
    put(server, key, f'fencing/1 {int(token)};holder="{token.holder}" {number}\n'.encode() + data)


# Nodes


async def test_a_lock_in_the_same_cluster_raises_the_fence(kahuna_cluster):
    async with KahunaGuard(kahuna_cluster.url) as guard, connect(kahuna_cluster.url) as locks:
        for expected in (0, 1):
            async with locks.lock("seats/42", ttl=10, fences=[guard]) as lease:
                await guard.write("seats/42", lease.token, b"Ada")
                assert lease.token == expected, "the first token of Kahuna is 0, and is a token"
        with pytest.raises(StaleTokenError):
            await guard.write("seats/42", Token(0, "aaaaaaaa"), b"late")


# The whole history


class Writers:
    """Tasks that write with tokens that grow, and with older ones, and what each of them was told."""

    def __init__(self, guards):
        self.guards = guards
        self.token = 0
        self.accepted, self.refused, self.unknown = set(), set(), set()

    async def write(self, number, target):
        guard, resource = self.guards[number % len(self.guards)], f"r{number % 3}"
        while len(self.accepted) < target:
            self.token += random.random() < 0.2
            token = Token(max(0, self.token - random.choice((0, 0, 0, 1, 5))), f"{number % 2:08x}")
            mark = f"{int(token)} {number} {random.getrandbits(64):x}"
            try:
                await guard.update(resource, token, lambda data, mark=mark: appended(data, mark))
            except StaleTokenError:
                self.refused.add(mark)
            except BackendUnavailableError:
                self.unknown.add(mark)
            else:
                self.accepted.add(mark)


def appended(data, mark):
    """How many writes there were, and this one."""
    count = int(data.split()[0]) if data else 0
    return f"{count + 1} {mark}".encode()


def history(server, key):
    """Every revision of a value, read one by one."""
    last = call(server, "try-get", key=key, revision=-1)["revision"]
    return [stored(server, key, revision) for revision in range(last + 1)]


@pytest.mark.campaign
@pytest.mark.timeout(3600)
async def test_the_whole_history_under_troubles_shows_each_accepted_write_once_and_no_stale_one(kahuna_cluster):
    """A part of all answers is lost, broken or of an unknown outcome, whether the request was carried out or not."""
    target = amount(20_000, short=300)
    async with KahunaGuard(kahuna_cluster.url) as one, KahunaGuard(kahuna_cluster.url) as other:
        writers = Writers([one, other])
        kahuna_cluster.chaos(0.15)
        await asyncio.gather(*(writers.write(number, target) for number in range(6)))
    kahuna_cluster.heal()
    marks = []
    for resource in range(3):
        fence = -1
        for count, value in enumerate(history(kahuna_cluster, f"guarded/r{resource}"), 1):
            line, data = value.decode().split("\n", 1)
            written, mark = data.split(" ", 1)
            token = int(line.split(" ")[1].split(";")[0])
            assert token >= fence, "a token below the fence was accepted"
            assert mark.startswith(f"{token} "), "the fence is the token of the write"
            assert int(written) == count, "an update was lost, or made twice"
            fence = token
            marks.append(mark)
    assert len(marks) == len(set(marks))
    assert writers.accepted <= set(marks)
    assert not writers.refused & set(marks)
    assert set(marks) <= writers.accepted | writers.unknown
