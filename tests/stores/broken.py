"""
Backends that break one promise each, and the tests of the suite that must notice.

Run by `test_suite_catches.py`: a test of the suite that no broken backend fails proves nothing.
Most of these were seen in real lock libraries.
"""

import asyncio
import fnmatch
import itertools
from collections import deque
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from inside import memory_on

from fencing_sdk.abc import LOCK, READER, Busy, Grant, Permit, Renewal, Waiting
from fencing_sdk.backends._shared.row_table import RowTable
from fencing_sdk.backends.memory import MemoryBackend
from fencing_sdk.errors import BackendRefusedError, BackendUnavailableError, LossReason
from fencing_sdk.testing import BackendSuite

EXPECTED: dict[str, tuple[str, ...]] = {}
"""Broken backend -> the tests that must fail on it."""


def only(table, name):
    """The grant of *name*, of which there is at most one."""
    return next(iter(table.grants.get(name, {}).values()), None)


def draw_token(table):
    table.last_token = table.next_token(table.last_token)
    return table.last_token


class ManualClock:
    def __init__(self) -> None:
        self.time = 0.0

    def now(self) -> float:
        return self.time


class Sound(MemoryBackend):
    """Breaks nothing, and can be put out of reach."""

    reachable = True

    def _reach(self, operation):
        if not self.reachable:
            raise BackendUnavailableError("Sound", operation) from ConnectionError("refused")

    async def acquire(self, claim):
        self._reach("acquire")
        return await super().acquire(claim)

    async def renew(self, claims):
        self._reach("renew")
        return await super().renew(claims)

    async def release(self, claim):
        self._reach("release")
        return await super().release(claim)

    async def inspect(self, name):
        self._reach("inspect")
        return await super().inspect(name)


class Bench(BackendSuite):
    queues = hands_over = True
    notices = True
    shares = True
    lists = revokes = transfers = True
    processes = False
    survives_restart = False
    patience = 0.1

    backend_class: type[MemoryBackend] = Sound

    def make(self):
        return memory_on(self.clock, self.backend_class)

    @pytest.fixture
    def backend(self):
        self.clock = ManualClock()
        return self.make()

    @pytest.fixture
    def reopen(self, backend):
        return lambda: backend

    @asynccontextmanager
    async def break_store(self, backend):
        backend.reachable = False
        yield
        backend.reachable = True

    def now(self):
        return self.clock.now()

    async def pass_time(self, seconds):
        self.clock.time += seconds
        await asyncio.sleep(0)

    async def restart(self, backend, reopen):
        return self.make()

    async def revoke(self, backend, name):
        backend.take_away(name)


class TestSound(Bench):
    """The control: what is broken below is broken by a few lines, and not by this bench."""

    patience = 60.0


def caught_by(*tests, bench=Bench, **declared):
    """Put a broken backend on a bench of its own, which *tests* must fail."""

    def expect(broken):
        EXPECTED[broken.__name__] = tests
        name = f"Test{broken.__name__}"
        globals()[name] = type(name, (bench,), {"backend_class": broken, "__module__": __name__, **declared})
        return broken

    return expect


# Grants


@caught_by("test_the_declared_powers_are_the_real_ones", notices=False)
class HidesItsNotices(Sound):
    pass


@caught_by(
    "test_a_free_lock_is_granted_and_a_held_one_is_not",
    "test_patience_ends_with_an_error_and_leaves_nothing",
    "test_many_tasks_count_exactly",
    "test_tasks_that_are_cancelled_at_random_harm_nobody",
    "test_another_client_of_the_store_is_refused_too",
    "test_permits_exclude_a_lock_of_that_name",
    "test_a_newcomer_takes_no_permit_from_the_line",
)
class GrantsEverybody(Sound):
    tokens = itertools.count()

    async def acquire(self, claim):
        return Grant(next(self.tokens))


