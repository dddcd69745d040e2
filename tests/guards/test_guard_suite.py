"""The suite itself: a guard that breaks one promise is found out, by the test that is about it."""

import asyncio
import inspect
import itertools
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from fencing_sdk import StaleTokenError, Token
from fencing_sdk._values.claim import check_name
from fencing_sdk._values.token import check_token
from fencing_sdk.guards import check_tokens
from fencing_sdk.testing.suites import GuardSuite


class Honest:
    """A guard that keeps every promise, in pieces that can be replaced by worse ones."""

    def __init__(self, shelf=None):
        self.fences, self.data = ({}, {}) if shelf is None else shelf

    def checked(self, resource, token):
        return check_name(resource), check_token(token)

    def admit(self, resource, token):
        resource, token = self.checked(resource, token)
        fence = self.fences.get(resource)
        if fence is not None:
            self.compare(resource, token, fence)
        if fence is None or token > fence or token.holder is not None:
            self.fences[resource] = token

    def compare(self, resource, token, fence):
        conflict = token == fence and None not in {token.holder, fence.holder} and token.holder != fence.holder
        if token < fence or conflict:
            raise StaleTokenError(resource, int(token), int(fence), conflict=conflict)

    async def write(self, resource, token, value):
        self.admit(resource, token)
        self.data[resource] = value

    async def write_all(self, tokens, values):
        fences = dict(self.fences)
        try:
            for resource, token in self.each(tokens):
                self.admit(resource, token)
        except StaleTokenError:
            self.fences.clear()
            self.fences.update(fences)
            raise
        self.data.update(values)

    def each(self, tokens):
        return check_tokens(tokens).items()

    async def raise_to(self, resource, token):
        self.admit(resource, token)

    async def highest(self, resource):
        return self.fences.get(check_name(resource))

    def anew(self):
        return type(self)((self.fences, self.data))


class AcceptsLower(Honest):
    def compare(self, resource, token, fence):
        if token >= fence:
            super().compare(resource, token, fence)


class RefusesEqual(Honest):
    def compare(self, resource, token, fence):
        if token <= fence:
            raise StaleTokenError(resource, int(token), int(fence))


class IgnoresHolders(Honest):
    def compare(self, resource, token, fence):
        super().compare(resource, Token(token), fence)


class RefusesUnknownHolders(Honest):
    def compare(self, resource, token, fence):
        if token == fence and token.holder != fence.holder:
            raise StaleTokenError(resource, int(token), int(fence), conflict=True)
        super().compare(resource, token, fence)


class ForgetsHolders(Honest):
    def admit(self, resource, token):
        super().admit(resource, token)
        self.fences[resource] = Token(max(token, self.fences[resource]), token.holder)


class KeepsHoldersForEver(Honest):
    def admit(self, resource, token):
        before = self.fences.get(resource)
        super().admit(resource, token)
        if before is not None and token.holder is None:
            self.fences[resource] = Token(self.fences[resource], before.holder)


class SwapsTheNumbers(Honest):
    def compare(self, resource, token, fence):
        try:
            super().compare(resource, token, fence)
        except StaleTokenError as error:
            raise StaleTokenError(resource, error.fence, error.token, conflict=error.conflict) from None


class CallsAllAConflict(Honest):
    def compare(self, resource, token, fence):
        try:
            super().compare(resource, token, fence)
        except StaleTokenError as error:
            raise StaleTokenError(resource, error.token, error.fence, conflict=True) from None


class TakesZeroForNothing(Honest):
    def admit(self, resource, token):
        if not self.fences.get(resource):
            self.fences.pop(resource, None)
        super().admit(resource, token)


class WritesFirst(Honest):
    async def write(self, resource, token, value):
        self.data[check_name(resource)] = value
        self.admit(resource, token)


class ChecksLater(Honest):
    """Check and write are two steps, and some writes take longer than others."""

    async def write(self, resource, token, value):
        self.admit(resource, token)
        for _ in range(token * 7 % 5):
            await asyncio.sleep(0)
        self.data[resource] = value


class RemembersLater(Honest):
    """Check and remembering are two steps."""

    async def write(self, resource, token, value):
        resource, token = self.checked(resource, token)
        fence = self.fences.get(resource)
        if fence is not None:
            self.compare(resource, token, fence)
        await asyncio.sleep(0)
        self.fences[resource] = token if fence is None or token > fence or token.holder is not None else fence
        self.data[resource] = value


class RaisesNothing(Honest):
    async def raise_to(self, resource, token):
        self.checked(resource, token)


