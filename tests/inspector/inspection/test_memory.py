"""An inspector who remembers sees that a chip was put back to an earlier state; one who does not is deceived."""

from __future__ import annotations

import json
import shutil
from functools import reduce

import pytest

from firmware_sim import LogPosition
from firmware_sim.errors import CallerError
from inspector.inspection.guards import Guard, Settings
from inspector.inspection.inspection import inspect
from inspector.inspection.memory import load_memory, remember, save_memory
from inspector.inspection.sources import Past
from inspector.inspection.trust import Trust
from inspector.inspection.verdict import Outcome
from monitor.lab.simulated_lab import lab_path
from tests.guards import blind

SETTINGS = Settings(samples=3, seed="x", devices=("sse41",))


@pytest.fixture
def look(devices):
    def look(first, *others, memory=None, off=frozenset()):
        runs = [first.run, *(other.run for other in others)]
        trust = reduce(Trust.merge, (other.trust for other in others), first.trust)
        with blind(*off):
            return inspect(runs, trust, SETTINGS, now=first.now, worker=devices.run, past=Past(memory=memory))

    return look


def test_a_chip_put_back_to_an_earlier_state_is_found_by_who_remembers(make_run, look, tmp_path):
    """The lab copies its chips' silicon, trains a run that is inspected, puts the copy back and trains another."""
    first = make_run("first")
    silicon, copy = lab_path(first.run) / "chips", tmp_path / "copy"
    shutil.copytree(silicon, copy)
    second = make_run("second", seed=6, after=first.run)
    seen = look(first, second)
    assert seen.outcome is Outcome.ACCEPT, seen.reasons
    memory = remember({}, seen)
    assert "earlier inspection" not in seen.reasons[0].text
    strange = look(first, second, memory={})  # as after a slip in the file's name: nobody is known, and it says so
    assert "0 of 3 drawn chips continue from where an earlier inspection left them" in strange.reasons[0].text
    same = look(first, second, memory=memory)  # the same evidence once more
    assert same.outcome is Outcome.ACCEPT
    assert same.evidence["known_chips"] == sorted(memory)
    assert "0 of 3 drawn chips continue from where an earlier inspection left them" in same.reasons[0].text
    assert "and 3 showed nothing newer than what was seen then" in same.reasons[0].text
    third = make_run("third", seed=8, after=second.run)
    grown = look(first, second, third, memory=memory)
    assert grown.outcome is Outcome.ACCEPT, grown.reasons
    assert all(position.size > memory[chip].size for chip, position in remember(memory, grown).items())

    shutil.rmtree(silicon)
    shutil.copytree(copy, silicon)
    other = make_run("other", seed=7, after=first.run)
    assert look(first, other).outcome is Outcome.ACCEPT
    verdict = look(first, other, memory=memory)
    assert verdict.outcome is Outcome.REJECT
    assert {each.guard for each in verdict.reasons} == {Guard.LOG_CHAIN.value}
    assert {each.where["chip"] for each in verdict.reasons} == set(memory)
    assert "last inspection" in verdict.reasons[0].text
    assert look(first, other, memory=memory, off=frozenset({Guard.LOG_CHAIN})).outcome is Outcome.ACCEPT
    assert remember(memory, verdict) == memory


def test_what_a_lying_labs_sound_chips_have_shown_is_remembered(make_run, look, tmp_path):
    """A lab whose chips saw hidden steps is rejected, puts them back to before, and trains again without."""
    first = make_run("first")
    silicon, copy = lab_path(first.run) / "chips", tmp_path / "copy"
    shutil.copytree(silicon, copy)
    cheat = make_run("cheat", seed=6, after=first.run, lie="extra-steps")
    seen = look(first, cheat)
    assert {each.guard for each in seen.reasons} == {Guard.METER.value, Guard.SNAPSHOT.value}
    memory = remember({}, seen)
    assert len(memory) == 3
    shutil.rmtree(silicon)
    shutil.copytree(copy, silicon)
    clean = make_run("clean", seed=6, after=first.run)
    assert look(first, clean).outcome is Outcome.ACCEPT
    assert look(first, clean, memory=memory).outcome is Outcome.REJECT


def test_evidence_older_than_what_was_seen_is_rejected(make_run, look):
    first = make_run("first")
    second = make_run("second", seed=6, after=first.run)
    memory = remember({}, look(first, second))
    assert look(first, memory=memory).outcome is Outcome.REJECT


def test_memory_is_kept_in_a_file(tmp_path):
    path = tmp_path / "memory.json"
    assert load_memory(path) == {}
    memory = {
        "b": LogPosition(counter=3, size=2, head=bytes(range(32)), time=1),
        "a": LogPosition(counter=0, size=0, head=bytes(32)),
    }
    save_memory(path, memory)
    assert load_memory(path) == memory
    assert [each.name for each in tmp_path.iterdir()] == ["memory.json"]
    with pytest.raises(CallerError, match="cannot write"):
        save_memory(tmp_path / "no" / "memory.json", memory)
    with pytest.raises(CallerError, match="there is no folder"):
        load_memory(tmp_path / "no" / "memory.json")
    with pytest.raises(CallerError, match="File name too long"):
        load_memory(tmp_path / ("a" * 300))


GOOD = {"format": "chipwitness/memory/2", "chips": {"a": {"counter": 1, "size": 1, "time": 0, "head": "00" * 32}}}


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data.pop("format"),
        lambda data: data.update(format="chipwitness/memory/1"),
        lambda data: data.update(more=1),
        lambda data: data.update(chips=[]),
        lambda data: data["chips"].update(a=1),
        lambda data: data["chips"]["a"].pop("size"),
        lambda data: data["chips"]["a"].update(size=-1),
        lambda data: data["chips"]["a"].update(time=1.5),
        lambda data: data["chips"]["a"].update(counter=True),
        lambda data: data["chips"]["a"].update(head="00"),
        lambda data: data["chips"]["a"].update(head="zz" * 32),
        lambda data: data["chips"]["a"].update(head=None),
    ],
)
def test_another_file_is_the_callers_mistake(tmp_path, change):
    data = json.loads(json.dumps(GOOD))
    path = tmp_path / "memory.json"
    path.write_text(json.dumps(data))
    assert set(load_memory(path)) == {"a"}
    change(data)
    path.write_text(json.dumps(data))
    with pytest.raises(CallerError, match="cannot read the inspector's memory"):
        load_memory(path)
    path.write_text("{")
    with pytest.raises(CallerError, match="cannot read"):
        load_memory(path)
