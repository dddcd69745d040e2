"""
The contract of a guard as tests: subclass `GuardSuite`, say how to write and to read, and run pytest.

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

from fencing_sdk.testing.guard_promises.fences import FencePromises
from fencing_sdk.testing.guard_promises.races import RacePromises
from fencing_sdk.testing.guard_promises.several import SeveralPromises
from fencing_sdk.testing.guard_promises.tokens import GuardTokenPromises


class GuardSuite(GuardTokenPromises, FencePromises, RacePromises, SeveralPromises):
    """
    Every promise of `fencing_sdk.abc.Guard`, and of the write that it is part of.

    A subclass provides the fixture ``guard``, the adapters ``write`` and ``read``, and ``reopen``: an
    async context manager that opens one more guard as another process would. It declares
    ``durable = False`` where a guard that is opened anew knows no fence, and ``several = True``, with the adapter
    ``write_all``, where several resources can be written in one step.
    """
