"""A run whose files were put back goes on by the steps that its chips heard of, also where they have let go of them."""

from __future__ import annotations

import shutil
from datetime import UTC, datetime

import pytest

from firmware_sim import BIRTH, parse_log
from firmware_sim.errors import CallerError
from firmware_sim.evidence import NEWBORN, seal_acceptance
from inspector.inspection.inspection import verify
from inspector.inspection.trust import Trust
from inspector.inspection.verdict import Outcome
from monitor import Recorder
from monitor.lab.pruning import prune_powered
from monitor.lab.simulated_lab import SimulatedLab, lab_path
from tests.measurements.crashes import Loop

BACK, HEARD = 2, 4


class Killed(BaseException):
    """Stands for the end of the process."""


def accepted(lab, chip):
    """What an inspection of the run, as far as the chip has heard of it, would sign."""
    chip.challenge(lab.config.nonce, lab.config.verifier)
    records = parse_log(chip.log_bytes())
    key = SimulatedLab.inspectorate_key(lab.config)
    return seal_acceptance(chip.chip_id, BIRTH.extend(records), NEWBORN.extend(records), key)


@pytest.fixture
def put_back(tmp_path):
    """A run of two steps whose chip has heard of four, which were accepted, and has let go of all of them."""
    run, loop = tmp_path / "run", Loop()
    recorder = Recorder(loop.model, loop.optimizer, out=run, chips=1, stateful=loop.stateful)

    def tell(step):
        if step == BACK:
            for folder in (run, lab_path(run)):
                shutil.copytree(folder, tmp_path / "back" / folder.name)
        if step == HEARD:
            [chip] = recorder._run.lab.chips
            prune_powered(lab_path(run), chip, accepted(recorder._run.lab, chip))
            recorder._run.lab.cut_power()
            raise Killed

    with pytest.raises(Killed):
        loop.train(recorder, tell)
    for name in ("chips", "checkpoints"):
        folder = tmp_path / "back" / lab_path(run).name / name
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(lab_path(run) / name, folder)
    shutil.copy(tmp_path / "run.trust.json", tmp_path / "back")
    return tmp_path / "back" / run.name


def test_the_same_steps_are_taken(put_back):
    loop = Loop()
    recorder = Recorder.resume(loop.model, loop.optimizer, out=put_back, stateful=loop.stateful)
    assert recorder.steps == BACK
    loop.train(recorder)
    trust = Trust.load([put_back.with_name("run.trust.json")], [put_back])
    verdict = verify(put_back, trust, now=datetime.now(UTC))
    assert verdict.outcome is Outcome.ACCEPT, verdict.reasons


def test_other_steps_than_those_that_were_accepted_are_not(put_back):
    loop = Loop()
    recorder = Recorder.resume(loop.model, loop.optimizer, out=put_back, stateful=loop.stateful)
    loop.source.next()  # another batch than the chip's step 3
    with pytest.raises(CallerError, match=f"step {HEARD} is not the one that the chips heard of before the crash"):
        loop.train(recorder)
    recorder._run.lab.cut_power()