@caught_by(
    "test_a_released_lock_is_free",
    "test_async_with_holds_the_lock_and_gives_it_back",
    "test_a_waiter_gets_the_lock_when_it_is_released",
    "test_a_client_leaves_the_backend_closed",
    "test_a_claim_is_enough_to_free_a_grant_that_nobody_read",
    "test_a_grant_on_its_way_to_a_waiter_that_leaves_is_released",
    "test_inspect_shows_none_when_the_lock_is_free",
    "test_a_permit_that_was_released_is_granted_again",
    "test_a_release_frees_one_name_alone",
    "test_a_release_before_joining_is_not_missed",
    "test_a_lock_that_was_released_before_the_waiter_joined_is_handed_over",
    "test_a_waiter_that_has_left_is_not_handed_the_lock",
)
class ReleaseDoesNothing(Sound):
    async def release(self, claim):
        pass


@caught_by("test_inspect_shows_the_grant_that_was_given", "test_no_two_names_are_the_same_lock")
class InspectShowsTheOwner(Sound):
    async def inspect(self, name):
        holder = await super().inspect(name)
        return holder and replace(holder, id=only(self._table, name).owner)


@caught_by("test_grants_outlive_the_object_that_asked_for_them")
class ClosingReleases(Sound):
    async def aclose(self):
        self._table.grants.clear()


@caught_by("test_a_closed_backend_opens_again", "test_a_client_may_be_opened_again")
class StaysClosed(Sound):
    async def aclose(self):
        self.reachable = False


class Apart(Bench):
    """Every client has an object of its own."""

    @pytest.fixture
    def reopen(self, backend):
        return lambda: self.join(backend, self.make())

    def join(self, first, other):
        return other


@caught_by("test_one_of_many_rivals_wins")
class ChecksThenActs(Sound):
    async def acquire(self, claim):
        if await self.inspect(claim.name) is not None:
            return Busy()
        await asyncio.sleep(0)
        self._table.grants.pop(claim.name, None)
        return await super().acquire(claim)


@caught_by(
    "test_locks_of_different_names_do_not_exclude_each_other",
    "test_each_name_has_a_line_of_its_own",
)
class OneLockForAll(Sound):
    async def acquire(self, claim):
        return await super().acquire(replace(claim, name="all"))


@caught_by(
    "test_nobody_else_can_release",
    "test_a_late_release_leaves_the_next_holder_alone",
    "test_the_former_owner_cannot_touch_the_next_grant",
)
class ReleaseIgnoresTheOwner(Sound):
    async def release(self, claim):
        row = only(self._table, claim.name)
        await super().release(replace(claim, owner=row.owner) if row else claim)


@caught_by(
    "test_acquiring_again_with_the_same_owner_repeats_the_grant",
    "test_retries_of_one_acquisition_that_arrive_together_are_one_grant",
    "test_inspect_and_retries_show_the_token_of_the_grant",
    "test_a_holder_that_was_served_is_not_in_the_line_any_more",
    "test_the_same_owner_again_has_the_same_share",
)
class ARetryGetsANewToken(Sound):
    async def acquire(self, claim):
        await self.release(claim)
        return await super().acquire(claim)


@caught_by("test_releasing_again_is_no_error", "test_a_release_that_overtakes_its_acquisition_is_repeated")
class ReleasingNothingIsAnError(Sound):
    async def release(self, claim):
        if await self.renew([claim]) != [Renewal.RENEWED]:
            raise BackendRefusedError("Broken", "release", "not locked")
        await super().release(claim)


@caught_by("test_retry_after_is_a_number_of_seconds_or_unknown")
class RetryAfterIsTheWholeTtl(Sound):
    async def acquire(self, claim):
        outcome = await super().acquire(claim)
        return outcome if isinstance(outcome, Grant) else Busy(1.0)


# Renewals


@caught_by("test_a_renewal_never_creates", "test_a_released_grant_is_not_renewed")
class RenewalCreates(Sound):
    async def renew(self, claims):
        return [
            Renewal.RENEWED if isinstance(await self.acquire(claim), Grant) else Renewal.TAKEN_OVER for claim in claims
        ]


