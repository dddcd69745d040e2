"""
The tickets of one backend object: their verbs, what they watch, and the bells that ring for them.

Nothing in ZooKeeper has to be prolonged ticket by ticket: any request keeps the session alive, and the session keeps
its nodes. A keep proves that the leader still knew the session after it was sent, and that each node is still there. A
node that is watched is there until its event comes, and ZooKeeper sends the event before it answers a later request on
that connection. So one request keeps all tickets of a session whose nodes are watched.

The session of a living process never ends. So each node has an end (`NodeEnds`), at which the driver's thread deletes
it, unless its ticket is kept: a ttl after the last sign of life, and `WAITER_TTL` while the ticket waits.

A process that died leaves its nodes for as long as the timeout of their session. So a ticket that waits for a while,
and whose ttl is longer, is moved to the session of `WAITER_TTL`, and back when it holds.

Who waits watches what it waits for (`rival_of`). When that changes, the tickets of this object in that line take one
look at it together, write the turns that have come, ring, and watch again. A bell rings without news when a ticket may
be gone: its node was deleted, or its session has ended. When a session has another connection, its watches have ended,
and it looks again.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from kazoo.exceptions import NoAuthError, NodeExistsError, NoNodeError
from kazoo.protocol.serialization import SetData

from fencing_sdk._values.claim import Busy, Claim, Gone, Place, Seen
from fencing_sdk._values.clock import wall_seconds
from fencing_sdk._values.tasks import side_by_side
from fencing_sdk.abc import WAITER_TTL, Bell, Kept, News
from fencing_sdk.backends._shared.background_task import BackgroundTask, BackgroundTasks
from fencing_sdk.backends.zookeeper.driver import BACKEND, ZooKeeperSettings
from fencing_sdk.backends.zookeeper.nodes import (
    FOLDER,
    LineNode,
    holding,
    is_of,
    mark_of,
    parked_mark_of,
    rival_of,
    written,
)
from fencing_sdk.backends.zookeeper.requests import Look, Made, Recipe
from fencing_sdk.backends.zookeeper.session import ZooKeeperSession, ZooKeeperSessions
from fencing_sdk.errors import BackendUnavailableError

__all__ = ["ZooKeeperTickets"]

_MOMENT = 0.05
"""Seconds after which the node of a new holder is watched: most locks are released before."""
_PAUSE = 0.1
"""Seconds between two looks for a node whose request was not answered."""
_LAST_REQUESTS = 1.0
"""Seconds that closing waits for what is under way."""
_LOOK = WAITER_TTL / 2
"""Seconds after which the first that waits looks although nothing was heard. A death is heard of."""
_PATIENCE = 1 / 8
"""Part of a ttl after which tickets that have an answer wait for the others no longer: more than half an interval."""
_TRIES = 5
"""Times that a line is looked at while it moves."""
_BUSY = 1000
"""Names that the latest tries found held: the next try looks before it writes."""
_SWEEP_ABOVE = 64
_ENDED = "the ticket ended before its answer was read"

Answers = dict[int, Place | Gone]
"""Answers of a keep, by the position of the ticket in the call."""


@dataclass(eq=False, slots=True)
class OwnTicket:
    """A ticket of this backend object."""

    claim: Claim
    session: ZooKeeperSession
    made: Made
    place: Place
    watched_on: int = 0
    """The connection of the session on which the node is watched; 0: it is not."""
    events: int = 0
    """Number of times that something was heard of the node: an answer that was asked for before says nothing."""

    @property
    def holds(self) -> bool:
        """True if it is known to hold."""
        return self.place.token is not None

    @property
    def life(self) -> float:
        """Seconds for which it lives after a sign of life."""
        return self.claim.ttl if self.holds else min(self.claim.ttl, WAITER_TTL)

    @property
    def data(self) -> bytes:
        """The data of a node that replaces the present one."""
        return written(self.claim.ttl, self.claim.label, self.made.number)


Watch = tuple[ZooKeeperSession, int, str]
"""A session, its connection, and the path of a node or a folder."""


@dataclass(eq=False, slots=True)
class OwnLine:
    """The tickets of this backend object in one line."""

    by_mark: dict[str, OwnTicket] = field(default_factory=dict)
    unwatched: set[OwnTicket] = field(default_factory=set)
    """Tickets that wait, and do not watch for what."""
    watched: dict[Watch, set[OwnTicket]] = field(default_factory=dict)
    """Tickets that wait, by what they watch."""
    shared: bool = False
    """True if one of them is a reader or a permit: its turn stands in the folder's data."""
    looking: BackgroundTask = field(default_factory=BackgroundTask)
    look_again: bool = False

    def of(self, node: LineNode) -> OwnTicket | None:
        """The ticket of a node."""
        own = self.by_mark.get(node.mark)
        return own if own is not None and own.made.node.number == node.number else None