class RaisesOnceAlone(Honest):
    async def raise_to(self, resource, token):
        if self.fences.get(resource) == token:
            raise StaleTokenError(resource, int(token), int(token))
        await super().raise_to(resource, token)


class Lowers(Honest):
    async def raise_to(self, resource, token):
        self.fences[check_name(resource)] = check_token(token)


class WritesWhenRaised(Honest):
    async def raise_to(self, resource, token):
        await self.write(resource, token, "")


class ErasesWhenRaised(Honest):
    async def raise_to(self, resource, token):
        self.admit(resource, token)
        self.data.pop(resource, None)


class HasOneFence(Honest):
    def admit(self, resource, token):
        super().admit(check_name(resource) and "all", token)


class FoldsNames(Honest):
    def checked(self, resource, token):
        return super().checked(resource, token)[0].casefold(), check_token(token)


class CutsNames(Honest):
    async def write(self, resource, token, value):
        self.admit(resource, token)
        self.data[resource[:511]] = value


class TakesEverythingForAToken(Honest):
    def checked(self, resource, token):
        return check_name(resource), token if isinstance(token, Token) else Token(int(token))


class TakesEverythingForAName(Honest):
    def checked(self, resource, token):
        return resource, check_token(token)


class ForgetsOnRestart(Honest):
    def anew(self):
        return type(self)()


class RaisesSomeOfSeveral(Honest):
    async def write_all(self, tokens, values):
        for resource, token in self.each(tokens):
            self.admit(resource, token)
        self.data.update(values)


class WritesSomeOfSeveral(Honest):
    async def write_all(self, tokens, values):
        for resource, token in self.each(tokens):
            self.admit(resource, token)
            self.data[resource] = values[resource]


class TearsSeveral(Honest):
    async def write_all(self, tokens, values):
        await super().write_all(tokens, {})
        for resource, token in self.each(tokens):
            for _ in range(token * 7 % 5):
                await asyncio.sleep(0)
            self.data[resource] = values[resource]


class NamesTheFirst(Honest):
    async def write_all(self, tokens, values):
        try:
            await super().write_all(tokens, values)
        except StaleTokenError as error:
            raise StaleTokenError(min(tokens), error.token, error.fence, conflict=error.conflict) from None


class ChecksTheFirst(Honest):
    def each(self, tokens):
        return list(check_tokens(tokens).items())[:1]


class CutsSeveral(Honest):
    def each(self, tokens):
        return list(check_tokens(tokens).items())[:49]


class LocksInAnyOrder(Honest):
    def __init__(self, shelf=None):
        super().__init__(shelf)
        self.locks = {}

    async def write_all(self, tokens, values):
        check_tokens(tokens)
        async with AsyncExitStack() as stack:
            for resource in tokens:
                await stack.enter_async_context(self.locks.setdefault(resource, asyncio.Lock()))
                await asyncio.sleep(0)
            await super().write_all(tokens, values)


class TakesEverythingForTokens(Honest):
    def each(self, tokens):
        return {} if not isinstance(tokens, dict) else super().each(tokens)


class CannotRaise(Honest):
    raise_to = None


REFUSALS = (StaleTokenError, TimeoutError, pytest.fail.Exception)


class Suite(GuardSuite):
    several = True
    patience = 1.0

    async def write_all(self, guard, tokens, values):
        await guard.write_all(tokens, values)

    async def write(self, guard, resource, token, value):
        await guard.write(resource, token, value)

    async def read(self, guard, resource):
        return guard.data.get(resource)

    @asynccontextmanager
    async def reopen(self, guard):
        yield guard.anew()


class TestHonest(Suite):
    @pytest.fixture
    def guard(self):
        return Honest()


def promises():
    """Every promise of the suite, once for each of its parameters."""
    for name, promise in inspect.getmembers(Suite, inspect.isfunction):
        if name.startswith("test_"):
            marks = [mark for mark in getattr(promise, "pytestmark", []) if mark.name == "parametrize"]
            choices = [[(mark.args[0], value) for value in mark.args[1]] for mark in marks]
            for chosen in itertools.product(*choices):
                yield name, dict(chosen)


async def broken_promises(kind) -> set[str]:
    broken = set()
    for name, arguments in promises():
        try:
            outcome = getattr(Suite(), name)(guard=kind(), **arguments)
            if inspect.isawaitable(outcome):
                await outcome
        except (AssertionError, ValueError, TypeError, AttributeError, *REFUSALS):
            broken.add(name)
    return broken


