"""Law 6, row B18: what a rank signs has a form before it is used, and `ranks` runs no program that nobody agreed to."""

from __future__ import annotations

import json
import shutil
from copy import deepcopy
from typing import Any

import pytest

from analysis.cli import main
from analysis.examples.train_on_two_processes import batches, gpt_job
from firmware_sim.errors import CallerError
from firmware_sim.evidence import seal
from firmware_sim.evidence.envelope import read_sealed
from inspector import Trust
from monitor import RunFolder
from monitor.distributed.attribution import departures
from monitor.distributed.recorder import DistributedRecorder
from monitor.distributed.statements import Statements, rank_key, read_complaints, write_keys
from monitor.lab.simulated_lab import SimulatedLab, lab_path, simulated_secret
from tests.guards import off

STEP = "application/vnd.chipwitness.rank-step+json"
COMPLAINT = "application/vnd.chipwitness.rank-complaint+json"
RANK = rank_key(simulated_secret(1), 0)
NOTHING: list[Any] = [None, True, -1, 1.5, "x", [], {}, [[]], {"x": []}, ["x"], [1, 2, 3, 4], [{}, {}], 2**100]
"""What stands nowhere, or somewhere else."""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of one rank, with what it signed."""
    run = tmp_path_factory.mktemp("ranks") / "run"
    recorder = DistributedRecorder(gpt_job(2, layers=1, width=6), layout="alone", out=run, seed=1)
    for batch in batches(2, 2):
        recorder.step(batch)
    recorder.finish()
    return run


def trust_of(run):
    return run.with_name("run.trust.json")


def said(run, capsys, trust=None):
    """Exit code and output of the command."""
    code = main(["ranks", str(run), "--trust", str(trust or trust_of(run))])
    told = capsys.readouterr()
    return code, told.out + told.err


@pytest.fixture
def signs(run):
    """Sign another statement in the place of a step's, for the time of a test."""
    path = run.with_name("run.ranks") / "00000002-0000.json"
    before = path.read_bytes()
    honest = read_sealed(before, STEP)[0]
    yield honest, lambda statement: path.write_bytes(seal(STEP, statement, RANK))
    path.write_bytes(before)


def altered(honest):
    """Statements with something else in one place, at every depth."""
    for key, value in honest.items():
        if key in ("run", "step", "rank"):
            continue
        yield from ({**honest, key: other} for other in NOTHING if other or type(other) is not type(value))
        entry = value[0] if isinstance(value, list) and value else value
        for other in NOTHING:
            inner = deepcopy(honest)
            if isinstance(entry, dict) and entry:
                inner[key][next(iter(entry))] = other
            elif isinstance(value, list) and value:
                inner[key][0] = other
            yield inner
    for entry in (["chunk", 0, [], []], ["chunk", 2**70, ["x"], []], ["loss", 0, ["\x1b[2J"] * 2, ["y"]]):
        yield {**honest, "given": [entry]}
    held, (_, _, digest) = next(iter(honest["shards"].items()))
    for name, place in (("weight/nothing", [0, 1]), (held, [2**100, 2**101]), (held, [1, 0]), (held, [0, 2**70])):
        yield {**honest, "shards": {name: [*place, digest]}}
    yield {**honest, "moved": {"x": 2**100}}
    yield {**honest, "work": [2**100, 0]}
    yield {**honest, "between": [2**100, 0, 0]}


def test_b18_whoever_signs_another_form_is_named(run, signs):
    honest, sign = signs
    opened = RunFolder(run, Trust.load([trust_of(run)], [run]).labs["lab-1"])
    key, cases = opened.metadata.lab, [each for each in altered(honest) if each != honest]
    assert len(cases) > 100
    for statement in [*cases[:-10:5], *cases[-10:]]:
        sign(statement)
        found = departures(opened, Trust.load([trust_of(run)], [run]).labs[key])
        assert {(each.step, each.rank) for each in found} == {(2, 0)}, statement


def test_b18_and_by_the_command_in_a_line(run, signs, capsys):
    honest, sign = signs
    sign({**honest, "batches": [1]})
    code, text = said(run, capsys)
    assert (code, text.count("\n")) == (1, 1)
    assert "step 2, rank 0: a rank's statement has missing or extra keys, or a malformed value" in text


