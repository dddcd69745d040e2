"""Models of SQLAlchemy and Django as tables of leased rows, on each database."""

from __future__ import annotations

import asyncio
import datetime as dt
import enum
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy
from alembic.autogenerate import produce_migrations, render_python_code
from alembic.migration import MigrationContext
from alembic.operations import Operations
from django.db import connections, models, transaction
from django.db.models import F, Q
from django.db.models.functions import Now
from django_bench import known_to_django, settings_of
from row_benches import RowBench, client_of
from sqlalchemy import Engine, ForeignKey, and_, func, or_
from sqlalchemy.engine import make_url
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from fencing_sdk import ConfigurationError, LockHeldError, StaleTokenError
from fencing_sdk.rows import row_client, sync
from fencing_sdk.rows.django import LeasedRow as DjangoLeasedRow
from fencing_sdk.rows.sqlalchemy import LeasedRow

pytest_plugins = ["postgresql_fixtures", "mysql_fixtures"]


# SQLAlchemy


class Base(DeclarativeBase): ...


class State(enum.Enum):
    QUEUED = 1
    DONE = 2


class Owner(Base):
    __tablename__ = "owners"
    number: Mapped[int] = mapped_column(primary_key=True)


class Task(LeasedRow, Base):
    __tablename__ = "tasks"
    number: Mapped[int] = mapped_column("task_number", primary_key=True)
    state: Mapped[State] = mapped_column(default=State.QUEUED)
    priority: Mapped[int] = mapped_column("Prio", default=0)
    attempts: Mapped[int] = mapped_column(default=0)
    run_at: Mapped[dt.datetime | None]
    note: Mapped[str | None] = mapped_column(sqlalchemy.String(200))


class Pair(LeasedRow, Base):
    __tablename__ = "pairs"
    one: Mapped[int] = mapped_column(primary_key=True)
    two: Mapped[int] = mapped_column(ForeignKey("owners.number"), primary_key=True)


class WithoutLease(Base):
    __tablename__ = "plain"
    number: Mapped[int] = mapped_column(primary_key=True)


DRIVERS = {"sqlite": "sqlite+aiosqlite", "postgresql": "postgresql+asyncpg"}
BLOCKING = {"sqlite": "sqlite+pysqlite", "postgresql": "postgresql+psycopg"}
BLOCKING |= {"mysql": "mysql+pymysql", "mariadb": "mariadb+pymysql"}
DRIVERS |= {"mysql": "mysql+asyncmy", "mariadb": "mariadb+asyncmy"}


def url_of(bench: RowBench, drivers: dict[str, str]) -> sqlalchemy.URL:
    url = make_url(bench.url)
    return url.set(drivername=drivers[url.drivername])


@pytest.fixture
def engine(bench: RowBench) -> Iterator[Engine]:
    """A database with the tables of the models and four tasks, of which the first has the lowest priority."""
    made = sqlalchemy.create_engine(url_of(bench, BLOCKING))
    Base.metadata.create_all(made)
    with Session(made) as session:
        session.add_all(Task(number=number, priority=number > 1) for number in range(1, 5))
        session.commit()
    yield made
    made.dispose()


async def test_expressions_of_sqlalchemy_choose_order_and_count(bench: RowBench, engine: Engine) -> None:
    """Values travel beside the statement, as the type of their column writes them."""
    noon = dt.datetime(2020, 1, 1, 12)  # noqa: DTZ001  (as the column is)
    with Session(engine) as session:
        session.get_one(Task, 2).run_at = noon - dt.timedelta(hours=1)
        session.get_one(Task, 3).run_at = noon + dt.timedelta(hours=1)
        session.get_one(Task, 4).state = State.DONE
        session.commit()
    async with client_of(bench) as db:
        tasks = db.rows(
            Task,
            where=and_(Task.state.in_([State.QUEUED]), or_(Task.run_at.is_(None), Task.run_at <= noon)),
            order=[Task.priority.desc(), Task.number],
            on_claim={Task.attempts: Task.attempts + 1, "note": "it's; -- :mine", "run_at": None},
        )
        async with tasks.take() as first, tasks.take() as second:
            assert [lease.row["task_number"] for lease in (first, second)] == [2, 1]
            assert (first.row["attempts"], first.row["note"], first.row["run_at"]) == (1, "it's; -- :mine", None)
            assert first.name == "tasks/2"
            with pytest.raises(LockHeldError):
                await tasks.take(wait=0).acquire()


