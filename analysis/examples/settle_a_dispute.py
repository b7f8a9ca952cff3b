"""Two labs ran the same training and disagree about the result; a referee finds who is wrong from one operator.

Shows: the refereed delegation of Arun et al. 2025 (Verde, section 3). Each lab is a ``Prover`` that answers questions
about its run. The referee bisects the steps, then the operators of the first disputed step, and executes one of them.
"""

from __future__ import annotations

import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

from chipwitness import (
    Disputant,
    LabConfig,
    LabProver,
    SimulatedLab,
    Task,
    Trust,
    Verdict,
    open_run,
    settle,
    train,
)

STEPS, WRONG = 6, 4


def disputant(run: Path, *, lie: str | None = None) -> Disputant:
    """Train the task in a new lab; a finished run, and somebody who answers for it."""
    task = Task.for_preset("digits-cnn", seed=7, steps=STEPS, checkpoint_every=3, shards=2, batch_size=8)
    config = LabConfig(
        lab=run.name, seed=7, chips=2, lie=lie, lie_step=WRONG, started=datetime.now(UTC), duration=timedelta(hours=1)
    )
    train(task, run, config, device="native")
    trust = Trust.from_json(SimulatedLab.reference_values(config), "the simulated world")
    return Disputant(run=open_run(run, trust), prover=LabProver(run))


def main(folder: Path) -> Verdict:
    """Let the labs meet before the referee; returns its verdict."""
    verdict = settle(disputant(folder / "right"), disputant(folder / "wrong", lie="wrong-operator"))
    found = verdict.evidence
    print(f"{verdict.outcome.value}: {verdict.reasons[0].text}")
    print(f"{found['guilty']} is wrong in step {found['step']}, at {found['operator']}")
    print(f"{found['rounds']} rounds, {found['bytes']} bytes, {found['operators_executed']} operator executed")
    return verdict


if __name__ == "__main__":
    main(Path(sys.argv[1]))
