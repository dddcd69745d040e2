"""A holder that was revoked is told why, if the store answers in time."""

from collections.abc import Sequence

import pytest

from fencing_sdk.abc import Claim, Renewal, Revoked
from fencing_sdk.backends._shared.revocation_reasons import reason_for, with_reasons

CLAIM = Claim("a", 15.0)


class Store:
    """Fails so many times before it answers."""

    def __init__(self, failures: int) -> None:
        self.left = failures
        self.asked = 0

    async def reasons(self, claims: Sequence[Claim]) -> list[str | None]:
        self.asked += 1
        if self.left:
            self.left -= 1
            raise ConnectionError
        return ["deploy"] * len(claims)


@pytest.mark.parametrize(("failures", "reason"), [(0, "deploy"), (1, "deploy"), (2, "deploy"), (9, "")])
async def test_a_store_whose_connection_breaks_is_asked_again(failures: int, reason: str):
    store = Store(failures)
    assert await reason_for(CLAIM, store.reasons) == reason
    assert store.asked == min(failures + 1, 3)


async def test_a_refused_renewal_has_the_reason_of_the_second_answer():
    renewals = [Renewal.RENEWED, Renewal.REFUSED]
    assert await with_reasons([CLAIM, CLAIM], renewals, Store(1).reasons) == [Renewal.RENEWED, Revoked("deploy")]
