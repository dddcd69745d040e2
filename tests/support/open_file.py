"""One open file of the SQLite backend with a call for each rule, as its thread makes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from fencing_sdk._values.clock import Clock
from fencing_sdk.abc import Busy, Claim, Grant, Holder, Renewal, Revoked
from fencing_sdk.backends._shared import rules
from fencing_sdk.backends._shared.row_backend import WaiterAddress
from fencing_sdk.backends._shared.rules import Rows, TokenSource
from fencing_sdk.backends.sqlite.file import LockFile
from fencing_sdk.backends.sqlite.rows import OpenFile
from fencing_sdk.backends.sqlite.waiter_signs import SignsOfLife

T = TypeVar("T")


class RulesOnFile(OpenFile):
    """The file at *path*, as seen from one boot and one network namespace."""

    def __init__(
        self,
        path: Path,
        clock: Clock,
        next_token: TokenSource,
        *,
        synchronous: str = "normal",
        boot: str = "boot",
        network: str = "network",
    ) -> None:
        file = LockFile(path, synchronous=synchronous, clock=clock)
        super().__init__(file, SignsOfLife(path), next_token, boot, network)

    def acquire(self, claim: Claim, *, waiting: bool = False) -> Grant | Busy:
        held = self.look(claim.name, partial(rules.refusal, claim=claim)) if waiting else None
        return held or self.run([(claim.name, partial(rules.acquire, claim=claim))], durable=True)[0]

    def renew(self, claims: Sequence[Claim]) -> list[Renewal | Revoked]:
        steps = [(claim.name, partial(rules.renew, claim=claim)) for claim in claims]
        return self.run(steps)

    def release(self, claim: Claim) -> Renewal | Revoked | None:
        return self._step(claim.name, lambda rows: rules.release(rows, claim))

    def inspect(self, name: str) -> Holder | None:
        return next(iter(self._step(name, lambda rows: rules.holders(rows, name))), None)

    def join(self, claim: Claim, address: WaiterAddress) -> None:
        self._step(claim.name, lambda rows: rules.join(rows, claim, address))

    def leave(self, claim: Claim) -> None:
        self._step(claim.name, lambda rows: rules.leave(rows, claim.owner))

    def _step(self, name: str, rule: Callable[[Rows], T]) -> T:
        (answer,) = self.run([(name, rule)])
        return answer