@pytest.mark.parametrize(
    ("kind", "promise"),
    [
        (AcceptsLower, "test_a_lower_token_is_refused_and_the_error_tells_both_numbers"),
        (AcceptsLower, "test_a_lower_token_is_refused_every_time"),
        (AcceptsLower, "test_accepted_writes_never_go_down_among_tasks"),
        (RefusesEqual, "test_one_holder_writes_many_times_with_one_token"),
        (IgnoresHolders, "test_the_same_number_from_another_holder_is_a_conflict"),
        (IgnoresHolders, "test_a_fence_belongs_to_one_holder"),
        (IgnoresHolders, "test_of_the_holders_of_one_number_exactly_one_gets_in"),
        (IgnoresHolders, "test_no_update_is_lost_among_tasks"),
        (RefusesUnknownHolders, "test_a_number_whose_holder_is_unknown_conflicts_with_nobody"),
        (ForgetsHolders, "test_a_holder_that_became_known_is_remembered"),
        (KeepsHoldersForEver, "test_the_holder_of_a_lower_token_is_forgotten"),
        (SwapsTheNumbers, "test_a_lower_token_is_refused_and_the_error_tells_both_numbers"),
        (CallsAllAConflict, "test_a_lower_token_is_refused_and_the_error_tells_both_numbers"),
        (TakesZeroForNothing, "test_zero_is_a_token_like_any_other"),
        (WritesFirst, "test_a_lower_token_is_refused_every_time"),
        (ChecksLater, "test_accepted_writes_never_go_down_among_tasks"),
        (ChecksLater, "test_no_update_is_lost_among_tasks"),
        (RemembersLater, "test_of_the_holders_of_one_number_exactly_one_gets_in"),
        (RaisesNothing, "test_the_old_holder_is_refused_before_the_new_one_writes"),
        (RaisesNothing, "test_a_fence_can_be_raised_where_nobody_has_written"),
        (RaisesNothing, "test_a_zombie_is_refused_from_the_moment_the_next_holder_has_its_lease"),
        (RaisesOnceAlone, "test_raising_a_fence_twice_is_raising_it_once"),
        (Lowers, "test_a_fence_is_never_lowered"),
        (WritesWhenRaised, "test_the_old_holder_is_refused_before_the_new_one_writes"),
        (ErasesWhenRaised, "test_raising_a_fence_twice_is_raising_it_once"),
        (HasOneFence, "test_fences_are_independent"),
        (FoldsNames, "test_every_valid_name_is_a_resource_of_its_own"),
        (CutsNames, "test_every_valid_name_is_a_resource_of_its_own"),
        (TakesEverythingForAToken, "test_what_is_no_token_is_refused_and_changes_nothing"),
        (TakesEverythingForAName, "test_what_names_no_resource_is_refused"),
        (ForgetsOnRestart, "test_the_fence_outlives_the_guard_or_the_guard_says_that_it_does_not"),
        (RaisesSomeOfSeveral, "test_one_stale_token_refuses_all_and_is_named"),
        (RaisesSomeOfSeveral, "test_one_conflict_refuses_all_and_is_named"),
        (WritesSomeOfSeveral, "test_one_stale_token_refuses_all_and_is_named"),
        (TearsSeveral, "test_no_step_is_torn_by_another"),
        (NamesTheFirst, "test_one_stale_token_refuses_all_and_is_named"),
        (NamesTheFirst, "test_one_conflict_refuses_all_and_is_named"),
        (ChecksTheFirst, "test_several_resources_are_written_together"),
        (ChecksTheFirst, "test_each_fence_refuses_by_itself_afterwards"),
        (CutsSeveral, "test_fifty_resources_fit_into_one_step"),
        (LocksInAnyOrder, "test_steps_that_overlap_do_not_wait_for_each_other_in_a_circle"),
        (TakesEverythingForTokens, "test_what_is_no_mapping_of_tokens_is_refused_and_changes_nothing"),
        (CannotRaise, "test_a_guard_can_stand_in_fences"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
async def test_a_broken_guard_is_found_out_by_the_test_that_is_about_it(kind, promise):
    assert promise in await broken_promises(kind)


async def test_a_guard_that_claims_to_forget_and_does_not_is_found_out():
    class Modest(Suite):
        durable = False

    with pytest.raises(AssertionError, match="declare durable"):
        await Modest().test_the_fence_outlives_the_guard_or_the_guard_says_that_it_does_not(Honest())


async def test_an_honest_guard_breaks_nothing():
    assert await broken_promises(Honest) == set()
