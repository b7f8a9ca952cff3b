"""W_0 as a program and a seed: computed again on other devices, and what a lab may not claim of it."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional

from firmware_sim.errors import CallerError
from inspector.inspection.execution import MOST_TEXT, brings
from inspector.inspection.guards import Guard, Settings
from inspector.inspection.inspection import inspect, verify
from inspector.inspection.verdict import Outcome
from monitor import RunFolder, initialised
from monitor.declaration.origin import Initialisation
from monitor.recording import model_initialisation
from monitor.recording.recorder import Recorder
from monitor.recording.recording import Recording
from monitor.replay.initialisation import initialised_memory
from tests.agreements import agreement, resigned
from tests.guards import blind, off

CAP = 10**12
SETTINGS = Settings(samples=3, seed="x", devices=("sse41", "mkl-compatible"))


class Transformer(nn.Module):
    """A decoder as it stands in many scripts, with the initialisations that such scripts use."""

    places: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 16, padding_idx=0)
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 11)
        self.scale = nn.Parameter(torch.randn(16) / 4 + 1)
        self.register_buffer("mask", torch.triu(torch.full((6, 6), float("-inf")), diagonal=1))
        self.register_buffer("places", 1 / 10000 ** (torch.arange(0, 16, 2).float() / 16), persistent=False)
        for parameter in self.blocks.parameters():
            if parameter.dim() > 1:
                nn.init.xavier_normal_(parameter)
        nn.init.trunc_normal_(self.head.weight, std=0.02)
        nn.init.constant_(self.head.bias, 0.25)

    def forward(self, x):
        angles = torch.arange(6)[:, None].float() * self.places
        place = torch.cat([angles.sin(), angles.cos()], dim=1)
        return self.head(self.scale * self.blocks(self.embedding(x) + place, mask=self.mask))


class Pictures(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.ReLU(), nn.Flatten()
        )
        self.head = nn.Linear(64, 5)
        nn.init.kaiming_normal_(self.net.get_parameter("0.weight"), nonlinearity="relu")
        nn.init.zeros_(self.head.bias)

    def forward(self, x):
        return self.head(self.net(x))


def body(model, optimizer, batch) -> None:
    optimizer.zero_grad()
    functional.cross_entropy(model(batch["x"]).flatten(0, -2), batch["y"].flatten()).backward()
    optimizer.step()


def batches(kind, steps: int = 4):
    generator = torch.Generator().manual_seed(3)
    for _ in range(steps):
        if kind is Transformer:
            yield {name: torch.randint(0, 11, (3, 6), generator=generator) for name in ("x", "y")}
        else:
            labels = torch.randint(0, 5, (6,), generator=generator)
            yield {"x": torch.randn(6, 1, 8, 8, generator=generator), "y": labels}


@pytest.fixture
def record(record_loop):
    def run(kind=Pictures, *, change=None, build=None, **options):
        model = initialised(build or kind, seed=7)
        if change is not None:
            change(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        return record_loop(model, optimizer, batches(kind), body, **options)

    return run


@pytest.fixture
def judge(devices):
    def run(loop, *, cap=CAP, without=(), devices=devices, trust=None):
        trust = replace(loop.trust if trust is None else trust, maximum_flop=cap)
        with blind(*without):
            return inspect([loop.run], trust, SETTINGS, now=loop.now, worker=devices.run)

    return run


def declared(loop):
    return RunFolder(loop.run, loop.trust.labs["lab"]).declared


@pytest.mark.parametrize(
    ("kind", "options"),
    [(Transformer, {}), (Pictures, {"numerics": "rounded"})],
    ids=["transformer-exact", "convolutions-rounded"],
)
def test_an_initialised_loop_is_accepted_under_a_cap_on_two_devices(record, judge, kind, options):
    loop = record(kind, **options)
    begun = declared(loop).origin.initialisation
    assert begun is not None
    assert begun.seed == 7
    verdict = judge(loop)
    assert verdict.outcome is Outcome.ACCEPT, verdict.reasons
    assert "loop starts from what its declared initialisation computes" in verdict.reasons[0].text
    (line,) = verdict.evidence["lineages"]
    assert (line["origin"], line["past_unknown"]) == ("initialisation", None)
    assert begun.program in verdict.evidence["runs"][0]["execution"]["programs"]
    assert line["chain_most_flop"] < CAP


def test_verification_without_execution_is_open_under_a_cap(record):
    loop = record()
    assert verify(loop.run, loop.trust, now=loop.now).outcome is Outcome.ACCEPT
    verdict = verify(loop.run, replace(loop.trust, maximum_flop=CAP), now=loop.now)
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert "the initialisation of loop was not executed here; `inspect` executes it" in verdict.reasons[0].text


def add_half(model) -> None:
    with torch.no_grad():
        next(model.parameters()).view(-1)[0] += 0.5


def write_unseen(model) -> None:
    next(model.parameters()).detach().numpy().reshape(-1)[0] = 0.5


@pytest.mark.parametrize(
    "change", [add_half, write_unseen, lambda model: model.load_state_dict(Pictures().state_dict())]
)
def test_values_that_the_program_did_not_give_are_supplied(record, judge, change):
    loop = record(change=change)
    assert declared(loop).origin.is_supplied
    verdict = judge(loop)
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert "the weights that loop starts from were supplied" in verdict.reasons[0].text
    assert judge(loop, cap=None).outcome is Outcome.ACCEPT


def test_a_program_that_gives_other_weights_is_rejected(record, judge, monkeypatch):
    """The lab alters W_0 and declares the state that it then has, and still that the program made it."""
    true = model_initialisation.with_start

    def claim(declared, model, place):
        origin = true(declared, initialised(Pictures, seed=7), place)[0].origin
        begun = model_initialisation._start_of(model, declared)
        assert origin.initialisation is None
        assert begun is not None
        return replace(declared, origin=replace(declared.origin, initialisation=begun[0])), begun[1]

    monkeypatch.setattr("monitor.recording.recorder.with_start", claim)
    loop = record(change=add_half)
    verdict = judge(loop)
    assert verdict.outcome is Outcome.REJECT
    assert {reason.guard for reason in verdict.reasons} == {"initialisation"}
    assert "the declared initialisation does not reach the state that the run starts from" in verdict.reasons[0].text
    assert judge(loop, without={Guard.INITIALISATION}).outcome is Outcome.ACCEPT
    with off("initialisation executed"):
        assert judge(loop).outcome is Outcome.ACCEPT


def test_a_lab_that_starts_from_other_weights_than_declared_is_rejected(record, judge):
    loop = record(lie="forged-initialisation")
    verdict = judge(loop)
    assert verdict.outcome is Outcome.REJECT
    assert verdict.reasons[0].text == "step 0: the initial state is not the one that was declared"


def test_weights_that_a_program_brings_along_are_no_initialisation(record, judge, monkeypatch):
    """A lab without scruples puts trained weights into the program as a constant."""
    trained = torch.linspace(-1, 1, 320).view(5, 64)

    def build():
        model = Pictures()
        with torch.no_grad():
            model.head.weight.copy_(trained.clone())
        return model

    with pytest.raises(CallerError, match=r"aten.clone.default reads a table of 1280 bytes that no operator made"):
        initialised(build, seed=7)
    monkeypatch.setattr(model_initialisation, "facts_of", lambda *_: type("Facts", (), {"constants": []}))
    loop = record(build=build)
    verdict = judge(loop, cap=None)
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert "reaches 'weight/head.weight' by aten.copy_.default without passing a loss" in verdict.reasons[0].text
    trust = resigned(loop.run, loop.trust, direct_paths=frozenset({"weight/head.weight"}))
    assert judge(loop, cap=None, trust=trust).outcome is Outcome.ACCEPT
    verdict = judge(loop, trust=trust)
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert "the initialisation of loop brings 1280 bytes that no operator made" in verdict.reasons[0].text
    with off("initialisation brings nothing"):
        assert judge(loop, trust=trust).outcome is Outcome.ACCEPT


def test_a_model_delivered_number_by_number_is_not_counted_as_initialised(record, judge):
    """Each weight is a number among the arguments of an operator, and no table is read."""
    numbers = [value.tolist() for value in torch.randn(3, 500, dtype=torch.float64)]

    def build():
        model = Pictures()
        with torch.no_grad():
            flat = torch.cat([torch.stack([torch.full((), value) for value in row]) for row in numbers])
            model.head.weight.copy_(flat[:320].view(5, 64).float() + 0 * flat[320:].sum().float())
        return model

    loop = record(build=build)
    verdict = judge(loop)
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert "the initialisation of loop brings a program of " in verdict.reasons[0].text
    with off("initialisation brings nothing"):
        assert judge(loop).outcome is Outcome.ACCEPT


def test_tensors_of_one_element_buy_no_room_for_a_model():
    """A lab declares 150 buffers beside the weights, so that the text for each tensor seems short."""
    numbers = [value.tolist() for value in torch.randn(2, 2000, dtype=torch.float64)]

    def build():
        model = nn.Linear(40, 100, bias=False)
        for number in range(150):
            model.register_buffer(f"b{number}", torch.zeros(1))
        with torch.no_grad():
            flat = torch.cat([torch.stack([torch.full((), value) for value in row]) for row in numbers])
            model.weight.copy_(flat.view(100, 40).float())
        return model

    model = initialised(build, seed=1)
    program = model_initialisation._STARTS[model][1]
    assert "more than the 65536 that making 151 tensors may take" in brings(program)
    with off("text in proportion"):
        assert brings(program) == ""


def test_a_rejection_loop_is_long_but_brings_nothing():
    """PyTorch draws again what a truncated normal refuses, with the same few calls each time."""

    def build():
        model = nn.Linear(300, 300)
        nn.init.trunc_normal_(model.weight, std=1.0)
        return model

    (program,) = [model_initialisation._STARTS[model][1] for model in [initialised(build, seed=1)]]
    assert len(program.encoded) > 2 * MOST_TEXT * len(program.commit)
    assert brings(program) == ""


def test_an_initialisation_that_nobody_countersigned_is_an_amendment(record, judge):
    loop = record()
    begun = declared(loop).origin.initialisation
    others = set(agreement(loop.trust).programs) - {begun.program}
    verdict = judge(loop, trust=resigned(loop.run, loop.trust, programs=others))
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert "step 0: runs program" in verdict.reasons[0].text


def test_compute_inside_an_initialisation_is_counted(record, judge):
    def build():
        model = Pictures()
        with torch.no_grad():
            model.head.weight.copy_(torch.randn(5, 64) @ torch.randn(64, 64))
        return model

    loop = record(build=build)
    run = RunFolder(loop.run, loop.trust.labs["lab"])
    assert run.leaf(0).flop == 2 * 5 * 64 * 64
    total = sum(leaf.flop for leaf in run.load_steps()[0])
    assert judge(loop).outcome is Outcome.ACCEPT
    verdict = judge(loop, cap=total - 1)
    assert verdict.outcome is Outcome.REJECT
    assert verdict.reasons[0].text.startswith(f"lab lab declares {total} FLOP")


def test_hidden_compute_of_the_initialisation_is_a_finding(record, judge, monkeypatch):
    true = Recording._commit_start

    def cheap(self):
        self._start.__dict__["compute"] = replace(self._start.compute, flop=0)
        true(self)

    def build():
        model = Pictures()
        with torch.no_grad():
            model.head.weight.copy_(torch.randn(5, 64) @ torch.randn(64, 64))
        return model

    monkeypatch.setattr(Recording, "_commit_start", cheap)
    verdict = judge(record(build=build))
    assert verdict.outcome is Outcome.REJECT
    assert "step 0 declares 0 FLOP; the program needs 40960" in verdict.reasons[0].text


@pytest.mark.parametrize("device", ["sse41", "emulated-accelerator"])
def test_every_device_computes_the_same_state(record, devices, device):
    loop = record(Transformer)
    run = RunFolder(loop.run, loop.trust.labs["lab"])
    job = {
        "action": "replay",
        "run": str(loop.run),
        "manifest": run.manifest_digest,
        "lab_key": loop.trust.labs["lab"].raw.hex(),
        "segments": [0],
    }
    (replay,) = devices.run(device, job)["replays"]
    assert replay["initial_state"] == run.leaf(0).state.to_json()
    assert run.initialisation is not None
    assert initialised_memory(run.declared, run.initialisation).digest() == run.leaf(0).state


def test_a_device_that_did_not_execute_it_leaves_the_verdict_open(record, judge, devices):
    class Lazy:
        def run(self, name, job):
            result = devices.run(name, job)
            for replay in result["replays"]:
                replay["initial_state"] = None
            return result

    verdict = judge(record(), devices=Lazy())
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert "the initialisation was not executed" in verdict.reasons[0].text


def test_what_cannot_be_repeated_is_named_in_one_line():
    def rotated():
        model = nn.Linear(4, 4)
        torch.linalg.eigvals(model.weight)
        return model

    def seeded():
        torch.manual_seed(0)
        return nn.Linear(4, 4)

    outside = torch.ones(2, 2)

    def foreign():
        model = nn.Linear(2, 2)
        model.weight = nn.Parameter(outside)
        return model

    for build, text in (
        (rotated, "aten.linalg_eig.default is not supported"),
        (seeded, "seeds torch's generator"),
        (foreign, "weight/weight was set to a tensor that no operator"),
        (lambda: 3, "but returned a int"),
    ):
        with pytest.raises(CallerError, match=text) as raised:
            initialised(build, seed=1)
        assert "\n" not in str(raised.value)
    with pytest.raises(CallerError, match="seed must lie in"):
        initialised(Pictures, seed=-1)


def test_the_seed_decides_and_torchs_generator_is_left_alone():
    before = torch.get_rng_state()
    states = [initialised(Pictures, seed=seed).state_dict() for seed in (1, 1, 2)]
    assert torch.equal(torch.get_rng_state(), before)
    same = [all(torch.equal(states[0][name], other[name]) for name in other) for other in states]
    assert same == [True, True, False]


def test_an_initialised_run_goes_on_after_a_crash(record, judge, tmp_path):
    whole = record(name="whole")

    def cut(recorder):
        for number, batch in enumerate(batches(Pictures)):
            if number == 2:
                recorder._run.lab.cut_power()
                raise KeyboardInterrupt
            with recorder.step(batch):
                body(recorder._run.loop.state.model, recorder._run.loop.optimizer, batch)

    with pytest.raises(KeyboardInterrupt):
        record(name="cut", prepare=cut)
    model = Pictures()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    recorder = Recorder.resume(model, optimizer, out=tmp_path / "cut")
    for batch in list(batches(Pictures))[recorder.steps :]:
        with recorder.step(batch):
            body(model, optimizer, batch)
    assert recorder.finish() == str(RunFolder(whole.run, whole.trust.labs["lab"]).leaf(4).state.root)
    loop = replace(whole, run=tmp_path / "cut", trust=type(whole.trust).load([tmp_path / "cut.trust.json"]))
    assert judge(loop).outcome is Outcome.ACCEPT


def test_a_run_killed_before_its_first_record_wants_the_same_initialisation(record, monkeypatch, tmp_path):
    def die(self):
        self.lab.cut_power()
        raise KeyboardInterrupt

    monkeypatch.setattr(Recording, "_commit_start", die)
    monkeypatch.setattr("monitor.recording.recorder.freeing", lambda *_: nullcontext())  # a kill frees no folder
    with pytest.raises(KeyboardInterrupt):
        record(name="cut")
    monkeypatch.undo()
    for build in (Pictures, lambda: initialised(Pictures, seed=8)):
        model = build()
        with pytest.raises(CallerError, match="is not initialised in the same way as for the first part of the run"):
            Recorder.resume(model, torch.optim.AdamW(model.parameters(), lr=1e-3), out=tmp_path / "cut")
    model = initialised(Pictures, seed=7)
    recorder = Recorder.resume(model, torch.optim.AdamW(model.parameters(), lr=1e-3), out=tmp_path / "cut")
    assert recorder.steps == 0


def test_a_declared_initialisation_is_read_back(record):
    origin = declared(record()).origin
    assert type(origin).from_json(origin.to_json()) == origin
    assert isinstance(origin.initialisation, Initialisation)
