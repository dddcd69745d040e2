"""
Every command for operators at a store that is down, hangs, is slow or read-only, or refuses the user.

Each ends with its exit code and one sentence that says why. A user that may only look sees what is held. The rights of
this user are those of docs/operations.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import pytest
from command_line import Exit, run_app
from etcd_server import EtcdCluster, b64
from local_ports import HOST
from on_stores import OnEtcd, OnMysql, OnPostgresql, OnRedis, OnZooKeeper
from permissions import without_power_over_permissions
from store_bench import EtcdBench, MysqlBench, PostgresqlBench, RedisBench, StoreBench, ZooKeeperBench

from fencing_sdk import Lease, connect
from fencing_sdk.cli.doctor import Health

if TYPE_CHECKING:
    from postgresql_fixtures import StartPostgresql

pytest_plugins = ["etcd_fixtures", "mysql_fixtures", "postgresql_fixtures", "redis_fixtures", "zookeeper_fixtures"]

NAME = "report-1"
PASSWORD = "hunter2"
LOOKING = (["ls"], ["ls", "--json"], ["show", NAME, "--json"])
BREAKING = ["break", NAME, "--reason", "it hangs", "--yes"]
OPERATIONS = Path(__file__).parents[2] / "docs" / "operations.md"


class Done(NamedTuple):
    code: int
    out: str
    err: str


Run = Callable[..., Done]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run a command in this process; whatever becomes of it, it prints no traceback and no password."""
    monkeypatch.chdir(tmp_path)

    def run_it(url: str, *arguments: str) -> Done:
        code = run_app([*arguments, "--url", url])
        done = Done(code, *capsys.readouterr())
        assert "Traceback" not in done.out + done.err
        assert PASSWORD not in done.out + done.err
        return done

    return run_it


def refuses(run: Run, url: str, sentence: str, *commands: Sequence[str]) -> None:
    for command in commands:
        done = run(url, *command)
        assert (done.code, done.out) == (Exit.UNAVAILABLE, ""), command
        assert re.fullmatch(f"fencing: .*(?:{sentence}).*\n", done.err), (command, done.err)


def diagnoses(run: Run, url: str, sentence: str) -> None:
    done = run(url, "doctor", "--for", "0", "--json")
    assert (done.code, done.err) == (Health.ERRORS, "")
    findings = json.loads(done.out)["findings"]
    heard = [found["check"] for found in findings if re.search(sentence, found["what"])]
    assert {found["check"] for found in findings if found["severity"] == "error"}.intersection(heard), findings
    assert "store.renewals" not in heard  # where no lock can be taken, no renewal has failed
    assert all(found["fix"] for found in findings)


def looks(run: Run, url: str, lease: Lease) -> None:
    table, lines, shown = (run(url, *command) for command in LOOKING)
    assert {(each.code, each.err) for each in (table, lines, shown)} == {(0, "")}
    assert lease.holder in table.out
    assert json.loads(lines.out)["token"] == lease.token
    assert [holder["token"] for holder in json.loads(shown.out)["holders"]] == [lease.token]


def block_after(text: str) -> str:
    """The first block of code behind *text* on the page for operators."""
    return OPERATIONS.read_text().split(f"\n{text}")[1].split("```")[1].partition("\n")[2]