async def test_the_database_computes_what_sqlalchemy_leaves_to_it(bench: RowBench, engine: Engine) -> None:
    async with client_of(bench) as db:
        tasks = db.rows(
            Task,
            where="note IS NULL AND task_number > :least",
            order=func.coalesce(Task.run_at, func.current_timestamp()),
            on_claim={Task.run_at: func.current_timestamp()},
            values={"least": 3},
        )
        async with tasks.take() as lease:
            assert lease.row["task_number"] == 4
            assert lease.row["run_at"] is not None


async def test_a_session_finishes_what_it_has_written_itself(bench: RowBench, engine: Engine) -> None:
    other = create_async_engine(url_of(bench, DRIVERS))
    async with client_of(bench) as db:
        tasks = db.rows(Task, where=Task.state == State.QUEUED)
        async with tasks.take() as lease, AsyncSession(other) as session, session.begin():
            task = await session.get_one(Task, lease.row["task_number"])
            task.state, task.note = State.DONE, "by the session"
            await lease.finish(session)
        async with tasks.take() as zombie:
            bench.ask("UPDATE tasks SET lease_token = lease_token + 1")
            with pytest.raises(StaleTokenError):
                async with AsyncSession(other) as session, session.begin():
                    task = await session.get_one(Task, zombie.row["task_number"])
                    task.state = State.DONE
                    await zombie.finish(session)
    await other.dispose()
    with Session(engine) as session:
        assert [task.number for task in session.query(Task).where(Task.state == State.DONE)] == [1]
        assert session.get_one(Task, 1).note == "by the session"


async def test_an_object_that_was_read_before_a_claim_leaves_the_token_when_it_is_merged(
    bench: RowBench, engine: Engine
) -> None:
    with Session(engine) as session:
        old = session.get_one(Task, 1)
    async with client_of(bench) as db, db.rows(Task).take() as lease:
        with Session(engine) as session:
            old.note = "of a form"
            session.merge(old)
            session.commit()
        assert bench.ask("SELECT note, lease_token FROM tasks WHERE task_number = 1") == [("of a form", lease.token)]


def test_a_thread_finishes_a_model_in_its_session(bench: RowBench, engine: Engine) -> None:
    with sync.row_client(bench.url) as db, db.rows(Task, where=Task.number == 2).take() as lease:
        with Session(engine) as session, session.begin():
            session.get_one(Task, 2).state = State.DONE
            lease.finish(session, note="by a thread")
    with Session(engine) as session:
        assert (session.get_one(Task, 2).state, session.get_one(Task, 2).note) == (State.DONE, "by a thread")


