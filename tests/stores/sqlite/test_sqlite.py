"""The SQLite backend keeps the contract, between objects, loops and processes that share a file."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager, closing
from pathlib import Path

import pytest

from fencing_sdk.abc import LOCK, READER, Backend, Claim, Gone, Mode, Place
from fencing_sdk.backends.sqlite import SqliteBackend
from fencing_sdk.backends.sqlite import file as _file
from fencing_sdk.testing import BackendSuite


class TestSqliteBackend(BackendSuite):
    passes_on = True
    ttl = 0.7

    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        return tmp_path / "locks.db"

    @pytest.fixture
    def url(self, path: Path) -> str:
        return f"sqlite:///{path}"

    @pytest.fixture
    def reopen(self, path: Path) -> Callable[[], SqliteBackend]:
        return lambda: SqliteBackend(path)

    @pytest.fixture
    async def backend(self, reopen: Callable[[], SqliteBackend]) -> AsyncIterator[SqliteBackend]:
        async with aclosing(reopen()) as made:
            yield made

    @asynccontextmanager
    async def break_store(self, backend: Backend) -> AsyncIterator[None]:
        """Take the write lock of the file and do not release it; a call waits for it for a short time alone."""
        assert isinstance(backend, SqliteBackend)
        hog = sqlite3.connect(backend._path, isolation_level=None)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_file, "PATIENCE", 0.2)
            try:
                hog.execute("BEGIN IMMEDIATE")
                yield
            finally:
                hog.close()

    async def purge(self, backend: Backend) -> None:
        """The clean-up runs whenever the file is opened."""
        await backend.aclose()
        await backend.tickets(["anything"])

    @pytest.mark.parametrize("mode", [LOCK, READER])
    async def test_a_reader_that_an_operator_has_deleted_takes_nothing_from_the_next_holder(
        self, backend: SqliteBackend, path: Path, mode: Mode
    ):
        reader, later = Claim("a", 9.0, "reader", mode=READER), Claim("a", 9.0, "later", mode=mode)
        first = await backend.draw(reader)
        with closing(sqlite3.connect(path)) as file, file:
            file.execute("DELETE FROM fencing_line")
        second = await backend.draw(later)
        assert isinstance(first, Place)
        assert isinstance(second, Place)
        assert second.token > first.token
        gone, held = await backend.keep([(reader, 0), (later, 0)])
        assert isinstance(gone, Gone)
        assert held.token == second.token
