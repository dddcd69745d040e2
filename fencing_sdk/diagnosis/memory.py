"""What breaks a promise of locks in memory."""

from __future__ import annotations

from collections.abc import Sequence

from fencing_sdk._values.reports import Finding, warning
from fencing_sdk.backends.memory import MemoryBackend
from fencing_sdk.diagnosis.checks import StoreDiagnosis

_REPEATING = warning(
    "memory.tokens",
    "tokens is counter",
    "after a restart of the process tokens repeat, so that a resource outside of it accepts a stale writer",
    "leave tokens out, or use a store with a memory of its own",
)


class MemoryDiagnosis(StoreDiagnosis[MemoryBackend]):
    """The one check of a table in memory."""

    async def diagnose(self, ttl: float) -> Sequence[Finding]:  # noqa: ARG002  (no setting depends on it)
        """See `fencing_sdk.abc.SupportsDiagnosis.diagnose`."""
        return () if self.backend._hybrid else (_REPEATING,)
