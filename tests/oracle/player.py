"""
Plays a history to two clients of a store, and compares every answer with the reference.

The event loop's time stands still, so no timer of a client runs unless a step asks for it.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, Self

from fencing_sdk.abc import LOCK, READER, Busy, Claim, Grant, Holder, SupportsShares, SupportsTransfer
from fencing_sdk.errors import BackendError
from tests.oracle.client_time import CLIENT, ClientTimeLoop
from tests.oracle.histories import Cast
from tests.oracle.members import Member, Place
from tests.oracle.reference import Differs, Reference, require

OBSERVER = 2
"""The client of operators, which acquires nothing: after a revocation a client may renew what it holds."""
_serial = itertools.count()


class Bench(Protocol):
    """One store under a history."""

    cast: Cast
    """The modes of the owners that may meet at each name."""
    hands: bool = False
    """A waiter for a plain lock may stand: a release hands the lock to it."""
    """A renewal is answered with the reason of a revocation."""
    timed: bool = True
    """Time passes as the history says: grants end, and silent waiters lose their places."""
    first_holds: bool = False
    """Waiters are shown as holders as soon as it is their turn."""
    lags: bool = False
    """One of several servers may still have what the others have released."""
    notices: bool = False
    """A holder hears of a revocation although no timer of its client runs."""
    describes: bool = True
    """The labels of waiters are shown."""
    stirs: bool = False
    """Waiters are woken for nothing, too: when their client begins to listen, or a node ahead has changed."""
    elsewhere: bool = True
    """Another client may go on with a grant, and need not go on for ever."""
    operated: bool = True
    """It has a line, lists holders and waiters, and revokes. Else a history asks, renews and releases."""
    exact: bool = True
    """The store's clock is the one of the history: the seconds that are left are known."""
    margin: float = 0.1
    """Seconds by which the store's clock may run on during a history."""

    def open(self) -> Any:
        """Make a client."""
        ...

    async def advance(self, seconds: float) -> None: ...

    def signs(self, claim: Claim, what: str) -> bool:
        """Whether a waiter's *what*, a ``try`` or a ``tick`` of its client's timers, is surely a sign of life."""
        ...

    def cut(self, statement: int) -> AbstractContextManager[object]:
        """Break the call that comes off at this statement."""
        ...


