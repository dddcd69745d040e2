"""Listing, revoking and watching: what an operator types, which store is meant, and what each answers."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from command_line import Fencing
from on_stores import OnEtcd, OnMysql, OnPostgresql, OnRedis, OnRedisQuorum, OnZooKeeper
from rich.cells import cell_len
from store_bench import StoreBench
from terminal import Open, at_a_terminal

from fencing_sdk import ConfigurationError, LeaseLostError, LockClient, LossReason, connect
from fencing_sdk.sync import connect as connect_sync

pytest_plugins = ["etcd_fixtures", "mysql_fixtures", "postgresql_fixtures", "redis_fixtures", "zookeeper_fixtures"]


# `fencing ls`, `show` and `break`, as a person and as a script use them.


__all__ = ["at_a_terminal"]


@pytest.fixture
async def locks(fencing: Fencing) -> AsyncIterator[LockClient]:
    fencing.environment["FENCING_URL"] = f"sqlite:///{fencing.folder}/locks.db"
    async with connect(fencing.environment["FENCING_URL"]) as client:
        yield client


async def test_ls_prints_a_row_for_each_holder_on_80_columns(fencing: Fencing, locks: LockClient):
    async with locks.lock("report/7", label="worker 3") as lease, locks.lock("seats/1", label=""):
        done = await asyncio.to_thread(fencing, "ls")
        assert (done.returncode, done.stderr) == (0, "")
        head, row, other = done.stdout.splitlines()
        assert head.split() == ["NAME", "HOLDER", "TOKEN", "HELD", "LEFT", "WAIT", "LABEL"]
        assert row.split()[:3] == ["report/7", lease.holder, str(lease.token)]
        assert row.rstrip().endswith("worker 3")
        assert other.startswith("seats/1 ")
        assert max(map(len, done.stdout.splitlines())) <= 80
        chosen = await asyncio.to_thread(fencing, "ls", "seats/*")
        assert [line.split()[0] for line in chosen.stdout.splitlines()] == ["NAME", "seats/1"]
        few = await asyncio.to_thread(fencing, "ls", "--limit", "1")
        assert len(few.stdout.splitlines()) == 2
        assert "there are more than these 1" in few.stderr


async def test_at_a_terminal_long_names_are_folded_and_long_labels_are_cut(
    at_a_terminal: Open, fencing: Fencing, locks: LockClient
):
    about = json.dumps({"host": "worker-3.eu-west.example", "pid": 4711, "command": "report", "start": "2026-11-23"})
    name = "tenants/" + "0123456789" * 5
    async with locks.lock("nightly", label=about) as lease, locks.lock(name, label=about):
        terminal = at_a_terminal("ls")
        assert await asyncio.to_thread(terminal.ends) == 0
        lines = plain(terminal.seen + terminal.rest()).splitlines()
        assert max(map(len, lines)) <= 80
        assert lines[1].split()[:3] == ["nightly", lease.holder, str(lease.token)]
        assert lines[1].rstrip().endswith("…")
        assert "".join(line[:16].strip() for line in lines[2:]).startswith("tenants/01")
        assert "".join(line.split()[0] for line in lines[2:]) == name


@pytest.mark.parametrize("forced", [{}, {"FORCE_COLOR": "1"}, {"TTY_COMPATIBLE": "1"}], ids=str)
async def test_in_a_pipe_each_holder_has_one_line_with_the_whole_name(
    fencing: Fencing, locks: LockClient, forced: dict[str, str]
):
    """Also where Rich takes the pipe for a terminal, as the systems of CI ask for."""
    fencing.environment |= forced
    name, about = "tenants/" + "0123456789" * 20, "worker 3, " * 20
    async with locks.lock("nightly") as lease, locks.lock(name, label=about) as other:
        done = await asyncio.to_thread(fencing, "ls")
        _, short, long = done.stdout.splitlines()
        assert short.split()[:3] == ["nightly", lease.holder, str(lease.token)]
        assert long.split()[:3] == [name, other.holder, str(other.token)]
        assert long.rstrip().endswith(about.rstrip())


async def test_in_a_pipe_one_long_text_makes_no_other_line_longer(fencing: Fencing, locks: LockClient):
    name, about = "z" * 500, "x" * 1000
    async with (
        locks.lock("a/7", label="") as a,
        locks.lock("b/日本", label="1") as b,
        locks.lock(name, label=about),
    ):
        lines = (await asyncio.to_thread(fencing, "ls")).stdout.splitlines()
        assert lines[3].startswith(f"{name}  ")
        assert lines[3].endswith(f"  {about}")
        assert [line for line in lines if line.endswith(" ")] == []
        assert max(map(len, lines[:3])) < 150
        before = [line.partition(lease.holder)[0] for line, lease in zip(lines[1:3], (a, b), strict=True)]
        assert cell_len(before[0]) == cell_len(before[1]) == lines[0].index("HOLDER")


async def test_ls_tells_when_nothing_is_held(fencing: Fencing, locks: LockClient):
    done = await asyncio.to_thread(fencing, "ls", "report/*")
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr == "fencing: no held lock matches 'report/*'\n"


async def test_ls_and_show_as_json_are_objects_with_seconds(fencing: Fencing, locks: LockClient):
    async with locks.lock("report/7", label="worker 3") as lease:
        waiter = asyncio.create_task(locks.lock("report/7").acquire())
        while not await locks.waiters("report/7"):  # noqa: ASYNC110  (it is in the store)
            await asyncio.sleep(0.01)
        (line,) = (await asyncio.to_thread(fencing, "ls", "--json")).stdout.splitlines()
        row = json.loads(line)
        assert (row["name"], row["token"], row["holder"]) == ("report/7", lease.token, lease.holder)
        assert (row["mode"], row["permit"], row["label"]) == ("lock", None, "worker 3")
        assert 0 < row["remaining"] <= 15
        shown = json.loads((await asyncio.to_thread(fencing, "show", "report/7", "--json")).stdout)
        assert [holder["token"] for holder in shown["holders"]] == [lease.token]
        assert len(shown["waiting"]) == 1
        heard = (await asyncio.to_thread(fencing, "show", "report/7")).stdout
        assert "worker 3" in heard
        assert f"waiter 1  {shown['waiting'][0]['holder']}" in heard
        waiter.cancel()
        await asyncio.wait([waiter])


async def test_a_text_of_others_cannot_move_the_cursor(fencing: Fencing, locks: LockClient):
    async with locks.lock("[bold]a", label="\x1b[2Jgone\nnext"):
        for command in (["ls"], ["show", "[bold]a"]):
            heard = (await asyncio.to_thread(fencing, *command)).stdout
            assert "\x1b" not in heard
            assert "[bold]a" in heard


async def test_show_tells_that_a_lock_is_free(fencing: Fencing, locks: LockClient):
    done = await asyncio.to_thread(fencing, "show", "report/7")
    assert (done.returncode, done.stdout) == (0, "report/7\n  free\n")


async def test_break_cancels_the_holder_who_reads_the_reason(fencing: Fencing, locks: LockClient):
    async def work() -> None:
        async with locks.lock("report/7"):
            await asyncio.Event().wait()

    working = asyncio.create_task(work())
    while (holder := await locks.inspect("report/7")) is None:  # noqa: ASYNC110  (as above)
        await asyncio.sleep(0.01)
    done = await asyncio.to_thread(fencing, "break", "report/7", "--reason", "it hangs", "--yes")
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr == f"fencing: 'report/7' was taken away from {holder.id} (token {holder.token})\n"
    with pytest.raises(LeaseLostError, match="it hangs"):
        await working
    again = await asyncio.to_thread(fencing, "break", "report/7", "--reason", "it hangs", "--yes", "--json")
    assert (again.returncode, json.loads(again.stdout)["broken"]) == (1, False)


async def test_break_with_a_token_hits_no_other_holder(fencing: Fencing, locks: LockClient):
    former = await locks.lock("report/7").acquire()
    token = int(former.token)
    await former.release()
    async with locks.lock("report/7") as lease:
        done = await asyncio.to_thread(
            fencing, "break", "report/7", "--reason", "it hangs", "--yes", "--token", str(token)
        )
        assert done.returncode == 1
        assert "is not held with token" in done.stderr
        await lease.renew()


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["break", "a", "--reason", "x"], "there is no terminal here; add --yes"),
        (["break", "a", "--yes"], "reason"),
        (["break", "a", "--yes", "--reason", ""], "reason must be"),
        (["break", "a", "--yes", "--reason", "x", "--token", "-1"], "token"),
        (["ls", "--limit", "-1"], "--limit must be"),
        (["ls", ""], "pattern must not be empty"),
        (["show", ""], "name must not be empty"),
        (["ls", "--url", "memory://"], "work only inside one process"),
    ],
)
def test_what_cannot_work_is_wrong_usage(fencing: Fencing, arguments: list[str], problem: str):
    done = fencing(*arguments)
    assert done.returncode == 2
    assert problem in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "url"),
    [
        (["ls"], "redis://user:secret@127.0.0.1:1"),
        (["show", "a"], "redis://user:secret@127.0.0.1:1"),
        (["break", "a", "--reason", "x", "--yes"], "redis://user:secret@127.0.0.1:1"),
        (["ls"], "kahuna://127.0.0.1:1"),
        (["show", "a"], "mysql://user:secret@127.0.0.1:1/app"),
    ],
)
def test_a_store_that_does_not_answer_is_told_on_one_line(fencing: Fencing, command: list[str], url: str):
    done = fencing(*command, "--url", url)
    assert done.returncode == 69
    assert len(done.stderr.splitlines()) == 1
    assert "secret" not in done.stderr


async def test_break_asks_at_a_terminal_and_no_is_the_default(at_a_terminal: Open, locks: LockClient):
    lease = await locks.lock("report/7", label="worker 3").acquire()
    terminal = at_a_terminal("break", "report/7", "--reason", "it hangs")
    await asyncio.to_thread(terminal.shows, "Take it away? [y/N]")
    assert "worker 3" in terminal.seen
    assert "cancelled with: revoked: it hangs" in terminal.seen
    terminal.type("\n")
    assert await asyncio.to_thread(terminal.ends) == 1
    await lease.renew()
    terminal = at_a_terminal("break", "report/7", "--reason", "it hangs")
    await asyncio.to_thread(terminal.shows, "Take it away? [y/N]")
    terminal.type("y\n")
    assert await asyncio.to_thread(terminal.ends) == 0
    assert await locks.inspect("report/7") is None
    with pytest.raises(LeaseLostError):
        await lease.renew()


async def test_break_that_is_interrupted_at_the_question_ends_at_once_and_takes_nothing_away(
    at_a_terminal: Open, locks: LockClient
):
    lease = await locks.lock("report/7").acquire()
    terminal = at_a_terminal("break", "report/7", "--reason", "it hangs")
    await asyncio.to_thread(terminal.shows, "Take it away? [y/N]")
    terminal.type("\x03")
    assert await asyncio.to_thread(terminal.ends) == 130
    assert "nothing was done" in terminal.rest()
    await lease.renew()
    await lease.release()


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)


# `fencing ls`, `show` and `break` on every real store.


NAME = "report-1"


class OperatorSuite:
    lines = True
    """False where the store knows no waiters."""

    @pytest.mark.slow
    async def test_an_operator_finds_a_lock_and_takes_it_away(self, fencing: Fencing, bench: StoreBench):
        fencing.environment["FENCING_URL"] = bench.url

        async def ask(*arguments: str) -> str:
            done = await asyncio.to_thread(fencing, *arguments)
            assert (done.returncode, done.stderr.count("\n")) == (0, 0 if "--json" in arguments else 1)
            return done.stdout

        async with connect(bench.url) as locks:
            lease = await locks.lock(NAME, ttl=15, label="worker 3").acquire()
            waiter = asyncio.create_task(locks.lock(NAME, ttl=15).acquire())
            await bench.waiting(NAME, 1)
            row = json.loads(await ask("ls", "report-*", "--json"))
            assert (row["name"], row["token"], row["label"]) == (NAME, lease.token, "worker 3")
            shown = json.loads(await ask("show", NAME, "--json"))
            assert (len(shown["holders"]), len(shown["waiting"] or ())) == (1, int(self.lines))
            await ask("break", NAME, "--reason", "it hangs", "--yes")
            following = await asyncio.wait_for(waiter, 30)
            assert not self.lines or following.holder == shown["waiting"][0]["holder"]
            assert following.token > row["token"]
            await asyncio.wait_for(lease.wait_lost(), 30)
            with pytest.raises(LeaseLostError) as lost:
                lease.check()
            assert (lost.value.reason, lost.value.detail) == (LossReason.REVOKED, "it hangs")
            await following.release()


class TestRedis(OnRedis, OperatorSuite): ...


class TestRedisQuorum(OnRedisQuorum, OperatorSuite):
    lines = False


class TestPostgresql(OnPostgresql, OperatorSuite): ...


class TestMysql(OnMysql, OperatorSuite): ...


class TestEtcd(OnEtcd, OperatorSuite): ...


class TestZooKeeper(OnZooKeeper, OperatorSuite): ...


# Which store a command uses: nobody locks a machine for itself by mistake, and a password stays where it was put.


PROGRAM = f"{sys.executable} -m fencing_sdk"
PAGES = Path(__file__).parent.parent.parent / "docs"
CRON = re.compile(r"^(?:[\d*/,-]+ +){5}.*fencing run", re.MULTILINE)
SECRET = "redis://app:hunter2@locks.example"


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        ("run", "job", "--quiet", "--", "true"),
        ("ls",),
        ("ls", "--json"),
        ("show", "job"),
        ("show", "job", "--json"),
        ("break", "job", "--reason", "it hangs", "--yes"),
        ("doctor", "--for", "100ms"),
    ],
    ids=" ".join,
)
def test_a_command_that_falls_back_to_the_file_of_its_user_names_it_first(fencing: Fencing, command: tuple[str, ...]):
    fencing.environment["FENCING_URL"] = ""  # as an unset variable in a unit of systemd
    done = fencing(*command)
    first, *_ = done.stderr.splitlines()
    assert first.startswith("fencing: no store is named by --url, --url-file, FENCING_URL or FENCING_URL_FILE: ")
    assert first.endswith(f"on this machine alone, in sqlite:///{fencing.state}/fencing/locks.db")
    assert "no store is named" not in done.stdout
    if "--json" in command:
        assert all(json.loads(line) for line in done.stdout.splitlines())
    named = fencing(*command, "--url", first.rpartition(" ")[2]) if command[0] != "run" else None
    assert named is None or "no store is named" not in named.stderr


def test_every_crontab_of_the_pages_names_a_store():
    blocks = [
        (page.name, block)
        for page in PAGES.rglob("*.md")
        for block in page.read_text().split("```")[1::2]
        if CRON.search(block)
    ]
    assert {"cli.md", "jobs.md"} <= {page for page, _ in blocks}
    assert [page for page, block in blocks if not re.search(r"^FENCING_URL(_FILE)?=", block, re.MULTILINE)] == []


# A file for the URL.


def url_file(fencing: Fencing, content: bytes, mode: int = 0o600) -> str:
    path = fencing.path("url")
    path.write_bytes(content)
    path.chmod(mode)
    return str(path)


@pytest.mark.slow
@pytest.mark.parametrize("content", [b"%s", b"%s\n", b"\xef\xbb\xbf%s\r\n\n"], ids=["bare", "a line", "as on Windows"])
def test_a_file_names_the_store(fencing: Fencing, content: bytes):
    url = fencing.environment.pop("FENCING_URL")
    fencing.environment["FENCING_URL_FILE"] = url_file(fencing, content % url.encode())
    for options in ((), ("--url-file", "url")):
        done = fencing("run", "job", *options, "--", "true")
        assert (done.returncode, done.stderr) == (0, "")
        fencing.store.unlink()  # it was there
        fencing.environment.pop("FENCING_URL_FILE", None)


@pytest.mark.parametrize("connecting", [connect, connect_sync])
def test_a_client_finds_the_store_as_a_command_does(
    fencing: Fencing, monkeypatch: pytest.MonkeyPatch, connecting: type
):
    monkeypatch.delenv("FENCING_URL", raising=False)
    monkeypatch.setenv("FENCING_URL_FILE", url_file(fencing, b"nosuch://store"))
    with pytest.raises(ConfigurationError, match="no backend for 'nosuch' URLs"):
        connecting()
    monkeypatch.setenv("FENCING_URL", "memory://")
    with pytest.raises(ConfigurationError, match="FENCING_URL and FENCING_URL_FILE both name a store; unset one"):
        connecting()


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "is empty"),
        (b" \n", "is empty"),
        (f"{SECRET}\n{SECRET}\n".encode(), "has 2 lines"),
        (SECRET.encode("utf-16"), "is not UTF-8"),
        (None, "cannot be read: Is a directory"),
    ],
)
@pytest.mark.parametrize("by_option", [True, False], ids=["option", "environment"])
def test_a_file_that_names_no_store_is_an_error_that_repeats_none_of_it(
    fencing: Fencing, content: bytes | None, problem: str, by_option: bool
):
    del fencing.environment["FENCING_URL"]
    path = str(fencing.folder) if content is None else url_file(fencing, content)
    if not by_option:
        fencing.environment["FENCING_URL_FILE"] = path
    done = fencing("ls", *(("--url-file", path) if by_option else ()))
    assert done.returncode == 2
    assert re.match(rf"fencing: {'--url-file' if by_option else 'FENCING_URL_FILE'} '.*' {problem}", done.stderr)
    assert len(done.stderr.splitlines()) == 1
    assert "hunter2" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "url", "warned"),
    [
        (0o644, SECRET, True),
        (0o604, "sqlite:///locks.db?password=hunter2", True),
        (0o640, SECRET, False),
        (0o644, "redis://locks.example", False),
        (0o644, "postgresql://app@locks.example/app", False),
    ],
)
def test_a_password_that_every_user_may_read_is_a_warning(
    fencing: Fencing,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    mode: int,
    url: str,
    warned: bool,
):
    """No error: the secrets of Kubernetes and of Docker have such modes by default."""
    done = fencing("init", "--sql", "--url-file", url_file(fencing, url.encode(), mode))
    assert ("has a password that every user of this machine may read; run: chmod" in done.stderr) is warned
    monkeypatch.delenv("FENCING_URL", raising=False)
    monkeypatch.setenv("FENCING_URL_FILE", "url")
    monkeypatch.chdir(fencing.folder)
    if "password=" not in url:
        connect()
        assert ("may read" in caplog.text) is warned
    assert "hunter2" not in done.stderr + caplog.text


# What the command learns of it.

ENVIRONMENT = ("--", "env")
PATIENTLY = ("--wait", "60s")  # on a busy machine the run before may leave its lock to the ttl


def variables(out: str) -> dict[str, str]:
    return dict(line.split("=", 1) for line in out.splitlines() if line.startswith("FENCING_"))


@pytest.mark.slow
def test_the_command_learns_no_url_unless_it_is_asked_for(fencing: Fencing):
    url = fencing.environment["FENCING_URL"]
    path = url_file(fencing, url.encode())
    for options in ((), ("--url", url), ("--url-file", path)):
        found = variables(fencing("run", "job", *PATIENTLY, *options, *ENVIRONMENT).stdout)
        assert not {"FENCING_URL", "FENCING_URL_FILE"} & set(found)
    for options, name, value in (
        ((), "FENCING_URL", url),
        (("--url", url), "FENCING_URL", url),
        (("--url-file", "url"), "FENCING_URL_FILE", path),  # whatever folder it goes to
    ):
        found = variables(fencing("run", "job", "--pass-url", *PATIENTLY, *options, *ENVIRONMENT).stdout)
        assert {key: found[key] for key in found if "URL" in key or "STORE" in key} == {name: value}


def test_a_url_that_came_through_a_pipe_is_passed_itself(fencing: Fencing):
    """As in: fencing run job --url-file <(pass show locks)."""
    url = fencing.environment.pop("FENCING_URL")
    reading, writing = os.pipe()
    os.write(writing, url.encode())
    os.close(writing)
    options = ("--url-file", f"/dev/fd/{reading}", "--pass-url")
    done = fencing("run", "job", *options, *ENVIRONMENT, pass_fds=(reading,))
    os.close(reading)
    assert variables(done.stdout)["FENCING_URL"] == url


@pytest.mark.slow
def test_a_command_that_is_kept_from_the_store_does_not_take_another_one(fencing: Fencing):
    """It would lock this machine for itself."""
    inner = (
        f"{PROGRAM} run other -- touch ran; {PROGRAM} ls; {sys.executable} -c 'import fencing_sdk as f; f.connect()'"
    )
    done = fencing("run", "job", "--", "sh", "-c", inner)
    assert done.returncode != 0
    assert done.stderr.count("does not pass the URL of its store on; add --pass-url to it, or name a store here") == 3
    assert not fencing.state.exists()
    assert not fencing.path("ran").exists()
    named = f"{PROGRAM} run other --url sqlite:///other.db -- touch ran"
    assert fencing("run", "job", "--", "sh", "-c", named).returncode == 0
    passed = fencing("run", "job", "--pass-url", "--", *f"{PROGRAM} ls".split())
    assert passed.stdout.splitlines()[1].startswith("job ")


@pytest.mark.slow
@pytest.mark.parametrize("named", [True, False])
def test_a_command_within_a_command_uses_the_same_store(fencing: Fencing, named: bool):
    if not named:
        del fencing.environment["FENCING_URL"]
    inner = (*PROGRAM.split(), "run", "job", "--wait", "forever", "--", "true")
    done = fencing("run", "job", *(("--pass-url",) if named else ()), "--", *inner)
    assert done.returncode == 2
    assert "'job' is held by the fencing run around this one" in done.stderr
