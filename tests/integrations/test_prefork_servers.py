"""Workers of gunicorn and uWSGI, forked before or after the client was opened, take turns and leave nothing behind."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
import requests
from local_ports import HOST, free_port
from patience import wait_until
from redis_server import RedisServer

from fencing_sdk.sync import connect

pytest_plugins = ["redis_fixtures"]

APPS = Path(__file__).parent / "apps"
LIMIT = 100.0
"""Seconds for what several processes do on a busy machine."""


Program = Callable[..., list[str]]


def gunicorn(address: str, _stats: Path, *, preload: bool) -> list[str]:
    command = [sys.executable, "-m", "gunicorn", "preforked:app", "--bind", address, "--chdir", str(APPS)]
    command += ["--workers", "2", "--worker-class", "gthread", "--threads", "2"]
    return [*command, *(["--preload"] if preload else [])]


def uwsgi(address: str, stats: Path, *, preload: bool) -> list[str]:
    """Its workers are forked in C, behind the back of Python."""
    command = [str(Path(sys.executable).with_name("uwsgi")), "--module", "preforked:app", "--http-socket", address]
    command += ["--chdir", str(APPS), "-H", sys.prefix, "--pythonpath", os.pathsep.join(sys.path)]
    command += ["--master", "--workers", "2", "--threads", "2", "--worker-reload-mercy", "10", "--die-on-term"]
    command += ["--stats", str(stats)]
    return [*command, *([] if preload else ["--lazy-apps"])]


class Server:
    """Two workers of `preforked`, each with two threads."""

    def __init__(self, program: Program, store: str, folder: Path, *, preload: bool) -> None:
        self.turns = folder / "turns"
        self.turns.touch()
        self.program = program
        self.store = store
        self.port = free_port()
        self._log = folder / "log"
        self._stats = folder / "stats"
        environment = {"FENCING_URL": self.store, "TURNS": str(self.turns), "PRELOADED": "1" if preload else ""}
        command = program(f"{HOST}:{self.port}", self._stats, preload=preload)
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                command, env=os.environ | environment, stdout=log, stderr=log, start_new_session=True
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

    def idle(self) -> bool:
        """A worker of uWSGI ends without the functions of `atexit` while a request, though answered, is not over."""
        if self.program is not uwsgi:
            return True
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(self._stats))
            workers = json.load(connection.makefile())["workers"]
        return not any(core["in_request"] for worker in workers for core in worker["cores"])

    def log(self) -> str:
        return self._log.read_text(errors="replace")


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    """Start a server that does not outlive the test."""
    servers: list[Server] = []

    def start(program: Program, store: str = f"sqlite:///{tmp_path / 'locks.db'}", *, preload: bool) -> Server:
        servers.append(Server(program, store, tmp_path, preload=preload))
        wait_until(servers[0].answers, what="the server answers", within=LIMIT)
        return servers[0]

    yield start
    for server in servers:
        with suppress(ProcessLookupError):  # its workers, too
            os.killpg(server.process.pid, signal.SIGKILL)
        server.process.wait()


@pytest.mark.parametrize(("program", "preload"), [(gunicorn, True), (gunicorn, False), (uwsgi, False)])
def test_workers_take_turns_and_leave_nothing_behind(program: Program, preload: bool, start):
    check_turns_and_end(start(program, preload=preload), preload=preload)


@pytest.mark.slow
def test_so_do_workers_that_were_forked_in_c_with_an_open_client(start, redis_server: RedisServer):
    """Python runs no hook for a fork, so only the kernel tells the worker that the client is its parent's."""
    check_turns_and_end(start(uwsgi, redis_server.url, preload=True), preload=True)


def test_a_file_that_was_open_during_a_fork_in_c_is_refused_with_a_sentence(start):
    server = start(uwsgi, preload=True)
    with pytest.raises(requests.ConnectionError):  # uWSGI answers nothing where the application raises
        server.ask("turn")
    assert "this process was forked while the file was open" in server.log()
    assert "lazy-apps = true" in server.log()


def check_turns_and_end(server: Server, *, preload: bool) -> None:
    with connect(server.store) as locks:
        answers: list[str] = []
        with ThreadPoolExecutor(8) as pool:
            # On a busy machine one worker has thousands of turns before the other one is loaded.
            until = time.monotonic() + LIMIT
            while len(set(answers)) < 2:  # until both workers have had turns
                assert time.monotonic() < until, f"only one worker answers: {server.log()}"
                answers += pool.map(server.ask, ["turn"] * 16)
        events = [line.split() for line in server.turns.read_text().splitlines()]
        tokens = [int(token) for what, token in events if what == "in"]
        assert tokens == sorted(set(tokens))
        assert events == [[what, str(token)] for token in tokens for what in ("in", "out")]

        before_the_fork = locks.inspect("the parent's")
        if preload:
            assert server.ask("parent") == "held: False, closed"
            assert before_the_fork is not None, "a worker released what its parent holds"
        else:
            assert before_the_fork is None

        server.ask("keep")
        assert locks.lock("kept").locked()
        wait_until(server.idle, what="the requests are over", within=LIMIT)
        server.process.terminate()
        assert server.process.wait(LIMIT) == 0, server.log()
        assert locks.inspect("kept") is None, server.log()
        if server.program is gunicorn:  # uWSGI's master ends without the functions of atexit
            assert locks.inspect("the parent's") is None
        assert "Traceback" not in server.log()
