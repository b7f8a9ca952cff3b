"""A chip's log by itself: accepted if whole, quoted and of a chip that is listed; every law of it named if broken."""

from __future__ import annotations

from firmware_sim.errors import EvidenceError
from inspector.inspection.answers import EvidenceSource
from inspector.inspection.chip_log import verify_log
from inspector.inspection.verdict import Outcome
from tests.guards import off


def _verify(recorded, chip, **files):
    folder = recorded.run / "chips" / chip

    def read(name):
        if name not in files and not (folder / name).exists():
            raise EvidenceError(f"there is no {name}")
        return files.get(name) or (folder / name).read_bytes()

    return verify_log(chip, EvidenceSource(name="run", read=read), recorded.trust)


def test_an_honest_log_is_accepted_and_summed_up(honest):
    for chip in honest.trust.chips:
        verdict = _verify(honest, chip)
        assert verdict.outcome is Outcome.ACCEPT
        assert (
            f"the log of chip {chip} with {sum(verdict.evidence['records'].values())} records"
            in verdict.reasons[0].text
        )
        assert "whether declared runs explain the log" in verdict.reasons[1].text


def test_a_chip_that_nobody_listed_is_rejected(make_run):
    recorded = make_run(lie="undeclared-chips")
    verdict = _verify(recorded, "lab-chip-0002")
    assert verdict.outcome is Outcome.REJECT
    assert "chip lab-chip-0002 is not listed in the trust file" in verdict.reasons[0].text
    with off("listed chip"):
        assert _verify(recorded, "lab-chip-0002").outcome is Outcome.ACCEPT


def test_every_lie_of_a_chip_that_its_log_shows_is_found(make_run):
    found = {}
    for lie in ("skip-snapshots", "edit-record", "truncate-log", "own-maker-ca"):
        verdict = _verify(make_run(lie, lie=lie), "lab-chip-0000")
        assert verdict.outcome is Outcome.REJECT, lie
        found[lie] = {reason.guard for reason in verdict.reasons}
    assert "schedule" in found["skip-snapshots"]
    assert "identity" in found["own-maker-ca"]


def test_all_that_is_wrong_is_listed_at_once(honest):
    log = (honest.run / "chips" / "lab-chip-0000" / "log.bin").read_bytes()
    verdict = _verify(honest, "lab-chip-0001", **{"log.bin": log})
    assert verdict.outcome is Outcome.REJECT
    assert len(verdict.reasons) >= 3
