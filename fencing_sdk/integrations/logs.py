"""
Events as structured logging: one record for each event, its fields in ``extra``.

    locks = connect(url, observers=[LogEvents()])
"""

from __future__ import annotations

import logging
from types import MappingProxyType

from fencing_sdk.errors import ConfigurationError, shown
from fencing_sdk.events import (
    Event,
    JobEnded,
    JobOutcome,
    Lost,
    NotAcquired,
    RenewalFailed,
    RenewalLate,
    StaleRejected,
    TokenMissing,
)

__all__ = ["LogEvents"]

_LEVELS = MappingProxyType(
    {
        Lost: logging.WARNING,
        RenewalFailed: logging.WARNING,
        RenewalLate: logging.WARNING,
        StaleRejected: logging.WARNING,
        TokenMissing: logging.INFO,
        NotAcquired: logging.INFO,
        JobEnded: logging.INFO,
    }
)


class LogEvents:
    """
    An observer that logs every event: the message is its kind and the lock's name, its fields are in ``extra``.

    Each field has the prefix ``fencing_``, such as ``record.fencing_token``, so that a formatter for JSON writes it by
    itself. Losses, stale tokens and troubles of renewals are warnings. An acquisition without a lease and the end
    of a job are information. The rest is for debugging.

    Args:
        logger: Where the records go. ``fencing_sdk.events`` by default.

    Raises:
        ConfigurationError: *logger* is not a logger.
    """

    def __init__(self, logger: logging.Logger | None = None) -> None:
        given: object = logging.getLogger("fencing_sdk.events") if logger is None else logger
        if not isinstance(given, logging.Logger):
            msg = f"logger must be a logging.Logger such as logging.getLogger('locks'), not {shown(given)}"
            raise ConfigurationError(msg)
        self._logger = given

    def __call__(self, event: Event) -> None:
        """Log *event*; this is what makes it an observer."""
        level = _LEVELS.get(type(event), logging.DEBUG)
        if isinstance(event, JobEnded) and event.outcome in {JobOutcome.LOST, JobOutcome.FAILED}:
            level = logging.WARNING
        if self._logger.isEnabledFor(level):
            extra = {f"fencing_{name}": value for name, value in event.as_dict().items()}
            self._logger.log(level, "%s %s", event.kind, shown(event.name), extra=extra)
