"""Broken variants are caught, each by its rules, within its number of seeds; and it is the break that is caught."""

import pytest

from tests.simulation.control import Control
from tests.simulation.controls import all_controls
from tests.simulation.judge import PROMISES
from tests.simulation.play import play
from tests.simulation.script import Script
from tests.simulation.shrink import shrink

CONTROLS = all_controls()


def catch(control: Control) -> tuple[int, Script] | None:
    for number, script in enumerate(control.scripts(), start=1):
        with control.broken():
            report = play(script).report
        if report.rules & control.rules:
            return number, script
    return None


@pytest.mark.parametrize("control", CONTROLS, ids=lambda control: f"{control.promise} {control.name}")
def test_a_broken_variant_is_caught(control: Control):
    caught = catch(control)
    assert caught is not None
    number, script = caught
    assert number <= control.within
    if control.changes is not Control.nothing:
        assert not play(script).report.violations, "it is the break that is caught"


@pytest.mark.parametrize(
    "control", [one for one in CONTROLS if one.changes is not Control.nothing], ids=lambda control: control.name
)
def test_without_the_break_the_same_scripts_are_clean(control: Control):
    for script in list(control.scripts())[:3]:
        assert not play(script).report.violations


def test_there_are_enough_of_them_for_every_promise():
    assert len(CONTROLS) >= 63
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
