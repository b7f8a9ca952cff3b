"""Direct paths: what the analysis names against what really changes when all gradients are zero."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from torch.nn import functional
from torch.utils._pytree import tree_flatten, tree_unflatten

from analysis.bench import battery_cases
from firmware_sim.errors import EvidenceError
from firmware_sim.evidence import canonical
from monitor.numerics import recording
from monitor.programs import direct_paths
from monitor.programs.calls import base_name
from monitor.programs.flows import flows
from monitor.programs.program import Program
from monitor.programs.zero import _FIRST_ALONE, _LIKE_FIRST, _PRODUCTS, _SOLVED
from tests.monitor.programs.tracing import declared_update, state_without_gradients, trace


def world():
    generator = torch.Generator().manual_seed(3)

    def made(*shape):
        return torch.randn(*shape, generator=generator)

    state = {
        "weight/w": made(3, 3).requires_grad_(),
        "weight/v": made(3).requires_grad_(),
        "buffer/b": made(3, 3),
        "optimizer/w/m": made(3, 3),
    }
    return state, {"x": made(3, 3), "y": made(3, 3)}


UNARY = (
    torch.tanh,
    torch.neg,
    torch.clone,
    lambda a: a.t(),
    lambda a: a.sum(0).expand(3, 3),
    lambda a: a.softmax(1),
    lambda a: a[1:2].expand(3, 3),
    lambda a: a.flip(0) * 0.5,
    lambda a: functional.layer_norm(a, (3,)),
    lambda a: a.cumsum(0),
    torch.zeros_like,
    lambda a: a + 1.0,
    lambda a: a.abs().sqrt(),
    lambda a: torch.stack(list(a.unbind(0)), 1),
    lambda a: a.norm() * torch.eye(3),
)
BINARY = (
    torch.add,
    torch.sub,
    torch.mul,
    torch.mm,
    torch.maximum,
    lambda a, b: torch.where(a > 0, a, b),
    lambda a, b: torch.where(a > 0, b, b * 2),
    lambda a, b: torch.addcmul(a, b, b),
    lambda a, b: a / (b.abs() + 1),
    lambda a, b: torch.lerp(a, b, 0.25),
    lambda a, b: torch.addmm(a, b, a),
    lambda a, b: torch.cat([a[:1], b[1:]]),
    lambda a, b: a.index_add(0, b.argmax(0), b),
    lambda a, b: a.gather(0, b.argsort(0)),
    lambda a, b: functional.embedding(b.argmax(0), a),
)
WRITES = (
    lambda t, a: t.copy_(a),
    lambda t, a: t.add_(a, alpha=-0.1),
    lambda t, a: t[:1].copy_(a[:1]),
    lambda t, a: t.view(-1)[2:5].add_(a.flatten()[:3]),
    lambda t, a: t.mul_(a),
    lambda t, a: t.addcdiv_(a, a.abs() + 1),
    lambda t, a: t.zero_(),
    lambda t, a: t.index_put_((torch.tensor([0, 2]),), a[:2], accumulate=True),
    lambda t, a: torch._foreach_add_([t], [a]),
)
STEPS = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 99), st.integers(0, 99), st.integers(0, 99)), min_size=1, max_size=8
)


def random_body(steps):
    """A step made of random operators, gradients of random losses, and writes to the state."""

    def body(state, batch):
        weight, vector = state["weight/w"], state["weight/v"]
        targets = [weight, state["buffer/b"], state["optimizer/w/m"]]
        pool = [*batch.values(), weight, state["buffer/b"], state["optimizer/w/m"]]
        for kind, which, one, two in steps:
            a, b = pool[one % len(pool)].detach(), pool[two % len(pool)].detach()
            if kind == 0:
                pool.append(UNARY[which % len(UNARY)](a))
            elif kind == 1:
                pool.append(BINARY[which % len(BINARY)](a, b))
            elif kind == 2:
                inner = BINARY[which % len(BINARY)](a, torch.tanh(weight + b) * vector)
                loss = (UNARY[one % 9](inner) * b).square().mean()
                if loss.requires_grad:
                    pool.append(torch.autograd.grad(loss, weight)[0])
            else:
                with torch.no_grad():
                    WRITES[which % len(WRITES)](targets[one % 3], b.clone())

    return body


@settings(max_examples=150, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
@given(STEPS)
def test_whatever_changes_the_state_without_gradients_is_named(steps):
    """150 random steps: a source that changes what a tensor becomes while all gradients are zero is on its list."""
    program = trace(random_body(steps), *world())
    found = flows(program)
    state, batch = world()
    before = state_without_gradients(program, state, batch)
    assume(all(tensor.isfinite().all() for tensor in before.values()))
    for kind, holder in (("state", state), ("batch", batch)):
        for source in holder:
            changed = {name: tensor.detach().clone() for name, tensor in holder.items()}
            changed[source] = changed[source] * -1.37 + 0.11
            after = state_without_gradients(
                program, changed if kind == "state" else state, changed if kind == "batch" else batch
            )
            for name, value in after.items():
                if not torch.equal(value, before[name]):
                    flow = found[name]
                    assert f"{kind}:{source}" in {*flow.direct, *flow.statistics}, (name, kind, source)


def paths_of(body, **more):
    state, batch = world()
    program = trace(body, state, {**batch, **more})
    return {(path.tensor, path.source) for path in direct_paths({program.digest: program}) if not path.statistic}


def train(state, batch, *, extra=lambda weight: 0.0):
    weight = state["weight/w"]
    loss = functional.cross_entropy(torch.tanh(batch["x"] @ weight) + state["buffer/b"], torch.tensor([0, 1, 2]))
    return torch.autograd.grad(loss + extra(weight), weight)[0]


def update(state, gradient):
    with declared_update():
        momentum = state["optimizer/w/m"].mul_(0.9).add_(gradient)
        state["weight/w"].addcdiv_(momentum, momentum.square().sqrt() + 1e-8, value=-0.1)


def honest(state, batch):
    gradient = train(state, batch)
    gradient.mul_((1.0 / (gradient.norm() + 1e-6)).clamp(max=1.0))
    update(state, gradient)
    state["buffer/b"].lerp_(state["weight/w"].detach(), 0.1)  # a moving average of the weights


def guarded(state, batch):
    gradient = train(state, batch)
    update(state, torch.where(gradient.isfinite(), gradient, torch.tensor(0.0)))


def penalised(state, batch):
    x = batch["x"].clone().requires_grad_()
    slope = torch.autograd.grad((x @ state["weight/w"]).tanh().sum(), x, create_graph=True)[0]
    update(state, torch.autograd.grad((slope.norm(dim=1) - 1).square().mean(), state["weight/w"])[0])


def linear(state, batch):
    update(state, torch.autograd.grad((state["weight/w"] * batch["x"]).sum(), state["weight/w"])[0])


def folded(state, batch):
    """Windows of what a product of the weight makes, as in soft splits of images."""
    image = (batch["x"] @ state["weight/w"]).tanh().expand(1, 1, -1, -1)
    windows = functional.unfold(image, 2, padding=1)
    whole = functional.fold(windows * windows, image.shape[2:], 2, padding=1)
    update(state, torch.autograd.grad(whole.square().sum(), state["weight/w"])[0])


@pytest.mark.parametrize("body", [honest, guarded, penalised, linear, folded])
def test_gradients_of_losses_are_no_direct_paths(body):
    assert paths_of(body) == set()


DATABASE = [
    *("linalg.cholesky", "cholesky_solve", "linalg.solve", "linalg.solve_triangular", "triangular_solve", "linalg.lu"),
    *("linalg.lu_solve", "linalg.qr", "linalg.svd", "linalg.eigh", "linalg.det", "linalg.inv", "linalg.cross", "put"),
    *("take", "masked_select", "combinations", "diagonal_scatter", "_unsafe_masked_index", "nn.functional.pad"),
    *("nn.functional.grid_sample", "nn.functional.max_unpool2d", "cummax", "kthvalue", "median", "mode", "nansum"),
    *("trace", "diag_embed", "rot90", "special.xlog1py", "renorm", "fft.rfft", "cdist"),
]


@pytest.mark.parametrize("name", DATABASE)
def test_a_loss_through_an_operator_of_pytorchs_database_is_no_direct_path(name):
    from torch.testing._internal.common_methods_invocations import op_db  # takes seconds

    checked = 0
    for entry in (each for each in op_db if each.name == name):
        for sample in list(entry.sample_inputs("cpu", torch.float32, requires_grad=True)):
            flat, form = tree_flatten((sample.input, sample.args, sample.kwargs))
            tensors = {i: each.detach().clone() for i, each in enumerate(flat) if isinstance(each, torch.Tensor)}
            first = next(i for i, each in enumerate(flat) if isinstance(each, torch.Tensor) and each.requires_grad)
            weight = tensors.pop(first)
            if not weight.numel() or checked == 3:
                continue

            def body(state, batch, entry=entry, flat=flat, form=form, first=first):
                torch.set_grad_enabled(True)
                given = [batch.get(f"{i}", each) for i, each in enumerate(flat)]
                given[first] = state["weight/w"] * batch["times"]
                value, args, keywords = tree_unflatten(given, form)
                made = tree_flatten(entry(value, *args, **keywords))[0]
                losses = [each.abs().square().mean() for each in made if torch.is_tensor(each) and each.requires_grad]
                total: Any = sum(losses)
                (slope,) = torch.autograd.grad(total, state["weight/w"])
                with declared_update():
                    state["weight/w"].data.sub_(slope * 0.1)

            state = {"weight/w": weight.requires_grad_()}
            batch = {f"{i}": each for i, each in tensors.items()} | {"times": torch.ones_like(weight.detach())}
            program = trace(body, state, batch)
            assert [path for path in direct_paths({program.digest: program}) if not path.is_harmless] == []
            checked += 1
    assert checked


DELIVERIES = {
    "copied": lambda state, batch: state["weight/w"].data.copy_(batch["x"]),
    "one row": lambda state, batch: state["weight/w"].data[1].copy_(batch["x"][0]),
    "scaled and added": lambda state, batch: state["weight/w"].data.add_(batch["x"] * 1e-3),
    "selected": lambda state, batch: state["weight/w"].data.copy_(torch.where(batch["x"] > 0, 1.0, -1.0)),
    "beside a gradient": lambda state, batch: update(state, train(state, batch) + batch["x"]),
    "times a gradient and one": lambda state, batch: state["weight/w"].data.copy_(
        batch["x"] * (train(state, batch) + 1)
    ),
    "as the seed": lambda state, batch: update(
        state, torch.autograd.grad(state["weight/w"] * 1.0, state["weight/w"], batch["x"])[0]
    ),
}


@pytest.mark.parametrize("name", DELIVERIES)
def test_deliveries_are_direct_paths(name):
    def body(state, batch):
        with torch.enable_grad():
            DELIVERIES[name](state, batch)

    assert ("weight/w", "batch:x") in paths_of(body)


def test_a_batch_in_place_of_a_weight_is_a_direct_path():
    assert ("weight/w", "batch:x") in paths_of(lambda state, batch: {"weight/w": batch["x"]})


def test_a_constant_of_several_values_is_a_source_and_a_uniform_one_is_a_number():
    model, number = torch.randn(3, 3), torch.full((3, 3), 0.5)
    assert paths_of(lambda state, batch: state["buffer/b"].copy_(model)) == {("buffer/b", "constant:0")}
    assert paths_of(lambda state, batch: state["buffer/b"].copy_(number)) == set()


def test_a_zero_among_the_numbers_vanishes_unless_steps_may_change_it():
    """A gradient clipped from below chooses between itself and zero, by a mask that the batch decides."""

    def body(state, batch):
        weight = state["weight/w"]
        loss = (weight @ batch["x"]).clamp_min(0.25).sum()
        (slope,) = torch.autograd.grad(loss, weight)
        with declared_update():
            weight.sub_(slope * 0.1)

    program = trace(body, *world())
    assert "aten.scalar_tensor.default" in {call["operator"] for call in program.calls}
    programs = {program.digest: program}
    assert direct_paths(programs) == []
    free = direct_paths(programs, free=[program.digest])
    assert ("weight/w", "batch:x") in {(path.tensor, path.source) for path in free}

    def other(state, batch):
        with torch.no_grad():
            state["weight/w"].copy_(torch.where(batch["x"] > 0, state["weight/w"], 0.5))

    assert ("weight/w", "batch:x") in paths_of(other)


def test_a_path_may_take_several_steps():
    state, batch = world()
    keep = trace(lambda state, batch: state["buffer/b"].copy_(batch["x"]), state, batch)
    state, batch = world()
    use = trace(lambda state, batch: state["weight/w"].data.copy_(state["buffer/b"]), state, batch)
    both = direct_paths({program.digest: program for program in (keep, use)})
    assert {(path.tensor, path.source) for path in both} == {
        ("buffer/b", "batch:x"),
        ("weight/w", "state:buffer/b"),
    }
    assert direct_paths({use.digest: use}) == []


def test_a_path_names_its_program_and_the_operator_that_writes():
    program = trace(lambda state, batch: state["buffer/b"].copy_(batch["x"] * 2.0), *world())
    (path,) = direct_paths({program.digest: program})
    assert (path.program, path.operator, path.call) == (program.digest, "aten.copy_.default", 1)


@pytest.mark.parametrize("change", ["offset", "view"])
def test_memory_that_is_not_a_calls_own_is_refused(change):
    program = trace(lambda state, batch: state["buffer/b"].t().copy_(batch["x"].t()), *world())
    raw = canonical.decode(program.encoded)
    place = raw["calls"][-1]["sources"][0]
    if change == "offset":
        place["offset"] = 3
    else:
        place["source"] = "node:0:0"
    text = "reaches beyond the memory" if change == "offset" else "names a view"
    with pytest.raises(EvidenceError, match=text):
        flows(Program.decode(canonical.encode(raw)))


class _Kept:
    """Keeps one call of each operator that is said to vanish with a tensor."""

    def __init__(self):
        self.calls = {}

    def before(self, index, func, args, kwargs):
        name = base_name(str(func))
        tensors = [value for value in args if isinstance(value, torch.Tensor)]
        vanishes = "_backward" in name or name in _LIKE_FIRST | _PRODUCTS | _SOLVED
        if vanishes and tensors and tensors[0].is_floating_point() and not func._schema.is_mutable:
            self.calls.setdefault(str(func), (func, [_tame(value) for value in args], dict(kwargs)))

    def after(self, index, func, args, kwargs, out):
        """Nothing to see."""


def _tame(value):
    if isinstance(value, torch.Tensor):
        value = value.detach().clone()
        return value.nan_to_num(1.0, 1.0, 1.0).clamp(-2, 2) if value.is_floating_point() else value
    return [_tame(each) for each in value] if isinstance(value, list | tuple) else value


def test_operators_that_are_said_to_vanish_with_their_first_tensor_do():
    """On the battery's inputs, without infinities: the first tensor is replaced by zeros."""
    kept = _Kept()
    for case in battery_cases.cases():
        with recording("native", observer=kept):
            case()
    assert len(kept.calls) > 150
    with torch.no_grad():
        for name, (func, args, kwargs) in kept.calls.items():
            names = [argument.name for argument in func._schema.arguments]
            first = next(number for number, value in enumerate(args) if isinstance(value, torch.Tensor))
            first = names.index("B") if base_name(name) in _SOLVED else first
            args[first] = torch.zeros_like(args[first])
            out = func(*args, **kwargs)
            found = out if isinstance(out, list | tuple) else [out]
            for tensor in found[:1] if base_name(name) in _FIRST_ALONE else found:
                if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
                    assert not tensor.nan_to_num(0.0).any(), name
