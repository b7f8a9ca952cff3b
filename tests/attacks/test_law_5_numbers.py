"""Law 5, declared numbers: what the report of a recorded loop states, its program did."""

from __future__ import annotations

import json
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn import functional

from analysis.cli import main
from firmware_sim.errors import CallerError, EvidenceError
from monitor.declaration.slots import StepNumbers
from monitor.declaration.statement import hyper_of, members_of
from monitor.environment import versions
from monitor.recording import options as lab
from monitor.recording import recording, step_programs, updates
from monitor.recording.first_state import FirstState
from tests.guards import off

pytestmark = pytest.mark.usefixtures("kept_devices")

NOW = ("--now", "2026-01-01T00:30:00Z")


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 4))


def batches(steps: int = 4) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        {"x": torch.randn(5, 8, generator=generator), "y": torch.randint(0, 4, (5,), generator=generator)}
        for _ in range(steps)
    ]


def backward(model, optimizer, batch) -> None:
    optimizer.zero_grad()
    functional.cross_entropy(model(batch["x"]), batch["y"]).backward()


def body(model, optimizer, batch) -> None:
    backward(model, optimizer, batch)
    optimizer.step()


@pytest.fixture
def record(record_loop):
    """Record a loop over ``optimizer``; returns its folder."""

    def run(optimizer, *, body=body, steps=4, name="loop", free=(), **options) -> Path:
        model = make_model()
        return record_loop(model, optimizer(model), batches(steps), body, name=name, free=free, **options).run

    return run


def ask(capsys, command: str, run: Path, *words: str) -> tuple[int, dict]:
    """Exit code and JSON answer of a command about a run under its trust file."""
    capsys.readouterr()
    code = main([command, str(run), "--trust", f"{run}.trust.json", *NOW, "--json", *words])
    return code, json.loads(capsys.readouterr().out)


def verify(capsys, run: Path) -> tuple[int, str, dict]:
    code, answer = ask(capsys, "verify", run)
    texts = [each["text"] for each in answer["reasons"] if "which was not agreed" not in each["text"]]
    return code, (texts or [answer["reasons"][0]["text"]])[0], answer["evidence"]["execution"]


def inspect(capsys, run: Path) -> tuple[int, dict]:
    return ask(capsys, "inspect", run, "--samples", "3", "--device", "sse41")


@contextmanager
def declaring(change):
    """A lab whose recorder declares other hyper-parameters than its optimizer has, and overlooks what does not fit."""

    class Blind(StepNumbers):
        def take(self, *step):
            try:
                super().take(*step)
            except EvidenceError:
                return
            finally:
                self.contradicted = False

    true_hyper = hyper_of
    with (
        mock.patch.object(updates, "hyper_of", lambda group: {**true_hyper(group), **change(group)}),
        mock.patch.object(step_programs, "StepNumbers", Blind),
    ):
        yield


def sgd(**hyper):
    return lambda model: torch.optim.SGD(model.parameters(), **{"lr": 0.1, **hyper})


def adamw(**hyper):
    return lambda model: torch.optim.AdamW(model.parameters(), **{"lr": 1e-3, **hyper})


def record_a10(record) -> Path:
    """The rate falls from 5.0, and in each step it is declared rate times declared weight decay."""
    with declaring(lambda group: {"lr": group["lr"] / 5000, "weight_decay": 5000.0}):
        return record(sgd(lr=5.0), before=lower_rate)


def lower_rate(recorder, step) -> None:
    recorder._run.loop.optimizer.param_groups[0]["lr"] = 5.0 / step


def test_a10_rate_declared_as_a_product_is_rejected(record, capsys):
    code, text, loop = verify(capsys, record_a10(record))
    assert code == 1
    assert text.startswith("not bound to the arithmetic: dampening, lr, maximize, momentum, nesterov, weight_decay, ")
    assert "step 1: an update has 4 calls, but the declared optimizer makes 8" in text
    assert set(loop["not_bound"]) == {"dampening", "lr", "maximize", "momentum", "nesterov", "weight_decay"}


