"""Ways into the memory of the state between two steps, through PyTorch: what each does is counted or refused.

Each door is given the weights of a recorded model, and multiplies them by themselves: ``PRODUCT`` FLOP at least.
"""

from __future__ import annotations

import ctypes
import gc
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils import dlpack
from torch.utils._python_dispatch import TorchDispatchMode

WIDTH = 16
PRODUCT = 2 * WIDTH**3

DOORS: dict[str, Callable[[nn.Linear], object]] = {}


def door(name: str) -> Callable[[Callable[[nn.Linear], object]], Callable[[nn.Linear], object]]:
    def enter(function: Callable[[nn.Linear], object]) -> Callable[[nn.Linear], object]:
        DOORS[name] = function
        return function

    return enter


def product(weight: Tensor) -> Tensor:
    with torch.no_grad():
        return weight @ weight


class Plain(Tensor):
    pass


class Functional(Tensor):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


class Functions(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Dispatches(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Wrapper(Tensor):
    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> Any:
        made = Tensor._make_wrapper_subclass(cls, held.shape, dtype=held.dtype)
        made.held = held
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # PyTorch's own stub leaves out that it is a class method
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        bare = [each.held if isinstance(each, Wrapper) else each for each in args]
        return func(*bare, **(kwargs or {}))


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        return weight @ weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def _storage(weight: Tensor) -> Tensor:
    return torch.empty(0).set_(weight.untyped_storage(), 0, weight.shape, weight.stride())


def _address(weight: Tensor) -> Tensor:
    raw = (ctypes.c_float * weight.numel()).from_address(weight.data_ptr())
    return torch.frombuffer(raw, dtype=torch.float32).view(weight.shape)


TORCH: Any = torch  # as a program may call them: their stubs leave these functions and forms out
DLPACK: Any = dlpack

ALIASES: dict[str, Callable[[Tensor], Tensor]] = {
    "the parameter": lambda weight: weight,
    "detach": lambda weight: weight.detach(),
    ".data": lambda weight: weight.data,
    "a view": lambda weight: weight.detach().view(-1).view(weight.shape),
    "as_strided": lambda weight: weight.detach().as_strided(weight.shape, weight.stride()),
    "as_subclass": lambda weight: weight.detach().as_subclass(Plain),
    "a __torch_function__ subclass": lambda weight: weight.detach().as_subclass(Functional),
    "_make_subclass": lambda weight: Tensor._make_subclass(Plain, weight.detach()),
    "another Parameter": lambda weight: nn.Parameter(weight.data),
    "torch.utils.dlpack": lambda weight: DLPACK.from_dlpack(DLPACK.to_dlpack(weight.detach())),
    "torch.from_dlpack": lambda weight: TORCH.from_dlpack(weight.detach()),
    "torch.from_dlpack of NumPy": lambda weight: TORCH.from_dlpack(weight.detach().numpy()),
    "from_numpy": lambda weight: torch.from_numpy(weight.detach().numpy()),
    "as_tensor": lambda weight: torch.as_tensor(weight.detach().numpy()),
    "asarray": lambda weight: torch.asarray(weight.detach().numpy(), copy=False),
    "frombuffer": lambda weight: torch.frombuffer(weight.detach().numpy(), dtype=torch.float32).view(weight.shape),
    "frombuffer of a memoryview": lambda weight: torch.frombuffer(
        memoryview(weight.detach().numpy().data).cast("B"), dtype=torch.float32
    ).view(weight.shape),
    "ctypes": _address,
    "set_ of a storage": _storage,
    "set_ of a tensor": lambda weight: TORCH.empty(0).set_(weight.detach()),
    "integers and back": lambda weight: torch.from_numpy(weight.detach().numpy().view(np.int32)).view(torch.float32),
    "the transpose": lambda weight: weight.detach().t(),
    "a result": lambda weight: weight.detach() * 1,
    "an alias of a result": lambda weight: torch.from_numpy((weight.detach() * 1).numpy()),
    "dlpack of a result": lambda weight: TORCH.from_dlpack(weight.detach() * 1),
}


def _written(weight: Tensor) -> None:
    with torch.no_grad():
        weight.copy_(weight @ weight)


def _after(use: Callable[[Tensor], object], alias: Callable[[Tensor], Tensor]) -> Callable[[nn.Linear], object]:
    return lambda model: use(alias(model.weight))


for _name, _alias in ALIASES.items():
    DOORS[f"alias: {_name}"] = _after(product, _alias)
    if "transpose" not in _name:
        DOORS[f"write: {_name}"] = _after(_written, _alias)


@door("torch.func.functional_call")
def _(model: nn.Linear) -> object:
    with torch.no_grad():
        return torch.func.functional_call(model, {"weight": model.weight.detach()}, (model.weight.detach(),))


@door("torch.func.grad")
def _(model: nn.Linear) -> object:
    return torch.func.grad(lambda weight: (weight @ weight).sum())(model.weight.detach())


@door("torch.func.vmap")
def _(model: nn.Linear) -> object:
    return torch.func.vmap(lambda row: model.weight.detach() @ row)(model.weight.detach())


@door("torch.func.jvp")
def _(model: nn.Linear) -> object:
    weight = model.weight.detach()
    return torch.func.jvp(lambda each: each @ weight, (weight,), (weight,))


@door("torch.func.vjp")
def _(model: nn.Linear) -> object:
    weight = model.weight.detach()
    return torch.func.vjp(lambda each: each @ weight, weight)[1](weight)


@door("torch.autograd.grad")
def _(model: nn.Linear) -> object:
    return torch.autograd.grad((model.weight @ model.weight).sum(), model.weight)


@door("a backward on a copy of the parameter")
def _(model: nn.Linear) -> object:
    copy = model.weight.detach().requires_grad_()
    (copy @ copy).sum().backward()
    return copy.grad


@door("a backward hook")
def _(model: nn.Linear) -> object:
    copy = model.weight.detach().requires_grad_()
    copy.register_hook(lambda gradient: product(model.weight.detach()))
    return torch.autograd.grad(copy.sum(), copy)


@door("a forward hook")
def _(model: nn.Linear) -> object:
    handle = model.register_forward_hook(lambda *_: product(model.weight.detach()))
    with torch.no_grad():
        model(torch.ones(1, WIDTH))
    handle.remove()
    return None


@door("autograd.Function")
def _(model: nn.Linear) -> object:
    with torch.no_grad():
        return Square.apply(model.weight)


@door("a TorchFunctionMode")
def _(model: nn.Linear) -> object:
    with Functions():
        return product(model.weight)


@door("a TorchDispatchMode")
def _(model: nn.Linear) -> object:
    with Dispatches():
        return product(model.weight)


@door("a wrapper subclass")
def _(model: nn.Linear) -> object:
    with torch.no_grad():
        return Wrapper(model.weight.detach()) @ Wrapper(model.weight.detach())


@door("inference_mode")
def _(model: nn.Linear) -> object:
    with torch.inference_mode():
        return model.weight @ model.weight


@door("torch.compile, eager")
def _(model: nn.Linear) -> object:
    with torch.no_grad():
        return torch.compile(lambda weight: weight @ weight, backend="eager")(model.weight)


@door("torch.compile, aot_eager")
def _(model: nn.Linear) -> object:
    with torch.no_grad():
        return torch.compile(lambda weight: weight @ weight, backend="aot_eager")(model.weight)


@door("torch.fx")
def _(model: nn.Linear) -> object:
    with torch.no_grad():
        return torch.fx.symbolic_trace(model)(model.weight.detach())


@door("a custom operator")
def _(model: nn.Linear) -> object:
    with torch.no_grad():
        return torch.ops.chipwitness_doors.square(model.weight.detach())


@torch.library.custom_op("chipwitness_doors::square", mutates_args=())
def square(weight: Tensor) -> Tensor:
    return weight @ weight


@door("lists")
def _(model: nn.Linear) -> object:
    with torch.no_grad():
        [made] = torch._foreach_mul([model.weight], 2.0)
        return made @ made


@door("out=")
def _(model: nn.Linear) -> object:
    with torch.no_grad():
        return torch.mm(model.weight, model.weight, out=torch.empty(WIDTH, WIDTH))


@door("out= into the state")
def _(model: nn.Linear) -> object:
    other = torch.ones(WIDTH, WIDTH)
    with torch.no_grad():
        return torch.mm(other, other, out=model.weight)


@door("out= into an alias of the state")
def _(model: nn.Linear) -> object:
    other = torch.ones(WIDTH, WIDTH)
    return torch.mm(other, other, out=torch.from_numpy(model.weight.detach().numpy()))


@door("copy_ into the state")
def _(model: nn.Linear) -> object:
    with torch.no_grad():
        return model.weight.data.copy_(torch.ones(WIDTH, WIDTH))


@door("an optimizer of one's own")
def _(model: nn.Linear) -> object:
    copy = nn.Parameter(model.weight.data)
    copy.grad = product(copy)
    torch.optim.SGD([copy], lr=0.1).step()
    return None


@door("an optimizer over an alias")
def _(model: nn.Linear) -> object:
    copy = nn.Parameter(torch.from_numpy(model.weight.detach().numpy()))
    copy.grad = product(copy.detach())
    torch.optim.SGD([copy], lr=0.1).step()
    return None


@door("torch.utils.checkpoint")
def _(model: nn.Linear) -> object:
    from torch.utils.checkpoint import checkpoint

    with torch.no_grad():
        return checkpoint(lambda weight: weight @ weight, model.weight.detach(), use_reentrant=False)


@door("another thread")
def _(model: nn.Linear) -> object:
    return _in_thread(lambda: product(model.weight))


@door("another thread, on an alias")
def _(model: nn.Linear) -> object:
    return _in_thread(lambda: _written(torch.from_numpy(model.weight.detach().numpy())))


@door("a pool of threads")
def _(model: nn.Linear) -> object:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(product, model.weight).result()


def _in_thread(work: Callable[[], object]) -> object:
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(work())
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if isinstance(found[0], BaseException):
        raise found[0]
    return found[0]


@door("a finalizer")
def _(model: nn.Linear) -> object:
    class Gone:
        pass

    gone, made = Gone(), []
    weakref.finalize(gone, lambda: made.append(product(model.weight)))
    del gone
    gc.collect()
    return made


@door("a sparse copy")
def _(model: nn.Linear) -> object:
    with torch.no_grad():
        return torch.sparse.mm(model.weight.detach().to_sparse(), model.weight.detach())


@door("a compressed copy")
def _(model: nn.Linear) -> object:
    with torch.no_grad():
        return model.weight.detach().to_sparse_csr() @ torch.ones(WIDTH, WIDTH)


@door("an MKL-DNN copy")
def _(model: nn.Linear) -> object:
    with torch.no_grad():
        return model.weight.detach().to_mkldnn().to_dense()


@door("a nested tensor")
def _(model: nn.Linear) -> object:
    with torch.no_grad():
        made = torch.nested.as_nested_tensor([model.weight.detach(), model.weight.detach()])
        return torch.matmul(made, made)


@door("a Fourier transform")
def _(model: nn.Linear) -> object:
    return [torch.fft.fft(model.weight.detach()) for _ in range(8)]


@door("linear algebra")
def _(model: nn.Linear) -> object:
    return torch.linalg.inv(model.weight.detach() + WIDTH * torch.eye(WIDTH))


@door("distances")
def _(model: nn.Linear) -> object:
    return torch.cdist(model.weight.detach(), model.weight.detach(), p=1.0)


@door("a recurrent layer's kernel")
def _(model: nn.Linear) -> object:
    layer = nn.LSTM(WIDTH, WIDTH)
    with torch.inference_mode():
        return layer(model.weight.detach())


@door("an encoder layer's kernel")
def _(model: nn.Linear) -> object:
    layer = nn.TransformerEncoderLayer(WIDTH, 2, WIDTH, batch_first=True).eval()
    with torch.inference_mode():
        return layer(model.weight.detach()[None])


@door("double precision")
def _(model: nn.Linear) -> object:
    return product(model.weight.detach().double())


@door("bfloat16")
def _(model: nn.Linear) -> object:
    return product(model.weight.detach().bfloat16())


@door("einsum")
def _(model: nn.Linear) -> object:
    return torch.einsum("ij,jk->ik", model.weight.detach(), model.weight.detach())


@door("a fake tensor's constant")
def _(model: nn.Linear) -> object:
    weight = model.weight.detach()
    with FakeTensorMode() as mode:
        fake = FakeTensor(mode, torch.empty(weight.shape, device="meta"), torch.device("cpu"), constant=weight)
        return (fake @ fake).sum()


@door("torch.jit.trace")
def _(model: nn.Linear) -> object:
    import warnings

    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.trace(lambda weight: weight @ weight, model.weight.detach())(model.weight.detach())
