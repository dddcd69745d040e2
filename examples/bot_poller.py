"""
One process of many polls for a bot's messages, and a deploy hands the poll over: getUpdates of Telegram allows one.

    uv run python examples/bot_poller.py

The messages are those of a stand-in for Telegram, which counts polls that overlap. It knows an update as handled when a
poll asks for the next one, so an update may come twice: its row and its effect are one transaction.
"""

import asyncio
import os
import signal
import sqlite3
import sys
import tempfile
from contextlib import closing

import aiohttp
from aiohttp import web

from fencing_sdk import connect

# The bot


async def poll(api: aiohttp.ClientSession) -> None:
    offset = 0
    while True:
        try:
            async with api.get("/getUpdates", params={"offset": offset, "timeout": 30}) as answer:
                answer.raise_for_status()
                updates = (await answer.json())["result"]
        except aiohttp.ClientError:  # also 409, while the poll of a process that was killed is still open there
            await asyncio.sleep(1)
            continue
        for update in updates:
            handle(update)
            offset = update["update_id"] + 1


def handle(update: dict[str, int]) -> None:
    with closing(sqlite3.connect(os.environ["DATABASE"])) as db, db:
        if db.execute("INSERT OR IGNORE INTO handled VALUES (?)", [update["update_id"]]).rowcount:
            db.execute("UPDATE orders SET number = number + 1")  # yours


async def bot() -> None:
    async with connect() as locks, locks.draining_on(signal.SIGTERM, signal.SIGINT, within=25):
        print("stands in line", flush=True)
        async for term in locks.election("bots/shop", ttl=15):
            async with term, aiohttp.ClientSession(os.environ["API"]) as api:  # SIGTERM and a lost lead cancel the poll
                print("polls", flush=True)
                await poll(api)


# The stand-in for Telegram, and the deploys


class Telegram:
    def __init__(self) -> None:
        self.sent = self.confirmed = self.polls = self.overlaps = 0
        self.news = asyncio.Condition()

    async def get_updates(self, request: web.Request) -> web.Response:
        self.overlaps += self.polls > 0  # Telegram would end one of the two with 409
        self.polls += 1
        try:
            async with self.news:
                self.confirmed = max(self.confirmed, int(request.query["offset"]) - 1)
                await self.news.wait_for(lambda: self.sent > self.confirmed)
            return web.json_response({"result": [{"update_id": self.confirmed + 1}]})
        finally:
            self.polls -= 1

    async def send(self) -> None:
        while True:
            async with self.news:
                self.sent += 1
                self.news.notify_all()
            await asyncio.sleep(0.01)


async def start_bot() -> asyncio.subprocess.Process:
    bot = await asyncio.create_subprocess_exec(sys.executable, __file__, "bot", stdout=asyncio.subprocess.PIPE)
    assert await bot.stdout.readline() == b"stands in line\n"
    return bot


async def main(folder: str) -> None:
    os.environ.update(DATABASE=f"{folder}/shop.db", FENCING_URL=f"sqlite:///{folder}/locks.db")
    with closing(sqlite3.connect(os.environ["DATABASE"])) as db, db:
        db.execute("CREATE TABLE handled (update_id INTEGER PRIMARY KEY)")
        db.execute("CREATE TABLE orders (number INTEGER)")
        db.execute("INSERT INTO orders VALUES (0)")
    telegram, app = Telegram(), web.Application()
    app.router.add_get("/getUpdates", telegram.get_updates)
    runner = web.AppRunner(app, handler_cancellation=True)  # a poll ends with its connection
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    os.environ["API"] = f"http://127.0.0.1:{runner.addresses[0][1]}"
    sending = asyncio.create_task(telegram.send())

    leader = await start_bot()
    assert await leader.stdout.readline() == b"polls\n"
    for deploy in range(1, 4):
        following = await start_bot()  # a rolling update starts the new process first
        leader.send_signal(signal.SIGTERM)
        assert await leader.wait() == 0
        leader = following
        assert await leader.stdout.readline() == b"polls\n"
        print(f"deploy {deploy}: the new process polls, {telegram.confirmed} updates are handled")
    leader.send_signal(signal.SIGTERM)
    await leader.wait()
    sending.cancel()
    await runner.cleanup()
    with closing(sqlite3.connect(os.environ["DATABASE"])) as db:
        ((orders,),) = db.execute("SELECT number FROM orders")
        ((handled, last),) = db.execute("SELECT count(*), max(update_id) FROM handled")
    assert orders == handled == last, "an update was left out, or counted twice"
    assert telegram.overlaps == 0, "two processes polled at once"
    print(f"{handled} updates, each handled once, and never two polls at a time")


if __name__ == "__main__":
    if sys.argv[1:] == ["bot"]:
        asyncio.run(bot())
    else:
        with tempfile.TemporaryDirectory() as folder:
            asyncio.run(main(folder))
