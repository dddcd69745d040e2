"""What each node of a Kahuna cluster reports of itself, and what of that breaks a promise."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from yarl import URL

from fencing_sdk._http.endpoints import Endpoint
from fencing_sdk._http.outcomes import RequestFailedError
from fencing_sdk._values.reports import Finding, error, warning
from fencing_sdk.backends.kahuna import KahunaBackend
from fencing_sdk.backends.kahuna.options import HEALTH, PLACEMENT, warnings_of
from fencing_sdk.diagnosis.checks import (
    FEWEST,
    ONE_DOWN,
    WARNING,
    Check,
    StoreDiagnosis,
    host_down,
    is_exposed,
    judged,
    unencrypted,
)

_LIMIT = 5.0

AskNode = Callable[[URL], Awaitable[dict[str, object]]]


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """One node: its report on its health and its partitions, or why there is no report."""

    origin: str
    report: dict[str, object]
    failure: str = ""


# A row reads: the check, how severe, when; what, why; what to do.
# fmt: off
CHECKS: tuple[Check[NodeFacts], ...] = (
    Check("kahuna.ready", WARNING, lambda it: it.report.get("ready") is False,
        "the node is not ready", "it grants no locks yet", "wait, or look at the node's log"),
    unencrypted("kahuna.tls", lambda it: is_exposed(it.origin), "kahuna+https://, on the node's TLS port"),
)
# fmt: on


class KahunaDiagnosis(StoreDiagnosis[KahunaBackend]):
    """The checks of one cluster."""

    async def diagnose(self, ttl: float) -> Sequence[Finding]:  # noqa: ARG002  (no setting depends on it)
        """See `fencing_sdk.abc.SupportsDiagnosis.diagnose`."""
        backend = self.backend
        return await diagnose_nodes(backend._endpoints.in_turn(), backend._nodes.get, backend._durability)


async def diagnose_nodes(nodes: Sequence[Endpoint], ask: AskNode, durability: str) -> list[Finding]:
    """Ask every node by *ask*, and judge their answers."""
    facts = await asyncio.gather(*(_ask(node, ask) for node in nodes))
    down = [each for each in facts if each.failure]
    fix, fatal = "start the node, or correct its address or the firewall", 2 * len(down) >= len(facts)
    findings = [host_down("kahuna.host", f"{each.origin}: {each.failure}", fix, fatal=fatal) for each in down]
    for text in warnings_of(next((each.report for each in facts if each.report), {}), durability):
        what, _, fix = text.partition("; ")
        findings.append(error("kahuna.settings", what, "two clients may hold one lock", fix))
    if len(nodes) < FEWEST:
        what, fix = f"the URL names {len(nodes)} nodes", "run three nodes, and name every one in the URL"
        findings.append(warning("kahuna.nodes", what, ONE_DOWN, fix))
    return [*findings, *(finding for each in facts for finding in judged(CHECKS, each, each.origin))]


async def _ask(node: Endpoint, ask: AskNode) -> NodeFacts:
    try:
        async with asyncio.timeout(_LIMIT):
            return NodeFacts(node.origin, await ask(node.urls[HEALTH]) | await ask(node.urls[PLACEMENT]))
    except RequestFailedError as failure:
        return NodeFacts(node.origin, {}, failure.detail)
    except TimeoutError:
        return NodeFacts(node.origin, {}, f"no answer within {_LIMIT:g} s")
