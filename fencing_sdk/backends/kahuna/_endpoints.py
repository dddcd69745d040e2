"""Where the nodes of a Kahuna cluster are."""

from __future__ import annotations

from fencing_sdk._http.endpoints import Endpoint, Endpoints, Site
from fencing_sdk._http.endpoints import read_endpoints as read
from fencing_sdk.backends.kahuna._contract import GET_INFO, TRY_EXTEND, TRY_LOCK, TRY_UNLOCK

__all__ = ["Endpoint", "Endpoints", "read_endpoints"]

_SITE = Site(
    example="kahuna://localhost:2070",
    plain_port=2070,
    tls_port=2071,
    paths=(TRY_LOCK, TRY_EXTEND, TRY_UNLOCK, GET_INFO),
    user_hint="which Kahuna does not have; write host:port",
)


def read_endpoints(texts: object, *, tls: bool) -> Endpoints:
    """
    Read ``host``, ``host:port`` or ``[address]:port``, each of a node.

    Raises:
        ConfigurationError: none is given, or one cannot be read.
    """
    return read(texts, _SITE, tls=tls)
