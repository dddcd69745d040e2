"""How much work a call does, counted and not timed: the instructions of Python that it takes."""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def operations(call: Callable[[], object]) -> int:
    """
    Count what *call* does the second time: Python 3.13 misses instructions of code that is traced for the first time.

    Loops inside C, such as a search in a list, are not seen. While coverage is measured, the lines are counted: Python
    3.12 misses instructions where another tracer has asked for lines.
    """
    count, former = 0, sys.gettrace()
    event_counted = "opcode" if former is None else "line"

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = former is None, former is not None
        count += event == event_counted
        return trace

    sys.settrace(trace)
    try:
        call()
        count = 0
        call()
    finally:
        sys.settrace(former)
    return count
