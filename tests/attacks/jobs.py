"""Small runs of several labs, judged together by rules."""

from __future__ import annotations

from fractions import Fraction
from functools import reduce
from types import SimpleNamespace

import torch
from torch import Tensor, nn

from inspector.inspection.casefile import CaseFile
from inspector.inspection.guards import Settings
from inspector.inspection.inspection import inspect
from inspector.inspection.trust import Trust
from inspector.rules.judgement import apply_rules
from inspector.rules.quantities import Basis
from inspector.rules.rule_files import read_rules
from monitor import Recorder, initialised
from monitor.lab.simulated_lab import SimulatedLab, lab_path
from monitor.transcript import RunFolder
from tests.conftest import NOW, STARTED

__all__ = ["BATCH", "Labs", "basis", "built", "stub", "supplied"]

BATCH = torch.linspace(-1, 1, 64 * 16).view(64, 16)


def basis(transcripts, lineages=(), unseen=None):
    """What an inspection found, as far as runs and their lineages say it."""
    return Basis(transcripts=transcripts, lineages=lineages, replays=(), reports=(), owners={}, unseen=unseen or {})


def built(seed=1):
    """A model that a public program makes of a public seed."""
    return initialised(lambda: nn.Linear(16, 16), seed=seed)


def supplied(state=None):
    """A model of which nobody knows where it comes from."""
    model = nn.Linear(16, 16)
    with torch.no_grad():
        for number, each in enumerate(model.parameters()):
            each.copy_(torch.linspace(-1, 1, each.numel()).view(each.shape) + number)
    if state is not None:
        model.load_state_dict(state)
    return model


class Labs:
    """Records runs, each lab's one after another on one chip, and judges some of them together.

    Attributes:
        models: what each run ended with, by its name.
    """

    def __init__(self, folder, devices):
        self.folder, self._devices, self._last = folder, devices, {}
        self.models = {}

    def begin(self, name, lab, model, *, optimizer=torch.optim.SGD, parent=None, **options):
        optimizer = optimizer(model.parameters(), lr=0.01)
        options = {"checkpoint_every": 2, "snapshot_rate": Fraction(1, 2), "chips": 1, "seed": 5, **options}
        parent = None if parent is None else self.folder / parent
        options |= {"parent": parent, "after": self._last.get(lab), "lab": lab}
        self._last[lab] = self.folder / name
        return Recorder(model, optimizer, out=self._last[lab], started=STARTED, hours=1.0, **options), optimizer

    def resume(self, name, model, *, optimizer=torch.optim.SGD):
        optimizer = optimizer(model.parameters(), lr=0.01)
        return Recorder.resume(model, optimizer, out=self.folder / name), optimizer

    @staticmethod
    def step(recorder, model, optimizer, loss=Tensor.square):
        with recorder.step(BATCH):
            optimizer.zero_grad()
            loss(model(BATCH)).mean().backward()
            optimizer.step()

    def record(self, name, lab, model, *, steps=4, between=None, loss=Tensor.square, **options):
        """``between(recorder, model)`` runs after each step."""
        recorder, optimizer = self.begin(name, lab, model, **options)
        for _ in range(steps):
            self.step(recorder, model, optimizer, loss)
            if between is not None:
                between(recorder, model)
        recorder.finish()
        self.models[name] = {key: each.clone() for key, each in model.state_dict().items()}
        return name

    def flop(self, *names):
        total = 0
        for folder in (self.folder / name for name in names):
            run = RunFolder(folder, SimulatedLab.lab_key(SimulatedLab.read_config(lab_path(folder))).verifying)
            total += sum(leaf.flop for leaf in run.load_steps()[0])
        return total

    def trust(self, *names):
        runs = [self.folder / name for name in names]
        return reduce(Trust.merge, [Trust.load([run.with_name(f"{run.name}.trust.json")], [run]) for run in runs])

    def inspected(self, *names):
        """The verdict on these runs, and what rules need beside it."""
        trust, case = self.trust(*names), CaseFile()
        settings = Settings(samples=len(trust.chips), seed="x", devices=("sse41",))
        runs = [self.folder / name for name in names]
        verdict = inspect(runs, trust, settings, now=NOW, worker=self._devices.run, case=case)
        return verdict, case, trust, settings

    def judge(self, inspected, rules):
        """The verdict under rules, which are TOML or a file's path."""
        verdict, case, trust, settings = inspected
        path = rules
        if isinstance(rules, str):
            path = self.folder / "rules.toml"
            path.write_text(rules)
        return apply_rules(verdict, read_rules(path), case, trust, settings, worker=self._devices.run)


def stub(run, lab, flops, models=None):
    """A run as rules on compute see it."""
    leaf = SimpleNamespace(flop=flops, trains=True)
    return SimpleNamespace(
        run=SimpleNamespace(
            name=run,
            manifest=SimpleNamespace(run=run),
            metadata=SimpleNamespace(lab=lab, chips=()),
            declared=SimpleNamespace(recipe=None, layout=None),
        ),
        leaves=[leaf],
        execution=SimpleNamespace(outside=SimpleNamespace(flop=0), most_flop=flops),
        models=models or {},
        data=None,
    )
