"""
Celery: an invoice that is sent once, although its task is delivered twice, in the prefork pool and in that of threads.

The lock lets one delivery work at a time, and the row that it leaves, in the transaction that checks the token, tells
the next one. The client is made at import, before the pool forks; each child opens it anew. Needs Redis and a worker:

    celery -A celery_invoices worker --pool prefork --concurrency 4      (or --pool threads)
    python celery_invoices.py
"""

import os
import sqlite3
import time
from contextlib import closing

from celery import Celery

from fencing_sdk.guards.sql import SqlGuard
from fencing_sdk.sync import connect

REDIS = os.environ.get("REDIS_URL", "redis://127.0.0.1:6379")
DATABASE = os.environ.get("INVOICES", "invoices.db")

app = Celery("celery_invoices", broker=REDIS, backend=REDIS)
app.conf.update(task_acks_late=True, broker_connection_retry_on_startup=True, worker_prefetch_multiplier=1)
locks = connect(REDIS)
guard = SqlGuard()


@app.task
def send_invoice(number: int) -> str:
    resource = f"invoices/{number}"
    with (
        locks.lock(resource, ttl=15, wait=60) as lease,
        closing(sqlite3.connect(DATABASE, timeout=30)) as database,
        database,  # one transaction: check, look and write
    ):
        guard.admit_sync(database, resource, lease.token)  # first; may raise StaleTokenError
        if database.execute("SELECT 1 FROM sent WHERE invoice = ?", (number,)).fetchone():
            return "sent before"
        time.sleep(0.1)  # what must not be done twice
        database.execute("INSERT INTO sent VALUES (?, ?)", (number, os.getpid()))
        return "sent"


def main() -> None:
    with closing(sqlite3.connect(DATABASE)) as database:
        database.execute("CREATE TABLE IF NOT EXISTS sent (invoice INTEGER, by INTEGER)")  # no unique key: the lock
    deliveries = [send_invoice.delay(number) for number in range(5) for _ in range(4)]
    outcomes = [delivery.get(timeout=60) for delivery in deliveries]
    print("sent:", outcomes.count("sent"), "sent before:", outcomes.count("sent before"))
    with closing(sqlite3.connect(DATABASE)) as database:
        assert sorted(database.execute("SELECT invoice FROM sent")) == [(number,) for number in range(5)]


if __name__ == "__main__":
    main()
