"""
What can be seen of a cluster's settings, and which of them put exclusion at stake.

Two of Kahuna's settings do. With a replication factor above 0 each lock is on a part of the nodes only: its authors'
own tests saw one token given to two owners, and tokens that went backwards. An ephemeral lock is in the memory of one
node, and is given to another client when that node restarts. (That there is no authentication, no answer tells.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

__all__ = ["HEALTH", "PLACEMENT", "warnings_of"]

HEALTH = "/v1/cluster/health"
PLACEMENT = "/v1/cluster/placement"


def warnings_of(cluster: dict[str, object], durability: str) -> Sequence[str]:
    """What puts exclusion at stake, one sentence each; *cluster* is what a node tells at `HEALTH` and `PLACEMENT`."""
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
    told = (cluster.get("replicationFactor"), *(partition.get("effectiveReplicationFactor") for partition in each))
    return (factor for factor in told if isinstance(factor, int))
