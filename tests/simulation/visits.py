"""What clients do under their locks: the code of users, good and bad, with the real locks around it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence

from fencing_sdk._arguments import LockOptions
from fencing_sdk._lease import Lease, state_of
from fencing_sdk._lock import Lock
from fencing_sdk._values.token import Token
from fencing_sdk.errors import DrainingError, FencingError, LeaseLostError, StaleTokenError
from tests.simulation.script import PERMITS, Visit
from tests.simulation.stage import Actor, Resource, Stage

_ANSWER_LIMIT = 0.7
"""Seconds for which a body waits until its write is confirmed."""
_HOLD = 0.6
"""Part of a ttl after which a body that hangs has to lose its lease, by ``max_hold``."""


class BodyError(Exception):
    """An error of the user's own."""


class Visitor:
    """One visit: an acquisition, a body, and what leaves it."""

    def __init__(self, stage: Stage, actor: Actor, visit: Visit) -> None:
        self.stage = stage
        self.actor = actor
        self.visit = visit
        self.cancelled = False
        """Whether the task was cancelled from outside during the visit."""

    async def run(self) -> None:
        """Visit, and return after every expected error."""
        try:
            if self.visit.body == "handle":
                await self._with_handle()
            else:
                await self._with_scope()
        except (FencingError, BodyError, asyncio.CancelledError, ExceptionGroup):
            pass

    async def _with_scope(self) -> None:
        stage, visit = self.stage, self.visit
        max_hold = stage.script.ttl * _HOLD if visit.body == "hang" else None
        stage.max_holds[asyncio.current_task()] = max_hold
        fences = [stage.resources[visit.name]] if visit.fenced else []
        entered: Lease | None = None
        error: BaseException | None = None
        try:
            async with self._block(fences, max_hold) as lease:
                entered = lease
                self._record_lease("entered", lease, fences=[lease.resource] * len(fences))
                await self._body(lease, stage.resources[visit.name].of(lease))
        except BaseException as left:
            error = left
            raise
        finally:
            if entered is not None:
                kind = None if error is None else type(error).__name__
                noted = any("fencing_sdk" in note for note in getattr(error, "__notes__", ()))
                self._record_lease("left", entered, error=kind, noted=noted, outer=self.cancelled)

    @contextlib.asynccontextmanager
    async def _block(self, fences: Sequence[Resource], max_hold: float | None) -> AsyncIterator[Lease]:
        """Hold the lock of the visit, or lead for one term and tell as an error how that ended."""
        visit, script = self.visit, self.stage.script
        if visit.mode != "term":
            async with self._lock(fences=fences, max_hold=max_hold) as lease:
                yield lease
            return
        election = self.actor.locks.election(
            visit.name, ttl=script.ttl, safety_buffer=script.safety_buffer, fences=fences, max_hold=max_hold
        )
        async for term in election:
            cancelled = False
            async with term as lease:
                try:
                    yield lease
                except asyncio.CancelledError:
                    cancelled = True
                    raise
            if cancelled or lease.lost_reason is not None:  # where a lock raises, a term ends in silence
                raise state_of(lease).loss()
            return
        raise DrainingError(visit.name, 0.0)

    async def _body(self, lease: Lease, resource: Resource) -> None:
        how = "clean"
        try:
            await self._work(lease, resource)
        except asyncio.CancelledError:
            how = "cancelled"
            raise
        except BaseException as error:
            how = type(error).__name__
            raise
        finally:
            self._record_lease("body_ended", lease, how=how)

    async def _work(self, lease: Lease, resource: Resource) -> None:
        body, lasts = self.visit.body, self._lasts()
        if body in {"sleep", "raise"}:
            await asyncio.sleep(lasts)
            if body == "raise":
                raise BodyError
        elif body == "stubborn":
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(lasts)
            await asyncio.sleep(0)
        elif body == "zombie":
            self.actor.process.spawn(self._write_late(self._read(lease), resource))
            await asyncio.sleep(lasts)
        elif body == "hang":
            await asyncio.sleep(3600.0)
        else:
            await self._write_on(lease, resource, lasts)

    async def _with_handle(self) -> None:
        """Use the plain handle, which cancels no task: only the token protects."""
        lease = await self._lock().acquire()
        try:
            await self._write_on(lease, self.stage.resources[self.visit.name].of(lease), self._lasts())
            if lease.held:
                await lease.renew()
        finally:
            await lease.release()

    def _lock(self, fences: Sequence[Resource] = (), max_hold: float | None = None) -> Lock:
        script, visit, locks = self.stage.script, self.visit, self.actor.locks
        options: LockOptions = {
            "ttl": script.ttl,
            "wait": visit.wait,
            "safety_buffer": script.safety_buffer,
            "fences": fences,
            "max_hold": max_hold,
        }
        if visit.mode == "permit":
            return locks.semaphore(visit.name, permits=PERMITS, **options)
        if visit.mode == "lock":
            return locks.lock(visit.name, **options)
        shared = locks.rwlock(visit.name, **options)
        return shared.reader if visit.mode == "reader" else shared.writer

    def _lasts(self) -> float:
        """How long to work; hardly any more once nothing is left to go wrong."""
        return min(self.visit.lasts, max(0.0, self.stage.script.horizon + 0.5 - self.stage.now))

    async def _write_on(self, lease: Lease, resource: Resource, lasts: float) -> None:
        end = self.stage.now + lasts
        while True:
            token = self._read(lease)
            self._maybe_stall()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_ANSWER_LIMIT):
                    await resource.write(token, self.stage.now)
            if self.stage.now >= end:
                return
            await asyncio.sleep(min(0.15, end - self.stage.now))

    def _read(self, lease: Lease) -> Token:
        token = lease.token
        self._record("read", resource=lease.resource, name=lease.name, token=int(token), holder=lease.holder)
        return token

    def _maybe_stall(self) -> None:
        """Stand still in the middle of a line, as in a garbage collection: after the token, before the write."""
        if (seconds := self.actor.stall) is not None:
            self.actor.stall = None
            since = self.stage.now
            self.stage.kernel.sleep(seconds)  # longer than asked for if another client stalls meanwhile
            self._record("trouble", what="stalled", who=self.actor.name, since=since, until=self.stage.now)

    async def _write_late(self, token: Token, resource: Resource) -> None:
        """Write with a token that was kept, as a thread or a queue does that was not cancelled."""
        await asyncio.sleep(self.stage.script.ttl * 1.2)
        with contextlib.suppress(TimeoutError, StaleTokenError, LeaseLostError):
            async with asyncio.timeout(_ANSWER_LIMIT):
                await resource.write(token, self.stage.now)

    def _record(self, kind: str, **fields: object) -> None:
        self.stage.recording.record(kind, self.actor.name, **fields)

    def _record_lease(self, kind: str, lease: Lease, **fields: object) -> None:
        self._record(kind, name=lease.name, token=state_of(lease).number, holder=lease.holder, **fields)