class BrokenStoreSuite:
    """Each store brings `FAULTS`, by name: a context that has the URL to ask, and what the sentence says."""

    FAULTS: ClassVar[dict[str, tuple[Callable[..., AbstractContextManager[str]], str]]]
    DENIED: ClassVar[str]
    """What a user is told who may only look, and breaks a lock."""

    @pytest.fixture
    async def lease(self, bench: StoreBench) -> AsyncIterator[Lease]:
        """A lock that is held, and still is when the fault is over."""
        async with connect(bench.url) as locks:
            lease = await locks.lock(NAME, ttl=60, label="worker 3").acquire()
            yield lease
            await lease.renew()
            await lease.release()

    async def test_each_fault_is_told_in_a_sentence(self, bench: StoreBench, lease: Lease, run: Run):
        for fault, sentence in self.FAULTS.values():
            with fault(bench) as url:
                await asyncio.to_thread(refuses, run, url, sentence, *LOOKING[1:], [*BREAKING, "--json"])
                await asyncio.to_thread(diagnoses, run, url, sentence)

    async def test_a_viewer_sees_what_is_held_and_breaks_nothing(self, bench: StoreBench, lease: Lease, run: Run):
        with self.viewer(bench) as url:
            await asyncio.to_thread(looks, run, url, lease)
            await asyncio.to_thread(refuses, run, url, self.DENIED, BREAKING)
            await asyncio.to_thread(diagnoses, run, url, self.DENIED)

    async def test_a_slow_store_is_waited_for(self, bench: StoreBench, lease: Lease, run: Run):
        bench.proxy.delay(replies=0.05)
        await asyncio.to_thread(looks, run, bench.by_proxy, lease)

    async def test_a_store_that_hangs_ends_the_command(self, bench: StoreBench, lease: Lease, run: Run):
        bench.pause()
        try:
            url = bench.url.partition("?")[0]
            await asyncio.to_thread(refuses, run, url, "no answer|no connection", BREAKING)
        finally:
            bench.resume()

    def viewer(self, bench: StoreBench) -> AbstractContextManager[str]:
        raise NotImplementedError


def as_user(url: str, user: str, password: str = PASSWORD) -> str:
    return url.replace("://", f"://{user}:{password}@")


def down(scheme: str, path: str = "") -> Callable[[StoreBench], AbstractContextManager[str]]:
    @contextlib.contextmanager
    def nothing_listens(_bench: StoreBench) -> Iterator[str]:
        with socket.socket() as taken:  # bound, and not listening
            taken.bind((HOST, 0))
            yield f"{scheme}://app:{PASSWORD}@{HOST}:{taken.getsockname()[1]}{path}"

    return nothing_listens


def wrong_login(bench: StoreBench) -> AbstractContextManager[str]:
    return contextlib.nullcontext(as_user(without_login(bench), "other"))


def without_login(bench: StoreBench) -> str:
    scheme, _, rest = bench.url.partition("://")
    return f"{scheme}://{rest.rpartition('@')[2]}"


def redis_user(*rules: str) -> Callable[[RedisBench], AbstractContextManager[str]]:
    @contextlib.contextmanager
    def with_rules(bench: RedisBench) -> Iterator[str]:
        bench.server.ask("ACL", "SETUSER", "viewer", "reset", "on", f">{PASSWORD}", *rules)
        yield as_user(bench.url, "viewer")
        bench.server.ask("ACL", "DELUSER", "viewer")

    return with_rules


@contextlib.contextmanager
def redis_replica(bench: RedisBench) -> Iterator[str]:
    bench.server.ask("REPLICAOF", HOST, 1)
    try:
        yield bench.url
    finally:  # the server is shared by all tests of this process
        bench.server.ask("REPLICAOF", "NO", "ONE")


class TestRedis(OnRedis, BrokenStoreSuite):
    FAULTS: ClassVar = {
        "down": (down("redis"), "Connection refused"),
        "wrong password": (wrong_login, "wrong user or password"),
        "no scripts": (redis_user("~*", "&*", "+@all", "-@scripting"), "the user may not run 'evalsha(_ro)?'"),
        "other keys": (redis_user("~other:*", "&*", "+@all"), "the user may not use a command or a key"),
        "replica": (redis_replica, "is a replica, not a master, and grants no locks"),
    }
    DENIED = "the user may not (?:use a command or a key|run 'evalsha')"

    def viewer(self, bench: RedisBench) -> AbstractContextManager[str]:
        rules = block_after("On Redis").split()
        assert rules[:4] == ["user", "viewer", "on", ">..."]
        return redis_user(*rules[4:])(bench)


