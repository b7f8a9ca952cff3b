"""Each controlled operator against native FP64 on the same step, forward and backward; refusals by name."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from typing import Any, cast

import mpmath
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parametrizations

from firmware_sim.errors import CallerError
from monitor.numerics import UnsupportedOperator, execute, recording
from monitor.numerics.operators.compositions import rms_norm
from monitor.numerics.operators.lookup import overload_named
from monitor.numerics.operators.table import operator_table

Function = Callable[[Tensor], Tensor]

MODULES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(6, 5), (4, 6)),
    "conv1d": (lambda: nn.Conv1d(4, 6, 3, padding=1), (2, 4, 9)),
    "conv2d-plain": (lambda: nn.Conv2d(4, 6, 3), (2, 4, 8, 8)),
    "conv2d-strided": (lambda: nn.Conv2d(4, 6, 3, stride=2, padding=1), (2, 4, 9, 8)),
    "conv2d-uneven": (lambda: nn.Conv2d(4, 6, (3, 2), stride=(2, 3), padding=(1, 0)), (2, 4, 10, 11)),
    "conv2d-dilated": (lambda: nn.Conv2d(4, 6, 3, dilation=2, padding=2), (2, 4, 8, 8)),
    "conv2d-groups": (lambda: nn.Conv2d(4, 8, 3, groups=2, padding=1), (2, 4, 8, 8)),
    "conv2d-depthwise": (lambda: nn.Conv2d(4, 4, 3, groups=4, padding=1, bias=False), (2, 4, 8, 8)),
    "conv2d-point": (lambda: nn.Conv2d(4, 6, 1, stride=2), (2, 4, 8, 8)),
    "conv-transposed": (lambda: nn.ConvTranspose2d(4, 6, 3, stride=2, output_padding=1, groups=2), (2, 4, 5, 5)),
    "layer-norm": (lambda: nn.LayerNorm((3, 6)), (4, 3, 6)),
    "rms-norm": (lambda: nn.RMSNorm(6), (4, 6)),
    "group-norm": (lambda: nn.GroupNorm(2, 4), (3, 4, 5, 5)),
    "batch-norm": (lambda: nn.BatchNorm2d(4), (3, 4, 5, 5)),
    "batch-norm-evaluation": (lambda: nn.BatchNorm1d(6).eval(), (4, 6)),
    "max-pool": (lambda: nn.MaxPool2d(3, 2, 1), (2, 3, 9, 9)),
    "avg-pool": (lambda: nn.AvgPool2d(3, 2, 1), (2, 3, 9, 9)),
    "avg-pool-inside": (lambda: nn.AvgPool2d(3, 2, 1, count_include_pad=False), (2, 3, 9, 9)),
    "adaptive-pool": (lambda: nn.AdaptiveAvgPool2d((2, 3)), (2, 3, 7, 8)),
    "global-pool": (lambda: nn.AdaptiveAvgPool2d(1), (2, 3, 7, 8)),
    "conv3d": (lambda: nn.Conv3d(4, 6, 3, padding=1), (2, 4, 4, 5, 4)),
    "conv3d-uneven": (
        lambda: nn.Conv3d(4, 6, (2, 3, 2), stride=(1, 2, 3), padding=(0, 2, 1), dilation=(1, 1, 2), groups=2),
        (2, 4, 4, 6, 7),
    ),
    "conv3d-transposed": (
        lambda: nn.ConvTranspose3d(4, 6, (2, 3, 2), stride=2, padding=1, output_padding=1, groups=2),
        (2, 4, 3, 3, 2),
    ),
    "max-pool-3d": (lambda: nn.MaxPool3d(2, 2, 1), (2, 3, 5, 5, 4)),
    "avg-pool-3d": (lambda: nn.AvgPool3d((2, 3, 2), 2, 1), (2, 3, 5, 6, 4)),
    "avg-pool-1d": (lambda: nn.AvgPool1d(3, 2, 1), (2, 3, 9)),
    "avg-pool-started": (lambda: nn.AvgPool2d(3, 2, 1, ceil_mode=True, count_include_pad=False), (2, 3, 8, 9)),
    "avg-pool-3d-started": (lambda: nn.AvgPool3d(2, 3, ceil_mode=True, divisor_override=5), (2, 3, 6, 4, 5)),
    "adaptive-max-pool": (lambda: nn.AdaptiveMaxPool2d((3, 2)), (2, 3, 7, 8)),
    "nearest-1d": (lambda: nn.Upsample(scale_factor=1.7), (2, 3, 5)),
    "nearest-2d": (lambda: nn.Upsample(size=(7, 3)), (2, 3, 5, 4)),
    "nearest-3d": (lambda: nn.Upsample(scale_factor=2), (1, 2, 3, 2, 3)),
    "nearest-exact": (lambda: nn.Upsample(size=(7, 3), mode="nearest-exact"), (2, 3, 5, 4)),
    "linear-1d": (lambda: nn.Upsample(scale_factor=1.7, mode="linear"), (2, 3, 5)),
    "bilinear": (lambda: nn.Upsample(size=(7, 3), mode="bilinear"), (2, 3, 5, 4)),
    "bilinear-corners": (lambda: nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True), (2, 3, 5, 4)),
    "trilinear": (lambda: nn.Upsample(size=(7, 3, 5), mode="trilinear"), (1, 2, 5, 4, 3)),
    "bicubic": (lambda: nn.Upsample(size=(7, 3), mode="bicubic"), (2, 3, 5, 4)),
    "bicubic-corners": (lambda: nn.Upsample(size=(7, 3), mode="bicubic", align_corners=True), (2, 3, 5, 4)),
    "weight-norm": (lambda: parametrizations.weight_norm(nn.Linear(6, 5), dim=1), (4, 6)),
    "prelu": (lambda: nn.PReLU(6), (4, 6)),
    "attention": (lambda: nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), (2, 5, 8)),
}

BAG, STARTS = torch.tensor([1, 4, 1, 0, 5, 5, 2]), torch.tensor([0, 3, 3, 6])
WEIGHTS = (torch.arange(4096) * 0.37).sin()
FUNCTIONS: dict[str, Function] = {
    "gelu": F.gelu,
    "gelu-tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "exp": torch.exp,
    "log": lambda x: torch.log(x * x + 0.5),
    "sin-cos": lambda x: torch.sin(x) * torch.cos(x),
    "rsqrt": lambda x: torch.rsqrt(x * x + 0.5),
    "sqrt": lambda x: torch.sqrt(x * x + 0.5),
    "pow": lambda x: (x * x + 0.5) ** 1.3 + x**2 + x**3 + (x * x + 0.1) ** -0.5,
    "elu": F.elu,
    "softplus": F.softplus,
    "leaky-relu": F.leaky_relu,
    "hardswish": F.hardswish,
    "mish": F.mish,
    "glu": lambda x: F.glu(x, -1),
    "softmax": lambda x: x.softmax(-1) * x.softmax(0),
    "log-softmax": lambda x: x.log_softmax(-1),
    "logsumexp": lambda x: x.logsumexp(-1),
    "mean-var": lambda x: x.mean(0) + x.var(0) + x.std(0, correction=0),
    "norms": lambda x: x.norm() + x.norm(dim=1) + x.abs().sum() + torch.linalg.vector_norm(x, 1, dim=0).sum(),
    "extremes": lambda x: x.max(-1).values + x.amin(-1) + torch.maximum(x, -x).sum(-1),
    "sorted": lambda x: x.sort(-1).values * x.topk(6, -1).values,
    "cumsum": lambda x: x.cumsum(0) * x,
    "products": lambda x: x.prod(0) + x.prod(1) + x.cumprod(1) * x.prod(),
    "norm-along": lambda x: x.norm(2, dim=1) + torch.vdot(x[0], x[1]),
    "pixels": lambda x: F.pixel_unshuffle(F.pixel_shuffle(x.reshape(1, 4, 3, 3), 2), 2),
    "ctc": lambda x: F.ctc_loss(
        x.reshape(3, 2, 6).log_softmax(2),
        torch.tensor([[1, 2], [3, 3]]),
        torch.tensor([3, 2]),
        torch.tensor([2, 1]),
        reduction="none",
    ),
    "ctc-lists": lambda x: F.ctc_loss(
        x.reshape(6, 1, 6).log_softmax(2),
        torch.tensor([4, 4, 1]),
        cast(Any, [5]),
        cast(Any, [3]),
        blank=2,
        zero_infinity=True,
    ),
    "bag-sum": lambda x: F.embedding_bag(BAG, x, STARTS, mode="sum", per_sample_weights=WEIGHTS[:7].to(x)),
    "bag-mean": lambda x: F.embedding_bag(BAG, x, STARTS, mode="mean", padding_idx=5),
    "bag-max": lambda x: F.embedding_bag(BAG, x, STARTS, mode="max", padding_idx=5),
    "bag-last": lambda x: F.embedding_bag(
        BAG, x, torch.cat([STARTS, torch.tensor([7])]), include_last_offset=True, mode="sum"
    ),
    "bag-weights": lambda x: F.embedding_bag(
        BAG, WEIGHTS[:36].to(x).reshape(6, 6), STARTS, mode="sum", per_sample_weights=x.reshape(-1)[:7], padding_idx=5
    ),
    "grouped": lambda x: grouped(x, torch.stack([x, x * 2, x - 1])),
    "einsum": lambda x: torch.einsum("ij,kj->ik", x, x),
    "baddbmm": lambda x: torch.baddbmm(x[None], x[None], x.t()[None] @ x[None], beta=0.5, alpha=2.0),
    "lerp-addcmul": lambda x: torch.lerp(x, x * x, 0.3) + torch.addcmul(x, x, x, value=0.7),
    "addcdiv": lambda x: torch.addcdiv(x, x, x * x + 1.0, value=-0.3) + torch.add(x, x * x, alpha=1.7),
    "index": lambda x: x[torch.tensor([0, 2, 2, 1])] + x.index_select(0, torch.tensor([1, 1, 0, 3])),
    "gather": lambda x: x.gather(1, torch.tensor([[0, 0, 1], [2, 1, 0], [1, 1, 1], [0, 2, 2], [3, 3, 3], [4, 0, 4]])),
    "index-add": lambda x: torch.zeros(3, 6).to(x).index_add(0, torch.tensor([0, 2, 0, 0, 1, 1]), x),
    "cross-entropy": lambda x: F.cross_entropy(x, torch.tensor([0, 1, -100, 3, 2, 1]), label_smoothing=0.1),
    "nll-weighted": lambda x: F.nll_loss(x.log_softmax(-1), torch.arange(6), weight=WEIGHTS[1:7].abs().to(x)),
    "mse": lambda x: F.mse_loss(x, x.detach() * 0.5),
    "l1": lambda x: F.l1_loss(x, x.detach() + 0.25),
    "huber": lambda x: F.huber_loss(x, x.detach() * 0.2) + F.smooth_l1_loss(x, x.detach() * 3),
    "bce": lambda x: F.binary_cross_entropy_with_logits(x, torch.full_like(x, 0.25)),
    "kl": lambda x: F.kl_div(x.log_softmax(-1), torch.full_like(x, 1 / 6), reduction="batchmean"),
    "sdpa-causal": lambda x: F.scaled_dot_product_attention(
        x.reshape(1, 2, 3, 6) * 1, x.reshape(1, 2, 3, 6) * 2, x.reshape(1, 2, 3, 6) * 3, is_causal=True
    ),
    "sdpa-shared-heads": lambda x: F.scaled_dot_product_attention(
        x.reshape(1, 2, 3, 6), x[None, None, :3], x[None, None, 3:], enable_gqa=True
    ),
    "sdpa-mask": lambda x: F.scaled_dot_product_attention(
        x[None, None], x[None, None], x[None, None], attn_mask=torch.ones(6, 6, dtype=torch.bool).tril()
    ),
}
BACKENDS = ("rounded", "exact")


def grouped(x: Tensor, weights: Tensor) -> Tensor:
    """Products by groups of rows, of which ATen's kernel takes no FP64: there, group by group."""
    if x.dtype == torch.float64:
        return torch.cat([x[:2] @ weights[0], x[2:5] @ weights[2], torch.zeros_like(x[5:])])
    return torch._grouped_mm(x, weights, torch.tensor([2, 2, 5], dtype=torch.int32))


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(
        actual.double(), expected, rtol=2e-5, atol=2e-5 * float(expected.detach().abs().max().clamp(min=1))
    )


