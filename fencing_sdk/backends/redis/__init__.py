"""
Locks in Redis or Valkey: one server, a master that Sentinels watch, or a cluster.

    connect("redis://:password@localhost:6379/0")            # rediss:// for TLS, unix:///path
    connect("redis+sentinel://a:26379,b:26379,c:26379/mymaster")
    connect("redis+cluster://a:7000,b:7000")
    connect(RedisBackend(client))                            # the connection settings of a client you have

Tokens: hybrid by default, so they keep growing when the server loses its memory. Clock: the server's.
Waiters: first come, first served, rung by a message. The backend has one connection to each server.

    __init__.py      the backend: calls of scripts, and how their answers are read
    tickets.lua      the rules of a line
    scripts.py       the Lua scripts, each one atomic step at the server
    bells.py         the messages and the client tracking by which bells ring
    keys.py          the keys of a lock, and a walk over those of all names
    options.py       reads a URL with the options of redis-py, or the settings of a client of redis-py or valkey-py
    errors.py        translates errors of the driver to those of the contract
    connection/      finds the servers, and keeps one connection to each:
        router.py    which server runs a script, by the map of a cluster
        node.py      one server: its connection, and the next one when it breaks
        pipe.py      the protocol of a connection that all requests share
        dial.py      opens a connection to a server, or to the master that Sentinels name
"""

from __future__ import annotations

import asyncio
import math
import struct
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from fencing_sdk._values.answer import Answer
from fencing_sdk._values.claim import HELD, LOCK, Busy, Claim, Gone, Place, Seen, mode_named
from fencing_sdk._values.loop_owner import Uncopied
from fencing_sdk._values.tasks import retrieve
from fencing_sdk._values.url import option_names, read_hybrid
from fencing_sdk.abc import ALL_MODES, Bell, Kept
from fencing_sdk.backends import take_options
from fencing_sdk.backends._shared.background_task import BackgroundTasks
from fencing_sdk.backends._shared.bells import bell_key
from fencing_sdk.backends.redis.bells import RedisBells
from fencing_sdk.backends.redis.connection.dial import BACKEND, RedisDialer, SentinelDialer, ServerDialer
from fencing_sdk.backends.redis.connection.node import (
    NOT_MASTER,
    SILENCE,
    CallOutcome,
    RedisNode,
    UnconfirmedError,
    outcome_of,
)
from fencing_sdk.backends.redis.connection.pipe import Pipe, Reply, ReplyError, pack
from fencing_sdk.backends.redis.connection.router import ClusterRouter, SingleMasterRouter, SlotMap
from fencing_sdk.backends.redis.errors import translated, translating
from fencing_sdk.backends.redis.keys import (
    DEFAULT_PREFIX,
    LINE,
    KeyWalk,
    ListingCursor,
    RedisKeys,
    check_prefix,
    milliseconds,
)
from fencing_sdk.backends.redis.options import DRIVER_OPTIONS, servers_of_client, servers_of_url
from fencing_sdk.backends.redis.scripts import (
    DRAW,
    END,
    GIVE_BACK,
    KEEP,
    KEEP_MANY,
    LOOK,
    PASS_ON,
    PRELOADED,
    SETTLE,
    Argument,
    RedisScript,
    ScriptCall,
)
from fencing_sdk.errors import BackendRefusedError, BackendUnavailableError, ConfigurationError, shown

__all__ = ["RedisBackend", "from_url"]

_BATCH = 200
"""Tickets that one run of a script keeps: it keeps the server busy for less than a millisecond."""
_LOOKED_AT = 50
"""Names that one run of a script looks at."""
_MOST_REPLICAS = 100
_SETTLING = 0.5
"""Seconds for which a look waits until the dead are passed over: the server may take no writes."""
_NOT_EXECUTED = {"NOSCRIPT", "MOVED", "ASK", "TRYAGAIN"}


