"""Where the nodes of a cluster are, and the order in which to ask them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from yarl import URL

from fencing_sdk._values.clock import JITTER
from fencing_sdk._values.url import joined, read_hosts
from fencing_sdk.errors import ConfigurationError

__all__ = ["Endpoint", "EndpointRules", "Endpoints", "read_endpoints"]


@dataclass(frozen=True, slots=True)
class EndpointRules:
    """What is the same for all nodes of one kind of store."""

    example: str
    """A URL of the store, for messages."""
    plain_port: int
    tls_port: int
    paths: tuple[str, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Endpoint:
    """One node, with a URL for each path."""

    origin: str
    urls: dict[str, URL] = field(repr=False)

    @property
    def address(self) -> str:
        """Its ``host:port``."""
        return _address(self.origin)


class Endpoints:
    """
    All nodes, in the order in which to ask them.

    Any node will do, because a node that is not the leader passes the request on. There are three rules:

    1. Ask first the node that answered last for the name. The memory of names is bounded.
    2. A node that failed goes to the end: its turn comes again when all others fail, and it is trusted when it answers.
    3. If an answer names a node, ask that one first the next time, but only if it is one of these. If another
       node has to answer after all, what the answers name for this lock is followed no more.
    """

    NAMES = 10_000

    def __init__(self, endpoints: Iterable[Endpoint]) -> None:
        self._order = list(endpoints)
        self._by_address = {endpoint.address: endpoint for endpoint in self._order}
        self._failed: set[Endpoint] = set()
        self._serving: OrderedDict[str, _Serving] = OrderedDict()

    def __len__(self) -> int:
        return len(self._order)

    def in_turn(self, name: str = "") -> Sequence[Endpoint]:
        """The nodes in their present order, for requests about *name*."""
        serving = self._serving.get(name)
        if serving is None or serving.first is self._order[0] or serving.first in self._failed:
            return tuple(self._order)
        return (serving.first, *(endpoint for endpoint in self._order if endpoint is not serving.first))

    def mark_failed(self, endpoint: Endpoint) -> None:
        """From now on, ask all other nodes before *endpoint*."""
        self._failed.add(endpoint)
        self._order.remove(endpoint)
        self._order.append(endpoint)

    def mark_answered(self, endpoint: Endpoint, name: str = "", hint: object = None) -> None:
        """Note that *endpoint* has answered for *name*, and which node its answer named."""
        self._failed.discard(endpoint)
        if not name:
            return
        serving = self._serving.pop(name, None) or _Serving(endpoint)
        self._serving[name] = serving  # the newest
        if serving.hinted is serving.first is not endpoint:
            serving.misled = True
        serving.first = endpoint
        hinted = self._by_address.get(_address(hint)) if isinstance(hint, str) and not serving.misled else None
        if hinted is not None and hinted not in self._failed:
            serving.first = serving.hinted = hinted
        if len(self._serving) > self.NAMES:
            self._serving.popitem(last=False)


@dataclass(slots=True)
class _Serving:
    """The node to ask first for one name."""

    first: Endpoint
    hinted: Endpoint | None = None
    misled: bool = False


def _address(text: str) -> str:
    """``host:port``, of an origin too."""
    return text.rpartition("://")[2].rstrip("/").lower()


def read_endpoints(texts: object, rules: EndpointRules, *, tls: bool) -> Endpoints:
    """
    Read the address of each node: ``host``, ``host:port`` or ``[address]:port``.

    The order begins at a random node, so that the clients of a cluster do not all begin with one node.

    Raises:
        ConfigurationError: there is no address, or one cannot be read. The message does not repeat it,
            because it may hold a password.
    """
    if isinstance(texts, str) or not isinstance(texts, Iterable):
        host = rules.example.partition("://")[2]
        msg = f"endpoints must be a sequence of 'host:port', such as ['{host}']"
        raise ConfigurationError(msg)
    port, scheme = (rules.tls_port, "https") if tls else (rules.plain_port, "http")
    read = dict.fromkeys(address.at(port) for address in read_hosts(texts, "endpoints"))
    if not read:
        msg = f"endpoints must name at least one node, such as {rules.example}"
        raise ConfigurationError(msg)
    return Endpoints(_endpoint(scheme, *address, rules.paths) for address in JITTER.sample(list(read), len(read)))


def _endpoint(scheme: str, host: str, port: int, paths: Iterable[str]) -> Endpoint:
    try:
        urls = {path: URL.build(scheme=scheme, host=host, port=port, path=path) for path in paths}
    except ValueError:
        msg = "endpoints has a host that cannot be read; write a name, an IPv4 address or an [IPv6 address]"
        raise ConfigurationError(msg) from None
    return Endpoint(f"{scheme}://{joined(host, port)}", urls)
