"""
The zombie: a client is paused while it holds a lock, and its write arrives after the next holder's.

The story plays twice, on virtual time: once against a store that believes every writer, once against a store that looks
at the fencing token. The clients run the real engine; nothing but time, the network and the stores is simulated.

Run it: uv run python examples/zombie_timeline.py
"""

from fencing_sdk import LeaseLostError, StaleTokenError
from fencing_sdk.testing import FencedStore, UnfencedStore, World


def play(world: World, store: UnfencedStore | FencedStore) -> object:
    """Play the story against *store*; return the value that survives."""
    a, b = world.client("A"), world.client("B")

    lease = a.acquire("seats/42", ttl=10)
    kept = lease.token
    say(world, f"A holds the lock, token {kept}, and is about to write")

    a.pause()
    say(world, "A is paused: a garbage collection, a debugger, a sleeping laptop")
    world.sleep(12)

    token = b.acquire("seats/42").token
    say(world, f"the lease of A has expired; B holds the lock, token {token}")
    b.write(store, "written by B", token)
    say(world, f"B wrote: the store holds {store.value!r}")

    a.resume()
    say(world, "A goes on where it stopped")
    try:
        lease.token  # noqa: B018  (reading the token is asking for permission)
    except LeaseLostError as error:
        say(world, f"A, had it asked its lease: {error}")
    try:
        a.write(store, "written by A", kept)
    except StaleTokenError as error:
        say(world, f"A, with the number that it kept: {error}")
    say(world, f"in the end the store holds {store.value!r}")
    return store.value


def say(world: World, text: str) -> None:
    print(f"  {world.now:6.3f} s  {text}")


print("A store that believes every writer:")
with World() as world:
    assert play(world, world.unfenced_store()) == "written by A"
print("B's write is gone, and no client got an error.\n")

print("A store that looks at the token:")
with World() as world:
    assert play(world, world.fenced_store()) == "written by B"
    story = world.history
print("The zombie was refused. The same in messages and events:\n")
print("\n".join(story))