def test_a10_a_lab_hears_of_it_before_anything_is_committed(record):
    true_hyper = hyper_of
    other = {"lr": 0.001, "weight_decay": 5000.0}
    with (
        mock.patch.object(updates, "hyper_of", lambda group: {**true_hyper(group), **other}),
        pytest.raises(CallerError, match=r"dampening is not bound to the arithmetic, since step 1: an update has 4"),
    ):
        record(sgd(lr=5.0))


def test_a10_under_another_pytorch_nothing_is_concluded(record, capsys):
    with mock.patch.object(recording, "versions", return_value={**versions(), "torch": "1.0"}):
        run = record_a10(record)
    assert verify(capsys, run)[0] == 3


def test_a10_guard_off_accepts_the_product(record, capsys):
    run = record_a10(record)
    with off("numbers bound"):
        code, answer = inspect(capsys, run)
    assert code == 0, answer["reasons"]


def test_a10_agreed_as_free_is_accepted_and_said(record, capsys):
    names = ("lr", "momentum", "dampening", "weight_decay", "nesterov", "maximize")
    with declaring(lambda group: {"lr": group["lr"] / 5000, "weight_decay": 5000.0}):
        run = record(sgd(lr=5.0), free=names)
    code, text, _ = verify(capsys, run)
    assert code == 0
    assert "not bound to the arithmetic, as agreed: dampening, lr, maximize, momentum, nesterov, weight_decay" in text


def record_a11(record) -> Path:
    def before(recorder, step):
        recorder._run.loop.optimizer.param_groups[0]["weight_decay"] = 1000.0 if step == 3 else 0.01

    with mock.patch.object(step_programs, "_require_constant"):
        return record(adamw(), before=before)


def test_a11_weight_decay_of_one_step_is_listed_and_rejected(record, capsys):
    run = record_a11(record)
    code, text, loop = verify(capsys, run)
    assert code == 1
    assert text == (
        "hyper-parameters differ from their declaration: "
        "weight_decay of group 0 (declared 0.01) from 0.01 to 0.01 in 0.01 … 1000.0"
    )
    (line,) = loop["changed_hyper_parameters"]
    assert (line["name"], line["first"], line["last"], line["lowest"], line["highest"]) == (
        "weight_decay",
        *(0.01, 0.01, 0.01, 1000.0),
    )


def test_a11_guard_off_accepts_the_step_that_forgets_everything(record, capsys):
    run = record_a11(record)
    with off("changes declared"):
        code, answer = inspect(capsys, run)
    assert code == 0, answer["reasons"]


def test_a11_weight_decay_of_one_step_that_is_not_declared_is_rejected(record, capsys):
    with declaring(lambda group: {"weight_decay": 0.01}):
        code, text, _ = verify(capsys, record_a11(record))
    assert code == 1
    assert text == (
        "step 3: aten.mul_.Tensor of an update uses the number 0.0 (scalar 0), but the declared hyper-parameters "
        "give 0.99999"
    )


def record_a12(record) -> Path:
    with declaring(lambda group: {"lr": 1e-6}):
        return record(sgd(lr=0.5))


def test_a12_other_rate_than_the_programs_is_rejected(record, capsys):
    code, text, _ = verify(capsys, record_a12(record))
    assert code == 1
    assert text.startswith("step 1: aten.add_.Tensor of an update uses the number -0.5 (scalar ")
    assert text.endswith("but the declared hyper-parameters give -1e-06")


def test_a12_guard_off_accepts_the_other_rate(record, capsys):
    run = record_a12(record)
    with off("numbers equal"):
        code, answer = inspect(capsys, run)
    assert code == 0, answer["reasons"]


def test_a12_a_lab_hears_of_it_before_anything_is_committed(record, tmp_path):
    true_hyper = hyper_of
    with (
        mock.patch.object(updates, "hyper_of", lambda group: {**true_hyper(group), "lr": 1e-6}),
        pytest.raises(CallerError, match=r"step 1: aten\.add_\.Tensor of an update uses the number -0\.5"),
    ):
        record(sgd(lr=0.5))
    assert not (tmp_path / "loop" / "steps" / "00000001.json").exists()


