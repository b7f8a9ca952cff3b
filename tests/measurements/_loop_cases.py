"""Training loops as their authors write them: models, optimizers and loops of many kinds, in plain PyTorch.

Each case makes what a loop works with; the body of a step is ordinary PyTorch, and knows of no recorder.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations
from torch.optim import Optimizer

__all__ = ["Batch", "Case", "Loop", "plain_cases"]

Batch = Any
_CLASSES = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """What a loop works with.

    Attributes:
        batch: of so many samples, from a generator.
        body: of one step, given a batch; its loss, if it has one.
        options: of the recorder beside model and optimizer.
        between: what the loop does between two steps, given the number of the last one.
    """

    model: nn.Module
    optimizer: Any
    batch: Callable[[int, torch.Generator], Batch]
    body: Callable[[Batch], Tensor | None]
    options: Mapping[str, Any] = field(default_factory=dict)
    between: Callable[[int], None] = lambda _: None


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One loop.

    Attributes:
        package: that it comes from.
        make: the loop, from the seed that PyTorch's generator has.
        samples: in a batch, unless somebody wants another number.
    """

    name: str
    package: str
    make: Callable[[], Loop]
    samples: int = 6


def _supervised(
    model: nn.Module,
    sample: tuple[int, ...],
    *,
    optimizer: Callable[..., Optimizer] = torch.optim.AdamW,
    loss: Callable[[Any, Batch], Tensor] | None = None,
    make: Callable[[int, torch.Generator], Batch] | None = None,
    **options: Any,
) -> Loop:
    """A classifier of samples of one shape, or what ``make`` and ``loss`` say."""
    chosen = optimizer(model.parameters(), lr=1e-2)

    def batch(size: int, generator: torch.Generator) -> Batch:
        labels = torch.randint(_CLASSES, (size,), generator=generator)
        return torch.randn(size, *sample, generator=generator), labels

    def body(given: Batch) -> Tensor:
        chosen.zero_grad()
        value = functional.cross_entropy(model(given[0]), given[1]) if loss is None else loss(model, given)
        value.backward()  # type: ignore[no-untyped-call]
        chosen.step()
        return value

    return Loop(model=model, optimizer=chosen, batch=make or batch, body=body, options=options)


def _head(*layers: nn.Module, width: int) -> nn.Sequential:
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(width, _CLASSES))


class _First(nn.Module):
    """The first part of what a module returns."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.inner(x)[0]
        return found


class _Applied(nn.Module):
    """A function, as a layer."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def _mlp(width: int = 8) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, 16), nn.ReLU(), nn.Linear(16, _CLASSES))


