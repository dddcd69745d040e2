"""
Promises about the verbs of a store: lines of tickets, what a token is, who is rung for.

`fencing_sdk.abc.line` has the rules. `RulesPromises` compares the store with them, answer by answer: promises by
example miss what a port of the rules gets wrong.
"""

from __future__ import annotations

import asyncio

from fencing_sdk._values.claim import HELD, LOCK, READER, Busy, Gone, Permit, Place
from fencing_sdk._values.timing import MIN_TTL
from fencing_sdk.abc import ALL_MODES, WAITER_TTL, Backend, PassesOn
from fencing_sdk.testing.comparison import Comparison, TooSlowError
from fencing_sdk.testing.promises.stage import OnStage, Stage
from fencing_sdk.testing.promises.under_test import LONG, TRIES, BackendUnderTest, Reopen, needs


class LinePromises(OnStage):
    """The order of a line: who holds, who waits, who is next."""

    async def test_the_declared_powers_are_the_real_ones(self, backend: Backend) -> None:
        """The suite tests what is there, and no other promise is left out."""
        declared = self.lines, self.shares, self.passes_on
        assert declared == (backend.rings, set(backend.modes) == ALL_MODES, isinstance(backend, PassesOn))

    async def test_first_holds_at_once(self, w: Stage) -> None:
        """A try for a free name is a ticket that holds."""
        _, place = await w.attempt()
        assert isinstance(place, Place)
        assert place.token is not None

    @needs("lines")
    async def test_second_waits(self, w: Stage) -> None:
        """A ticket behind one that holds waits, whichever client drew it."""
        await w.draw()
        owner, place = await w.draw(store=w.b)
        assert place.token is None
        await w.waits(owner)

    @needs("lines")
    async def test_order_of_arrival(self, w: Stage) -> None:
        """The tickets of two clients hold one after the other, in the order in which they were drawn."""
        owners = [(await w.draw(store=each))[0] for each in (w.a, w.b, w.a, w.b, w.a)]
        for number, owner in enumerate(owners):
            await w.holds(owner)
            await w.waits(*owners[number + 1 :])
            assert await w.a.give_back(owner) is None

    @needs("lines")
    async def test_a_waiter_leaves(self, w: Stage) -> None:
        """A waiter that gives its ticket back is passed over."""
        first, second, third = [(await w.draw())[0] for _ in range(3)]
        assert await w.a.give_back(second) is None
        await w.gone(second)
        await w.a.give_back(first)
        await w.holds(third)

    @needs("lines")
    async def test_a_newcomer_stands_behind(self, w: Stage) -> None:
        """A draw just after a release does not overtake the waiter, although that one has not asked again."""
        first, second = (await w.draw())[0], (await w.draw())[0]
        await w.a.give_back(first)
        newcomer, place = await w.draw(store=w.b)
        assert place.token is None
        await w.holds(second)
        await w.waits(newcomer)

    @needs("lines")
    async def test_a_try_does_not_overtake(self, w: Stage) -> None:
        """A try is refused while another waits, and a reader behind a waiting writer waits too."""
        first, _ = await w.draw()
        second, _ = await w.draw()
        await w.a.give_back(first)
        _, answer = await w.attempt(store=w.b)
        assert isinstance(answer, Busy)
        await w.holds(second)
        if self.shares:
            await w.draw("reader", name="r" + w.name)
            await w.draw("writer", name="r" + w.name)
            late, _ = await w.draw("reader", name="r" + w.name)
            await w.waits(late)

    async def test_names_are_independent(self, w: Stage) -> None:
        """A name that is held refuses no other name."""
        await w.held()
        await w.held(name=w.fresh(), store=w.b)
        _, again = await w.attempt()
        assert isinstance(again, Busy)


