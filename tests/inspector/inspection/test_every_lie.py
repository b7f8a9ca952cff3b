"""Every lie of a lab, told by loops that nobody here made a preset of: caught, and accepted with its guards off."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional

from firmware_sim.lies import Scenery
from inspector.inspection.guards import Guard, Settings
from inspector.inspection.inspection import inspect, verify
from inspector.inspection.trust import Trust
from inspector.inspection.verdict import Outcome
from monitor.lab.lies import LAB_LIES, every_lie
from tests.guards import blind
from tests.handing import hand_over

SETTINGS = Settings(samples=3, seed="x", devices=("sse41",))
STEPS = 4


class Attention(nn.Module):
    """A block of a transformer over one embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.norm = nn.LayerNorm(8)
        self.mix = nn.Linear(8, 24)
        self.head = nn.Linear(8, 11)

    def forward(self, tokens):
        x = self.embedding(tokens)
        query, key, value = self.mix(self.norm(x)).chunk(3, -1)
        weights = (query @ key.transpose(-2, -1) * 8**-0.5).softmax(-1)
        return self.head(x + weights @ value)


class StateSpace(nn.Module):
    """A linear recurrence with a gate, written out step by step."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.decay = nn.Parameter(torch.full((6,), 0.5))
        self.gate = nn.Linear(6, 6)
        self.head = nn.Linear(6, 11)

    def forward(self, tokens):
        state, outputs = torch.zeros(len(tokens), 6), []
        for x in self.embedding(tokens).unbind(1):
            state = state * torch.sigmoid(self.decay) + x * torch.sigmoid(self.gate(x))
            outputs.append(self.head(torch.tanh(state)))
        return torch.stack(outputs, 1)


def convolutional():
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 5)
    )


def images(step):
    generator = torch.Generator().manual_seed(step)
    return {
        "pixels": torch.rand(4, 1, 6, 6, generator=generator),
        "label": torch.randint(5, (4,), generator=generator),
    }


def texts(step):
    return {"tokens": torch.randint(11, (3, 4), generator=torch.Generator().manual_seed(step))}


def image_body(model, optimizer, batch):
    optimizer.zero_grad()
    functional.cross_entropy(model(batch["pixels"]), batch["label"]).backward()
    optimizer.step()


def text_body(model, optimizer, batch):
    optimizer.zero_grad()
    logits = model(batch["tokens"][:, :-1])
    functional.cross_entropy(logits.flatten(0, 1), batch["tokens"][:, 1:].flatten()).backward()
    optimizer.step()


LOOPS = {
    "transformer": (Attention, texts, text_body, lambda p: torch.optim.AdamW(p, lr=0.01)),
    "convolutional": (convolutional, images, image_body, lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9)),
    "state-space": (StateSpace, texts, text_body, lambda p: torch.optim.Adam(p, lr=0.01)),
}

FOUND = {name: lie for name, lie in LAB_LIES.items() if lie.found_by and lie.scenery in (Scenery.RUN, Scenery.TWO_RUNS)}


@pytest.fixture(params=list(LOOPS))
def tell(request, record_loop):
    """Record one of the loops with a lie."""
    kind, batches, body, optimize = LOOPS[request.param]

    def record(**options):
        torch.manual_seed(3)
        model = kind()
        given = [batches(step) for step in range(1, STEPS + 1)]
        defaults = {"checkpoint_every": 2, "snapshot_rate": Fraction(1)}
        return record_loop(model, optimize(model.parameters()), given, body, **{**defaults, **options})

    return record


@pytest.fixture
def look(devices):
    def inspect_run(recorded, off=frozenset(), **changes):
        settings = replace(SETTINGS, **changes)
        runs, trust = [recorded.run], recorded.trust
        earlier = recorded.run.with_name("earlier")
        if earlier.exists():
            runs.append(earlier)
            trust = trust.merge(Trust.load([earlier.with_name("earlier.trust.json")]))
        with blind(*off):
            return inspect(runs, trust, settings, now=recorded.now, worker=devices.run)

    return inspect_run


def test_guards_that_find_a_lie_exist():
    guards = {guard.value for guard in Guard}
    assert all(lie.found_by <= guards for lie in every_lie().values())


@pytest.mark.sampled("lie")
@pytest.mark.parametrize("lie", FOUND)
def test_lie_of_a_loop_is_rejected_and_passes_with_its_guards_off(tell, look, lie):
    options = {"lie": lie, "lie_step": 3, **FOUND[lie].options}
    if FOUND[lie].scenery is Scenery.TWO_RUNS:
        options |= {"after": tell(name="earlier").run, "seed": 6}
    recorded = tell(**options)
    samples = len(recorded.trust.chips_of("lab"))
    guards = {Guard(name) for name in FOUND[lie].found_by}
    verdict = look(recorded, samples=samples)
    assert verdict.outcome is Outcome.REJECT, verdict.reasons
    assert {each.guard for each in verdict.reasons} & FOUND[lie].found_by, verdict.reasons
    blinded = look(recorded, off=frozenset(guards), samples=samples)
    assert blinded.outcome is Outcome.ACCEPT, blinded.reasons


def test_steps_where_no_chip_meters_them_are_not_seen(tell, look):
    """The verdict says so: no evidence of chips covers what does not run on them."""
    verdict = look(tell(lie="elsewhere-steps", lie_step=2))
    assert verdict.outcome is Outcome.ACCEPT
    assert "unmetered work" in verdict.reasons[-1].text


def test_truncated_transcript_of_a_loop_is_rejected_after_its_end(tell):
    recorded = tell(lie="truncated-transcript", lie_step=3)
    look = partial(verify, recorded.run, recorded.trust)
    assert look(now=recorded.now).outcome is Outcome.INCONCLUSIVE
    assert look(now=recorded.late).outcome is Outcome.REJECT


def test_trust_in_a_loop_is_rejected(tell, look):
    recorded = tell(lie="self-made-trust")
    assert ", unread: 'trust.json'" in look(recorded).reasons[0].text
    hand_over(recorded.run)
    verdict = look(recorded)
    assert verdict.outcome is Outcome.REJECT
    assert "'trust.json' is not listed" in verdict.reasons[0].text
