"""Histories from seeds: nothing is broken, everything happens, and one seed is one history."""

import functools
import hashlib
import os
import re
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path

import pytest
from campaigns import amount

from fencing_sdk import ConfigurationError, LossReason
from fencing_sdk._engine.heartbeat import LeaseGroup
from tests.simulation.campaign import play_seeds, run_campaign
from tests.simulation.judge import Report, Verdict
from tests.simulation.play import History, play
from tests.simulation.script import THEMES, Fault, Script, Visit, write_election_script, write_script

HISTORIES = amount(10_000, short=150)
PART = amount(1000, short=150)
PARTS = [range(start, min(start + PART, HISTORIES)) for start in range(0, HISTORIES, PART)]
ROOT = Path(__file__).parents[2]


def command(*arguments: str, hash_seed: str = "random") -> subprocess.CompletedProcess[str]:
    tracing = {"COVERAGE_PROCESS_CONFIG", "COVERAGE_PROCESS_START"}  # would make it four times as slow
    environment = {name: value for name, value in os.environ.items() if name not in tracing}
    environment["PYTHONHASHSEED"] = hash_seed
    run = [sys.executable, "-W", "error", "-m", "tests.simulation", *arguments]
    return subprocess.run(run, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=580)


@pytest.mark.slow
@pytest.mark.campaign
@pytest.mark.parametrize("seeds", PARTS, ids=lambda seeds: f"{seeds[0]}-{seeds[-1]}")
def test_nothing_is_broken(seeds: range, capsys: pytest.CaptureFixture[str]):
    done = command("--first-seed", str(seeds[0]), "--histories", str(len(seeds)))
    assert done.returncode == 0, done.stdout + done.stderr
    speed = rf"^{len(seeds)} histories in [\d.]+ s \(\d+ histories per second\)$"
    heard = re.search(speed, done.stdout, re.MULTILINE)
    assert heard is not None, done.stdout
    with capsys.disabled():
        sys.stdout.write(f"\nseeds {seeds[0]} to {seeds[-1]}: {heard[0]}\n")
    assert "verdict: ok" in done.stdout


def test_nothing_is_broken_among_permits_readers_and_writers():
    done = command("--shares", "--histories", str(amount(10_000, short=100)))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "verdict: ok" in done.stdout


def test_nothing_is_broken_among_terms_of_elections_and_clients_that_drain():
    done = command("--elections", "--histories", str(amount(10_000, short=100)))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "verdict: ok" in done.stdout


def test_in_these_histories_terms_end_by_drains_and_waiters_leave():
    heard: Counter[str] = Counter()
    for seed in range(20):
        history = play(write_election_script(seed))
        heard.update(f"{line['kind']} {line['reason']}" for line in history.lines if "reason" in line)
    assert heard["lost drained"] >= 1
    assert heard["not_acquired draining"] >= 5


@pytest.mark.slow
def test_the_outcome_is_the_same_in_any_number_of_processes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tests.simulation.campaign._PART", 4)
    alone, together = run_campaign(300, 15, 1), run_campaign(300, 15, 3)
    assert (together.histories, together.report, together.failed) == (alone.histories, alone.report, alone.failed)
    assert alone.report == play_seeds(range(300, 315)).report


def test_one_seed_is_one_history_whatever_the_hash_seed():
    first, second = (command("--digest", "--histories", "8", hash_seed=seed).stdout for seed in ("1", "2"))
    assert re.fullmatch(r"[0-9a-f]{64}\n", first)
    assert first == second


def test_one_seed_is_one_history_in_one_process():
    for seed in range(8):
        assert play(write_script(seed)).text == play(write_script(seed)).text


def test_other_seeds_are_other_histories():
    assert len({hashlib.sha256(play(write_script(seed)).text.encode()).digest() for seed in range(16)}) == 16


def test_the_script_of_a_seed_does_not_change():
    """A seed in a report, or in a bug tracker, means the same script for ever. Change this digest knowingly."""
    scripts = "\n".join(write_script(seed).to_json() for seed in range(200))
    assert (
        hashlib.sha256(scripts.encode()).hexdigest()
        == "9597fe5daed9aa3ea8772306090a5eb51ef2af9484e17d2933e1acaab34a2f47"
    )


def test_a_script_can_be_printed_and_read_back():
    for seed in range(16):
        script = write_script(seed)
        assert Script.from_json(script.to_json()) == script


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"seed":1}', "null", '{"seed":1,"rates":[],"visits":[{}],"faults":[]}']
)
def test_what_is_not_a_script_is_refused(text: str):
    with pytest.raises(ConfigurationError, match="not a script"):
        Script.from_json(text)


def test_every_theme_and_every_kind_of_fault_happens():
    """Vacuous histories would be easy to survive."""
    happened: Counter[str] = Counter()
    bodies: Counter[str] = Counter()
    for seed in range(300):
        script = write_script(seed)
        bodies.update(visit.body for visit in script.visits)
        happened.update({script.theme, *(fault.kind for fault in script.faults)})
    assert set(THEMES) <= set(happened)
    assert min(happened.values()) >= 5
    assert min(bodies.values()) >= 50
    kinds = set(happened) - set(THEMES)
    assert len(kinds) >= 18


SEVERAL = range(160)


