"""Every store that tells of revocations on request does it as `RevocationNoticesSuite` says."""

import asyncio
import json

from on_stores import OnMysql, OnPostgresql, OnSqlite
from revocation_notices_suite import RevocationNoticesSuite

from fencing_sdk.backends._shared.losses import name_digest
from fencing_sdk.backends.postgresql.waiters import revocation_channel
from fencing_sdk.backends.sqlite.waiter_signs import send_datagram

pytest_plugins = ["mysql_fixtures", "postgresql_fixtures"]


class TestPostgresql(OnPostgresql, RevocationNoticesSuite):
    def url(self, bench):
        return bench.by_proxy

    async def listeners(self, bench):
        """What was sent last on the connections that are there."""
        if not await bench.server.value(
            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
        ):
            return 0
        executed = [text for _, *said in bench.proxy.requests for text in said[:1]]  # else it was only prepared
        said = [text for text in executed if text.startswith((b"LISTEN", b"UNLISTEN"))]
        return sum(1 if text.startswith(b"LISTEN") else -1 for text in said)

    async def forge(self, bench, locks, name):
        for payload in ("", "x" * 7999, name_digest(name)):
            await bench.server.fetch("SELECT pg_notify($1, $2)", revocation_channel("fencing"), payload)

    async def leave_earlier_reason(self, bench, name):
        await bench.server.execute(
            "INSERT INTO fencing.fencing_revoked (name, owner, until, reason) "
            f"SELECT name, owner, expires_at, 'earlier' FROM fencing.fencing_lock WHERE name = '{name}'"
        )


class TestMysql(OnMysql, RevocationNoticesSuite):
    async def listeners(self, bench):
        """The connections that sleep until someone rings; between two sleeps one shows nothing for a moment."""
        sleeping = (
            "SELECT count(*) FROM information_schema.processlist"
            " WHERE db = DATABASE() AND info LIKE 'SELECT SLEEP(%%' AND command <> 'Killed'"
        )
        for _ in range(3):
            if found := await bench.server.value(sleeping):
                return found
            await asyncio.sleep(0.05)
        return 0

    async def forge(self, bench, locks, name):
        for payload in ("", "x" * 64, name_digest(name)):
            await locks._backend._store.announce(payload)

    async def leave_earlier_reason(self, bench, name):
        (grants,) = await bench.server.fetch("SELECT grants FROM fencing_lock WHERE name = %s", name)
        for grant in json.loads(grants[0]):
            row = (name, grant["owner"], grant["expires"], "earlier")
            await bench.server.fetch("INSERT INTO fencing_revoked VALUES (%s, %s, %s, %s)", *row)


class TestSqlite(OnSqlite, RevocationNoticesSuite):
    async def listeners(self, bench):
        return len(bench.ask("SELECT socket FROM fencing_listener"))

    async def forge(self, bench, locks, name):
        for payload in ("", "x" * 7999, name_digest(name)):
            assert send_datagram(locks._backend._store._hearing.name, payload)

    async def leave_earlier_reason(self, bench, name):
        bench.ask(
            "INSERT INTO fencing_revoked (name, owner, boot, expires, reason) "
            "SELECT name, owner, boot, expires, 'earlier' FROM fencing_lock WHERE name = ?",
            name,
        )