@needs("lines", "shares")
class ModePromises(OnStage):
    """Locks, writers, readers and permits of one name."""

    async def test_a_lock_is_alone(self, w: Stage) -> None:
        """No ticket of any mode holds beside a lock."""
        await w.draw("lock")
        for kind, width in (("lock", 1), ("writer", 1), ("reader", 1), ("permit", 5)):
            owner, place = await w.draw(kind, width)
            assert place.token is None, kind
            await w.a.give_back(owner)

    async def test_readers_and_permits_exclude_each_other(self, w: Stage) -> None:
        """Both share a name, but each with its own kind."""
        for one, other in (("reader", "permit"), ("permit", "reader")):
            name = w.fresh()
            first, _ = await w.draw(one, 9, name=name)
            second, place = await w.draw(other, 9, name=name)
            assert place.token is None
            await w.a.give_back(first)
            await w.holds(second)

    async def test_readers_hold_together(self, w: Stage) -> None:
        """Readers of two clients hold at once, and a writer waits until the last of them has gone."""
        owners = [(await w.held("reader", store=each))[0] for each in (w.a, w.b, w.a)]
        waiter, _ = await w.draw("writer")
        bell = w.listen(waiter)
        await w.a.give_back(owners[0])
        await asyncio.sleep(0.05)
        assert not bell.held

    async def test_a_reader_waits_behind_a_writer(self, w: Stage) -> None:
        """A writer that waits lets no further reader in, so that readers do not starve it."""
        first, _ = await w.draw("reader")
        writer, _ = await w.draw("writer")
        second, place = await w.draw("reader", store=w.b)
        assert place.token is None
        await w.a.give_back(first)
        await w.holds(writer)
        await w.waits(second)
        await w.a.give_back(writer)
        await w.holds(second)

    async def test_a_writer_waits_for_all_readers(self, w: Stage) -> None:
        """One reader after the other goes; with the last one the writer holds."""
        readers = [(await w.draw("reader"))[0] for _ in range(3)]
        writer, _ = await w.draw("writer")
        for reader in readers:
            await w.waits(writer)
            await w.a.give_back(reader)
        await w.holds(writer)

    async def test_so_many_permits(self, w: Stage) -> None:
        """Three of three permits are held; the fourth ticket waits for one of them."""
        places = [await w.draw("permit", 3, store=each) for each in (w.a, w.b, w.a, w.b)]
        assert [place.token is not None for _, place in places] == [True, True, True, False]
        await w.a.give_back(places[1][0])
        await w.holds(places[3][0])
        _, late = await w.draw("permit", 3)
        assert late.token is None

    async def test_the_lowest_free_permit(self, w: Stage) -> None:
        """A permit has the lowest number that no other one has."""
        places = [await w.draw("permit", 3) for _ in range(3)]
        assert [place.permit for _, place in places] == [0, 1, 2]
        await w.a.give_back(places[1][0])
        _, place = await w.draw("permit", 3, store=w.b)
        assert place.permit == 1

    async def test_permits_differ(self, w: Stage) -> None:
        """Permits that are held together have different numbers and different tokens."""
        places = [await w.draw("permit", 4) for _ in range(6)]
        assert len({place.permit for _, place in places[:4]}) == 4
        await w.a.give_back(places[2][0])
        await w.a.give_back(places[0][0])
        for owner, _ in places[4:]:
            await w.holds(owner)
        seen = [each for each in await w.seen() if each.token is not None]
        assert sorted(each.permit for each in seen if each.permit is not None) == [0, 1, 2, 3]
        assert len({each.token for each in seen}) == 4

    async def test_widths_that_differ_keep_the_order(self, w: Stage) -> None:
        """A claim of one permit waits for all others, and a wide one behind it does not overtake it."""
        first, _ = await w.draw("permit", 5)
        narrow, place = await w.draw("permit", 1)
        assert place.token is None
        wide, place = await w.draw("permit", 5)
        assert place.token is None, "it overtakes, and a later grant would have a lower token"
        await w.a.give_back(first)
        token = await w.holds(narrow)
        assert await w.holds(wide) > token


class TokenPromises(OnStage):
    """Tokens grow with every grant of a name, and readers that hold together share one."""

    async def test_tokens_grow_over_releases(self, w: Stage) -> None:
        """The number outlives the ticket, and is one for all clients."""
        last = -1
        for number in range(6):
            owner, token = await w.held(store=(w.a, w.b)[number % 2])
            assert isinstance(token, int)
            assert last < token < 2**53
            last = token
            await w.a.give_back(owner)

    async def test_tokens_grow_for_each_name(self, w: Stage) -> None:
        """Names that take turns do not disturb each other's growth."""
        tokens: dict[str, list[int]] = {w.fresh(): [], w.fresh(): [], w.fresh("a/b"): []}
        for _ in range(3):
            for name, row in tokens.items():
                owner, token = await w.held(name=name)
                row.append(token)
                await w.b.give_back(owner)
        for row in tokens.values():
            self.assert_rising(row)

    @needs("lines")
    async def test_tokens_grow_in_the_line(self, w: Stage) -> None:
        """A later waiter has a higher token."""
        owners = [(await w.draw(store=each))[0] for each in (w.a, w.b) * 3]
        tokens = []
        for owner in owners:
            tokens.append(await w.holds(owner))
            await w.b.give_back(owner)
        self.assert_rising(tokens)

    async def test_tokens_grow_over_deaths(self, w: Stage) -> None:
        """A holder that died is followed by a higher token."""
        _, first = await w.held(ttl=self.ttl)
        await w.death()
        _, second = await w.held(store=w.b)
        assert second > first

    async def test_tokens_grow_when_an_owner_comes_back(self, w: Stage) -> None:
        """The same owner has a higher token after its death: another holder may have had the name meanwhile."""
        owner, first = await w.held(ttl=self.ttl)
        await w.death()
        _, second = await w.held(owner=owner)
        assert second > first

    @needs("ends")
    async def test_tokens_grow_over_ends(self, w: Stage) -> None:
        """A ticket that an operator ended is followed by a higher token."""
        _, first = await w.held()
        await w.a.end(w.name, first, "why")
        _, second = await w.held(store=w.b)
        assert second > first

    @needs("shares")
    async def test_tokens_grow_across_kinds(self, w: Stage) -> None:
        """All modes of a name have one row of tokens."""
        last = -1
        for kind in ("lock", "reader", "permit", "writer", "reader", "lock"):
            owner, token = await w.held(kind, 2)
            assert token > last, kind
            last = token
            await w.a.give_back(owner)

    @needs("shares")
    async def test_readers_share_a_token(self, w: Stage) -> None:
        """Readers that hold together are one holder to a guard."""
        assert len({(await w.held("reader", store=each))[1] for each in (w.a, w.b, w.a)}) == 1

    @needs("lines", "shares")
    async def test_readers_behind_a_writer_share_a_token(self, w: Stage) -> None:
        """Readers that a writer lets in together share a token above the writer's."""
        writer, wrote = await w.held("writer")
        readers = [(await w.draw("reader", store=each))[0] for each in (w.a, w.b, w.a)]
        await w.a.give_back(writer)
        tokens = {await w.holds(reader) for reader in readers}
        assert len(tokens) == 1
        assert tokens.pop() > wrote

    @needs("lines", "shares")
    async def test_a_writer_after_readers_is_higher(self, w: Stage) -> None:
        """A writer's token is above that of the readers before it, and below that of the readers behind it."""
        readers = [await w.held("reader") for _ in range(2)]
        writer, _ = await w.draw("writer")
        behind, _ = await w.draw("reader")
        for reader, _ in readers:
            await w.a.give_back(reader)
        token = await w.holds(writer)
        assert token > readers[0][1]
        await w.a.give_back(writer)
        assert await w.holds(behind) > token

    @needs("shares")
    async def test_readers_share_with_those_who_came_late(self, w: Stage) -> None:
        """A reader takes over the token of the readers that hold, although the first of them has gone."""
        first, one = await w.held("reader")
        _, two = await w.held("reader")
        await w.a.give_back(first)
        _, three = await w.held("reader", store=w.b)
        assert one == two == three