class ZooKeeperTickets:
    """See `fencing_sdk.abc.Backend` for the verbs. They raise what the driver raises."""

    def __init__(self, settings: ZooKeeperSettings) -> None:
        self.recipe = self._recipe = Recipe(settings)
        self.sessions = self._sessions = ZooKeeperSessions(settings, on_resumed=self._resumed, on_ended=self._ended)
        self._lines: dict[str, OwnLine] = {}
        self._bells: dict[str, Bell] = {}  # by owner
        self._busy: dict[str, None] = {}
        self._fresh: list[OwnTicket] = []
        self._timer: asyncio.TimerHandle | None = None
        self._tasks = BackgroundTasks()
        self._sweep_at = _SWEEP_ABOVE

    # The tickets that are known here.

    def _own(self, claim: Claim) -> OwnTicket | None:
        line = self._lines.get(claim.name)
        own = None if line is None else line.by_mark.get(mark_of(claim.owner))
        return own if own is not None and own.session.error is None else None

    def _put(self, claim: Claim, session: ZooKeeperSession, made: Made, lease: float) -> OwnTicket:
        """Enter a ticket that waits, as far as is known. *lease*: what the session for its whole ttl can grant."""
        if len(self._lines) >= self._sweep_at:
            self._sweep()
        line = self._lines.setdefault(claim.name, OwnLine())
        place = Place(None, None, made.number, lease if lease < claim.ttl else None)
        own = line.by_mark[made.node.mark] = OwnTicket(claim, session, made, place)
        line.unwatched.add(own)
        line.shared = line.shared or claim.mode.shared
        return own

    def _drop(self, own: OwnTicket) -> None:
        """Forget a ticket, but not a later one of its owner."""
        own.events += 1
        own.watched_on = 0
        line = self._lines.get(own.claim.name)
        if line is not None and line.by_mark.get(own.made.node.mark) is own:
            del line.by_mark[own.made.node.mark]
            line.unwatched.discard(own)
            if not line.by_mark:
                del self._lines[own.claim.name]

    def _all(self) -> list[OwnTicket]:
        return [own for line in self._lines.values() for own in line.by_mark.values()]

    def _sweep(self) -> None:
        """Forget tickets that died, and were neither kept nor given back since."""
        for own in self._all():
            if own.session.ends.left(own.made.path) is None:
                self._drop(own)
        self._sweep_at = 2 * len(self._lines) + _SWEEP_ABOVE

    # Bells.

    def listen(self, claim: Claim, bell: Bell) -> Callable[[], object]:
        """See `fencing_sdk.abc.Backend.listen`."""
        self._bells[claim.owner] = bell
        return lambda: self._bells.pop(claim.owner, None)

    def _ring(self, own: OwnTicket, news: News = None) -> None:
        if (bell := self._bells.get(own.claim.owner)) is not None:
            bell(news)

    def _watch_soon(self, own: OwnTicket) -> None:
        """Watch the node of a ticket that holds, after a moment, if anybody listens."""
        if own.claim.owner in self._bells:
            self._fresh.append(own)
            if self._timer is None:
                self._timer = asyncio.get_running_loop().call_later(_MOMENT, self._watch_fresh)

    def _watch_fresh(self) -> None:
        fresh, self._fresh, self._timer = self._fresh, [], None
        for own in fresh:
            if self._own(own.claim) is own and own.session.connected and not own.watched_on:
                self._watch_node(own).add_done_callback(partial(self._on_unwatched, own))

    def _on_unwatched(self, own: OwnTicket, answer: asyncio.Future[Any]) -> None:
        if not answer.cancelled() and isinstance(answer.exception(), NoNodeError):
            self._ring(own)  # it has gone meanwhile, or was moved: a keep says which

    def _watch_node(self, own: OwnTicket) -> asyncio.Future[Any]:
        """Watch the node of a ticket."""
        session, path, before = own.session, own.made.path, own.events
        connection = session.connections
        answer = self._recipe.read(session, path, session.watched(self._on_node_changed, own, path))

        def on_watched(answer: asyncio.Future[Any]) -> None:
            there = not answer.cancelled() and answer.exception() is None and answer.result()[1].czxid == own.made.born
            if there and own.events == before and own.made.path == path:
                own.watched_on = connection

        answer.add_done_callback(on_watched)
        return answer

    def _on_node_changed(self, own: OwnTicket, path: str, _: object) -> None:
        """Ask the holder to keep a ticket whose node has changed or gone: it learns what that means."""
        own.events += 1
        own.watched_on = 0
        if own.made.path == path and self._own(own.claim) is own:
            self._ring(own)

    # Draw.

    async def draw(self, claim: Claim, *, only_if_it_holds: bool) -> Place | Busy:
        """See `fencing_sdk.abc.Backend.draw`."""
        if self._own(claim) is not None and (place := await self._kept(claim)) is not None:
            return place
        session = full = self._sessions.of(claim.ttl)
        await full.ready()
        if only_if_it_holds:
            if claim.name in self._busy and await self._has_no_room(full, claim):
                return Busy(_LOOK)
        elif claim.name in self._lines:  # it will most likely wait
            session = self._session_of_waiters(claim.ttl, full)
        made, look = await self._create(claim, session)
        if made is None:
            if (place := await self._kept(claim)) is None:
                raise BackendUnavailableError(BACKEND, "acquire", _ENDED)
            return place
        own = self._put(claim, session, made, full.lease)
        look, newly = await self._settle(session, claim.name, await self._forget_reason(session, claim, look))
        self._ring_for(newly, {own})
        if own.holds:
            if not await self._move(own, full) or not own.session.ends.prolong(own.made.path, claim.ttl):
                raise BackendUnavailableError(BACKEND, "acquire", _ENDED)
            self._watch_soon(own)
        elif only_if_it_holds:
            self._remember_busy(claim.name)
            self._drop(own)
            await self._recipe.remove(session, made.path)
            return Busy(_LOOK)
        else:
            session.ends.limit(made.path, own.life)
            self._session_of_waiters(claim.ttl, session)  # it connects, until the first keep
            await self._watch_line(claim.name, look)
        return own.place

    async def _kept(self, claim: Claim) -> Place | None:
        (kept,) = await self.keep([(claim, 0)])
        return kept if isinstance(kept, Place) else None

    async def _create(self, claim: Claim, session: ZooKeeperSession) -> tuple[Made | None, Look]:
        """Create a node; None if there is one already, of an earlier request, or by another client."""
        try:
            made, look = await self._recipe.draw(session, claim)
        except NodeExistsError:
            return None, Look()
        except BaseException:
            self._tasks.start(self._end_strays(claim, session))
            raise
        before = look.of(made.node.mark)
        if before is None or before.number == made.node.number:
            return made, look
        await self._recipe.remove(session, made.path)
        return None, look

    def _remember_busy(self, name: str) -> None:
        self._busy[name] = None
        if len(self._busy) > _BUSY:
            del self._busy[next(iter(self._busy))]

    async def _has_no_room(self, session: ZooKeeperSession, claim: Claim) -> bool:
        look, mark = await self._recipe.look(session, claim.name), mark_of(claim.owner)
        known = look.of(mark) is not None or (look.record is not None and look.record.reason_for(mark) is not None)
        newcomer = LineNode("", mark, 0, 0, claim.mode)
        if known or newcomer in holding([*look.line, newcomer]):
            self._busy.pop(claim.name, None)
            return False
        return True

    def _session_of_waiters(self, ttl: float, session: ZooKeeperSession) -> ZooKeeperSession:
        """Return the session on which a ticket of *ttl* should wait: *session* as long as there is no better one."""
        if ttl <= WAITER_TTL or session.lease < WAITER_TTL * 1.5:
            return session
        short = self._sessions.of(WAITER_TTL)
        short.attach()
        return short if short.connected else session

    async def _end_strays(self, claim: Claim, session: ZooKeeperSession) -> None:
        """Let a node end that a request without an answer may have left. Until then its owner may draw again."""
        while await session.settled():
            try:
                look = await self._recipe.look(session, claim.name, record=False)
            except NoAuthError:
                return
            except Exception:  # noqa: BLE001  (after any error the node must go)
                await asyncio.sleep(_PAUSE)
                continue
            for node in look.line:
                path = self._recipe.paths.node(claim.name, node)
                if node.mark == mark_of(claim.owner) and is_of(node, session.id) and session.ends.left(path) is None:
                    session.ends.begin(path, claim.ttl)
            return

    async def _forget_reason(self, session: ZooKeeperSession, claim: Claim, look: Look) -> Look:
        """Forget why an earlier ticket of the owner was ended."""
        mark = mark_of(claim.owner)
        for _ in range(_TRIES):
            if look.record is None:
                look = await self._recipe.look(session, claim.name)
            if look.record is None or look.record.reason_for(mark) is None:
                return look
            record = look.record.without_reason(mark)
            if await self._recipe.write(session, claim.name, record, look.version):
                return look._replace(record=record, version=look.version + 1)
            look = await self._recipe.look(session, claim.name)
        return look

    # The turns of those who wait.

    async def _settle(self, session: ZooKeeperSession, name: str, look: Look) -> tuple[Look, list[OwnTicket]]:
        """Write the turns that have come; return the line, and the tickets of this object that hold since."""
        while True:
            line, held = self._lines.get(name), holding(look.line)
            mine = [
                (at, own)
                for at, node in enumerate(held)
                if line is not None and (own := line.of(node)) is not None and not own.holds
            ]
            if line is None or not mine:
                return look, []
            last, shared = mine[-1][0], held[0].mode.shared
            if shared and look.record is None:
                look = await self._recipe.look(session, name)
                continue
            record = look.record
            if shared and record is not None:
                written_record = record.with_turns(held, last + 1, mine[0][1].made.number)
                if written_record != record:
                    if not await self._recipe.write(session, name, written_record, look.version):
                        look = await self._recipe.look(session, name)
                        continue
                    record, look = written_record, look._replace(record=written_record, version=look.version + 1)
            for at, own in mine:
                token, permit = (own.made.number, None) if record is None else record.turn_of(held[at], own.made.number)
                own.place = own.place._replace(token=token, permit=permit, look_after=math.inf)
                line.unwatched.discard(own)
            if held[0].mode.word == "permit" and len(look.line) > last + 1:  # the next one may have room, too
                self._tasks.start(self._touch(mine[-1][1]))
            return look, [own for _, own in mine]

    async def _touch(self, own: OwnTicket) -> None:
        with suppress(Exception):  # who waits behind a permit looks itself now and then
            await own.session.call(SetData(own.made.path, own.data, -1))

    def _ring_for(self, newly: Iterable[OwnTicket], asked: Iterable[OwnTicket]) -> None:
        """Ring for tickets that hold, except those that were *asked* for."""
        for own in newly:
            if own not in asked:
                self._ring(own, own.place)

    async def _watch_line(self, name: str, look: Look) -> None:
        """Watch what the tickets in a line wait for."""
        line = self._lines.get(name)
        if line is None or not line.unwatched:
            return
        places, held = {node.number: at for at, node in enumerate(look.line)}, len(holding(look.line))
        asked: list[tuple[Watch, asyncio.Future[Any]]] = []
        for own in tuple(line.unwatched):
            at, session = places.get(own.made.node.number), own.session
            if at is None or at < held or not session.connected:
                continue
            own.place = own.place._replace(look_after=_LOOK if at == held else math.inf)
            rival = rival_of(look.line, at, held)
            path = self._recipe.paths.folder(name) if rival is FOLDER else self._recipe.paths.node(name, rival)
            key = session, session.connections, path
            line.unwatched.discard(own)
            if (waiting := line.watched.get(key)) is not None:
                waiting.add(own)
                continue
            line.watched[key] = {own}
            call = session.watched(self._on_rival_changed, name, key)
            if rival is FOLDER:
                await self._watch_folder(session, name, look, key, call)
            else:
                asked.append((key, self._recipe.read(session, path, call)))
        for key, answer in asked:
            try:
                await answer
            except NoNodeError:
                self._on_rival_changed(name, key, None)

    async def _watch_folder(
        self, session: ZooKeeperSession, name: str, look: Look, key: Watch, call: Callable[[object], None]
    ) -> None:
        now = await self._recipe.look(session, name, record=False, synced=False, call=call)
        if now.line != look.line:
            self._on_rival_changed(name, key, None)

    def _on_rival_changed(self, name: str, key: Watch, _: object) -> None:
        line = self._lines.get(name)
        if line is not None and (waiting := line.watched.pop(key, None)) is not None:
            line.unwatched.update(
                own for own in waiting if line.by_mark.get(own.made.node.mark) is own and not own.holds
            )
            self._look_soon(key[0], name)

    def _look_soon(self, session: ZooKeeperSession, name: str) -> None:
        """Look at a line, once for all tickets of this object in it."""
        if (line := self._lines.get(name)) is not None and line.unwatched:
            line.look_again = True
            line.looking.start(lambda: self._look(session, name, line))

    async def _look(self, session: ZooKeeperSession, name: str, line: OwnLine) -> None:
        with suppress(Exception):  # the next keep says it
            while line.look_again and self._lines.get(name) is line:
                line.look_again = False
                look = await self._recipe.look(session, name, record=line.shared, synced=False)
                look, newly = await self._settle(session, name, look)
                self._ring_for(newly, ())
                await self._watch_line(name, look)
        for own in tuple(line.unwatched):  # it is not in the line, or on another session
            self._ring(own)

    # Keep.

    async def keep(self, tickets: Sequence[Kept]) -> Sequence[Place | Gone | None]:
        """See `fencing_sdk.abc.Backend.keep`. A session without an answer stops no other one."""
        answers: Answers = {}
        groups: dict[ZooKeeperSession, dict[int, OwnTicket | None]] = {}
        for at, (claim, _) in enumerate(tickets):
            own = self._own(claim)
            session = self._sessions.of(claim.ttl) if own is None else own.session
            groups.setdefault(session, {})[at] = own
        errors = await side_by_side(
            [self._keep(session, tickets, group, answers) for session, group in groups.items()],
            patience=_PATIENCE * min(claim.ttl for claim, _ in tickets) if tickets else 0.0,
            enough=lambda: bool(answers),
        )
        if errors and not answers:
            raise errors[0]
        return [answers.get(at) for at in range(len(tickets))]

    async def _keep(
        self,
        session: ZooKeeperSession,
        tickets: Sequence[Kept],
        group: Mapping[int, OwnTicket | None],
        answers: Answers,
    ) -> None:
        """Keep a *group* of the tickets, by their positions, on one session."""
        await session.ready()
        synced = self._recipe.sync(session)
        known: list[tuple[int, Claim, OwnTicket]] = []
        asked: list[tuple[OwnTicket, asyncio.Future[Any]]] = []
        for at, own in group.items():
            claim, number = tickets[at]
            if own is not None and number in {0, own.made.number} and self._stays(own, claim):
                known.append((at, claim, own))
                if own.watched_on != session.connections:
                    asked.append((own, self._watch_node(own)))
        await synced
        await _all(self._is_there(*each) for each in asked)
        for at, claim, own in known:  # a ticket that was dropped meanwhile is watched no more
            if own.watched_on == session.connections and self._lives_on(own, claim):
                answers[at] = own.place
        rest: dict[str, dict[int, Kept]] = {}
        for at in group:
            if at not in answers:
                rest.setdefault(tickets[at][0].name, {})[at] = tickets[at]
        if rest:
            looks = await self._recipe.look_at_all(session, list(rest))
            lines = zip(rest.items(), looks, strict=True)
            await _all(self._keep_in_line(session, name, look, kept, answers) for (name, kept), look in lines)

    async def _is_there(self, own: OwnTicket, answer: asyncio.Future[Any]) -> None:
        with suppress(NoNodeError):
            if (await answer)[1].czxid != own.made.born:
                self._drop(own)  # deleted and created again, by another

    def _stays(self, own: OwnTicket, claim: Claim) -> bool:
        """Return whether a ticket can be kept without a look at its line."""
        if self._target(own, claim) is not own.session:
            return False
        if own.holds:
            return True
        behind_a_permit = claim.mode.word == "permit" and math.isinf(own.place.look_after)
        return not behind_a_permit and own not in self._lines[claim.name].unwatched

    def _target(self, own: OwnTicket, claim: Claim) -> ZooKeeperSession:
        """Return the session that should keep a ticket alive."""
        if not own.holds:
            return self._session_of_waiters(claim.ttl, own.session)
        return own.session if own.session.lease >= claim.ttl else self._sessions.of(claim.ttl)

    def _lives_on(self, own: OwnTicket, claim: Claim) -> bool:
        """Take a sign of life; False: the driver's thread has given the ticket up."""
        if claim.ttl > own.claim.ttl:
            own.claim = claim
        if own.session.ends.prolong(own.made.path, min(claim.ttl, own.life)):
            return True
        self._drop(own)
        return False

    async def _keep_in_line(
        self, session: ZooKeeperSession, name: str, look: Look, tickets: Mapping[int, Kept], answers: Answers
    ) -> None:
        """Keep tickets of one line, at which *session* has looked: who moves them, and whose turn has come."""
        for _ in range(_TRIES):
            nodes = {node.mark: node for node in reversed(look.line)}
            found = dict(
                zip(tickets, await _all(self._find(session, *kept, nodes) for kept in tickets.values()), strict=True)
            )
            look, newly = await self._settle(session, name, look)
            moved = await _all(
                self._move(own, self._target(own, tickets[at][0])) for at, own in found.items() if own is not None
            )
            if all(moved):
                break
            look = await self._recipe.look(session, name)
        else:
            raise BackendUnavailableError(BACKEND, "renew", "the line changes whenever it is looked at")
        asked = {own for own in found.values() if own is not None}
        self._ring_for(newly, asked)
        await self._watch_line(name, look)
        for at, kept in found.items():
            claim = tickets[at][0]
            if self._own(claim) is kept and kept is not None and self._lives_on(kept, claim):
                answers[at] = kept.place
            else:
                answers[at] = await self._gone(session, claim, look)

    async def _find(
        self, session: ZooKeeperSession, claim: Claim, number: int, nodes: Mapping[str, LineNode]
    ) -> OwnTicket | None:
        """Return the ticket of a claim; one that another client or an earlier request drew is taken over."""
        own, node = self._own(claim), nodes.get(mark_of(claim.owner))
        if own is not None and (node is None or node.name != own.made.node.name):
            self._drop(own)
            own = None
        if own is not None:
            return own if number in {0, own.made.number} else None
        if node is None:
            return None
        path = self._recipe.paths.node(claim.name, node)
        (read,) = await self._recipe.all_facts(session, [path])
        if read is None or number not in {0, read[0].number}:
            return None
        facts, stat = read
        made: Made | None = Made(node, path, facts.number, stat.czxid)
        kept = Claim(claim.name, claim.ttl, claim.owner, facts.label, node.mode)
        if is_of(node, session.id):
            made = made if session.ends.begin(path, min(claim.ttl, WAITER_TTL)) else None
        else:
            data = written(claim.ttl, facts.label, facts.number)
            made = await self._recipe.move(
                session, claim.name, node, node.mark, data=data, ttl=min(claim.ttl, WAITER_TTL)
            )
        return None if made is None else self._put(kept, session, made, self._sessions.of(claim.ttl).lease or math.inf)

    async def _move(self, own: OwnTicket, session: ZooKeeperSession) -> bool:
        """Let *session* keep a ticket alive; False: its node has gone."""
        if session is own.session or self._own(own.claim) is not own:
            return True
        await session.ready()
        before, node = own.session, own.made
        made = await self._recipe.move(session, own.claim.name, node.node, node.node.mark, data=own.data, ttl=own.life)
        if made is None:
            return False
        before.ends.drop(node.path)
        own.session, own.made, own.watched_on, own.events = session, made, 0, own.events + 1
        if own.holds:
            own.place = own.place._replace(ttl=session.lease if session.lease < own.claim.ttl else None)
        elif (line := self._lines.get(own.claim.name)) is not None:
            line.unwatched.add(own)
        return True

    async def _gone(self, session: ZooKeeperSession, claim: Claim, look: Look) -> Gone:
        if look.record is None:
            look = await self._recipe.look(session, claim.name)
        reason = None if look.record is None else look.record.reason_for(mark_of(claim.owner))
        return Gone(reason, bool(look.line) and not look.line[0].mode.shared)

    # Give back, and what operators do.

    async def give_back(self, claim: Claim, *, after: float) -> Gone | None:
        """See `fencing_sdk.abc.Backend.give_back`."""
        own = self._own(claim)
        session = self._sessions.of(claim.ttl) if own is None else own.session
        if own is not None:
            self._drop(own)
        await session.ready()
        if own is not None and after <= 0 and await self._recipe.remove(session, own.made.path):
            return None
        for _ in range(_TRIES):
            look = await self._recipe.look(session, claim.name)
            node, parked = look.of(mark_of(claim.owner)), look.of(parked_mark_of(claim.owner))
            if node is None:
                return await self._gone(session, claim, look) if parked is None else None
            if after > 0 and parked is None and node in holding(look.line):
                gone = not await self._park(session, claim, node, after)
            else:
                gone = not await self._recipe.remove(session, self._recipe.paths.node(claim.name, node))
            if not gone:
                return None
        raise BackendUnavailableError(BACKEND, "release", "the ticket moves whenever it is looked at")

    async def _park(self, session: ZooKeeperSession, claim: Claim, node: LineNode, after: float) -> bool:
        """Put a node at the place of *node* that no keep reaches; False: that has gone."""
        path = self._recipe.paths.node(claim.name, node)
        (read,) = await self._recipe.all_facts(session, [path])
        if read is None:
            return False
        if session.lease < after:
            session = self._sessions.of(2.0 ** math.ceil(math.log2(after)))  # else each would have one of its own
            await session.ready()
        facts, mark = read[0], parked_mark_of(claim.owner)
        data = written(after, facts.label, facts.number)
        made = await self._recipe.move(session, claim.name, node, mark, data=data, ttl=after)
        if made is not None:
            parked = self._put(Claim(claim.name, after, f"-{claim.owner}", None, node.mode), session, made, math.inf)
            parked.place = parked.place._replace(token=facts.number)
            self._lines[claim.name].unwatched.discard(parked)
        return made is not None

    async def end(self, name: str, token: int, reason: str) -> bool:
        """
        See `fencing_sdk.abc.Backend.end`.

        One transaction deletes the nodes, by their paths, and writes the reason. A path is that of one ticket, so a
        successor is never hit, and the version of the folder's data lets no two operators write at the same time.
        """
        session = await self._any_session()
        for _ in range(_TRIES):
            look = await self._recipe.look(session, name)
            held = holding(look.line)
            read = await self._recipe.all_facts(session, [self._recipe.paths.node(name, node) for node in held])
            facts = [each[0] for each in read if each is not None]
            if len(facts) < len(held) or look.record is None:
                continue
            record = look.record.with_turns(held, len(held), facts[0].number) if held else look.record
            over = [
                node for node, each in zip(held, facts, strict=True) if record.turn_of(node, each.number)[0] == token
            ]
            if not over:
                return False
            record = record.with_end(reason, [node.mark for node in over])
            if await self._recipe.write(session, name, record, look.version, over):
                return True
        raise BackendUnavailableError(BACKEND, "revoke", "the lock changes whenever it is looked at")

    async def seen(self, names: Sequence[str]) -> Sequence[Sequence[Seen]]:
        """See `fencing_sdk.abc.Backend.tickets`. How long the tickets of other clients have lived is not known."""
        session = await self._any_session()
        looks = await self._recipe.look_at_all(session, names)
        left = {own.made.path: own.session.ends.left(own.made.path) for own in self._all()}
        found: list[list[Seen]] = []
        for name, look in zip(names, looks, strict=True):
            paths = [self._recipe.paths.node(name, node) for node in look.line]
            held, seen = len(holding(look.line)), list[Seen]()
            for at, (node, path, read) in enumerate(
                zip(look.line, paths, await self._recipe.all_facts(session, paths), strict=True)
            ):
                if read is None or look.record is None:
                    continue
                facts, stat = read
                token, permit = look.record.turn_of(node, facts.number) if at < held else (None, None)
                remaining = left.get(path)
                if remaining is None:
                    remaining = facts.ttl if token is not None else min(facts.ttl, WAITER_TTL)
                since = None if token is not None else max(0.0, wall_seconds() - stat.ctime / 1000)
                seen.append(Seen(node.holder, node.mode, token, permit, remaining, since, facts.label))
            found.append(seen)
        return found

    async def _any_session(self) -> ZooKeeperSession:
        session = self._sessions.any()
        await session.ready()
        return session

    # What becomes of sessions.

    def _resumed(self, session: ZooKeeperSession) -> None:
        """Look at every ticket again: *session* has another connection, and its watches ended with the last one."""
        for name, line in list(self._lines.items()):
            line.watched = {key: waiting for key, waiting in line.watched.items() if key[0] is not session}
            waiting = [own for own in line.by_mark.values() if own.session is session and not own.holds]
            line.unwatched.update(waiting)
            if waiting:
                self._look_soon(session, name)
        for own in self._all():
            if own.session is session and own.holds:
                self._ring(own)

    def _ended(self, session: ZooKeeperSession) -> None:
        """Drop every ticket of *session*: the server has given it up, and deleted their nodes."""
        for own in self._all():
            if own.session is session:
                self._drop(own)
                self._ring(own)

    def forget(self) -> None:
        """Forget everything: this process is a fork, and all of it is its parent's."""
        self._lines.clear()
        self._bells.clear()
        self._fresh.clear()
        self._timer = None
        self._tasks.forget()

    async def aclose(self) -> None:
        """Stop, and close the sessions, except of those with tickets that hold: they last until their timeout."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._fresh.clear()
        for line in list(self._lines.values()):
            await line.looking.aclose()
        await self._tasks.aclose(patience=_LAST_REQUESTS)
        self._sweep()
        kept = {own.session for own in self._all() if own.holds}
        for own in self._all():
            if own.session not in kept:
                self._drop(own)
        await self._sessions.aclose(keep=kept)


async def _all(works: Iterable[Coroutine[Any, Any, Any]]) -> list[Any]:
    """Do all, side by side if there are several, and return what they return."""
    listed = list(works)
    if len(listed) == 1:
        return [await listed[0]]
    return list(await asyncio.gather(*listed))