@caught_by("test_a_renewal_never_revives")
class RenewalRevives(Sound):
    async def renew(self, claims):
        for claim in claims:
            row = only(self._table, claim.name)
            if row and row.owner == claim.owner:
                row.expires = self._clock.now() + claim.ttl
        return await super().renew(claims)


@caught_by(
    "test_a_lease_that_was_taken_over_ends_its_work",
    "test_nobody_else_can_renew",
    "test_a_share_is_renewed_for_itself_alone",
    "test_the_heartbeat_holds_the_lock_beyond_its_ttl",
    "test_a_renewal_may_set_a_longer_ttl",
    "test_a_renewal_may_set_a_shorter_ttl",
    "test_a_longer_ttl_outlives_the_client",
)
class RenewsWhateverItIsAsked(Sound):
    async def renew(self, claims):
        return [Renewal.RENEWED] * len(claims)


@caught_by("test_a_refusal_tells_whether_somebody_else_holds_the_lock", "test_every_claim_has_its_own_outcome_in_order")
class NeverTellsWhoHoldsTheLock(Sound):
    async def renew(self, claims):
        outcomes = await super().renew(claims)
        return [Renewal.REFUSED if outcome is Renewal.TAKEN_OVER else outcome for outcome in outcomes]


@caught_by("test_a_renewal_keeps_token_and_label", "test_inspect_and_retries_show_the_token_of_the_grant")
class RenewalGivesANewToken(Sound):
    async def renew(self, claims):
        outcomes = await super().renew(claims)
        for claim, outcome in zip(claims, outcomes, strict=True):
            if outcome is Renewal.RENEWED:
                only(self._table, claim.name).token += 1
        return outcomes


class Together(Apart):
    """Two objects on one table, as two connections to one server."""

    def join(self, first, other):
        other._table = first._table
        return other


@caught_by("test_another_client_may_renew_with_the_claim", bench=Together)
class RenewsOnlyWhatItGranted(Sound):
    def __init__(self, **options):
        super().__init__(**options)
        self.mine = set()

    async def acquire(self, claim):
        self.mine.add(claim.owner)
        return await super().acquire(claim)

    async def renew(self, claims):
        asked = [claim for claim in claims if claim.owner in self.mine]
        outcomes = dict(zip((claim.owner for claim in asked), await super().renew(asked), strict=True))
        return [outcomes.get(claim.owner, Renewal.REFUSED) for claim in claims]


@caught_by("test_an_empty_renewal_has_no_outcomes")
class AnEmptyRenewalIsASyntaxError(Sound):
    async def renew(self, claims):
        if not claims:
            raise BackendRefusedError("Broken", "renew", "syntax error near ')'")
        return await super().renew(claims)


@caught_by("test_a_claim_may_be_renewed_twice_in_one_call")
class RenewalForgetsDuplicates(Sound):
    async def renew(self, claims):
        return await super().renew(list({claim.owner: claim for claim in claims}.values()))


@caught_by("test_more_than_a_thousand_claims_fit_into_one_call")
class RenewalCutsTheBatch(Sound):
    async def renew(self, claims):
        return [*await super().renew(claims[:1000]), *[Renewal.REFUSED] * len(claims[1000:])]


class OneConnection(Sound):
    """Answers come back in the order of the requests; who reads which one is left to luck."""

    def __init__(self, **options):
        super().__init__(**options)
        self.answers = deque()

    async def renew(self, claims):
        return await self._round_trip(await super().renew(claims))

    async def inspect(self, name):
        return await self._round_trip(await super().inspect(name))

    async def acquire(self, claim):
        return await self._round_trip(await super().acquire(claim))

    async def _round_trip(self, answer):
        self.answers.append(answer)
        await asyncio.sleep(0)
        return self._next()

    def _next(self):
        return self.answers.popleft()