class Player:
    """
    Plays histories.

    Args:
        bench: The store.

        patience: Seconds of real time within which a waiter has to hear of its turn.
    """

    def __init__(self, bench: Bench, *, patience: float) -> None:
        self._bench, self._patience = bench, patience
        self._notified: set[str] = set()
        """The owners whose clients have heard that their grants are gone."""
        self._backends = [bench.open() for _ in range(3)]
        for backend in self._backends if bench.operated else ():
            backend.on_loss(lambda claim, *_: self._notified.add(claim.owner))
        self.grants = 0

    async def __aenter__(self) -> Self:
        for client in range(3):
            await self._connect(client)
        return self

    async def _connect(self, client: int) -> None:
        """Open the connections: waiters are woken when a connection is opened."""
        await self._call(client, lambda backend: backend.inspect("?"))

    async def __aexit__(self, *_: object) -> None:
        for client in range(3):
            await self._call(client, lambda backend: backend.aclose())

    async def play(self, steps: Iterable[str]) -> None:
        """
        Play one history, with names of its own.

        Raises:
            Differs: an answer is not allowed; the error names the step.
        """
        self._serial = next(_serial)
        self._reference = Reference(
            silence=self._bench.timed, first_holds=self._bench.first_holds, lags=self._bench.lags
        )
        self._members: dict[str, Member] = {}
        self._news: list[tuple[Member, Grant | None]] = []
        self._obliged: set[str] = set()
        at = ""
        try:
            for number, step in enumerate([*steps, "list"], 1):
                at = f"step {number}, {step!r}"
                await self._step(step)
        except (Differs, BackendError) as error:
            raise Differs(f"{at}: {error}") from error
        finally:
            for member in self._members.values():
                if member.place is not None:
                    await self._call(member.client, lambda _, member=member: member.place.leave(granted=False))
            for member in self._members.values():
                await self._call(member.client, lambda backend, member=member: backend.release(member.claim))

    async def _call(self, client: int, call: Callable[[Any], Awaitable[Any]]) -> Any:
        """Make a call as one of the clients."""
        before = CLIENT.set(client)
        try:
            return await call(self._backends[client])
        finally:
            CLIENT.reset(before)

    # Steps

    async def _step(self, step: str) -> None:
        words = step.split()
        match words:
            case ["clock", seconds]:
                await self._clock(float(seconds))
            case ["signs", client]:
                await self._signs(int(client))
            case ["reopen", client]:
                await self._reopen(int(client))
            case ["renew", "all"]:
                for client in range(2):
                    await self._renew([one for one in self._members.values() if one.client == client], client)
            case ["list"]:
                await self._list()
            case [tag, call, *how] if tag.split("/")[0] in self._bench.cast:
                member = self._members.setdefault(tag, Member(tag, self._serial, described=self._bench.describes))
                elsewhere = how == ["elsewhere"] and member.place is None and self._bench.elsewhere
                client = 1 - member.client if elsewhere else member.client
                statement = int(how[1]) if how[:1] == ["cut"] else 0
                await self._of_member(member, call, client, statement)
        if "/" in words[0] and words[0] in self._members:
            await self._settle(self._members[words[0]].name)

    async def _of_member(self, member: Member, call: str, client: int, statement: int) -> None:
        if call == "acquire":
            await self._acquire(member, client, statement)
        elif call == "release" and member.place is None:
            await self._release(member, client, statement)
        elif call in {"join", "stand"} and self._bench.operated:
            await self._join(member, direct=call == "stand")
        elif call == "leave" and member.place is not None:
            await self._leave(member)
        elif call == "renew":
            await self._renew([member], client)
        elif call == "revoke" and self._bench.operated:
            await self._revoke(member)
        elif call == "transfer" and member.place is None and member.was_granted:
            await self._transfer(member, client)

    async def _acquire(self, member: Member, client: int, statement: int = 0) -> None:
        reference = self._reference
        if member.was_granted and reference.holds(member.claim) is None and member.place is None:
            member.new_claim()
        claim, again = member.claim, reference.holds(member.claim) is not None
        with self._bench.cut(statement):
            try:
                answer = await self._call(client, lambda backend: backend.acquire(claim))
            except BackendError:
                if not statement:
                    raise
                await self._connect(client)  # or the next call to be cut off would be the opening
                answer = await self._grant_of(claim)
        if answer is None:
            return
        if not again and isinstance(answer, Busy):  # the call may have handed the lock to the waiter ahead
            await self._arrived(claim.name, but=member)
        reference.acquired(claim, answer)
        if isinstance(answer, Grant):
            if not again and claim.mode.shared:
                self._obliged.add(claim.name)
            await self._served(member, answer)
        elif member.place is not None and self._bench.signs(claim, "try"):
            reference.signed([claim], surely=True)

    async def _grant_of(self, claim: Claim) -> Grant | None:
        """What the store has granted to *claim*, whose answer did not come."""
        found = await self._holders(claim.name)
        mine = [one for one in found if one.id == claim.holder]
        return Grant(mine[0].token, permit=mine[0].permit, restarted=False) if mine else None

    async def _holders(self, name: str) -> Sequence[Holder]:
        def ask(backend: Any) -> Awaitable[Any]:
            return backend.holders(name) if isinstance(backend, SupportsShares) else backend.inspect(name)

        found = await self._call(OBSERVER, ask)
        return found if isinstance(found, Sequence) else [] if found is None else [found]

    async def _served(self, member: Member, grant: Grant) -> None:
        self.grants += 1
        member.token, member.was_granted = grant.token, True
        place, member.place = member.place, None
        if place is not None:
            await self._call(member.client, lambda _: place.leave(granted=True))

    async def _transfer(self, member: Member, client: int) -> None:
        of, to = member.claim, member.make_claim()
        answer: Any = None

        async def ask(backend: Any) -> None:
            nonlocal answer
            if isinstance(backend, SupportsTransfer):
                answer = await backend.transfer(of, to)

        await self._call(client, ask)
        if answer is not None:
            self._reference.transferred(of, to, answer)
        if isinstance(answer, Grant):
            member.claim, member.token = to, answer.token

    async def _release(self, member: Member, client: int, statement: int) -> None:
        held = self._reference.holds(member.claim) is not None
        with self._bench.cut(statement):
            try:
                outcome = await self._call(client, lambda backend: backend.release(member.claim))
            except BackendError:
                if not statement:
                    raise
                await self._connect(client)  # or the next call to be cut off would be the opening
                if not held or await self._grant_of(member.claim) is not None:
                    return
                outcome = None
                held = False  # nobody has to be woken by a call that was cut off
        self._reference.released(member.claim, outcome)
        if held:
            self._obliged.add(member.name)

    async def _join(self, member: Member, *, direct: bool) -> None:
        if member.place is not None or self._reference.holds(member.claim) is not None:
            return
        if member.was_granted:
            member.new_claim()
        direct = direct and self._bench.hands and member.mode == LOCK

        async def join(backend: Any) -> None:
            member.place = Place(backend, member, self._news, direct=direct)
            await member.place.join()

        await self._call(member.client, join)
        mine = [one.claim for one in self._standers(member.client)]
        self._reference.joined(member.claim)
        self._reference.signed([claim for claim in mine if self._bench.signs(claim, "join")], surely=True)
        if direct:
            self._obliged.add(member.name)
            await self._until(lambda: self._has_news(member) or self._shown(member))

    def _has_news(self, member: Member) -> bool:
        return any(about is member for about, _ in self._news)

    async def _shown(self, member: Member) -> bool:
        """Whether the store knows of a waiter, which joins in the background."""
        line = await self._call(OBSERVER, lambda backend: backend.list_waiters(member.name))
        return member.claim.holder in {one.id for one in line}

    def _standers(self, client: int) -> list[Member]:
        order = {one.claim.owner: n for line in self._reference.names.values() for n, one in enumerate(line.line)}
        standing = [one for one in self._members.values() if one.place is not None and one.client == client]
        return sorted(standing, key=lambda member: order.get(member.claim.owner, 0))

    async def _leave(self, member: Member) -> None:
        place, member.place = member.place, None
        assert place is not None
        stander = self._reference.stander(member.claim)
        await self._call(member.client, lambda _: place.leave(granted=False))
        if stander is not None and not self._reference.unsure(member.name) and self._reference.lives(stander):
            self._obliged.add(member.name)
        self._news[:] = [one for one in self._news if one[0] is not member]
        self._reference.left(member.claim)
        member.was_granted = True  # the claim was given up

    async def _renew(self, members: Sequence[Member], client: int) -> None:
        claims = [member.claim for member in members]
        claims = [one for one in claims if self._reference.stander(one) not in self._reference.entering(one.name)]
        outcomes = await self._call(client, lambda backend: backend.renew(claims)) if claims else []
        require(len(outcomes) == len(claims), f"{len(outcomes)} outcomes for {len(claims)} claims")
        for claim, outcome in zip(claims, outcomes, strict=True):
            self._reference.renewed(claim, outcome)

    async def _revoke(self, member: Member) -> None:
        line = self._reference.of(member.name).line
        if self._bench.first_holds and any(one.claim.mode == member.mode == READER for one in line):
            return  # one that waits may hold with this token already, and loses its place with it
        reason = f"the token of {member.tag} was {member.token}"
        answer = await self._call(OBSERVER, lambda backend: backend.revoke(member.name, member.token, reason))
        ended = [hold.claim for hold in self._reference.held(member.name) if hold.token == member.token]
        self._reference.revoked(member.name, member.token, reason, answer)
        if answer:
            self._obliged.add(member.name)
        for claim in ended if self._bench.notices else ():
            require(await self._until(lambda claim=claim: claim.owner in self._notified), "no notice of a revocation")

    async def _clock(self, seconds: float) -> None:
        """Let time pass, but never up to a moment at which the store's clock and the history's could disagree."""
        if not self._bench.timed:
            return
        moments = self._reference.moments()
        while any(abs(at - self._reference.now - seconds) <= self._bench.margin for at in moments):
            seconds += 2 * self._bench.margin
        await self._bench.advance(seconds)
        self._reference.now += seconds

    async def _signs(self, client: int) -> None:
        waiting = self._standers(client)
        for member in waiting:
            if (stander := self._reference.stander(member.claim)) is not None:
                stander.could = True  # a timer may wake it
        if ticking := [member.claim for member in waiting if self._bench.signs(member.claim, "tick")]:
            await self._tick(client)
            await self._arrived(*{member.name for member in waiting})
            self._reference.signed(ticking, surely=True)
        for name in {member.name for member in waiting}:
            await self._settle(name)
        for member in self._standers(client):
            if member.place is not None:
                await self._acquire(member, client)
                await self._settle(member.name)

    async def _tick(self, client: int) -> None:
        """Let a second pass for the timers of a client, and wait for what they have begun."""
        loop = asyncio.get_running_loop()
        assert isinstance(loop, ClientTimeLoop)
        before = asyncio.all_tasks()
        loop.tick(client, 1.1)
        for _ in range(3):
            await asyncio.sleep(0)
        if begun := asyncio.all_tasks() - before:
            await asyncio.wait(begun)
        await self._connect(client)  # answered behind what the timers have sent

    async def _reopen(self, client: int) -> None:
        if not self._standers(client):
            await self._call(client, lambda backend: backend.aclose())
            await self._connect(client)
            if self._bench.notices:  # the client hears of its grants again once it has renewed them
                await self._renew([one for one in self._members.values() if one.client == client], client)

    # What is seen afterwards

    async def _settle(self, name: str) -> None:
        """Wait for the news that somebody has to get, and compare all that is shown of a name."""
        obliged = name in self._obliged
        self._obliged.discard(name)
        self._reference.look_round(name)  # what is heard later may have been sent now
        await self._take_news()
        while obliged and (stander := self._reference.to_wake(name)) is not None:
            member = next(one for one in self._members.values() if one.claim.owner == stander.claim.owner)
            require(await self._until(lambda member=member: self._has_news(member)), f"{member.tag} was not woken")
            await self._take_news()
        await self._arrived(name)
        holders = await self._holders(name)
        self._reference.shown(name, holders, exactly=self._bench.exact)
        inspected = await self._call(OBSERVER, lambda backend: backend.inspect(name))
        tokens = {one.token for one in holders}
        require(inspected.token in tokens if inspected else not tokens, f"{tokens} hold, and {inspected} is shown")
        if self._bench.operated and (self._reference.of(name).line or self._serial % 4 == 0):
            line = await self._call(OBSERVER, lambda backend: backend.list_waiters(name))
            self._reference.line_shown(name, line)

    async def _arrived(self, *names: str, but: Member | None = None) -> None:
        """Wait for the news of a grant that the store has handed to a waiter, and take it."""
        for name in names:
            waiting = [one for one in self._members.values() if one.place is not None and one is not but]
            handed = {one.claim.holder: one for one in waiting}
            if not handed or not self._bench.hands:
                continue
            for one in await self._holders(name):
                if (member := handed.get(one.id)) is not None and self._reference.holds(member.claim) is None:
                    heard = await self._until(lambda member=member: self._has_news(member))
                    require(heard, f"{member.tag} was granted, and does not hear of it")
        await self._take_news()

    async def _take_news(self) -> None:
        for name in {member.name for member, _ in self._news}:
            self._reference.look_round(name)
        while self._news:
            member, grant = self._news.pop(0)
            if grant is not None:
                self._reference.handed(member.claim, grant)
                self._reference.look_round(member.name)
                await self._served(member, grant)
            elif (stander := self._reference.stander(member.claim)) is not None:
                require(stander.could or self._bench.stirs, f"{member.tag} was woken, and it was never its turn")
                stander.woken = True

    async def _until(self, condition: Callable[[], bool | Awaitable[bool]]) -> bool:
        """Wait in real time until *condition* holds; return whether it did."""
        stop = time.monotonic() + self._patience
        for turn in itertools.count():
            met = condition()
            if met if isinstance(met, bool) else await met:
                return True
            if time.monotonic() > stop:
                return False
            await (asyncio.sleep(0) if turn < 5 else asyncio.to_thread(time.sleep, 0.001))
        raise AssertionError

    async def _list(self) -> None:
        """Compare the pages with what each name shows."""
        if not self._bench.operated:
            return
        found, cursor = [], None
        while True:
            page = await self._call(
                OBSERVER, lambda backend, cursor=cursor: backend.list_holders(f"{self._serial}-", cursor, 2)
            )
            found += page.holders
            if (cursor := page.cursor) is None:
                break
        for name in {one.name for one in found} | set(self._reference.names):
            await self._arrived(name)
            self._reference.shown(name, [one for one in found if one.name == name], exactly=self._bench.exact)
