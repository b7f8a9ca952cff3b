"""A simulated lab's configuration: what it checks, what it keeps, and who goes on with its chips."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from fractions import Fraction

import pytest

from firmware_sim import Roofline
from firmware_sim.errors import CallerError
from firmware_sim.evidence import SigningKey
from monitor.lab.simulated_lab import LabConfig, SimulatedLab, chip_ids, lab_path

STARTED = datetime(2026, 1, 1, tzinfo=UTC)
KEY = SigningKey.generate(bytes(32)).verifying


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"chips": 0}, "1 … 4096 chips"),
        ({"chips": 4000, "idle_chips": 97}, "1 … 4096 chips"),
        ({"lab": "Lab"}, "small letters"),
        ({"keep_snapshots": True}, "can keep 0"),
        ({"beacon_every": -1}, "beacons come every N steps"),
        ({"beacon_every": 1, "inspectorate": KEY}, "accept time beacons of another"),
        ({"seed": 1 << 63}, "seed"),
        ({"lie": "clone-identity", "chips": 1}, "another chip"),
    ],
)
def test_what_no_lab_has_is_refused(wrong, message):
    with pytest.raises(CallerError, match=message):
        LabConfig(**wrong)


@pytest.mark.parametrize(
    "told",
    [{}, {"lie": "clone-identity"}, {"inspectorate": KEY, "keep_snapshots": 2}, {"snapshot_rate": Fraction(1, 3)}],
)
def test_a_lab_reads_what_it_wrote(told):
    config = LabConfig(seed=7, started=STARTED, duration=timedelta(hours=3), **told)
    assert LabConfig.decode(config.encoded()) == config
    assert (config.begin, config.end) == ("2026-01-01T00:00:00Z", "2026-01-01T03:00:00Z")


def test_the_seed_decides_all_secrets_and_a_change_keeps_them():
    one, other = LabConfig(seed=1, started=STARTED), LabConfig(seed=2, started=STARTED)
    assert len({one.secret, other.secret, one.challenge, other.challenge}) == 4
    changed = replace(one, chips=2)
    assert (changed.secret, changed.challenge) == (one.secret, one.challenge)


def test_a_next_run_has_the_chips_and_a_number_of_its_own(tmp_path):
    run = tmp_path / "run"
    first = LabConfig(chips=2, lie="extra-steps", lie_step=2, started=STARTED)
    SimulatedLab.create(lab_path(run), first, [Roofline(flop=1, moved=1)] * 2).power_off()
    later = STARTED + timedelta(days=1)
    second = LabConfig.following(run, started=later, lab="buyer")
    assert (second.number, second.lie, second.lie_step, second.made_for) == (1, None, 1, "lab-1")
    assert (second.silicon, second.started) == (str(lab_path(run) / "chips"), later)
    assert chip_ids(second) == chip_ids(first)
    with pytest.raises(CallerError, match="no lab folder"):
        LabConfig.following(tmp_path / "none", started=later)


@pytest.mark.parametrize("content", [b"{}", b"[]", b"no JSON", b'{"started": 1}'])
def test_a_file_of_another_form_is_one_error(tmp_path, content):
    (tmp_path / "lab.json").write_bytes(content)
    with pytest.raises(CallerError, match="cannot read"):
        SimulatedLab.read_config(tmp_path)