class RepeatPromises(OnStage):
    """The same request again, and requests about other owners."""

    async def test_a_draw_again_is_the_same_ticket(self, w: Stage) -> None:
        """A draw whose answer was lost is repeated by the client: there is one ticket."""
        owner, first = await w.held()
        _, again = await w.held(owner=owner)
        assert again == first
        assert len(await w.seen()) == 1
        await w.a.give_back(owner)
        assert not await w.seen()

    async def test_draws_that_arrive_together_are_one_ticket(self, w: Stage) -> None:
        """A retry may be on its way beside the first request."""
        owner = w.claim()
        tokens = await asyncio.gather(*(w.held(owner=owner, store=each) for each in (w.a, w.b, w.a, w.b)))
        assert len({token for _, token in tokens}) == 1
        assert len(await w.seen()) == 1

    async def test_one_of_many_rivals_holds(self, w: Stage) -> None:
        """Tries of two clients, all at once: one of them holds."""
        places = await asyncio.gather(*(w.attempt(store=each) for each in (w.a, w.b) * 10))
        assert sum(isinstance(place, Place) for _, place in places) == 1
        assert len(await w.seen()) == 1

    @needs("lines")
    async def test_a_draw_again_keeps_the_place(self, w: Stage) -> None:
        """A waiter that draws again does not move to the end."""
        first, second, third = [(await w.draw())[0] for _ in range(3)]
        _, again = await w.draw(owner=second)
        assert again.token is None
        await w.a.give_back(first)
        await w.holds(second)
        await w.waits(third)

    async def test_a_draw_again_prolongs(self, w: Stage) -> None:
        """A repeated draw is a sign of life, with the ttl of its claim."""
        owner, first = await w.held(ttl=self.ttl)
        await w.draw(owner=owner, ttl=LONG)
        await w.death()
        await w.still_holds(owner, first)

    async def test_a_give_back_again(self, w: Stage) -> None:
        """A release whose answer was lost is repeated: it finds no ticket, and raises nothing."""
        owner, _ = await w.draw()
        assert await w.a.give_back(owner) is None
        assert isinstance(await w.a.give_back(owner), Gone)
        assert isinstance(await w.b.give_back(owner), Gone)

    async def test_a_give_back_of_nothing(self, w: Stage) -> None:
        """A give-back that overtakes its draw finds no ticket, and makes none."""
        assert isinstance(await w.a.give_back(w.claim()), Gone)
        await w.held()

    async def test_a_give_back_is_the_owners(self, w: Stage) -> None:
        """Another owner's give-back leaves the holder alone."""
        holder, token = await w.held()
        await w.a.give_back(w.claim())
        late, _ = await w.attempt()
        await w.b.give_back(late)
        await w.still_holds(holder, token)

    async def test_a_try_leaves_nothing(self, w: Stage) -> None:
        """A try that was refused has no ticket in the line."""
        holder, _ = await w.draw()
        owner, busy = await w.attempt(store=w.b)
        assert isinstance(busy, Busy)
        assert busy.look_after is None or 0 <= busy.look_after <= self.ended_after(LONG)
        await w.gone(owner)
        assert len(await w.seen()) == 1
        await w.a.give_back(holder)
        await w.held(store=w.b)

    @needs("lines")
    async def test_a_try_of_who_waits(self, w: Stage) -> None:
        """An owner that waits already is not refused: it keeps its place."""
        await w.draw()
        owner, _ = await w.draw()
        _, place = await w.attempt(owner=owner)
        assert isinstance(place, Place)
        assert place.token is None
        await w.waits(owner)

    @needs("lines", "shares")
    async def test_a_try_of_readers(self, w: Stage) -> None:
        """A try of a reader holds beside readers, and is refused behind a waiting writer."""
        await w.draw("reader")
        _, place = await w.attempt("reader", store=w.b)
        assert isinstance(place, Place)
        assert place.token is not None
        await w.draw("writer")
        _, busy = await w.attempt("reader", store=w.b)
        assert isinstance(busy, Busy)