def derivatives(function: Callable[[Tensor], Tensor], x: Tensor, parameters: list[Tensor]) -> list[Tensor]:
    out = function(x)
    weights = WEIGHTS[: out.numel()].reshape(out.shape).to(out.dtype)
    return [out, *torch.autograd.grad((out * weights).sum(), [x, *parameters], allow_unused=True)]


@pytest.mark.parametrize("numerics", BACKENDS)
@pytest.mark.parametrize("name", MODULES)
def test_modules_agree_with_fp64(name: str, numerics: str) -> None:
    torch.manual_seed(5)
    make, shape = MODULES[name]
    module = make()
    twin = make().double()
    twin.load_state_dict({k: v.double() for k, v in module.state_dict().items()})
    x = torch.randn(shape)
    with recording(numerics):
        actual = derivatives(module, x.clone().requires_grad_(), list(module.parameters()))
    expected = derivatives(twin, x.double().requires_grad_(), list(twin.parameters()))
    for one, two in zip([*actual, *module.buffers()], [*expected, *twin.buffers()], strict=True):
        close(one, two.double())


@pytest.mark.parametrize("numerics", BACKENDS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_agree_with_fp64(name: str, numerics: str) -> None:
    x = torch.randn(6, 6, generator=torch.Generator().manual_seed(9))
    with recording(numerics):
        actual = derivatives(FUNCTIONS[name], x.clone().requires_grad_(), [])
    expected = derivatives(FUNCTIONS[name], x.double().requires_grad_(), [])
    for one, two in zip(actual, expected, strict=True):
        close(one, two)


@pytest.mark.parametrize("numerics", BACKENDS)
@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01, foreach=True),
        lambda p: torch.optim.Adam(p, lr=0.01, foreach=True),
        lambda p: torch.optim.AdamW(p, lr=0.01, foreach=False, amsgrad=True),
        lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, foreach=True),
        lambda p: torch.optim.Adagrad(p, lr=0.01),
    ],
)
def test_optimizers_agree_with_native(make: Callable[[list[Tensor]], torch.optim.Optimizer], numerics: str) -> None:
    start = torch.randn(5, 4, generator=torch.Generator().manual_seed(2))
    ends = []
    for mode in ("native", numerics):
        parameter = nn.Parameter(start.clone())
        optimizer = make([parameter])
        for step in range(3):
            with recording(mode):
                ((parameter - step) ** 2).sum().backward()
                nn.utils.clip_grad_norm_([parameter], 1.0)
                optimizer.step()
                optimizer.zero_grad()
        ends.append(parameter.detach().double())
    close(ends[1], ends[0])


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("torch.float64", lambda x: x.double() @ x.double()),
        ("complex", lambda x: torch.complex(x, x).log()),
        ("complex128", lambda x: torch.complex(x.double(), x.double()) * 2),
        ("aten.linalg_eig", lambda x: torch.linalg.eig(x[:, :2])),
        ("aten._fft", lambda x: torch.fft.rfft(x.double())),
        ("aten.linspace", lambda x: torch.linspace(0, 1, 7, dtype=torch.float64)),
        ("aten._to_copy", lambda x: (x * 1e30).to(torch.int16)),
    ],
)
def test_refusals_name_the_operator(name: str, function: Function) -> None:
    x = torch.ones(3, 3)
    with pytest.raises(UnsupportedOperator, match=name.replace(".", r"\.")), recording("rounded"):
        function(x)


