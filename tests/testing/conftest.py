"""The two ways in which a test ends a lease, as columns of a table."""

import pytest

from fencing_sdk import LossReason

ENDS = {"expire": LossReason.EXPIRED, "lose": LossReason.REVOKED}


@pytest.fixture(params=ENDS)
def end(request):
    """`expire` or `lose`."""
    return request.getfixturevalue(request.param)


@pytest.fixture
def reason(request, end):
    """Why a lease is lost that *end* has ended."""
    return ENDS[request.node.callspec.params["end"]]
