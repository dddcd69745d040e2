"""What goes wrong in a history: each kind of fault of a script, done to the stage and told in the recording."""

from __future__ import annotations

from collections.abc import Callable

from fencing_sdk._values.claim import Holder
from fencing_sdk.testing import _kernel
from tests.simulation.script import Fault
from tests.simulation.stage import Actor, Stage

STORE = "locks"


class Mishaps:
    """Does the faults of a script at their moments, and undoes them all when they are over."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._outages = {"down": 0, "refuse": 0}
        self._healed = False
        for fault in stage.script.faults:
            if fault.kind != "cancel":
                stage.timeline.at(fault.at, self._strike, fault)

    def _strike(self, fault: Fault) -> None:
        do: Callable[[Fault], None] = getattr(self, f"_do_{fault.kind}")
        do(fault)

    def heal(self) -> None:
        """End all faults: links work, the store is up, every process that did not crash runs."""
        stage = self._stage
        self._healed = True
        stage.kernel.network.heal()
        stage.service.silent = stage.service.refusing = False
        for actor in stage.actors:
            actor.stall = None
            if not actor.crashed:
                self._resume(actor)

    def _trouble(self, what: str, fault: Fault, *, who: str = "", lasts: float = 0.0) -> None:
        until = self._stage.now + lasts
        self._stage.recording.record("trouble", STORE, what=what, fault=fault.kind, who=who, until=until)

    def _after(self, seconds: float, call: Callable[..., None], *args: object) -> None:
        self._stage.timeline.at(self._stage.now + seconds, call, *args)

    def _actor(self, fault: Fault) -> Actor:
        return self._stage.actors[fault.who]

    # Processes.

    def _do_freeze(self, fault: Fault) -> None:
        self._freeze(self._actor(fault), fault, suspend=False)

    def _do_suspend(self, fault: Fault) -> None:
        self._freeze(self._actor(fault), fault, suspend=True)

    def _freeze(self, actor: Actor, fault: Fault, *, suspend: bool) -> None:
        if actor.crashed:
            return
        actor.frozen_until = max(actor.frozen_until, self._stage.now + fault.lasts)
        self._stage.recording.record("frozen", actor.name)
        actor.process.pause(suspend=suspend)
        self._after(fault.lasts, self._thaw, actor)

    def _thaw(self, actor: Actor) -> None:
        if not actor.crashed and self._stage.now >= actor.frozen_until - 1e-9:
            self._resume(actor)

    def _resume(self, actor: Actor) -> None:
        if actor.process.paused:
            self._stage.recording.record("resumed", actor.name)
            actor.process.resume()

    def _do_crash(self, fault: Fault) -> None:
        actor = self._actor(fault)
        if sum(not other.crashed for other in self._stage.actors) > 1 and not actor.crashed:
            actor.crashed = True
            self._stage.recording.record("frozen", actor.name, crashed=True)
            actor.process.pause()

    def _do_stall(self, fault: Fault) -> None:
        self._actor(fault).stall = fault.lasts

    def _do_drain(self, fault: Fault) -> None:
        actor = self._actor(fault)
        if not actor.crashed:
            actor.process.spawn(_drain(actor, fault.lasts))

    # Messages.

    def _do_lose(self, fault: Fault) -> None:
        self._hit(fault, "lost", _kernel.LinkFault(fault.operation, fault.way, lose=True, times=fault.times))

    def _do_late(self, fault: Fault) -> None:
        late = _kernel.LinkFault(fault.operation, fault.way, delay=fault.lasts, times=fault.times)
        self._hit(fault, "late", late, lasts=fault.lasts)

    def _do_double(self, fault: Fault) -> None:
        again = _kernel.LinkFault(fault.operation, fault.way, again=fault.lasts, times=fault.times)
        self._hit(fault, "doubled", again)

    def _hit(self, fault: Fault, what: str, how: _kernel.LinkFault, *, lasts: float = 0.0) -> None:
        actor = self._actor(fault)
        how.struck = lambda: self._trouble(what, fault, who=actor.name, lasts=lasts)
        actor.link.add(how)

    def _do_cut(self, fault: Fault) -> None:
        actor = self._actor(fault)
        cut = _kernel.LinkFault(None, fault.way, lose=True)
        actor.link.add(cut)
        self._trouble("cut", fault, who=actor.name, lasts=fault.lasts)
        self._after(fault.lasts, actor.link.lift, cut)

    # The store.

    def _do_down(self, fault: Fault) -> None:
        self._down(fault, "down", "outage")

    def _do_refuse(self, fault: Fault) -> None:
        self._down(fault, "refuse", "refused")

    def _down(self, fault: Fault, how: str, what: str) -> None:
        self._count(how, 1)
        self._trouble(what, fault, lasts=fault.lasts)
        self._after(fault.lasts, self._count, how, -1)

    def _count(self, how: str, one: int) -> None:
        """Outages of one kind may overlap."""
        self._outages[how] += one
        if not self._healed:
            service = self._stage.service
            service.silent, service.refusing = self._outages["down"] > 0, self._outages["refuse"] > 0

    def _do_restart(self, fault: Fault) -> None:
        self._stage.service.hang_up()
        self._do_refuse(fault)

    def _do_forget_grants(self, fault: Fault) -> None:
        self._forget(fault, tokens=False)

    def _do_forget_all(self, fault: Fault) -> None:
        self._forget(fault, tokens=True)

    def _forget(self, fault: Fault, *, tokens: bool) -> None:
        self._trouble("forgot", fault)
        self._do_restart(fault)
        self._stage.service.forget(tokens=tokens)

    def _do_revoke(self, fault: Fault) -> None:
        """An operator looks at a lock, and then takes it away by the token that was there."""
        seen = self._stage.service.holders(str(fault.operation))
        if seen:
            self._after(fault.lasts, self._revoke, seen[0], fault)

    def _revoke(self, seen: Holder, fault: Fault) -> None:
        if self._stage.service.revoke(seen.name, seen.token):
            self._trouble("revoked", fault)

    def _do_step(self, fault: Fault) -> None:
        self._trouble("stepped", fault)
        self._stage.service.stepped += fault.lasts

    def _do_step_tokens(self, fault: Fault) -> None:
        self._stage.service.wall_stepped += fault.lasts

    def _do_step_client(self, fault: Fault) -> None:
        self._actor(fault).clock.stepped += fault.lasts


async def _drain(actor: Actor, within: float) -> None:
    await actor.locks.drain(within=within)
