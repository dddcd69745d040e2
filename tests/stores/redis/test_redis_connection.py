"""One connection to a server for all calls: opened once, replies in order, and what becomes of those who wait."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import hashlib
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any

import hiredis
import pytest
from patience import until
from redis_links import servers
from redis_server import RedisServer

import fencing_sdk.backends.redis.connection.node as node_module
import fencing_sdk.backends.redis.connection.pipe as pipe_module
from fencing_sdk.backends.redis.connection.dial import OpenConnection, ServerDialer
from fencing_sdk.backends.redis.connection.node import RedisNode, UnconfirmedError
from fencing_sdk.backends.redis.connection.pipe import Pipe, PipeError, ReplyError
from fencing_sdk.backends.redis.scripts import RedisScript, ScriptCall

pytest_plugins = ["redis_fixtures"]


# One server's connection: opened once however many ask, given up, closed under everybody, and never doubled.


PATIENCE = 60.0


class Door:
    """The way to a real server, which a test may keep shut, and on which it counts who comes."""

    def __init__(self, server: RedisServer) -> None:
        place = servers(server.url)
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


def script(text: str, *, reads: bool = False) -> RedisScript:
    made = RedisScript(reads=reads)
    made.text, made.sha = text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()
    return made


LOOK = script("return redis.call('GET', KEYS[1])", reads=True)
END = script("return redis.call('GETDEL', KEYS[1])")
SAY = script("return 1")


def asking(key: str = "a") -> ScriptCall:
    return ScriptCall(LOOK, (key,), ())


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
        await node.run(asking())
    assert caught.value.code in {"READONLY", "MASTERDOWN"}
    assert not pipe.usable
    await node.aclose()


# Many calls at once.


async def test_of_many_calls_each_has_its_own_outcome_and_none_is_asked_twice(node, redis_server):
    await redis_server.command("RPUSH", "b", "1")
    await redis_server.command("SET", "c", "7")
    outcomes = await node.run_all([asking("a"), asking("b"), asking("c"), ScriptCall(END, ("c",), ()), asking("c")])
    assert isinstance(outcomes[1], ReplyError)
    assert [outcomes[0], *outcomes[2:]] == [None, b"7", b"7", None]


async def test_each_script_is_told_once_to_a_server_that_forgot_them_all(node, redis_server):
    await node.run(asking())
    await redis_server.command("SCRIPT", "FLUSH")
    await redis_server.command("CONFIG", "RESETSTAT")
    calls = [ScriptCall(END, ("a",), ()), ScriptCall(SAY, ("a",), ())] * 50
    assert await node.run_all(calls) == [None, 1] * 50
    assert "cmdstat_eval:calls=2," in await redis_server.command("INFO", "commandstats")


# Replicas.


async def test_what_no_replica_confirms_is_no_success(node):
    call = ScriptCall(END, ("a",), (), 1)
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
    call = asyncio.create_task(node.run(ScriptCall(END, ("a",), (), 1)))
    await until(lambda: redis_server.ask("INFO", "clients").find("blocked_clients:1") > 0, what="the server waits")
    assert not call.done()
    pipe.close()
    with pytest.raises(PipeError):
        await call


# What a hostile server says.


@pytest.mark.parametrize("nonsense", [b"%1\r\n*1\r\n:1\r\n:2\r\n", b">0\r\n", b">1\r\n$10\r\ninvalidate\r\n"])
async def test_a_message_that_no_redis_sends_ends_the_connection_quietly(nonsense, node):
    reported: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))

    def hear(message: list[object]) -> None:
        assert message[1] is not None

    pipe = Pipe(hear)
    real = await node.pipe()
    pipe.attach(real._transport)
    call = pipe.call("X")
    pipe.data_received(nonsense)
    with pytest.raises(PipeError):
        await call
    assert reported == []


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


# One connection that everybody shares: replies in order, one write a turn, and what becomes of those who wait.


PUSHED = b">3\r\n$7\r\nmessage\r\n$1\r\nc\r\n$1\r\n7\r\n"
SUBSCRIBED = b">3\r\n$9\r\nsubscribe\r\n$1\r\nc\r\n:1\r\n"


class Counted:
    """A transport that counts what is written to it."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self.writes: list[bytes] = []

    def write(self, data: bytes) -> None:
        self.writes.append(data)
        self._transport.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class Far:
    """The far end of a pipe: a socket, and what the pipe was told that was not a reply."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._reader = hiredis.Reader(notEnoughData=self)
        self.pushes: list[list[object]] = []
        self.pipe = Pipe(self.pushes.append)
        self.transport: Any = None

    async def asked(self, number: int = 1) -> list[Any]:
        """The next commands that came."""
        commands: list[Any] = []
        while len(commands) < number:
            while (command := self._reader.gets()) is self:
                async with asyncio.timeout(PATIENCE):
                    self._reader.feed(await asyncio.get_running_loop().sock_recv(self._end, 65536))
            commands.append(command)
        return commands

    async def says(self, data: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self._end, data)

    def leaves(self) -> None:
        self._end.close()


@pytest.fixture
async def far() -> AsyncIterator[Far]:
    """A pipe on a real socket, and afterwards the proof that the loop was told of nothing."""
    loop = asyncio.get_running_loop()
    reported: list[dict[str, Any]] = []
    loop.set_exception_handler(lambda _, context: reported.append(context))
    near, end = socket.socketpair()
    near.setblocking(False)
    end.setblocking(False)
    far = Far(end)
    transport, _ = await loop.create_connection(lambda: far.pipe, sock=near)
    far.transport = Counted(transport)
    far.pipe.attach(far.transport)
    yield far
    far.pipe.close()
    await far.pipe.closed()
    end.close()
    gc.collect()
    assert reported == []


async def answer(future: asyncio.Future[object]) -> object:
    async with asyncio.timeout(PATIENCE):
        return await future


async def heard(far: Far, number: int = 1) -> None:
    async with asyncio.timeout(PATIENCE):
        while len(far.pushes) < number:  # noqa: ASYNC110  (a protocol hears without an event)
            await asyncio.sleep(0)


@pytest.mark.every_loop
async def test_replies_are_handed_out_in_the_order_of_the_calls(far):
    calls = [far.pipe.call("ECHO", number) for number in range(100)]
    assert await far.asked(100) == [[b"ECHO", b"%d" % number] for number in range(100)]
    await far.says(b"".join(b":%d\r\n" % number for number in range(100)))
    assert [await answer(call) for call in calls] == list(range(100))


@pytest.mark.every_loop
async def test_what_is_asked_in_one_turn_leaves_in_two_writes_at_most(far):
    calls = [far.pipe.call("PING") for _ in range(100)]
    await far.asked(100)
    assert len(far.transport.writes) == 2
    await far.says(b"+OK\r\n" * 100)
    assert [await answer(call) for call in calls] == [b"OK"] * 100


@pytest.mark.parametrize("size", [1, 2, 3, 7])
async def test_replies_may_come_in_any_pieces(far, size):
    calls = [far.pipe.call("X") for _ in range(4)]
    data = b"$5\r\nab\r\nc\r\n" + PUSHED + b"*2\r\n:1\r\n_\r\n" + b"-OOM no\r\n" + b"%1\r\n+k\r\n#t\r\n"
    for start in range(0, len(data), size):
        await far.says(data[start : start + size])
        await asyncio.sleep(0)
    assert await answer(calls[0]) == b"ab\r\nc"
    assert await answer(calls[1]) == [1, None]
    with pytest.raises(ReplyError):
        await answer(calls[2])
    assert list((await answer(calls[3])).values()) == [True]
    assert far.pushes == [[b"message", b"c", b"7"]]


async def test_a_call_that_is_given_up_does_not_shift_the_replies(far):
    first, second, third = far.pipe.call("A"), far.pipe.call("B"), far.pipe.call("C")
    second.cancel()
    await far.says(b":1\r\n-ERR nobody hears this\r\n:3\r\n")
    assert await answer(first) == 1
    assert await answer(third) == 3


async def test_an_error_shows_its_code_and_not_what_was_asked(far):
    call = far.pipe.call("EVALSHA", "x", 0, "owner-id")
    await far.says(b"-ERR unknown command 'EVALSHA', with args beginning with: 'owner-id'\r\n")
    with pytest.raises(ReplyError) as caught:
        await answer(call)
    assert caught.value.code == "NOCOMMAND"
    assert "owner-id" not in str(caught.value) + repr(caught.value)


# Subscriptions.


async def test_a_refused_subscription_raises_and_the_next_one_is_confirmed(far):
    refused, confirmed = far.pipe.subscribe("SUBSCRIBE", "x"), far.pipe.subscribe("SUBSCRIBE", "c")
    after = far.pipe.call("A")
    await far.says(b"-NOPERM no\r\n" + SUBSCRIBED + b":1\r\n")
    with pytest.raises(ReplyError) as caught:
        await answer(refused)
    assert caught.value.code == "NOPERM"
    assert await answer(confirmed) == [b"subscribe", b"c", 1]
    assert await answer(after) == 1


@pytest.mark.parametrize(
    ("said", "named"),
    [
        ("NOPERM ACL failure in script: User app has no permissions to run the 'zcard' command", "zcard"),
        ("NOPERM User app has no permissions to run the 'client|setname' command", "client|setname"),
        ("NOPERM ACL failure in script: User app has no permissions to access the '{a}:l' key", ""),
        ("NOPERM User app has no permissions to run the 'x y\x1b[2J' command", ""),
        ("ERR User app has no permissions to run the 'zcard' command", "zcard"),
        ("ERR The user executing the script can't run this command or subcommand", ""),
        ("ERR unknown command 'EVAL', with args beginning with: 'return 1'", "eval"),
        ("ERR unknown command `EVALSHA`, with args beginning with: `a`", "evalsha"),
        ("ERR Unknown Redis command called from script script: a, on @user_script:1.", ""),
    ],
)
def test_a_command_that_is_forbidden_or_unknown_is_named_if_the_server_tells_a_plain_word(said, named):
    assert ReplyError(said).command == named


@pytest.mark.parametrize(
    ("said", "code"),
    [
        # Redis 6.2
        ("@user_script: 1: @user_script: 1: -NOPERM this user has no permissions to run the 'set' command", "NOPERM"),
        # Redis 7.0
        (
            "ERR The user executing the script can't run this command or subcommand script: a, on @user_script:1.",
            "NOPERM",
        ),
        (
            "ERR The user executing the script can't access at least one of the keys mentioned in the arguments",
            "NOPERM",
        ),
        # Redis 7.2 to 8.2, Valkey
        (
            "ERR ACL failure in script: User a has no permissions to run the 'set' command script: on @user_script:1.",
            "NOPERM",
        ),
        ("ERR ACL failure in script: No permissions to access a key", "NOPERM"),
        ("ERR some later server says that a permission is missing", "NOPERM"),
        ("ERR unknown command 'EVAL', with args beginning with: 'permission'", "NOCOMMAND"),
        ("ERR Unknown command called from script script: on @user_script:1.", "NOCOMMAND"),
        ("ERR Unknown Redis command called from script script: a, on @user_script:1.", "NOCOMMAND"),
        ("ERR Script attempted to access a non local key in a cluster node script: a, on @user_script:1.", "TRYAGAIN"),
        ("ERR syntax error", "ERR"),
        ("ERR value 'permissions' is not an integer", "ERR"),
    ],
)
def test_an_error_without_a_code_of_its_own_gets_one(said, code):
    assert ReplyError(said).code == code


async def test_a_server_that_ends_a_subscription_just_before_we_do_shifts_no_reply(far):
    ended = b">3\r\n$12\r\nsunsubscribe\r\n$1\r\nc\r\n:0\r\n"
    before, ending, after = far.pipe.call("A"), far.pipe.subscribe("SUNSUBSCRIBE", "c"), far.pipe.call("B")
    await far.says(ended + b":1\r\n" + ended + b":2\r\n")
    assert [await answer(before), await answer(after)] == [1, 2]
    assert await answer(ending) == [b"sunsubscribe", b"c", 0]
    assert far.pushes == [[b"sunsubscribe", b"c", 0]]


# Confirmations by replicas.


async def test_all_calls_of_one_turn_share_one_confirmation(far):
    calls, confirmations = [], set()
    for number in range(3):
        calls.append(far.pipe.call("A", number))
        confirmations.add(far.pipe.confirm(1, 200))
    assert await far.asked(4) == [[b"A", b"0"], [b"A", b"1"], [b"A", b"2"], [b"WAIT", b"1", b"200"]]
    (confirmation,) = confirmations
    later, again = far.pipe.call("B"), far.pipe.confirm(1, 200)
    assert await far.asked(2) == [[b"B"], [b"WAIT", b"1", b"200"]]
    await far.says(b":0\r\n:1\r\n:2\r\n:7\r\n:3\r\n:8\r\n")
    assert [await answer(call) for call in (*calls, confirmation, later, again)] == [0, 1, 2, 7, 3, 8]


# The end of a connection.


@pytest.mark.every_loop
async def test_whoever_waits_is_told_when_the_connection_is_lost(far):
    calls = [far.pipe.call("A"), far.pipe.subscribe("SUBSCRIBE", "c")]
    await far.asked(2)
    far.leaves()
    for call in calls:
        with pytest.raises(PipeError):
            await answer(call)
    assert not far.pipe.usable
    with pytest.raises(PipeError):
        await answer(far.pipe.call("B"))
    assert len(far.transport.writes) <= 2


@pytest.mark.parametrize(
    "nonsense", [b"hello\r\n", b"HTTP/1.1 400 Bad Request\r\n", b"\x15\x03\x01\x00\x02", b":1\r\n:2\r\n", b"*-7\r\n"]
)
async def test_a_server_that_talks_nonsense_is_left(far, nonsense):
    call = far.pipe.call("A")
    await far.says(nonsense)
    with contextlib.suppress(PipeError):
        assert await answer(call) == 1
    async with asyncio.timeout(PATIENCE):
        while far.pipe.usable:  # noqa: ASYNC110  (a protocol hears without an event)
            await asyncio.sleep(0)
    with pytest.raises(PipeError):
        await answer(far.pipe.call("B"))


# Silence.


async def test_a_connection_is_silent_only_while_somebody_waits_and_nothing_comes(far, monkeypatch):
    class Hands:
        at = 100.0

        def now(self) -> float:
            return self.at

    clock = Hands()
    monkeypatch.setattr(pipe_module, "_CLOCK", clock)
    assert far.pipe.silent_for == 0
    clock.at = 200.0
    first = far.pipe.call("A")
    assert far.pipe.silent_for == 0
    clock.at = 201.0
    first.cancel()  # given up, but the server owes an answer
    second = far.pipe.call("B")
    assert far.pipe.silent_for == 1.0
    await far.says(PUSHED)  # a sign of life
    await heard(far)
    assert far.pipe.silent_for == 0
    clock.at = 204.0
    assert far.pipe.silent_for == 3.0
    await far.says(b":1\r\n:2\r\n")
    assert await answer(second) == 2
    clock.at = 300.0
    assert far.pipe.silent_for == 0
