"""Emulated orders: each adds as it says, changes native bits, and leaves those of controlled numerics alone."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from analysis.bench.battery import run_battery
from firmware_sim.errors import DeviceError
from inspector import devices
from inspector.devices import ORDER
from inspector.devices.emulation import EmulatedArithmetic, install_from_environment
from inspector.devices.orders import EMULATED
from monitor.environment import fingerprint
from monitor.numerics import recording, replaying

ORDERS = tuple(EMULATED)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def numbers(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def fp32(value: float) -> float:
    return float(struct.unpack("<f", struct.pack("<f", value))[0])


def cut_to_24_bits(value: float) -> float:
    """Towards zero; a normal number."""
    significand, exponent = math.frexp(value)
    return math.ldexp(math.trunc(math.ldexp(significand, 24)), exponent - 24)


def dot_by_definition(order: str, a: list[float], b: list[float]) -> float:
    """One FP32 dot product in Python numbers, for the orders that are not the vendor's inside."""
    total = 0.0
    if order == "no-fma":
        for x, y in zip(a, b, strict=True):
            total = fp32(total + fp32(x * y))
        return total
    for start in range(0, len(a), 8):
        for x, y in zip(a[start : start + 8], b[start : start + 8], strict=True):
            total += x * y
        total = cut_to_24_bits(total)
    return fp32(total)


@pytest.mark.parametrize("order", ["no-fma", "tensor-core"])
def test_products_are_added_as_the_order_says(order: str) -> None:
    a, b = numbers(5, 53), numbers(53, 1100, seed=1)
    with EmulatedArithmetic(order):
        found = a @ b
    for i, j in ((0, 0), (2, 1023), (4, 1024), (3, 1099)):
        assert found[i, j].item() == dot_by_definition(order, a[i].tolist(), b[:, j].tolist())


@pytest.mark.parametrize("order", ["no-fma", "tensor-core"])
def test_sums_are_added_as_the_order_says(order: str) -> None:
    x = numbers(3, 61)
    with EmulatedArithmetic(order):
        found, mean = x.sum(1), x.mean(1)
    expected = torch.tensor([dot_by_definition(order, row, [1.0] * 61) for row in x.tolist()])
    assert torch.equal(found, expected)
    assert torch.equal(mean, expected / 61)


@pytest.mark.parametrize(("order", "parts"), [("split-k", ((0, 50), (50, 100), (100, 150), (150, 200)))])
def test_split_k_adds_the_products_of_its_parts(order: str, parts: tuple[tuple[int, int], ...]) -> None:
    a, b = numbers(30, 200), numbers(200, 40, seed=1)
    expected = torch.zeros(())
    for start, stop in parts:
        part = torch.bmm(a[None, :, start:stop], b[None, start:stop])[0]
        expected = part if start == 0 else expected + part
    with EmulatedArithmetic(order):
        assert torch.equal(a @ b, expected)


