"""A schema may have functions that are not ours: whatever row they return is an outcome of the contract or an error."""

import asyncio
import datetime as dt
import decimal

import asyncpg
import hypothesis.strategies as st
from contract_checks import CLAIM, ask_everything
from fuzzing import checked
from hypothesis import example, given
from inside import TOKEN_LIMIT

from fencing_sdk.backends import from_url
from fencing_sdk.backends._shared.request_queue import ConnectionAbandonedError
from fencing_sdk.backends.postgresql.errors import CLASSES, translated
from fencing_sdk.errors import BackendError

VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 5),
    st.sampled_from([TOKEN_LIMIT, TOKEN_LIMIT - 1, 10**400]),
    st.floats(),
    st.text(max_size=3),
    st.sampled_from(["1", "11", "0x", "1?", "??", "111", CLAIM.owner]),
    st.binary(max_size=3),
    st.just(decimal.Decimal("NaN")),
    st.just(dt.datetime.max.replace(tzinfo=dt.UTC)),
    st.lists(st.text(max_size=1), max_size=2),
)
ROWS = st.one_of(
    st.none(),
    st.lists(VALUES, max_size=4).map(tuple),
    st.tuples(st.none(), st.floats()),
    st.tuples(st.integers(0, 9), st.none()),
    st.tuples(st.text(max_size=3), st.integers(0, 9), st.floats(), st.none() | st.text(max_size=3)),
)


def server_error(code: str, text: str) -> Exception:
    """As the driver makes it of what the server says."""
    return asyncpg.PostgresError.new({"C": code, "M": text, "S": "ERROR", "V": "ERROR"})


CODES = ["25006", "40001", "42P01", "42501", "22021", "55P03", "08P01", "28000", "XX000", "00000", ""]
ERRORS = st.one_of(
    st.builds(server_error, st.sampled_from(CODES), st.sampled_from(["", "said", "a\nb"])),
    st.sampled_from([kind for kind, _ in CLASSES if kind is not asyncio.IncompleteReadError]).map(lambda kind: kind()),
    st.builds(asyncpg.InterfaceError, st.text(max_size=3)),
    st.builds(ConnectionAbandonedError),
    st.builds(ValueError, st.just(CLAIM.owner)),
)


@checked(250)
@given(answers=st.lists(ROWS | ERRORS, min_size=1, max_size=4))
@example(answers=[None])
@example(answers=[()])
@example(answers=[("7", 1.0)])
@example(answers=[(None, "soon")])
@example(answers=[(True, None)])
@example(answers=[(TOKEN_LIMIT, None)])
@example(answers=[("owner", 1, 10**400, None)])
@example(answers=[("owner", 1, 5.0, 7)])
@example(answers=[("\ud800", 1, 5.0, None)])
def test_whatever_postgresql_answers_is_an_outcome_or_an_error_of_the_contract(answers):
    async def ask(*_: object, **__: object) -> object:
        ask.calls += 1
        answer = answers[ask.calls % len(answers)]
        if isinstance(answer, Exception):
            raise answer
        return answer

    ask.calls = 0
    backend = from_url("postgresql://localhost")
    backend._connection.ask = ask
    with asyncio.Runner() as runner:
        runner.run(ask_everything(backend))


@checked(200)
@given(error=ERRORS)
def test_every_error_is_translated_in_one_line_and_the_drivers_own_text_is_not_repeated(error: Exception):
    heard = translated("acquire", error)
    assert isinstance(heard, BackendError)
    assert CLAIM.owner not in f"{heard}"
    assert "\n" not in f"{heard}"