@caught_by("test_a_cancelled_call_does_not_harm_the_next_ones")
class ACancelledCallLeavesItsAnswerBehind(OneConnection):
    pass


@caught_by("test_renewals_may_be_in_flight_together", "test_many_locks_share_one_client")
class MixesUpAnswersInFlight(OneConnection):
    def _next(self):
        return self.answers.pop()


# Expiry


@caught_by(
    "test_a_grant_lasts_its_ttl_and_not_longer",
    "test_tokens_grow_after_an_expiry",
    "test_the_head_gets_the_lock_of_a_holder_that_died",
    "test_an_expired_grant_is_gone_even_if_nobody_came",
    "test_tokens_grow_when_the_same_owner_comes_after_its_expiry",
    "test_a_permit_ends_with_its_own_ttl",
    "test_acquiring_again_gives_a_fresh_ttl",
    "test_the_remaining_seconds_shrink",
)
class NeverExpires(Sound):
    async def acquire(self, claim):
        return await super().acquire(replace(claim, ttl=1e9))


@caught_by(
    "test_a_grant_lasts_its_ttl_and_not_longer",
    "test_a_renewal_restarts_the_ttl",
    "test_an_odd_ttl_is_not_cut",
)
class ExpiresTooEarly(Sound):
    async def acquire(self, claim):
        return await super().acquire(replace(claim, ttl=claim.ttl * 0.9))

    async def renew(self, claims):
        return await super().renew([replace(claim, ttl=claim.ttl * 0.9) for claim in claims])


@caught_by("test_grants_of_one_name_may_have_different_ttls")
class TheFirstTtlStays(Sound):
    def __init__(self, **options):
        super().__init__(**options)
        self.ttls = {}

    async def acquire(self, claim):
        return await super().acquire(replace(claim, ttl=self.ttls.setdefault(claim.name, claim.ttl)))


# Tokens


@caught_by("test_tokens_grow_after_a_release", "test_two_grants_never_share_a_token")
class TheTokenGoesWithTheRow(Sound):
    async def release(self, claim):
        await super().release(claim)
        if await self.inspect(claim.name) is None:
            self._table.last_token = 0
            self._table.next_token = lambda last: last + 1


class Counting(Bench):
    """A plain counter: right as long as nothing loses it."""

    def make(self):
        return memory_on(self.clock, self.backend_class, tokens="counter")


class Purging(Counting):
    async def purge(self, backend):
        backend._table = RowTable(lambda last: last + 1)


@caught_by("test_tokens_grow_after_a_clean_up", bench=Purging)
class TheCleanUpTakesTheCounter(Sound):
    pass


@caught_by("test_tokens_grow_after_a_restart", "test_tokens_grow_after_many_restarts", bench=Counting)
class TheCounterDiesWithTheProcess(Sound):
    pass


@caught_by("test_grants_survive_a_restart", survives_restart=True)
class ForgetsGrantsAtRestart(Sound):
    pass


class CountingApart(Counting, Together):
    def join(self, first, other):
        other._table.grants = first._table.grants
        return other


@caught_by("test_tokens_grow_across_clients", bench=CountingApart)
class EveryClientCountsForItself(Sound):
    pass


@caught_by("test_tokens_grow_for_each_name", bench=Counting)
class CountsForOneNameAtATime(Sound):
    name = ""

    async def acquire(self, claim):
        if claim.name != self.name:
            self.name = claim.name
            self._table.last_token = 0
        return await super().acquire(claim)


# Abandoned acquisitions


@caught_by("test_a_cancelled_acquisition_can_be_released")
class ACancelledAcquisitionSticks(Sound):
    async def acquire(self, claim):
        outcome = await super().acquire(replace(claim, owner=f"pending {claim.owner}"))
        await asyncio.sleep(0)
        if isinstance(outcome, Grant):
            held = self._table.grants[claim.name]
            held[claim.owner] = held.pop(f"pending {claim.owner}")
            held[claim.owner].owner = claim.owner
        return outcome


# Lines


