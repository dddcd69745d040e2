"""
Backends that break one promise each, and the tests of the suite that must notice.

Run by `test_suite_catches.py`: a test of the suite that no broken backend fails proves nothing.
Most of these were seen in real lock libraries, or in the first stores of this one.
"""

import asyncio
import itertools
import time
from collections import deque
from contextlib import asynccontextmanager

import pytest

from fencing_sdk.abc import ALL_MODES, READER, Busy, Gone, Permit, Place
from fencing_sdk.abc.line import REASON_TTL, Line, Row
from fencing_sdk.errors import BackendRefusedError, BackendUnavailableError
from fencing_sdk.testing import BackendSuite

EXPECTED: dict[str, tuple[str, ...]] = {}
"""Broken backend -> the tests that must fail on it."""


class Store:
    """What the clients of one store share."""

    def __init__(self):
        self.lines, self.bells, self.last, self.time = {}, {}, 0, 0.0
        self.reachable = True


class Sound:
    """Breaks nothing: the rules behind a dictionary."""

    modes = ALL_MODES
    rings = True
    line_class = Line
    counter = False

    def __init__(self, store):
        self.store = store
        self.connected = True

    def line(self, name):
        if name not in self.store.lines:
            self.store.lines[name] = self.line_class(self.next_token)
        return self.store.lines[name]

    def next_token(self, last):
        self.store.last = self.store.last + 1 if self.counter else max(self.store.last + 1, time.time_ns() // 10_000)
        return self.store.last

    def step(self, operation, name, rule, asked_by=None):
        if not self.store.reachable:
            raise BackendUnavailableError("Sound", operation) from ConnectionError("refused")
        line = self.line(name)
        answer = rule(line, self.store.time)
        self.ring(line, asked_by)
        line.rung.clear()
        return answer

    def ring(self, line, asked_by):
        for row in line.rung:
            if row.owner != asked_by:
                self.tell(row.owner, Place(row.token, row.permit, row.number))

    def tell(self, owner, news):
        if owner in self.store.bells:
            asyncio.get_running_loop().call_soon(self.store.bells[owner], news)

    async def draw(self, claim, *, only_if_it_holds=False):
        def rule(line, now):
            return line.draw(claim, now, only_if_it_holds=only_if_it_holds)

        return self.step("acquire", claim.name, rule, claim.owner)

    async def keep(self, tickets):
        return [
            self.step("renew", claim.name, lambda line, now, it=claim, of=number: line.keep(it, now, of), claim.owner)
            for claim, number in tickets
        ]

    async def give_back(self, claim, *, after=0.0):
        return self.step("release", claim.name, lambda line, now: line.give_back(claim.owner, now, after))

    async def pass_on(self, claim, heir):
        return self.step("renew", claim.name, lambda line, now: line.pass_on(claim.owner, heir, now), heir.owner)

    async def end(self, name, token, reason):
        over = self.step("end", name, lambda line, now: line.end(token, reason, now))
        for row in over:
            self.tell(row.owner, Gone(reason))
        return bool(over)

    async def tickets(self, names):
        return [self.step("inspect", name, lambda line, now: line.seen(now)) for name in names]

    async def names(self, prefix, cursor, limit):
        page = sorted(name for name in self.store.lines if name.startswith(prefix) and name > (cursor or ""))[:limit]
        return page, page[-1] if len(page) == limit else None

    def listen(self, claim, bell):
        self.store.bells[claim.owner] = bell
        return lambda: self.store.bells.pop(claim.owner, None)

    async def aclose(self):
        pass


class Bench(BackendSuite):
    passes_on = True
    processes = False
    patience = 0.3

    backend_class = Sound

    @pytest.fixture
    def store(self):
        self.store = Store()
        return self.store

    @pytest.fixture
    def reopen(self, store):
        return lambda: self.backend_class(store)

    @pytest.fixture
    def backend(self, reopen):
        return reopen()

    @asynccontextmanager
    async def break_store(self, backend):
        self.store.reachable = False
        yield
        self.store.reachable = True

    def now(self):
        return self.store.time

    async def pass_time(self, seconds):
        self.store.time += seconds
        await asyncio.sleep(0)

    async def purge(self, backend):
        for name, line in list(self.store.lines.items()):
            if not line.seen(self.store.time):
                del self.store.lines[name]


class TestSound(Bench):
    """The control: what is broken below is broken by a few lines, and not by this bench."""

    patience = 60.0


def caught_by(*tests, bench=Bench, **declared):
    """Put a broken backend on a bench of its own, which *tests* must fail."""

    def expect(broken):
        EXPECTED[broken.__name__] = tuple(f"test_{test}" for test in tests)
        by_rules = issubclass(broken, Line)  # the rules are broken, and the rest is sound
        backend = type(broken.__name__, (Sound,), {"line_class": broken}) if by_rules else broken
        name = f"Test{broken.__name__}"
        globals()[name] = type(name, (bench,), {"backend_class": backend, "__module__": __name__, **declared})
        return broken

    return expect


# The rules: who holds


@caught_by(
    "second_waits",
    "a_newcomer_stands_behind",
    "names_are_independent",
    "one_of_many_rivals_holds",
    "many_tasks_count_exactly",
    "tasks_that_are_cancelled_at_random_harm_no_other",
)
class EveryTicketHolds(Line):
    def settle(self, now):
        for owner in list(self.rows):
            row = self._living(owner, now)
            if row is not None and row.token is None:
                row.token = self.last = self.next_token(self.last)
                row.permit = 0 if isinstance(row.mode, Permit) else None
                self.rung.append(row)
        return list(self.rows.values())


class Settling(Line):
    modes_count = widths_count = stops = True

    def settle(self, now):
        held = []
        for owner in list(self.rows):
            row = self._living(owner, now)
            if row is None:
                continue
            if row.token is None:
                other = self.modes_count and held and row.mode.word != held[0].mode.word
                if held and (other or (self.widths_count and len(held) >= row.mode.width)):
                    if self.stops:
                        break
                    continue
                self.begin(row, held)
                self.rung.append(row)
            held.append(row)
        return held

    def begin(self, row, held):
        shares = held and row.mode == READER
        row.token = held[0].token if shares else self.next_token(self.last)
        self.last = max(self.last, row.token)
        if isinstance(row.mode, Permit):
            taken = {each.permit for each in held}
            row.permit = next(number for number in itertools.count() if number not in taken)


@caught_by("readers_and_permits_exclude_each_other", "a_lock_is_alone")
class ModesDoNotCount(Settling):
    modes_count = False


@caught_by("a_lock_is_alone", "so_many_permits", "a_writer_waits_for_all_readers")
class WidthsDoNotCount(Settling):
    modes_count = widths_count = False


@caught_by("a_try_does_not_overtake", "a_reader_waits_behind_a_writer", "widths_that_differ_keep_the_order")
class WhoFitsOvertakes(Settling):
    stops = False


@caught_by("order_of_arrival")
class LastComeFirstServed(Line):
    def draw(self, claim, now, **options):
        if claim.owner not in self.rows:
            before = self.rows
            holding = {owner: row for owner, row in before.items() if row.token is not None}
            row = Row(claim.owner, claim.mode, claim.label, self.drawn, now + claim.ttl, claim.ttl, now)
            self.rows = {**holding, claim.owner: row, **before}
        return super().draw(claim, now, **options)


@caught_by("the_lowest_free_permit", "it_answers_as_the_rules")
class TheHighestFreePermit(Settling):
    def begin(self, row, held):
        super().begin(row, held)
        if isinstance(row.mode, Permit):
            row.permit = max(set(range(row.mode.of)) - {each.permit for each in held})


@caught_by("permits_differ")
class OnePermitForAll(Settling):
    def begin(self, row, held):
        super().begin(row, held)
        row.permit = row.permit and 0


@caught_by("a_dead_waiter_is_passed_over", "several_dead_are_passed_over")
class DeadWaitersBlock(Line):
    def settle(self, now):
        waiting = next((row for row in self.rows.values() if row.token is None), None)
        if waiting is not None and waiting.dies <= now:
            return [row for row in self.rows.values() if row.token is not None and row.dies > now] or [waiting]
        return super().settle(now)


# Tokens


@caught_by(
    "tokens_grow_over_releases",
    "tokens_grow_in_the_line",
    "tokens_grow_over_deaths",
    "tokens_grow_when_an_owner_comes_back",
)
class OneTokenForAll(Sound):
    def next_token(self, last):
        return 7


@caught_by("tokens_grow_over_ends", "tokens_grow_over_releases", "it_answers_as_the_rules")
class TheTokenCountsTickets(Line):
    def settle(self, now):
        self.next_token = lambda _: len(self.rows)
        return super().settle(now)


@caught_by("tokens_grow_for_each_name")
class CountsForOneNameAtATime(Sound):
    counter = True
    name = ""

    async def draw(self, claim, **options):
        if claim.name != self.name:
            self.name, self.store.last = claim.name, 0
        return await super().draw(claim, **options)


@caught_by("readers_share_a_token", "readers_behind_a_writer_share_a_token", "readers_share_with_those_who_came_late")
class ReadersHaveTokensOfTheirOwn(Settling):
    def begin(self, row, held):
        row.token = self.last = self.next_token(self.last)


@caught_by("tokens_grow_across_kinds", "a_writer_after_readers_is_higher")
class ReadersHaveAnOldToken(Settling):
    def begin(self, row, held):
        super().begin(row, held)
        if row.mode == READER:
            row.token = 1


class Counting(Bench):
    """A plain counter: right as long as it is not lost."""

    async def restart(self, backend, reopen):
        self.store.last, self.store.lines = 0, {}
        return reopen()

    async def purge(self, backend):
        self.store.last = 0


@caught_by("tokens_grow_after_a_clean_up", "tokens_grow_after_restarts", "tickets_survive_a_restart", bench=Counting)
class TheCounterDiesWithTheProcess(Sound):
    counter = True


# Repeated draws, and tries


@caught_by("a_draw_again_is_the_same_ticket", "draws_that_arrive_together_are_one_ticket")
class ARetryIsASecondTicket(Line):
    def draw(self, claim, now, **options):
        if claim.owner in self.rows:
            row = self.rows.pop(claim.owner)
            row.owner = f"before {claim.owner}"
            self.rows = {row.owner: row, **self.rows}
        return super().draw(claim, now, **options)


@caught_by("a_draw_again_keeps_the_place")
class ARetryMovesToTheEnd(Line):
    def draw(self, claim, now, **options):
        if claim.owner in self.rows and self.rows[claim.owner].token is None:
            del self.rows[claim.owner]
        return super().draw(claim, now, **options)


@caught_by("a_draw_again_prolongs")
class ARetryIsNoSignOfLife(Line):
    def draw(self, claim, now, **options):
        row = self._living(claim.owner, now)
        return super().draw(claim, now, **options) if row is None else self._place(row, now)


@caught_by("a_try_leaves_nothing")
class ATryStays(Line):
    def draw(self, claim, now, *, only_if_it_holds=False, address=None):
        place = super().draw(claim, now)
        return Busy(place.look_after) if only_if_it_holds and place.token is None else place


@caught_by("first_holds_at_once", "tokens_grow_after_restarts", "a_closed_backend_opens_again")
class ATryIsRefused(Line):
    def draw(self, claim, now, *, only_if_it_holds=False, address=None):
        return Busy(1.0) if only_if_it_holds else super().draw(claim, now)


@caught_by("a_try_of_who_waits")
class ATryForgetsItsOwnTicket(Line):
    def draw(self, claim, now, *, only_if_it_holds=False, address=None):
        row = self.rows.get(claim.owner)
        if only_if_it_holds and row is not None and row.token is None:
            return Busy(1.0)
        return super().draw(claim, now, only_if_it_holds=only_if_it_holds)


@caught_by("a_try_of_readers")
class ATryOfAReaderOvertakes(Line):
    def draw(self, claim, now, *, only_if_it_holds=False, address=None):
        held = self.settle(now)
        if only_if_it_holds and claim.mode == READER and held and held[0].mode == READER:
            row = Row(claim.owner, READER, None, 0, now + claim.ttl, claim.ttl, now, held[0].token)
            self.rows = {claim.owner: row, **self.rows}
        return super().draw(claim, now, only_if_it_holds=only_if_it_holds)


# Life and death


@caught_by(
    "a_ticket_lives_for_its_ttl_and_not_longer",
    "a_dead_holder_is_passed_over",
    "a_give_back_after_the_death",
    "a_waiter_lives_for_a_short_while",
    "a_look_prolongs_nothing",
)
class NeverDies(Line):
    def _lives(self, row, now):
        return True


@caught_by("a_ticket_lives_for_its_ttl_and_not_longer", "an_odd_ttl_is_not_cut", "a_keep_counts_from_its_own_moment")
class DiesTooEarly(Line):
    def draw(self, claim, now, **options):
        return super().draw(replaced(claim, ttl=claim.ttl * 0.9), now, **options)

    def keep(self, claim, now, number=0):
        return super().keep(replaced(claim, ttl=claim.ttl * 0.9), now, number)


def replaced(claim, **changes):
    """`dataclasses.replace` for a class with an `__init__` of its own."""
    fields = {name: getattr(claim, name) for name in ("name", "ttl", "owner", "label", "mode")}
    return type(claim)(**fields | changes)


@caught_by("an_odd_ttl_is_not_cut")
class CutsFractionsOfSeconds(Line):
    def draw(self, claim, now, **options):
        return super().draw(replaced(claim, ttl=claim.ttl // 1), now, **options)


@caught_by("a_waiter_lives_for_a_short_while")
class WaitersLiveForTheirTtl(Line):
    def draw(self, claim, now, **options):
        place = super().draw(claim, now, **options)
        if claim.owner in self.rows:
            self.rows[claim.owner].dies, self.rows[claim.owner].longest = now + claim.ttl, claim.ttl
        return place


@caught_by("the_dead_do_not_return")
class AKeepRevives(Line):
    def keep(self, claim, now, number=0):
        if claim.owner in self.rows:
            self.rows[claim.owner].dies = now + claim.ttl
        return super().keep(claim, now, number)


@caught_by("a_keep_never_creates")
class AKeepCreates(Line):
    def keep(self, claim, now, number=0):
        row = Row(claim.owner, claim.mode, None, 1, now + claim.ttl, claim.ttl, now)
        self.rows.setdefault(claim.owner, row)
        return super().keep(claim, now, number)


@caught_by("a_keep_never_shortens")
class AKeepSetsTheEnd(Line):
    def keep(self, claim, now, number=0):
        place = super().keep(claim, now, number)
        if isinstance(place, Place):
            self.rows[claim.owner].dies = now + claim.ttl
        return place


@caught_by(
    "a_keep_prolongs",
    "a_keep_for_longer",
    "a_waiter_is_kept",
    "a_keep_counts_from_its_own_moment",
    "the_heartbeat_holds_the_lock_beyond_its_ttl",
)
class AKeepDoesNothing(Line):
    def keep(self, claim, now, number=0):
        row = self._living(claim.owner, now)
        return self._gone(claim.owner, now) if row is None else self._place(row, now)


@caught_by("a_keep_of_another_ticket_of_the_owner")
class AKeepDoesNotLookAtTheNumber(Line):
    def keep(self, claim, now, number=0):
        return super().keep(claim, now)


@caught_by("a_lost_bell_is_repaired", "order_of_arrival")
class AKeepDoesNotSayThatItHolds(Sound):
    async def draw(self, claim, **options):
        place = await super().draw(claim, **options)
        if isinstance(place, Place) and place.token is None:
            self.store.waited = {*getattr(self.store, "waited", ()), claim.owner}
        return place

    async def keep(self, tickets):
        waited = getattr(self.store, "waited", ())
        return [
            place._replace(token=None) if isinstance(place, Place) and claim.owner in waited else place
            for place, (claim, _) in zip(await super().keep(tickets), tickets, strict=True)
        ]


@caught_by("the_moment_to_look", "a_dead_holder_is_passed_over")
class LooksLate(Line):
    def _place(self, row, now, held=None):
        place = super()._place(row, now, held)
        return place if place.token is not None else place._replace(look_after=3600.0)


@caught_by("a_holder_that_stood_still")
class NeverTaken(Line):
    def _gone(self, owner, now):
        return super()._gone(owner, now)._replace(taken=False)


# Batches


@caught_by("an_empty_keep")
class AnEmptyKeepIsASyntaxError(Sound):
    async def keep(self, tickets):
        if not tickets:
            raise BackendRefusedError("Broken", "renew", "syntax error near ')'")
        return await super().keep(tickets)


@caught_by("a_thousand_are_kept_in_one_call")
class CutsTheBatch(Sound):
    async def keep(self, tickets):
        return await super().keep(tickets[:999])


@caught_by("a_thousand_are_kept_in_one_call")
class OneByOne(Sound):
    async def keep(self, tickets):
        places = []
        for each in tickets:
            await asyncio.sleep(0.001)
            places += await super().keep([each])
        return places


@caught_by("answers_are_in_order", "several_of_one_name_in_one_keep")
class AnswersAreReversed(Sound):
    async def keep(self, tickets):
        return (await super().keep(tickets))[::-1]


@caught_by("answers_are_in_order")
class ForgetsDuplicates(Sound):
    async def keep(self, tickets):
        return await super().keep(list({claim.owner: (claim, number) for claim, number in tickets}.values()))


class OneConnection(Sound):
    """Answers come back in the order of the requests; who reads which one is left to luck."""

    def __init__(self, store):
        super().__init__(store)
        self.answers = deque()

    async def keep(self, tickets):
        return await self.round_trip(await super().keep(tickets))

    async def tickets(self, names):
        return await self.round_trip(await super().tickets(names))

    async def draw(self, claim, **options):
        return await self.round_trip(await super().draw(claim, **options))

    async def round_trip(self, answer):
        self.answers.append(answer)
        await asyncio.sleep(0)
        return self.next()

    def next(self):
        return self.answers.popleft()


@caught_by("a_call_that_is_given_up_does_not_harm_the_next_ones")
class ACallThatIsGivenUpLeavesItsAnswerBehind(OneConnection):
    pass


@caught_by("keeps_may_be_in_flight_together", "many_locks_share_one_client")
class MixesUpAnswersInFlight(OneConnection):
    def next(self):
        return self.answers.pop()


@caught_by("another_client_keeps_it")
class KeepsOnlyWhatItDrew(Sound):
    def __init__(self, store):
        super().__init__(store)
        self.mine = set()

    async def draw(self, claim, **options):
        self.mine.add(claim.owner)
        return await super().draw(claim, **options)

    async def keep(self, tickets):
        places = await super().keep(tickets)
        return [
            place if claim.owner in self.mine else Gone() for place, (claim, _) in zip(places, tickets, strict=True)
        ]


# Giving back


@caught_by(
    "async_with_holds_the_lock_and_gives_it_back",
    "a_waiter_gets_the_lock_when_it_is_released",
    "a_client_leaves_the_backend_closed",
    "a_draw_that_is_given_up_can_be_given_back",
)
class AGiveBackDoesNothing(Line):
    def give_back(self, owner, now, after=0.0):
        return None


@caught_by("a_waiter_leaves", "a_cancelled_waiter_leaves_nothing")
class WaitersCannotLeave(Line):
    def give_back(self, owner, now, after=0.0):
        row = self.rows.get(owner)
        return None if row is not None and row.token is None else super().give_back(owner, now, after)


@caught_by("a_give_back_is_the_owners", "the_former_owner_has_nothing")
class GivesBackWhatAnotherHolds(Line):
    def give_back(self, owner, now, after=0.0):
        self.rows.clear()
        return


@caught_by(
    "a_give_back_again",
    "a_give_back_of_nothing",
    "a_give_back_after_the_death",
    "a_block_whose_ticket_has_gone_ends_with_the_loss",
)
class ItWasAlwaysThere(Line):
    def give_back(self, owner, now, after=0.0):
        super().give_back(owner, now, after)


@caught_by("a_give_back_again", "a_give_back_of_nothing")
class GivingNothingBackIsAnError(Line):
    def give_back(self, owner, now, after=0.0):
        if owner not in self.rows:
            raise BackendRefusedError("Broken", "release", "not locked")
        return super().give_back(owner, now, after)


@caught_by("a_ticket_that_stays_for_a_while", "a_ticket_stays_although_its_client_has_closed")
class AGiveBackIsAlwaysAtOnce(Line):
    def give_back(self, owner, now, after=0.0):
        return super().give_back(owner, now)


@caught_by("no_keep_reaches_what_is_given_back_later", "a_ticket_that_stays_for_a_while")
class WhatIsGivenBackLaterIsStillItsOwners(Line):
    def give_back(self, owner, now, after=0.0):
        row = self._living(owner, now)
        if row is None or not after:
            return super().give_back(owner, now, after)
        row.dies = now + after
        return None


@caught_by("a_draw_that_is_given_up_can_be_given_back")
class ADrawThatIsGivenUpSticks(Sound):
    async def draw(self, claim, **options):
        pending = replaced(claim, owner=f"pending {claim.owner}")
        place = await super().draw(pending, **options)
        await asyncio.sleep(0)
        rows = self.line(claim.name).rows
        if isinstance(place, Place) and pending.owner in rows:
            rows[claim.owner] = rows.pop(pending.owner)
            rows[claim.owner].owner = claim.owner
        return place


@caught_by("tickets_outlive_the_object_that_drew_them", "a_ticket_stays_although_its_client_has_closed")
class ClosingGivesBack(Sound):
    async def aclose(self):
        self.store.lines.clear()


@caught_by("a_closed_backend_opens_again", "a_client_may_be_opened_again")
class StaysClosed(Sound):
    def step(self, operation, name, rule, asked_by=None):
        if not self.connected:
            raise BackendUnavailableError("Broken", operation)
        return super().step(operation, name, rule, asked_by)

    async def aclose(self):
        self.connected = False


# Bells


@caught_by("a_give_back_rings", "a_give_back_races_a_draw", "a_give_back_wakes_the_next_alone")
class RingsForNoTicket(Sound):
    def ring(self, line, asked_by):
        pass


@caught_by("a_give_back_wakes_the_next_alone", "readers_hold_together")
class RingsForAllTickets(Sound):
    def ring(self, line, asked_by):
        for row in line.rows.values():
            if row.owner != asked_by:
                self.tell(row.owner, Place(row.token or 1))


@caught_by("who_asks_is_not_rung")
class RingsForWhoAsks(Sound):
    def ring(self, line, asked_by):
        super().ring(line, None)


@caught_by("readers_are_woken_together")
class RingsForOneTicket(Sound):
    def ring(self, line, asked_by):
        del line.rung[1:]
        super().ring(line, asked_by)


@caught_by("no_bell_after_the_stop")
class RingsAfterTheStop(Sound):
    def listen(self, claim, bell):
        super().listen(claim, bell)
        return lambda: None


@caught_by("an_end_rings")
class AnEndIsSilent(Sound):
    def tell(self, owner, news):
        if not isinstance(news, Gone):
            super().tell(owner, news)


# Operators


@caught_by("an_end_of_another_token")
class EndsAllTokens(Line):
    def end(self, token, reason, now):
        over = list(self.rows.values())
        self.rows.clear()
        return over


@caught_by("an_end_of_readers")
class EndsOneReader(Line):
    def end(self, token, reason, now):
        over = [row for row in self.settle(now) if row.token == token][:1]
        for row in over:
            self.ended[row.owner] = row.dies + REASON_TTL, reason
            del self.rows[row.owner]
        return over


@caught_by("an_end_has_a_reason", "it_answers_as_the_rules")
class EndsWithoutAReason(Line):
    def end(self, token, reason, now):
        over = super().end(token, reason, now)
        self.ended.clear()
        return over


@caught_by("an_end_lets_the_next_hold")
class AnEndBlocksTheLine(Line):
    def end(self, token, reason, now):
        over = [row for row in self.settle(now) if row.token == token]
        for row in over:
            self._rename(row, f"ended {row.owner}", row.dies, row.longest)
        return over


# Changing hands


@caught_by("the_declared_powers_are_the_real_ones", passes_on=False)
class HidesItsPower(Sound):
    pass


@caught_by("a_ticket_passes_to_an_heir", "a_share_passes_on_with_its_number")
class TheHeirHasTheOldToken(Line):
    def pass_on(self, owner, heir, now, address=None):
        row = self.rows.get(owner)
        token = row and row.token
        place = super().pass_on(owner, heir, now, address)
        if isinstance(place, Place) and token is not None:
            self.rows[heir.owner].token = token
            return place._replace(token=token)
        return place


@caught_by("a_pass_again_is_one_pass")
class APassAgainIsANewToken(Line):
    def pass_on(self, owner, heir, now, address=None):
        place = super().pass_on(owner, heir, now, address)
        if isinstance(place, Place):
            self.rows[heir.owner].token = self.last = self.next_token(self.last)
            return place._replace(token=self.last)
        return place


@caught_by("the_former_owner_has_nothing")
class TheFormerOwnerGoesOn(Sound):
    async def pass_on(self, claim, heir):
        self.store.heirs = {**getattr(self.store, "heirs", {}), claim.owner: heir.owner}
        return await super().pass_on(claim, heir)

    async def keep(self, tickets):
        heirs = getattr(self.store, "heirs", {})
        return await super().keep(
            [(replaced(claim, owner=heirs.get(claim.owner, claim.owner)), 0) for claim, _ in tickets]
        )


@caught_by("a_pass_of_nothing")
class PassesOnWhatIsNotHeld(Line):
    def pass_on(self, owner, heir, now, address=None):
        return self.draw(heir, now) if owner not in self.rows else super().pass_on(owner, heir, now, address)


@caught_by("waiters_keep_their_places_behind_an_heir")
class APassFreesTheName(Line):
    def pass_on(self, owner, heir, now, address=None):
        self.give_back(owner, now)
        return self.draw(heir, now)


@caught_by("a_share_passes_on_with_its_number")
class AnHeirHasAnotherPermit(Line):
    def pass_on(self, owner, heir, now, address=None):
        place = super().pass_on(owner, heir, now, address)
        return place._replace(permit=0) if isinstance(place, Place) and place.permit is not None else place


# To look


@caught_by("what_is_seen", "labels_are_text")
class SeesNoLabels(Line):
    def seen(self, now):
        return [seen._replace(label=None) for seen in super().seen(now)][::-1]


@caught_by("labels_are_text")
class LabelsAreTrimmed(Line):
    def draw(self, claim, now, **options):
        return super().draw(replaced(claim, label=claim.label and claim.label.strip()), now, **options)


@caught_by("the_seconds_that_are_left")
class ShowsTheTtl(Line):
    def seen(self, now):
        return [seen._replace(remaining=self.rows_by_holder(seen).longest) for seen in super().seen(now)]

    def rows_by_holder(self, seen):
        return next(row for row in self.rows.values() if row.token == seen.token)


@caught_by("a_look_prolongs_nothing")
class ALookIsASignOfLife(Line):
    def seen(self, now):
        for row in self.rows.values():
            row.dies = now + row.longest
        return super().seen(now)


@caught_by("names_are_independent", "no_two_names_are_one")
class OneLineForAllNames(Sound):
    def line(self, name):
        return super().line("all")


@caught_by("names_of_512_bytes", "no_two_names_are_one")
class NamesAreShortened(Sound):
    def line(self, name):
        return super().line(name.encode()[:500].decode(errors="ignore").rstrip().casefold())


@caught_by("names_come_in_pages")
class ShowsOnePage(Sound):
    async def names(self, prefix, cursor, limit):
        return list(self.store.lines)[:limit], None


@caught_by("names_come_in_pages")
class ThePrefixIsAPattern(Sound):
    async def names(self, prefix, cursor, limit):
        some = prefix.partition("_")[0]
        page, cursor = await super().names(some, cursor, limit)
        return page, cursor


# Out of reach


@caught_by("a_store_out_of_reach_is_an_error_of_ours")
class RaisesWhatTheDriverRaises(Sound):
    def step(self, operation, name, rule, asked_by=None):
        if not self.store.reachable:
            raise ConnectionError("refused")
        return super().step(operation, name, rule, asked_by)


@caught_by("a_store_out_of_reach_is_an_error_of_ours")
class TheErrorHasTheOwner(Sound):
    async def draw(self, claim, **options):
        if not self.store.reachable:
            raise BackendUnavailableError("Broken", "acquire", claim.owner) from ConnectionError("refused")
        return await super().draw(claim, **options)


@caught_by("the_same_object_works_again_after_an_outage", "a_lease_rides_out_an_outage")
class DoesNotConnectAgain(Sound):
    def step(self, operation, name, rule, asked_by=None):
        self.connected &= self.store.reachable
        if not self.connected:
            raise BackendUnavailableError("Broken", operation) from ConnectionError("refused")
        return super().step(operation, name, rule, asked_by)