class LifePromises(OnStage):
    """Life of a ticket, and what becomes of one that died."""

    async def test_a_ticket_lives_for_its_ttl_and_not_longer(self, w: Stage) -> None:
        """Without a sign of life a rival is refused until the ttl is over, and holds then."""
        sent_at = self.now()
        await w.held(ttl=self.ttl)
        freed_at = await self.freed(w.b, w.claim(), by=self.now() + self.ended_after(self.ttl))
        assert freed_at >= self.lasted_until(sent_at, self.ttl)

    async def test_an_odd_ttl_is_not_cut(self, w: Stage) -> None:
        """Fractions are rounded up, never down, and ttls below the store's minimum up to that."""
        for asked in (MIN_TTL, self.ttl * 1.15):
            ttl = max(asked, self.minimum_ttl)
            while True:
                name, sent_at = w.fresh(), self.now()
                place = await w.a.draw(w.claim(name=name, ttl=asked), only_if_it_holds=not self.lines)
                if isinstance(place, Place) and place.token is not None:
                    break
                assert self.now() >= self.lasted_until(sent_at, ttl), f"it does not hold: {place}"
            freed_at = await self.freed(w.a, w.claim(name=name), by=self.now() + self.ended_after(ttl))
            assert freed_at >= self.lasted_until(sent_at, ttl)

    async def test_a_keep_counts_from_its_own_moment(self, w: Stage) -> None:
        """A rival is refused for a whole ttl after the keep was sent, and holds then."""
        for attempt in range(TRIES):
            ttl, name = self.ttl * 2**attempt, w.fresh()
            sent_at = self.now()
            owner, _ = await w.held(name=name, ttl=ttl)
            await self.pass_time(ttl * 0.4)
            kept_at = self.now()
            if isinstance(await w.keep(owner), Place):
                freed_at = await self.freed(w.b, w.claim(name=name), by=self.now() + self.ended_after(ttl))
                assert freed_at >= self.lasted_until(kept_at, ttl)
                return
            assert self.now() >= self.lasted_until(sent_at, ttl), "a living ticket was not kept"
        msg = f"this machine needs longer than ttl = {self.ttl} for one keep; declare a longer one"
        raise AssertionError(msg)

    @needs("lines")
    async def test_a_dead_holder_is_passed_over(self, w: Stage) -> None:
        """The first that waits holds when it looks at the moment that the store has named."""
        _, waiter, place = await w.short_of_life()
        await self.pass_time(place.look_after + self.resolution)
        await w.holds(waiter, by=self.now() + self.expiry_lag)

    @needs("lines")
    async def test_the_moment_to_look(self, w: Stage) -> None:
        """The first that waits looks when the holder would have died."""
        holder, _, place = await w.short_of_life()
        assert 0 <= place.look_after <= self.ended_after(holder.ttl)

    async def test_the_dead_do_not_return(self, w: Stage) -> None:
        """A late keep does not revive a ticket, although no rival came."""
        owner, _ = await w.draw(ttl=self.ttl)
        await w.death()
        await w.gone(owner)
        await w.held(store=w.b)
        await w.gone(owner)

    async def test_a_give_back_after_the_death(self, w: Stage) -> None:
        """Its answer is that the ticket is gone: another owner could have held the name meanwhile."""
        owner, _ = await w.draw(ttl=self.ttl)
        await w.death()
        assert isinstance(await w.a.give_back(owner), Gone)
        assert not await w.seen()

    @needs("lines")
    async def test_a_dead_waiter_is_passed_over(self, w: Stage) -> None:
        """A waiter that died does not hold, and the one behind it does."""
        holder, _ = await w.draw()
        await w.draw(ttl=self.ttl)
        alive, _ = await w.draw(store=w.b)
        await w.death()
        await w.a.give_back(holder)
        await w.holds(alive)

    @needs("lines")
    async def test_several_dead_are_passed_over(self, w: Stage) -> None:
        """All that died are passed over in one step."""
        for _ in range(3):
            await w.draw(ttl=self.ttl)
        alive, _ = await w.draw(store=w.b)
        await w.death()
        await w.holds(alive, by=self.now())

    async def test_a_keep_prolongs(self, w: Stage) -> None:
        """A ticket that is kept in time lives for longer than its ttl, under one token."""
        _, owner = await w.kept_beyond_its_ttl()
        kept_at = self.now()
        answer = await w.keep(owner)
        _, found = await w.attempt(name=owner.name, store=w.b)
        stood_still = isinstance(answer, Gone) or self.now() >= self.lasted_until(kept_at, owner.ttl)
        assert isinstance(found, Busy) or stood_still  # of a machine that slept through the ttl nothing is known

    async def test_a_keep_never_creates(self, w: Stage) -> None:
        """A keep of a ticket that was never drawn finds none, and makes none."""
        owner = w.claim()
        await w.gone(owner)
        await w.gone(owner)
        await w.held()

    async def test_a_keep_never_shortens(self, w: Stage) -> None:
        """A keep with a shorter ttl leaves the longer life of the ticket."""
        owner, first = await w.held(ttl=LONG)
        await w.place(owner, ttl=self.ttl)
        await w.death()
        await w.still_holds(owner, first)

    async def test_a_keep_for_longer(self, w: Stage) -> None:
        """A keep with a longer ttl lets the ticket live for that."""
        owner, first = await w.held(ttl=self.ttl)
        await w.place(owner, ttl=LONG)
        await w.death()
        await w.still_holds(owner, first)

    @needs("lines")
    async def test_a_holder_that_stood_still(self, w: Stage) -> None:
        """A holder whose ticket died learns from its keep and from its give-back that another holds the name."""
        owner, waiter, _ = await w.short_of_life()
        await self.expire(owner.ttl)
        await w.holds(waiter, store=w.b)
        assert (await w.gone(owner)).taken
        assert isinstance(await w.a.give_back(owner), Gone)
        await w.holds(waiter)

    @needs("lines")
    async def test_a_waiter_is_kept(self, w: Stage) -> None:
        """A waiter that is kept in time waits for longer than its ttl, and holds then."""
        holder, waiter = await w.kept_beyond_its_ttl(waits=True)
        assert holder is not None
        await w.a.give_back(holder)
        await w.holds(waiter, store=w.b)

    async def test_an_empty_keep(self, w: Stage) -> None:
        """No tickets, no answers, and no error."""
        assert list(await w.a.keep([])) == []

    async def test_a_thousand_are_kept_in_one_call(self, w: Stage) -> None:
        """No limit of a statement, a script or a packet cuts the batch."""
        names = [f"{w.name}/{number}" for number in range(1000)]
        drawn = []
        for start in range(0, 1000, 50):
            drawn += await asyncio.gather(*(w.draw(name=name) for name in names[start : start + 50]))
        async with self.soon():
            places = await w.a.keep([(claim, place.number) for claim, place in drawn])
        assert all(place in {HELD, drawn[number][1]} for number, place in enumerate(places))
        assert len(places) == 1000

    async def test_answers_are_in_order(self, w: Stage) -> None:
        """Each ticket of a keep has an answer of its own, also one that stands there twice."""
        one, first = await w.draw(name=w.name + "1")
        two, second = await w.draw(name=w.name + "2")
        stranger = w.claim()
        places = await w.a.keep([(one, first.number), (stranger, 0), (two, second.number), (one, 0), (stranger, 0)])
        assert [isinstance(place, Place) for place in places] == [True, False, True, True, False]
        assert isinstance(places[1], Gone)

    async def test_keeps_may_be_in_flight_together(self, w: Stage) -> None:
        """Batches that overlap get their own answers each."""
        mine, place = await w.draw()
        stranger = w.claim(name=w.fresh())
        batches = [[(mine, place.number)] * number + [(stranger, 0)] * (9 - number) for number in range(10)]
        async with self.soon():
            answers = await asyncio.gather(*(w.a.keep(batch) for batch in batches))
        for number, answer in enumerate(answers):
            assert [isinstance(each, Place) for each in answer] == [True] * number + [False] * (9 - number)

    @needs("lines", "shares")
    async def test_several_of_one_name_in_one_keep(self, w: Stage) -> None:
        """Tickets of one line are kept together, those that hold and those that wait."""
        owners = [(await w.draw("permit", 2))[0] for _ in range(3)]
        places = await w.a.keep([(owner, 0) for owner in owners])
        assert [isinstance(place, Place) and place.token is not None for place in places] == [True, True, False]

    @needs("lines")
    async def test_a_ticket_that_stays_for_a_while(self, w: Stage) -> None:
        """A ticket that is given back later stands there for exactly so long, also if the call is repeated."""
        owner, _ = await w.draw()
        waiter, _ = await w.draw(store=w.b)
        assert await w.a.give_back(owner, after=2 * self.ttl) is None
        assert await w.a.give_back(owner, after=LONG) is None
        await w.waits(waiter)
        await self.expire(2 * self.ttl)
        await w.holds(waiter)

    @needs("keeps_alone")
    async def test_a_ticket_stays_although_its_client_has_closed(self, w: Stage) -> None:
        """The process that ran a job may have ended; the store alone keeps its lock for so long."""
        owner, _ = await w.draw()
        assert await w.a.give_back(owner, after=LONG) is None
        await w.a.aclose()
        _, busy = await w.attempt(store=w.b)
        assert isinstance(busy, Busy)

    async def test_no_keep_reaches_what_is_given_back_later(self, w: Stage) -> None:
        """A heartbeat that is still on its way does not prolong such a ticket."""
        owner, _ = await w.draw()
        await w.a.give_back(owner, after=self.ttl)
        await w.gone(owner, ttl=LONG)
        await w.death()
        await w.held(store=w.b)

    async def test_another_client_keeps_it(self, w: Stage) -> None:
        """The owner is the proof, not the connection: a client that reconnected goes on."""
        _, owner = await w.kept_beyond_its_ttl(by=w.b)
        assert await w.b.give_back(owner) is None
        await w.held(name=owner.name)

    @needs("lines")
    async def test_a_waiter_lives_for_a_short_while(self, w: Stage) -> None:
        """A waiter that dies at the head holds up the line for `WAITER_TTL` at most, whatever its ttl."""
        holder, _ = await w.draw()
        dead, _ = await w.draw(ttl=10 * WAITER_TTL)
        alive, _ = await w.draw(store=w.b)
        for _ in range(5):
            await self.pass_time(self.ended_after(WAITER_TTL) / 5)
            await w.waits(alive)
        await w.gone(dead)
        await w.a.give_back(holder)
        await w.holds(alive)

    async def test_a_keep_of_another_ticket_of_the_owner(self, w: Stage) -> None:
        """A draw that arrives late, after the ticket ended, is not the ticket that the client keeps."""
        owner, first = await w.draw()
        if first.number == 0:
            return  # the store has no numbers
        await w.a.give_back(owner)
        _, second = await w.draw(owner=owner)
        assert second.number != first.number
        (place,) = await w.a.keep([(owner, first.number)])
        assert isinstance(place, Gone)


