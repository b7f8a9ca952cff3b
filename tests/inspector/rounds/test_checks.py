"""What a cluster says of runs: nothing that it met is left out, and nothing of another form is read."""

from __future__ import annotations

from fractions import Fraction

import pytest

from firmware_sim.errors import EvidenceError
from inspector.inspection.disclosure import Checked
from inspector.inspection.transcripts import read_transcript
from inspector.inspection.verdict import Reason
from inspector.rounds import checks
from inspector.rounds.checks import check_runs


@pytest.fixture(scope="module")
def small(tmp_path_factory, record):
    return record(tmp_path_factory.mktemp("checks") / "run", steps=2, chips=2, checkpoint_every=1, rate=Fraction(1))


def test_an_honest_run_is_checked(small):
    (checked,) = check_runs([small.run], small.trust, now=small.now).values()
    assert (checked.found, checked.open) == ((), ())


def test_a_finding_that_names_no_run_counts_against_each(small, monkeypatch):
    read = read_transcript

    def with_finding(run, trust, findings, **options):
        findings.found.append(Reason(guard="data", text="somewhere", where={}))
        return read(run, trust, findings, **options)

    monkeypatch.setattr(checks, "read_transcript", with_finding)
    (checked,) = check_runs([small.run], small.trust, now=small.now).values()
    assert checked.found == (("data", None),)


def test_a_run_that_is_not_read_to_its_end_is_open(small, monkeypatch):
    monkeypatch.setattr(checks, "read_transcript", lambda *given, **options: None)
    (checked,) = check_runs([small.run], small.trust, now=small.now).values()
    assert checked.open == (("evidence", None),)


@pytest.mark.parametrize(
    "changed",
    [
        {"found": 5},
        {"found": {}},
        {"found": [["data"]]},
        {"found": [[["data"], 1]]},
        {"open": [["data", True]]},
        {"open": [["weather", 1]]},
        {"counters": []},
        {"counters": {"optimizer/step": "zz"}},
        {"counters": {"optimizer/step": "00" * 9}},
        {"models": []},
        {"models": {"-1": f"sha256:{'0' * 64}"}},
        {"models": {"0": "sha256:0"}},
    ],
    ids=str,
)
def test_other_forms_are_refused(changed):
    older = {"found": [["data", 1]], "open": [["evidence", None]], "counters": {"optimizer/step": "00" * 4}}
    whole = {**older, "models": {"0": f"sha256:{'0' * 64}"}}
    assert Checked.from_json(whole).to_json() == whole
    assert Checked.from_json(older).to_json() == {**older, "models": {}}
    with pytest.raises(EvidenceError):
        Checked.from_json({**whole, **changed})
