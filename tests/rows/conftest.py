"""The database of a test of leased rows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from row_benches import DATABASES, RowBench, row_bench


@pytest.fixture(params=DATABASES)
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RowBench]:
    """Each kind of database is a column."""
    with row_bench(request.param, request, tmp_path) as made:
        yield made