class RedisBackend(Uncopied):
    """
    A lock service in Redis or Valkey, from version 6.2 on.

    Args:
        client: A client of redis-py or valkey-py, for asyncio or threads: ``Redis``, ``RedisCluster``, or the one that
            a ``Sentinel`` makes. The backend copies its settings, and opens one connection of its own to
            each server; it does not use the client.

        prefix: The beginning of every key; an ACL rule can name them: ``~{fencing:*``.

        tokens: ``"hybrid"``, or ``"counter"`` for 1, 2, 3, which start again when the server loses its data.

        min_replicas: Replicas that must have a grant or a renewal before it counts. The backend undoes a
            grant that they do not confirm, and tries again.

    Raises:
        ConfigurationError: an argument has a wrong type or value. No I/O happens before the first call.
    """

    modes = ALL_MODES
    rings = True

    def __init__(
        self, client: object, *, prefix: str = DEFAULT_PREFIX, tokens: str = "hybrid", min_replicas: int = 0
    ) -> None:
        self._servers = (
            client if isinstance(client, ServerDialer | SentinelDialer | SlotMap) else servers_of_client(client)
        )
        self._keys = RedisKeys(check_prefix(prefix))
        self._hybrid = read_hybrid(tokens)
        self._kind = "hybrid" if self._hybrid else "counter"
        self._replicas = _checked_replicas(min_replicas)
        self._sharded = sharded = isinstance(self._servers, SlotMap)
        self._endings = (":s", ":w", ":e", ":n") if sharded else (":s", ":w", ":e")
        self._bells = RedisBells(self._keys, sharded=sharded, silent=self._replicas > 0)

        def make_node(dialer: RedisDialer) -> RedisNode:
            return RedisNode(dialer, on_push=self._bells.on_push, on_connect=self._on_connect, in_cluster=sharded)

        self._router = self._bells.router = (
            ClusterRouter(self._servers, make_node)
            if isinstance(self._servers, SlotMap)
            else SingleMasterRouter(make_node(self._servers))
        )
        self._batch = 1 if sharded else _BATCH  # on a cluster each lock has a slot of its own
        self._waiting: set[str] = set()  # owners whose tickets wait, or are not known to hold
        self._walk = KeyWalk()
        self._asking = BackgroundTasks()
        self._draw_start, self._give_back_start = _start(DRAW, 8), _start(GIVE_BACK, 4)
        self._packed_kind = _packed(self._kind)
        self._drawing = RequestKind(
            "acquire", self._drawn, lambda claim, only: self._draw_in_full(claim, only=bool(only)), self._asking
        )
        self._returning = RequestKind("release", self._given_back, self._give_back_in_full, self._asking)

    def _on_connect(self, node: RedisNode, pipe: Pipe) -> None:
        self._bells.on_connect(node, pipe)
        for script in PRELOADED:  # if the server does not permit it, the first use loads the script
            pipe.call("SCRIPT", "LOAD", script.text).add_done_callback(retrieve)

    async def open(self) -> None:
        """See `fencing_sdk.abc.SupportsOpen.open`."""
        with translating("open"):
            await (await self._router.node(self._at("?")[0])).pipe()

    def _at(self, name: str) -> tuple[str, ...]:
        tag = self._keys.tag(name)
        return tuple([tag + ending for ending in self._endings])

    def _call(self, script: RedisScript, name: str, *arguments: Argument, replicas: int = 0) -> ScriptCall:
        return ScriptCall(script, self._at(name), (self._kind, *arguments), replicas)

    async def _run(self, call: ScriptCall) -> Reply:
        """Run a call; where its slot is moving, with the first key alone."""
        outcome = await outcome_of(self._router.run(call))
        if _is_moving(outcome):
            outcome = await self._with_one_key(call)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    async def _with_one_key(self, call: ScriptCall) -> CallOutcome:
        """Run a call with its first key alone: that is on one server, while the others may be on two."""
        return await outcome_of(self._router.run(call._replace(keys=call.keys[:1])))

    # Draw, and give back.

    def draw(self, claim: Claim, *, only_if_it_holds: bool = False) -> Awaitable[Place | Busy]:
        """See `fencing_sdk.abc.Backend.draw`."""
        tag = self._keys.tag(claim.name)
        pipe = None if self._replicas else self._router.last_pipe(tag + LINE)
        if pipe is not None:
            request = Request(pipe, self._drawing, claim, only_if_it_holds)
            if pipe.post(self._packed_draw(claim, tag, only=only_if_it_holds), request):
                return request
        return self._draw_in_full(claim, only=only_if_it_holds)

    def _packed_draw(self, claim: Claim, tag: str, *, only: bool) -> bytes:
        """Pack a draw. That of a lock is packed by hand, in a third of the time."""
        if claim.mode is LOCK and not self._sharded:
            bell, label = self._bells.address(claim, tag), stored(claim.label)
            owner, ms = claim.owner, str(milliseconds(claim.ttl))
            text = (
                f"{self._draw_start}{_packed_keys(tag)}{self._packed_kind}${len(owner)}\r\n{owner}\r\n"
                f"${len(ms)}\r\n{ms}\r\n$4\r\nlock\r\n$1\r\n1\r\n${len(label)}\r\n{label}\r\n"
                f"$1\r\n{only:d}\r\n${len(bell)}\r\n{bell}\r\n"
            )
            if text.isascii():
                return text.encode()
        return pack(self._draw_call(claim, only=only).by_hash())

    def _draw_call(self, claim: Claim, *, only: bool) -> ScriptCall:
        bell = self._bells.address(claim, self._keys.tag(claim.name))
        asked = (claim.mode.word, claim.mode.width, stored(claim.label), int(only), bell)
        return self._call(DRAW, claim.name, claim.owner, milliseconds(claim.ttl), *asked, replicas=self._replicas)

    async def _draw_in_full(self, claim: Claim, *, only: bool) -> Place | Busy:
        """Draw a ticket, whatever that takes: a connection, the script, another server."""
        with translating("acquire"):
            try:
                return self._drawn(claim, await self._run(self._draw_call(claim, only=only)))
            except UnconfirmedError as error:
                answer = self._drawn(claim, error.reply)
                if isinstance(answer, Place) and answer.token is not None:
                    # Too few replicas have it, so another server could grant it again.
                    await self._run(self._give_back_call(claim, 0.0))
                    raise
                return answer

    def _drawn(self, claim: Claim, reply: Reply) -> Place | Busy:
        """Read the answer to a draw. Raise TypeError if it is malformed: the ticket may have been drawn."""
        answer: Place | Busy = read_answer(reply, Place, Busy)
        self._take(claim, answer)
        return answer

    def _take(self, claim: Claim, answer: Place | Gone | Busy) -> None:
        """Note whether a ticket waits, and what rings for it."""
        if isinstance(answer, Place):
            if answer.token is None:
                self._waiting.add(claim.owner)
                self._bells.waits(claim, self._router.last_pipe(self._keys.tag(claim.name) + LINE))
                return
            self._bells.holds(claim)
        self._waiting.discard(claim.owner)

    def give_back(self, claim: Claim, *, after: float = 0.0) -> Awaitable[Gone | None]:
        """See `fencing_sdk.abc.Backend.give_back`."""
        tag = self._keys.tag(claim.name)
        pipe = self._router.last_pipe(tag + LINE) if after <= 0 else None
        if pipe is not None:
            request = Request(pipe, self._returning, claim, 0.0)
            owner = claim.owner
            packed: bytes | None = None
            if not self._sharded:
                text = (
                    f"{self._give_back_start}{_packed_keys(tag)}{self._packed_kind}"
                    f"${len(owner)}\r\n{owner}\r\n$1\r\n0\r\n$0\r\n\r\n"
                )
                packed = text.encode() if text.isascii() else None
            if pipe.post(packed or pack(self._give_back_call(claim, 0.0).by_hash()), request):
                return request
        return self._give_back_in_full(claim, after)

    def _give_back_call(self, claim: Claim, after: float) -> ScriptCall:
        key = bell_key(f"-{claim.owner}") if after > 0 else ""
        return self._call(GIVE_BACK, claim.name, claim.owner, milliseconds(after), key)

    async def _give_back_in_full(self, claim: Claim, after: float) -> Gone | None:
        with translating("release"):
            return self._given_back(claim, await self._run(self._give_back_call(claim, after)))

    def _given_back(self, claim: Claim, reply: Reply) -> Gone | None:
        self._waiting.discard(claim.owner)
        return None if reply == [1] else read_answer(reply, Gone)

    # Keep.

    async def keep(self, tickets: Sequence[Kept]) -> Sequence[Place | Gone | None]:
        """
        See `fencing_sdk.abc.Backend.keep`.

        Who holds alone is kept in batches of many names. Who waits, or holds together with others, is kept by its name,
        and so is what the first of them did not find.
        """
        answers: list[Place | Gone | None] = [None] * len(tickets)
        errors: list[Exception] = []
        alone: list[int] = []
        by_name: dict[tuple[str, bool], list[int]] = {}
        for at, (claim, number) in enumerate(tickets):
            if claim.owner in self._waiting or not number:
                by_name.setdefault((claim.name, True), []).append(at)
            elif claim.mode is not LOCK and claim.mode.shared:
                by_name.setdefault((claim.name, False), []).append(at)
            else:
                alone.append(at)
        with translating("renew"):
            batches = [alone[start : start + self._batch] for start in range(0, len(alone), self._batch)]
            calls = [self._keep_many([tickets[at] for at in batch]) for batch in batches]
            for batch, outcome in zip(batches, await self._router.run_all(calls) if calls else (), strict=True):
                if not isinstance(outcome, bytes) or len(outcome) != len(batch):
                    errors.append(_error_of(outcome))
                    continue
                for at, code in zip(batch, outcome, strict=True):
                    if code == _HOLDS:
                        answers[at] = HELD
                    else:
                        by_name.setdefault((tickets[at][0].name, True), []).append(at)
            await self._keep_by_name(tickets, by_name, answers, errors)
            if errors and answers.count(None) == len(answers):
                raise errors[0]
        self._bells.followed(claim for (claim, _), answer in zip(tickets, answers, strict=True) if answer is HELD)
        return answers

    def _keep_many(self, tickets: Sequence[Kept]) -> ScriptCall:
        keys = [self._keys.tag(claim.name) + LINE for claim, _ in tickets]
        spans = {ttl: milliseconds(ttl) for ttl in {claim.ttl for claim, _ in tickets}}  # there are few
        words: list[Argument] = [self._kind]
        for claim, number in tickets:
            words += (_NUMBER.pack(number) + claim.owner.encode() + b"\0", spans[claim.ttl])
        return ScriptCall(KEEP_MANY, keys, words, self._replicas, follow=keys)

    async def _keep_by_name(
        self,
        tickets: Sequence[Kept],
        by_name: Mapping[tuple[str, bool], Sequence[int]],
        answers: list[Place | Gone | None],
        errors: list[Exception],
    ) -> None:
        batches = [
            (name, full, group[start : start + _BATCH])
            for (name, full), group in by_name.items()
            for start in range(0, len(group), _BATCH)
        ]
        calls: list[ScriptCall] = []
        for name, full, batch in batches:
            words: list[Argument] = ["full" if full else "short"]
            for claim, number in (tickets[at] for at in batch):
                words += (claim.owner, milliseconds(claim.ttl), number)
            call = self._call(KEEP, name, *words, replicas=self._replicas)
            calls.append(call if full else call._replace(follow=call.keys[:1]))
        outcomes = await self._router.run_all(calls) if calls else []
        for (_, _, batch), call, found in zip(batches, calls, outcomes, strict=True):
            outcome = await self._with_one_key(call) if len(batch) == 1 and _is_moving(found) else found
            if isinstance(outcome, ReplyError) and outcome.code == "WRONGTYPE":  # others have written over the key
                outcome = [[-2, 1]] * len(batch)
            if not isinstance(outcome, list) or len(outcome) != len(batch):
                errors.append(_error_of(outcome))
                continue
            for at, reply in zip(batch, outcome, strict=True):
                answer = answers[at] = read_answer(reply, Place, Gone)
                if answer is not HELD:
                    self._take(tickets[at][0], answer)

    # The others.

    async def pass_on(self, claim: Claim, heir: Claim) -> Place | Gone:
        """See `fencing_sdk.abc.PassesOn.pass_on`."""
        bell = self._bells.address(heir, self._keys.tag(heir.name))
        asked = (claim.owner, milliseconds(heir.ttl), heir.owner, stored(heir.label), bell)
        with translating("transfer"):
            reply = await outcome_of(self._router.run(self._call(PASS_ON, claim.name, *asked, replicas=self._replicas)))
            if isinstance(reply, Exception):
                if _is_moving(reply):
                    detail = "the slot is moving, and its keys are on two servers"
                    raise BackendRefusedError(BACKEND, "transfer", detail) from reply
                raise reply
            answer: Place | Gone = read_answer(reply, Place, Gone)
        self._take(heir, answer)
        return answer

    async def end(self, name: str, token: int, reason: str) -> bool:
        """See `fencing_sdk.abc.Backend.end`."""
        with translating("revoke"):
            ended = await self._router.run(self._call(END, name, token, reason, replicas=self._replicas))
        return isinstance(ended, int) and ended > 0

    async def tickets(self, names: Sequence[str]) -> Sequence[Sequence[Seen]]:
        """
        See `fencing_sdk.abc.Backend.tickets`.

        A look writes nothing, so that it is answered while the server takes no writes. Where a line has to be settled,
        it looks again afterwards.
        """
        with translating("inspect"):
            found = await self._look(names)
            unsettled = [name for name, (settled, _) in zip(names, found, strict=True) if not settled]
            if unsettled:
                with suppress(Exception):
                    async with asyncio.timeout(_SETTLING):
                        await self._router.run_all([self._call(SETTLE, name) for name in unsettled])
                        found = await self._look(names)
        return [seen for _, seen in found]

    async def _look(self, names: Sequence[str]) -> list[tuple[bool, list[Seen]]]:
        batch = 1 if self._sharded else _LOOKED_AT
        calls = []
        for start in range(0, len(names), batch):
            keys = [key for name in names[start : start + batch] for key in self._at(name)]
            calls.append(ScriptCall(LOOK, keys, (len(self._endings),)))
        if self._sharded:
            outcomes = await self._router.run_all(calls)
        else:  # one run at a time on a single server, so that the calls of others get in between
            outcomes = [await self._router.run(call) for call in calls]
        lines: list[tuple[bool, list[Seen]]] = []
        for call, found in zip(calls, outcomes, strict=True):
            outcome = await self._with_one_key(call) if _is_moving(found) else found
            if isinstance(outcome, Exception):
                raise outcome
            lines += [_read_line(reply, alone=len(names) == 1) for reply in outcome]  # type: ignore[attr-defined]
        return lines

    async def names(self, prefix: str, cursor: str | None, limit: int) -> tuple[Sequence[str], str | None]:
        """See `fencing_sdk.abc.Backend.names`."""
        at = ListingCursor.read(cursor)
        with translating("list"):
            masters = await self._router.masters(anew=at.cursor == b"0")
            found, after = await self._walk.page(at, masters, self._keys.lines(prefix), limit)
        return [name for key in found if (name := self._keys.name(key)) is not None], after

    def listen(self, claim: Claim, bell: Bell) -> Callable[[], object]:
        """See `fencing_sdk.abc.Backend.listen`."""
        return self._bells.listen(claim, bell)

    async def aclose(self) -> None:
        """Close the connections. Tickets stay until they are given back or die."""
        self._bells.aclose()
        await self._asking.aclose(patience=0.0)
        await self._router.aclose()