@pytest.mark.parametrize("numerics", BACKENDS)
def test_fused_optimizers_are_refused(numerics: str) -> None:
    parameter = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([parameter], fused=True)
    parameter.grad = torch.ones(3)
    with pytest.raises(UnsupportedOperator, match=r"_fused_adamw_.*fused=False"), recording(numerics):
        optimizer.step()


@pytest.mark.parametrize("numerics", BACKENDS)
def test_dropout_follows_the_generator_state(numerics: str) -> None:
    """Restoring torch's generator state restores the mask, as activation checkpointing needs."""
    x = torch.ones(4096)
    torch.manual_seed(1)
    state = torch.get_rng_state()
    with recording(numerics):
        first = F.dropout(x, 0.25)
        second = F.dropout(x, 0.25)
        torch.set_rng_state(state)
        again = F.dropout(x, 0.25)
    assert torch.equal(first, again)
    assert not torch.equal(first, second)
    # n = 4096, p = 0.25: a count 6 standard deviations off has probability below 1e-8.
    assert abs(int((first == 0).sum()) - 1024) < 6 * (4096 * 0.25 * 0.75) ** 0.5


@pytest.mark.parametrize("numerics", BACKENDS)
def test_random_distributions(numerics: str) -> None:
    """n = 20,000, seed 3: means and variances within 6 standard errors."""
    torch.manual_seed(3)
    n = 20_000
    with recording(numerics):
        normal, uniform = torch.randn(n), torch.rand(n)
        integers, order = torch.randint(3, 11, (n,)), torch.randperm(n)
    assert abs(float(normal.mean())) < 6 / n**0.5
    assert abs(float(normal.var()) - 1) < 6 * (2 / n) ** 0.5
    assert abs(float(uniform.mean()) - 0.5) < 6 * (1 / 12 / n) ** 0.5
    assert float(uniform.min()) >= 0
    assert float(uniform.max()) < 1
    assert integers.unique().tolist() == list(range(3, 11))
    assert torch.equal(order.sort().values, torch.arange(n))


