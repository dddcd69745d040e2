"""One server's connection: opened once however many ask, given up, closed under everybody, and never doubled."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest
from patience import until
from redis_server import RedisServer

import fencing_sdk.backends.redis.connection.node as node_module
import fencing_sdk.backends.redis.connection.pipe as pipe_module
from fencing_sdk.backends.redis.connection.dial import OpenConnection, ServerDialer
from fencing_sdk.backends.redis.connection.node import RedisNode, UnconfirmedError
from fencing_sdk.backends.redis.connection.pipe import Pipe, PipeError, ReplyError
from fencing_sdk.backends.redis.errors import translated
from fencing_sdk.backends.redis.options import topology_from_url
from fencing_sdk.backends.redis.scripts import INSPECT, RELEASE, ScriptCall
from fencing_sdk.errors import BackendRefusedError, BackendUnavailableError

pytest_plugins = ["redis_fixtures"]

PATIENCE = 20.0


class Door:
    """The way to a real server, which a test may keep shut, and on which it counts who comes."""

    def __init__(self, server: RedisServer) -> None:
        place = topology_from_url(server.url).servers
        assert isinstance(place, ServerDialer)
        self._way = place
        self.open = asyncio.Event()
        self.open.set()
        self.came = 0
        self.pipes: list[Pipe] = []

    async def dial(self, protocol: asyncio.Protocol) -> OpenConnection:
        self.came += 1
        assert isinstance(protocol, Pipe)
        self.pipes.append(protocol)
        await self.open.wait()
        return await self._way.dial(protocol)


@pytest.fixture
def door(redis_server: RedisServer) -> Door:
    return Door(redis_server)


@pytest.fixture
async def node(door: Door) -> AsyncIterator[RedisNode]:
    node = RedisNode(door, on_push=lambda *_: None, on_connect=lambda *_: None, in_cluster=False)
    yield node
    await node.aclose()
    assert not any(pipe.usable for pipe in door.pipes)


def asking(key: str = "a") -> ScriptCall:
    return ScriptCall(INSPECT, (key,), ())


def connected(server: RedisServer) -> int:
    return sum("name=fencing-sdk" in line for line in server.ask("CLIENT", "LIST").splitlines())


@pytest.fixture
def hands(monkeypatch) -> Callable[[float], None]:
    """A clock that stands still until it is moved."""

    class Hands:
        at = 1000.0

        def now(self) -> float:
            return self.at

    clock = Hands()
    monkeypatch.setattr(node_module, "_CLOCK", clock)
    monkeypatch.setattr(pipe_module, "_CLOCK", clock)

    def move(seconds: float) -> None:
        clock.at += seconds

    return move


# Opening.


async def test_however_many_ask_there_is_one_connection(node, door, redis_server):
    door.open.clear()
    asked = [asyncio.create_task(node.run(asking())) for _ in range(20)]
    await until(lambda: door.came, what="somebody dials")
    for given_up in asked[:19]:
        given_up.cancel()
    await asyncio.wait(asked[:19])
    door.open.set()
    assert await asked[19] is None
    assert door.came == 1
    assert connected(redis_server) == 1


async def test_whoever_gives_up_late_has_it_begun_anew(node, door, redis_server, hands):
    door.open.clear()
    early = asyncio.create_task(node.pipe())
    late = asyncio.create_task(node.pipe())
    patient = asyncio.create_task(node.pipe())
    await until(lambda: door.came, what="somebody dials")
    hands(node_module.DIAL_PATIENCE - 0.01)
    early.cancel()
    await asyncio.wait((early,))
    assert not patient.done()
    hands(0.02)
    late.cancel()
    await asyncio.wait((early, late))
    assert early.cancelled()
    assert late.cancelled()
    with pytest.raises(PipeError):
        await patient
    door.open.set()
    assert (await node.pipe()).usable
    assert door.came == 2
    await until(lambda: connected(redis_server) == 1, what="one is left")


@pytest.mark.every_loop
async def test_a_cancellation_is_not_swallowed_when_the_dial_is_cancelled_too(node, door):
    door.open.clear()
    waiter = asyncio.create_task(node.pipe())
    await until(lambda: door.came, what="somebody dials")
    dialing = node._opening
    dialing.add_done_callback(lambda _: waiter.cancel())
    dialing.cancel()
    await asyncio.wait((waiter,))
    assert waiter.cancelled()


async def test_closing_ends_a_dial_and_tells_who_waits_for_it(node, door, redis_server):
    door.open.clear()
    asked = [asyncio.create_task(node.run(asking())) for _ in range(3)]
    await until(lambda: door.came, what="somebody dials")
    await node.aclose()
    for waiter in asked:
        with pytest.raises(PipeError):
            await waiter
    assert connected(redis_server) == 0
    door.open.set()
    assert await node.run(asking()) is None
    assert door.came == 2


async def test_a_connection_that_broke_is_replaced_by_the_next_call(node, door, redis_server):
    first = await node.pipe()
    first.close()
    assert node.open_pipe is None
    assert await node.run(asking()) is None
    assert node.open_pipe is not first
    await until(lambda: connected(redis_server) == 1, what="one is left")


def test_the_connection_of_another_loop_is_not_used(redis_server):
    async def opened() -> tuple[RedisNode, Pipe]:
        node = RedisNode(Door(redis_server), on_push=lambda *_: None, on_connect=lambda *_: None, in_cluster=False)
        return node, await node.pipe()

    async def used_elsewhere() -> None:
        assert first.usable
        assert node.open_pipe is None
        second = await node.pipe()
        assert second is not first
        assert await second.call("PING") == b"PONG"
        await node.aclose()
        assert not second.usable

    async def closed() -> None:
        first.close()
        await first.closed()

    with asyncio.Runner() as runner:
        node, first = runner.run(opened())
        other = asyncio.new_event_loop()
        other.run_until_complete(used_elsewhere())
        other.close()
        runner.run(closed())


async def test_a_new_connection_is_greeted_once_and_knows_its_version(door):
    greeted: list[tuple[RedisNode, Pipe]] = []
    node = RedisNode(door, on_push=lambda *_: None, on_connect=lambda *who: greeted.append(who), in_cluster=False)
    pipe = await node.pipe()
    await node.pipe()
    assert greeted == [(node, pipe)]
    assert node.version >= (6, 2)
    await node.aclose()


# Silence.


async def test_a_call_given_up_in_silence_condemns_the_connection_and_an_early_one_does_not(node, redis_server, hands):
    pipe = await node.pipe()
    redis_server.pause()
    for silence, usable in ((node_module.SILENCE - 0.01, True), (0.02, False)):
        call = asyncio.create_task(node.run(asking()))
        await asyncio.sleep(0)
        hands(silence)
        call.cancel()
        await asyncio.wait((call,))
        assert call.cancelled()
        assert pipe.usable is usable
    redis_server.resume()


# Errors.


async def test_a_server_that_has_become_a_replica_is_left(node, start_redis):
    server = start_redis()
    node = RedisNode(Door(server), on_push=lambda *_: None, on_connect=lambda *_: None, in_cluster=False)
    pipe = await node.pipe()
    await server.command("REPLICAOF", "127.0.0.1", "1")
    with pytest.raises(ReplyError) as caught:
        await node.run(ScriptCall(INSPECT, ("a",), ()))
    assert caught.value.code in {"READONLY", "MASTERDOWN"}
    assert not pipe.usable
    await node.aclose()


async def test_another_error_does_not_cost_the_connection(node, redis_server):
    await redis_server.command("RPUSH", "a", "1")
    pipe = await node.pipe()
    with pytest.raises(ReplyError) as caught:
        await node.run(asking())
    assert caught.value.code == "WRONGTYPE"
    assert pipe.usable


async def test_an_error_says_nothing_of_what_was_asked(start_redis):
    server = start_redis(rename_command=['EVALSHA ""'])
    node = RedisNode(Door(server), on_push=lambda *_: None, on_connect=lambda *_: None, in_cluster=False)
    with pytest.raises(ReplyError) as caught:
        await node.run(ScriptCall(RELEASE, ("a",), ("the-owner",)))
    assert "the-owner" not in repr(vars(caught.value)) + repr(caught.value)
    await node.aclose()


# Many calls at once.


async def test_of_many_calls_each_has_its_own_outcome_and_none_is_asked_twice(node, redis_server):
    await redis_server.command("RPUSH", "b", "1")
    await redis_server.command("SET", "c", "o\0007\0")
    calls = [
        asking("a"),
        asking("b"),
        ScriptCall(RELEASE, ("c",), ("x",)),
        asking("c"),
        ScriptCall(RELEASE, ("c",), ("o",)),
    ]
    outcomes = await node.run_all(calls)
    assert outcomes[0] is None
    assert isinstance(outcomes[1], ReplyError)
    assert outcomes[2] == -1  # another owner holds it
    assert outcomes[3][:2] == [b"o\0007\0", -1]
    assert outcomes[4] == 1


async def test_each_script_is_told_once_to_a_server_that_forgot_them_all(node, redis_server):
    await node.run(asking())
    await redis_server.command("SCRIPT", "FLUSH")
    await redis_server.command("CONFIG", "RESETSTAT")
    calls = [asking("a"), ScriptCall(RELEASE, ("a",), ("x",))] * 50
    assert await node.run_all(calls) == [None, 0] * 50
    assert "cmdstat_eval:calls=2," in await redis_server.command("INFO", "commandstats")


async def test_when_nobody_answers_every_call_fails_by_itself(door, start_redis):
    server = start_redis()
    server.kill()
    node = RedisNode(Door(server), on_push=lambda *_: None, on_connect=lambda *_: None, in_cluster=False)
    outcomes = await node.run_all([asking(), asking()])
    assert all(isinstance(outcome, Exception) for outcome in outcomes)
    assert len(outcomes) == 2
    await node.aclose()


# Replicas.


async def test_what_no_replica_confirms_is_no_success(node):
    call = ScriptCall(INSPECT, ("a",), (), 1)
    with pytest.raises(UnconfirmedError) as caught:
        await node.run(call)
    assert caught.value.reply is None
    assert [type(outcome) for outcome in await node.run_all([call, asking(), call])] == [
        UnconfirmedError,
        type(None),
        UnconfirmedError,
    ]


async def test_a_reply_without_its_confirmation_is_no_success(node, redis_server, monkeypatch):
    """The connection dies in between."""
    monkeypatch.setattr(node_module, "_CONFIRM_MS", 60_000)
    pipe = await node.pipe()
    call = asyncio.create_task(node.run(ScriptCall(INSPECT, ("a",), (), 1)))
    await until(lambda: redis_server.ask("INFO", "clients").find("blocked_clients:1") > 0, what="the server waits")
    assert not call.done()
    pipe.close()
    with pytest.raises(PipeError):
        await call


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("NOPERM this user has no permissions to run the 'wait' command", BackendRefusedError),
        ("ERR WAIT cannot be used with replica instances", BackendUnavailableError),
        ("UNBLOCKED force unblock from blocking operation", BackendUnavailableError),
    ],
)
def test_a_confirmation_that_a_demoted_master_refuses_may_come_another_time(said, expected):
    error = UnconfirmedError(b"1", 0)
    error.__cause__ = ReplyError(said)
    assert type(translated("acquire", error)) is expected


# What a hostile server says.


@pytest.mark.parametrize("nonsense", [b"%1\r\n*1\r\n:1\r\n:2\r\n", b">0\r\n", b">1\r\n$10\r\ninvalidate\r\n"])
async def test_a_message_that_no_redis_sends_ends_the_connection_quietly(nonsense, node):
    told: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))

    def hear(message: list[object]) -> None:
        assert message[1] is not None

    pipe = Pipe(hear)
    real = await node.pipe()
    pipe.attach(real._transport)
    call = pipe.call("X")
    pipe.data_received(nonsense)
    with pytest.raises(PipeError):
        await call
    assert told == []


async def test_the_end_of_another_subscription_is_not_taken_for_the_one_that_was_asked_for(node):
    pushed: list[list[object]] = []
    pipe = Pipe(pushed.append)
    pipe.attach((await node.pipe())._transport)
    ours = pipe.subscribe("SUNSUBSCRIBE", "x")
    pipe.data_received(b">3\r\n$12\r\nsunsubscribe\r\n$1\r\ny\r\n:1\r\n")
    assert pushed == [[b"sunsubscribe", b"y", 1]]
    assert not ours.done()
    pipe.data_received(b">3\r\n$12\r\nsunsubscribe\r\n$1\r\nx\r\n:0\r\n")
    assert await ours == [b"sunsubscribe", b"x", 0]
    assert len(pushed) == 1