def postgresql_role(*statements: str) -> Callable[[PostgresqlBench], AbstractContextManager[str]]:
    @contextlib.contextmanager
    def with_rights(bench: PostgresqlBench) -> Iterator[str]:
        for statement in statements:
            bench.server.ask(statement)
        yield bench.server.url_as("viewer", PASSWORD)
        bench.server.ask("DROP OWNED BY viewer")
        bench.server.ask("DROP ROLE viewer")

    return with_rights


WRITER = (
    "CREATE ROLE viewer LOGIN",
    "GRANT USAGE ON SCHEMA fencing TO viewer",
    "GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA fencing TO viewer",
)


class TestPostgresql(OnPostgresql, BrokenStoreSuite):
    FAULTS: ClassVar = {
        "down": (down("postgresql"), "no connection|refused"),
        "no rights": (postgresql_role("CREATE ROLE viewer LOGIN"), "the role lacks a permission: USAGE on the schema"),
        "read-only": (
            postgresql_role(*WRITER, "ALTER ROLE viewer SET default_transaction_read_only = on"),
            "default_transaction_read_only is on",
        ),
    }
    DENIED = "the role lacks a permission: USAGE on the schema"

    def viewer(self, bench: PostgresqlBench) -> AbstractContextManager[str]:
        return postgresql_role(*filter(str.strip, block_after("On PostgreSQL:").split(";")))(bench)


def mysql_user(*statements: str) -> Callable[[MysqlBench], AbstractContextManager[str]]:
    @contextlib.contextmanager
    def with_rights(bench: MysqlBench) -> Iterator[str]:
        for statement in ("CREATE USER viewer", f"ALTER USER viewer IDENTIFIED BY '{PASSWORD}'", *statements):
            bench.server.ask(statement.replace("app.*", f"{bench.server.database}.*"))
        yield mysql_login(bench)
        bench.server.ask("DROP USER viewer")

    return with_rights


def mysql_login(bench: MysqlBench) -> str:
    """By the socket, through which MySQL needs no TLS for a password."""
    return f"mysql://viewer:{PASSWORD}@/{bench.server.database}?unix_socket={bench.server.socket}"


@contextlib.contextmanager
def mysql_read_only(bench: MysqlBench) -> Iterator[str]:
    bench.server.ask("SET GLOBAL read_only = ON")
    try:
        yield bench.url
    finally:  # the server is shared by all tests of this process
        bench.server.ask("SET GLOBAL read_only = OFF")


class TestMysql(OnMysql, BrokenStoreSuite):
    FAULTS: ClassVar = {
        "down": (down("mysql", "/app"), "Connection refused"),
        "wrong password": (lambda bench: contextlib.nullcontext(mysql_login(bench)), "wrong user or password"),
        "no rights": (mysql_user(), "the user has no right to use it"),
        "read-only": (mysql_read_only, "the server is read-only: read_only is on; is it a replica[?]"),
    }
    DENIED = "the user lacks a right: SELECT, INSERT, UPDATE and DELETE on the tables"

    def viewer(self, bench: MysqlBench) -> AbstractContextManager[str]:
        create, *rights = filter(None, map(str.strip, block_after("On MySQL and MariaDB:").split(";")))
        assert create == "CREATE USER viewer"
        return mysql_user(*rights)(bench)


@pytest.fixture(scope="module")
def _shared_etcd(etcd_binary: str) -> Iterator[EtcdCluster]:
    """A server with users, whose passwords cost it little."""
    with EtcdCluster(bcrypt_cost=4) as cluster:
        cluster.enable_auth(user="app", password=PASSWORD)
        yield cluster


