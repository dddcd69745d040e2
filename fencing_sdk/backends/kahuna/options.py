"""
The options of the backend, and the endpoints of the cluster.

Options are read strictly: a mistyped durability must not keep grants in the memory of one node.
"""

from __future__ import annotations

from fencing_sdk._http.endpoints import Endpoints, read_endpoints
from fencing_sdk._kahuna.node import rules_for
from fencing_sdk.backends.kahuna.cluster_settings import HEALTH, PLACEMENT
from fencing_sdk.backends.kahuna.requests import DURABILITY, GET_INFO, TRY_EXTEND, TRY_LOCK, TRY_UNLOCK
from fencing_sdk.errors import ConfigurationError, shown

__all__ = ["OPTIONS", "check_durability", "read_nodes"]

OPTIONS = ("durability", "ca", "ssl_context", "connect_timeout", "connections")

_RULES = rules_for(TRY_LOCK, TRY_EXTEND, TRY_UNLOCK, GET_INFO, HEALTH, PLACEMENT)


def check_durability(durability: object) -> str:
    """Return *durability* if Kahuna has it."""
    if isinstance(durability, str) and durability in DURABILITY:
        return durability
    msg = f"durability must be 'persistent' or 'ephemeral', got {shown(durability)}"
    raise ConfigurationError(msg)


def read_nodes(texts: object, *, tls: bool) -> Endpoints:
    """
    Read the address of each node: ``host``, ``host:port`` or ``[address]:port``.

    Raises:
        ConfigurationError: there is no address, or one cannot be read.
    """
    return read_endpoints(texts, _RULES, tls=tls)