def test_every_nan_is_canonical_and_zero_sums_are_positive() -> None:
    inf, nan = torch.tensor(torch.inf), torch.tensor([0xFF812345 - (1 << 32)], dtype=torch.int32).view(torch.float32)
    cases: dict[str, tuple[tuple[Tensor, ...], str]] = {
        "inf - inf": ((inf, inf), "aten.sub.Tensor"),
        "nan * 1": ((nan, torch.ones(1)), "aten.mul.Tensor"),
        "nan / 1": ((nan, torch.ones(1)), "aten.div.Tensor"),
        "nan mm": ((nan.reshape(1, 1), torch.ones(1, 1)), "aten.mm.default"),
        "inf mm": ((torch.tensor([[torch.inf, -torch.inf]]), torch.ones(2, 1)), "aten.mm.default"),
        "nan sum": ((nan,), "aten.sum.default"),
        "exp nan": ((nan,), "aten.exp.default"),
        "sqrt -1": ((-torch.ones(1),), "aten.sqrt.default"),
    }
    for numerics in BACKENDS:
        for name, (args, operator) in cases.items():
            out = execute(numerics, operator, args, {}, entries=None)
            assert out.reshape(-1).view(torch.int32).tolist() == [0x7FC00000], (numerics, name)
        zero = execute(numerics, "aten.sum.default", (torch.full((3,), -0.0),), {}, entries=None)
        assert zero.view(torch.int32).item() == 0
        product = execute(numerics, "aten.mm.default", (torch.zeros(1, 2), -torch.ones(2, 1)), {}, entries=None)
        assert product.view(torch.int32).item() == 0


