"""A party of a world in a process of its own, told by lines what to do: party.py cluster WORLD | lab WORLD RUN STEPS.

It answers each line by one line. A lab trains; while it hands over or answers, the process that trains looks at what it
is asked, as it does between any two steps.
"""

from __future__ import annotations

import sys
import threading
from datetime import UTC, datetime, timedelta
from fractions import Fraction
from pathlib import Path

from inspector.replay.pool import DevicePool
from inspector.rounds import steps
from inspector.rounds.world import World
from monitor.lab.rounds import LabSide

STARTED = datetime(2026, 1, 1, tzinfo=UTC)


def cluster(world: World) -> None:
    """``replay NOW``: replays what was ordered; ends with the input."""
    with DevicePool() as devices:
        for line in sys.stdin:
            print(steps.replay(world, now=datetime.fromisoformat(line.split()[1]), worker=devices.run), flush=True)


def lab(world: World, run: Path, count: int) -> None:
    """``train N``: takes so many steps; ``join``; ``hand``, ``answer`` and ``open NOW``; ``wait FILE``; ``finish``."""
    from inspector.inspection.trust import Trust
    from monitor.lab.simulated_lab import LabConfig
    from monitor.presets.task import Task
    from monitor.presets.training import take_step
    from monitor.recording.recipes import begin

    task = Task.for_preset("tiny-gpt", seed=5, steps=count, checkpoint_every=2, shards=2, batch_size=2)
    config = LabConfig(
        lab="lab", seed=5, chips=2, snapshot_rate=Fraction(1), started=STARTED, duration=timedelta(hours=1)
    )
    begun = begin(task, run, config, device="native")

    def act(words: list[str]) -> None:
        if words[0] == "join":
            world.join(Trust.load([run.with_name(f"{run.name}.trust.json")], [run]), {"run": run})
        elif words[0] == "hand":
            steps.hand(world, "lab", now=datetime.fromisoformat(words[1]))
        else:
            step = steps.answer if words[0] == "answer" else steps.disclose
            step(world, "lab", now=datetime.fromisoformat(words[1]))

    for line in sys.stdin:
        words = line.split()
        if words[0] == "wait":
            while not Path(words[1]).exists():
                begun.recorder.answer()
        elif words[0] == "finish":
            begun.recorder.finish()
        elif words[0] == "train":
            for number in range(begun.recorder.steps + 1, begun.recorder.steps + int(words[1]) + 1):
                batch = begun.data.batch(number)
                with begun.recorder.step(batch) as step:
                    step.commit(
                        loss=take_step(task, begun.model, begun.optimizer, batch, task.learning_rate_at(number))
                    )
        else:
            other = threading.Thread(target=act, args=(words,))
            other.start()
            while other.is_alive():
                if begun.recorder.steps < count or words[0] == "join":
                    begun.recorder.answer()
                other.join(0.02)
        print(begun.recorder.steps, flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "cluster":
        cluster(World(Path(sys.argv[2]), LabSide))
    else:
        lab(World(Path(sys.argv[2]), LabSide), Path(sys.argv[3]), int(sys.argv[4]))
