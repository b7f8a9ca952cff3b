"""The emulated accelerator behaves as torch's devices do: memory of its own, views, writes in place, no mixing."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from firmware_sim.errors import DeviceError
from inspector.devices import emulated_accelerator
from inspector.devices.emulated_accelerator import NAME, EmulatedAccelerator
from monitor.environment import accelerator, device_name, settings
from monitor.numerics import exact, recording


@pytest.fixture(autouse=True)
def entered() -> Iterator[None]:
    with EmulatedAccelerator():
        yield


def test_tensors_lie_apart_from_the_host() -> None:
    x = torch.arange(6.0).to(NAME)
    assert x.device == torch.device(NAME, 0)
    assert not x.is_cpu
    assert torch.zeros(3, device=NAME).device == torch.tensor([1.0], device=NAME).device == x.device
    with pytest.raises(RuntimeError, match=r"aten\.add\.Tensor mixes tensors of cpu and emulated"):
        x + torch.ones(6)
    with pytest.raises(RuntimeError, match="mixes"):
        torch.equal(torch.ones(6), x)
    with pytest.raises((RuntimeError, TypeError)):
        x.numpy()
    assert x.cpu().numpy().tolist() == x.tolist() == [0, 1, 2, 3, 4, 5]
    assert (x + torch.tensor(2.0)).tolist() == [2, 3, 4, 5, 6, 7]
    assert x[torch.tensor([4, 1])].tolist() == [4, 1]
    with pytest.raises(RuntimeError, match="mixes"):
        torch.zeros(()).add_(torch.ones((), device=NAME))
    with pytest.raises(RuntimeError, match="mixes"):
        torch.add(x[0], x[1], out=torch.zeros(()))
    with pytest.raises(RuntimeError, match="mixes"):
        torch.ones(6)[x.long()]
    with pytest.raises(RuntimeError, match="mixes"):
        x[torch.tensor([1, 2])] = torch.ones(2)
    assert f"{x[2]:.1f}" == "2.0"
    assert repr(x[:2]) == "tensor([0., 1.]) on emulated:0"


def test_a_copy_to_the_host_is_a_copy() -> None:
    x = torch.zeros(3, device=NAME)
    copied, again = x.cpu(), x.to(NAME)
    x.add_(1)
    assert copied.tolist() == [0, 0, 0]
    assert again is x
    copied.copy_(x)
    assert copied.tolist() == [1, 1, 1]


def test_views_share_memory_and_writes_in_place_return_their_tensor() -> None:
    x = torch.zeros(2, 3, device=NAME)
    row = x[1]
    assert row.add_(1) is row
    assert x.tolist() == [[0, 0, 0], [1, 1, 1]]
    assert row.untyped_storage()._cdata == x.untyped_storage()._cdata
    assert row.data_ptr() == x.data_ptr() + 12
    torch._foreach_add_([x, row], 1)
    assert x.tolist() == [[1, 1, 1], [3, 3, 3]]
    with pytest.raises(RuntimeError, match="cannot resize or turn"):
        x.resize_(4)
    square = torch.zeros(2, 2, device=NAME)
    with pytest.raises(RuntimeError, match="cannot resize or turn"):
        square.t_()


def test_parameters_can_be_put_elsewhere_and_copied() -> None:
    layer = nn.Linear(2, 2, device=NAME)
    place = torch.zeros(2, 2, device=NAME)
    layer.weight.data = place
    with torch.no_grad():
        layer.weight.add_(1)
    assert place.tolist() == [[1, 1], [1, 1]]
    twin = copy.deepcopy(layer)
    assert isinstance(twin.weight, nn.Parameter)
    with torch.no_grad():
        twin.weight.add_(1)
    assert place.tolist() == [[1, 1], [1, 1]]


def test_process_keeps_tensors_where_its_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    assert accelerator() == torch.device("cpu")
    assert settings()["accelerator"] is None
    monkeypatch.setenv("CHIPWITNESS_ACCELERATOR", NAME)
    assert accelerator() == torch.device(NAME, 0)
    assert settings()["accelerator"] == "emulated:0"
    assert device_name(torch.device("cuda", 0)) == "cuda"
    monkeypatch.setenv("CHIPWITNESS_DEVICE", "emulated-accelerator")
    assert device_name(accelerator()) == "emulated-accelerator"
    monkeypatch.setenv("CHIPWITNESS_ACCELERATOR", "vulkan")
    with pytest.raises(DeviceError, match="torch finds no device 'vulkan'"):
        accelerator()


def test_a_torch_that_cannot_do_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.utils import backend_registration

    emulated_accelerator._register.cache_clear()
    monkeypatch.delattr(backend_registration, "_setup_privateuseone_for_python_backend")
    try:
        with pytest.raises(DeviceError, match="cannot emulate an accelerator"):
            EmulatedAccelerator()
    finally:
        emulated_accelerator._register.cache_clear()
        monkeypatch.setattr(backend_registration, "_setup_privateuseone_for_python_backend", lambda *_: None, False)
        monkeypatch.setattr(emulated_accelerator, "_claim_kernels", lambda: None)
        emulated_accelerator._register()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("probability", [0.1, 0.25, 0.9])
def test_dropout_in_one_piece_gives_the_bits_of_its_parts(dtype: torch.dtype, probability: float) -> None:
    x, grad = (torch.randn(200, generator=torch.Generator().manual_seed(seed)).to(dtype) for seed in (1, 2))
    found = []
    for place in ("cpu", NAME):
        torch.manual_seed(1)
        with torch.no_grad(), recording("exact"):
            found.append(functional.dropout(x.to(place), probability).cpu())
    assert torch.equal(*found)
    mask = found[0] != 0
    with torch.no_grad(), recording("exact"):
        noise = mask.to(dtype).div_(1 - probability)
        slopes = torch.ops.aten.native_dropout_backward.default(grad, mask, 1 / (1 - probability)), grad * noise
    assert torch.equal(*slopes)


@pytest.mark.parametrize("work", ["small", "large", "batched", "infinite"])
def test_exact_kernels_give_the_bits_of_the_host(work: str) -> None:
    generator = torch.Generator().manual_seed(3)
    m, k, n = (200, 170, 190) if work == "large" else (9, 70, 8)
    a, b = torch.randn(m, k, generator=generator), torch.randn(k, n, generator=generator)
    if work == "batched":
        a = torch.randn(3, m, k, generator=generator)
    if work == "infinite":
        a[0, 0], a[1, 1], a[1, 2] = torch.inf, torch.inf, -torch.inf
    functions: list[Callable[[Tensor, Tensor], Tensor]] = [exact.matmul, lambda x, _: exact.sum(x, [0])]
    functions += [lambda x, _: exact.sum(x, None), lambda x, y: exact.matmul(x.bfloat16(), y.bfloat16())]
    for function in functions:
        mine, theirs = function(a, b), function(a.to(NAME), b.to(NAME)).cpu()
        assert torch.equal(mine.view(torch.int32), theirs.view(torch.int32))