@caught_by(
    "test_a_release_wakes_the_head_of_the_line",
    "test_a_release_between_joining_and_waiting_is_not_missed",
    "test_fifty_waiters_are_all_served_in_order",
)
class WakesNobody(Sound):
    def _wake_next(self, name):
        pass


@caught_by("test_a_release_on_another_client_wakes_the_head_too", bench=Together)
class WakesOnlyItsOwnWaiters(Sound):
    pass


@caught_by("test_the_line_is_served_in_order", "test_fifty_waiters_are_all_served_in_order")
class LastComeFirstServed(Sound):
    def stand(self, claim, notify, *, hand_over):
        place = super().stand(claim, notify, hand_over=hand_over)
        if not hand_over:
            self._table.lines[claim.name].move_to_end(claim.owner, last=False)
        return place


@caught_by("test_a_newcomer_does_not_overtake_the_line", "test_the_line_is_served_in_order")
class NewcomersOvertake(Sound):
    async def acquire(self, claim):
        line = self._table.lines.pop(claim.name, None)
        outcome = await super().acquire(claim)
        if line:
            line.pop(claim.owner, None)
            self._table.lines[claim.name] = line
        return outcome


@caught_by("test_leaving_while_it_is_your_turn_passes_the_turn_on")
class LeavingTellsNobody(Sound):
    def _leave(self, waiter):
        wake_next, self._wake_next = self._wake_next, lambda _name: None
        super()._leave(waiter)
        self._wake_next = wake_next


@caught_by(
    "test_a_release_answers_whether_the_grant_was_its_owners",
    "test_a_release_after_the_ttl_finds_no_grant",
    "test_the_former_owner_cannot_touch_the_next_grant",
    "test_the_release_of_a_share_answers_whether_its_owner_had_one",
    "test_the_release_of_a_revoked_grant_answers_as_its_renewal",
    "test_a_block_whose_grant_has_gone_ends_with_the_loss",
)
class ReleasesWithoutAnAnswer(Sound):
    async def release(self, claim):
        await super().release(claim)


@caught_by("test_holders_and_waiters_are_shown_in_their_modes_with_their_labels")
class ShowsWritersAsLocks(Sound):
    async def list_waiters(self, name):
        return [replace(waiter, mode=LOCK) for waiter in await super().list_waiters(name)]


@caught_by("test_a_waiter_keeps_its_place_for_longer_than_a_sign_of_life_lasts")
class SendsNoSignsOfLife(Sound):
    async def acquire(self, claim):
        place = self._table.lines.get(claim.name, {}).get(claim.owner)
        silent_at = 0.0 if place is None else place.silent_at
        outcome = await super().acquire(claim)
        if place is not None:
            place.silent_at = silent_at
        return outcome


@caught_by(
    "test_a_cancelled_waiter_leaves_nothing_in_the_line",
    "test_a_cancelled_waiter_leaves_nothing",
    "test_a_waiter_cancelled_while_joining_leaves_nothing_in_the_line",
    "test_a_writer_that_gives_up_lets_the_readers_behind_it_in",
    "test_leaving_from_the_middle_of_the_line_keeps_the_order",
)
class CancelledWaitersStay(Sound):
    def _leave(self, waiter):
        self._waiters.remove(waiter)

    async def release(self, claim):
        self._table.release(claim, self._clock.now())
        self._wake_next(claim.name)


# Direct grants


@caught_by("test_a_release_hands_the_lock_over_with_its_token", "test_a_lock_is_handed_over_in_the_order_of_arrival")
class WakesInsteadOfHandingOver(Sound):
    def _wake_next(self, name):
        for waiter in self._waiters:
            waiter.notify()


@caught_by("test_a_handed_grant_lasts_for_its_ttl_from_its_age_on")
class HandsOverForAMoment(Sound):
    def stand(self, claim, notify, *, hand_over):
        return super().stand(replace(claim, ttl=claim.ttl / 4), notify, hand_over=hand_over)


