"""
The keys of a resource's fence and of its data: they share one hash tag, the name of the resource.

    fence:{seats/42}       the fence, in the slot of every key with {seats/42} in it
    {seats/42}:row         guard.key("seats/42", "row")
    passenger:{seats/42}   a key that the user has named

A cluster hashes the text between the first ``{`` and the next ``}``. So braces and percent signs in a name are
percent-encoded: no two resources share a fence.
"""

from __future__ import annotations

from binascii import crc_hqx
from collections.abc import Mapping

from fencing_sdk._values.names import check_name
from fencing_sdk.errors import ConfigurationError, shown

_SLOTS = 16_384
_ESCAPES = str.maketrans({"%": "%25", "{": "%7B", "}": "%7D"})


def check_prefix(prefix: object) -> str:
    """Return *prefix* if it can stand in front of the hash tag."""
    prefix = check_name(prefix, parameter="prefix")
    if "{" in prefix or "}" in prefix:
        msg = f"prefix must not have braces, which would change the slot of every fence, got {shown(prefix)}"
        raise ConfigurationError(msg)
    return prefix


def tag(resource: str) -> str:
    """The hash tag of *resource*, with its braces."""
    return f"{{{resource.translate(_ESCAPES)}}}"


def fence_key(prefix: str, resource: str) -> bytes:
    """The one key of the fence, the same for clients of every encoding."""
    return f"{prefix}:{tag(resource)}".encode()


def slot(key: bytes) -> int:
    """The slot of a cluster that *key* belongs to."""
    _, opened, rest = key.partition(b"{")
    tagged, closed, _ = rest.partition(b"}")
    return crc_hqx(tagged if opened and closed and tagged else key, 0) % _SLOTS


def check_one_slot(fences: Mapping[str, bytes]) -> None:
    """
    Refuse fences, by resource, that a cluster would keep apart from one another.

    Raises:
        ConfigurationError: one of them is in another slot.
    """
    first, *others = fences.items()
    for other in others:
        if slot(other[1]) != slot(first[1]):
            msg = (
                f"the fences of {shown(first[0])} and {shown(other[0])} are in different slots of the cluster, so no "
                "script can check both and write: call admit_all(tokens), then execute(...) for each resource"
            )
            raise ConfigurationError(msg)


def check_slots(resource: str, fence: bytes, keys: list[bytes]) -> None:
    """
    Refuse *keys* that a cluster would keep apart from the *fence*.

    Raises:
        ConfigurationError: one of them is in another slot.
    """
    for key in keys:
        if slot(key) != slot(fence):
            msg = (
                f"key {shown(key)} is in another slot of the cluster than the fence of {shown(resource)}; "
                f"name it guard.key({shown(resource)}, ...) or let it carry {shown(tag(resource))}"
            )
            raise ConfigurationError(msg)
