"""Telling clients that a grant has ended behind its holder's back."""

from __future__ import annotations

from collections.abc import Callable

from fencing_sdk._values.claim import Claim
from fencing_sdk.abc import LossNotice
from fencing_sdk.errors import LossReason

__all__ = ["LossNotices"]


class LossNotices:
    """The callbacks that clients have registered with one backend."""

    __slots__ = ("_notices",)

    def __init__(self) -> None:
        self._notices: dict[LossNotice, None] = {}

    def __bool__(self) -> bool:
        """Whether a client is to be told at all."""
        return bool(self._notices)

    def on_loss(self, notice: LossNotice) -> Callable[[], None]:
        """See `fencing_sdk.abc.SupportsLossNotice.on_loss`."""
        self._notices[notice] = None
        return lambda: self._notices.pop(notice, None)

    def tell(self, claim: Claim, reason: LossReason, detail: str = "") -> None:
        """Call every callback. One may end its own registration meanwhile, or another's."""
        for notice in tuple(self._notices):
            notice(claim, reason, detail)