LAYERS: Mapping[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "perceptron": (_mlp, (8,)),
    "convolution 1-D": (lambda: _head(nn.Conv1d(3, 4, 3, padding=1), nn.ReLU(), width=24), (3, 6)),
    "convolution 2-D": (lambda: _head(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), width=144), (3, 6, 6)),
    "convolution 3-D": (lambda: _head(nn.Conv3d(2, 3, 3, padding=1), nn.ReLU(), width=192), (2, 4, 4, 4)),
    "convolution 3-D, strided, in groups": (
        lambda: _head(nn.Conv3d(2, 4, 2, stride=2, groups=2), nn.ReLU(), width=32),
        (2, 4, 4, 4),
    ),
    "transposed convolution": (lambda: _head(nn.ConvTranspose2d(2, 3, 3, stride=2), width=243), (2, 4, 4)),
    "transposed convolution 3-D": (lambda: _head(nn.ConvTranspose3d(2, 2, 2, stride=2), width=432), (2, 3, 3, 3)),
    "depthwise convolution": (lambda: _head(nn.Conv2d(4, 4, 3, groups=4), width=64), (4, 6, 6)),
    "GRU": (lambda: _head(_First(nn.GRU(3, 4)), width=4), (3,)),
    "GRU, batch first": (lambda: _head(_First(nn.GRU(3, 4, batch_first=True)), width=20), (5, 3)),
    "GRU, two layers, both ways": (
        lambda: _head(_First(nn.GRU(3, 4, num_layers=2, bidirectional=True, batch_first=True)), width=40),
        (5, 3),
    ),
    "LSTM": (lambda: _head(_First(nn.LSTM(3, 4)), width=4), (3,)),
    "LSTM, batch first": (lambda: _head(_First(nn.LSTM(3, 4, batch_first=True)), width=20), (5, 3)),
    "LSTM, projected, with dropout": (
        lambda: _head(
            _First(nn.LSTM(3, 4, num_layers=2, dropout=0.2, proj_size=2, batch_first=True)),
            width=10,
        ),
        (5, 3),
    ),
    "RNN": (lambda: _head(_First(nn.RNN(3, 4, batch_first=True)), width=20), (5, 3)),
    "weight norm": (
        lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(8, 16)), nn.ReLU(), nn.Linear(16, _CLASSES)),
        (8,),
    ),
    "spectral norm": (
        lambda: nn.Sequential(parametrizations.spectral_norm(nn.Linear(8, 16)), nn.ReLU(), nn.Linear(16, _CLASSES)),
        (8,),
    ),
    "upsampling, nearest": (lambda: _head(nn.Upsample(scale_factor=2), nn.Conv2d(2, 2, 3), width=72), (2, 4, 4)),
    "upsampling, bilinear": (
        lambda: _head(nn.Conv2d(2, 2, 1), nn.Upsample(scale_factor=2, mode="bilinear"), width=128),
        (2, 4, 4),
    ),
    "upsampling, bilinear, aligned corners": (
        lambda: _head(nn.Conv2d(2, 2, 1), nn.Upsample(size=(7, 5), mode="bilinear", align_corners=True), width=70),
        (2, 4, 4),
    ),
    "upsampling, bicubic": (
        lambda: _head(nn.Conv2d(2, 2, 1), nn.Upsample(scale_factor=2, mode="bicubic"), width=128),
        (2, 4, 4),
    ),
    "upsampling 1-D": (
        lambda: _head(nn.Conv1d(2, 2, 1), nn.Upsample(scale_factor=2, mode="linear"), width=16),
        (2, 4),
    ),
    "upsampling 3-D": (lambda: _head(nn.Conv3d(2, 2, 1), nn.Upsample(scale_factor=2), width=128), (2, 2, 2, 2)),
    "pooling, largest": (lambda: _head(nn.Conv2d(2, 4, 3), nn.MaxPool2d(2), width=16), (2, 6, 6)),
    "pooling 1-D": (lambda: _head(nn.Conv1d(2, 4, 3), nn.MaxPool1d(2), nn.AvgPool1d(2), width=4), (2, 6)),
    "pooling, largest, 3-D": (lambda: _head(nn.Conv3d(2, 2, 1), nn.MaxPool3d(2), width=16), (2, 4, 4, 4)),
    "pooling, mean, 3-D": (lambda: _head(nn.Conv3d(2, 2, 1), nn.AvgPool3d(2), width=16), (2, 4, 4, 4)),
    "pooling, adaptive": (lambda: _head(nn.Conv2d(2, 4, 3), nn.AdaptiveAvgPool2d(2), width=16), (2, 7, 7)),
    "pooling, adaptive, largest": (lambda: _head(nn.Conv2d(2, 4, 3), nn.AdaptiveMaxPool2d(2), width=16), (2, 7, 7)),
    "pooling, whole windows": (lambda: _head(nn.Conv2d(2, 4, 3), nn.AvgPool2d(2, ceil_mode=True), width=36), (2, 7, 7)),
    "batch norm": (lambda: _head(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), width=64), (2, 6, 6)),
    "group norm": (lambda: _head(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), width=64), (2, 6, 6)),
    "instance norm": (lambda: _head(nn.Conv2d(2, 4, 3), nn.InstanceNorm2d(4, affine=True), width=64), (2, 6, 6)),
    "layer norm": (lambda: _head(nn.Linear(8, 8), nn.LayerNorm(8), width=8), (8,)),
    "RMS norm": (lambda: _head(nn.Linear(8, 8), nn.RMSNorm(8), width=8), (8,)),
    "local response norm": (lambda: _head(nn.Conv2d(2, 4, 3), nn.LocalResponseNorm(2), width=64), (2, 6, 6)),
    "activations": (
        lambda: _head(
            nn.Linear(8, 8),
            *(nn.GELU(), nn.SiLU(), nn.Mish(), nn.ELU(), nn.SELU(), nn.CELU(), nn.Softplus(), nn.Hardswish()),
            *(nn.LeakyReLU(), nn.PReLU(), nn.ReLU6(), nn.Tanhshrink(), nn.Softsign(), nn.LogSigmoid()),
            width=8,
        ),
        (8,),
    ),
    "gated linear unit": (lambda: _head(nn.Linear(8, 8), nn.GLU(), width=4), (8,)),
    "transformer encoder": (
        lambda: _head(nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2), width=32),
        (4, 8),
    ),
    "transformer encoder, evaluated": (
        lambda: nn.Sequential(
            nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)
            .eval()
            .requires_grad_(False),
            nn.Flatten(),
            nn.Linear(32, _CLASSES),
        ),
        (4, 8),
    ),
    "multi-head attention": (lambda: _head(_SelfAttention(), width=32), (4, 8)),
    "pixel shuffle": (lambda: _head(nn.Conv2d(2, 4, 1), nn.PixelShuffle(2), width=16), (2, 2, 2)),
    "channels last": (
        lambda: _head(nn.Conv2d(3, 4, 3), nn.ReLU(), width=64).to(memory_format=torch.channels_last),  # type: ignore[call-overload]
        (3, 6, 6),
    ),
    "dropout": (
        lambda: _head(nn.Linear(8, 8), nn.Dropout(0.3), nn.AlphaDropout(0.2), nn.Linear(8, 8), width=8),
        (8,),
    ),
    "dropout of channels": (lambda: _head(nn.Conv2d(2, 4, 3), nn.Dropout2d(0.3), width=64), (2, 6, 6)),
    "einsum": (
        lambda: nn.Sequential(
            nn.Linear(8, 8), _Applied(lambda x: torch.einsum("bi,bj->bij", x, x).flatten(1)), nn.Linear(64, _CLASSES)
        ),
        (8,),
    ),
    "histogram of activations": (
        lambda: nn.Sequential(
            nn.Linear(8, 8),
            _Applied(lambda x: x * torch.histc(x.detach(), bins=8, min=-2, max=2)),
            nn.Linear(8, _CLASSES),
        ),
        (8,),
    ),
    "smallest and largest": (
        lambda: nn.Sequential(
            nn.Linear(8, 8),
            _Applied(lambda x: (x - torch.aminmax(x.detach())[0]) / 4.0),
            nn.Linear(8, _CLASSES),
        ),
        (8,),
    ),
    "cumulative operators": (
        lambda: nn.Sequential(nn.Linear(8, 8), _Applied(lambda x: x.cumsum(1) * 0.1), nn.Linear(8, _CLASSES)),
        (8,),
    ),
    "cumulative product": (
        lambda: nn.Sequential(nn.Linear(8, 8), _Applied(lambda x: x.cumprod(1)), nn.Linear(8, _CLASSES)),
        (8,),
    ),
    "product": (
        lambda: nn.Sequential(nn.Linear(8, 8), _Applied(lambda x: x * x.prod(1, keepdim=True)), nn.Linear(8, _CLASSES)),
        (8,),
    ),
}


