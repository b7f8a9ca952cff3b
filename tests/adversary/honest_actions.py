"""What an honest lab, and others beside it, do within the documentation."""

from __future__ import annotations

from fractions import Fraction

import torch

from inspector.inspection.trust import Trust
from monitor import Recorder
from monitor.lab.simulated_lab import SimulatedLab, lab_path
from monitor.transcript.layout import CHIP_FILES, chip_path
from tests.adversary.actions import action
from tests.adversary.evidence import Evidence
from tests.adversary.world import STARTED, World


@action("finished", honest=True)
def rival(world: World, pick: int) -> None:
    """Another lab lists one of this lab's chips in a run of its own and stores junk under its name."""
    if world.strangers or not world.chips or world.trust is None:
        return
    rng = world.random(pick)
    out = world.folder / "rival"
    torch.manual_seed(pick)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorder = Recorder(
        model, optimizer, out=out, seed=world.scene.seed + 1, chips=2, lab="rival", started=STARTED,
        snapshot_rate=Fraction(*world.scene.rate), hours=1.0,
    )  # fmt: skip
    batch = torch.ones(1, 2)
    with recorder.step(batch):
        optimizer.zero_grad()
        model(batch).sum().backward()
        optimizer.step()
    recorder.finish()
    files = Evidence(out, SimulatedLab.lab_key(SimulatedLab.read_config(lab_path(out))))
    mine = rng.choice(world.chips).chip_id
    old = files.metadata()["chips"][1]
    if rng.random() < 0.8:
        for name in CHIP_FILES:
            content = rng.choice([b"junk", b"", world.evidence().read(chip_path(mine, name))])
            files.drop(chip_path(old, name))
            files.write(chip_path(mine, name), content)
    files.change_metadata(lambda data: data.update(chips=[data["chips"][0], mine]))
    trust = Trust.load([out.with_name(out.name + ".trust.json")], [out]).to_json()
    challenge = {"verifier": world.trust.verifier, "nonce": world.trust.nonce.hex()}
    world.stranger_trust.append(Trust.from_json({**trust, **challenge}, "the rival's"))
    world.strangers.append(out)
