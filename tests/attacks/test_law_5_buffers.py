"""Law 5, buffers: what takes a gradient is a weight, whatever it is called, and some declared number governs it."""

from __future__ import annotations

import copy
import json
import warnings
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from analysis.cli import main
from inspector.inspection.guards import Settings
from inspector.inspection.inspection import inspect
from inspector.inspection.review import review
from inspector.inspection.transcripts import open_run, read_transcript
from inspector.inspection.verdict import Findings, Outcome
from inspector.rules.quantities import hyper
from inspector.rules.rule_files import Rule
from inspector.rules.truth import Truth
from tests.agreements import resigned
from tests.attacks.jobs import basis
from tests.guards import off

SETTINGS = Settings(samples=1, seed="x", devices=("sse41",))
GENERATOR = torch.Generator().manual_seed(3)
BATCHES = [
    {
        "x": torch.randn(12, 8, generator=GENERATOR),
        "y": torch.randint(0, 4, (12,), generator=GENERATOR),
        "rate": torch.tensor(0.5),
    }
    for _ in range(3)
]


class Held(nn.Module):
    """A dummy that the optimizer has, and what is really trained as a buffer."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.dummy = nn.Parameter(torch.ones(4))
        self.register_buffer("w", torch.randn(8, 4) * 0.1)
        self.register_buffer("other", torch.zeros(8, 4))


def _slope(model, batch, *, beside=True):
    """The gradient of a buffer by a loss in which the dummy has its part, or by a loss of its own."""
    copied = model.w.detach().clone().requires_grad_(True)
    outputs = batch["x"] @ copied
    functional.cross_entropy(outputs + model.dummy if beside else outputs, batch["y"]).backward()
    if not beside:
        model.dummy.sum().backward()
    return copied.grad


def _by_hand(model, optimizer, batch):
    slope = _slope(model, batch)
    optimizer.step()
    model.w.sub_(slope, alpha=0.5)


def _by_a_loss_of_its_own(model, optimizer, batch):
    slope = _slope(model, batch, beside=False)
    optimizer.step()
    model.w.sub_(slope, alpha=0.5)


def _at_a_rate_in_the_batch(model, optimizer, batch):
    slope = _slope(model, batch)
    optimizer.step()
    model.w.sub_(slope * batch["rate"])


def _by_momentum_of_its_own(model, optimizer, batch):
    """An average, but of gradients."""
    slope = _slope(model, batch)
    optimizer.step()
    model.other.lerp_(slope, 0.1)
    model.w.sub_(model.other)


def _a_step_later(model, optimizer, batch):
    """The gradient waits in the state."""
    slope = _slope(model, batch)
    optimizer.step()
    model.w.sub_(model.other)
    model.other.copy_(slope)


def _with_a_seed_of_the_batch(model, optimizer, batch):
    """No ones begin the backward pass."""
    copied = model.w.detach().clone().requires_grad_(True)
    loss = functional.cross_entropy(batch["x"] @ copied, batch["y"])
    model.dummy.sum().backward()
    optimizer.step()
    model.w.sub_(torch.autograd.grad(loss, copied, batch["rate"])[0])


LIES = [
    _by_hand,
    _by_a_loss_of_its_own,
    _at_a_rate_in_the_batch,
    _by_momentum_of_its_own,
    _a_step_later,
    _with_a_seed_of_the_batch,
]


@pytest.fixture
def recorded(record_loop):
    """Record three steps of a body; all paths of batches into buffers and weights are agreed, whatever they are."""

    def run(model, optimizer, body, batches=BATCHES, **options):
        def whole(model, optimizer, batch):
            for weight in model.parameters():
                weight.grad = None
            body(model, optimizer, batch)

        paths = [f"{kind}/*" for kind in ("buffer", "weight") if _has(model, kind)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return record_loop(model, optimizer, batches, whole, chips=1, **{"direct_paths": paths, **options})

    return run


def _has(model, kind):
    return any(True for _ in (model.buffers() if kind == "buffer" else model.parameters()))


def sgd(model, rate=1e-6):
    return torch.optim.SGD(model.parameters(), lr=rate)


def judged(run):
    return review(run.run, run.trust)


def text_of(verdict):
    """What is not bound, in words; empty where everything is."""
    texts = [each.text for each in verdict.reasons if each.text.startswith("not bound to the arithmetic")]
    return texts[0] if texts else ""


@pytest.mark.parametrize("lie", LIES)
def test_a38_weights_kept_as_buffers_are_bound_to_nothing(recorded, lie):
    model = Held()
    run = recorded(model, sgd(model), lie)
    found = judged(run)
    assert found.outcome is Outcome.INCONCLUSIVE
    text = text_of(found)
    assert "'buffer/w'" in text
    assert "make it a parameter of the optimizer, or have an inspectorate sign `declare countersign --free" in text
    with off("gradients bound"):
        assert judged(run).outcome is Outcome.ACCEPT


def test_a38_a_rule_on_rates_is_undecided_where_a_buffer_is_trained_beside_it(recorded):
    model = Held()
    run = recorded(model, sgd(model), _by_hand)
    rule = Rule(name="r", kind="hyper", at_least=None, at_most=Fraction(1, 100_000), about={"parameter": "lr"})

    def found(trust):
        transcript = read_transcript(open_run(run.run, trust), trust, Findings(), now=run.now)
        return next(hyper(rule, basis([transcript])))

    assert found(run.trust).truth is Truth.UNDECIDED
    assert "lr does not govern 'buffer/w': aten.sub_.Tensor" in found(run.trust).text
    agreed = found(resigned(run.run, run.trust, free=frozenset({"buffer/w"})))
    assert agreed.truth is Truth.PASS
    assert "does not govern 'buffer/w' and 0 more, as agreed" in agreed.text


def _no_optimizer(model, _, batch):
    functional.cross_entropy(model(batch["x"]), batch["y"]).backward()
    with torch.no_grad():
        for weight in model.parameters():
            weight.sub_(weight.grad * batch["rate"])


def test_a38_weights_trained_without_an_optimizer_are_bound_to_nothing(recorded):
    run = recorded(nn.Linear(8, 4), None, _no_optimizer)
    found = judged(run)
    assert found.outcome is Outcome.INCONCLUSIVE
    assert "'weight/bias', 'weight/weight'" in text_of(found)
    with off("gradients bound"):
        assert judged(run).outcome is Outcome.ACCEPT


class Numberless(torch.optim.Optimizer):
    """Its rate stands in no parameter group."""

    def __init__(self, parameters):
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for weight in group["params"]:
                weight.sub_(weight.grad, alpha=0.5)


def plain(model, optimizer, batch):
    functional.cross_entropy(model(batch["x"]), batch["y"]).backward()
    optimizer.step()


def test_a38_an_optimizer_that_declares_no_number_binds_nothing(recorded):
    model = nn.Linear(8, 4)
    run = recorded(model, Numberless(model.parameters()), plain, direct_paths=())
    found = judged(run)
    assert found.outcome is Outcome.INCONCLUSIVE
    assert "'weight/bias', 'weight/weight', since step 1: an update writes it" in text_of(found)
    with off("gradients bound"):
        assert judged(run).outcome is Outcome.ACCEPT


def test_a38_weights_kept_as_gradients_are_bound_to_nothing(record_loop):
    """The model is the gradient of a weight that hardly moves; nobody has to agree to any path."""
    model = Held()
    model.p = nn.Parameter(torch.zeros(8, 4))
    for each in model.parameters():
        each.grad = torch.zeros_like(each)

    def body(model, optimizer, batch):
        held = model.p.grad.detach().clone().requires_grad_(True)
        loss = functional.cross_entropy(batch["x"] @ held + model.dummy, batch["y"])
        slope, own = torch.autograd.grad(loss, [held, model.dummy])
        model.dummy.grad.copy_(own)
        optimizer.step()
        model.p.grad.copy_(model.p.grad - 0.5 * slope)

    with pytest.warns(UserWarning, match="gradient/p receives a gradient outside all updates"):
        run = record_loop(model, sgd(model), BATCHES, body, chips=1)
    found = judged(run)
    assert found.outcome is Outcome.INCONCLUSIVE
    assert "'gradient/p', since a loss that is made of it" in text_of(found)
    with off("gradients bound"):
        assert judged(run).outcome is Outcome.ACCEPT


def test_inference_without_an_optimizer_is_accepted(recorded, devices):
    def body(model, _, batch):
        with torch.no_grad():
            model(batch["x"]).sum().item()

    run = recorded(nn.Linear(8, 4), None, body, BATCHES * 3, direct_paths=())
    found = inspect([run.run], run.trust, SETTINGS, now=run.now, worker=devices.run)
    assert found.outcome is Outcome.ACCEPT, found.reasons


class Codes(nn.Module):
    """A quantizer whose codes are averages of what falls to them, behind batch and spectral norms."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.utils.spectral_norm(nn.Linear(8, 6)), nn.BatchNorm1d(6), nn.Linear(6, 4))
        self.register_buffer("codes", torch.randn(5, 4))
        self.register_buffer("sums", torch.randn(5, 4))
        self.register_buffer("counts", torch.ones(5))


