"""Times as a shell writes them: ``90s``, ``5m``, ``1h30m``, or plain seconds."""

from __future__ import annotations

import math
import re

from fencing_sdk.errors import shown

_UNITS = {"d": 86_400.0, "h": 3600.0, "m": 60.0, "s": 1.0, "ms": 0.001}
_NUMBER = r"\d{1,9}(?:\.\d{1,9})?"
_DURATION = re.compile("".join(f"(?:({_NUMBER}){unit})?" for unit in _UNITS), re.ASCII)
"""The units in falling order and each once, so that ``5m1h`` and ``5m5m`` are no durations."""


def parse_duration(text: str, *, also: str = "") -> float:
    """
    Return the seconds that *text* means. *also* ends the list of what is expected.

    Raises:
        ValueError: it is no duration.
    """
    text = text.strip()
    if text and (match := _DURATION.fullmatch(text)):
        return sum(float(number) * unit for number, unit in zip(match.groups("0"), _UNITS.values(), strict=True))
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not math.isfinite(seconds) or not text.isascii():
        msg = f"expected a duration such as 90s, 5m or 1h, or a number of seconds{also}, not {shown(text)}"
        raise ValueError(msg)
    return seconds
