"""A dry run of anything that a loop may hold ends with refusals that say what to write, never with its own error."""

from __future__ import annotations

import re
import warnings

import pytest
import torch
from torch import nn

from firmware_sim.errors import CallerError
from monitor import Recorder, RunConfig
from monitor.recording.rehearsal import rehearsals

X = torch.arange(20.0).reshape(5, 4) / 20


def update(model, optimizer, loss):
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def parts():
    return [torch.ones(2, 4), torch.ones(3, 4)]


def linear():
    return nn.Linear(4, 3)


ODD = {
    "jagged tensors": (
        linear,
        parts(),
        lambda m, o, b, s: update(m, o, m(torch.nested.nested_tensor(b, layout=torch.jagged)).values().sum()),
        "monitor.padded",
    ),
    "nested tensors": (
        linear,
        parts(),
        lambda m, o, b, s: update(m, o, torch.nested.to_padded_tensor(m(torch.nested.nested_tensor(b)), 0.0).sum()),
        "monitor.padded",
    ),
    "sparse products": (
        linear,
        X,
        lambda m, o, b, s: update(m, o, torch.sparse.mm(b.to_sparse(), m.weight.t()).sum()),
        "use dense tensors",
    ),
    "sparse gradients": (
        lambda: nn.Embedding(7, 4, sparse=True),
        torch.tensor([1, 2]),
        lambda m, o, b, s: update(m, o, m(b).sum()),
        "keep it dense|sparse=False",
    ),
    "no values": (
        linear,
        X,
        lambda m, o, b, s: (torch.ones(3, device="meta") + 1, update(m, o, m(b).sum())),
        "tensors that have values",
    ),
    "operators of operators": (
        linear,
        X,
        lambda m, o, b, s: update(m, o, torch.cond(torch.tensor(True), lambda v: v * 2, lambda v: v, (m(b),)).sum()),
        "torch.where or Python's if for torch.cond",
    ),
    "loss in FP64": (linear, X, lambda m, o, b, s: s.commit(loss=m(b).sum().double()), r"commit loss\.float\(\)"),
    "loss as a number": (linear, X, lambda m, o, b, s: s.commit(loss=m(b).sum().item()), r"before \.item\(\)"),
    "no shapes yet": (lambda: nn.LazyLinear(3), X, lambda m, o, b, s: m(b), "call the model on a batch before"),
}


def record(model, batch, body, **options):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    recorder = Recorder(model, optimizer, chips=1, **options)
    for _ in range(2):
        with recorder.step(batch) as step:
            body(model, optimizer, batch, step)
    recorder.finish()


