"""What a node of the stand-in can be told to do wrong, and how it does it."""

from __future__ import annotations

import asyncio
import contextlib
import json
from dataclasses import dataclass

from aiohttp import web

_LATE: set[asyncio.Task[object]] = set()


@dataclass(slots=True)
class Fault:
    """
    One kind of trouble. ``act`` says what the node does, the rest which requests it happens to.

    ``answer``    nothing wrong, but for a delay
    ``drop``      the connection is reset
    ``hang``      nothing ever comes
    ``status``    *value* as the HTTP status
    ``body``      *value* as the body of an HTTP 200
    ``redirect``  to *value*
    ``truncate``  the body ends in the middle
    ``endless``   the body does not end
    """

    act: str
    value: str = ""
    call: str | None = None
    """Only for this call, such as ``try-lock``."""
    node: int | None = None
    """Only at this node."""
    times: int | None = None
    """So often and not more."""
    apply: bool = True
    """Whether the request is carried out first."""
    delay: float = 0.0
    """Seconds before anything happens."""
    late: float | None = None
    """Carry it out so many seconds *after* the node has done what it does wrong."""

    def meets(self, call: str, node: int) -> bool:
        """Take one of the times, if this fault is for such a request."""
        if self.call not in {None, call} or self.node not in {None, node} or self.times == 0:
            return False
        if self.times is not None:
            self.times -= 1
        return True


NO_ANSWERS = (
    "",
    "null",
    "[]",
    "0",
    "{",
    "{}",
    "<!doctype html><title>Welcome</title>",
    '{"type":null,"fencingToken":0}',
    '{"type":"0","fencingToken":0}',
    '{"type":false,"fencingToken":0}',
    '{"type":0.0,"fencingToken":0}',
    '{"type":5,"fencingToken":0}',
    '{"type":-1,"fencingToken":0}',
    '{"type":0',
    '{"type":' + "9" * 10_000 + "}",
    '{"error":"leader unknown"}',
    "[" * 20_000,
)
"""Bodies of an HTTP 200 that say nothing."""
NO_TOKENS = (
    "",
    ',"fencingToken":null',
    *(f',"fencingToken":{odd}' for odd in ('"1"', "-1", "1.0", "true", "NaN", 2**53)),
)
"""What may follow the type where a token should be."""
UNSETTLED = (10, 99, 104)
"""Types of an answer that leave open what was done."""
MISHAPS = [
    Fault("drop"),
    Fault("truncate"),
    Fault("endless"),
    *(Fault("status", str(status)) for status in (408, 429, 500, 502, 503, 504)),
    *(Fault("body", body) for body in NO_ANSWERS),
    *(Fault("body", json.dumps({"type": kind, "fencingToken": 0})) for kind in (*UNSETTLED, 101)),
]


async def play(fault: Fault, request: web.Request, answer: web.Response | None) -> web.StreamResponse:
    """Answer *request*, whose right *answer* is given if it was carried out, as *fault* has it."""
    body = answer.body if answer is not None and isinstance(answer.body, bytes) else b'{"type":101}'
    match fault.act:
        case "drop" if request.transport is not None:
            request.transport.abort()
        case "hang":
            await asyncio.Event().wait()
        case "status":
            return web.Response(status=int(fault.value), text="<html>Service Unavailable</html>")
        case "body":
            return web.Response(body=fault.value.encode(), content_type="application/json")
        case "redirect":
            return web.Response(status=307, headers={"Location": fault.value})
        case "truncate" | "endless":
            return await _in_pieces(fault, request, body)
    return answer or web.json_response({"type": 101})


async def _in_pieces(fault: Fault, request: web.Request, body: bytes) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "application/json"})
    if fault.act != "endless":
        response.content_length = len(body)
    await response.prepare(request)
    with contextlib.suppress(ConnectionError):
        if fault.act == "truncate":
            await response.write(body[: len(body) // 2])
            if request.transport is not None:
                request.transport.close()
        while fault.act == "endless":
            await response.write(b" " * 4096)
    return response


def later(work: asyncio.Task[object]) -> None:
    """Keep hold of what happens after the answer."""
    _LATE.add(work)
    work.add_done_callback(_LATE.discard)