@caught_by("test_a_waiter_that_asks_is_woken_and_not_handed_the_lock")
class HandsOverToThoseThatAsk(Sound):
    def stand(self, claim, notify, *, hand_over):
        return super().stand(claim, notify, hand_over=True)


# Notices


@caught_by(
    "test_the_holder_is_told_that_its_grant_was_taken_away",
    "test_a_notice_ends_the_lease_and_its_work",
)
class TellsNobodyOfALoss(Sound):
    def on_loss(self, notice):
        return lambda: None


@caught_by("test_giving_back_is_no_loss")
class TellsOfEveryRelease(Sound):
    async def release(self, claim):
        await super().release(claim)
        self._loss_notices.notify(claim, LossReason.REVOKED)


@caught_by("test_notices_stop_when_nobody_wants_them")
class TellsForEver(Sound):
    def on_loss(self, notice):
        super().on_loss(notice)
        return lambda: None


# Operators


@caught_by("test_what_is_held_is_listed_as_inspect_shows_it")
class ListsWithoutLabels(Sound):
    async def list_holders(self, prefix, cursor, limit):
        page = await super().list_holders(prefix, cursor, limit)
        return replace(page, holders=[replace(holder, label=None) for holder in page.holders])


@caught_by(
    "test_inspect_tells_the_age_of_a_grant_as_the_listing_does",
    "test_holders_tells_the_age_of_every_share_as_the_listing_does",
)
class InspectForgetsWhenTheGrantWas(Sound):
    async def inspect(self, name):
        holder = await super().inspect(name)
        return holder and replace(holder, held_for=None)


@caught_by("test_the_prefix_chooses_and_its_characters_mean_themselves")
class TakesThePrefixForAPattern(Sound):
    async def list_holders(self, prefix, cursor, limit):
        page = await super().list_holders("", cursor, limit)
        return replace(page, holders=[found for found in page.holders if fnmatch.fnmatchcase(found.name, f"{prefix}*")])


@caught_by("test_every_page_goes_on_where_the_last_one_ended")
class ListsOnePage(Sound):
    async def list_holders(self, prefix, cursor, limit):
        return replace(await super().list_holders(prefix, cursor, limit), cursor=None)


@caught_by("test_waiters_are_listed_in_the_order_of_the_line")
class ListsTheLineBackwards(Sound):
    async def list_waiters(self, name):
        return list(await super().list_waiters(name))[::-1]


@caught_by("test_a_lock_without_waiters_has_none")
class ListsTheHolderAsAWaiter(Sound):
    async def list_waiters(self, name):
        holder = await self.inspect(name)
        first = [] if holder is None else [Waiting(holder.id)]
        return [*first, *await super().list_waiters(name)]


@caught_by("test_every_permit_and_every_reader_is_listed")
class ListsOneOfSeveral(Sound):
    async def list_holders(self, prefix, cursor, limit):
        page = await super().list_holders(prefix, cursor, limit)
        return replace(page, holders=list({holder.name: holder for holder in page.holders}.values()))


@caught_by(
    "test_a_revoked_grant_is_over_and_the_next_token_is_higher",
    "test_a_grant_is_revoked_once",
    "test_the_next_waiter_gets_a_revoked_lock",
    "test_the_holder_is_told_although_its_own_client_gets_the_lock_next",
    "test_one_permit_is_revoked_and_the_others_stay",
)
class RevokesInWordsAlone(Sound):
    async def revoke(self, name, token, reason):
        return True


@caught_by("test_a_later_grant_is_never_revoked_for_an_earlier_one")
class RevokesWhateverIsHeld(Sound):
    async def revoke(self, name, token, reason):
        holder = await self.inspect(name)
        return holder is not None and await super().revoke(name, holder.token, reason)


@caught_by("test_the_holder_loses_its_lease_and_reads_the_reason")
class ForgetsTheReason(Sound):
    async def revoke(self, name, token, reason):
        return await super().revoke(name, token, "")


# Outages


