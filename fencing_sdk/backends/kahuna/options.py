"""
The options of the backend, the endpoints of the cluster, and which settings of both put exclusion at stake.

Options are read strictly: a mistyped durability must not keep grants in the memory of one node. An ephemeral lock is
in the memory of one node, and goes to another client when that node restarts. With a replication factor above 0
each lock is on a part of the nodes only: its authors' own tests saw two owners with one token, and tokens that went
backwards. (No answer shows that there is no authentication.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fencing_sdk._http.endpoints import Endpoints, read_endpoints
from fencing_sdk._kahuna import rules_for
from fencing_sdk.backends.kahuna.requests import DURABILITY, GET_INFO, TRY_EXTEND, TRY_LOCK, TRY_UNLOCK
from fencing_sdk.errors import ConfigurationError, shown

__all__ = ["HEALTH", "PLACEMENT", "check_durability", "read_nodes", "warnings_of"]

HEALTH = "/v1/cluster/health"
PLACEMENT = "/v1/cluster/placement"

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


def warnings_of(cluster: dict[str, object], durability: str) -> Sequence[str]:
    """What puts exclusion at stake, one sentence each; *cluster* is a node's answer at `HEALTH` and `PLACEMENT`."""
    warnings = []
    if max(_factors(cluster), default=0) > 0:
        warnings.append(
            "replicationFactor is above 0, with which Kahuna was seen to give one token to two owners; "
            "set it to 0 on every node, or let guards check tokens"
        )
    if durability == "ephemeral":
        warnings.append(
            "durability is 'ephemeral', so a restart or a change of leader gives a held lock to another client; "
            "use 'persistent'"
        )
    return warnings


def _factors(cluster: dict[str, object]) -> Iterator[int]:
    partitions = cluster.get("partitions")
    each = (
        [partition for partition in partitions if isinstance(partition, dict)] if isinstance(partitions, list) else []
    )
    factors = (cluster.get("replicationFactor"), *(partition.get("effectiveReplicationFactor") for partition in each))
    return (factor for factor in factors if isinstance(factor, int))
