"""Complex numbers and Fourier transforms: near FP64, the same bits for any engine, refused where nothing is stated."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from firmware_sim.errors import CallerError
from monitor.numerics import recording
from monitor.numerics.errors import UnsupportedOperator
from monitor.numerics.kernels.fourier import roots_of_unity, transform_lines

NUMERICS = ("exact", "rounded")
PLACES = torch.tensor([0, 2, 2])
WINDOW = torch.hann_window(16)


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.complex64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


Z, W = numbers(3, 4), numbers(3, 4, seed=1)
X = numbers(3, 4, seed=2, dtype=torch.float32)


def written(z: Tensor, write) -> Tensor:
    copy = z * 1
    write(copy)
    return copy


CASES = {
    "arithmetic": lambda z, w, x: (z * w + x * z - w / z) / (x + 3j) - (1 - 2j) * w,
    "constants": lambda z, w, x: 1j * x + torch.full((3, 4), 1 + 1j) + torch.add(z, w, alpha=0.3) + 0.5 / w,
    "functions": lambda z, w, x: z.abs() + z.angle() + w.sgn().real + z.exp().imag + w.reciprocal().abs(),
    "powers": lambda z, w, x: z**2 + w**3 + z**-1 + z**0,
    "reductions": lambda z, w, x: z.sum() + w.mean(0) + z.cumsum(1).sum(-1, keepdim=True) + z.norm() + z.T.sum(),
    "conjugates": lambda z, w, x: z.conj() * w + z.conj().imag + w.mH.conj().T + z.mH.real.T,
    "products": lambda z, w, x: z @ w.mH + (z.conj() @ w.T) * torch.vdot(z[0], w[0]) + torch.dot(z[1], w[1]),
    "more products": lambda z, w, x: torch.addmm(z, w, z.T @ w, beta=0.5, alpha=2) * z.mv(w[0])[:, None],
    "einsum": lambda z, w, x: torch.einsum("bik,iok->bok", torch.stack([z, w]), torch.stack([w, z, w])),
    "polar": lambda z, w, x: torch.polar(x, x) * torch.view_as_complex(torch.stack([x, x + 1], -1)),
    "rotary": lambda z, w, x: torch.view_as_real(torch.view_as_complex(x.reshape(3, 2, 2)) * z[:, :2]).flatten(1),
    "moves": lambda z, w, x: torch.cat([z[PLACES], w.conj(), torch.where(x > 0, z, w)]).index_select(1, PLACES),
    "added": lambda z, w, x: z.index_put((PLACES,), w, True) + z.scatter_add(0, PLACES[:, None].expand(3, 4), w),
    "written": lambda z, w, x: written(z, lambda c: (c.real.copy_(x), c.conj().add_(w), c.conj().imag.mul_(2))),
    "convolution": lambda z, w, x: F.conv1d(z[None], w[:, None, :2], groups=3),
    "transforms": lambda z, w, x: torch.fft.fft(z) + torch.fft.ifft(w, norm="ortho") + torch.fft.fft(x, norm="forward"),
    "real transforms": lambda z, w, x: torch.fft.irfft(torch.fft.rfft(x) * z[:, :3], n=4) + torch.fft.hfft(z, n=4),
    "planes": lambda z, w, x: torch.fft.fft2(z) + torch.fft.ifft2(w) + torch.fft.fftshift(torch.fft.rfft2(x, s=(3, 6))),
    "planes of real numbers": lambda z, w, x: torch.fft.irfft2(z, s=(3, 5)) + torch.fft.ihfftn(x, s=(3, 8)).abs(),
    "odd lengths": lambda z, w, x: torch.fft.fft(z, n=11) + torch.fft.irfft(w, n=34)[:, :11],
    "a prime length": lambda z, w, x: torch.fft.fft(z, n=37) + torch.fft.rfft(x, n=73),
    "spectrogram": lambda z, w, x: torch.stft(x.reshape(-1).repeat(6), 16, 4, 16, WINDOW, return_complex=True),
    "back": lambda z, w, x: torch.istft(
        torch.stft(x.reshape(-1).repeat(6), 16, 4, 16, WINDOW, return_complex=True), 16, 4, 16, WINDOW
    ),
}  # fmt: skip


def values_and_gradients(function, wide: bool = False) -> list[Tensor]:
    widths = {torch.complex64: torch.complex128, torch.float32: torch.float64}
    inputs = [each.to(widths[each.dtype]) if wide else each.clone() for each in (Z, W, X)]
    for each in inputs:
        each.requires_grad_()
    out = function(*inputs)
    flat = torch.view_as_real(out.resolve_conj()) if out.is_complex() else out
    torch.autograd.backward(flat, torch.linspace(-1, 1, flat.numel(), dtype=flat.dtype).reshape(flat.shape))
    return [out.detach(), *(each.grad for each in inputs if each.grad is not None)]


@pytest.mark.parametrize("name", CASES)
def test_results_and_gradients_are_those_of_fp64(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for numerics in NUMERICS:
        with recording(numerics):
            found = values_and_gradients(CASES[name])
        with monkeypatch.context() as patched:
            patched.setitem(globals(), "WINDOW", WINDOW.double())
            truth = values_and_gradients(CASES[name], wide=True)
        assert len(found) == len(truth)
        for one, other in zip(found, truth, strict=True):
            assert one.shape == other.shape
            assert one.is_complex() == other.is_complex()
            assert (one - other).abs().max() <= 4e-6 * other.abs().max()


@pytest.mark.parametrize("length", [1, 2, 12, 13, 17, 64, 97, 210, 1009, 4096])
def test_a_transform_is_rounded_once(length: int) -> None:
    """Beside a sum in long double, each part is off by little more than half a unit in the last place."""
    z = numbers(2, length)
    with recording("exact"):
        found = torch.fft.fft(z)
        back = torch.fft.ifft(found)
    places = np.arange(length)
    turns = np.outer(places, places) % length
    wave = np.exp(-2j * np.pi * np.arange(length).astype(np.longdouble) / length).astype(np.clongdouble)
    if length <= 1024:
        truth = z.numpy().astype(np.clongdouble) @ wave[turns]
        for mine, theirs in ((found.real, truth.real), (found.imag, truth.imag)):
            off = np.abs(mine.numpy() - theirs)
            assert (
                off <= 0.5001 * np.spacing(np.abs(theirs).astype(np.float32)) + 2.0**-45 * np.abs(truth).max()
            ).all()
    assert (back - z).abs().max() <= 2.0**-22 * z.abs().max()


def test_roots_of_unity_are_rounded_correctly() -> None:
    for n in (1, 3, 4, 8, 12, 360, 1000):
        real, imag = roots_of_unity(n)
        turn = 2 * np.arange(n).astype(np.longdouble) / n * np.longdouble("3.14159265358979323846264338327950288")
        assert np.abs(real - np.cos(turn)).max() <= 2.0**-53
        assert np.abs(imag + np.sin(turn)).max() <= 2.0**-53
        quarters = [k * n // 4 for k in range(4) if k * n % 4 == 0]
        assert {(real[k], imag[k]) for k in quarters} <= {(1.0, 0.0), (0.0, -1.0), (-1.0, 0.0), (0.0, 1.0)}


def test_lines_do_not_depend_on_those_beside_them() -> None:
    """Nor on how many are transformed at once, or where they lie."""
    for length in (12, 17):
        real, imag = (np.random.default_rng(1).standard_normal((5, length, 3)) for _ in range(2))
        one, other = np.ascontiguousarray(real[2:3, :, 1:2]), np.ascontiguousarray(imag[2:3, :, 1:2])
        transform_lines(real, imag)
        transform_lines(one, other)
        assert (one == real[2:3, :, 1:2]).all()
        assert (other == imag[2:3, :, 1:2]).all()


@pytest.mark.parametrize(
    "call",
    [
        lambda: torch.complex(X.double(), X.double()) * 2,
        lambda: Z.log(),
        lambda: Z**0.5,
        lambda: Z.softmax(0),
        lambda: torch.linalg.inv(Z[:, :3]),
        lambda: torch.randn(3, dtype=torch.complex64),
        lambda: X.to(torch.complex128),
        lambda: Z.clone().conj().t_(),
        lambda: torch.view_as_real(Z.conj()),
        lambda: torch.add(Z, W, alpha=1j),
        lambda: X.clone().mul_(1j),
    ],
)
def test_what_is_not_stated_is_refused(call) -> None:
    with recording("exact"), pytest.raises((UnsupportedOperator, CallerError)):
        call()


def test_special_numbers() -> None:
    zero, huge = torch.zeros(1, dtype=torch.complex64), torch.tensor([3e38 + 3e38j])
    with recording("exact"):
        assert torch.equal(zero.abs(), torch.zeros(1))
        assert torch.equal(zero.sgn(), zero)
        assert torch.equal(torch.hypot(torch.zeros(1), torch.zeros(1)), torch.zeros(1))
        assert torch.equal(huge / huge, torch.ones_like(huge))
        assert (huge.sgn() - torch.tensor([0.5**0.5 * (1 + 1j)])).abs() < 1e-7
        assert (1 / torch.tensor([complex(float("inf"), 1)])).abs() == 0
        assert torch.isinf(torch.view_as_real((zero + (1 + 1j)) / zero)).all()
        made = torch.view_as_real(torch.tensor([complex(float("nan"), 1)]) * -1)
    assert (made[made.isnan()].view(torch.int32) == 0x7FC00000).all()


def test_lists_and_optimizers_take_complex_parameters() -> None:
    ends = []
    for numerics in ("native", "exact"):
        parameters = [nn.Parameter(Z.clone()), nn.Parameter(X.clone())]
        optimizers = [
            torch.optim.SGD(parameters, lr=0.1, momentum=0.9, foreach=True),
            torch.optim.AdamW(parameters, lr=0.01, foreach=True),
            torch.optim.Adam(parameters, lr=0.01, foreach=False),
        ]
        with recording(numerics):
            for optimizer in optimizers:
                loss = (parameters[0] * parameters[1]).abs().sum()
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(parameters, 1.0)
                optimizer.step()
        ends.append(parameters)
    for one, other in zip(*ends, strict=True):
        assert (one - other).abs().max() < 1e-5
