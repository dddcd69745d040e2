"""All negative controls: see `tests.simulation.control`."""

from __future__ import annotations

from tests.simulation import broken_clients, broken_elections, broken_shares, broken_stores
from tests.simulation.control import Control


def all_controls() -> tuple[Control, ...]:
    """Every control, in the order of the promises."""
    found = (
        *broken_clients.CONTROLS,
        *broken_elections.CONTROLS,
        *broken_stores.CONTROLS,
        *broken_shares.CONTROLS,
    )
    return tuple(sorted(found, key=lambda control: control.promise))