@needs("lines")
class BellPromises(OnStage):
    """The bell: who hears that a ticket holds."""

    async def test_a_give_back_wakes_the_next_alone(self, w: Stage) -> None:
        """The first that waits hears that it holds, with its token; the others hear nothing."""
        holder, _ = await w.draw()
        clients = (w.b, w.a, w.b)
        owners = [w.claim() for _ in clients]
        bells = [w.listen(owner, store=each) for owner, each in zip(owners, clients, strict=True)]
        for owner, each in zip(owners, clients, strict=True):
            await w.draw(owner=owner, store=each)
        await w.hears()
        await w.a.give_back(holder)
        await w.rings(bells[0])
        await asyncio.sleep(0.1)
        assert not bells[1].held
        assert not bells[2].held
        token = await w.holds(owners[0], store=w.b)
        assert all(place.token == token for place in bells[0].held)

    @needs("shares")
    async def test_readers_are_woken_together(self, w: Stage) -> None:
        """A writer that leaves lets all readers in, and each of them hears it."""
        writer, _ = await w.draw("writer")
        owners = [w.claim() for _ in range(3)]
        bells = [w.listen(owner, store=w.b) for owner in owners]
        for owner in owners:
            await w.draw("reader", owner=owner, store=w.b)
        await w.hears()
        for bell in bells:
            bell.clear()
        await w.a.give_back(writer)
        await w.until(lambda: all(bells))
        assert len({await w.holds(owner, store=w.b) for owner in owners}) == 1

    async def test_who_asks_is_not_rung(self, w: Stage) -> None:
        """A ticket that holds by its own draw has the answer, and no bell."""
        owner = w.claim()
        bell = w.listen(owner)
        await w.draw(owner=owner)
        await w.place(owner)
        await asyncio.sleep(0.1)
        assert not bell.held

    async def test_a_give_back_rings(self, w: Stage) -> None:
        """A waiter hears of each release, time after time."""
        for _ in range(5):
            holder, _ = await w.draw()
            owner = w.claim()
            bell = w.listen(owner, store=w.b)
            await w.draw(owner=owner, store=w.b)
            await w.hears()
            bell.clear()
            await w.a.give_back(holder)
            await w.rings(bell)
            await w.holds(owner)
            await w.b.give_back(owner)
            bell.stop()

    async def test_a_give_back_races_a_draw(self, w: Stage) -> None:
        """A release beside the draw of the next owner: its ticket holds by its answer, or its bell rings."""
        for _ in range(20):
            holder, _ = await w.draw()
            owner = w.claim()
            bell = w.listen(owner, store=w.b)
            (_, place), _ = await asyncio.gather(w.draw(owner=owner, store=w.b), w.a.give_back(holder))
            if place.token is None and not self.bell_lag:
                await w.rings(bell)
            await w.holds(owner, store=w.b)
            bell.stop()
            await w.b.give_back(owner)

    async def test_a_lost_bell_is_repaired(self, w: Stage) -> None:
        """A waiter that heard nothing learns from its keep that it holds."""
        holder, _ = await w.draw()
        waiter, _ = await w.draw(store=w.b)  # it listens to nothing
        await w.a.give_back(holder)
        await w.holds(waiter, store=w.b)

    async def test_no_bell_after_the_stop(self, w: Stage) -> None:
        """A bell that was stopped stays silent."""
        holder, _ = await w.draw()
        owner = w.claim()
        bell = w.listen(owner, store=w.b)
        await w.draw(owner=owner, store=w.b)
        await w.hears()
        bell.stop()
        bell.clear()
        await w.a.give_back(holder)
        await w.holds(owner)
        await asyncio.sleep(0.2)
        assert not bell

    @needs("ends")
    async def test_an_end_rings(self, w: Stage) -> None:
        """A holder hears that an operator has ended its ticket, and the next ticket holds."""
        owner = w.claim()
        bell = w.listen(owner)
        _, token = await w.held(owner=owner)
        waiter, _ = await w.draw(store=w.b)
        await w.place(owner)  # who holds for longer than a moment keeps its ticket, and may begin to listen then
        await w.hears()
        bell.clear()
        assert await w.b.end(w.name, token, "maintenance") is True
        await w.until(lambda: any(isinstance(news, Gone) or news is None for news in bell))
        await w.holds(waiter)