def test_list_operators_equal_their_single_forms() -> None:
    xs = [torch.randn(4, generator=torch.Generator().manual_seed(i)) for i in range(3)]
    ys = [x * 2 for x in xs]
    args = {
        "aten._foreach_add.List": (xs, ys),
        "aten._foreach_addcdiv.ScalarList": (xs, ys, [y * y + 1 for y in ys], [0.1, 0.2, 0.3]),
        "aten._foreach_addcmul.Tensor": (xs, ys, ys, torch.tensor([0.1, 0.2, 0.3])),
        "aten._foreach_lerp.Scalar": (xs, ys, 0.1),
        "aten._foreach_div.ScalarList": (xs, [3.0, 7.0, 9.0]),
        "aten._foreach_norm.Scalar": (xs, 2),
    }
    for operator, values in args.items():
        packet, overload = operator.split(".")[1:]
        native = getattr(getattr(torch.ops.aten, packet), overload)(*values)
        for numerics in BACKENDS:
            for one, two in zip(execute(numerics, operator, values, {}, entries=None), native, strict=True):
                torch.testing.assert_close(one, two)


@pytest.mark.parametrize("numerics", ["exact", "rounded"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("shape", "normalised"), [((4, 5, 6), [6]), ((3, 4, 6), [4, 6]), ((6,), [6])])
@pytest.mark.parametrize("has_weight", [True, False])
def test_fused_rms_norm_is_its_composition(
    numerics: str, dtype: torch.dtype, shape: tuple[int, ...], normalised: list[int], has_weight: bool
) -> None:
    """CUDA has one kernel for it, and a CPU the operators that torch composes; both end in the same bits."""
    generator = torch.Generator().manual_seed(2)
    x, grad = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
    weight = torch.randn(normalised, generator=generator).to(dtype) if has_weight else None
    leaves = [value.clone().requires_grad_() for value in (x, weight) if value is not None]
    with recording(numerics):
        composed = F.rms_norm(leaves[0], normalised, leaves[1] if has_weight else None)
        torch.autograd.backward(composed, grad)
    backward = torch.ops.aten._fused_rms_norm_backward.default
    with torch.no_grad(), recording(numerics):
        out, inverse = rms_norm(x.float(), normalised, None if weight is None else weight.float(), None)
        slopes = backward(grad, x, normalised, inverse, weight, [True, has_weight])
    assert out.to(dtype).equal(composed)
    assert [slope.equal(leaf.grad) for slope, leaf in zip(slopes, leaves, strict=False)] == [True] * len(leaves)


@pytest.mark.parametrize("numerics", ["exact", "rounded"])
def test_clamps_of_integers_stay_integers(numerics: str) -> None:
    x = torch.tensor([-3, 0, 4])
    functions: list[Callable[[Tensor], Tensor]] = [
        torch.relu,
        F.hardtanh,
        lambda x: x.clamp(-1, 2),
        lambda x: x.clamp(max=2.5),
        lambda x: torch.relu_(x.clone()),
    ]
    for function in functions:
        with recording(numerics):
            found = function(x)
        expected = function(x)
        assert found.dtype == expected.dtype
        assert found.equal(expected)


@pytest.mark.parametrize("numerics", ["exact", "rounded"])
def test_fused_attention_that_somebody_insists_on_is_refused_by_name(numerics: str) -> None:
    x = torch.ones(1, 2, 4, 8)
    with (
        recording(numerics),
        sdpa_kernel(SDPBackend.FLASH_ATTENTION),
        pytest.raises(UnsupportedOperator, match=r"_scaled_dot_product_flash_attention_for_cpu.*leave the choice"),
    ):
        F.scaled_dot_product_attention(x, x, x)


def test_attention_is_made_of_plain_operators_while_any_thread_records() -> None:
    """The switches are the process's; the last session to leave puts them back."""

    def flags() -> tuple[bool, bool]:
        return torch.backends.cuda.flash_sdp_enabled(), torch.backends.cudnn.enabled

    before = flags()
    inside, outer_left = threading.Event(), threading.Event()
    seen = []

    def other() -> None:
        with recording("exact"):
            inside.set()
            outer_left.wait()
            seen.append(flags())

    thread = threading.Thread(target=other)
    with recording("exact"):
        thread.start()
        inside.wait()
    outer_left.set()
    thread.join()
    assert seen == [(False, False)]
    assert flags() == before


@pytest.mark.parametrize("numerics", BACKENDS)
def test_cast_to_a_wide_integer_ends_at_its_bounds(numerics: str) -> None:
    x = torch.tensor([-torch.inf, -3e9, -2147483648.0, -1.7, -0.0, 1.7, 2147483520.0, 3e9, torch.inf, torch.nan])
    for dtype in (torch.int32, torch.int64):
        low, high = torch.iinfo(dtype).min, torch.iinfo(dtype).max
        inside = [int(value) if low <= value <= high else (low if value < 0 else high) for value in x[1:-2].tolist()]
        with recording(numerics):
            cast, copied = x.to(dtype), torch.zeros(10, dtype=dtype).copy_(x)
        assert cast.tolist() == [low, *inside, high, 0]
        assert torch.equal(cast, copied)


@pytest.mark.parametrize("numerics", BACKENDS)
def test_histograms_and_extremes_of_special_values(numerics: str) -> None:
    x = torch.tensor([-1.0, -0.5, 0.0, 0.49999997, 0.5, 1.0, 1.0000001, torch.nan, -torch.inf])
    with recording(numerics):
        counts = torch.histc(x, bins=4, min=-1, max=1)
        whole = torch.histc(torch.tensor([0.0, 1.0, 3.0]), bins=3)
        experts = torch.histc(torch.tensor([0.0, 3.0, 3.0, 1.0]), bins=4, min=0, max=3)
        low, high = torch.aminmax(x[:6])
        same = torch.histc(torch.full((5,), 2.0), bins=4)
    assert counts.tolist() == [1, 1, 1, 3]  # (0.49999997 + 1) / 2 is 0.75 in FP32
    assert whole.tolist() == [1, 1, 1]
    assert experts.tolist() == [1, 1, 0, 2]
    assert (float(low), float(high)) == (-1.0, 1.0)
    assert same.tolist() == [0, 0, 5, 0]
    with pytest.raises(UnsupportedOperator, match=r"aten\.histc.*give the operator min and max"), recording(numerics):
        torch.histc(x, bins=4)


@pytest.mark.parametrize("numerics", BACKENDS)
def test_integers_keep_the_type_that_is_asked_for(numerics: str) -> None:
    x = torch.tensor([1.0, 2.0, 3.0])
    for make in (torch.cumsum, torch.cumprod, torch.sum, torch.prod):
        native = make(x, 0, dtype=torch.int32)
        with recording(numerics):
            found = make(x, 0, dtype=torch.int32)
        assert found.dtype == native.dtype == torch.int32
        assert torch.equal(found, native)


@pytest.mark.parametrize("numerics", ["exact", "rounded"])
def test_what_equal_and_allclose_tell_is_a_value_that_the_step_read(numerics: str) -> None:
    x = torch.tensor([1.0, -0.0, torch.inf])
    broken = torch.tensor([1.0, torch.nan, torch.inf])
    with recording(numerics) as session:
        told = [torch.equal(x, x + 0.0), torch.equal(broken, broken), torch.allclose(x, x * 1.1), torch.equal(x, x[:2])]
    assert told == [True, False, False, False]
    assert [value for _, value in session.statistics.items] == [True, False, False]


@pytest.mark.parametrize("mode", ["bilinear", "nearest", "bicubic"])
@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
def test_samples_at_a_grid_and_their_gradients_agree_with_fp64(mode: str, padding: str) -> None:
    g = torch.Generator().manual_seed(3)
    for rank in (2,) if mode == "bicubic" else (2, 3):
        x, grid = (
            torch.randn(2, 3, *(5, 4, 6)[:rank], generator=g),
            torch.randn(2, *(4, 3, 2)[:rank], rank, generator=g),
        )
        for aligned in (False, True):
            found = []
            for dtype in (torch.float32, torch.float64):
                leaves = [each.to(dtype).clone().requires_grad_() for each in (x, grid * 1.5)]
                with recording("exact" if dtype == torch.float32 else "native"):
                    out = F.grid_sample(leaves[0], leaves[1], mode=mode, padding_mode=padding, align_corners=aligned)
                    out.square().sum().backward()
                found.append([out, *(leaf.grad for leaf in leaves)])
            for ours, theirs in zip(*found, strict=True):
                torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("how", ["sum", "mean", "prod", "max", "min"])
def test_segments_and_their_gradients_agree_with_native(how: str) -> None:
    data = torch.tensor([[0.5, 0.0], [-1.5, 2.0], [0.5, -3.0], [0.0, 0.0], [4.0, 0.25], [4.0, 9.0]])
    lengths = torch.tensor([3, 0, 2])
    for initial in (None, 0.75):
        found = []
        for numerics in ("exact", "native"):
            x = data.clone().requires_grad_()
            with recording(numerics):
                out = torch.segment_reduce(x, how, lengths=lengths, initial=initial, unsafe=True)
                out[[0, 2]].square().sum().backward()
            found.append((out, x.grad))
        for ours, theirs in zip(*found, strict=True):
            torch.testing.assert_close(ours, theirs, equal_nan=True)


@pytest.mark.parametrize("rank", [2, 3])
def test_fractional_pools_take_the_windows_that_native_ones_take(rank: int) -> None:
    g = torch.Generator().manual_seed(rank)
    x, drawn = torch.randn(2, 3, *(9, 8, 10)[:rank], generator=g), torch.rand(2, 3, rank, generator=g)
    pool = F.fractional_max_pool2d if rank == 2 else F.fractional_max_pool3d
    for images in (x, x[0], x.bfloat16()):  # a single image takes the first numbers
        found = []
        for numerics in ("exact", "native"):
            leaf = images.clone().requires_grad_()
            numbers = drawn.to(images.dtype)
            with recording(numerics):
                out, index = pool(leaf, 2, output_size=(3, 4, 2)[:rank], _random_samples=numbers, return_indices=True)
                out.square().sum().backward()
            found.append((out, index, leaf.grad))
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(*found, strict=True))
    with recording("exact"), pytest.raises(CallerError, match=f"needs {rank} random numbers for each channel"):
        pool(x, 2, output_size=(3, 4, 2)[:rank], _random_samples=drawn[:1])