class _SelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.MultiheadAttention(8, 2, batch_first=True, dropout=0.1)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.heads(x, x, x, need_weights=True)[0]
        return found


def _noisy(parameters: Any, lr: float) -> Optimizer:
    return _SignOfMomentum(parameters, lr)


class _SignOfMomentum(Optimizer):
    """Lion (Chen et al. 2023, Algorithm 2), with a counter of updates that is a plain number."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99), "weight_decay": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update."""
        for group in self.param_groups:
            first, second = group["betas"]
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state = self.state[weight]
                if not state:
                    state["count"], state["average"] = 0, torch.zeros_like(weight)
                state["count"] += 1
                weight.mul_(1 - group["lr"] * group["weight_decay"])
                direction = (state["average"] * first + weight.grad * (1 - first)).sign()
                weight.add_(direction, alpha=-group["lr"])
                state["average"].mul_(second).add_(weight.grad, alpha=1 - second)


OPTIMIZERS: Mapping[str, Callable[..., Optimizer]] = {
    "SGD": lambda p, lr: torch.optim.SGD(p, lr, momentum=0.9, nesterov=True, weight_decay=1e-3),
    "Adam": lambda p, lr: torch.optim.Adam(p, lr, amsgrad=True),
    "Adam, fused": lambda p, lr: torch.optim.Adam(p, lr, fused=True),
    "AdamW": lambda p, lr: torch.optim.AdamW(p, lr),
    "AdamW, foreach": lambda p, lr: torch.optim.AdamW(p, lr, foreach=True),
    "AdamW, fused": lambda p, lr: torch.optim.AdamW(p, lr, fused=True),
    "SGD, fused": lambda p, lr: torch.optim.SGD(p, lr, momentum=0.9, fused=True),
    "Adagrad, fused": lambda p, lr: torch.optim.Adagrad(p, lr, fused=True),
    "NAdam": lambda p, lr: torch.optim.NAdam(p, lr),
    "NAdam, foreach": lambda p, lr: torch.optim.NAdam(p, lr, foreach=True),
    "RAdam": lambda p, lr: torch.optim.RAdam(p, lr),
    "Adamax": lambda p, lr: torch.optim.Adamax(p, lr),
    "RMSprop": lambda p, lr: torch.optim.RMSprop(p, lr, momentum=0.9, centered=True),
    "Rprop": lambda p, lr: torch.optim.Rprop(p, lr),
    "Adagrad": lambda p, lr: torch.optim.Adagrad(p, lr),
    "Adadelta": lambda p, lr: torch.optim.Adadelta(p, lr),
    "ASGD": lambda p, lr: torch.optim.ASGD(p, lr),
    "Adafactor": lambda p, lr: torch.optim.Adafactor(p, lr),
    "Lion of one's own, counting in Python": _SignOfMomentum,
    "Muon": lambda p, lr: torch.optim.Muon([each for each in p if each.dim() == 2], lr),
}


