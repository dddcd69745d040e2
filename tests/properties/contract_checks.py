"""What a backend may make of an answer, whatever the store says: an outcome of the contract, or one of its errors."""

from __future__ import annotations

import hypothesis.strategies as st
from inside import TOKEN_LIMIT

from fencing_sdk.abc import Backend, Busy, Claim, Grant, Holder, Renewal, Revoked
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
        (lambda: backend.acquire(CLAIM), _is_grant_or_held),
        (lambda: backend.renew([CLAIM, CLAIM]), _is_two_renewals),
        (lambda: backend.inspect("a"), _is_holder),
        (lambda: backend.release(CLAIM), _is_end),
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


def _is_grant_or_held(answer: object) -> bool:
    if isinstance(answer, Grant):
        return _is_token(answer.token) and (answer.ttl is None or _is_seconds(answer.ttl))
    return isinstance(answer, Busy) and (answer.retry_after is None or _is_seconds(answer.retry_after))


def _is_two_renewals(answer: object) -> bool:
    return len(answer) == 2 and all(isinstance(renewal, Renewal | Revoked) for renewal in answer)


def _is_end(answer: object) -> bool:
    return answer in {None, Renewal.REFUSED, Renewal.TAKEN_OVER} or isinstance(answer, Revoked)


def _is_holder(answer: object) -> bool:
    if answer is None:
        return True
    texts = isinstance(answer.id, str) and (answer.label is None or isinstance(answer.label, str))
    return isinstance(answer, Holder) and _is_token(answer.token) and _is_seconds(answer.remaining) and texts
