"""
The contracts as tests: subclass `BackendSuite` or `GuardSuite`, provide what is under test, and run pytest.

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

    class TestMyGuard(GuardSuite):
        @pytest.fixture
        def guard(self, tmp_path):
            return MyGuard(tmp_path)

        async def write(self, guard, resource, token, value):
            await guard.write(resource, token, value)

        async def read(self, guard, resource):
            return await guard.read(resource)

        @asynccontextmanager
        async def reopen(self, guard):
            yield MyGuard(guard.path)

The tests are ``async def``: use pytest-asyncio in auto mode, or mark the subclass for your plugin.
"""

from __future__ import annotations

from fencing_sdk.testing.promises.clients import (
    AbandonmentPromises,
    ClientPromises,
    CounterPromises,
    OutagePromises,
    RestartPromises,
)
from fencing_sdk.testing.promises.fences import FencePromises, GuardTokenPromises, RacePromises, SeveralPromises
from fencing_sdk.testing.promises.verbs import (
    BellPromises,
    EndPromises,
    LifePromises,
    LinePromises,
    LookPromises,
    ModePromises,
    PassPromises,
    RepeatPromises,
    RulesPromises,
    TokenPromises,
)


class BackendSuite(
    LinePromises,
    ModePromises,
    TokenPromises,
    RepeatPromises,
    LifePromises,
    BellPromises,
    EndPromises,
    PassPromises,
    LookPromises,
    RulesPromises,
    AbandonmentPromises,
    RestartPromises,
    OutagePromises,
    ClientPromises,
    CounterPromises,
):
    """
    Every promise of `fencing_sdk.abc.Backend`.

    A subclass provides the fixtures ``backend`` (on a fresh, empty store) and ``reopen`` (a
    callable that makes another backend object on that store, which the tests close), and declares
    what its store is: see the attributes and hooks of `BackendUnderTest`. What it declares to lack is not
    collected; everything else has to pass.
    """


class GuardSuite(GuardTokenPromises, FencePromises, RacePromises, SeveralPromises):
    """
    Every promise of `fencing_sdk.abc.Guard`, and of the write that it is part of.

    A subclass provides the fixture ``guard``, the adapters ``write`` and ``read``, and ``reopen``: an
    async context manager that opens one more guard as another process would. It declares
    ``durable = False`` where a guard that is opened anew knows no fence, and ``several = True``, with the adapter
    ``write_all``, where several resources can be written in one step.
    """