LOSSES: Mapping[str, Callable[[nn.Module, Batch], Tensor]] = {
    "mean squares": lambda m, b: functional.mse_loss(m(b[0]), functional.one_hot(b[1], _CLASSES).float()),
    "absolute": lambda m, b: functional.l1_loss(m(b[0]), functional.one_hot(b[1], _CLASSES).float()),
    "Huber": lambda m, b: functional.huber_loss(m(b[0]), functional.one_hot(b[1], _CLASSES).float()),
    "binary cross-entropy": lambda m, b: functional.binary_cross_entropy_with_logits(
        m(b[0]), functional.one_hot(b[1], _CLASSES).float()
    ),
    "divergence": lambda m, b: functional.kl_div(
        m(b[0]).log_softmax(1), functional.one_hot(b[1], _CLASSES).float().softmax(1), reduction="batchmean"
    ),
    "hinge": lambda m, b: functional.multi_margin_loss(m(b[0]), b[1]),
    "cosine": lambda m, b: functional.cosine_embedding_loss(
        m(b[0]), functional.one_hot(b[1], _CLASSES).float(), torch.ones(len(b[1]))
    ),
    "triplets": lambda m, b: functional.triplet_margin_loss(m(b[0]), m(b[0] + 1.0), m(-b[0])),
    "contrast": lambda m, b: functional.cross_entropy(
        functional.normalize(m(b[0])) @ functional.normalize(m(b[0] * 1.1)).t() * 5.0, torch.arange(len(b[1]))
    ),
    "smoothed labels": lambda m, b: functional.cross_entropy(m(b[0]), b[1], label_smoothing=0.1),
    "Poisson": lambda m, b: functional.poisson_nll_loss(m(b[0]), functional.one_hot(b[1], _CLASSES).float()),
    "Gaussian": lambda m, b: functional.gaussian_nll_loss(
        m(b[0]), functional.one_hot(b[1], _CLASSES).float(), m(b[0]).exp()
    ),
    "connectionist temporal": lambda m, b: functional.ctc_loss(
        m(b[0]).view(2, -1, _CLASSES).transpose(0, 1).log_softmax(2),
        torch.tensor([[1, 2], [3, 3]]),
        torch.full((2,), len(b[1]) // 2),
        torch.tensor([2, 1]),
    ),
    "gradient penalty": lambda m, b: functional.cross_entropy(m(b[0]), b[1]) + _penalty(m, b[0]),
    "clipped gradients": lambda m, b: functional.cross_entropy(m(b[0]), b[1]),
}


def _penalty(model: nn.Module, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    penalty: Tensor = (torch.linalg.vector_norm(slope, dim=1) - 1.0).square().mean()
    return penalty


def plain_cases() -> Iterator[Case]:
    """All cases that need PyTorch alone."""
    for name, (make, shape) in LAYERS.items():
        yield Case(name=name, package="torch", make=_loop_of_layer(make, shape))
    for name, optimizer in OPTIMIZERS.items():
        yield Case(name=name, package="torch", make=_loop_of_optimizer(optimizer))
    for name, loss in LOSSES.items():
        yield Case(name=f"loss: {name}", package="torch", make=_loop_of_loss(loss))
    for name, loop in LOOPS.items():
        yield Case(name=name, package="torch", make=loop)


def _loop_of_layer(make: Callable[[], nn.Module], shape: tuple[int, ...]) -> Callable[[], Loop]:
    return lambda: _supervised(make(), shape)


def _loop_of_optimizer(optimizer: Callable[..., Optimizer]) -> Callable[[], Loop]:
    return lambda: _supervised(_mlp(), (8,), optimizer=optimizer)


def _loop_of_loss(loss: Callable[[nn.Module, Batch], Tensor]) -> Callable[[], Loop]:
    return lambda: _supervised(_mlp(), (8,), loss=loss)


def _pairs(size: int, generator: torch.Generator) -> Batch:
    return torch.randn(size, 8, generator=generator), torch.randint(_CLASSES, (size,), generator=generator)


def _bag(mode: str) -> Callable[[], Loop]:
    def make(size: int, generator: torch.Generator) -> Batch:
        ids = torch.randint(11, (size, 4), generator=generator)
        return ids, torch.randint(_CLASSES, (size,), generator=generator)

    return lambda: _supervised(nn.Sequential(nn.EmbeddingBag(11, 8, mode=mode), nn.Linear(8, _CLASSES)), (), make=make)


def _buckets() -> Loop:
    """Relative positions in buckets of logarithmic width, as T5 has them (Raffel et al. 2020, section 2.1)."""
    bias = nn.Embedding(8, 1)
    model = nn.ModuleDict({"bias": bias, "body": _mlp()})

    def loss(_: Any, batch: Batch) -> Tensor:
        places = torch.arange(len(batch[0]))
        distance = (places[:, None] - places[None]).clamp(min=0)
        far = 4 + (torch.log(distance.float() / 4) / 2.0 * 4).to(torch.long)
        bucket = torch.where(distance < 4, distance, torch.minimum(far, torch.full_like(far, 7)))
        mixed = torch.softmax(bias(bucket)[..., 0], 1) @ batch[0]
        return functional.cross_entropy(model["body"](mixed), batch[1])

    return _supervised(model, (8,), loss=loss)


def _adversarial() -> Loop:
    """Two models, each with an optimizer of its own."""
    makes, judges = nn.Linear(4, 8), nn.Sequential(nn.Linear(8, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1))
    first = torch.optim.Adam(makes.parameters(), 1e-2, betas=(0.5, 0.999))
    second = torch.optim.Adam(judges.parameters(), 1e-2, betas=(0.5, 0.999))

    def batch(size: int, generator: torch.Generator) -> Batch:
        return torch.randn(size, 8, generator=generator), torch.randn(size, 4, generator=generator)

    def body(given: Batch) -> Tensor:
        real, noise = given
        made = makes(noise)
        second.zero_grad()
        ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)
        score = functional.binary_cross_entropy_with_logits
        loss = score(judges(real), ones) + score(judges(made.detach()), zeros)
        loss.backward()  # type: ignore[no-untyped-call]
        second.step()
        first.zero_grad()
        score(judges(made), ones).backward()  # type: ignore[no-untyped-call]
        first.step()
        return loss

    model = nn.ModuleDict({"generator": makes, "discriminator": judges})
    return Loop(model=model, optimizer=[first, second], batch=batch, body=body)


def _averaged(kind: str) -> Callable[[], Loop]:
    def make() -> Loop:
        model = _mlp()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        ema = None
        if kind == "EMA":
            ema = torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)  # type: ignore[no-untyped-call]
        average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=ema)

        def body(given: Batch) -> Tensor:
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(given[0]), given[1])
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            average.update_parameters(model)
            return loss

        return Loop(model=model, optimizer=optimizer, batch=_pairs, body=body, options={"state": [average]})

    return make