def results(dtype: torch.dtype) -> dict[str, Tensor]:
    """Every operator that an order replaces, on hard enough operands."""
    a, b = numbers(33, 190, dtype=dtype), numbers(190, 70, dtype=dtype, seed=1)
    x = numbers(2, 4, 9, 8, dtype=dtype, seed=2).requires_grad_()
    w = numbers(6, 2, 3, 3, dtype=dtype, seed=3).requires_grad_()
    v = numbers(4, 3, 3, 2, dtype=dtype, seed=4).requires_grad_()
    bias = numbers(6, dtype=dtype, seed=5).requires_grad_()
    direct = F.conv2d(x, w, bias, stride=2, padding=1, groups=2)
    turned = F.conv_transpose2d(x, v, bias, stride=2, padding=1, output_padding=1, groups=2, dilation=2)
    grads = torch.autograd.grad(direct.square().sum() + turned.square().sum(), (x, w, v, bias))
    out = torch.empty(33, 70, dtype=dtype)
    torch.mm(a, b, out=out)
    plain = {
        "mm": a @ b,
        "out": out,
        "bmm": torch.bmm(a.reshape(3, 11, 190), b.expand(3, 190, 70)),
        "addmm": torch.addmm(b[0], a, b, beta=0.5, alpha=1.5),
        "addmm_": b[:33].clone().addmm_(a, b),
        "baddbmm": torch.baddbmm(a[None, :, :70], a[None], b[None], beta=0),
        "mv": a @ b[:, 0],
        "addmv": torch.addmv(b[:33, 0], a, b[:, 0]),
        "dot": a[0] @ b[:, 0],
        "linear": F.linear(a, b.t(), b[0]),
        "einsum": torch.einsum("ij,jk->ki", a, b),
        "sum": a.sum(),
        "sum rows": a.sum(1, keepdim=True),
        "sum columns": a.sum(0),
        "sum out": torch.sum(a, 1, out=torch.empty(0, dtype=dtype)),
        "mean out": torch.mean(a, 1, out=torch.empty(0, dtype=dtype)),
        "mean": a.mean(),
        "mean rows": a.mean(-1),
        "conv1d": F.conv1d(x[:, :, 0], w[:, :, 0], padding=1, groups=2),
        "conv2d": direct,
        "turned": turned,
    }
    return plain | {f"gradient {index}": grad for index, grad in enumerate(grads)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("order", ORDERS)
def test_operators_keep_shape_type_and_value(order: str, dtype: torch.dtype) -> None:
    """Against FP64: at most 400 unit roundoffs of the largest result (K ≤ 6,270 terms)."""
    unit = {torch.float32: 2.0**-24, torch.float64: 2.0**-53, torch.bfloat16: 2.0**-9}[dtype]
    expected = results(dtype)
    with EmulatedArithmetic(order):
        found = results(dtype)
    for name, value in expected.items():
        assert (found[name].shape, found[name].dtype) == (value.shape, value.dtype), name
        scale = value.abs().max().item() + 40.0
        assert (found[name] - value).abs().max().item() <= 400 * unit * scale, name


def test_every_order_changes_native_products_and_sums() -> None:
    seen = [results(torch.float32)]
    for order in ORDERS:
        with EmulatedArithmetic(order):
            seen.append(results(torch.float32))
    for name in ("mm", "bmm", "addmm", "baddbmm", "linear", "sum", "mean", "conv2d", "gradient 0", "gradient 1"):
        assert len({bytes(one[name].detach().contiguous().numpy().tobytes()) for one in seen}) >= 4, name


@pytest.mark.parametrize("order", ORDERS)
def test_integer_products_and_sums_keep_their_bits(order: str) -> None:
    generator = torch.Generator().manual_seed(7)
    a = torch.randint(-128, 128, (40, 1030), generator=generator, dtype=torch.int8)
    b = torch.randint(-128, 128, (1030, 24), generator=generator, dtype=torch.int8)
    left, right = a.double() * 2.0**20, b.double() * 2.0**20
    expected = torch._int_mm(a, b), left @ right, a.sum(1), a.sum()
    with EmulatedArithmetic(order):
        found = torch._int_mm(a, b, out=torch.empty(40, 24, dtype=torch.int32)), left @ right, a.sum(1), a.sum()
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("order", ORDERS)
def test_empty_and_scalar_operands(order: str) -> None:
    with EmulatedArithmetic(order):
        assert (torch.zeros(3, 0) @ torch.zeros(0, 4)).tolist() == [[0.0] * 4] * 3
        assert (torch.zeros(0, 3) @ torch.zeros(3, 4)).shape == (0, 4)
        assert torch.zeros(0, 3).sum(0).tolist() == [0.0] * 3
        assert torch.zeros(0, 3).sum(1).shape == (0,)
        assert torch.tensor(2.5).sum().item() == 2.5
        assert torch.tensor([True, True]).sum().item() == 2
        assert torch.isnan(torch.tensor([1.0, float("nan")]).sum())


@pytest.mark.parametrize("order", ORDERS)
def test_an_order_lies_beneath_a_session(order: str) -> None:
    """``native`` feels it; ``exact`` does not; ``rounded`` replays what another device recorded."""
    a, b = numbers(40, 300), numbers(300, 50, seed=1)

    def run(session: Any) -> tuple[Tensor, bytes]:
        with session:
            out = torch.mm(a, b).sum(1)
        return out, session.log

    outside = {name: run(recording(name)) for name in ("native", "exact", "rounded")}
    with EmulatedArithmetic(order):
        assert not torch.equal(run(recording("native"))[0], outside["native"][0])
        assert torch.equal(run(recording("exact"))[0], outside["exact"][0])
        assert torch.equal(run(replaying("rounded", outside["rounded"][1]))[0], outside["rounded"][0])


def test_fingerprints_tell_the_orders_apart() -> None:
    found = {str(fingerprint())}
    for order in ORDERS:
        with EmulatedArithmetic(order):
            found.add(str(fingerprint()))
    assert len(found) == 1 + len(ORDERS)


def test_the_battery_is_equal_under_an_order() -> None:
    expected = run_battery("exact")
    for order in ("tiles", "tensor-core"):
        with EmulatedArithmetic(order):
            assert run_battery("exact") == expected


def test_nothing_is_computed_on_the_meta_device() -> None:
    with EmulatedArithmetic("no-fma"):
        assert (torch.empty(3, 4, device="meta") @ torch.empty(4, 5, device="meta")).shape == (3, 5)


def test_devices_name_every_order_and_say_that_they_are_emulated() -> None:
    emulated = [entry for entry in devices.DEVICES.values() if entry.kind == "emulated"]
    assert {entry.process_environment()[ORDER] for entry in emulated} == set(EMULATED)
    for entry in devices.DEVICES.values():
        assert (entry.kind == "emulated") == entry.name.startswith("emulated-") == (ORDER in entry.environment)
        assert (entry.kind == "emulated") == entry.summary.startswith("emulated:")
    assert all(entry.process_environment()["OMP_NUM_THREADS"] == "1" for entry in emulated)


def test_another_device_of_an_emulated_process_is_not_emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ORDER, "tiles")
    assert ORDER not in devices.device("native").process_environment()


def test_an_order_is_installed_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ORDER, raising=False)
    assert install_from_environment() is None
    monkeypatch.setenv(ORDER, "unheard-of")
    with pytest.raises(DeviceError, match="no emulated order 'unheard-of'"):
        install_from_environment()
    monkeypatch.setenv(ORDER, "tiles")
    torch.set_num_threads(2)
    with pytest.raises(DeviceError, match="one thread"):
        install_from_environment()
