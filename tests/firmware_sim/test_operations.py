"""How many operations decompositions and solvers are, beside textbooks; nothing that multiplies is free."""

from __future__ import annotations

import re

import pytest
import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from firmware_sim.operations import COUNTS, UNCOUNTED
from monitor.numerics.operators.table import operator_table
from monitor.programs.flop import is_uncounted, live_work

N, M, R = 12, 20, 3
SQUARE = torch.eye(N) * N + torch.ones(N, N)
TALL = torch.randn(M, N, generator=torch.Generator().manual_seed(1))
RIGHT = torch.ones(N, R)
LU = 2 * N**3 // 3
HOUSEHOLDER = 2 * M * N * N - 2 * N**3 // 3
MANY = 500
IMAGE, GRID = torch.ones(2, 3, 5, 5), torch.zeros(2, 4, 7, 2)
BEGINS = torch.arange(M) * N


class Counting(TorchDispatchMode):
    """Adds up what the operators of a call are."""

    def __init__(self):
        super().__init__()
        self.flop, self.uncounted = 0, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.uncounted += [str(func)] * is_uncounted(func)
        self.flop += live_work(func, args, kwargs or {}, out).flop
        return out


def counted(call):
    with Counting() as found:
        call()
    return found


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda: torch.linalg.cholesky(SQUARE), N**3 // 3),
        (lambda: torch.linalg.inv(SQUARE), 2 * N**3),
        (lambda: torch.linalg.det(SQUARE), LU),
        (lambda: torch.linalg.slogdet(SQUARE), LU),
        (lambda: torch.linalg.lu_factor(SQUARE), LU),
        (lambda: torch.linalg.lu(SQUARE.expand(4, N, N)), 4 * LU),
        (lambda: torch.linalg.solve(SQUARE, RIGHT), LU + 2 * N * N * R),
        (lambda: torch.linalg.solve_triangular(SQUARE, RIGHT, upper=True), N * N * R),
        (lambda: torch.cholesky_solve(RIGHT, SQUARE), 2 * N * N * R),
        (lambda: torch.linalg.qr(TALL, mode="r"), HOUSEHOLDER),
        (lambda: torch.linalg.qr(TALL), 2 * HOUSEHOLDER),
        (lambda: torch.linalg.eigh(SQUARE), 9 * N**3),
        (lambda: torch.ops.aten._linalg_eigh(SQUARE, "L", False), 4 * N**3 // 3),
        (lambda: torch.ops.aten._linalg_svd(TALL, False, False), 4 * M * N * N - 4 * N**3 // 3),
        (lambda: torch.linalg.svd(TALL, full_matrices=False), 14 * M * N * N + 8 * N**3),
        (lambda: torch.linalg.svd(TALL), 4 * M * M * N + 8 * M * N * N + 9 * N**3),
        (lambda: torch.cdist(TALL, TALL, p=1.0), 3 * M * M * N),
        (lambda: torch.addbmm(torch.zeros(M, R), TALL.expand(2, M, N), RIGHT.expand(2, N, R)), 2 * 2 * M * N * R),
        (lambda: torch.linalg.solve(SQUARE, torch.ones(5, 1, N, MANY)), LU + 2 * N * N * MANY * 5),
        (lambda: torch.linalg.solve(SQUARE.expand(2, N, N), RIGHT, left=True), 2 * (LU + 2 * N * N * R)),
        (
            lambda: torch.linalg.solve_triangular(SQUARE, RIGHT.expand(4, N, R), upper=True, out=torch.empty(4, N, R)),
            4 * N * N * R,
        ),
        (lambda: torch.linalg.lu_solve(*torch.linalg.lu_factor(SQUARE), torch.ones(N, MANY)), LU + 2 * N * N * MANY),
        (lambda: torch.linalg.lstsq(TALL, torch.ones(M, MANY)), HOUSEHOLDER + (4 * M * N - N * N) * MANY),
        (
            lambda: torch.linalg.lstsq(TALL.expand(3, M, N), torch.ones(3, M, R)),
            3 * (HOUSEHOLDER + (4 * M * N - N * N) * R),
        ),
        (lambda: torch.linalg.lstsq(TALL, torch.ones(M)), HOUSEHOLDER + 4 * M * N - N * N),
        (lambda: torch.ormqr(TALL[:, :2], torch.ones(2), torch.ones(M, MANY)), 4 * 2 * M * MANY),
        (
            lambda: functional.embedding_bag(
                torch.arange(N).repeat(M), RIGHT, BEGINS, mode="sum", per_sample_weights=TALL.flatten()
            ),
            2 * M * N * R,
        ),
        (lambda: torch.ops.aten._compute_linear_combination(RIGHT, TALL), 2 * M * N * R),
        (lambda: functional.grid_sample(IMAGE, GRID, "bicubic", align_corners=False), 2 * 16 * 3 * 2 * 4 * 7),
        (
            lambda: functional.grid_sample(IMAGE[:, :, None], torch.zeros(2, 1, 4, 7, 3), align_corners=False),
            2 * 8 * 168,
        ),
        (lambda: functional.interpolate(IMAGE, (9, 8), mode="bicubic"), 2 * 16 * 6 * 9 * 8),
        (lambda: torch.dist(TALL[:, :, None], RIGHT), 3 * M * N * R),
        (lambda: torch.dist(TALL, TALL), 0),
        (lambda: torch.fft.fft(torch.ones(16, dtype=torch.complex64)), 5 * 16 * 4),
        (lambda: torch.fft.rfft(torch.ones(M, 16)), 5 * M * 16 * 4),
        (lambda: torch.fft.fft2(torch.ones(M, 16, 8)), 5 * M * 128 * 7),
        (lambda: torch.mm(TALL.to(torch.complex64), torch.ones(N, R, dtype=torch.complex64)), 4 * 2 * M * N * R),
    ],
)
def test_counts_are_those_of_the_books(call, expected):
    assert counted(call).flop == expected


