"""
Celery: tasks that do their work once, although they are delivered twice, in the prefork pool and in that of threads.

The lock lets one delivery work at a time. It leaves a row in the transaction that checks the token, where the next
delivery finds it. A child that is killed leaves its lock for up to one ttl, in which its task is delivered again: no
task here returns because the lock is held. The client is made at import, before the pool forks; each child opens it
anew. Needs Redis and a worker:

    celery -A celery_invoices worker --pool prefork --concurrency 4      (or --pool threads)
    python celery_invoices.py
"""

import os
import sqlite3
import time
from contextlib import closing

from celery import Celery, Task

from fencing_sdk import LockHeldError
from fencing_sdk.guards.sql import SqlGuard
from fencing_sdk.sync import Ran, connect

REDIS = os.environ.get("REDIS_URL", "redis://127.0.0.1:6379")
DATABASE = os.environ.get("INVOICES", "invoices.db")
TTL = 15

app = Celery("celery_invoices", broker=REDIS, backend=REDIS)
app.conf.update(
    task_acks_late=True,
    task_reject_on_worker_lost=True,  # else Celery acknowledges the task of a child that was killed
    broker_connection_retry_on_startup=True,
    worker_prefetch_multiplier=1,
)
locks = connect(REDIS)
guard = SqlGuard()


def deliver(what: str) -> None:
    """What must not be done twice."""
    time.sleep(0.1)


@app.task
def send_invoice(number: int) -> str:
    """Short work: a delivery that finds the lock held stands in line, for longer than the lease of a dead child."""
    resource = f"invoices/{number}"
    with (
        locks.lock(resource, ttl=TTL, wait=4 * TTL) as lease,
        closing(sqlite3.connect(DATABASE, timeout=30)) as database,
        database,  # one transaction: check, look and write
    ):
        guard.admit_sync(database, resource, lease.token)  # first; may raise StaleTokenError
        if database.execute("SELECT 1 FROM done WHERE what = ?", (resource,)).fetchone():
            return "sent before"
        deliver(resource)
        database.execute("INSERT INTO done VALUES (?, ?)", (resource, os.getpid()))
        return "sent"


@app.task(bind=True, max_retries=None)
def close_month(self: Task, month: int) -> str:
    """Long work: a delivery that finds the lock held comes again later. Until then its place in the pool is free."""
    resource = f"months/{month}"
    try:
        with locks.lock(resource, ttl=TTL, wait=0) as lease:
            with closing(sqlite3.connect(DATABASE, timeout=30)) as database:
                if database.execute("SELECT 1 FROM done WHERE what = ?", (resource,)).fetchone():
                    return "closed before"
            deliver(resource)
            with closing(sqlite3.connect(DATABASE, timeout=30)) as database, database:
                guard.admit_sync(database, resource, lease.token)
                database.execute("INSERT INTO done VALUES (?, ?)", (resource, os.getpid()))
            return "closed"
    except LockHeldError as held:
        raise self.retry(exc=held, countdown=TTL) from None


@locks.job("remind", at_least_for=60)
def remind_once() -> int:
    """Send the reminders."""
    return 3


@app.task
def remind() -> int | None:
    """A tick of Celery beat, in one of several processes: the next tick makes up for one that is skipped."""
    outcome = remind_once()
    return outcome.value if isinstance(outcome, Ran) else None


def main() -> None:
    with closing(sqlite3.connect(DATABASE)) as database:
        database.execute("CREATE TABLE IF NOT EXISTS done (what TEXT, by INTEGER)")  # no unique key: the lock
    deliveries = [send_invoice.delay(number) for number in range(5) for _ in range(4)]
    outcomes = [delivery.get(timeout=60) for delivery in deliveries]
    print("sent:", outcomes.count("sent"), "sent before:", outcomes.count("sent before"))
    ticks = [remind.delay().get(timeout=60) for _ in range(2)]
    print("reminders:", *ticks)
    with closing(sqlite3.connect(DATABASE)) as database:
        assert sorted(database.execute("SELECT what FROM done")) == [(f"invoices/{number}",) for number in range(5)]


if __name__ == "__main__":
    main()
