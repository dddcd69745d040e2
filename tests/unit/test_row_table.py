"""
The table of a store that is this process: the very moment at which a grant ends, and what it keeps.

Who may hold, whose turn it is and who is woken is asked by `tests.oracle`, of the memory backend as of every store.
"""

import pytest
from inside import LINE_POLL, LINE_TTL, TOKEN_LIMIT

from fencing_sdk.abc import Busy, Claim, Grant, Renewal
from fencing_sdk.backends._shared.row_table import RowTable
from fencing_sdk.backends._shared.rules import token_source
from fencing_sdk.errors import BackendRefusedError, ConfigurationError


@pytest.fixture
def table() -> RowTable:
    return RowTable(token_source("counter", lambda: 0))


def test_a_grant_ends_at_the_moment_at_which_its_ttl_is_over(table: RowTable):
    claim, rival = Claim("a", 2.0), Claim("a", 2.0)
    assert table.acquire(claim, 0.0) == Grant(1)
    assert table.acquire(rival, 1.75) == Busy(0.25)
    assert table.renew(claim, 1.75) is Renewal.RENEWED
    assert table.acquire(rival, 3.5) == Busy(0.25)
    assert table.renew(claim, 3.75) is table.release(claim, 3.75) is Renewal.REFUSED
    assert table.inspect("a", 3.75) is None
    assert table.acquire(rival, 3.75) == Grant(2)
    assert table.renew(claim, 3.75) is table.release(claim, 3.75) is Renewal.TAKEN_OVER


def test_who_is_refused_hears_when_it_may_have_the_lock(table: RowTable):
    first, second, newcomer = (Claim("a", 2.0) for _ in range(3))
    table.join(first, 0.0)
    table.join(second, 0.5)
    assert table.acquire(newcomer, 0.5) == Busy(LINE_TTL - 0.5)
    assert table.acquire(second, 0.5) == Busy(LINE_POLL)
    assert table.acquire(first, LINE_TTL - 0.5) == Grant(1)
    table.release(first, LINE_TTL - 0.5)
    assert table.next_in_line("a", 0.5 + LINE_TTL - 0.25) == second.owner
    assert table.next_in_line("a", 0.5 + LINE_TTL) is None


def test_who_joins_again_keeps_its_place_and_who_holds_does_not_join(table: RowTable):
    holder, first, second = (Claim("a", 10.0) for _ in range(3))
    table.acquire(holder, 0.0)
    for claim in (holder, first, second):
        table.join(claim, 0.0)
    table.join(first, LINE_TTL - 0.5)
    assert [waiting.id for waiting in table.waiting("a", LINE_TTL - 0.25)] == [first.holder, second.holder]
    assert [waiting.id for waiting in table.waiting("a", LINE_TTL)] == [first.holder], "to join is a sign of life"


def test_grants_that_nobody_asks_about_again_do_not_pile_up():
    table = RowTable(token_source("counter", lambda: 0))
    for number in range(10_000):
        assert isinstance(table.acquire(Claim(f"report/{number}", 1.0), now=float(number)), Grant)
    assert len(table) < 200


def test_a_thousand_living_grants_survive_the_sweep():
    table = RowTable(token_source("counter", lambda: 0))
    claims = [Claim(f"report/{number}", 60.0) for number in range(1000)]
    for claim in claims:
        table.acquire(claim, now=0.0)
    assert all(table.renew(claim, now=59.0) is Renewal.RENEWED for claim in claims)


def test_hybrid_tokens_follow_the_wall_clock_and_never_go_back_with_it():
    wall = iter([1000, 1000, 500, 2000])
    following = token_source("hybrid", lambda: next(wall))
    last, tokens = 0, []
    for _ in range(4):
        last = following(last)
        tokens.append(last)
    assert tokens == [1000, 1001, 1002, 2000]


def test_a_token_that_does_not_fit_into_53_bits_is_refused_and_not_granted():
    table = RowTable(token_source("hybrid", lambda: TOKEN_LIMIT))
    with pytest.raises(BackendRefusedError, match="53 bits"):
        table.acquire(Claim("a", 1.0), now=0.0)
    assert table.inspect("a", now=0.0) is None


def test_an_unknown_token_source_is_refused():
    with pytest.raises(ConfigurationError, match="'random'"):
        token_source("random", lambda: 0)
