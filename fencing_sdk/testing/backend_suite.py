"""
The contract of a backend as tests: subclass `BackendSuite`, provide a store, and run pytest.

    class TestMyBackend(BackendSuite):
        breakable = False

        @pytest.fixture
        def url(self, tmp_path):
            return f"mystore://{tmp_path}/locks"

        @pytest.fixture
        def reopen(self, url):
            return lambda: MyBackend(url)

        @pytest.fixture
        async def backend(self, reopen):
            backend = reopen()
            yield backend
            await backend.aclose()

The tests are ``async def``: use pytest-asyncio in auto mode, or mark the subclass for your plugin.
"""

from __future__ import annotations

from fencing_sdk.testing.backend_promises.abandonment import AbandonmentPromises
from fencing_sdk.testing.backend_promises.counter import CounterPromises
from fencing_sdk.testing.backend_promises.direct_grants import DirectGrantPromises
from fencing_sdk.testing.backend_promises.expiry import ExpiryPromises
from fencing_sdk.testing.backend_promises.front_door import FrontDoorPromises
from fencing_sdk.testing.backend_promises.grants import GrantPromises
from fencing_sdk.testing.backend_promises.line import LinePromises
from fencing_sdk.testing.backend_promises.names import NamePromises
from fencing_sdk.testing.backend_promises.notices import NoticePromises
from fencing_sdk.testing.backend_promises.operating import ListingPromises, RevokingPromises
from fencing_sdk.testing.backend_promises.outage import OutagePromises
from fencing_sdk.testing.backend_promises.renewal import RenewalPromises
from fencing_sdk.testing.backend_promises.shares import SharePromises
from fencing_sdk.testing.backend_promises.tokens import TokenPromises


class BackendSuite(
    GrantPromises,
    RenewalPromises,
    ExpiryPromises,
    TokenPromises,
    AbandonmentPromises,
    LinePromises,
    DirectGrantPromises,
    SharePromises,
    NoticePromises,
    ListingPromises,
    RevokingPromises,
    OutagePromises,
    NamePromises,
    FrontDoorPromises,
    CounterPromises,
):
    """
    Every promise of `fencing_sdk.abc.Backend`.

    A subclass provides the fixtures ``backend`` (on a fresh, empty store) and ``reopen`` (a
    callable that makes another backend object on that store, which the tests close), and declares
    what its store is: see the attributes and hooks of `BackendUnderTest`. What it declares to lack is not
    collected; everything else has to pass.
    """