def test_alembic_finds_the_columns(bench: RowBench) -> None:
    """The migration that it writes adds them to a table with rows."""
    engine = sqlalchemy.create_engine(url_of(bench, BLOCKING))
    bench.ask("CREATE TABLE later (id INTEGER NOT NULL PRIMARY KEY)")
    bench.ask("INSERT INTO later VALUES (1)")

    class Other(DeclarativeBase): ...

    class Later(LeasedRow, Other):
        __tablename__ = "later"
        id: Mapped[int] = mapped_column(primary_key=True)

    with engine.begin() as connection:
        context = MigrationContext.configure(
            connection, opts={"include_name": lambda name, kind, _: kind != "table" or name == "later"}
        )
        script = render_python_code(produce_migrations(context, Other.metadata).upgrade_ops, migration_context=context)
        code = "\n".join(line.strip() for line in script.splitlines())
        known = {"sa": sqlalchemy, "op": Operations(context)}
        exec(f"import sqlalchemy.dialects.mysql as mysql\n{code}", known)
        assert produce_migrations(context, Other.metadata).upgrade_ops.is_empty()
    assert bench.ask("SELECT id, lease_token FROM later") == [(1, 0)]
    engine.dispose()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"where": True}, "where of model Task .* such as Job.state == 'queued'"),
        ({"where": 5}, "where of model Task cannot be written as SQL: ArgumentError"),
        ({"where": Q(state="queued")}, "where of model Task cannot be written as SQL"),
        ({"order": [5]}, "order of model Task"),
        ({"order": ["priority"]}, "order of model Task .*'priority'"),
        ({"on_claim": {"nothing": 1}}, "on_claim of model Task .* nothing is no column"),
        ({"on_claim": Task.attempts + 1}, "on_claim of model Task"),
        ({"where": "state = :state"}, "values lacks state"),
    ],
)
def test_what_sqlalchemy_cannot_write_is_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        row_client("sqlite:///app.db").rows(Task, **options)


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (WithoutLease, "model WithoutLease has no LeasedRow among its bases"),
        (dict, "model dict has no LeasedRow"),
        (Pair, "key of model Pair is not one column: .* key="),
        (Task.__table__, "table must be 'name' or 'schema.name'"),
        (None, "table must be 'name' or 'schema.name'"),
    ],
)
def test_a_model_that_cannot_have_leases_is_refused(model: Any, says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        row_client("sqlite:///app.db").rows(model)


# Django


class Ticket(DjangoLeasedRow):
    state = models.CharField(max_length=20, default="queued")
    priority = models.IntegerField(default=0)
    attempts = models.IntegerField(default=0, db_column="Tries")
    run_at = models.DateTimeField(null=True)
    parent = models.ForeignKey("self", models.CASCADE, null=True)

    class Meta:
        app_label = "tickets"

    def __str__(self) -> str:
        return self.state


class Plain(models.Model):
    class Meta:
        app_label = "tickets"

    def __str__(self) -> str:
        return ""


@pytest.fixture
def tickets(bench: RowBench) -> Iterator[Any]:
    """The manager of a table with three tickets."""
    with known_to_django(bench):
        with connections["of_this_test"].schema_editor() as editor:
            editor.create_model(Ticket)
        Ticket.objects.bulk_create([Ticket(pk=1), Ticket(pk=2)])
        Ticket.objects.create(pk=3, priority=1)
        yield Ticket.objects


def claimed(bench: RowBench, times: int = 1, **options: Any) -> list[dict[str, Any]]:
    """Claim rows in an event loop, where Django refuses to ask a database, and give them back."""

    async def claim() -> list[dict[str, Any]]:
        async with client_of(bench) as db:
            jobs = db.rows(Ticket, **options)
            leases = [await jobs.take(wait=0).acquire() for _ in range(times)]
            return [dict(lease.row) for lease in leases]

    return asyncio.run(claim())


def test_expressions_of_django_choose_order_and_count(bench: RowBench, tickets: Any) -> None:
    noon = dt.datetime(2020, 1, 1, 12, tzinfo=dt.UTC)
    tickets.filter(pk=2).update(run_at=noon + dt.timedelta(hours=1))
    rows = claimed(
        bench,
        times=2,
        where=Q(state__in=["queued", "a%s:b"]) & (Q(run_at=None) | Q(run_at__lte=noon)),
        order=["-priority", "id"],
        on_claim={"attempts": F("attempts") + 1, "state": "it's; -- 100 % :mine"},
    )
    assert [(row["id"], row["Tries"], row["state"]) for row in rows] == [
        (3, 1, "it's; -- 100 % :mine"),
        (1, 1, "it's; -- 100 % :mine"),
    ]
    assert tickets.filter(attempts=1).count() == 2


def test_the_database_computes_what_django_leaves_to_it(bench: RowBench, tickets: Any) -> None:
    tickets.filter(pk=1).update(run_at=Now())
    (row,) = claimed(bench, where=Q(state="queued", run_at__lte=Now()), order=F("run_at").desc(nulls_last=True))
    assert row["id"] == 1


def test_an_instance_that_was_read_before_a_claim_leaves_the_lease_when_it_is_saved(
    bench: RowBench, tickets: Any
) -> None:
    old = tickets.get(pk=1)
    (row,) = claimed(bench)
    old.state = "of the admin"
    old.save()
    assert list(tickets.filter(pk=1).values_list("state", "lease_token")) == [("of the admin", row["lease_token"])]


def test_a_thread_finishes_a_model_in_a_transaction_of_django(bench: RowBench, tickets: Any) -> None:
    with sync.row_client(bench.url) as db, db.rows(Ticket, where=Q(priority=1)).take() as lease:
        with transaction.atomic(using="of_this_test"):
            lease.finish(connections["of_this_test"], state="done")
    assert list(tickets.filter(state="done").values_list("pk", flat=True)) == [3]


def test_a_copy_of_an_instance_has_no_lease(bench: RowBench, tickets: Any) -> None:
    (row,) = claimed(bench)
    copy = tickets.get(pk=row["id"])
    assert copy.lease_token == row["lease_token"]
    copy.pk = 100
    copy.full_clean(exclude=["parent", "run_at"])
    copy.save(force_insert=True)
    assert tickets.get(pk=copy.pk).lease_token == 0


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"where": "queued" == 1}, "where of model Ticket .* such as Q"),
        ({"where": Task.state == State.DONE}, "where of model Ticket .* such as Q"),
        ({"where": Q(nothing=1)}, "where of model Ticket .* FieldError"),
        ({"where": Q(priority="high")}, "where of model Ticket .* ValueError"),
        ({"where": Q(parent__state="done")}, "where of model Ticket .* field of another table"),
        ({"where": Q(state__in=[])}, "where of model Ticket .* EmptyResultSet"),
        ({"order": ["nothing"]}, "order of model Ticket .* FieldError"),
        ({"order": ["parent__state"]}, "order of model Ticket .* field of another table"),
        ({"on_claim": {"nothing": 1}}, "on_claim of model Ticket .* FieldDoesNotExist"),
        ({"on_claim": Q(state="x")}, "on_claim of model Ticket must map columns"),
    ],
)
def test_what_django_cannot_write_is_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        row_client("sqlite:///app.db").rows(Ticket, **options)


