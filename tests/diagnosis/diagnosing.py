"""Diagnoses with two clients, as users do."""

from contextlib import AsyncExitStack

from fencing_sdk import connect
from fencing_sdk.diagnosis import Diagnosis, Finding, Severity

MACHINE = ("machine.", "store.latency")
"""Findings about the machine that runs the tests, which may be busy."""

WARNING, ERROR = Severity.WARNING, Severity.ERROR


async def diagnosed(url: str, *, over: float = 0.3, ttl: float = 15.0, **options: object) -> Diagnosis:
    async with AsyncExitStack() as stack:
        clients = [connect(url, **options) for _ in range(2)]
        for client in clients:
            stack.push_async_callback(client._backend.aclose)
        return await clients[0].diagnose(over=over, ttl=ttl, other=clients[1])


async def found(url: str, **options: object) -> dict[str, Finding]:
    """The findings by their checks, without those about a busy machine."""
    return by_check(await diagnosed(url, **options))


def by_check(diagnosis: Diagnosis) -> dict[str, Finding]:
    return {finding.check: finding for finding in diagnosis.findings if not finding.check.startswith(MACHINE)}
