"""A Redis server answers, but not as one would like: permissions, memory, pauses, forgotten scripts, other types."""

from __future__ import annotations

import asyncio
import logging
import pickle
import re
import traceback

import pytest
from event_log import ENDED_BY_TIME
from redis_server import version_of
from redis_stage import calls_of, connections, key, keys, nothing_left
from redis_stage import waiting as waiting_for
from stays import LONG, PATIENCE, SHORT, Stay, eventually, opened, staying

from fencing_sdk import BackendError, BackendRefusedError, BackendUnavailableError, LockHeldError
from fencing_sdk.events import Lost, RenewalFailed, Renewed

pytest_plugins = ["redis_fixtures"]


WRONG = "hunter2"
NEEDED = [
    *("eval", "evalsha", "hello", "time", "getex", "set", "del", "pexpire", "hset", "hget", "hdel"),
    *("get", "eval_ro", "evalsha_ro"),
]
SHARES = ["pttl", "zadd", "zrem", "zcard", "zscore", "zrange", "zrangebyscore"]
WELCOME = ["publish", "subscribe", "client|tracking", "client|caching", "exists", "script|load"]


def rule(commands, patterns="resetchannels &{fencing* ~{fencing*") -> str:
    return f"app on >s3cret {patterns} -@all {' '.join(f'+{command}' for command in commands)}"


def url_of(server, password="s3cret") -> str:
    return server.url.replace("://", f"://app:{password}@")


LATE = ("no answer", "the connection broke", "no connection to")
"""What a renewal may fail with on a busy machine, where an answer comes too late or a connection takes too long."""


def refusals(log) -> list[RenewalFailed]:
    """The renewals that the server refused."""
    return [event for event in log.of(RenewalFailed) if not any(text in event.error for text in LATE)]


async def everything(url, server) -> None:
    """Everything that locks do: grant, retry, wait, wake, renew, give up waiting, inspect, release."""
    async with opened(url) as (locks, log):
        async with staying(locks.lock("a", **LONG)) as stay:
            waiting = Stay(locks.lock("a", ttl=10, wait=PATIENCE))
            leaving = Stay(locks.lock("a", ttl=10, wait=PATIENCE))
            await eventually(lambda: _waiting(server, 2), what="two stand in line")
            await leaving.abandon()
            with pytest.raises(LockHeldError):
                await locks.lock("a", wait=0).acquire()
            assert (await locks.inspect("a")).token == stay.token
            await log.seen(Renewed, 2)
            await stay.end()
        await waiting.begun()
        await waiting.end()
        async with locks.lock("a", ttl=30) as lease:
            await lease.renew()
        assert log.of(Lost) == refusals(log) == []
    await nothing_left(server)


# Credentials and permissions.


async def test_shares_and_operators_need_a_few_permissions_more(start_redis):
    """To list, and to revoke a lock, a permit and what readers hold together."""
    server = start_redis(user=[rule([*NEEDED, *WELCOME, *SHARES, "scan"])])
    async with opened(url_of(server)) as (locks, _):
        held = [
            await locks.lock("a", ttl=10).acquire(),
            await locks.semaphore("b", permits=2).acquire(),
            await locks.rwlock("c").reader.acquire(),
        ]
        async with staying(locks.lock("d", **LONG)):
            waiting = Stay(locks.lock("d", ttl=10, wait=PATIENCE))
            await eventually(lambda: _waiting(server, 1, "d"), what="one stands in line")
            assert {holder.name async for holder in locks.all_holders()} == set("abcd")
            assert len(await locks.waiters("d")) == 1
            await waiting.abandon()
        for lease in held:
            assert await locks.revoke(lease.name, token=lease.token, reason="a test")
        assert not [holder async for holder in locks.all_holders()]
    refused = await server.command("ACL", "LOG")
    assert {entry[entry.index("object") + 1] for entry in refused} <= {"client|setinfo", "client"}