class RequestKind(NamedTuple):
    """
    Verb of a request: all that is the same for each claim.

    *in_full* asks again where the server did not execute the command, in one of the *tasks*.
    """

    operation: str
    read: Callable[[Claim, Reply], object]
    in_full: Callable[[Claim, float], Coroutine[Any, Any, object]]
    tasks: BackgroundTasks


class Request(Answer[Any]):
    """A command that leaves at once, and whose reply is read where it arrives."""

    __slots__ = ("_argument", "_claim", "_kind", "_pipe", "_task")

    def __init__(self, pipe: Pipe, kind: RequestKind, claim: Claim, argument: float) -> None:
        super().__init__(pipe.loop)
        self._pipe = pipe
        self._kind = kind
        self._claim = claim
        self._argument = argument
        self._task: asyncio.Task[None] | None = None

    def __call__(self, reply: Reply) -> None:
        """Take the reply, or the error of the connection."""
        if self._over:
            return
        try:
            if not isinstance(reply, Exception):
                self.settle(self._kind.read(self._claim, reply))
                return
            error = reply
        except Exception as malformed:  # noqa: BLE001  (the reply is not what the script returns)
            error = malformed
        if isinstance(error, ReplyError):
            if error.code in _NOT_EXECUTED:
                self._task = self._kind.tasks.start(self._ask_again())
                return
            if error.code in NOT_MASTER:
                self._pipe.close_soon("the server is not a master")  # the next call looks for the master again
        failure = translated(self._kind.operation, error)
        failure.__cause__ = error
        self.fail(failure)

    async def _ask_again(self) -> None:
        try:
            self.settle(await self._kind.in_full(self._claim, self._argument))
        except Exception as error:  # noqa: BLE001  (it is raised where the answer is awaited)
            self.fail(error)
        finally:
            if not self._over:
                detail = "the backend was closed meanwhile"
                self.fail(BackendUnavailableError(BACKEND, self._kind.operation, detail))

    def cancel(self) -> bool:
        """Give the request up, and close a connection that is silent."""
        given_up = super().cancel()
        if given_up and self._task is not None:
            self._task.cancel()
        elif given_up and self._pipe.silent_for >= SILENCE:
            self._pipe.close("the server was silent")
        return given_up


