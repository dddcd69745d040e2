"""Every store answers random histories as the rules say."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest
from campaigns import amount

from tests.oracle.benches import MemoryOracle, SqliteOracle
from tests.oracle.client_time import ClientTimeLoop
from tests.oracle.histories import history, shrunk
from tests.oracle.planted import MEMORY, SQLITE, Planted
from tests.oracle.player import Bench, Player
from tests.oracle.reference import Differs

PATIENCE = 20.0


def play_all(bench: Bench, seeds: range, *, patience: float = PATIENCE) -> int:
    """Play the histories of *seeds*; fail with the shortest history that differs."""

    async def play() -> int:
        player = Player(bench, patience=patience)
        for seed in seeds:
            steps = history(seed, bench.modes)
            try:
                await player.play(steps)
            except Differs as error:
                pytest.fail(f"seed {seed}: {error}\n\n{await small(steps)}")
        return player.grants

    async def small(steps: list[str]) -> str:
        quick = Player(bench, patience=0.3)

        async def fails(fewer: list[str]) -> bool:
            try:
                await quick.play(fewer)
            except Differs:
                return True
            return False

        fewer = await shrunk(steps, fails)
        try:
            await quick.play(fewer)
        except Differs as error:
            return f"{error}\n" + "\n".join(fewer)
        return "(it does not differ when it is played again)\n" + "\n".join(steps)

    with asyncio.Runner(loop_factory=ClientTimeLoop) as runner:
        return runner.run(play())


@pytest.mark.campaign
def test_memory():
    assert play_all(MemoryOracle(), range(amount(100_000, short=400)))


@pytest.mark.campaign
def test_sqlite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert play_all(SqliteOracle(tmp_path / "locks.db", monkeypatch), range(amount(100_000, short=40)))


def catch(bench: Bench, planted: Planted, seeds: range) -> None:
    """Play until a history differs in the way that the change has to be noticed."""

    async def play() -> str:
        player = Player(bench, patience=1.0)
        for seed in seeds:
            try:
                await player.play(history(seed, planted.modes))
            except Differs as error:
                return str(error)
        return ""

    with asyncio.Runner(loop_factory=ClientTimeLoop) as runner:
        message = runner.run(play())
    assert message, "no history differs"
    assert re.search(planted.caught, message)


@pytest.mark.parametrize("planted", MEMORY, ids=lambda planted: planted.what)
def test_a_change_of_memory_is_caught(planted: Planted, monkeypatch: pytest.MonkeyPatch):
    planted.plant(monkeypatch)
    catch(MemoryOracle(), planted, range(500))


@pytest.mark.parametrize("planted", SQLITE, ids=lambda planted: planted.what)
def test_a_change_of_sqlite_is_caught(planted: Planted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    planted.plant(monkeypatch)
    catch(SqliteOracle(tmp_path / "locks.db", monkeypatch), planted, range(100))