@pytest.mark.parametrize("missing", ["SET", "key", "EVALSHA", "GETEX"])
async def test_a_script_that_the_server_does_not_run_is_told_as_what_it_is(missing, start_redis):
    """A permission that is missing, or a command that is disabled; no word of the age of the server."""
    if missing in {"SET", "key"}:
        keys = "~other*" if missing == "key" else "~{fencing*"
        words = [word for word in NEEDED + WELCOME if word != "set"] if missing == "SET" else NEEDED + WELCOME
        server = start_redis(user=[rule(words, f"{keys} &*")])
        url, heard = url_of(server), "the user may not (run 'set'|use a command or a key; ACL LOG names it)"
    else:
        server = start_redis(rename_command=[f'{missing} ""'])
        url, heard = server.url, f"the server does not know ('{missing.lower()}'|a command); was it renamed or disabled"
    async with opened(url) as (locks, _):
        with pytest.raises(BackendRefusedError, match=heard):
            await locks.lock("a").acquire()


async def test_these_permissions_are_enough_and_all_of_them_are_used(start_redis, answers_may_be_late):
    server = start_redis(user=[rule(NEEDED + WELCOME)])
    await server.command("CONFIG", "RESETSTAT")
    await everything(url_of(server), server)
    used = {word for word in NEEDED + WELCOME if await calls_of(server, word, word.split("|")[0])}
    assert used == {*NEEDED, *WELCOME}
    refused = {entry[entry.index("object") + 1] for entry in await server.command("ACL", "LOG")}
    assert refused <= {"client|setinfo", "client"}  # the driver's


@pytest.mark.parametrize("commands", [NEEDED, NEEDED + WELCOME], ids=["commands", "channels"])
async def test_without_permission_for_messages_waiters_poll(commands, start_redis):
    server = start_redis(user=[rule(commands, "resetchannels ~{fencing*")])
    async with opened(url_of(server)) as (locks, log):
        async with staying(locks.lock("a", **LONG)) as stay:
            waiting = [Stay(locks.lock("a", ttl=10, wait=PATIENCE)) for _ in range(3)]
            await log.seen(Renewed, 2)
            await stay.end()
        for waiter in waiting:
            await waiter.begun()
            await waiter.end()
    assert await keys(server) == set()


async def test_a_command_that_is_denied_while_connecting_is_named(start_redis):
    server = start_redis(user=[rule(NEEDED + WELCOME)])
    with pytest.raises(BackendRefusedError, match=r"the user may not run 'client\|setname'"):
        async with opened(f"{url_of(server)}?client_name=mine"):
            pytest.fail("it opened")


async def test_a_wrong_password_is_refused_at_once_and_shown_nowhere(start_redis, caplog):
    caplog.set_level(logging.DEBUG)
    server = start_redis(user=[rule(NEEDED + WELCOME)])
    with pytest.raises(BackendRefusedError) as caught:
        async with asyncio.timeout(PATIENCE), opened(url_of(server, WRONG)):
            pytest.fail("it opened")
    assert WRONG not in everything_shown_by(caught.value) + caplog.text
    assert await connections(server) == []


async def test_a_password_that_changes_ends_the_body_in_time_and_is_shown_nowhere(start_redis, caplog):
    caplog.set_level(logging.DEBUG)
    server = start_redis(user=[rule(NEEDED + WELCOME)])
    async with opened(url_of(server)) as (locks, log), staying(locks.lock("a", **SHORT)) as stay:
        server.ask_all(["ACL", "SETUSER", "app", "resetpass", ">changed"], ["CLIENT", "KILL", "TYPE", "normal"])
        for connection in await connections(server):
            await server.command("CLIENT", "KILL", "ID", connection["id"])
        await stay.over()
        assert stay.lost in ENDED_BY_TIME
        with pytest.raises(BackendRefusedError) as caught:
            await locks.lock("b").acquire()
        shown = everything_shown_by(caught.value) + caplog.text + repr(locks) + repr(log.events)
        assert "s3cret" not in shown
        assert stay.lease.owner not in shown


def everything_shown_by(error: BaseException) -> str:
    """What logging, a traceback, repr or a pickle would show of an error and of all that caused it."""
    chain, texts = [error], ["".join(traceback.format_exception(error)), repr(pickle.dumps(error))]
    while chain:
        found = chain.pop()
        texts += [repr(found), str(found), repr(vars(found))]
        chain += [cause for cause in (found.__cause__, found.__context__) if cause is not None]
    return "\n".join(texts)


