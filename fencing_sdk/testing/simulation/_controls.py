"""All negative controls: see `_control`."""

from __future__ import annotations

from fencing_sdk.testing.simulation import _broken_clients, _broken_stores
from fencing_sdk.testing.simulation._control import Control


def all_controls() -> tuple[Control, ...]:
    """Every control, in the order of the promises."""
    found = (*_broken_clients.CONTROLS, *_broken_stores.CONTROLS)
    return tuple(sorted(found, key=lambda control: control.promise))