def test_a_model_of_another_database_or_without_the_mixin_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"DATABASES has sqlite for model Ticket, .* url .* of postgresql"):
        row_client("postgresql://localhost/app").rows(Ticket)
    with pytest.raises(ConfigurationError, match="model Plain has no LeasedRow among its bases"):
        row_client("sqlite:///app.db").rows(Plain)


MODELS = """
import sys

import django.db.models as models
from fencing_sdk.rows import row_client
from fencing_sdk.rows.django import LeasedRow


class Job(LeasedRow if "leased" in sys.argv else models.Model):
    state = models.TextField(default="queued")
"""
MIGRATE = """
import json
import sys

import django
import pymysql
from django.conf import settings
from django.core.management import call_command

pymysql.version_info = (2, 2, 8, "final", 0)
pymysql.install_as_MySQLdb()
settings.configure(
    DATABASES={"default": json.loads(sys.argv[1])},
    DEFAULT_AUTO_FIELD="django.db.models.BigAutoField",
    INSTALLED_APPS=["shop"],
    SECRET_KEY="of a test",
    USE_TZ=True,
)
django.setup()
call_command("makemigrations", "shop", verbosity=0)
call_command("migrate", verbosity=0)
call_command("makemigrations", "shop", check_changes=True, verbosity=0)
"""


def test_makemigrations_adds_the_columns_to_a_table_with_rows(bench: RowBench, tmp_path: Path) -> None:
    (tmp_path / "shop").mkdir()
    (tmp_path / "shop" / "__init__.py").touch()
    (tmp_path / "shop" / "models.py").write_text(MODELS)
    (tmp_path / "migrate.py").write_text(MIGRATE)
    settings = json.dumps(settings_of(bench))
    for words in ([], ["leased"]):
        command = [sys.executable, "migrate.py", settings, *words]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        if not words:
            bench.ask("INSERT INTO shop_job (state) VALUES ('queued')")
    (second,) = (tmp_path / "shop" / "migrations").glob("0002*.py")
    assert "fencing_sdk.rows.django.LeasedUntilField" in second.read_text()

    async def claim() -> None:
        async with client_of(bench) as db, db.rows("shop_job").take() as lease:
            assert lease.row["id"] == 1

    asyncio.run(claim())