@pytest.mark.parametrize(
    "name", [each for each in dir(torch.linalg) if not each.startswith("_") and callable(getattr(torch.linalg, each))]
)
def test_no_linear_algebra_is_free(name):
    if name in {"LinAlgError", "cross", "vander", "diagonal", "vecdot", "vector_norm"}:
        return  # linear in what they read; vecdot is elementwise
    function = getattr(torch.linalg, name)
    arguments = {
        "cholesky_ex": (SQUARE,),
        "householder_product": (TALL, torch.ones(N)),
        "ldl_solve": (SQUARE, torch.arange(N, dtype=torch.int32) + 1, RIGHT),
        "lstsq": (TALL, torch.ones(M, R)),
        "lu_solve": (SQUARE, torch.arange(N, dtype=torch.int32) + 1, RIGHT),
        "matmul": (SQUARE, RIGHT),
        "matrix_power": (SQUARE, 3),
        "multi_dot": ((SQUARE, SQUARE, RIGHT),),
        "solve": (SQUARE, RIGHT),
        "solve_ex": (SQUARE, RIGHT),
        "tensorinv": (SQUARE, 1),
        "tensorsolve": (SQUARE, torch.ones(N)),
        "matrix_norm": (SQUARE, 2),
        "norm": (SQUARE, 2),
    }.get(name, (SQUARE,))
    options = {"upper": True} if name == "solve_triangular" else {}
    if name == "solve_triangular":
        arguments = (SQUARE, RIGHT)
    found = counted(lambda: function(*arguments, **options))
    assert found.flop >= N**2 or found.uncounted, name


MULTIPLIES = re.compile(
    r"mm$|mm_|matmul|linear$|linear_back|conv_|conv\d|convolution|rnn|lstm_|attention|encoder|dist_|pdist|cdist|_fft_|linalg_|cholesky"
    r"|geqrf|ormqr|solve|trilinear$|dot$|embedding_bag|grid_sampler|linear_comb|upsample.*(linear|cubic|lanczos)|quantized_(gru|lstm)"
)
FREE = {
    "_cudnn_rnn_flatten_weight", "_linalg_check_errors", "_thnn_fused_lstm_cell", "_thnn_fused_lstm_cell_backward_impl",
    "linalg_cross", "linalg_vector_norm", "linalg__powsum",
    "mkldnn_reorder_conv2d_weight", "mkldnn_reorder_conv3d_weight",
}  # fmt: skip
ELSEWHERE = re.compile(
    r"cudnn|miopen|mps|_cslt|sparse|nested|_jagged|hpu|_cudnn|_fused_sdp|xnnpack|_for_mps|efficient|_cutlass|fbgemm|wrapped"
)


def test_every_operator_that_multiplies_is_counted_or_refused():
    """Of those that the host's processor has, by their names."""
    missing = set()
    for schema in torch._C._jit_get_all_schemas():
        base = schema.name.removeprefix("aten::").rstrip("_")
        if not schema.name.startswith("aten::") or not MULTIPLIES.search(base) or ELSEWHERE.search(base):
            continue
        overload = f"aten::{schema.name[6:]}" + (f".{schema.overload_name}" if schema.overload_name else "")
        try:
            is_composite = torch._C._dispatch_has_kernel_for_dispatch_key(overload, "CompositeImplicitAutograd")
            is_here = torch._C._dispatch_has_computed_kernel_for_dispatch_key(overload, "CPU")
        except RuntimeError:
            continue
        if is_here and not is_composite and base not in COUNTS and base not in UNCOUNTED and base not in FREE:
            missing.add(base)
    assert missing == set()


def test_no_recorded_step_has_an_operator_whose_count_has_changed():
    """So that the programs of older runs count as they did."""
    earlier = {"mm", "bmm", "mv", "dot", "vdot", "_grouped_mm", "addmm", "addmv", "baddbmm", "convolution"}
    earlier |= {"convolution_backward"}
    recorded = {name.split(".")[1].rstrip("_") for name in operator_table()}
    assert recorded & UNCOUNTED == set()
    # no step took these before they were counted
    new = {name for name in recorded & COUNTS.keys() if "linalg" in name or "cholesky" in name}
    new |= {"addbmm", "triangular_solve", "_cdist_forward", "_cdist_backward", "_pdist_forward", "_pdist_backward"}
    new |= {"_euclidean_dist", "_fft_r2c", "_fft_c2c", "_fft_c2r"}
    new |= {name for name in recorded if re.search("embedding_bag|grid_sampler|upsample_.*(linear|cubic)", name)}
    new |= {"dist", "multilabel_margin_loss_forward", "multilabel_margin_loss_backward"}
    assert recorded & COUNTS.keys() <= earlier | new
