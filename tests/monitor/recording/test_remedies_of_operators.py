"""An operator that is refused has a way that is accepted: the one that its message gives."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from monitor import padded
from tests.monitor.recording.remedies import (
    NUMBERS,
    Own,
    embedding,
    follow,
    ids,
    loop,
    pairs,
    row,
    scaled,
    sgd,
    through,
    with_loss,
)


def log_of(rows):
    """A loop that evaluates with each batch, too, and does with what the model found what ``rows`` does."""

    def between(recorder, model, optimizer, batch):
        with recorder.evaluation(batch), torch.no_grad():
            rows(model(batch[0]))

    return loop(between=between)


CHUNKS = nn.LinearCrossEntropyOptions()


def cuts():
    return [(torch.randn(9, 6)[2:6], torch.randint(0, 3, (4,))) for _ in range(3)]


def lengths():
    return [(torch.randn(2, 6), torch.randn(3, 6)) for _ in range(3)]


def jagged(model, *parts):
    return model(torch.nested.nested_tensor(list(parts), layout=torch.jagged)).values().square().mean()


def rectangular(model, *parts):
    return model(torch.stack([padded(part, (3,), dim=0) for part in parts])).square().mean()


def bags(make):
    """A loop over an embedding bag."""

    def model():
        return nn.ModuleDict({"bag": make()})

    return with_loss(lambda m, x, y: functional.cross_entropy(m["bag"](x), y), model=model, batches=ids)


def attended(how):
    """A loop with attention by ``how(q, k, v)``."""

    def change(m, x, y):
        heads = x.view(1, 1, 4, 6)
        return functional.cross_entropy(m(how(heads, heads, heads).view(4, 6)), y)

    return with_loss(change)


def infinite(x):
    return torch.cat([x.flatten(), torch.tensor([float("inf")])])


OPERATORS = {
    "fused update": row(
        "build the optimizer with fused=False",
        loop(optimizer=lambda m: Own(m.parameters(), fused=True), free=NUMBERS),
        loop(optimizer=lambda m: Own(m.parameters(), fused=False), free=NUMBERS),
    ),
    "one tensor twice": row(
        "loop over the tensors instead",
        log_of(lambda out: torch._foreach_add_([out, out], 1)),
        log_of(lambda out: [out.add_(1) for _ in range(2)]),
    ),
    "kernels of oneDNN": row(
        "leave the layer's choice of kernels to the recorder",
        scaled(lambda x: x.to_mkldnn().to_dense()),
        scaled(lambda x: x * 1),
    ),
    "weights of a count": row(
        "weights; use float32",
        log_of(lambda out: torch.bincount(out.argmax(1), weights=out.half().sum(1))),
        log_of(lambda out: torch.bincount(out.argmax(1), weights=out.sum(1))),
    ),
    "mean of bools": row(
        "a mean of bools; convert them",
        log_of(lambda out: torch.zeros(3).bool().scatter_reduce(0, out.argmax(1), out[:, 0] > 0, "mean")),
        log_of(lambda out: torch.zeros(3).scatter_reduce(0, out.argmax(1), (out[:, 0] > 0).float(), "mean")),
    ),
    "histogram without bins": row(
        "a bin has two edges; give at least one bin",
        log_of(lambda out: torch.histogram(out, torch.zeros(1))),
        log_of(lambda out: torch.histogram(out, torch.linspace(-1, 1, 3))),
    ),
    "linear algebra": row(
        "use another factorisation: cholesky, lu, qr, eigh and svd of real matrices are supported",
        scaled(lambda x: torch.linalg.eigvals(x.t() @ x).abs()),
        scaled(lambda x: torch.linalg.eigvalsh(x.t() @ x)),
    ),
    "quantised": row(
        "round straight through in place of quantised operators: x + (x.round() - x).detach()",
        through(lambda h: torch.fake_quantize_per_tensor_affine(h, 0.1, 0, -128, 127)),
        through(lambda h: h + ((h * 10).round() / 10 - h).detach()),
    ),
    "loss in chunks": row(
        "call linear_cross_entropy with options=None, which takes the loss in one piece",
        with_loss(lambda m, x, y: functional.linear_cross_entropy(x, m.weight, y, options=CHUNKS)),
        with_loss(lambda m, x, y: functional.linear_cross_entropy(x, m.weight, y)),
    ),
    "gradient of a draw": row(
        "draw with sample() and train on log_prob: random draws of this kind have no gradient here",
        through(lambda h: torch.distributions.Gamma(h.exp(), 1.0).rsample()),
        through(lambda h: torch.distributions.Gamma(h.exp(), 1.0).log_prob(torch.tensor(1.5))),
    ),
    "batch cut out twice": row(
        "{} reads memory outside of what {} holds; slice the batch once, before the step, and use that tensor in it",
        with_loss(lambda m, x, y: functional.cross_entropy(m(x._base[2:6]), y), batches=cuts),
        with_loss(lambda m, x, y: functional.cross_entropy(m(x), y), batches=cuts),
    ),
    "nested": row(
        "pad the parts to one length (monitor.padded)",
        with_loss(jagged, batches=lengths),
        with_loss(rectangular, batches=lengths),
    ),
    "sparse": row(
        "use dense tensors; an embedding with sparse=False",
        loop(model=embedding(sparse=True), optimizer=lambda m: sgd(m, momentum=0.0), batches=ids),
        loop(model=embedding(sparse=False), optimizer=lambda m: sgd(m, momentum=0.0), batches=ids),
    ),
    "complex": row(
        "compute with real and imaginary parts as two real tensors",
        scaled(lambda x: torch.complex(x, -x).log().real),
        scaled(lambda x: (x.square() + x.square()).log() / 2),
    ),
    "conjugate as real numbers": row(
        "use resolve_conj() or resolve_neg() first",
        scaled(lambda x: torch.view_as_real(torch.complex(x, -x).conj()).sum(-1)),
        scaled(lambda x: torch.view_as_real(torch.complex(x, -x).conj().resolve_conj()).sum(-1)),
    ),
    "complex number as a number": row(
        "a complex number; make it a tensor by torch.complex first",
        scaled(lambda x: torch.add(x, x, alpha=1j).abs()),
        scaled(lambda x: (x + x * torch.complex(*torch.eye(2)[1])).abs()),
    ),
    "power of complex numbers": row(
        "a power of complex numbers; take a whole one up to 1024",
        scaled(lambda x: (torch.complex(x, x) ** 0.5).abs()),
        scaled(lambda x: (torch.complex(x, x) ** 2).abs()),
    ),
    "complex in double precision": row(
        "complex operands of type {}; use complex64",
        with_loss(
            lambda m, x, z, y: functional.cross_entropy(m(x), y) * (z * x.double()).abs().mean(),
            batches=lambda: [(x, torch.complex(x, x / 2), y) for x, y in pairs()],
        ),
        with_loss(
            lambda m, x, z, y: functional.cross_entropy(m(x), y) * (z * x).abs().mean(),
            batches=lambda: [(x, torch.complex(x, x / 2), y) for x, y in pairs()],
        ),
    ),
    "operator of operators": row(
        "write its operators as they are: torch.where or Python's if for torch.cond, "
        "scaled_dot_product_attention with a mask for flex_attention",
        through(lambda h: torch.cond(torch.tensor(True), lambda v: v * 2, lambda v: v * 3, (h,))),
        through(lambda h: torch.where(torch.tensor(True), h * 2, h * 3)),
        through(lambda h: h * 2 if True else h * 3),
        attended(lambda q, k, v: functional.scaled_dot_product_attention(q, k, v, torch.ones(4, 4).tril().bool())),
    ),
    "attention's kernel": row(
        "leave the choice of its kernel to the session, without sdpa_kernel",
        attended(lambda q, k, v: torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)[0]),
        attended(functional.scaled_dot_product_attention),
    ),
    "no values": row(
        "compute with tensors that have values, not on the meta device",
        scaled(lambda x: (torch.ones(3, device="meta") + 1, x)[1]),
        scaled(lambda x: (torch.ones(3) + 1, x)[1]),
    ),
    "any other": row(
        "compute it before the step and pass the result in the batch, or write it with other operators",
        scaled(torch.special.bessel_j0),
        with_loss(
            lambda m, x, y, z: functional.cross_entropy(m(x), y) * z.mean(),
            batches=lambda: [(x, y, torch.special.bessel_j0(x)) for x, y in pairs()],
        ),
        scaled(lambda x: 1 - x * x / 4 + x**4 / 64),
    ),
    "double": row(
        "{} operands; use float32, bfloat16 or float16",
        scaled(lambda x: x.double() @ x.double().t()),
        scaled(lambda x: x @ x.t()),
        scaled(lambda x: x.bfloat16() @ x.bfloat16().t()),
    ),
    "result of another type": row(
        "convert it afterwards",
        scaled(lambda x: torch.add(x.bfloat16(), 1, out=torch.empty(4, 6))),
        scaled(lambda x: torch.add(x.bfloat16(), 1, out=torch.empty(4, 6).bfloat16()).float()),
    ),
    "result that grows": row(
        "a tensor of out= that would have to grow; copy its result instead",
        scaled(lambda x: torch.msort(x, out=torch.empty(4, 6))),
        scaled(lambda x: torch.empty(4, 6).copy_(torch.msort(x))),
        scaled(lambda x: torch.sort(x, out=(torch.empty(4, 6), torch.empty(4, 6, dtype=torch.long)))[0]),
    ),
    "power of an integer": row(
        "convert the integer base to floating point first",
        scaled(lambda x: (x.argmax(1) + 1) ** -1.0),
        scaled(lambda x: (x.argmax(1) + 1).float() ** -1.0),
    ),
    "power of a number": row(
        "use a positive base and a floating-point exponent",
        scaled(lambda x: 2 ** x.argmax(1)),
        scaled(lambda x: 2.0 ** x.argmax(1).float()),
    ),
    "a high derivative of ψ": row(
        "order {}; use an order up to {}, or up to {} where backward() differentiates it",
        scaled(lambda x: torch.polygamma(7, x.detach().exp()) * x),
        scaled(lambda x: torch.polygamma(4, x.exp())),
    ),
    "a derivative of ψ whose own is too high": row(
        "order {}; use an order up to {}, or up to {} where backward() differentiates it",
        through(lambda x: torch.polygamma(6, x.exp())),
        through(lambda x: torch.polygamma(5, x.exp())),
    ),
    "a sparse window": row(
        "{}; make it dense and convert it",
        scaled(lambda x: torch.hann_window(6, layout=torch.sparse_coo).to_dense() * x),
        scaled(lambda x: torch.hann_window(6) * x),
    ),
    "a window in doubles": row(
        "{}; make it in float32 and convert it",
        scaled(lambda x: torch.hann_window(6, dtype=torch.float64) * x),
        scaled(lambda x: torch.hann_window(6).double() * x),
    ),
    "outside of a type": row(
        "clamp it first",
        scaled(lambda x: (x * 1000).to(torch.int8)),
        scaled(lambda x: (x * 1000).clamp(-128, 127).to(torch.int8)),
    ),
    "high degree": row(
        "degrees beyond {}; take lower ones",
        scaled(lambda x: torch.special.legendre_polynomial_p(x, 2000)),
        scaled(lambda x: torch.special.legendre_polynomial_p(x, 4)),
    ),
    "shift": row(
        "use it on integers only",
        scaled(lambda x: x >> 1),
        scaled(lambda x: x.argmax(1) >> 1),
    ),
    "remainder of doubles": row(
        "{} operands; use float32",
        scaled(lambda x: torch.fmod(x.double(), 2)),
        scaled(lambda x: torch.fmod(x, 2)),
    ),
    "doubles at equal distances": row(
        "{}; make it in float32 and convert it",
        scaled(lambda x: torch.linspace(0, 1, 6, dtype=torch.float64)),
        scaled(lambda x: torch.linspace(0, 1, 6).double()),
    ),
    "cast to complex": row(
        "{} to {}; use complex64",
        scaled(lambda x: x.to(torch.complex128).abs()),
        scaled(lambda x: x.to(torch.complex64).abs()),
    ),
    "histogram without ends": row(
        "the input has values that are not finite; give the operator min and max",
        scaled(lambda x: torch.histc(infinite(x), 4)),
        scaled(lambda x: torch.histc(infinite(x), 4, -2, 2)),
    ),
    "counts without ends": row(
        "limits that are not finite; give them",
        scaled(lambda x: torch.histogram(infinite(x), 4)[0]),
        scaled(lambda x: torch.histogram(infinite(x), 4, range=(-2.0, 2.0))[0]),
    ),
    "one limit": row(
        "give both limits",
        scaled(lambda x: torch.empty(4, dtype=torch.long).random_(2, None)),
        scaled(lambda x: torch.empty(4, dtype=torch.long).random_(2, 9)),
    ),
    "many integers": row(
        "{} values; between 1 and 2^31 are built",
        scaled(lambda x: torch.randint(0, 2**40, (4,))),
        scaled(lambda x: torch.randint(0, 2**31, (4,))),
    ),
    "gradients by frequency": row(
        "use scale_grad_by_freq=False",
        loop(model=embedding(scale_grad_by_freq=True), batches=ids),
        loop(model=embedding(scale_grad_by_freq=False), batches=ids),
    ),
    "bag by frequency": row(
        "use scale_grad_by_freq=False and sparse=False",
        bags(lambda: nn.EmbeddingBag(7, 3, scale_grad_by_freq=True)),
        bags(lambda: nn.EmbeddingBag(7, 3)),
    ),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested")
@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator_that_is_refused_has_a_way_that_is_accepted(tmp_path, devices, name):
    follow(OPERATORS[name], tmp_path, devices)
