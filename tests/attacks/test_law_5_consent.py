"""Law 5, consents: what was agreed of one run, one program and one step is agreed of no other."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

import pytest
import torch
from torch import nn

from inspector.inspection.guards import Settings
from inspector.inspection.inspection import inspect, verify
from inspector.inspection.proposals import countersign, read_proposal
from inspector.inspection.verdict import Outcome
from monitor.lab.simulated_lab import SimulatedLab, lab_path
from tests.adversary.world import kept_device
from tests.guards import off
from tests.leaves import execution_of

SETTINGS = Settings(samples=3, seed="x", devices=("sse41",))
SIGNED = datetime(2026, 1, 1, tzinfo=UTC)
CODES = ("buffer/codes",)


@pytest.fixture
def record(record_loop, monkeypatch):
    """Record a loop of four steps that writes what its batches bring into a buffer, from some step on.

    Two of them declare the same, and run the same programs.
    """

    def run(name, *, first=1, rows=4, **options):
        monkeypatch.setattr("monitor.recording.recorder.lab_salt", lambda *_: name.encode().ljust(32))
        torch.manual_seed(0)
        model = nn.Linear(5, 3)
        model.register_buffer("codes", torch.zeros(rows, 5))
        batches = [torch.randn(4, 5, generator=torch.Generator().manual_seed(step)) for step in range(4)]
        steps = iter(range(1, 5))

        def body(model, optimizer, batch):
            optimizer.zero_grad(set_to_none=False)
            model(batch).square().mean().backward()
            optimizer.step()
            if next(steps) >= first:
                with torch.no_grad():
                    model.codes.lerp_(batch[:rows], 0.5)

        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return record_loop(model, optimizer, batches, body, name=name, **options)

    return run


def judge(recorded, *statements, look=inspect):
    """The verdict where these statements alone were signed, or those of its trust file."""
    trust = recorded.trust
    if statements:
        key = SimulatedLab.inspectorate_key(SimulatedLab.read_config(lab_path(recorded.run)))
        trust = replace(trust, countersigned=frozenset(each.sign(key) for each in statements))
    if look is verify:
        return verify(recorded.run, trust, now=recorded.now)
    return inspect([recorded.run], trust, SETTINGS, now=recorded.now, worker=kept_device)


def signed(recorded, **terms):
    return countersign(recorded.run, shown=read_proposal(recorded.run).shown, now=SIGNED, **terms)


@pytest.fixture
def swapped(record):
    """A run without consent, and the trust in which another of equal declaration and program has it."""
    mine, other = record("mine"), record("other", direct_paths=CODES)
    assert judge(other).outcome is Outcome.ACCEPT
    return replace(mine, trust=mine.trust.merge(replace(other.trust, chips=mine.trust.chips)))


def test_a52_one_runs_consent_is_no_other_runs(swapped):
    assert judge(swapped).outcome is not Outcome.ACCEPT
    verdict = judge(swapped, look=verify)
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert "'batch:batch' reaches 'buffer/codes'" in verdict.reasons[0].text


def test_a52_guard_off_it_is(swapped):
    with off("statements of one run"):
        assert judge(swapped).outcome is Outcome.ACCEPT


def test_a52_what_was_signed_for_another_run_alone_leaves_it_open(record):
    mine, other = record("mine"), record("other", direct_paths=CODES)
    verdict = judge(replace(mine, trust=replace(mine.trust, countersigned=other.trust.countersigned)))
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert "its declaration was countersigned for run " in verdict.reasons[0].text


def test_a52_the_way_that_the_verdict_names_leads_to_accept(record):
    recorded = record("loop")
    first = signed(recorded)
    found = judge(recorded, first, look=verify)
    assert found.outcome is Outcome.INCONCLUSIVE
    way = "`declare countersign --direct-path 'buffer/codes'`, with `--amends` statement 1 and `--since` the step"
    assert way in found.reasons[0].text
    amended = signed(recorded, amends=first, direct_paths=CODES)
    assert (amended.number, amended.since, amended.signed) == (2, 1, "2026-01-01T00:00:00Z")
    assert judge(recorded, first, amended).outcome is Outcome.ACCEPT


@pytest.mark.parametrize("since", [1, 2, 3, 4, 5])
def test_a52_a_consent_counts_from_its_step_on(record, since):
    """The path is taken from step 3 on, by a program that is another than before."""
    recorded = record("loop", first=3)
    both = signed(recorded)
    before = replace(both, programs={each: both.programs[each] for each in first_programs(recorded)})
    amended = signed(recorded, amends=before, since=since, direct_paths=CODES)
    verdict = judge(recorded, before, amended)
    assert (verdict.outcome is Outcome.ACCEPT) is (since <= 3), verdict.reasons
    if since > 3:
        assert "no amendment that allows it was countersigned for this step" in verdict.reasons[0].text


@pytest.mark.parametrize("rows", [2, 4])
def test_a52_what_was_signed_when_the_run_was_over_is_amended_for_the_steps_that_need_it(record, rows):
    """The first statement lists all programs, of which one takes a path from step 3 on; few numbers need no consent."""
    recorded = record("loop", first=3, rows=rows)
    first = signed(recorded)
    assert (judge(recorded, first).outcome is Outcome.ACCEPT) is (rows == 2)
    assert judge(recorded, first, signed(recorded, amends=first, since=3, direct_paths=CODES)).outcome is Outcome.ACCEPT


def first_programs(recorded):
    """Those that the first two steps run."""
    from inspector.inspection.transcripts import open_run

    leaves = open_run(recorded.run, recorded.trust).load_steps()[0]
    return {execution_of(leaf).program for leaf in leaves[1:3]}


def test_a52_an_amendment_takes_no_consent_over(record):
    """What the first statement agreed to and the second does not is agreed before the second's step alone."""
    recorded = record("loop")
    first = signed(recorded, direct_paths=CODES)
    assert judge(recorded, first).outcome is Outcome.ACCEPT
    assert judge(recorded, first, signed(recorded, amends=first, since=3)).outcome is not Outcome.ACCEPT
    assert judge(recorded, first, signed(recorded, amends=first, since=5)).outcome is Outcome.ACCEPT


@pytest.mark.parametrize("numbers", [(2,), (1, 3), (1, 1)])
def test_a52_a_statement_that_is_missing_or_there_twice_leaves_it_open(record, numbers):
    recorded = record("loop")
    one = signed(recorded, direct_paths=CODES)
    given = [replace(one, number=number, free=frozenset({f"name{at}"})) for at, number in enumerate(numbers)]
    verdict = judge(recorded, *given)
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert f"its countersigned statements have the numbers {', '.join(map(str, numbers))}" in verdict.reasons[0].text
