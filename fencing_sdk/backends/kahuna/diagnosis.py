"""What each node of a Kahuna cluster tells of itself, and what of that breaks a promise."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence

from yarl import URL

from fencing_sdk._http.endpoints import Endpoint
from fencing_sdk._http.outcomes import RequestFailedError
from fencing_sdk._values.findings import Finding, error, is_local, note, warning
from fencing_sdk.backends.kahuna.cluster_settings import HEALTH, PLACEMENT, warnings_of

_LIMIT = 5.0
_FEWEST = 3

AskNode = Callable[[URL], Awaitable[dict[str, object]]]
Told = dict[str, object] | str
"""What a node tells of its health and its partitions, or why it does not."""


async def diagnose_nodes(nodes: Sequence[Endpoint], ask: AskNode, durability: str) -> list[Finding]:
    """Ask every node by *ask*, and judge what they tell."""
    told = dict(zip(nodes, await asyncio.gather(*(_told(node, ask) for node in nodes)), strict=True))
    cluster = next((each for each in told.values() if isinstance(each, dict)), {})
    settings = [error("kahuna.settings", *_split(text)) for text in warnings_of(cluster, durability)]
    return [*_hosts(told), *settings, *_size(nodes), *_access(nodes)]


async def _told(node: Endpoint, ask: AskNode) -> Told:
    try:
        async with asyncio.timeout(_LIMIT):
            return await ask(node.urls[HEALTH]) | await ask(node.urls[PLACEMENT])
    except RequestFailedError as failure:
        return failure.detail
    except TimeoutError:
        return f"no answer within {_LIMIT:g} s"


def _split(text: str) -> tuple[str, str, str]:
    """What, why and what to do, of a sentence that `warnings_of` has put together."""
    what, _, mend = text.partition("; ")
    return what, "two clients may hold one lock", mend


def _hosts(told: dict[Endpoint, Told]) -> Iterator[Finding]:
    down = [node for node, each in told.items() if isinstance(each, str)]
    severe, reason = (warning, "one more loss, and no lock may be taken")
    if 2 * len(down) >= len(told):
        severe, reason = (error, "no lock can be taken")
    for node, each in told.items():
        if isinstance(each, str):
            mend = "start the node, or correct its address or the firewall"
            yield severe("kahuna.host", f"{node.origin}: {each}", reason, mend)
        elif each.get("ready") is False:
            what = f"{node.origin}: the node is not ready"
            yield warning("kahuna.ready", what, "it grants no locks yet", "wait, or look at the node's log")


def _size(nodes: Sequence[Endpoint]) -> Iterator[Finding]:
    if len(nodes) < _FEWEST:
        what = f"the URL names {len(nodes)} nodes"
        mend = "run three nodes, and name every one in the URL"
        yield warning("kahuna.nodes", what, "no lock can be taken while one is down", mend)


def _access(nodes: Sequence[Endpoint]) -> Iterator[Finding]:
    for node in nodes:
        scheme, _, address = node.origin.partition("://")
        if scheme == "http" and not is_local(address.rpartition(":")[0]):
            what, mend = f"{node.origin}: the connection is not encrypted", "kahuna+https://, on the node's TLS port"
            yield note("kahuna.tls", what, "the network sees owner ids, which can release locks", mend)
