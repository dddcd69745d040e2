"""What a backend may make of an answer, whatever the store says: an outcome of the contract, or one of its errors."""

from __future__ import annotations

import hypothesis.strategies as st
from inside import TOKEN_LIMIT

from fencing_sdk.abc import Backend, Busy, Claim, Gone, Place, Seen
from fencing_sdk.errors import BackendError

CLAIM = Claim("a", 10, owner="0" * 32)

JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5)),
    lambda inner: st.one_of(st.lists(inner, max_size=2), st.dictionaries(st.text(max_size=3), inner, max_size=2)),
    max_leaves=4,
)


async def ask_everything(backend: Backend) -> None:
    """Call every operation; what comes back is of the contract, and so is what is raised."""
    for call, check in (
        (lambda: backend.draw(CLAIM), _is_place_or_busy),
        (lambda: backend.draw(CLAIM, only_if_it_holds=True), _is_place_or_busy),
        (lambda: backend.keep([(CLAIM, 0), (CLAIM, 5)]), _is_two_answers),
        (lambda: backend.tickets(["a"]), _is_one_line),
        (lambda: backend.give_back(CLAIM), _is_end),
        (lambda: backend.give_back(CLAIM, after=1.0), _is_end),
        (lambda: backend.end("a", 7, "why"), lambda answer: answer in {True, False}),
    ):
        try:
            answer, heard = await call(), ""
        except BackendError as error:
            answer, heard = None, f"{error}"
        assert heard or check(answer), answer
        assert heard.isprintable()
        assert CLAIM.owner not in heard


def _is_token(value: object) -> bool:
    return type(value) is int and 0 <= value < TOKEN_LIMIT


def _is_seconds(value: object) -> bool:
    return type(value) in {int, float} and value == value


def _is_place(answer: object) -> bool:
    return (
        isinstance(answer, Place)
        and (answer.token is None or type(answer.token) is int)  # the client refuses one that is out of range
        and (answer.ttl is None or _is_seconds(answer.ttl))
        and _is_seconds(answer.look_after)
    )


def _is_place_or_busy(answer: object) -> bool:
    busy = isinstance(answer, Busy) and (answer.look_after is None or _is_seconds(answer.look_after))
    return busy or _is_place(answer)


def _is_end(answer: object) -> bool:
    return answer is None or (
        isinstance(answer, Gone)
        and (answer.reason is None or isinstance(answer.reason, str))
        and answer.taken in {True, False}
    )


def _is_two_answers(answers: object) -> bool:
    return len(answers) == 2 and all(_is_end(answer) or _is_place(answer) for answer in answers)


def _is_one_line(lines: object) -> bool:
    (line,) = lines
    return all(_is_seen(each) for each in line)


def _is_seen(answer: object) -> bool:
    texts = isinstance(answer.holder, str) and (answer.label is None or isinstance(answer.label, str))
    token = answer.token is None or _is_token(answer.token)
    return isinstance(answer, Seen) and token and _is_seconds(answer.remaining) and texts
