"""What a chip's meter may count between its records: the laws on logs of one chip that are made here."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from firmware_sim import NO_RUN, NO_WORK, EvidenceError, LogRecord, RecordKind, Unaudited, Work
from monitor.replay.ledger import Ledger, Needs

RUN, OTHER = b"r" * 32, b"o" * 32
STEP, LAST = Work(10, 1000, 4000), Work(12, 1100, 4400)
K = RecordKind
SHARES = st.integers(1, 1 << 40).flatmap(lambda whole: st.tuples(st.integers(1, whole), st.just(whole)))


class Chip:
    """Writes the records of one chip that holds a share of a state."""

    def __init__(self, share=(1, 3)):
        self.share, self.records = share, []
        self.before = self.done = NO_WORK

    @property
    def work(self):
        return self.before + self.done.share(*self.share)

    def say(self, kind, step=0, run=NO_RUN):
        if kind is K.BOOT:
            self.before = self.done = NO_WORK
        number = len(self.records)
        self.records.append(
            LogRecord(
                counter=number, kind=kind, boot=1, tick=0, busy=0, run_id=run, step=step, op=0, digest=bytes(32),
                previous=bytes(32), work=self.work,
            )
        )  # fmt: skip
        if kind is K.REGIONS:
            self.before, self.done = self.work, NO_WORK

    def run(self, work):
        self.done += work

    def take(self, first, last, run=RUN):
        """Attach the state of a step, commit it, and take the steps up to another one."""
        self.say(K.REGIONS, first, run)
        self.say(K.COMMIT, first, run)
        for step in range(first + 1, last + 1):
            self.run(needed(step))
            self.say(K.COMMIT, step, run)
            self.say(K.SNAPSHOT, step, run)

    def findings(self, allowed=NO_WORK):
        needs = Needs(share=self.share, program=needed, most=LAST, made=lambda step: 0, allowed=lambda step: allowed)
        self.ledger = law = Ledger("c", {RUN: needs})
        found = []
        for record in self.records:
            try:
                law.take(record)
            except EvidenceError as error:
                found.append((record.kind, type(error), str(error)))
        law.close()
        return found


def needed(step):
    return LAST if step == 4 else STEP


@pytest.fixture
def chip():
    made = Chip()
    made.say(K.BOOT)
    made.say(K.EPOCH)
    return made


@given(SHARES, st.integers(0, 6), st.integers(0, 6))
def test_honest_chips_count_what_steps_need_also_after_a_crash(share, reached, again):
    chip = Chip(share)
    chip.say(K.BOOT)
    chip.take(0, reached)
    chip.run(Work(3, 200, 900))  # of a step in which the power goes
    chip.say(K.POWER_GAP)
    chip.say(K.BOOT)
    chip.take(min(again, reached), 7)
    for kind in (K.CLOSE_EPOCH, K.QUOTE, K.POWER_OFF):
        chip.say(kind)
    assert chip.findings() == []


def test_hidden_work_shows_at_the_next_record_and_once(chip):
    chip.take(0, 2)
    chip.run(STEP)
    chip.say(K.CLOSE_EPOCH)
    chip.say(K.QUOTE)
    [(kind, _, text)] = chip.findings()
    assert kind is K.CLOSE_EPOCH
    assert "the committed steps need 6 calls, 666 FLOP, 2666 bytes; the meter counts another " in text
    assert text.endswith("1334 bytes")


@pytest.mark.parametrize(("kind", "allowed", "count"), [(K.QUOTE, STEP, 0), (K.COMMIT, STEP, 1), (K.QUOTE, NO_WORK, 1)])
def test_work_beside_the_programs_is_open_until_the_next_commit_tells_of_it(chip, kind, allowed, count):
    chip.take(0, 2)
    chip.run(STEP)
    if kind is K.COMMIT:
        chip.run(STEP)
    chip.say(kind, 3, RUN)
    assert len(chip.findings(allowed)) == count


@pytest.mark.parametrize("when", [K.SNAPSHOT, K.COMMIT])
def test_work_that_was_not_done_shows(chip, when):
    chip.take(0, 2)
    chip.say(when, 3, RUN)
    found = chip.findings()
    assert bool(found) == (when is K.COMMIT)
    assert all("the meter lacks 4 calls, 334 FLOP, 1334 bytes" in text for _, _, text in found)


def test_a_chip_cannot_be_restarted_to_skip_a_step(chip):
    """What it attaches must be step 0 or a state that it has heard of: a new one takes the work of a step."""
    chip.take(0, 2)
    chip.say(K.POWER_OFF)
    chip.say(K.BOOT)
    chip.take(3, 3)
    [(kind, _, text)] = chip.findings()
    assert kind is K.COMMIT
    assert "the meter lacks" in text


def test_work_before_memory_or_for_an_undeclared_run_is_explained_by_nothing(chip):
    chip.take(0, 1)
    chip.take(0, 1, run=OTHER)
    chip.say(K.QUOTE)
    assert [kind for kind, _, _ in chip.findings()] == [K.COMMIT]
    early = Chip()
    early.say(K.BOOT)
    early.run(STEP)
    early.take(0, 1)
    assert [kind for kind, _, _ in early.findings()] == [K.REGIONS]


@pytest.mark.parametrize(("extra", "count"), [(LAST, 0), (LAST + Work(3, 0, 0), 1)])
def test_a_power_cut_hides_no_more_than_a_step(chip, extra, count):
    """Whoever's power went in a longer step than any is not accused; what ran then is not known."""
    chip.take(0, 2)
    chip.run(extra)
    chip.say(K.POWER_GAP)
    chip.say(K.BOOT)
    chip.take(2, 3)
    assert [(kind, error) for kind, error, _ in chip.findings()] == [(K.POWER_GAP, Unaudited)] * count


def test_memory_that_is_attached_again_hides_nothing(chip):
    chip.take(0, 2)
    chip.run(STEP)
    chip.take(2, 3)
    [(kind, _, text)] = chip.findings()
    assert kind is K.REGIONS
    assert "the meter counts another" in text