@caught_by("test_a_store_out_of_reach_is_an_error_of_ours")
class HidesTheCause(Sound):
    def _reach(self, operation):
        if not self.reachable:
            raise BackendUnavailableError("Broken", operation)


@caught_by("test_a_store_out_of_reach_is_an_error_of_ours")
class ShowsTheOwnerInAnError(Sound):
    async def acquire(self, claim):
        if not self.reachable:
            raise BackendUnavailableError("Broken", "acquire", f"SET {claim.owner}") from ConnectionError("refused")
        return await super().acquire(claim)


@caught_by("test_the_same_object_works_again_after_an_outage")
class NeverReconnects(Sound):
    broken = False

    def _reach(self, operation):
        self.broken = self.broken or not self.reachable
        if self.broken:
            raise BackendUnavailableError("Broken", operation) from ConnectionError("refused")


@caught_by("test_a_lease_rides_out_an_outage")
class TakesAnOutageForALoss(Sound):
    async def renew(self, claims):
        return await super().renew(claims) if self.reachable else [Renewal.REFUSED] * len(claims)


# Names and labels


@caught_by("test_no_two_names_are_the_same_lock", "test_a_renewal_is_about_one_name_alone")
class FoldsCase(Sound):
    async def acquire(self, claim):
        return await super().acquire(replace(claim, name=claim.name.casefold()))

    async def renew(self, claims):
        return await super().renew([replace(claim, name=claim.name.casefold()) for claim in claims])

    async def release(self, claim):
        await super().release(replace(claim, name=claim.name.casefold()))

    async def inspect(self, name):
        holder = await super().inspect(name.casefold())
        return holder and replace(holder, name=name)


@caught_by("test_odd_names_pass_the_front_door")
class RefusesOddNames(Sound):
    async def acquire(self, claim):
        if not claim.name.isprintable():
            raise BackendRefusedError("Broken", "acquire", "bad name")
        return await super().acquire(claim)


@caught_by("test_a_label_is_shown_as_it_was_given")
class StripsLabels(Sound):
    async def acquire(self, claim):
        return await super().acquire(replace(claim, label=claim.label and claim.label.strip()))


@caught_by("test_a_label_belongs_to_the_grant")
class KeepsTheLabelOfTheHolderBefore(Sound):
    label = None

    async def acquire(self, claim):
        self.label = claim.label or self.label
        return await super().acquire(replace(claim, label=self.label))


# Processes


@caught_by("test_processes_count_exactly", processes=True, url=pytest.fixture(lambda self: "memory://"))
class EveryProcessIsAlone(Sound):
    pass


# Transfers


@caught_by("test_a_grant_passes_to_another_owner_under_a_higher_token")
class TheHeirHasTheTokenOfTheFormer(Sound):
    async def transfer(self, of, to):
        before = await self.inspect(of.name)
        answer = await super().transfer(of, to)
        return replace(answer, token=before.token) if isinstance(answer, Grant) and before else answer


@caught_by(
    "test_what_the_former_owner_asks_late_changes_nothing", "test_a_share_passes_on_with_its_mode_and_its_number"
)
class TheFormerOwnerStays(Sound):
    async def transfer(self, of, to):
        held = dict(self._table.grants.get(of.name, {}))
        answer = await super().transfer(of, to)
        if isinstance(answer, Grant) and of.owner in held:
            self._table.grants[of.name][of.owner] = held[of.owner]
        return answer


@caught_by("test_what_is_not_held_is_not_transferred")
class TransfersWhatIsNotHeld(Sound):
    async def transfer(self, of, to):
        answer = await super().transfer(of, to)
        if not isinstance(answer, Grant):
            self._table.revoke(of.name, self._clock.now())
            return await self.acquire(to)
        return answer


@caught_by(
    "test_waiters_keep_their_places_when_a_grant_passes_on",
    "test_a_transfer_that_is_repeated_is_one_transfer",
    "test_an_heir_that_an_operator_has_ended_is_told_why",
)
class TransfersByReleaseAndAcquisition(Sound):
    async def transfer(self, of, to):
        if await self.release(of) is not None:
            return Renewal.REFUSED
        return Grant(1) if isinstance(answer := await self.acquire(to), Busy) else answer


