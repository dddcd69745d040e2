"""
How fence and data are written into one value. No I/O happens here.

    fencing/1 34;holder="9f8a01c2" 5f1d0c77a2b94e60<LF>the data, as they are

The first line is ASCII: the layout, the token as in a header, and a random number of the write, by which a guard knows
its own. The data begin behind the first line feed. Without a line feed there is a fence and no data yet.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from fencing_sdk._values.claim import Token
from fencing_sdk._values.token_wire import format_token, parse_written
from fencing_sdk.errors import ConfigurationError

__all__ = ["FencedValue", "ForeignValueError"]

_FIRST_LINE = re.compile(rb"fencing/1 ([0-9a-z;=\"]{1,100}) ([0-9a-f]{16})")


class ForeignValueError(ValueError):
    """The value was written by another program."""


@dataclass(frozen=True, slots=True)
class FencedValue:
    """A fence, and the data that it protects."""

    fence: Token
    data: bytes | None
    """None until the first write."""
    write: str
    """The number of the write."""

    def to_bytes(self) -> bytes:
        """Write it in the layout."""
        line = f"fencing/1 {format_token(self.fence)} {self.write}".encode("ascii")
        return line if self.data is None else line + b"\n" + self.data

    @classmethod
    def read(cls, value: bytes) -> FencedValue:
        """
        Read the layout.

        Raises:
            ForeignValueError: *value* is not written in it.
        """
        line, newline, data = value.partition(b"\n")
        match = _FIRST_LINE.fullmatch(line)
        if match is None:
            raise ForeignValueError
        try:
            fence = parse_written(match[1].decode())
        except ConfigurationError as error:
            raise ForeignValueError from error
        return cls(fence, data if newline else None, match[2].decode())
