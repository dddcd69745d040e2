"""How to install what an extra of the package brings, for messages."""

from __future__ import annotations

__all__ = ["install"]


def install(extra: str) -> str:
    """The command that installs *extra*, for an installed package and for a checkout."""
    return f"pip install 'fencing-sdk[{extra}]', or '.[{extra}]' in a checkout"