@pytest.mark.parametrize(
    "patterns", ["resetchannels &{fencing* ~{other*", "resetchannels &{fencing* %R~{fencing*"], ids=["none", "read"]
)
async def test_a_user_who_may_not_write_the_keys_is_refused_at_once(patterns, start_redis, redis_binary):
    if "%R" in patterns and version_of(redis_binary) < (7,):
        pytest.skip("a permission to read alone came with Redis 7")
    server = start_redis(user=[rule(NEEDED + WELCOME, patterns)])
    async with opened(url_of(server)) as (locks, _):
        with pytest.raises(BackendRefusedError):
            await locks.lock("a").acquire()


# Addresses and TLS.


FORMS = {"": "", "+sentinel": "/service", "+cluster": "", "+quorum": ""}
"""Of URLs, and what follows the hosts."""


def form_of(url, form):
    scheme, _, place = url.partition("://")
    places = f"{place},localhost:1,localhost:2" if form == "+quorum" else place
    return f"{scheme}{form}://{places}{FORMS[form]}"


async def complaint(url) -> BackendError:
    with pytest.raises(BackendError) as caught:
        async with asyncio.timeout(PATIENCE), opened(url):
            pytest.fail("it opened")
    return caught.value


@pytest.mark.parametrize("form", FORMS)
async def test_a_url_that_leaves_out_tls_is_told_of_it(form, start_redis, certificates):
    server = start_redis(tls=certificates)
    error = await complaint(form_of(server.tls_url.replace("rediss:", "redis:"), form))
    assert isinstance(error, BackendUnavailableError)
    assert re.search(rf"127.0.0.1:{server.tls_port} \([^)]*does it want TLS, which is rediss://", str(error))


@pytest.mark.parametrize("form", [form for form in FORMS if form != "+quorum"])
async def test_a_file_that_is_missing_or_wrong_is_named_with_its_option(form, start_redis, certificates, tmp_path):
    server = start_redis(tls=certificates, tls_auth_clients=form == "")
    none, text = tmp_path / "none.pem", tmp_path / "text.pem"
    text.write_text("no certificate at all")
    trusted = f"ssl_ca_certs={certificates.authority}"
    url = form_of(server.tls_url, form)
    for options, heard in {
        f"ssl_ca_certs={none}": f"ssl_ca_certs must .*'{none}' cannot be read",
        f"ssl_ca_certs={text}": f"ssl_ca_certs must .*'{text}' cannot be read as one",
        f"{trusted}&ssl_certfile={none}": f"ssl_certfile must .*'{none}' cannot be read",
        f"{trusted}&ssl_certfile={certificates.client_certificate}&ssl_keyfile={text}": f"ssl_certfile must .*'{text}'",
        "": r"certificate is not trusted; name its authority with ssl_ca_certs=/path/to/ca\.pem",
    }.items():
        error = await complaint(f"{url}?{options}" if options else url)
        assert isinstance(error, BackendRefusedError)
        assert re.search(heard, str(error)), error
    if form == "":
        said = str(
            await complaint(f"{url}?{trusted}")
        )  # the alert of the server, or the connection that it then closes
        assert re.search("wants? a certificate of the client.*ssl_certfile=", said), said


# Limits of the server.


async def test_a_full_server_still_grants_renews_and_releases(start_redis):
    server = start_redis(maxmemory_policy="noeviction")
    async with opened(server.url) as (locks, log), staying(locks.lock("a", **LONG)) as stay:
        await log.seen(Renewed)
        await server.command("CONFIG", "SET", "maxmemory", "1")
        with pytest.raises(Exception, match="OOM"):
            await server.command("SET", "x", "1")
        renewed = len(log.of(Renewed))
        async with locks.lock("b", ttl=10):
            waiting = Stay(locks.lock("b", ttl=10, wait=PATIENCE))
            await eventually(lambda: server.command("EXISTS", key("b", "w")), what="somebody waits")
        await waiting.begun()
        await waiting.end()
        await log.seen(Renewed, renewed + 3)
        await stay.end()
    await nothing_left(server)


async def test_a_server_with_too_many_clients_is_tried_again(start_redis):
    server = start_redis(maxclients=1)
    with pytest.raises(BackendUnavailableError, match="connection left"):
        async with opened(server.url):
            async with opened(server.url):
                pytest.fail("it opened")


