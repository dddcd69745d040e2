"""
What goes on behind the calls: ends of grants, nodes that must go, and losses that the holder must hear of.

The session of a living process never ends, so that whatever is left in a line would stay there.
Everything of ours therefore has an end: a grant that is not renewed is removed when its ttl is over,
and a node of which nobody knows whether it exists is looked for and removed one ttl later.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from contextlib import suppress
from contextvars import Context
from functools import partial
from typing import Any

from fencing_sdk._values.claim import Claim
from fencing_sdk.abc import LossNotice
from fencing_sdk.backends.zookeeper._nodes import is_of, mark_of
from fencing_sdk.backends.zookeeper._recipe import Recipe
from fencing_sdk.backends.zookeeper._requests import NoNodeError, get, is_deletion
from fencing_sdk.backends.zookeeper._session import Session
from fencing_sdk.backends.zookeeper._stakes import Stake, Stakes, key_of
from fencing_sdk.errors import LossReason

__all__ = ["Upkeep"]

_SETTLING = 0.05
"""Seconds after which a grant is watched. Most are given back before."""
_PAUSE = 0.1
"""Seconds between the tries to remove a node."""
_LAST_ERRANDS = 1.0
"""Seconds that leaving a line, or closing, waits for nodes to be removed."""


class Upkeep:
    """The tasks and timers of one backend."""

    def __init__(self, recipe: Recipe, stakes: Stakes) -> None:
        self._recipe = recipe
        self._stakes = stakes
        self._notices: dict[LossNotice, None] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._timers: set[asyncio.TimerHandle] = set()

    # Ends

    def granted(self, stake: Stake) -> None:
        """Count the ttl of a grant from now on, and watch over it."""
        fresh = stake.ends_at is None
        stake.renew()
        if stake.timer is None:
            stake.timer = self._loop().call_later(stake.claim.ttl, self._check_end, stake)
        if fresh:
            self._loop().call_later(_SETTLING, self._arm, stake)

    def _check_end(self, stake: Stake) -> None:
        stake.timer = None
        if stake.over:
            return
        if stake.left > 0:  # it was renewed meanwhile
            stake.timer = self._loop().call_later(stake.left, self._check_end, stake)
        else:
            self.discard(stake)

    async def leave(self, stake: Stake) -> None:
        """Discard a place, and wait a moment for it: whoever comes next should not stand behind it."""
        await asyncio.wait((self.discard(stake),), timeout=_LAST_ERRANDS)

    async def leave_unknown(self, claim: Claim, session: Session) -> None:
        """The same where nobody knows whether there is a place."""
        await asyncio.wait((self.sweep(claim, session),), timeout=_LAST_ERRANDS)

    def discard(self, stake: Stake) -> asyncio.Task[None]:
        """Remove the node of *stake*, however long that takes; it counts no more from now on."""
        stake.finish()
        return self._start(self._discard(stake))

    async def _discard(self, stake: Stake) -> None:
        while await stake.session.settled() and self._stakes.get(key_of(stake.claim)) is stake:
            try:
                await self._recipe.remove(stake.session, stake.path)
            except Exception:  # noqa: BLE001  (whatever it was, the node must go)
                await asyncio.sleep(_PAUSE * random.uniform(0.5, 1.0))
            else:
                break
        self._stakes.drop(stake)

    def sweep_later(self, claim: Claim, session: Session) -> None:
        """
        One ttl from now, remove what an unanswered request may have left in the line.

        Not earlier: until then the same owner may come back and want to find it.
        """
        self._timers = {timer for timer in self._timers if timer.when() > self._loop().time()}
        self._timers.add(self._loop().call_later(claim.ttl, self.sweep, claim, session))

    def sweep(self, claim: Claim, session: Session) -> asyncio.Task[None]:
        """Remove every node of *claim* that is not known to be its grant or its place."""
        return self._start(self._sweep(claim, session))

    async def _sweep(self, claim: Claim, session: Session) -> None:
        while await session.settled():
            try:
                async with self._stakes.turn(key_of(claim)):
                    await self._sweep_once(claim, session)
            except Exception:  # noqa: BLE001  (whatever it was, the nodes must go)
                await asyncio.sleep(_PAUSE * random.uniform(0.5, 1.0))
            else:
                return

    async def _sweep_once(self, claim: Claim, session: Session) -> None:
        stake = self._stakes.get(key_of(claim))
        kept = stake.path if stake is not None and not stake.over else None
        for node in await self._recipe.look(session, claim.name):
            path = self._recipe.paths.node(claim.name, node)
            if node.mark == mark_of(claim.owner) and is_of(node, session.id) and path != kept:
                await self._recipe.remove(session, path)

    # Losses

    def on_loss(self, notice: LossNotice) -> Callable[[], None]:
        """See `fencing_sdk.abc.SupportsLossNotice.on_loss`."""
        self._notices[notice] = None
        return lambda: self._notices.pop(notice, None)

    def _arm(self, stake: Stake) -> None:
        """Watch the node of a grant."""
        if stake.over or not stake.session.connected:
            return
        asked = stake.session.call(get(stake.path, stake.session.watched(self._changed, stake)))
        asked.add_done_callback(partial(self._armed, stake, stake.session.connections))

    def _armed(self, stake: Stake, connection: int, answer: asyncio.Future[Any]) -> None:
        if answer.cancelled() or stake.over:
            return
        if isinstance(answer.exception(), NoNodeError):
            self._start(self._look(stake))
        elif answer.exception() is None and answer.result()[1].czxid == stake.born:
            stake.watched_on = connection

    def _changed(self, stake: Stake, event: object) -> None:
        stake.watched_on = 0
        if not stake.over and is_deletion(event):
            self._start(self._look(stake))
        else:  # changed, but there; or the connection broke, and `resumed` looks again
            self._arm(stake)

    async def _look(self, stake: Stake) -> None:
        """Tell the holder that its node has gone, unless another client has taken care of it for the same owner."""
        with suppress(Exception):  # no answer is no proof; the heartbeat goes on asking
            line = await self._recipe.look(stake.session, stake.claim.name)
            moved = bool(line) and line[0].mark == mark_of(stake.claim.owner)
            if moved and is_of(line[0], stake.session.id):
                self._arm(stake)  # it is still there, or there again: the next renewal compares who created it
            elif not stake.over:
                self._stakes.drop(stake)
                if not moved:
                    self._tell(stake, LossReason.REVOKED)

    def _tell(self, stake: Stake, reason: LossReason) -> None:
        for notice in tuple(self._notices):
            notice(stake.claim, reason)

    def resumed(self, session: Session) -> None:
        """Watches end with their connection: look at everything again."""
        for stake in self._stakes.of(session):
            if stake.over:
                self._start(self._discard(stake))
            elif stake.ends_at is None:
                stake.woken.set()
            else:
                if stake.timer is not None:  # perhaps of a loop that is no more
                    stake.timer.cancel()
                stake.timer = self._loop().call_later(max(0.0, stake.left), self._check_end, stake)
                self._arm(stake)

    def ended(self, session: Session) -> None:
        """The server has given up the session, and removed what was its own."""
        for stake in self._stakes.of(session):
            lost = stake.held
            self._stakes.drop(stake)
            stake.woken.set()
            if lost:
                self._tell(stake, LossReason.REFUSED)

    # Tasks

    def _loop(self) -> asyncio.AbstractEventLoop:
        return asyncio.get_running_loop()

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        try:
            task = self._loop().create_task(work, context=Context())
        except RuntimeError:  # a task of a closed loop is garbage-collected
            work.close()
            raise
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def forget(self) -> None:
        """This process is a fork: the tasks and timers are its parent's."""
        self._tasks.clear()
        self._timers.clear()

    async def aclose(self) -> None:
        """Stop; nodes that are being removed get a moment for that."""
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()
        for stake in self._stakes.all():
            if stake.timer is not None:
                stake.timer.cancel()
                stake.timer = None
        tasks = [task for task in self._tasks if task.get_loop() is self._loop()]
        self._tasks.clear()
        if tasks:
            await asyncio.wait(tasks, timeout=_LAST_ERRANDS)
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
