"""Thousands of requests of mixed holders arrive at once, in any order: a stale one changes nothing on the server."""

import asyncio
import random
import sqlite3
from contextlib import closing

import pytest
from aiohttp import ClientSession, TCPConnector, web
from campaigns import amount
from web_servers import aiohttp_server

from fencing_sdk import StaleTokenError, Token
from fencing_sdk.guards.memory import MemoryGuard
from fencing_sdk.guards.sql import SqlGuard
from fencing_sdk.integrations.aiohttp import guard_middleware, raise_for_stale, request_token

SEATS = 20
HOLDERS = 25


class Journal:
    """Every seat with its history: the tokens whose writes changed it, in the order in which they did."""

    def __init__(self):
        self.changes = {seat: [] for seat in range(SEATS)}
        self.guard = MemoryGuard()

    async def book(self, request):
        """A handler whose write is part of the check, after it has awaited what handlers await."""
        body = await request.read()
        await asyncio.sleep(0)
        seat, token = int(request.match_info["seat"]), request_token(request)
        self.guard.write(f"seats/{seat}", token, self.changes[seat].append, (int(token), body.decode()))
        return web.Response(text="booked")


def storm(requests, seed=4):
    """The requests of all holders of all seats, shuffled: most are late."""
    order = [(number % SEATS, number // SEATS % HOLDERS) for number in range(requests)]
    random.Random(seed).shuffle(order)
    return order


async def fire(url, order, *, at_once=200):
    """Send all requests; return those that were accepted and those that were refused."""
    accepted, refused = [], []
    waiting = iter(order)

    async def holder(session):
        for seat, token in waiting:
            headers = {"Fencing-Token": f'{token};holder="{token:08x}"'}
            async with session.put(f"{url}/seats/{seat}", headers=headers, data=str(token)) as response:
                try:
                    await raise_for_stale(response)
                except StaleTokenError as error:
                    refused.append((token, error))
                else:
                    assert response.status == 200
                    accepted.append((seat, token))

    async with ClientSession(connector=TCPConnector(limit=0)) as session:
        await asyncio.gather(*[holder(session) for _ in range(at_once)])
    assert all(error.token == token < error.fence for token, error in refused)
    return accepted, refused


@pytest.mark.campaign
@pytest.mark.timeout(120)
async def test_among_thousands_of_concurrent_requests_a_stale_token_changes_nothing():
    requests = amount(10_000, short=1_000)
    journal, order = Journal(), storm(requests)
    app = web.Application(middlewares=[guard_middleware(resource="seats/{seat}")])
    app.router.add_put("/seats/{seat}", journal.book)
    async with aiohttp_server(app) as url:
        accepted, refused = await fire(url, order)

    assert len(accepted) + len(refused) == requests
    assert len(refused) > requests / 10
    changed = [(seat, token) for seat, history in journal.changes.items() for token, _ in history]
    assert sorted(changed) == sorted(accepted)  # every refusal changed nothing, every other one did
    for history in journal.changes.values():
        tokens = [token for token, _ in history]
        assert tokens == sorted(tokens)  # no write came after the write of a later holder
        assert tokens[-1] == HOLDERS - 1
        assert all(body == str(token) for token, body in history)


async def test_a_stale_token_changes_nothing_in_a_database_that_the_check_is_part_of(tmp_path):
    database = tmp_path / "seats.db"
    guard = SqlGuard(database)
    with closing(sqlite3.connect(database)) as connection, connection:
        connection.execute("CREATE TABLE history (number INTEGER PRIMARY KEY, seat INTEGER, token INTEGER)")

    def write(seat: int, token: Token):
        with closing(sqlite3.connect(database, timeout=30)) as connection, connection:
            connection.execute("PRAGMA synchronous = OFF")
            guard.admit_sync(connection, f"seats/{seat}", token)
            connection.execute("INSERT INTO history (seat, token) VALUES (?, ?)", (seat, token))

    async def book(request):
        await asyncio.to_thread(write, int(request.match_info["seat"]), request_token(request))
        return web.Response(text="booked")

    app = web.Application(middlewares=[guard_middleware(resource="seats/{seat}")])
    app.router.add_put("/seats/{seat}", book)
    async with aiohttp_server(app) as url:
        accepted, refused = await fire(url, storm(500), at_once=8)

    with closing(sqlite3.connect(database)) as connection:
        history = connection.execute("SELECT seat, token FROM history ORDER BY number").fetchall()
    assert sorted(history) == sorted(accepted)
    assert len(refused) > 50
    for seat in range(SEATS):
        tokens = [token for of, token in history if of == seat]
        assert tokens == sorted(tokens)


async def test_a_guard_in_front_admits_no_request_below_a_fence():
    """The check alone: what it lets through is in order, as it leaves the check."""
    guard, entered = MemoryGuard(), {seat: [] for seat in range(SEATS)}

    class Watched(MemoryGuard):
        async def raise_to(self, resource, token):
            await guard.raise_to(resource, token)
            entered[int(resource.removeprefix("seats/"))].append(int(token))

    async def book(request):
        return web.Response(text="booked")

    app = web.Application(middlewares=[guard_middleware(Watched(), resource="seats/{seat}")])
    app.router.add_put("/seats/{seat}", book)
    async with aiohttp_server(app) as url:
        accepted, _ = await fire(url, storm(1_000))
    assert sorted(accepted) == sorted((seat, token) for seat, tokens in entered.items() for token in tokens)
    assert all(tokens == sorted(tokens) for tokens in entered.values())
