"""The part of a client that diagnoses its store."""

from __future__ import annotations

from abc import ABC
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fencing_sdk._values.timing import DEFAULT_TTL, Seconds, check_ttl, seconds
from fencing_sdk.abc import Backend, Guard
from fencing_sdk.errors import ConfigurationError, shown

if TYPE_CHECKING:
    from fencing_sdk.diagnosis import Diagnosis

_DEFAULT_OVER = 5.0
_LONGEST = 3600.0


class DiagnosableClient(ABC):
    """What `LockClient` inherits: it brings the backend."""

    _backend: Backend
    _namespace: str
    _drift: float

    async def diagnose(
        self,
        *,
        over: Seconds = _DEFAULT_OVER,
        ttl: Seconds = DEFAULT_TTL,
        other: DiagnosableClient | None = None,
        guards: Sequence[Guard] = (),
    ) -> Diagnosis:
        """
        Tell what this process and this store can promise, and what to change: ``fencing doctor`` as a function.

        A scratch lock is taken, handed on and given back, and renewed ten times a second. No event is told. The
        store may be down, slow or read-only: that is a finding. The client need not be open; one that was not should be
        closed afterwards.

        Args:
            over: Seconds for which pauses and renewals are measured, at most an hour. The store's settings and the
                self-test take a second or so more, five where the store's messages do not arrive, and at most a minute
                if the store does not answer.

            ttl: Seconds of the locks in use, by which the measurements are judged.

            other: A second client of the same store, to which the self-test hands the lock on. Without it, two owners
                on one connection do, and notices of a loss are not tested.

            guards: Guards that the self-test raises. Each keeps one fence, of the scratch resource.

        Returns:
            The findings, the worst first, the measurements, and advice that fits them.

        Raises:
            ConfigurationError: an argument cannot work.
        """
        from fencing_sdk.diagnosis import examine  # noqa: PLC0415  (few programs call it, and every one starts)

        return await examine(
            self._backend,
            other=_backend_of(other),
            guards=_checked(guards),
            namespace=self._namespace,
            over=seconds(over, "over", high=_LONGEST),
            ttl=check_ttl(ttl),
            drift=self._drift,
        )


def _backend_of(other: object) -> Backend | None:
    if other is None:
        return None
    if not isinstance(other, DiagnosableClient):
        msg = f"other must be a second client of the same store, not {shown(other)}"
        raise ConfigurationError(msg)
    return other._backend  # noqa: SLF001  (of the same class)


def _checked(guards: object) -> Sequence[Guard]:
    if not isinstance(guards, Sequence) or not all(isinstance(guard, Guard) for guard in guards):
        msg = f"guards must be a list of guards, not {shown(guards)}"
        raise ConfigurationError(msg)
    return guards
