"""A lab stores what its chips snapshotted, and opens drawn ones: what differs from a replay is named to the element."""

from __future__ import annotations

import json
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import nn

from analysis.cli import main
from firmware_sim.errors import CallerError, EvidenceError
from firmware_sim.evidence.blocks import BlockSlice
from inspector.inspection.guards import Settings
from inspector.inspection.inspection import inspect
from inspector.inspection.shards import Difference, first_difference
from inspector.inspection.sources import Sources
from inspector.inspection.verdict import Outcome
from monitor import Recorder
from monitor.lab.host import StoredShards
from monitor.lab.simulated_lab import lab_path
from tests.guards import off

STEPS, CHIPS, KEPT = 5, 2, 3
SETTINGS = Settings(samples=CHIPS, seed="x", devices=("sse41",))


@pytest.fixture
def stored(record_loop):
    """Records a loop whose lab keeps the newest snapshots."""

    def call(**options):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))

        def body(model, optimizer, batch):
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()

        fixed = {"chips": CHIPS, "snapshot_rate": Fraction(1), "keep_snapshots": KEPT, "checkpoint_every": 2}
        batches = [torch.randn(5, 4) for _ in range(STEPS)]
        return record_loop(model, torch.optim.AdamW(model.parameters(), 0.1), batches, body, **{**fixed, **options})

    return call


@pytest.fixture
def judge(devices):
    def call(recorded):
        sources = Sources(open_shard=StoredShards([lab_path(recorded.run)]).open)
        return inspect([recorded.run], recorded.trust, SETTINGS, now=recorded.now, worker=devices.run, sources=sources)

    return call


def test_a_lab_keeps_the_newest_snapshots_and_opens_what_the_chips_hashed(stored, judge):
    recorded = stored()
    verdict = judge(recorded)
    assert verdict.outcome is Outcome.ACCEPT, verdict.reasons
    taken = sum(len(chip["snapshots"]) for chip in verdict.evidence["chips"])
    opened = {"opened": CHIPS * KEPT, "not_kept": taken - CHIPS * KEPT, "differences": []}
    assert verdict.evidence["shards"] == opened
    assert (
        f"{CHIPS * KEPT} of the chips' snapshots were opened, and match what the chips hashed"
        in verdict.reasons[0].text
    )
    kept = sorted(lab_path(recorded.run).glob("shards/*/*.bin"))
    assert len(kept) == CHIPS * KEPT
    with pytest.raises(EvidenceError, match="does not show the shard of record 1"):
        StoredShards([lab_path(recorded.run)]).open("lab-chip-0000", 1, 1 << 20)
    with pytest.raises(EvidenceError, match="has more than"):
        StoredShards([lab_path(recorded.run)]).open(kept[0].parent.name, int(kept[0].stem), 8)


def test_of_a_snapshot_that_is_another_state_the_first_element_is_named(stored, judge):
    """One chip shows zeros while it takes its snapshots, and the lab has stored them."""
    verdict = judge(stored(lie="swap-weights", lie_step=2, keep_snapshots=STEPS + 1))
    assert verdict.outcome is Outcome.REJECT
    differences = verdict.evidence["shards"]["differences"]
    assert len({each["chip"] for each in differences}) == 1
    for each in differences:
        assert each["held"] == "0.0"
        assert float(each["replayed"])
    [text] = [each.text for each in verdict.reasons if each.where.get("record") == differences[0]["record"]][1:]
    assert f"of {differences[0]['tensor']!r} is the first that differs: the chip held '0.0'" in text


def test_a_lab_that_opens_other_bytes_is_rejected(stored, judge):
    recorded = stored()
    path = sorted(lab_path(recorded.run).glob("shards/*/*.bin"))[0]
    content = path.read_bytes()
    for other, what in (
        (content[:-1] + bytes([content[-1] ^ 1]), "is not the one that the chip hashed"),
        (content[1:], "a different number"),
    ):
        path.write_bytes(other)
        verdict = judge(recorded)
        assert verdict.outcome is Outcome.REJECT
        assert what in verdict.reasons[0].text
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with off("opened shards"):
        assert judge(recorded).outcome is Outcome.ACCEPT


def test_the_first_element_of_the_first_block_and_nothing_unknown():
    values = np.arange(6, dtype=np.float32)
    other = values.copy()
    other[4] = -1.5
    one, two = (BlockSlice("weight", "w", "float32", (6,), 0, 0, each.view(np.uint8)) for each in (values, other))
    found = Difference("weight/w", 4, "4.0", "-1.5")
    assert first_difference([one], [two], frozenset()) == found
    assert first_difference([one], [one], frozenset()) is None
    assert first_difference([one], [two], frozenset({"weight/w"})) is None


def test_keeping_is_bounded(tmp_path):
    model = nn.Linear(2, 2)
    with pytest.raises(CallerError, match="a lab can keep 0 …"):
        Recorder(model, torch.optim.SGD(model.parameters(), 0.1), out=tmp_path / "run", keep_snapshots=-1)


def test_the_command_opens_them(stored, kept_devices, capsys):
    run = str(stored().run)
    look = ["inspect", run, "--trust", f"{run}.trust.json", "--samples", "2", "--seed", "x", "--device", "sse41"]
    main([*look, "--shards", f"{run}.lab", "--json"])
    assert json.loads(capsys.readouterr().out)["evidence"]["shards"]["opened"] == CHIPS * KEPT