# Shares


@caught_by(
    "test_as_many_permits_are_granted_as_there_are",
    "test_each_permit_that_is_released_lets_one_waiter_in",
    "test_a_client_holds_permits_and_readers",
)
class PermitsWithoutAnEnd(Sound):
    async def acquire(self, claim):
        return await super().acquire(replace(claim, mode=Permit(of=1000)) if claim.mode.word == "permit" else claim)


@caught_by("test_clients_may_disagree_on_the_number_of_permits")
class TheFirstClientSetsTheNumber(Sound):
    async def acquire(self, claim):
        if claim.mode.word == "permit":
            self.mode = getattr(self, "mode", claim.mode)
            claim = replace(claim, mode=self.mode)
        return await super().acquire(claim)


@caught_by("test_readers_hold_together_and_share_a_token", "test_all_readers_in_line_are_let_in_by_one_release")
class ATokenForEachReader(Sound):
    async def acquire(self, claim):
        answer = await super().acquire(claim)
        if isinstance(answer, Grant) and claim.mode == READER:
            answer = replace(answer, token=draw_token(self._table))
        return answer


@caught_by("test_a_writer_holds_alone", "test_a_reader_that_died_keeps_no_writer_out")
class WritersDoNotSeeReaders(Sound):
    async def acquire(self, claim):
        if claim.mode.word == "writer":
            self._table.revoke(claim.name, self._clock.now())
        return await super().acquire(claim)


@caught_by(
    "test_a_writer_is_above_the_readers_before_it_and_below_those_after_it",
    "test_tokens_grow_across_all_modes",
    "test_readers_that_come_after_dead_ones_are_above_a_grant_between",
)
class ReadersKeepTheirTokenForEver(Sound):
    phase = None

    async def acquire(self, claim):
        answer = await super().acquire(claim)
        if isinstance(answer, Grant) and claim.mode == READER:
            self.phase = self.phase or answer.token
            answer = replace(answer, token=self.phase)
        return answer


@caught_by("test_tokens_grow_across_all_modes_in_line")
class LocksHaveTheTokenOfTheirPlaceAndReadersAnother(Sound):
    def stand(self, claim, notify, *, hand_over):
        self.places = {**getattr(self, "places", {}), claim.owner: draw_token(self._table)}
        return super().stand(claim, notify, hand_over=hand_over)

    async def acquire(self, claim):
        answer = await super().acquire(claim)
        if isinstance(answer, Grant) and claim.mode != READER:
            answer = replace(answer, token=getattr(self, "places", {}).get(claim.owner, answer.token))
        return answer


@caught_by("test_a_release_frees_one_share")
class ReleasesTheNameAndNotTheShare(Sound):
    async def release(self, claim):
        if claim.mode.shared:
            self._table.revoke(claim.name, self._clock.now())
        await super().release(claim)


@caught_by("test_holders_shows_every_share", "test_holders_shows_readers_a_writer_and_a_lock")
class ShowsOneHolder(Sound):
    async def holders(self, name):
        return (await super().holders(name))[:1]


@caught_by("test_readers_that_come_later_wait_behind_a_writer")
class ReadersOvertakeWriters(Sound):
    async def acquire(self, claim):
        if claim.mode != READER:
            return await super().acquire(claim)
        line = self._table.lines.pop(claim.name, None)
        answer = await super().acquire(claim)
        if line is not None:
            self._table.lines[claim.name] = line
        return answer


@caught_by(
    "test_each_permit_that_is_released_lets_one_waiter_in",
    "test_two_permits_that_are_released_at_once_let_two_in",
)
class WakesWhenNoneIsHeld(Sound):
    def _wake_next(self, name):
        if name not in self._table.grants:
            super()._wake_next(name)