@functools.cache
def history(seed: int) -> History:
    """The history of *seed*, played once for all tests that look at several."""
    return play(write_script(seed))


def test_every_fault_leaves_its_traces():
    traces: Counter[str] = Counter()
    for seed in SEVERAL:
        for line in history(seed).lines:
            traces[line["kind"]] += 1
            traces[
                f"{line['kind']} {line.get('what') or line.get('reason') or line.get('why') or line.get('how')}"
            ] += 1
    troubles = {"lost", "late", "doubled", "cut", "outage", "refused", "forgot", "stepped", "revoked", "stalled"}
    assert {f"trouble {what}" for what in troubles} <= set(traces)
    assert {"ended forgotten", "ended revoked", "ended released"} <= set(traces)
    ends = {"held", "timed_out", "cancelled", "unavailable"}
    assert {f"not_acquired {reason}" for reason in ends} <= set(traces)
    assert {"lost expired", "lost stalled", "lost refused", "lost revoked"} <= set(traces)
    assert {"body_ended cancelled", "body_ended BodyError", "body_ended LeaseLostError"} <= set(traces)
    assert {"frozen", "resumed", "cancelled", "repeated", "renewal_failed", "write_refused"} <= set(traces)


LETTERS = {
    "acquiring": "a",
    "not_acquired": "n",
    "acquired": "h",
    "renewed": "-",
    "renewal_late": "-",
    "renewal_failed": "-",
    "fence_raised": "-",
    "stale_rejected": "s",
    "lost": "l",
    "released": "r",
}
WHOLE = re.compile("as?n|ah[-s]*l?[-s]*r")
BEGUN = re.compile("a(s?n|h[-s]*l?[-s]*r?)?")
"""What a process that crashed has told."""


def test_every_acquisition_is_told_from_its_one_beginning_to_its_one_end():
    heard: Counter[str] = Counter()
    for seed in SEVERAL:
        acquisitions: dict[tuple[str, str], str] = defaultdict(str)
        crashed: set[str] = set()
        for line in history(seed).lines:
            actor, kind = line["actor"], line["kind"]
            if kind in LETTERS:
                acquisitions[actor, line["holder"]] += LETTERS[kind]
            elif kind == "frozen":
                crashed.add(actor)
            elif kind == "resumed":
                crashed.discard(actor)
        for (actor, holder), letters in acquisitions.items():
            grammar = BEGUN if actor in crashed else WHOLE
            assert grammar.fullmatch(letters), (seed, actor, holder, letters)
            heard[letters.replace("-", "")] += 1
    assert {"an", "ahr", "ahlr"} <= set(heard)


def test_faults_have_effects():
    report = Report()
    for seed in SEVERAL:
        report.add(history(seed).report)
    assert report.observed["losses"] >= 30
    assert report.observed["refusals"] >= 10
    assert report.observed["hand-overs"] >= 150
    assert min(report.observed[f"P{number}"] for number in range(1, 9)) >= 50
    assert report.verdict(least=25) is Verdict.OK


def of_one_visit(turn: int | None, **options: object) -> Script:
    """One client that is cancelled after *turn* turns of its loop, and one that wants the same lock."""
    cancel = () if turn is None else (Fault(0.0, "cancel", 0, turn=turn),)
    visits = (
        Visit(0, 0.5, "a", "write", 0.2, None, fenced=True),
        Visit(1, 0.6, "a", "write", 0.2, None, fenced=True),
    )
    values = {"seed": 1, "ttl": 20.0, "rates": (1.0, 1.0, 1.0), "visits": visits, "faults": cancel, **options}
    return Script(**values)  # type: ignore[arg-type]


@pytest.mark.parametrize("polls", [False, True])
def test_a_cancellation_at_any_await_breaks_nothing(polls: bool):
    outcomes: Counter[str] = Counter()
    for turn in range(0, 70, amount(1, short=2)):
        history = play(of_one_visit(turn, polls=polls, seed=turn))
        assert not history.report.violations, (turn, history.report.violations)
        ends = [one["how"] for one in history.lines if one["kind"] == "body_ended" and one["actor"] == "c0"]
        outcomes[ends[0] if ends else "never entered"] += 1
    assert outcomes["never entered"] >= 3
    assert outcomes["cancelled"] >= 3


def test_a_release_that_overtakes_a_slow_acquisition_leaves_nothing_behind():
    for turn in range(6):
        late = Fault(0.0, "late", 0, 2.0, "acquire", "request", 1)
        history = play(of_one_visit(turn, faults=(late, Fault(0.0, "cancel", 0, turn=turn)), seed=turn))
        assert not history.report.violations, (turn, history.report.violations)


def test_an_error_in_a_task_that_is_never_awaited_is_found(monkeypatch: pytest.MonkeyPatch):
    look = LeaseGroup.look

    def fail(group: LeaseGroup) -> None:
        members = tuple(group.members.values())
        look(group)
        if any(lease.lost is LossReason.EXPIRED for lease in members):  # a timer of the loop has called
            raise ZeroDivisionError

    monkeypatch.setattr(LeaseGroup, "look", fail)
    broken = [play(write_script(seed)).report.rules for seed in range(8)]
    assert any("failed" in rules for rules in broken)