def test_noise_of_rrelu_follows_the_generator_and_lies_between_its_limits() -> None:
    x = torch.linspace(-3.0, 1.0, 4001)
    found = []
    for numerics in ("exact", "rounded"):
        torch.manual_seed(5)
        with recording(numerics):
            found.append(F.rrelu(x, 0.25, 0.5, training=True))
    slope = (found[0] / x)[x < 0]
    assert torch.equal(*found)
    assert torch.equal(found[0][x > 0], x[x > 0])
    assert 0.25 <= float(slope.min()) <= float(slope.max()) <= 0.5
    assert abs(float(slope.mean()) - 0.375) < 0.01


@pytest.mark.parametrize("shape", [(6, 3), (3, 6)])
def test_least_squares_agree_with_fp64(shape: tuple[int, int]) -> None:
    g = torch.Generator().manual_seed(7)
    a, b = torch.randn(shape, generator=g), torch.randn(shape[0], 2, generator=g)
    with recording("exact"):
        found = torch.linalg.lstsq(a, b, driver="gelsd")
    wanted = torch.linalg.lstsq(a.double(), b.double(), driver="gelsd")
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours.double(), theirs.double(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shift", ["", "shifted_"])
def test_polynomials_are_rounded_once_but_for_errors_of_fp64(shift: str) -> None:
    u = mpmath.chebyu
    exact: dict[str, Callable[[int, mpmath.mpf], mpmath.mpf]] = {
        "chebyshev_polynomial_t": mpmath.chebyt,
        "chebyshev_polynomial_u": u,
        "chebyshev_polynomial_v": lambda n, x: u(n, x) - (u(n - 1, x) if n else 0),
        "chebyshev_polynomial_w": lambda n, x: u(n, x) + (u(n - 1, x) if n else 0),
    }
    if not shift:
        exact |= {
            "hermite_polynomial_h": mpmath.hermite,
            "hermite_polynomial_he": lambda n, x: mpmath.hermite(n, x / mpmath.sqrt(2)) * mpmath.mpf(2) ** (-n / 2),
            "laguerre_polynomial_l": lambda n, x: mpmath.laguerre(n, 0, x),
            "legendre_polynomial_p": mpmath.legendre,
        }
    x, n = torch.tensor([-1.0, -0.7, 0.125, 0.3, 0.9, 2.5]), torch.tensor([0, 1, 2, 5, 11, 31])
    for name, value in exact.items():
        with recording("exact"):
            found = getattr(torch.special, shift + name)(x[:, None], n)
        for at, row in zip(x.tolist(), found.tolist(), strict=True):
            for degree, ours in zip(n.tolist(), row, strict=True):
                true = value(degree, mpmath.mpf(at) * 2 - 1 if shift else mpmath.mpf(at))
                assert abs(ours - true) <= abs(true) * 2**-24 + max(1, abs(true)) * 2**-40, (name, at, degree)
    with recording("exact"):
        assert torch.equal(torch.special.legendre_polynomial_p(x, -1), torch.zeros(6))
        assert torch.equal(torch.arange(0.1, 2, 0.3), torch.tensor([0.1 + 0.3 * k for k in range(7)]))


@pytest.mark.parametrize("numerics", ["exact", "rounded"])
def test_a_list_in_which_a_write_reaches_a_later_read_is_refused(numerics):
    """PyTorch takes such a list one tensor after another; a referee that holds copies of its tensors could not."""
    a, b, flat = torch.ones(4), torch.ones(4), torch.zeros(8)
    others = ([a, a], 1), ([a, b], [b, a]), ([flat[:5], flat[3:]], 1), ([flat[::2], flat[1:5]], [a, b])
    for lists in others:
        with pytest.raises(UnsupportedOperator, match="two places"), recording(numerics):
            torch._foreach_add_(*lists)
    assert torch.equal(flat, torch.zeros(8))
    with recording(numerics):
        torch._foreach_add_([a, b], [a, b])
        torch._foreach_add_([flat[:4], flat[4:]], [a, a])
    assert torch.equal(flat, torch.full((8,), 2.0))


@pytest.mark.parametrize("numerics", BACKENDS)
def test_what_the_dispatcher_leaves_out_has_its_default(numerics: str) -> None:
    """PyTorch hands no argument over that equals the schema's default."""
    torch.manual_seed(3)
    with recording(numerics):
        around = torch.normal(torch.full((2000,), 5.0), 1.0)
    assert abs(float(around.mean()) - 5) < 6 / 2000**0.5
    missing = []
    for row in operator_table().values():
        func = overload_named(row.name) if row.name.startswith("aten.") else None
        if row.code is None or row.kind != "implemented" or func is None:
            continue
        takes = list(inspect.signature(row.code).parameters.values())[1:]
        in_place = [each for each in takes if each.kind is each.POSITIONAL_OR_KEYWORD]
        given = [each for each in func._schema.arguments if not each.kwarg_only]
        pairs = zip(given, in_place, strict=False)
        missing += [(row.name, a.name) for a, b in pairs if a.has_default_value() and b.default is b.empty]
    assert missing == []
