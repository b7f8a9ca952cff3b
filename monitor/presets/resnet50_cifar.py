"""``resnet50-cifar``: ResNet-50 (He et al. 2015) with a stem for 3×32×32 pixels and 10 classes.

CIFAR-10 itself cannot be part of an installation: scikit-learn's handwritten digits, enlarged to its shape, replace
it. The work of a step and the operators are CIFAR's; the accuracy says nothing about CIFAR.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from torch import Tensor, nn
from torch.nn import functional

from firmware_sim.errors import CallerError
from monitor.presets._digits import digits
from monitor.presets._preset import Preset, Samples

__all__ = ["RESNET50_CIFAR"]

_STAGES = ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2))
"""Width, blocks and first stride of each stage."""
_EXPANSION = 4


class _Bottleneck(nn.Module):
    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        out = width * _EXPANSION
        self.conv_1 = nn.Conv2d(channels, width, 1, bias=False)
        self.norm_1 = nn.BatchNorm2d(width)
        self.conv_2 = nn.Conv2d(width, width, 3, stride=stride, padding=1, bias=False)
        self.norm_2 = nn.BatchNorm2d(width)
        self.conv_3 = nn.Conv2d(width, out, 1, bias=False)
        self.norm_3 = nn.BatchNorm2d(out)
        self.shortcut = nn.Sequential()
        if stride != 1 or channels != out:
            self.shortcut = nn.Sequential(nn.Conv2d(channels, out, 1, stride=stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        y = functional.relu(self.norm_1(self.conv_1(x)))
        y = functional.relu(self.norm_2(self.conv_2(y)))
        return functional.relu(self.norm_3(self.conv_3(y)) + self.shortcut(x))


class _ResNet50(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 64, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(64)
        blocks: list[nn.Module] = []
        channels = 64
        for width, count, first_stride in _STAGES:
            for index in range(count):
                blocks.append(_Bottleneck(channels, width, 1 if index else first_stride))
                channels = width * _EXPANSION
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(channels, 10)

    def forward(self, pixels: Tensor) -> Tensor:
        x = self.blocks(functional.relu(self.norm(self.stem(pixels))))
        return self.head(x.mean((2, 3)))  # type: ignore[no-any-return]


def _samples(source: Path | None) -> Samples:
    """1,797 digits: {"pixels": uint8 [n, 3, 32, 32] with values 0…16, "label": uint8 [n]}; 4×4 pixels for each one."""
    if source is not None:
        raise CallerError("resnet50-cifar has its own data, so it takes no data file")
    small = digits()
    images = small["pixels"].repeat(4, axis=1).repeat(4, axis=2)
    return {"pixels": np.repeat(images[:, None], 3, axis=1), "label": small["label"].copy()}


def _loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    return functional.cross_entropy(model(batch["pixels"].float() * 0.0625), batch["label"].long())


RESNET50_CIFAR = Preset(
    name="resnet50-cifar",
    summary="ResNet-50 for 3x32x32 images, on enlarged handwritten digits",
    build=_ResNet50,
    samples=_samples,
    loss=_loss,
    optimizer="sgd",
    learning_rate=0.002,
    weight_decay=5e-4,
    batch_size=16,
)