def _unfrozen() -> Loop:
    """The first layer learns from the second step on."""
    model: Any = _mlp()
    model[0].requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)

    def body(given: Batch) -> Tensor:
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(given[0]), given[1])
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss

    def between(_: int) -> None:
        model[0].requires_grad_(True)

    return Loop(model=model, optimizer=optimizer, batch=_pairs, body=body, between=between)


def _added_group() -> Loop:
    """Fine-tuning that adds a parameter group in mid-run."""
    loop = _unfrozen()
    model: Any = loop.model
    optimizer = torch.optim.AdamW(model[2].parameters(), 1e-2)

    def body(given: Batch) -> Tensor:
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(given[0]), given[1])
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss

    def between(step: int) -> None:
        model[0].requires_grad_(True)
        if step == 1:
            optimizer.add_param_group({"params": list(model[0].parameters())})

    return Loop(model=model, optimizer=optimizer, batch=_pairs, body=body, between=between)


def _annealed() -> Loop:
    """The weight of a term of the loss falls from step to step, as lab and inspector agree that it may."""
    model = _mlp()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    steps = itertools.count(1)

    def body(given: Batch) -> Tensor:
        optimizer.zero_grad()
        scores = model(given[0])
        loss: Tensor = functional.cross_entropy(scores, given[1]) + scores.square().mean() * (0.5 / next(steps))
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss

    return Loop(model=model, optimizer=optimizer, batch=_pairs, body=body, options={"free_slots": True})