def etcd_user(permission: str = "", prefix: str = "") -> Callable[[EtcdBench], AbstractContextManager[str]]:
    @contextlib.contextmanager
    def with_role(bench: EtcdBench) -> Iterator[str]:
        ask = bench.cluster.ask
        ask("auth/user/add", {"name": "viewer", "password": PASSWORD})
        ask("auth/role/add", {"name": "viewer"})
        if permission:
            keys = {"key": b64(prefix), "range_end": b64(prefix[:-1] + chr(ord(prefix[-1]) + 1))}
            ask("auth/role/grant", {"name": "viewer", "perm": {"permType": permission, **keys}})
        ask("auth/user/grant", {"user": "viewer", "role": "viewer"})
        yield as_user(without_login(bench), "viewer")
        ask("auth/user/delete", {"name": "viewer"})
        ask("auth/role/delete", {"role": "viewer"})

    return with_role


class TestEtcd(OnEtcd, BrokenStoreSuite):
    FAULTS: ClassVar = {
        "down": (down("etcd"), "no connection|refused|no answer"),
        "wrong password": (wrong_login, "wrong user or password"),
        "no login": (lambda bench: contextlib.nullcontext(without_login(bench)), "wants a user and a password"),
        "no rights": (etcd_user(), "the user may not read and write the keys"),
    }
    DENIED = "the user may not read and write the keys"

    @pytest.fixture(autouse=True)
    def _logged_in(self, bench: EtcdBench) -> None:
        bench.url = as_user(bench.url, "app")
        bench.by_proxy = as_user(f"{bench.by_proxy}?connect_timeout=20", "app")

    def viewer(self, bench: EtcdBench) -> AbstractContextManager[str]:
        granted = re.search("grant-permission viewer (.*) --prefix=true (.*)", block_after("On etcd:"))
        assert granted
        return etcd_user(granted[1].upper(), granted[2])(bench)


class TestZooKeeper(OnZooKeeper, BrokenStoreSuite):
    FAULTS: ClassVar = {
        "down": (down("zk"), "no connection"),
        "wrong login": (wrong_login, "the login has no right"),
        "no login": (lambda bench: contextlib.nullcontext(without_login(bench)), "the login has no right"),
    }
    test_a_viewer_sees_what_is_held_and_breaks_nothing = None  # the nodes belong to the login that made them

    @pytest.fixture(autouse=True)
    def _logged_in(self, bench: ZooKeeperBench) -> None:
        bench.url = as_user(f"{bench.url}?connect_timeout=20", "app")  # a machine may stand still
        bench.by_proxy = as_user(f"{bench.by_proxy}?connect_timeout=20", "app")


READ_ONLY = "no permission to (read and write|write into)"


@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        ("folder", "is not a file; name a file in a folder"),
        ("text.db", "not an SQLite database"),
        ("none/locks.db", "the folder .* does not exist; create it"),
    ],
)
def test_a_path_that_is_no_sqlite_file_is_told(run: Run, tmp_path: Path, path: str, sentence: str):
    (tmp_path / "folder").mkdir()
    (tmp_path / "text.db").write_text("no database at all, but text\n" * 100)
    refuses(run, f"sqlite:///{tmp_path}/{path}", sentence, *LOOKING, BREAKING)
    diagnoses(run, f"sqlite:///{tmp_path}/{path}", sentence)


@pytest.mark.parametrize(("name", "mode"), [("locks.db", 0o444), ("", 0o555)], ids=["file", "folder"])
def test_an_sqlite_file_or_folder_that_is_read_only_is_told(run: Run, tmp_path: Path, name: str, mode: int):
    folder = tmp_path / "store"
    folder.mkdir()
    url = f"sqlite:///{folder}/locks.db"
    assert run(url, "ls").code == 0
    (folder / name).chmod(mode)
    without_power_over_permissions(lambda: refuses(run, url, READ_ONLY, *LOOKING, BREAKING))
    without_power_over_permissions(lambda: diagnoses(run, url, READ_ONLY))
    folder.chmod(0o755)


def test_a_standby_of_postgresql_is_told(run: Run, start_postgresql: StartPostgresql):
    server = start_postgresql()
    server.stop()
    (server.data / "standby.signal").touch()
    server.start()
    refuses(run, server.url, "standby", *LOOKING, BREAKING)
    diagnoses(run, server.url, "standby")
