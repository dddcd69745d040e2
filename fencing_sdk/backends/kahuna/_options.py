"""The options of the backend, read strictly: a typing error must not give grants to the memory of one node."""

from __future__ import annotations

from fencing_sdk.backends.kahuna._contract import DURABILITY
from fencing_sdk.errors import ConfigurationError, shown

__all__ = ["OPTIONS", "check_durability"]

OPTIONS = ("durability", "ca", "ssl_context", "connect_timeout", "connections")


def check_durability(durability: object) -> str:
    """Return where grants are kept."""
    if isinstance(durability, str) and durability in DURABILITY:
        return durability
    msg = f"durability must be 'persistent' or 'ephemeral', got {shown(durability)}"
    raise ConfigurationError(msg)
