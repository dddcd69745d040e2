"""A world repeats itself: one seed has one history, to the byte, in this process and in any other."""

import asyncio
import os
import random
import subprocess
import sys

import pytest

from fencing_sdk import FencingError
from fencing_sdk.testing.world import World

ballast = []


def story(seed: int) -> list[str]:
    """Three clients under pauses, losses and jitter, and a task group that is cancelled with each lease."""
    with World(seed, latency=(0.0005, 0.05)) as world:
        clients = [world.client(name, clock_rate=rate) for name, rate in (("A", 1.0), ("B", 1.004), ("C", 0.997))]
        store, diary = world.fenced_store("seats/42"), world.unfenced_store("diary")

        async def write_and_say_goodbye(client, lease, number):
            ballast.append(bytearray(random.SystemRandom().randrange(512)))  # tasks at unpredictable addresses
            try:
                await asyncio.sleep(random.uniform(0, 3))
                await store.write(f"{client.name}{number}", lease.token)
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                await diary.write(f"goodbye from {number}", 0)
                raise

        async def work(client):
            while True:
                try:
                    async with (
                        client.locks.lock("seats/42", ttl=5, wait=20, fences=[store]) as lease,
                        asyncio.TaskGroup() as group,
                    ):
                        for number in range(8):
                            group.create_task(write_and_say_goodbye(client, lease, number))
                except* FencingError:
                    pass

        for client in clients:
            client.start(work, client)
        faults = random.Random(seed)
        for turn in range(9):
            world.sleep(faults.uniform(1, 4))
            clients[turn % 3].pause()
            world.after(7, clients[turn % 3].resume)
            clients[(turn + 1) % 3].link.drop("renew", times=3)
        world.sleep(20)
        return world.history


def test_two_runs_in_one_process_have_one_history():
    random.seed()
    first = story(7)
    assert first == story(7)
    assert len(first) > 200
    assert any("goodbye" in line for line in first)
    assert any("lost seats/42" in line for line in first)


def test_another_seed_has_another_history():
    assert story(7) != story(8)


@pytest.mark.slow
@pytest.mark.parametrize("hash_seed", ["0", "1", "4242"])
def test_another_process_with_other_hashes_has_the_same_history(hash_seed):
    done = subprocess.run(
        [sys.executable, "-W", "error", __file__],
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        capture_output=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.decode().splitlines() == story(7)


def test_a_history_has_no_secrets_and_no_addresses():
    with World() as world:
        lease = world.client("A").acquire("seats/42")
        text = "\n".join(world.history)
        assert "seats/42" in text
        assert lease.owner not in text
        assert lease.holder not in text
        assert " 0x" not in text


if __name__ == "__main__":
    print("\n".join(story(7)))  # noqa: T201
