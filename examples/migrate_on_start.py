"""
Four workers of uvicorn migrate the database when they start: one of them does it, and all are ready then.

    uv run python examples/migrate_on_start.py

The lock and the fence are in migrations/env.py, so the command `alembic upgrade head` has them, too.
"""

import asyncio
import os
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from alembic import command
from alembic.config import Config
from fastapi import FastAPI

HERE = Path(__file__).parent
WORKERS = 4


def config() -> Config:
    config = Config()  # yours: Config("alembic.ini")
    config.set_main_option("script_location", str(HERE / "migrations"))
    return config


def migrate() -> None:
    command.upgrade(config(), "head")


@asynccontextmanager
async def lifespan(_: FastAPI) -> AsyncIterator[None]:
    await asyncio.to_thread(migrate)  # Alembic blocks; a signal of the server is seen when it has ended
    print(f"worker {os.getpid()} is ready", flush=True)
    yield


app = FastAPI(lifespan=lifespan)


def main(folder: str) -> None:
    urls = {"DATABASE_URL": f"sqlite:///{folder}/shop.db", "FENCING_URL": f"sqlite:///{folder}/locks.db"}
    options = ["--workers", str(WORKERS), "--port", "0", "--log-level", "critical"]
    server = subprocess.Popen(
        [sys.executable, "-m", "uvicorn", "migrate_on_start:app", "--app-dir", str(HERE), *options],
        env=os.environ | urls,
        stdout=subprocess.PIPE,
        text=True,
    )
    with server:
        lines: list[str] = []
        while sum("ready" in line for line in lines) < WORKERS:
            lines.append(server.stdout.readline())
            print(lines[-1], end="")
            assert lines[-1], "the server has ended"
        server.terminate()
    applied = [line.split()[-1] for line in lines if "applies" in line]
    assert applied == ["0001", "0002"], "a revision was applied twice, or by two at once"
    print("each revision was applied once, and every worker is ready")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(folder)