_HOLDS = ord("1")
_NUMBER = struct.Struct(">Q")


def read_answer(reply: Reply, *kinds: type[Place | Gone | Busy]) -> Any:
    """Read an answer about a ticket of one of these *kinds*. Raise TypeError if it is none."""
    answer: object = None
    match reply:
        case [int() as token, int() as permit, int() as number] if token >= 0:
            answer = Place(token, permit if permit >= 0 else None, number)
        case [-1, int() as after, int() as number]:
            answer = Place(None, None, number, None, after / 1000 if after >= 0 else math.inf)
        case [-2, taken]:
            answer = Gone(None, bool(taken))
        case [-2, taken, bytes() as reason]:
            answer = Gone(reason.decode(errors="replace"), bool(taken))
        case [-3, int() as after]:
            answer = Busy(max(0, after) / 1000)
        case [-4]:
            answer = HELD
    if not isinstance(answer, kinds):
        msg = "not an answer of the script"
        raise TypeError(msg)
    return answer


def _read_line(reply: Any, *, alone: bool) -> tuple[bool, list[Seen]]:
    """Read whether a line is settled, and its tickets. Among many, a key that holds something else has none."""
    if reply == 0 and not alone:
        return True, []
    if reply == 0:
        msg = "WRONGTYPE this is not a line"
        raise ReplyError(msg)
    unsettled, rows = reply
    rows.sort(key=lambda row: (row[3] < 0, row[8]))
    return not unsettled, [_seen(*row[:8]) for row in rows]


