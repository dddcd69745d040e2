"""The watchers of leases in Redis ask about what has changed, as long as the backend is open."""

import asyncio

import pytest
from patience import until

from fencing_sdk.abc import Claim, Renewal
from fencing_sdk.backends._shared.loss_notices import LossNotices
from fencing_sdk.backends.redis.losses import RedisLossWatcher
from fencing_sdk.backends.redis.share_losses import ShareLossWatcher

CLAIM = Claim("a", 15.0, owner="one")
CHANGED = ([b"invalidate", [b"{a}:h"]], [b"invalidate", None])


@pytest.mark.parametrize(("watch", "token"), [(RedisLossWatcher, (1,)), (ShareLossWatcher, ())])
@pytest.mark.parametrize("message", CHANGED, ids=["the lease has changed", "FLUSHALL"])
async def test_a_change_is_asked_about_until_the_watcher_is_closed(watch, token, message):
    asked = []

    async def renew(claims):
        asked.append(list(claims))
        return [Renewal.RENEWED]

    watcher = watch(renew, LossNotices())
    watcher.granted("{a}:h", CLAIM, *token)
    watcher.on_push(message)
    await until(lambda: asked, what="the watcher asks")
    watcher.on_push(message)
    await watcher.aclose()
    watcher.on_push(message)  # from a connection that is closed a little later: an answer would open it again
    for _ in range(10):
        await asyncio.sleep(0)
    assert asked == [[CLAIM]]
    assert len(asyncio.all_tasks()) == 1
