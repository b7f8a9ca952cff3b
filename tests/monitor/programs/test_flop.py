"""FLOP of programs: honest steps count what PyTorch's own counter finds, products in disguise at least as much."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from monitor.presets import PRESETS
from monitor.presets.task import Task
from monitor.programs import compute_of
from monitor.programs.flop import counted as counted_call
from monitor.replay.derivation import derive
from tests.measurements._honest_models import MODELS
from tests.monitor.programs.tracing import trace

SIZES = st.integers(2, 6)


def computed(body, weight, **batch):
    """What the forward pass of ``body(weight, batch)`` and its gradient compute."""

    def step(state, given):
        loss = body(state["weight/w"], given).square().sum()
        return {"gradient/w": torch.autograd.grad(loss, state["weight/w"])[0].resolve_conj()}

    return compute_of(trace(step, {"weight/w": weight.requires_grad_(), "gradient/w": torch.zeros_like(weight)}, batch))


def counted(body, weight, **batch):
    """Its FLOP in products."""
    return computed(body, weight, **batch).flop


def blocks(x, w):
    """[[1, x, 0], [0, 1, w], [0, 0, 1]], whose inverse and square have x·w in a corner."""
    (rows, inner), columns = x.shape, w.shape[1]
    top = torch.cat([torch.eye(rows), x, torch.zeros(rows, columns)], 1)
    middle = torch.cat([torch.zeros(inner, rows), torch.eye(inner), w], 1)
    low = torch.cat([torch.zeros(columns, rows + inner), torch.eye(columns)], 1)
    return torch.cat([top, middle, low])


def corner(found, x, w):
    return found[: len(x), -w.shape[1] :]


def by_place(x, w):
    terms = (x[:, :, None] * w).transpose(1, 2).reshape(-1)
    places = torch.arange(len(x) * w.shape[1]).repeat_interleave(x.shape[1])
    return torch.zeros(len(x) * w.shape[1]).scatter_reduce(0, places, terms, "sum").view(len(x), -1)


def bag(x, w):
    """Sums of rows of a table are a product with it."""
    rows, inner = x.shape
    places, begins = torch.arange(inner).repeat(rows), torch.arange(rows) * inner
    return nn.functional.embedding_bag(places, w, begins, mode="sum", per_sample_weights=x.flatten())


def logarithms(x, w):
    return x[:, :, None].abs().log() + w.abs().log()


def by_place_in_large(x, w):
    terms = (x[:, :, None] * w).transpose(1, 2).reshape(-1)
    places = torch.arange(len(x) * w.shape[1]).repeat_interleave(x.shape[1])
    return torch.zeros_like(terms).scatter_add(0, places, terms)[: len(x) * w.shape[1]].view(len(x), -1)


def windows(x, w):
    inner = x.shape[1]
    terms = (x[:, :, None] * w).transpose(1, 2)
    return nn.functional.avg_pool2d(terms[:, :, None], (1, 2 * inner - 1), 1, (0, inner - 1))[:, :, 0, 0] * (
        2 * inner - 1
    )


def listed(x, w):
    """Each list has one tensor; nothing says that those of an operator on lists are spread less."""
    terms = torch._foreach_mul([x[:, :, None]], [w])
    return torch._foreach_mul(terms, 1.0)[0].sum(1)


def norms_of_list(x, w):
    (terms,) = torch._foreach_mul([x.abs().sqrt()[:, :, None]], [w.abs().sqrt()])
    lengths = torch._foreach_norm([terms[i, :, j] for i in range(len(x)) for j in range(w.shape[1])])
    return torch.stack(lengths).square().view(len(x), -1)


DISGUISES = {
    "bags": bag,
    "running products": lambda x, w: (x[:, :, None] * w).exp().cumprod(1)[:, -1].log(),
    "softmax": lambda x, w: torch.exp(logarithms(x, w) - logarithms(x, w).log_softmax(1))[:, 0],
    "by place, in room enough": by_place_in_large,
    "windows": windows,
    "a list": listed,
    "norms of a list": norms_of_list,
    "scaled to a norm": lambda x, w: torch.renorm((x[:, :, None] * w).transpose(1, 2).flatten(0, 1), 2, 0, 1e-3),
    "least squares": lambda x, w: (
        torch.linalg.lstsq(
            torch.cat([torch.eye(x.shape[0]), x.t()]).detach(), torch.cat([torch.zeros(x.shape[0], w.shape[1]), w])
        ).solution
    ),
    "inverse": lambda x, w: corner(torch.linalg.inv(blocks(x, w)), x, w),
    "solution": lambda x, w: corner(torch.linalg.solve(blocks(x, w), torch.eye(sum(x.shape) + w.shape[1])), x, w),
    "triangle": lambda x, w: corner(
        torch.linalg.solve_triangular(blocks(x, w), torch.eye(sum(x.shape) + w.shape[1]), upper=True), x, w
    ),
    "exponential": lambda x, w: 2 * corner(torch.matrix_exp(blocks(x, w) - torch.eye(sum(x.shape) + w.shape[1])), x, w),
    "distances": lambda x, w: (torch.cdist(x, -w.t()).square() - torch.cdist(x, w.t()).square()) / 4,
    "a sum of products": lambda x, w: torch.addbmm(torch.zeros(len(x), w.shape[1]), x.t().unsqueeze(2), w.unsqueeze(1)),
    "bilinear": lambda x, w: nn.functional.bilinear(x, torch.ones(len(x), 1), w.t().unsqueeze(2)),
    "by place": by_place,
    "running logarithms": lambda x, w: logarithms(x, w).logcumsumexp(1)[:, -1].exp(),
    "sum": lambda x, w: (x[:, :, None] * w).sum(1),
    "mean": lambda x, w: (x[:, :, None] * w).mean(1) * x.shape[1],
    "sum of all and views": lambda x, w: (x[:, None] * w.t()).flatten(0, 1).sum(1).view(x.shape[0], -1),
    "running sum": lambda x, w: (x[:, :, None] * w).cumsum(1)[:, -1],
    "copies": lambda x, w: (x[:, :, None].repeat(1, 1, w.shape[1]) * w.expand(x.shape[0], -1, -1).clone()).sum(1),
    "times ones": lambda x, w: ((x[:, :, None] * torch.ones(1, 1, w.shape[1])) * w).sum(1),
    "squares": lambda x, w: ((x[:, :, None] + w).square() - (x[:, :, None] - w).square()).sum(1) / 4,
    "logarithms": lambda x, w: logarithms(x, w).exp().sum(1),
    "norm": lambda x, w: (x[:, :, None] * w).norm(dim=1),
    "einsum": lambda x, w: torch.einsum("bk,kn->bn", x, w),
    "vectors": lambda x, w: torch.stack([x @ w[:, column] for column in range(w.shape[1])], 1),
}


@settings(max_examples=8, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
@given(SIZES, SIZES, SIZES)
@pytest.mark.parametrize("disguise", DISGUISES)
def test_a_product_in_disguise_counts_at_least_as_much_as_the_product(disguise, rows, inner, columns):
    x, w = torch.randn(rows, inner), torch.randn(inner, columns)
    plain = counted(lambda w, batch: batch["x"] @ w, w.clone(), x=x)
    assert plain == 2 * 2 * rows * inner * columns
    assert counted(lambda w, batch: DISGUISES[disguise](batch["x"], w), w.clone(), x=x) >= plain


def forward(body, w, x):
    """What a program without a backward pass counts."""

    def step(state, batch):
        return {"buffer/out": body(batch["x"], state["weight/w"])}

    state = {"weight/w": w, "buffer/out": torch.zeros(len(x), w.shape[1])}
    return compute_of(trace(step, state, {"x": x})).flop


@pytest.mark.parametrize("disguise", DISGUISES)
def test_a_product_in_disguise_counts_without_its_gradient_too(disguise):
    x, w = torch.randn(4, 5), torch.randn(5, 3)
    assert forward(DISGUISES[disguise], w, x) >= forward(torch.matmul, w, x) == 2 * 4 * 5 * 3


UNROLLED = {
    "column by column": lambda x, w: torch.stack([(x * w[:, column]).sum(1) for column in range(w.shape[1])], 1),
    "outer products": lambda x, w: sum(x[:, k, None] * w[k] for k in range(w.shape[0])),
    "copies of rows": lambda x, w: torch.stack([(x.clone() * w.t()[column].clone()).sum(1) for column in range(8)], 1),
}


@pytest.mark.parametrize("disguise", UNROLLED)
def test_a_product_written_call_by_call_counts_like_the_product(disguise):
    x, w = torch.randn(8, 8), torch.randn(8, 8)
    assert counted(lambda w, batch: UNROLLED[disguise](batch["x"], w), w, x=x) >= 2 * 2 * 8**3


def test_a_product_written_element_by_element_counts_too():
    """Forward; backward it is a sum of vectors times numbers, which shows as elementwise work only."""
    x, w = torch.randn(8, 8), torch.randn(8, 8)

    def dots(w, batch):
        return torch.stack([torch.stack([(row * w[:, column]).sum() for column in range(8)]) for row in batch["x"]])

    assert counted(dots, w, x=x) >= 2 * 8**3


def test_a_product_with_a_vector_counts():
    x, w = torch.randn(1, 8), torch.randn(8, 8)
    assert counted(lambda w, batch: (batch["x"][:, None, :] * w.t()).sum(2), w, x=x) >= 2 * 8**2


@pytest.mark.parametrize("disguise", [*DISGUISES, *UNROLLED])
def test_elementwise_work_is_at_least_that_of_a_product_that_no_rule_sees(disguise):
    """With one sample, each weight takes part in one term, as in a gate: only the elements computed tell."""
    x, w = torch.randn(1, 8), torch.randn(8, 8)
    plain = counted(lambda w, batch: batch["x"] @ w, w.clone(), x=x)
    body = {**DISGUISES, **UNROLLED}[disguise]
    assert computed(lambda w, batch: body(batch["x"], w), w.clone(), x=x).most >= plain


ELEMENTWISE = {
    "gate": lambda x, w: x * w[0],
    "norm by hand": lambda x, w: x / (x.square().mean(1, keepdim=True) + 1e-6).sqrt() * w[0],
    "centred norm by hand": lambda x, w: (
        (x - x.mean(1, keepdim=True)) * (x.var(1, keepdim=True) + 1e-6).rsqrt() * w[0] + w[1]
    ),
    "outer product that nobody sums": lambda x, w: (x[:4, 0, None] * x[1]).tanh() @ w,
    "table of positions": lambda x, w: x[:4] + w.flatten()[:4, None].expand(4, x.shape[1]) * 0.5,
}


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise_work_counts_what_pytorch_counts(name):
    x, w = torch.randn(6, 4), torch.randn(4, 4).requires_grad_()
    with FlopCounterMode(display=False) as counter:
        ELEMENTWISE[name](x, w).square().sum().backward()
    assert counted(lambda w, batch: ELEMENTWISE[name](batch["x"], w), w.detach().clone(), x=x) == (
        counter.get_total_flops()
    )


def step_of(model, loss, batch):
    """The program of one step of AdamW with clipped gradients."""
    state = {f"weight/{name}": parameter for name, parameter in model.named_parameters()}
    state |= {f"buffer/{name}": buffer for name, buffer in model.named_buffers()}
    optimizer = torch.optim.AdamW(model.parameters())

    def body(*_):
        loss(model, batch).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return trace(body, state, batch)


@pytest.mark.parametrize("name", MODELS)
def test_honest_models_count_what_pytorch_counts(name):
    torch.manual_seed(0)
    model = MODELS[name]
    program = step_of(model.make(), model.loss, model.batch(3, torch.Generator().manual_seed(0)))
    assert compute_of(program).flop == sum(counted_call(call) or 0 for call in program.calls) > 0


@pytest.mark.parametrize("name", PRESETS)
def test_presets_count_what_pytorch_counts(name):
    program = derive(Task.for_preset(name, seed=0, steps=1)).program
    assert compute_of(program).flop == sum(counted_call(call) or 0 for call in program.calls) > 0


def test_operators_that_count_no_flop_are_counted_as_elements():
    program = trace(lambda state, batch: state["weight/w"].data.mul_(2.0).add_(1.0), {"weight/w": torch.ones(5)}, {})
    assert (compute_of(program).flop, compute_of(program).elementwise) == (0, 10)


COMPLEX_DISGUISES = {
    "spread": lambda z, w: torch.view_as_real((z[:, :, None] * w).sum(1)),
    "spread and conjugated": lambda z, w: torch.view_as_real((z.conj()[:, :, None] * w.conj()).sum(1)),
    "parts": lambda z, w: (
        (z.real[:, :, None] * w.real - z.imag[:, :, None] * w.imag).sum(1)
        + (z.real[:, :, None] * w.imag + z.imag[:, :, None] * w.real).sum(1)
    ),
    "row by row": lambda z, w: torch.view_as_real(torch.stack([row @ w for row in z])),
}


@pytest.mark.parametrize("disguise", COMPLEX_DISGUISES)
def test_a_complex_product_counts_as_four_real_ones_however_it_is_written(disguise):
    rows, inner, columns = 3, 4, 5
    z, w = torch.ones(rows, inner, dtype=torch.complex64), torch.ones(inner, columns, dtype=torch.complex64)
    product = counted(lambda w, batch: torch.view_as_real(batch["z"] @ w), w.clone(), z=z)
    assert product == 2 * 8 * rows * inner * columns
    assert counted(lambda w, batch: COMPLEX_DISGUISES[disguise](batch["z"], w), w.clone(), z=z) >= product