@needs("ends")
class EndPromises(OnStage):
    """An operator ends tickets."""

    async def test_an_end_has_a_reason(self, w: Stage) -> None:
        """The keep and the give-back of the owner answer with the operator's words."""
        reason = "the host is gone; 'quoted' \u00e9"
        owner, token = await w.held()
        assert await w.b.end(w.name, token, reason) is True
        assert (await w.gone(owner)).reason == reason
        assert await w.a.give_back(owner) == Gone(reason, taken=False)

    @needs("lines")
    async def test_an_end_lets_the_next_hold(self, w: Stage) -> None:
        """The first that waits holds, with a higher token."""
        _, token = await w.held()
        waiter, _ = await w.draw(store=w.b)
        await w.b.end(w.name, token, "over")
        assert await w.holds(waiter) > token

    async def test_an_end_of_another_token(self, w: Stage) -> None:
        """An operator who means an earlier holder does not meet a later one."""
        owner, token = await w.held()
        assert await w.b.end(w.name, token - 1, "over") is False
        assert await w.b.end(w.name, token + 1, "over") is False
        await w.still_holds(owner, token)

    @needs("lines", "shares")
    async def test_an_end_of_readers(self, w: Stage) -> None:
        """Readers share a token: all of them end, and the writer behind them holds."""
        readers = [await w.held("reader", store=each) for each in (w.a, w.b)]
        writer, _ = await w.draw("writer")
        assert await w.a.end(w.name, readers[0][1], "over") is True
        for owner, _ in readers:
            assert (await w.gone(owner)).reason == "over"
        await w.holds(writer)