def by_hand(model, optimizer, batch) -> None:
    """The declared update, and a larger one beside it."""
    body(model, optimizer, batch)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(weight.grad, alpha=-0.5)


def aside(model, optimizer, batch) -> None:
    """The declared update writes copies of the weights; the weights get another one."""
    backward(model, optimizer, batch)
    true = [weight.data for weight in model.parameters()]
    for weight in model.parameters():
        weight.data = weight.data.clone()
    optimizer.step()
    with torch.no_grad():
        for weight, kept in zip(model.parameters(), true, strict=True):
            weight.data = kept.add_(weight.grad, alpha=-0.5)


def replaced(model, optimizer, batch) -> None:
    """The declared update runs, and other weights are put in the place of what it made."""
    body(model, optimizer, batch)
    with torch.no_grad():
        for weight in model.parameters():
            weight.data = weight * 0.5


def smuggled(model, optimizer, batch) -> None:
    """Momentum that the optimizer never made."""
    body(model, optimizer, batch)
    with torch.no_grad():
        for weight in model.parameters():
            optimizer.state[weight]["momentum_buffer"].mul_(100.0)


@pytest.mark.parametrize("change", [by_hand, aside, replaced, smuggled])
def test_a12_update_beside_the_declared_one_is_not_bound(record, capsys, change):
    run = record(sgd(lr=1e-6, momentum=0.9), body=change)
    code, text, _ = verify(capsys, run)
    assert code == 3
    assert text.startswith("not bound to the arithmetic: ")


@pytest.mark.parametrize("ranges", ["none", "first", "all"])
def test_a12_program_that_hides_where_its_updates_are_is_not_bound(record, capsys, ranges):
    true_after = updates.OptimizerUpdates.after_update

    def after(self, *arguments):
        true_after(self, *arguments)
        first = self.places[-1][0]
        self.places[-1:] = {"none": [], "first": [(first, first + 1)], "all": [(0, first)]}[ranges]

    with (
        mock.patch.object(updates.OptimizerUpdates, "after_update", after),
        mock.patch.object(FirstState, "require"),  # the lab's own check, that it altered too
    ):
        run = record(sgd(lr=1e-6, momentum=0.9))
    code, text, _ = verify(capsys, run)
    assert code == 3
    assert text.startswith("not bound to the arithmetic: ")


def two_groups(model):
    first, last = model[0].parameters(), model[2].parameters()
    return torch.optim.SGD([{"params": first, "lr": 1e-6}, {"params": last, "lr": 0.5}], lr=0.1)


def test_a12_weights_declared_in_each_others_group_are_not_accepted(record, capsys):
    true_members = members_of
    assert verify(capsys, record(two_groups, name="honest"))[0] == 0
    with (
        declaring(lambda group: {}),
        mock.patch.object(lab, "members_of", lambda *objects: true_members(*objects)[::-1]),
    ):
        run = record(two_groups)
    assert verify(capsys, run)[0] in {1, 3}


class Own(torch.optim.SGD):
    """An optimizer that PyTorch does not ship."""


def test_a12_optimizer_of_the_labs_own_is_not_bound_unless_agreed(record, capsys):
    def own(model):
        return Own(model.parameters(), lr=0.1)

    code, text, _ = verify(capsys, record(own))
    assert code == 3
    assert "Own' is not known here" in text
    names = ("lr", "momentum", "dampening", "weight_decay", "nesterov", "maximize")
    assert verify(capsys, record(own, name="agreed", free=names))[0] == 0


def test_a12_hyper_parameter_that_the_optimizer_does_not_have_is_not_bound(record, capsys):
    def named(model):
        return torch.optim.SGD([{"params": model.parameters(), "pace": 3.0}], lr=0.1)

    code, text, _ = verify(capsys, record(named))
    assert code == 3
    assert text == "not bound to the arithmetic: pace, since torch.optim.sgd.SGD has no such hyper-parameter"
    assert verify(capsys, record(named, name="agreed", free=("pace",)))[0] == 0