def _inference() -> Loop:
    """Steps that compute, and have no optimizer."""
    model = _mlp().eval().requires_grad_(False)

    def body(given: Batch) -> Tensor:
        with torch.no_grad():
            return functional.cross_entropy(model(given[0]), given[1])

    return Loop(model=model, optimizer=None, batch=_pairs, body=body)


def _evaluated() -> Loop:
    """Every other step evaluates."""
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, _CLASSES))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    steps = itertools.count(1)

    def body(given: Batch) -> Tensor:
        if next(steps) % 2 == 0:
            model.eval()
            with torch.no_grad():
                return functional.cross_entropy(model(given[0]), given[1])
        model.train()
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(given[0]), given[1])
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss

    return Loop(model=model, optimizer=optimizer, batch=_pairs, body=body)


def _compiled(inside: bool) -> Callable[[], Loop]:
    def make() -> Loop:
        model: Any = _mlp()
        if inside:
            model.compile()
        else:
            model = torch.compile(model)
        return _supervised(model, (8,))

    return make


def _scheduled() -> Loop:
    model = _mlp()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)

    def body(given: Batch) -> Tensor:
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(given[0]), given[1])
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        return loss

    return Loop(model=model, optimizer=optimizer, batch=_pairs, body=body)


def _accumulated() -> Loop:
    model = _mlp()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)

    def body(given: Batch) -> Tensor | None:
        optimizer.zero_grad()
        loss = None
        for x, y in zip(given[0].chunk(2), given[1].chunk(2), strict=True):
            loss = functional.cross_entropy(model(x), y) / 2
            loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss

    return Loop(model=model, optimizer=optimizer, batch=_pairs, body=body)


class _Experts(nn.Module):
    """A mixture of experts: each sample goes to the two that score highest (Shazeer et al. 2017)."""

    def __init__(self) -> None:
        super().__init__()
        self.route = nn.Linear(8, 4, bias=False)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.out = nn.Linear(8, _CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.route(x).softmax(1).topk(2, 1)
        load = torch.histc(chosen.float(), bins=4, min=0, max=3)
        mixed = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            share = (weights * (chosen == number)).sum(1, keepdim=True)
            mixed = mixed + share * expert(x)
        scores: Tensor = self.out(mixed + load.mean())
        return scores


LOOPS: Mapping[str, Callable[[], Loop]] = {
    "embedding bag, sum": _bag("sum"),
    "embedding bag, mean": _bag("mean"),
    "embedding bag, max": _bag("max"),
    "relative positions in buckets": _buckets,
    "mixture of experts": lambda: _supervised(_Experts(), (8,)),
    "adversarial, two optimizers": _adversarial,
    "averaged weights (SWA)": _averaged("SWA"),
    "averaged weights (EMA)": _averaged("EMA"),
    "unfreezing in mid-run": _unfrozen,
    "another parameter group in mid-run": _added_group,
    "annealed weight of a loss": _annealed,
    "inference without an optimizer": _inference,
    "evaluation between training steps": _evaluated,
    "torch.compile": _compiled(False),
    "module.compile": _compiled(True),
    "schedule and clipped gradients": _scheduled,
    "accumulated gradients": _accumulated,
}