@needs("passes_on")
class PassPromises(OnStage):
    """A ticket changes hands."""

    async def test_a_ticket_passes_to_an_heir(self, w: Stage) -> None:
        """The name is never free in between; token, ttl and label are the heir's."""
        owner, token = await w.held(ttl=self.ttl)
        heir = w.claim(label="second")
        place = await w.pass_on(owner, heir)
        assert isinstance(place, Place)
        assert place.token is not None
        assert place.token > token
        (seen,) = await w.seen()
        assert (seen.token, seen.holder, seen.label) == (place.token, heir.holder, "second")
        await w.death()
        await w.still_holds(heir, place.token)

    async def test_a_pass_again_is_one_pass(self, w: Stage) -> None:
        """Its answer may have been lost."""
        owner, _ = await w.held()
        heir = w.claim()
        first, again = await w.pass_on(owner, heir), await w.pass_on(owner, heir)
        assert isinstance(first, Place)
        assert first == again

    async def test_the_former_owner_has_nothing(self, w: Stage) -> None:
        """Its late keep and its late give-back do not reach the heir's ticket."""
        owner, _ = await w.held()
        heir = w.claim()
        await w.pass_on(owner, heir)
        await w.gone(owner, ttl=10 * LONG)
        assert isinstance(await w.a.give_back(owner), Gone)
        (seen,) = await w.seen()
        assert seen.remaining <= self.ended_after(LONG)
        assert seen.holder == heir.holder

    async def test_a_pass_of_nothing(self, w: Stage) -> None:
        """A free name, another owner's ticket, and one that has changed hands already are not passed on."""
        never, late = w.claim(), w.claim()
        assert isinstance(await w.pass_on(never, late), Gone)
        owner, _ = await w.held()
        heir = w.claim()
        assert isinstance(await w.pass_on(never, late), Gone)
        await w.pass_on(owner, heir)
        assert isinstance(await w.pass_on(owner, late), Gone)
        await w.place(heir)

    @needs("lines")
    async def test_waiters_keep_their_places_behind_an_heir(self, w: Stage) -> None:
        """No room was freed, so that no waiter holds; the give-back of the heir lets the first one in."""
        owner, _ = await w.held()
        waiter, _ = await w.draw(store=w.b)
        heir = w.claim()
        await w.pass_on(owner, heir)
        await w.waits(waiter)
        await w.b.give_back(heir)
        await w.holds(waiter)

    @needs("shares")
    async def test_a_share_passes_on_with_its_number(self, w: Stage) -> None:
        """A permit keeps its number under a higher token; a reader keeps the token that it shares."""
        await w.held("permit", 2)
        owner, permit = await w.held("permit", 2)
        place = await w.pass_on(owner, w.claim(Permit(2)))
        assert isinstance(place, Place)
        assert place.permit == 1
        assert place.token is not None
        assert place.token > permit
        name = w.fresh()
        await w.held("reader", name=name)
        owner, shared = await w.held("reader", name=name)
        place = await w.pass_on(owner, w.claim(READER, name=name))
        assert isinstance(place, Place)
        assert place.token == shared


ODD_NAMES = (
    *("a", "A", " a", "a ", "a b", "a+b", "a%20b", "0", "00", "-1", "None", "null", "true"),
    *("a/b", "a%2Fb", "a//b", "a\\b", "/a", "a/", ".", "..", "../a", "../../etc/passwd", "a.lock", "-rf"),
    *("a:b", "a::b", "{a}", "{a}b", "a{}", "{0}", "%s", "%(name)s", "%", "%00", "$1", "${HOME}"),
    *("*", "?", "[a]", "a*", "_", "'", '"', "''", "`a`", "a'; DROP TABLE locks; --", "' OR '1'='1"),
    *("#", "a#b", "a?b=c", "a&b", "a,b", "a;b", "a|b", "a~b", "<a>"),
    *("a\N{COMBINING ACUTE ACCENT}", "\N{LATIN SMALL LETTER A WITH ACUTE}", "\N{LATIN SMALL LETTER SHARP S}", "ss"),
    *("\N{LATIN SMALL LETTER DOTLESS I}", "\N{FULLWIDTH LATIN SMALL LETTER A}", "\N{LOCK}"),
    *("\N{ZERO WIDTH SPACE}", "a\N{ZERO WIDTH SPACE}", "a\N{NO-BREAK SPACE}b", "\N{RIGHT-TO-LEFT OVERRIDE}a"),
    *("x" * 511, "x" * 511 + "y", "x" * 511 + "z", "\N{LOCK}" * 127, "\N{LOCK}" * 128, "/" * 512, "%" * 512),
)
"""Valid names that are easily escaped wrongly, folded into one another, or cut."""

