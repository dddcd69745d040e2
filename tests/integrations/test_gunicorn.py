"""gunicorn's workers, forked before or after the client was made, take turns and leave nothing behind."""

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import requests
from local_ports import HOST, free_port
from patience import wait_until

from fencing_sdk.sync import SyncLockClient, connect

APPS = Path(__file__).parent / "apps"
LIMIT = 100.0
"""Seconds for what several processes do on a busy machine."""


class Gunicorn:
    """Two workers of `preforked`, each with two threads."""

    def __init__(self, folder: Path, *, preload: bool) -> None:
        self.turns = folder / "turns"
        self.turns.touch()
        self.store = f"sqlite:///{folder / 'locks.db'}"
        self.port = free_port()
        self._log = folder / "log"
        environment = {"FENCING_URL": self.store, "TURNS": str(self.turns), "PRELOADED": "1" if preload else ""}
        command = [sys.executable, "-m", "gunicorn", "preforked:app", "--bind", f"{HOST}:{self.port}"]
        command += ["--workers", "2", "--worker-class", "gthread", "--threads", "2", "--chdir", str(APPS)]
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                [*command, *(["--preload"] if preload else [])], env=os.environ | environment, stdout=log, stderr=log
            )

    def ask(self, path: str) -> str:
        with requests.Session() as session:
            session.trust_env = False
            answer = session.get(f"http://{HOST}:{self.port}/{path}", timeout=LIMIT)
        assert answer.status_code == 200, self.log()
        return answer.text

    def answers(self) -> bool:
        assert self.process.poll() is None, self.log()
        try:
            return bool(self.ask("parent"))
        except requests.ConnectionError:
            return False

    def log(self) -> str:
        return self._log.read_text()


@pytest.fixture(params=["preload", "no preload"])
def preload(request: pytest.FixtureRequest) -> bool:
    return request.param == "preload"


@pytest.fixture
def gunicorn(preload: bool, tmp_path: Path) -> Iterator[Gunicorn]:
    server = Gunicorn(tmp_path, preload=preload)
    try:
        wait_until(server.answers, what="gunicorn answers", within=LIMIT)
        yield server
    finally:
        server.process.kill()
        server.process.wait()


@pytest.fixture
def locks(gunicorn: Gunicorn) -> Iterator[SyncLockClient]:
    with connect(gunicorn.store) as locks:
        yield locks


def test_workers_take_turns_and_leave_nothing_behind(gunicorn: Gunicorn, locks: SyncLockClient, preload: bool):
    answers: list[str] = []
    with ThreadPoolExecutor(8) as pool:
        while len(set(answers)) < 2:  # until both workers have had turns
            answers += pool.map(gunicorn.ask, ["turn"] * 16)
    events = [line.split() for line in gunicorn.turns.read_text().splitlines()]
    tokens = [int(token) for what, token in events if what == "in"]
    assert tokens == sorted(set(tokens))
    assert events == [[what, str(token)] for token in tokens for what in ("in", "out")]

    before_the_fork = locks.inspect("the parent's")
    if preload:
        assert gunicorn.ask("parent") == "held: False, closed"
        assert before_the_fork is not None, "a worker gave back what its parent holds"
    else:
        assert before_the_fork is None

    gunicorn.ask("keep")
    assert locks.lock("kept").locked()
    gunicorn.process.terminate()
    assert gunicorn.process.wait(LIMIT) == 0, gunicorn.log()
    for name in ("kept", "the parent's"):
        assert locks.inspect(name) is None, f"{name} is still held after the end of gunicorn"
    assert "Traceback" not in gunicorn.log()