def test_a_name_that_a_group_bears_is_no_number(record, capsys):
    def named(model):
        return torch.optim.SGD([{"params": model.parameters(), "name": "all"}], lr=0.1)

    assert verify(capsys, record(named))[0] == 0


def test_honest_schedule_is_accepted_and_listed(record, capsys):
    def scheduled(model):
        optimizer = adamw(lr=0.01)(model)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        optimizer.register_step_post_hook(lambda *_: schedule.step())
        return optimizer

    code, text, loop = verify(capsys, record(scheduled))
    assert code == 0
    line = "hyper-parameters that change: lr of group 0 (declared 0.01) from 0.01 to 0.005 in 0.005 … 0.01; "
    assert line in text
    assert loop["not_bound"] == {}
    assert "a model delivered through a linear loss, or number by number" in loop["not_reviewed"]


RATES = '[[rule]]\nname = "rates"\nkind = "hyper"\nparameter = "lr"\nat_most = 1e-5\n'


def in_group(optimizer, **hyper):
    """An optimizer whose class does not look at what stands in its group."""

    def make(model):
        made = optimizer(model.parameters(), lr=1e-6)
        made.param_groups[0].update(hyper)
        return made

    return make


A53 = {
    "dampening": (in_group(torch.optim.SGD, momentum=0.01, dampening=-5e5), "dampening is -500000.0, outside of 0 … 1"),
    "momentum": (in_group(torch.optim.SGD, momentum=0.9999), "gain is 1e+04, not below 1000"),
    "alpha": (in_group(torch.optim.RMSprop, alpha=1.0, eps=2e-6), "alpha is 1.0, outside of 0 … below 1"),
    "betas": (in_group(torch.optim.Adam, betas=(0.9, 0.0)), "gain is inf, not below 1000"),
    "lr_decay": (in_group(torch.optim.Adagrad, lr_decay=-0.999999), "lr_decay is -0.999999, outside of 0 … inf"),
    "lr": (in_group(torch.optim.SGD, lr=-5.0), "lr is -5.0, outside of 0 … inf"),
}


def under_rules(capsys, tmp_path: Path, run: Path, rules: str = RATES) -> tuple[int, dict, dict]:
    """Exit code, evidence, and what a rule found."""
    (tmp_path / "lr.toml").write_text(rules, encoding="utf-8")
    code, answer = ask(
        capsys, "inspect", run, "--samples", "1", "--device", "sse41", "--rules", f"{tmp_path / 'lr.toml'}"
    )
    (found,) = answer["evidence"]["rules"]["found"]["rates"]
    return code, answer["evidence"]["runs"][0]["execution"], found


@pytest.mark.parametrize("name", A53)
def test_a53_a_number_that_makes_a_rate_mean_nothing_leaves_a_rule_on_rates_open(record, capsys, tmp_path, name):
    optimizer, text = A53[name]
    run = record(optimizer)
    code, execution, found = under_rules(capsys, tmp_path, run)
    assert (code, found["result"]) == (3, "undecided")
    assert text in found["text"]
    assert text in "".join(f"{name} {words}" for name, words in execution["declared_groups"][0]["outside"].items())
    code, told, _ = verify(capsys, run)
    assert code == 0
    assert f"beyond their ranges, so that rates bound no change of weights: {text}" in told


@pytest.mark.parametrize("name", ["dampening", "alpha"])
def test_a53_guard_off_passes_the_rule(record, capsys, tmp_path, name):
    run = record(A53[name][0])
    with off("number ranges"):
        code, _, found = under_rules(capsys, tmp_path, run)
    assert (code, found["result"]) == (0, "pass")


def test_a53_every_number_of_every_group_stands_in_the_verdict_and_the_gain_beside_the_rate(record, capsys, tmp_path):
    def groups(model):
        first, last = model[0].parameters(), model[2].parameters()
        return torch.optim.SGD([{"params": first}, {"params": last, "momentum": 0.9, "dampening": 0.5}], lr=1e-6)

    code, execution, found = under_rules(capsys, tmp_path, record(groups))
    assert (code, found["result"]) == (0, "pass")
    text = found["text"].removeprefix("run loop: lr lies in 1e-06 … 1e-06, which other numbers multiply by up to 10; ")
    assert text.startswith("in 4 replayed steps a weight changes by up to 0."), text
    first, last = execution["declared_groups"]
    assert [(each["gain"], each["outside"]) for each in (first, last)] == [(1.0, {}), (pytest.approx(10.0), {})]
    assert last["numbers"] == {
        **{"lr": 1e-6, "momentum": 0.9, "dampening": 0.5, "weight_decay": 0},
        **{"nesterov": False, "maximize": False, "foreach": None, "differentiable": False, "fused": None},
    }