def _quantized(model, optimizer, batch):
    found = model.net(batch["x"])
    chosen = functional.one_hot((found[:, None] - model.codes).square().sum(-1).argmin(1), 5).float()
    near = chosen @ model.codes
    (
        functional.mse_loss(found, near) + functional.cross_entropy(found + (near - found).detach(), batch["y"])
    ).backward()
    optimizer.step()
    with torch.no_grad():
        model.counts.mul_(0.9).add_(chosen.sum(0), alpha=0.1)
        model.sums.mul_(0.9).add_(chosen.t() @ found, alpha=0.1)
        model.codes.copy_(model.sums / (model.counts + 1e-5)[:, None])


class Averaged(nn.Module):
    """A net with an average and a target of its weights, and the norm of its gradients."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Linear(6, 4))
        self.average = torch.optim.swa_utils.AveragedModel(self.net, multi_avg_fn=_ema)
        self.target = copy.deepcopy(self.net).requires_grad_(False)
        self.register_buffer("norm", torch.zeros(()))


_ema = torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)


def _averaged(model, optimizer, batch):
    for rows in (slice(6), slice(6, 12)):
        (functional.cross_entropy(model.net(batch["x"][rows]), batch["y"][rows]) / 2).backward()
    norm = nn.utils.clip_grad_norm_(model.net.parameters(), 0.5)
    optimizer.step()
    with torch.no_grad():
        model.norm.lerp_(norm, 0.1)
        model.average.update_parameters(model.net)
        for mine, theirs in zip(model.target.parameters(), model.net.parameters(), strict=True):
            mine.lerp_(theirs, 0.1)


def _penalized(model, optimizer, batch):
    inputs = batch["x"].clone().requires_grad_(True)
    [slope] = torch.autograd.grad(model(inputs).square().sum(), inputs, create_graph=True)
    (functional.cross_entropy(model(batch["x"]), batch["y"]) + (slope.norm(dim=1) - 1).square().mean()).backward()
    optimizer.step()


def _adapted(model, optimizer, batch):
    """One step on the first half, whose loss on the second is what is learned from."""
    weights = dict(model.named_parameters())
    inner = functional.cross_entropy(model(batch["x"][:6]), batch["y"][:6])
    slopes = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
    moved = {name: each - 0.1 * slope for (name, each), slope in zip(weights.items(), slopes, strict=True)}
    outputs = torch.func.functional_call(model, moved, (batch["x"][6:],))
    functional.cross_entropy(outputs, batch["y"][6:]).backward()
    optimizer.step()


def _adversaries(model, optimizer, batch):
    made = model["maker"](batch["x"])
    functional.softplus(-model["judge"](made)).mean().backward()
    optimizer.steps[0]()
    model["judge"].zero_grad()
    told = model["judge"](made.detach()).mean() - model["judge"](batch["x"]).mean()
    told.backward()
    optimizer.steps[1]()


def _gathered(model, optimizer, batch):
    """They wait in the state for the next step, and are zeroed at its end."""
    for weight in model.parameters():
        weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
    functional.cross_entropy(model(batch["x"][:6]), batch["y"][:6]).backward()
    optimizer.step()
    functional.cross_entropy(model(batch["x"][6:]), batch["y"][6:]).backward()


class Two:
    """Two optimizers, for a body that knows of one."""

    def __init__(self, *optimizers):
        self.optimizers = list(optimizers)
        self.steps = [each.step for each in optimizers]


HONEST = {
    "a quantizer's averages": (Codes, _quantized, ["buffer/codes", "buffer/sums", "buffer/counts"]),
    "averages and targets": (Averaged, _averaged, []),
    "a gradient penalty": (lambda: nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 4)), _penalized, []),
    "gradients over two steps": (lambda: nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 4)), _gathered, []),
    "a model that adapts": (lambda: nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 4)), _adapted, []),
}


@pytest.mark.parametrize("case", HONEST)
def test_honest_buffers_take_no_gradient(recorded, case):
    make, body, paths = HONEST[case]
    model = make()
    parts: Any = model.net if hasattr(model, "net") else model
    found = judged(recorded(model, torch.optim.AdamW(parts.parameters(), lr=1e-2), body, direct_paths=paths))
    assert found.outcome is Outcome.ACCEPT, found.reasons


def test_two_optimizers_of_adversaries_are_bound(record_loop):
    torch.manual_seed(0)
    model = nn.ModuleDict({"maker": nn.Linear(8, 8), "judge": nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 1))})
    both = [torch.optim.Adam(each.parameters(), lr=1e-3) for each in model.values()]

    def body(model, optimizer, batch):
        model.zero_grad()
        _adversaries(model, Two(*both), batch)

    found = judged(record_loop(model, both, BATCHES, body, chips=1))
    assert found.outcome is Outcome.ACCEPT, found.reasons


def _squares(model, optimizer, batch):
    plain(model.net, optimizer, batch)
    with torch.no_grad():
        model.squares.add_(model.net.weight.grad.square())


def test_a_sum_of_squared_gradients_is_accepted_once_it_was_agreed_on_by_name(record_loop, tmp_path, capsys):
    model = nn.ModuleDict({"net": nn.Linear(8, 4)})
    model.net = model["net"]
    model.register_buffer("squares", torch.zeros(4, 8))

    def body(model, optimizer, batch):
        model.zero_grad()
        _squares(model, optimizer, batch)

    with pytest.warns(UserWarning, match=r"buffer/squares .* agree by free=\['buffer/squares'\]"):
        run = record_loop(model, sgd(model["net"], 0.1), BATCHES, body, chips=1)
    assert judged(run).outcome is Outcome.INCONCLUSIVE
    key, trust = tmp_path / "key", tmp_path / "trust.json"
    assert main(["registry", "keygen", str(key)]) == 0
    named = json.loads((tmp_path / "loop.trust.json").read_text())
    del named["countersigned"]
    named["inspectorates"] = [(tmp_path / "key.pub").read_text().split()[2]]
    trust.write_text(json.dumps(named))
    signed = tmp_path / "signed.json"
    capsys.readouterr()
    assert main(["declare", "show", str(run.run), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)["shown"]
    countersign = ["declare", "countersign", str(run.run), "--key", str(key), "--out", str(signed), "--shown", shown]
    assert main([*countersign, "--free", "buffer/squares"]) == 0
    ask = ["program", "review", str(run.run), "--trust", str(trust), "--trust", str(signed), "--json"]
    capsys.readouterr()
    assert main(ask) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["outcome"] == "ACCEPT"
    assert set(told["evidence"]["execution"]["not_bound"]) == {"buffer/squares"}
