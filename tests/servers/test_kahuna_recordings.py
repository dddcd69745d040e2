"""
The stand-in answers what a real Kahuna 1.2.8 has answered: 442 recorded requests in 80 sequences, replayed.

Each line of the files is a step of a sequence: a request, the seconds before it, and the answer, with its times masked.
Steps with the same ``together`` are sent at once, and a step with ``types`` may be answered with any of them.
``left_ms`` is what ``expires`` leaves. With FENCING_TEST_KAHUNA_URL the real server is asked, not the stand-in.
Not compared are headers, the body of an HTTP error, and ``servedFrom``, which other versions fill.
"""

import asyncio
import gzip
import io
import itertools
import json
import time
import uuid
from base64 import b64encode
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from kahuna_server import UPSTREAMS, KahunaServer

pytest_plugins = ["kahuna_fixtures"]

Step = dict[str, Any]

RECORDINGS = Path(__file__).parent / "kahuna_recordings"
MASKS = {"<o4096>": b64encode(b"o" * 4096).decode(), "<pad>": " " * 2**20, "<1MiB>": b64encode(b"v" * 2**20).decode()}
MOMENT = {"n": "<node>", "l": "<unix-ms>", "c": "<counter>"}
NEVER = {"n": 0, "l": 0, "c": 0}
TOLERANCE = 100
"""Milliseconds by which a recorded remaining time may differ."""
AT_ONCE = 8
"""Sequences that are replayed side by side."""


def recorded(file: str) -> list[list[Step]]:
    steps = [json.loads(line) for line in gzip.decompress((RECORDINGS / f"{file}.jsonl.gz").read_bytes()).splitlines()]
    return [list(group) for _, group in itertools.groupby(steps, key=lambda step: step["seq"])]


def unmasked(value: Any, prefix: str) -> Any:
    if isinstance(value, dict):
        return {name: unmasked(member, prefix) for name, member in value.items()}
    if isinstance(value, str):
        value = value.replace("<p>", prefix)
        for mask, text in MASKS.items():
            value = value.replace(mask, text)
    return value


def compared(answer: Any) -> Any:
    """What is compared: moments are told apart from none only."""
    if not isinstance(answer, dict):
        return answer
    known = {name: member for name, member in answer.items() if name != "servedFrom"}
    for name in known.keys() & {"expires", "lastModified"}:
        known[name] = NEVER if known[name] == NEVER else MOMENT
    return known | {"servedFrom": ...} if "servedFrom" in answer else known


class Replay:
    """One sequence, played to one node."""

    def __init__(self, session: aiohttp.ClientSession, origin: str, steps: list[Step]) -> None:
        self.session, self.origin, self.steps = session, origin, steps
        self.prefix = f"replay/{uuid.uuid4().hex}/"
        self.started = time.monotonic()
        self.paused = 0.0
        self.differences: list[str] = []

    async def run(self) -> list[str]:
        for _, group in itertools.groupby(self.steps, key=lambda step: step.get("together") or -step["step"]):
            steps = list(group)
            pause = steps[0]["wait_ms"] / 1000
            self.paused += pause
            await asyncio.sleep(pause)
            await asyncio.gather(*(self.take(step) for step in steps))
        return self.differences

    async def take(self, step: Step) -> None:
        status, answer = await self.ask(step)
        expected = unmasked(step["answer"], self.prefix)
        if status != step["status"]:
            self.differ(step, "status", step["status"], status)
        elif status != 200:
            return
        elif "types" in step:
            if answer.keys() != expected.keys() or answer["type"] not in step["types"]:
                self.differ(step, "type", step["types"], answer)
        elif compared(answer) != compared(expected):
            self.differ(step, "answer", compared(expected), compared(answer))
        elif "left_ms" in step:
            slow = (time.monotonic() - self.started - self.paused) * 1000  # what the machine has taken
            left = answer["expires"]["l"] - time.time() * 1000
            if abs(left - step["left_ms"]) > TOLERANCE + slow:
                self.differ(step, "left_ms", step["left_ms"], left)

    def differ(self, step: Step, what: str, expected: object, got: object) -> None:
        self.differences.append(f"{step['seq']}.{step['step']} {step['note']}: {what} {expected!r} became {got!r}")

    async def ask(self, step: Step) -> tuple[int, Any]:
        body = unmasked(step["body"], self.prefix)
        headers = step.get("headers", {"Content-Type": "application/json"})
        async with self.session.request(
            step["method"],
            self.origin + step["path"],
            data=io.BytesIO((body if isinstance(body, str) else json.dumps(body)).encode()),
            headers={name: value for name, value in headers.items() if value is not None},
            skip_auto_headers=["Content-Type"],
        ) as response:
            text = await response.text()
        if response.content_type == "application/json" and response.status == 200:
            return response.status, json.loads(text)
        return response.status, text


async def differences(file: str, origin: str) -> list[str]:
    free = asyncio.Semaphore(AT_ONCE)

    async def play(steps: list[Step]) -> list[str]:
        async with free:
            return await Replay(session, origin, steps).run()

    async with aiohttp.ClientSession() as session:
        found = await asyncio.gather(*(play(steps) for steps in recorded(file)))
    return [difference for one in found for difference in one]


@pytest.mark.parametrize(("file", "steps"), [("locks", 321), ("values", 121)])
async def test_every_recorded_answer_is_given_again(kahuna_server: KahunaServer, file: str, steps: int):
    assert sum(map(len, recorded(file))) == steps
    assert await differences(file, (UPSTREAMS or kahuna_server.origins)[0]) == []