def _seen(  # noqa: PLR0917  (the columns of a row)
    holder: bytes, left: int, since: int, token: int, permit: int, word: bytes, width: int, label: bytes
) -> Seen:
    text = label.decode(errors="replace")
    mode = mode_named(word.decode(), width)
    held = token if token >= 0 else None
    number = permit if permit >= 0 else None
    return Seen(holder.decode(), mode, held, number, left / 1000, since / 1000, text[1:] if text else None)


def _is_moving(outcome: CallOutcome) -> bool:
    return isinstance(outcome, ReplyError) and outcome.code == "TRYAGAIN"


def _error_of(outcome: CallOutcome) -> Exception:
    return outcome if isinstance(outcome, Exception) else TypeError("not an answer of the script")


def stored(label: str | None) -> str:
    """Mark a label, so that an empty text differs from None."""
    return "" if label is None else f"={label}"


def _start(script: RedisScript, arguments: int) -> str:
    return f"*{arguments + 6}\r\n{_packed('EVALSHA')}{_packed(script.sha)}{_packed('3')}"


def _packed(word: str) -> str:
    return f"${len(word)}\r\n{word}\r\n"


def _packed_keys(tag: str) -> str:
    size = len(tag) + 2
    return f"${size}\r\n{tag}:s\r\n${size}\r\n{tag}:w\r\n${size}\r\n{tag}:e\r\n"


def _checked_replicas(min_replicas: object) -> int:
    """Return *min_replicas* as a number. Raise ConfigurationError if it is none."""
    text = str(min_replicas)
    is_number = isinstance(min_replicas, int | str) and not isinstance(min_replicas, bool)
    replicas = int(text[:9]) if is_number and text.isascii() and text.isdigit() else -1
    if not 0 <= replicas <= _MOST_REPLICAS:
        msg = f"min_replicas must be a whole number from 0 to {_MOST_REPLICAS}, got {shown(min_replicas)}"
        raise ConfigurationError(msg)
    return replicas


def from_url(url: str, **options: object) -> RedisBackend:
    """
    Make a backend for one of its URLs; `RedisBackend` explains the options.

    The driver's own options, such as ``ssl_ca_certs``, may stand in the URL's query too.

    Raises:
        ConfigurationError: the URL or an option cannot be used.
    """
    ours = option_names(RedisBackend)
    chosen = take_options(url, options, (*ours, *DRIVER_OPTIONS))
    own: dict[str, Any] = {name: chosen.pop(name) for name in ours if name in chosen}
    return RedisBackend(servers_of_url(url, chosen), **own)  # what remains are the driver's
