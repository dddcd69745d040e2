"""Broken variants are caught, each by its rules, within its number of seeds; and it is the break that is caught."""

import pytest

from fencing_sdk.testing.history import PROMISES, Report
from fencing_sdk.testing.simulation import Control, all_controls, play, shrink

CONTROLS = all_controls()


def catch(control: Control) -> tuple[int, Report] | None:
    for number, script in enumerate(control.scripts(), start=1):
        with control.broken():
            report = play(script).report
        if report.rules & control.rules:
            return number, report
    return None


@pytest.mark.timeout(300)
@pytest.mark.parametrize("control", CONTROLS, ids=lambda control: f"{control.promise} {control.name}")
def test_a_broken_variant_is_caught(control: Control):
    caught = catch(control)
    assert caught is not None
    assert caught[0] <= control.within


@pytest.mark.parametrize(
    "control", [one for one in CONTROLS if one.changes is not Control.nothing], ids=lambda control: control.name
)
def test_without_the_break_the_same_scripts_are_clean(control: Control):
    for script in list(control.scripts())[:3]:
        assert not play(script).report.violations


def test_there_are_enough_of_them_for_every_promise():
    assert len(CONTROLS) >= 40
    assert {control.promise for control in CONTROLS} == set(PROMISES)
    assert len({control.name for control in CONTROLS}) == len(CONTROLS)


def test_a_break_ends_with_its_block():
    before = [vars(owner)[name] for control in CONTROLS for owner, name, _ in control.changes()]
    for control in CONTROLS:
        with control.broken():
            pass
    assert [vars(owner)[name] for control in CONTROLS for owner, name, _ in control.changes()] == before


def test_a_failing_script_is_made_small():
    control = next(one for one in CONTROLS if one.name == "fences are not raised at acquisition")
    with control.broken():
        large = next(script for script in control.scripts() if play(script).report.rules & control.rules)
        small = shrink(large, control.rules)
        assert play(small).report.rules & control.rules
        assert len(small.visits) + len(small.faults) < len(large.visits) + len(large.faults)
        for fault in range(len(small.faults)):
            assert not play(small.without(fault=fault)).report.rules & control.rules
    assert not play(small).report.violations