async def test_a_replica_is_refused_until_it_is_a_master(start_redis):
    master, replica = start_redis(), start_redis()
    await replica.command("REPLICAOF", "127.0.0.1", master.port)
    heard = f"127.0.0.1:{replica.port} is a replica, not a master"
    with pytest.raises(BackendUnavailableError, match=heard):
        async with opened(replica.url):
            pytest.fail("it opened")
    await replica.command("REPLICAOF", "NO", "ONE")
    async with opened(replica.url) as (locks, log), staying(locks.lock("a", **LONG)) as stay:
        await replica.command("REPLICAOF", "127.0.0.1", master.port)
        await log.seen(RenewalFailed)
        await replica.command("REPLICAOF", "NO", "ONE")
        await stay.abandon()


async def test_a_key_of_another_type_is_refused_at_once_and_left_alone(redis_server):
    await redis_server.command("RPUSH", key("a"), "mine")
    async with opened(redis_server.url) as (locks, _):
        with pytest.raises(BackendRefusedError):
            await locks.lock("a").acquire()
        with pytest.raises(BackendRefusedError):
            await locks.inspect("a")
        await redis_server.command("DEL", key("a"))
        async with locks.lock("a"):
            pass
    await nothing_left(redis_server)


# Pauses.


async def test_a_look_is_answered_while_the_server_takes_no_writes(redis_server, redis_binary):
    if version_of(redis_binary) < (7,):
        pytest.skip("scripts that only read have commands of their own from Redis 7 on")
    async with opened(redis_server.url) as (locks, _), opened(redis_server.url) as (others, _):
        async with locks.lock("a", ttl=60) as lease:
            assert await others.inspect("b") is None
            await redis_server.command("CLIENT", "PAUSE", "60000", "WRITE")
            holder = await others.inspect("a")
            await redis_server.command("CLIENT", "UNPAUSE")
            assert (holder.token, holder.id) == (lease.token, lease.holder)


@pytest.mark.parametrize("mode", ["WRITE", "ALL"])
async def test_a_client_pause_is_ridden_out(mode, redis_server):
    async with opened(redis_server.url) as (locks, log), staying(locks.lock("a", **LONG)) as stay:
        await log.seen(Renewed)
        while not log.of(RenewalFailed):  # a client that stands still sleeps through a pause
            await redis_server.command("CLIENT", "PAUSE", "1500", mode)
            await asyncio.sleep(1.6)
        renewed = len(log.of(Renewed))
        await log.seen(Renewed, renewed + 2)
        await eventually(lambda: _single(redis_server), what="one connection is left")
        await stay.end()
    assert log.of(Lost) == []
    await nothing_left(redis_server)


async def _single(server) -> bool:
    return len(await connections(server)) == 1


# Scripts that the server forgets.


async def _waiting(server, number, name="a") -> bool:
    return await waiting_for(server, name) == number


async def test_scripts_that_are_forgotten_all_the_time_cost_nothing(redis_server):
    async with opened(redis_server.url) as (locks, log):
        counts = dict.fromkeys("abcd", 0)
        done = asyncio.Event()

        async def forget() -> None:
            while not done.is_set():
                await redis_server.command("SCRIPT", "FLUSH")

        async def use(name: str) -> None:
            for _ in range(10):
                async with locks.lock(name, ttl=30, wait=30):
                    count = counts[name]
                    await asyncio.sleep(0)
                    counts[name] = count + 1

        forgetting = asyncio.create_task(forget())
        async with staying(locks.lock("held", **LONG | {"ttl": 30.0})) as stay:
            await asyncio.gather(*(use(name) for name in "abcd" for _ in range(5)))
            await log.seen(Renewed, 3)
            done.set()
            await forgetting
            await stay.end()
        assert counts == dict.fromkeys("abcd", 50)
    assert log.of(Lost) == refusals(log) == []
    await nothing_left(redis_server)


async def test_a_database_that_the_server_does_not_have_is_called_so(redis_server, start_redis):
    with pytest.raises(BackendRefusedError, match="DB index is out of range"):
        await lock_once(f"{redis_server.url}/999")
    of_a_cluster = start_redis(cluster_enabled=True)
    with pytest.raises(BackendRefusedError, match="SELECT is not allowed in cluster mode"):
        await lock_once(f"{of_a_cluster.url}/1")


async def lock_once(url):
    async with opened(url) as (locks, _), locks.lock("a", wait=0):
        pass