def test_b18_guard_off_nobody_is_named(run, signs, capsys):
    honest, sign = signs
    sign({**honest, "batches": [1]})
    with off("forms of ranks' statements"):
        code, text = said(run, capsys)
    assert code == 3
    assert "rank 0" not in text


def test_b18_who_signs_that_it_holds_what_is_not_there_is_named_by_the_others(run, tmp_path):
    ranks = [Statements(tmp_path / "run", "00" * 32, 0, RANK, [RANK.verifying])]
    ranks[0].begin(1)
    statement = {**statement_of(run), "run": "00" * 32, "step": 1, "shards": {"weight/x": [0, 1, "z"]}}
    with pytest.raises(
        Exception, match="step 1: rank 0 signed that it holds 'weight/x', which is not a tensor of the state"
    ):
        ranks[0].opened([seal(STEP, statement, RANK)], {})


def statement_of(run):
    return read_sealed((run.with_name("run.ranks") / "00000002-0000.json").read_bytes(), STEP)[0]


@pytest.mark.parametrize("change", [{"sender": []}, {"names": 1}, {"kind": {}}, {"turn": "x"}])
def test_b18_a_complaint_of_another_form_is_its_rank_s(tmp_path, change):
    folder = tmp_path / "run.ranks"
    folder.mkdir()
    sound = {"run": "00", "step": 3, "rank": 0, "sender": 1, "kind": "chunk", "turn": 0, "names": ["w"]}
    sound |= {"signed": ["x"], "came": "y"}
    (folder / "complaint-00000003-0000.json").write_bytes(seal(COMPLAINT, {**sound, **change}, RANK))
    [(step, rank, text)] = read_complaints(tmp_path / "run", "00", {1: [RANK.verifying]})
    assert (step, rank, text) == (3, 0, "it signed a complaint of another form")


def test_b18_nobody_hides_among_others_behind_an_older_form(run, tmp_path):
    """Where all ranks of a step sign it, an earlier version wrote it; where one does, it has something to hide."""
    for name in ("run", "run.ranks", "run.lab"):
        shutil.copytree(run.with_name(name), tmp_path / name)
    copy, lab_key = tmp_path / "run", SimulatedLab.lab_key(SimulatedLab.read_config(lab_path(run)))
    folder = RunFolder(copy, lab_key.verifying)
    second = rank_key(simulated_secret(1), 1)
    write_keys(copy, folder.metadata.run_id.hex(), 1, [RANK.verifying, second.verifying], lab_key)
    path = tmp_path / "run.ranks" / "00000001-0000.json"
    honest = read_sealed(path.read_bytes(), STEP)[0]
    older = {key: value for key, value in honest.items() if key not in ("given", "between")} | {"chunks": []}
    path.write_bytes(seal(STEP, older, RANK))
    path.with_name("00000001-0001.json").write_bytes(
        seal(STEP, {**honest, "rank": 1, "seals": honest["seals"] * 2}, second)
    )
    found = {each.rank: each.text for each in departures(folder, lab_key.verifying) if each.kind == "statement"}
    assert found[0] == "its statement is of an older form than the others'"
    path.with_name("00000001-0001.json").write_bytes(seal(STEP, {**older, "rank": 1}, second))
    with pytest.raises(CallerError, match="of an older form"):
        departures(folder, lab_key.verifying)


@pytest.fixture
def nobody_agreed(run, tmp_path):
    """The trust file of somebody who has agreed to nothing."""
    path = tmp_path / "trust.json"
    path.write_text(json.dumps({**json.loads(trust_of(run).read_text()), "countersigned": []}))
    return path


@pytest.mark.parametrize("is_guarded", [True, False])
def test_b18_ranks_runs_no_program_that_nobody_countersigned(run, nobody_agreed, capsys, monkeypatch, is_guarded):
    decoded = []
    program = RunFolder.program

    def noted(self, digest):
        decoded.append(digest)
        return program(self, digest)

    monkeypatch.setattr(RunFolder, "program", noted)
    if not is_guarded:
        with off("ranks run what was agreed"):
            code, text = said(run, capsys, nobody_agreed)
        assert (code, bool(decoded)) == (0, True)
        return
    code, text = said(run, capsys, nobody_agreed)
    assert (code, decoded) == (2, [])
    assert "no inspectorate in the trust file has countersigned a declaration of lab lab-1" in text
    assert said(run, capsys)[0] == 0
