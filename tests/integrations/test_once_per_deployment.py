"""The examples of *Once per deployment* when their processes are killed, stopped or frozen in the middle."""

import contextlib
import importlib.util
import os
import re
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from http.server import ThreadingHTTPServer
from pathlib import Path
from shutil import copytree

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]

pytest_plugins = ["postgresql_fixtures", "mysql_fixtures"]

EXAMPLES = Path(__file__).parents[2] / "examples"
PAGE = Path(__file__).parents[2] / "docs" / "once-per-deployment.md"
MIDDLE = """
    op.execute("UPDATE seats SET visits = visits + 1")
    while not os.path.exists(os.environ["GO"]):
        time.sleep(0.02)
"""


def rewritten(name, folder, *changes):
    """Copy an example into *folder*, with a short ttl and *changes* of its text."""
    text = (EXAMPLES / name).read_text()
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new)
    (folder / name).write_text(text)
    return folder / name


@contextlib.contextmanager
def started(*arguments, **environment):
    """Start a Python program with its output in a pipe; kill it at the end, and its group."""
    process = subprocess.Popen(
        [sys.executable, "-W", "error", *map(str, arguments)],
        env=os.environ | {name: str(value) for name, value in environment.items()},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    with process:
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def until(process, *words):
    """Read the lines of *process* until one has all *words*; return that line's number of a process, if it has one."""
    for line in process.stdout:
        if all(word in line for word in words):
            return int(number) if (number := line.split()[1]).isdecimal() else None
    raise AssertionError(f"ended before {words}")


# Migrations


class Shop:
    """The project of the example, its database, and one row that each revision may change once."""

    def __init__(self, folder, server=None, driver=""):
        self.folder, self.server, self.go = folder, server, folder / "go"
        self.environment = {"GO": self.go, "PYTHONPATH": folder}
        locks, data = f"sqlite:///{folder}/locks.db", f"sqlite:///{folder}/shop.db"
        if server:
            locks, data = server.url, driver + server.url[server.url.index("://") :]
        self.environment |= {"FENCING_URL": locks, "DATABASE_URL": data}
        copytree(EXAMPLES / "migrations", folder / "migrations")
        rewritten("migrate_on_start.py", folder)
        rewritten("migrations/env.py", folder, ("ttl=15", "ttl=2"))
        key, column = "primary_key=True))", '    op.add_column("seats", sa.Column("holder", sa.Text))\n'
        row = (
            key.removesuffix(")")
            + ', sa.Column("visits", sa.Integer))\n    op.execute("INSERT INTO seats VALUES (1, 0)")'
        )
        rewritten("migrations/versions/0001_seats.py", folder, (key, row))
        rewritten(
            "migrations/versions/0002_holders.py", folder, (column, column + MIDDLE), ("import os", "import os, time")
        )

    def rows(self):
        statement = "SELECT number, visits, holder FROM seats"
        if self.server:
            return [tuple(row) for row in self.server.ask(statement)]
        with contextlib.closing(sqlite3.connect(self.folder / "shop.db")) as database:
            return database.execute(statement).fetchall()

    def workers(self):
        arguments = ["-m", "uvicorn", "migrate_on_start:app", "--workers", 4, "--port", 0, "--log-level", "critical"]
        return started(*arguments, **self.environment)

    def migrate(self):
        program = "import os, migrate_on_start; migrate_on_start.migrate(); print('worker', os.getpid(), 'is ready')"
        return started("-c", program, **self.environment)


@pytest.fixture(params=["sqlite", "postgresql"])
def shop(request, tmp_path):
    server = request.getfixturevalue("postgresql_server") if request.param == "postgresql" else None
    return Shop(tmp_path, server, "postgresql+psycopg")


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_each_migration_is_applied_once_although_the_worker_that_migrates_ends(shop, end):
    with shop.workers() as server:
        migrating = until(server, "applies 0002")
        os.kill(migrating, end)
        shop.go.touch()
        ready = {until(server, "is ready") for _ in range(4)}
        if migrating in ready:  # uvicorn lets it end its start, and then starts another one in its place
            assert end == signal.SIGTERM
            ready.add(until(server, "is ready"))
        assert len(ready - {migrating}) == 4
    assert shop.rows() == [(1, 1, None)]


def test_the_lines_for_mysql_let_one_worker_migrate(mysql_server, tmp_path):
    shop = Shop(tmp_path, mysql_server, "mysql+pymysql")
    (function,) = re.findall(r"```python skip\n(def run_migrations_online.*?)```", PAGE.read_text(), re.DOTALL)
    env = shop.folder / "migrations" / "env.py"
    before = env.read_text().partition("def run_migrations_online")[0].replace("pool\n", "pool, text\n")
    env.write_text(f"{before}{function}\n\nrun_migrations_online()\n")
    with shop.workers() as server:
        migrating = until(server, "applies 0002")
        shop.go.touch()
        assert migrating in {until(server, "is ready") for _ in range(4)}
    assert shop.rows() == [(1, 1, None)]


@pytest.mark.parametrize("shop", ["postgresql"], indirect=True)
@pytest.mark.parametrize("ended", [False, True], ids=["it-commits-late", "the-server-ends-it"])
def test_the_next_process_waits_for_the_transaction_of_one_that_was_frozen(shop, ended):
    """The lease is over, and the fence is locked: the next one reads what is missing when the transaction has ended."""
    if ended:
        shop.server.ask(f"ALTER DATABASE {shop.server.database} SET idle_in_transaction_session_timeout = '3s'")
    with shop.migrate() as frozen:
        until(frozen, "applies 0002")
        frozen.send_signal(signal.SIGSTOP)
        shop.go.touch()
        with shop.migrate() as next_one:
            if not ended:
                while not shop.server.ask("SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock'"):
                    assert next_one.poll() is None
                    time.sleep(0.05)
                frozen.send_signal(signal.SIGCONT)
            said = next_one.stdout.read()
            assert next_one.wait() == 0
            assert ("applies 0002" in said) == ended
        frozen.send_signal(signal.SIGCONT)
        assert frozen.wait() == 1  # it has lost its lease
    assert shop.rows() == [(1, 1, None)]


def test_alembic_does_not_drop_the_tables_of_locks_and_fences(shop):
    """Else they are taken for those of a model that is gone."""
    others = ", ".join(f'sa.Column("{name}", sa.{kind})' for name, kind in (("visits", "Integer"), ("holder", "Text")))
    columns = f'sa.Column("number", sa.Integer, primary_key=True), {others}'
    env = shop.folder / "migrations" / "env.py"
    model = f'import sqlalchemy as sa\ntarget_metadata = MetaData()\nsa.Table("seats", target_metadata, {columns})'
    env.write_text(env.read_text().replace("target_metadata = MetaData()", model))
    shop.go.touch()
    check = "import migrate_on_start as shop; shop.command.check(shop.config())"
    with shop.migrate() as process:
        until(process, "is ready")
    with started("-c", check, **shop.environment) as process:
        assert "No new upgrade operations" in process.stdout.read()


# The other three


def test_a_task_that_was_killed_in_the_middle_is_done_by_another_process(tmp_path):
    waits = "    while not os.path.exists(os.environ['GO']):\n        await asyncio.sleep(0.02)\n"
    script = rewritten("start_up_task.py", tmp_path, ("    await asyncio.sleep(0.3)", waits), ("ttl=15", "ttl=2"))
    environment = {
        "DATABASE": tmp_path / "shop.db",
        "FENCING_URL": f"sqlite:///{tmp_path}/locks.db",
        "DEPLOYMENT": "v1",
        "GO": tmp_path / "go",
    }
    with contextlib.closing(sqlite3.connect(tmp_path / "shop.db")) as database:
        database.execute("CREATE TABLE deployments (id TEXT PRIMARY KEY)")
        with started(script, "service", **environment) as first:
            until(first, "registers")
            with started(script, "service", **environment) as second:
                first.kill()
                until(second, "registers")
                assert database.execute("SELECT * FROM deployments").fetchall() == []
                (tmp_path / "go").touch()
                until(second, "is ready")
        assert database.execute("SELECT * FROM deployments").fetchall() == [("v1",)]


def test_another_process_polls_after_the_leader_was_killed_and_no_update_counts_twice(tmp_path):
    changes = [
        (
            "        leader.send_signal(signal.SIGTERM)\n        assert await leader.wait() == 0\n",
            "        leader.kill()\n        await leader.wait()\n",
        ),
        ("ttl=15", "ttl=2"),
    ]
    with started(rewritten("bot_poller.py", tmp_path, *changes)) as example:
        said = example.stdout.read()
        assert example.wait() == 0, said
    assert "each handled once, and never two polls at a time" in said


@pytest.fixture
def bank(tmp_path, monkeypatch):
    """The bank of the example, whose answers wait; with the environment of its processes."""
    script = rewritten("refresh_credential.py", tmp_path, ("ttl=15", "ttl=2"))
    spec = importlib.util.spec_from_file_location("refresh_credential", script)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)

    class Slow(example.Bank):
        asked, answers = threading.Event(), threading.Event()

        def do_POST(self):
            self.asked.set()
            self.answers.wait(60)
            super().do_POST()

    with ThreadingHTTPServer(("127.0.0.1", 0), Slow) as server:
        threading.Thread(target=server.serve_forever).start()
        monkeypatch.setenv("BANK", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setenv("CREDENTIALS", str(tmp_path / "credentials.db"))
        monkeypatch.setenv("FENCING_URL", f"sqlite:///{tmp_path}/locks.db")
        with contextlib.closing(sqlite3.connect(tmp_path / "credentials.db")) as database, database:
            database.execute("CREATE TABLE credential (access TEXT, refresh TEXT)")
            database.execute("INSERT INTO credential VALUES ('expired', 'refresh-0')")
        Slow.script, Slow.example, Slow.shared = script, example, example.Bank
        yield Slow
        Slow.answers.set()
        server.shutdown()


def test_a_signal_in_the_middle_of_a_refresh_does_not_lose_the_answer(bank):
    with started(bank.script, "process") as process:
        bank.asked.wait(60)
        process.send_signal(signal.SIGTERM)
        bank.answers.set()
        assert process.wait() == 0
    assert bank.example.credential() == ("access-1", "refresh-1")


def test_a_process_that_is_frozen_after_its_request_stores_the_answer_late(bank):
    with started(bank.script, "process") as process:
        bank.asked.wait(60)
        process.send_signal(signal.SIGSTOP)
        bank.answers.set()
        with (
            bank.example.connect() as locks,
            locks.lock("credentials/bank"),
        ):  # its lease is over, nobody else refreshes
            process.send_signal(signal.SIGCONT)
            process.wait()
    assert bank.example.credential() == ("access-1", "refresh-1")


def test_no_lock_helps_where_another_process_refreshes_meanwhile(bank):
    """A process that is frozen after its request has spent the token; the next one spends it again."""
    with started(bank.script, "process") as process:
        bank.asked.wait(60)
        process.send_signal(signal.SIGSTOP)
        bank.answers.set()
        with started(bank.script, "process") as other:
            assert other.wait() == 1
        process.send_signal(signal.SIGCONT)
    assert bank.shared.reuses == 1