def test_a53_a_number_that_some_step_has_outside_counts(record, capsys, tmp_path):
    """Agreed as free, it may change; the rule on rates is open all the same."""

    def before(recorder, step):
        recorder._run.loop.optimizer.param_groups[0]["dampening"] = -5e5 if step == 3 else 0.5

    run = record(in_group(torch.optim.SGD, momentum=0.01, dampening=0.5), before=before, free=("dampening",))
    code, _, found = under_rules(capsys, tmp_path, run)
    assert (code, found["result"]) == (3, "undecided")
    assert "dampening is -500000.0, outside of 0 … 1" in found["text"]


def test_a53_a_rate_that_breaks_the_rule_breaks_it_whatever_else_is_declared(record, capsys, tmp_path):
    run = record(in_group(torch.optim.SGD, lr=1e-3, momentum=0.9999))
    code, _, found = under_rules(capsys, tmp_path, run)
    assert (code, found["result"]) == (1, "fail")


CHANGES = '[[rule]]\nname = "rates"\nkind = "change"\nat_most = 20\n'


def by_scale(scale: float):
    """A body whose loss has another scale."""

    def scaled(model, optimizer, batch):
        optimizer.zero_grad()
        (functional.cross_entropy(model(batch["x"]), batch["y"]) * scale).backward()
        optimizer.step()

    return scaled


def planted(model):
    """Adam with second moments that its first step nearly cancels."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-6)
    backward(model, optimizer, batches()[0])
    for weight in model.parameters():
        optimizer.state[weight] = {
            "step": torch.tensor(5.0),
            "exp_avg": torch.zeros_like(weight),
            "exp_avg_sq": -0.001 / 0.999 * weight.grad.square() * (1 - 1e-4),
        }
    return optimizer


def test_a53_a_scale_of_the_loss_moves_weights_past_a_rate_and_the_rule_on_changes_sees_it(record, capsys, tmp_path):
    run = record(in_group(torch.optim.SGD), body=by_scale(1e6))
    assert under_rules(capsys, tmp_path, run, RATES)[0] == 0
    code, _, found = under_rules(capsys, tmp_path, run, CHANGES)
    assert (code, found["result"]) == (1, "fail")
    assert found["value"] > 1e4
    with off("changes measured"):
        assert under_rules(capsys, tmp_path, run, CHANGES)[0] == 0


def test_a53_moments_that_the_run_starts_with_are_seen_too(record, capsys, tmp_path):
    code, _, found = under_rules(capsys, tmp_path, record(planted), CHANGES)
    assert (code, found["result"]) == (1, "fail")


@pytest.mark.parametrize("optimizer", [torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad])
def test_a53_an_honest_normalised_class_changes_weights_by_few_rates(record, capsys, tmp_path, optimizer):
    code, _, found = under_rules(capsys, tmp_path, record(in_group(optimizer, lr=1e-3), steps=8), CHANGES)
    assert (code, found["result"]) == (0, "pass")
    assert 0.9 < found["value"] < 12


def test_a53_a_weight_that_moves_at_rate_0_leaves_the_rule_on_changes_open(record, capsys, tmp_path):
    def moved(model, optimizer, batch):
        body(model, optimizer, batch)
        with torch.no_grad():
            model[0].bias.clamp_(-0.01, 0.01)

    code, _, found = under_rules(capsys, tmp_path, record(in_group(torch.optim.SGD, lr=0.0), body=moved), CHANGES)
    assert (code, found["result"]) == (3, "undecided")
    assert found["text"].endswith("a weight changes where its rate is 0, or to what is no number")
