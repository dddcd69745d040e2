"""The one decision, in full, and SQLite's words for the same."""

import itertools
import sqlite3
from contextlib import closing

import pytest

from fencing_sdk import StaleTokenError, Token
from fencing_sdk.guards._verdict import admitted
from fencing_sdk.guards.sql import SqlGuard

TOKENS = [Token(value, holder) for value in (0, 1, 2) for holder in (None, "a", "b")]
FENCES = [None, *TOKENS]


def values(token: Token | None) -> tuple[int, str | None] | None:
    return None if token is None else (int(token), token.holder)


def decided(token: Token, fence: Token | None) -> object:
    try:
        return values(admitted("r", token, fence))
    except StaleTokenError as error:
        return error.token, error.fence, error.conflict


def decided_by_sqlite(token: Token, fence: Token | None) -> object:
    guard = SqlGuard()
    with closing(sqlite3.connect(":memory:")) as connection:
        connection.execute(guard.ddl())
        if fence is not None:
            connection.execute("INSERT INTO fencing_fence VALUES ('r', ?, ?)", values(fence))
        try:
            guard.admit_sync(connection, "r", token)
        except StaleTokenError as error:
            return error.token, error.fence, error.conflict
        return connection.execute("SELECT token, holder FROM fencing_fence WHERE resource = 'r'").fetchone()


@pytest.mark.parametrize(
    ("token", "fence", "outcome"),
    [
        (Token(1, "a"), None, (1, "a")),
        (Token(2, "b"), Token(1, "a"), (2, "b")),
        (2, Token(1, "a"), (2, None)),
        (Token(1, "a"), Token(1, "a"), (1, "a")),
        (Token(1, "a"), Token(1), (1, "a")),
        (Token(1), Token(1, "a"), (1, "a")),
        (Token(1), Token(1), (1, None)),
        (Token(1, "b"), Token(1, "a"), (1, 1, True)),
        (Token(0, "a"), Token(1, "a"), (0, 1, False)),
        (Token(0), Token(1, "a"), (0, 1, False)),
    ],
)
def test_the_table_in_the_docstring_is_what_happens(token, fence, outcome):
    assert decided(token if isinstance(token, Token) else Token(token), fence) == outcome


@pytest.mark.parametrize(
    ("token", "fence"), list(itertools.product(TOKENS, FENCES)), ids=lambda token: str(values(token))
)
def test_sqlite_decides_the_same(token, fence):
    assert decided_by_sqlite(token, fence) == decided(token, fence)