ODD_TEXTS = (
    "",
    " ",
    "0",
    "null",
    'it\'s "quoted" `here` \\ there',
    "two\r\nlines\tand a tab",
    '{"json": [1, 2]}',
    "%s {0} $1 :name ?",
    "'); DROP TABLE locks; --",
    "a\N{COMBINING ACUTE ACCENT}\N{LATIN SMALL LETTER A WITH ACUTE}\N{RIGHT-TO-LEFT OVERRIDE}",
    "\N{LOCK}" * 1024,
)


class LookPromises(OnStage):
    """Lists, and names as untrusted text."""

    @needs("lines", "shares")
    async def test_what_is_seen(self, w: Stage) -> None:
        """A look shows those that hold, then those that wait, by their public digests."""
        holder, place = await w.draw("permit", 1, label="one")
        waiter, _ = await w.draw("lock", label="two")
        seen = await w.seen()
        assert [(each.mode, each.label) for each in seen] == [(Permit(1), "one"), (LOCK, "two")]
        assert [(each.holder, each.token) for each in seen] == [(holder.holder, place.token), (waiter.holder, None)]
        assert seen[0].permit == 0
        assert [len(each) for each in await w.b.tickets([w.fresh(), w.name])] == [0, 2]

    async def test_the_seconds_that_are_left(self, w: Stage) -> None:
        """A look shows the seconds until the ticket dies, and not the ttl of its claim."""
        ttl = 10 * self.ttl
        await w.draw(ttl=ttl)
        granted_by = self.now()
        await self.pass_time(self.ttl)
        asked_at = self.now()
        (seen,) = await w.seen()
        assert 0 < seen.remaining <= granted_by + self.ended_after(ttl) - asked_at
        assert seen.since is None or seen.since >= 0

    async def test_a_look_prolongs_nothing(self, w: Stage) -> None:
        """A ticket dies although others look at it."""
        await w.draw(ttl=self.ttl)
        await self.pass_time(self.ttl / 2)
        await w.seen()
        await w.death()
        assert not await w.seen()

    async def test_names_come_in_pages(self, w: Stage) -> None:
        """Each name with the prefix appears, page by page, and a prefix is no pattern."""
        prefix = w.fresh("page_%*/") + "/"
        names = [f"{prefix}{number:02d}" for number in range(7)]
        for name in (*names, "other/" + prefix, prefix.replace("_%*", "-.-")):
            await w.draw(name=name)
        found: list[str] = []
        cursor: str | None = None
        while True:
            page, cursor = await w.b.names(prefix, cursor, 3)
            found += page
            if cursor is None:
                break
        assert sorted(set(found)) == names

    async def test_names_of_512_bytes(self, w: Stage) -> None:
        """Long names that differ in their last characters are different names."""
        longest = "\u00e9" * 200 + "x" * 110
        names = [longest + end for end in ("ab", "aB", "a ", "\u00e4", "%2", "a")]
        assert max(len(name.encode()) for name in names) == 512
        for name in names:
            await w.held(name=name)

    async def test_no_two_names_are_one(self, w: Stage) -> None:
        """All odd names are held at once, each shows its own ticket, and a give-back frees one of them alone."""
        held = {name: await w.held(name=name) for name in ODD_NAMES}
        for name, seen in zip(ODD_NAMES, await w.b.tickets(ODD_NAMES), strict=True):
            owner, token = held[name]
            assert [(each.holder, each.token) for each in seen] == [(owner.holder, token)], name
        given_back = ODD_NAMES[::2]
        for name in given_back:
            await w.a.give_back(held[name][0])
        for name, seen in zip(ODD_NAMES, await w.b.tickets(ODD_NAMES), strict=True):
            assert len(seen) == (name not in given_back), name
        kept = await w.b.keep([(owner, 0) for owner, _ in held.values()])
        assert [isinstance(each, Place) for each in kept] == [name not in given_back for name in ODD_NAMES]

    async def test_labels_are_text(self, w: Stage) -> None:
        """A look shows a label as it was given, and None is None."""
        for label in (None, *ODD_TEXTS):
            name = w.fresh()
            await w.draw(name=name, label=label)
            ((seen,),) = await w.b.tickets([name])
            assert seen.label == label


class RulesPromises(BackendUnderTest):
    """A comparison with the rules, answer by answer."""

    async def test_it_answers_as_the_rules(self, backend: Backend, reopen: Reopen) -> None:
        """Random verbs of two clients have the answers of `fencing_sdk.abc.line.Line`."""
        other = reopen()
        settable = type(self).pass_time is not BackendUnderTest.pass_time
        for seed in range(self.histories):
            for attempt in range(TRIES):
                try:
                    await Comparison(
                        (backend, other),
                        seed + 1_000_000 * attempt,
                        (lambda now: self.pass_time(now - self.now())) if settable else None,
                        sets_back=False,
                        redraws=self.redraws,
                    ).play()
                    break
                except TooSlowError:
                    assert attempt < TRIES - 1
        await other.aclose()