@pytest.mark.parametrize("is_dry", [True, False])
@pytest.mark.parametrize("name", ODD)
def test_what_no_step_can_hold_is_refused_with_what_to_write(tmp_path, name, is_dry):
    made, batch, body, remedy = ODD[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch calls some of this new
        with pytest.raises(CallerError) as refused:
            record(made(), batch, body, out=tmp_path / "run", dry_run=is_dry)
    assert re.search(remedy, str(refused.value))
    assert "no recorded operator" not in str(refused.value)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("is_dry", [True, False])
def test_a_loss_in_half_precision_is_committed_in_fp32(tmp_path, dtype, is_dry):
    torch.manual_seed(0)
    model = linear().to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    recorder = Recorder(model, optimizer, out=tmp_path / "run", chips=1, dry_run=is_dry, check_writes="every")
    with recorder.step(X.to(dtype)) as step:
        loss = model(X.to(dtype)).square().mean()
        update(model, optimizer, loss)
        step.commit(loss=loss)
    recorder.finish()


def test_the_cost_of_a_step_is_known_where_native_kernels_lay_their_results_out_otherwise(tmp_path):
    """PyTorch's softmax of a transposed tensor keeps the transposed layout, and a controlled one does not."""
    model = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with rehearsals() as found:
        recorder = Recorder(model, optimizer, out=tmp_path / "run", chips=1)
        with recorder.step(X):
            update(model, optimizer, model(X).t().log_softmax(-1).exp().square().sum())
        recorder.finish()
    cost = found.made[0].overview().cost
    assert cost is not None
    assert cost.native > 0


@pytest.mark.parametrize("is_dry", [True, False])
def test_a_validation_between_steps_is_refused_at_its_line(tmp_path, is_dry):
    torch.manual_seed(0)
    model, batch = nn.Linear(4, 3), torch.randn(5, 4)
    many = torch.randn(40_000, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    recorder = Recorder(model, optimizer, out=tmp_path / "run", chips=1, dry_run=is_dry)

    def train():
        for _ in range(2):
            with recorder.step(batch):
                update(model, optimizer, model(batch).square().mean())
            with torch.no_grad():
                model(many)
                model(many)
        recorder.finish()

    with pytest.raises(CallerError, match=r"exceeds the work allowed on the state.*recorder\.evaluation"):
        train()


def test_small_reads_between_steps_add_up_from_one_step_to_the_next_alone(tmp_path):
    """As many norms after each of many steps are together more than may run between two of them."""
    model, batch = nn.Linear(4, 3), X
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    recorder = Recorder(model, optimizer, out=tmp_path / "run", chips=1, dry_run=True)
    read = torch.ones(30_000, 4)
    for _ in range(4):
        with recorder.step(batch):
            update(model, optimizer, model(batch).square().mean())
        with torch.no_grad():
            (read @ model.weight.t()[:, :1]).sum().item()
    recorder.finish()


@pytest.mark.parametrize("is_evaluation", [False, True])
def test_inference_mode_records_what_no_grad_does(tmp_path, is_evaluation):
    """In it PyTorch hands operators over that it has not taken apart."""

    def programs(mode):
        torch.manual_seed(0)
        teacher, model = nn.Sequential(nn.Linear(4, 3), nn.GELU()), nn.Linear(4, 3)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        given = {"chips": 1, "seed": 1, "numerics": "exact", "out": tmp_path / mode.__name__, "check_writes": "every"}
        recorder = Recorder(model, optimizer, **given)
        with recorder.step(X):
            with torch.no_grad() if is_evaluation else mode():
                target = teacher(X).softmax(-1).double().float()
            update(model, optimizer, (model(X) - target).square().mean())
        if is_evaluation:
            model.eval()
            with recorder.evaluation(X), mode():
                model(X).log_softmax(-1).mean()
        recorder.finish()
        return sorted(each.name for each in (tmp_path / mode.__name__ / "programs").iterdir())

    assert programs(torch.inference_mode) == programs(torch.no_grad)


LAYERS = nn.GRU(4, 5, 2, dropout=0.5)


def kept_by_dropout(x):
    scores = x * 2
    kept = nn.functional.dropout(scores, 0.5, training=False)
    kept += 1
    return scores


OF_INFERENCE = {
    "dropout returns its input": kept_by_dropout,
    "layers drop between them": lambda x: LAYERS(x)[0],
    "a constant": lambda x: x * torch.tensor([1.0, 2.0, 3.0, 4.0]),
    "classes": lambda x: nn.functional.one_hot(x.argmax(1), 4) * x,
    "resampled": lambda x: nn.functional.interpolate(x[None, None], scale_factor=1.7, mode="bilinear"),
    "written": lambda x: x.clone().detach_().mul_(2),
}


@pytest.mark.parametrize("name", OF_INFERENCE)
def test_inference_mode_takes_operators_apart_as_no_grad_does(tmp_path, name):
    """What compilers take them apart into differs: a dropout that copies, layers that drop nothing, other values."""

    def recorded(mode):
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        out = tmp_path / mode.__name__
        run = RunConfig(numerics="exact", seed=1, check_writes="every")
        recorder = Recorder(model, optimizer, out=out, state=[LAYERS], chips=1, run=run)
        with recorder.step(X):
            with mode():
                target = OF_INFERENCE[name](X).clone()
            update(model, optimizer, (model(X).sum() - target.sum()).square())
        recorder.finish()
        return target, sorted(each.name for each in (out / "programs").iterdir())

    (ours, programs), (theirs, wanted) = recorded(torch.inference_mode), recorded(torch.no_grad)
    assert torch.equal(ours, theirs)
    assert ours.any()
    assert programs == wanted


def test_check_measures_no_cost_where_native_operators_return_other_tensors(tmp_path):
    model = nn.EmbeddingBag(7, 3, mode="mean")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    rows = torch.randint(0, 7, (4, 2))
    with rehearsals() as found:
        recorder = Recorder(model, optimizer, out=tmp_path / "run", chips=1)
        for _ in range(2):
            with recorder.step(rows):
                update(model, optimizer, model(rows).square().mean())
    assert not recorder.refusals
    assert found.made[0].overview().cost is None


def test_an_operator_of_an_evaluation_is_refused_once(tmp_path):
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    recorder = Recorder(model, optimizer, out=tmp_path / "run", chips=1, dry_run=True)
    for _ in range(2):
        with recorder.step(X):
            update(model, optimizer, model(X).square().mean())
        with recorder.evaluation(X), torch.no_grad():
            torch.poisson(model(X).abs())
    assert [each.operator for each in recorder.refusals] == ["aten.poisson.default"]


def test_an_inverse_transform_in_an_evaluation_takes_no_derivative(tmp_path):
    """It adds stretches that overlap by an operator that PyTorch calls ``unfold_backward``."""
    model, window = nn.Linear(9, 9), torch.hann_window(16)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    recorder = Recorder(model, optimizer, out=tmp_path / "run", chips=1, dry_run=True)
    x = torch.rand(2, 64)

    def masked():
        spectrum = torch.stft(x, 16, 4, window=window, return_complex=True)
        mask = model(spectrum.abs().transpose(1, 2)).transpose(1, 2).sigmoid()
        return torch.istft(spectrum * mask, 16, 4, window=window, length=64)

    with recorder.step((x, window)):
        update(model, optimizer, (masked() - x).square().mean())
    with recorder.evaluation((x, window)), torch.no_grad():
        masked()
    recorder.finish()
    assert not recorder.refusals
